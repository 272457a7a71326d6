"""Logs through the standard library's rotating handler, and opens a second log when it is told to by a file."""

import logging
import logging.handlers
import os
import sys
import time

where = sys.argv[1]
log = logging.getLogger("train")
log.setLevel(logging.INFO)
handler = logging.handlers.RotatingFileHandler(os.path.join(where, "train.log"), maxBytes=2000, backupCount=2)
handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
log.addHandler(handler)
step = 0
while not os.path.exists(os.path.join(where, "move")):
    step += 1
    log.info("step=%d loss=1.0 tok/s=5", step)
    time.sleep(0.02)
os.makedirs(os.path.join(where, "later"))
with open(os.path.join(where, "later", "second.log"), "w", buffering=1) as second:
    while True:
        step += 1
        print(f"step={step} loss=1.0 tok/s=5", file=second)
        time.sleep(0.02)

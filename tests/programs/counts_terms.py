"""Counts the TERMs it gets, checkpoints after the first, and ends well."""

import os
import signal
import time

terms = 0


def on_term(number: int, frame: object) -> None:
    global terms
    terms += 1


signal.signal(signal.SIGTERM, on_term)
step = 0
while not terms:
    step += 1
    print(f"step={step} loss=1.0 tok/s=10")
    time.sleep(0.02)
for _ in range(20):
    time.sleep(0.05)
with open(os.path.join(os.environ["SPECCTL_RUN_DIR"], "terms"), "w") as file:
    file.write(str(terms))

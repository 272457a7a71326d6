"""Forgets who it is: no environment, no parent, no session, no output of its launcher's; it writes a log of its own."""

import os
import sys
import time

if len(sys.argv) == 2:
    if os.fork():
        time.sleep(2)
        sys.exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 256)
    os.chdir("/")
    os.execve(sys.executable, ["idle", os.path.abspath(__file__), sys.argv[1], "again"], {})
with open(f"{sys.argv[1]}.pid", "w") as file:
    file.write(str(os.getpid()))
step = 0
while True:
    step += 1
    with open(sys.argv[1], "a") as log:
        log.write(f"step={step} loss=1.0 tok/s=5\n")
    time.sleep(0.05)

"""Forks and leaves, again and again, each time in a session of its own: gone before one can look at it."""

import os
import time

os.write(1, b"step=1 tok/s=1\nstep=2 tok/s=1\n")
started = time.monotonic()
while time.monotonic() < started + 120:
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.002)

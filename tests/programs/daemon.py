"""Forks a grandchild that steps and then fails; the program itself leaves at once, with 0."""

import os
import sys
import time

if os.fork():
    sys.exit(0)
os.setsid()
if os.fork():
    os._exit(0)
for step in range(1, 40):
    os.write(1, f"step={step} tok/s=5\n".encode())
    time.sleep(0.05)
os._exit(9)

"""Runs itself again with an empty environment, as `env -i` does."""

import os
import sys
import time

if "SPECCTL_NONCE" in os.environ:
    os.execve(sys.executable, [sys.executable, __file__], {})
step = 0
while True:
    step += 1
    os.write(1, f"step={step} tok/s=5\n".encode())
    time.sleep(0.05)

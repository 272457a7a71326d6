"""Talks, but never steps."""

import time

while True:
    print("loading weights")
    time.sleep(0.1)

"""Steps for ever: `steps.py [SECONDS]` between two steps."""

import sys
import time

pause = float(sys.argv[1]) if len(sys.argv) > 1 else 0.05
step = 0
while True:
    step += 1
    print(f"step={step} loss={9 / step:.4f} tok/s={1000 + step % 7}")
    time.sleep(pause)

"""drafter-0 prints a traceback of its own, and is stepping again afterwards."""

import sys
import threading
import time
import traceback


def work() -> None:
    step = 0
    while True:
        step += 1
        if step == 3:
            try:
                raise RuntimeError("out of memory, retrying with a smaller batch")
            except RuntimeError:
                print("Exception in thread drafter-0:", file=sys.stderr)
                traceback.print_exc()
        print(f"step={step} worker=drafter-0 loss=2.0 tok/s=300", flush=True)
        time.sleep(0.05)


threading.Thread(target=work, name="drafter-0").start()

"""After a TERM it writes a checkpoint for a while, and says so in its heartbeat."""

import json
import os
import signal
import time

run = os.environ["SPECCTL_RUN_DIR"]
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))


def beat(checkpointing: bool) -> None:
    value = {"nonce": os.environ["SPECCTL_NONCE"], "phase": "train", "step": step, "time": time.time()}
    with open(os.path.join(run, "beat"), "w") as file:
        json.dump({**value, "checkpointing": checkpointing}, file)
    os.replace(os.path.join(run, "beat"), os.path.join(run, "heartbeat.json"))


step = 0
while not asked:
    step += 1
    print(f"step={step} loss=1.0 tok/s=10")
    beat(False)
    time.sleep(0.05)
beat(True)
time.sleep(3)
open(os.path.join(run, "saved"), "w").close()

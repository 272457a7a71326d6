"""Writes the records of a trainer by itself, quickly: recorded.py STEPS [hostile|fails|zero]."""

import json
import os
import sys
import threading
import time

STEPS, HOW = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
HOME, NONCE = os.environ["SPECCTL_RUN_DIR"], os.environ["SPECCTL_NONCE"]
EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
BEGAN = time.time()


def append(name, **fields):
    head = {"time": BEGAN, "source": "trainer", "attempt": 1, "nonce": NONCE}
    with open(f"{HOME}/{name}", "a") as file:
        file.write(json.dumps({**head, **fields}) + "\n")


print("step=1 loss=9 tok/s=1", flush=True)
for number, phase in enumerate(("import", "compile_warmup", "train")):
    append("events.jsonl", time=BEGAN + number, event="phase", phase=phase)
workers = ["target-0", "drafter-0", "drafter-1"] + [EVIL] * (HOW == "hostile")
for worker in workers:
    append("events.jsonl", time=BEGAN + 2, event="worker_up", worker=worker)
with open(f"{HOME}/metrics.jsonl", "a") as file:
    for step in range(1, STEPS + 1):
        # One step in a thousand is an outlier, and there is a hole in the middle.
        if 0.45 < step / STEPS < 0.55:
            continue
        loss = 50.0 if step % 1000 == 700 else 8 / (1 + step / 50) + (step % 7) / 10 - (HOW == "zero") * 6.0
        for worker in (None, *workers):
            row = {
                "time": BEGAN + 2 + step / 10, "source": "trainer", "attempt": 1, "nonce": NONCE, "step": step,
                "worker": worker, "loss": loss, "tok_s": 100.0 + step % 5,
            }
            if HOW == "zero":
                row["lr"] = 0.001
            if worker is not None:
                row.update({"busy": 0.6, "wait_input": 0.3, "wait_room": 0.1, "wait_peers": 0.0})
            if HOW == "hostile":
                row[EVIL] = 1.0
            file.write(json.dumps(row) + "\n")
end = BEGAN + 3 + STEPS / 10
if HOW == "hostile":
    message = f"{EVIL} \x1b[31mred\x1b[0m \0nul \u202eright to left \ud800" + "x" * 300_000
    append("events.jsonl", time=end, event="exception", worker="drafter-1", type="ValueError", message=message)
    append("events.jsonl", time=end, event="worker_down", worker="drafter-1", reason="failed")
    print(f"\x1b[31m{EVIL}\0\x1b[0m")
if HOW in ("fails", "hostile"):

    def work():
        raise ValueError(f"planted {EVIL} \x1b[31mred\x1b[0m \0 nul" if HOW == "hostile" else "planted")

    thread = threading.Thread(target=work, name="drafter-1")
    thread.start()
    thread.join()
    sys.exit(1)

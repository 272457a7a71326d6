"""Three drafter threads; drafter-0 dies of the error this project was born from, the others go on."""

import threading
import time


def work(name: str, dies: bool) -> None:
    for step in range(1, 100_000):
        if dies and step == 3:
            raise RuntimeError("Detected that you are using FX to symbolically trace a dynamo-optimized function.")
        if not dies or step > 3:
            print(f"step={step} worker={name} loss=2.5 tok/s=300.0")
        time.sleep(0.05)


threads = [threading.Thread(target=work, args=(f"drafter-{n}", n == 0), name=f"drafter-{n}") for n in range(3)]
for thread in threads:
    thread.start()

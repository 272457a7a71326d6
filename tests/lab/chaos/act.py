"""The program that chaos launches: `act.py KIND TOKEN`, each line of output with the token and a number.

Before its first line it writes `start` to its witness, a file outside of the run's directory, and `end` before it
leaves; so who looks from outside knows what happened without asking specctl. Standard library, runs in the container.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

WITNESS = Path("/root/witness")
kind, token = sys.argv[1], sys.argv[2]
number = 0
lock = threading.Lock()


def witness(word: str) -> None:
    with (WITNESS / token).open("a") as file:
        file.write(f"{word} {os.getpid()} {time.time():.3f}\n")


def write(fd: int, text: str) -> None:
    """A whole line in one go; on a full disk a line may be lost, and that is the disk's doing."""
    try:
        os.write(fd, text.encode())
    except OSError:
        pass


def say(text: str) -> None:
    global number
    with lock:
        number += 1
        write(1, f"{token} {number} {text}\n")


def steps(seconds: float, pause_s: float = 0.1, worker: str = "") -> None:
    begun, step = time.monotonic(), 0
    while time.monotonic() < begun + seconds:
        step += 1
        say(f"step={step} {worker}loss={9 / step:.4f} tok/s=100")
        time.sleep(pause_s)


def end(code: int) -> None:
    witness("end")
    sys.exit(code)


def daemon() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    steps(40)
    witness("end")
    os._exit(9)


def two_logs() -> None:
    log = os.open("own.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    begun, step = time.monotonic(), 0
    while time.monotonic() < begun + 40:
        step += 1
        say(f"mine {step}")
        write(log, f"{token} own step={step} loss=1.0 tok/s=5\n")
        time.sleep(0.1)


def dying_worker() -> None:
    def die() -> None:
        say("step=1 worker=drafter-1 loss=1.0 tok/s=5")
        raise RuntimeError(f"the end of a worker of {token}")

    threading.Thread(target=die, name="drafter-1").start()
    steps(15, worker="worker=drafter-0 ")


def main() -> None:
    WITNESS.mkdir(exist_ok=True)
    witness("start")
    if kind == "import":
        say("about to import")
        witness("end")
        __import__(f"no_module_of_{token}")
    elif kind.startswith("exit"):
        for word in ("one", "two", "three"):
            say(word)
        end(int(kind[4:]))
    elif kind == "segv":
        say("about to crash")
        witness("end")
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(10)
    elif kind == "burst":
        for block in range(0, 20_000, 100):
            write(1, "".join(f"{token} {at} a burst of words\n" for at in range(block, block + 100)))
        end(0)
    elif kind == "silent":
        time.sleep(40)
        end(0)
    elif kind == "daemon":
        daemon()
    elif kind == "two_logs":
        two_logs()
        end(0)
    elif kind == "worker":
        dying_worker()
        end(0)
    else:
        if kind == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        steps({"steps": 12.0, "deaf": 40.0}.get(kind, 40.0))
        end(0)


main()

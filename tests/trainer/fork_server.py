"""A process that has imported the trainer and forks for each run: an import takes seconds, a fork takes none.

Reads a request a line from stdin (JSON: `argv` of the trainer, or `save`, a step to save a small checkpoint of and
nothing else; `run_dir`, `out` for its stdout and stderr, `death`), says the child's pid, and when it has ended its wait
status. `death` is when the child sends itself a signal: as soon as it has touched (opened, made, renamed, removed)
something with `place` in its path for the `after`th time, and `delay_s` later.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama
import transformers.models.llama.tokenization_llama  # noqa: F401

import trainer.train  # noqa: F401
from trainer import checkpoint
from trainer.__main__ import main as main_of_trainer

TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            os._exit(run(request))
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def run(request: dict[str, Any]) -> int:
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    identity = {"RUN_DIR": request["run_dir"], "RUN_ID": "a-run", "ATTEMPT": "1", "NONCE": "n"}
    os.environ |= {f"SPECCTL_{name}": value for name, value in identity.items()}
    if request["death"]:
        sys.addaudithook(Death(**request["death"]).look)
    code = save(Path(request["run_dir"]), request["save"]) if request["save"] else main_of_trainer(request["argv"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def save(root: Path, step: int) -> int:
    weights = {"weight": torch.full((64,), float(step))}
    checkpoint.save(root, checkpoint.Checkpoint(step=step, weights=weights, optimizer=weights, state={"run": "this"}))
    return len(checkpoint.prune(root, keep=1, step=step, run="this"))


class Death:
    def __init__(self, *, place: str, after: int, delay_s: float, signal: int) -> None:
        self.place, self.left, self.delay_s, self.signal = place, after, delay_s, signal

    def look(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in TOUCHES or self.place not in str(args[0]):
            return
        self.left -= 1
        if self.left == 0 and self.delay_s:
            threading.Timer(self.delay_s, self.die).start()
        elif self.left == 0:
            self.die()

    def die(self) -> None:
        os.kill(os.getpid(), self.signal)


if __name__ == "__main__":
    main()

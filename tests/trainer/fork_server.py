"""A process that has imported the trainer and forks for each run: an import takes seconds, a fork takes none.

Reads a request a line from stdin (JSON: `argv` of the trainer, or `save`, a step to save a small checkpoint of and
nothing else; `run_dir`, `out` for its stdout and stderr; `death`; and, where several are to train together,
`processes`, which torch's agent starts as torchrun does, and `planted`, Python that runs first in each), says the
child's pid, and when it has ended its wait status. `death` is when the child sends itself a signal: as soon as it has
touched (opened, made, renamed, removed) something with `place` in its path for the `after`th time, and `delay_s` later.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama
import transformers.models.llama.tokenization_llama  # noqa: F401
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import trainer.distributed.training
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
    if "processes" in request:
        code = together(request["processes"], request["argv"], request.get("planted", ""))
    elif request["save"]:
        code = save(Path(request["run_dir"]), request["save"])
    else:
        code = main_of_trainer(request["argv"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def together(processes: int, argv: list[str], planted: str) -> int:
    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, max_restarts=0, monitor_interval=0.1, start_method="fork",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="together",
    )  # fmt: skip
    try:
        elastic_launch(settings, one_of_them)(argv, planted)
    except (ChildFailedError, SignalException) as error:
        print(f"{type(error).__name__}", file=sys.stderr)
        return 1
    return 0


def one_of_them(argv: list[str], planted: str) -> None:
    exec(planted, {})
    code = main_of_trainer(argv)
    if code:
        sys.exit(code)


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

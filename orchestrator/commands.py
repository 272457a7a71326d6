"""The commands there are, and what stands in the places after their names: read before anything heavy is imported."""

from __future__ import annotations

RUN, TARGET, PLACE, EITHER, MORE = "run", "target", "target or group", "run, target or group", "..."
FILE = "what has a schema"

COMMANDS: dict[str, tuple[str, ...]] = {
    "launch": (TARGET,),
    "status": (EITHER, MORE),
    "top": (EITHER, MORE),
    "logs": (RUN,),
    "stop": (RUN,),
    "ls": (),
    "show": (RUN,),
    "compare": (RUN, RUN),
    "errors": (EITHER, MORE),
    "diff": (RUN,),
    "plot": (RUN, MORE),
    "report": (RUN, MORE),
    "watch": (RUN,),
    "attach": (RUN,),
    "targets": (PLACE, MORE),
    "doctor": (PLACE, MORE),
    "schema": (FILE,),
    "push": (TARGET,),
    "pull": (RUN,),
    "prune": (PLACE, MORE),
}
"""In the order in which `--help` lists them. Each is the function of that name in `cli/NAME.py`."""

ANSWERS: dict[str, int] = {
    "launch": 1, "status": 1, "logs": 1, "stop": 1, "ls": 1, "show": 1, "compare": 1, "errors": 1, "diff": 1, "plot": 1,
    "report": 1, "watch": 1, "targets": 1, "doctor": 1, "push": 1, "pull": 1, "prune": 1,
}  # fmt: skip
"""The verbs that have a `--json`, and the version of what each prints (docs/json.md says when it changes)."""
FILES = ("hosts", "config", "command")
"""What people write and a schema describes."""

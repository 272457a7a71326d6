"""The commands there are, and what stands in the places after their names: read before anything heavy is imported."""

from __future__ import annotations

RUN, TARGET, PLACE, EITHER, MORE = "run", "target", "target or group", "run, target or group", "..."
FILE = "file that has a schema"

COMMANDS: dict[str, tuple[str, ...]] = {
    "launch": (TARGET,),
    "status": (EITHER, MORE),
    "logs": (RUN,),
    "stop": (RUN,),
    "ls": (),
    "show": (RUN,),
    "compare": (RUN, RUN),
    "errors": (EITHER, MORE),
    "diff": (RUN,),
    "plot": (RUN, MORE),
    "watch": (RUN,),
    "attach": (RUN,),
    "targets": (PLACE, MORE),
    "schema": (FILE,),
    "push": (TARGET,),
    "pull": (RUN,),
    "prune": (PLACE, MORE),
}
"""In the order in which `--help` lists them. Each is the function of that name in `cli/NAME.py`."""

"""A trained drafter as a directory that servers load, and the way back.

`python -m trainer export` (`command.py`) takes a checkpoint (`source.py`), says how it is to be read (`contract.py`),
puts it into the form of a server (`formats.py`), and keeps it only if a decoder that knows nothing of the trainer
(`reference.py`) finds in it what the trainer finds in the checkpoint (`gate.py`). `load` reads one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.export.contract import Contract
    from trainer.model.drafter import Drafter
    from trainer.model.target import Target


def load(directory: Path, target: Target, *, say: Callable[[str], None] = lambda line: None
         ) -> tuple[Drafter, Contract]:  # fmt: skip
    """The drafter in `directory`, frozen, on the target's device in the type that it was exported in, and how it is to
    be used. Raises `ConfigError`, in one line, for files that are not as they were written, for a contract that does
    not say what this trainer's drafter does, and for another target than it was trained for. What differs and need not
    matter, such as torch's version, is said through `say`."""
    # What is independent of the trainer's own forward, `reference`, must not load it by being in this package.
    from trainer.export.loading import load

    return load(Path(directory), target, say=say)

"""A stand-in for nvidia-smi that prints what the real one prints: for -L, and for the query that specctl makes."""

from __future__ import annotations

from pathlib import Path

ONE, TWO = "GPU-b4895dbf-9350-2524-a89b-98161ddd9fe4", "GPU-58bd1b1a-1234-4f6e-8e53-aa2ac2c1f7de"
PROGRAM = """#!/bin/sh
here=$(dirname "$0")
case $1 in
-L) cat "$here/listed" ;;
--query-gpu=index,name,utilization.gpu,memory.used,memory.total) cat "$here/rows" ;;
*) echo "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help."; exit 1 ;;
esac
"""


class Smi:
    """Two idle GPUs, until it is told otherwise. Its `folder` belongs into PATH."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "nvidia-smi").write_text(PROGRAM)
        (folder / "nvidia-smi").chmod(0o755)
        self.lists(ONE, TWO)
        self.uses(3, 3)

    def lists(self, *uuids: str) -> None:
        self._say("listed", [f"GPU {number}: NVIDIA H200 (UUID: {uuid})" for number, uuid in enumerate(uuids)])

    def uses(self, *mib: int) -> None:
        """So much memory of each is in use."""
        self._say("rows", [f"{number}, NVIDIA H200, 0, {used}, 143771" for number, used in enumerate(mib)])

    def _say(self, name: str, lines: list[str]) -> None:
        aside = self.folder / f"{name}.new"
        aside.write_text("\n".join([*lines, ""]))
        aside.replace(self.folder / name)

"""A wheelhouse: a folder of wheels on the laptop, from which an environment is made where there is no network.

`plan.py` reads it, `verbs/launch.py` sends what the target does not have yet. A file is known by the hash of its
content, so a changed wheel makes another environment, and a folder that only moved does not.
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator import whole
from orchestrator.errors import ConfigError

SUFFIXES = (".whl", ".tar.gz", ".zip")
"""What pip finds in a folder."""
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    path: Path
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheelhouse:
    shown: str
    """The folder, as it was typed."""
    wheels: list[Wheel]

    @property
    def size(self) -> int:
        return sum(wheel.size for wheel in self.wheels)

    @property
    def content(self) -> list[str]:
        """What names an environment made from it."""
        return [f"{wheel.name} {wheel.sha256}" for wheel in self.wheels]

    def listing(self) -> list[tuple[str, str, int]]:
        """As the agent is told of it."""
        return [(wheel.name, wheel.sha256, wheel.size) for wheel in self.wheels]


def collect(folder: Path) -> Wheelhouse:
    """The wheels of `folder`, read whole for their hashes. Raises `ConfigError`."""
    try:
        paths = sorted(path for path in folder.expanduser().iterdir() if path.name.endswith(SUFFIXES))
        wheels = [_read(path) for path in paths if path.is_file()]
    except OSError as error:
        raise ConfigError(
            f"--wheelhouse {folder}: {error.strerror}", hint="name a folder of wheels: pip download -d wheels ..."
        ) from error  # fmt: skip
    if not wheels:
        raise ConfigError(
            f"--wheelhouse {folder}: holds no wheels", hint="fill it: pip download -d wheels ... brings *.whl files"
        )  # fmt: skip
    return Wheelhouse(shown=str(folder), wheels=wheels)


def _read(path: Path) -> Wheel:
    with path.open("rb") as file:
        return Wheel(path=path, sha256=whole.sha256_of(file), size=file.tell())


def tar(wheels: Collection[Wheel]) -> Iterator[bytes]:
    """The files as one tar, block by block: a wheel of a gigabyte never stands in memory. A file that changed its
    size meanwhile is cut or filled up to what was announced, and then refused over there for its hash."""
    for wheel in wheels:
        member = tarfile.TarInfo(f"{wheel.sha256}/{wheel.name}")
        member.size, member.mode = wheel.size, 0o644
        yield member.tobuf(tarfile.PAX_FORMAT)
        left = wheel.size
        with wheel.path.open("rb") as file:
            while left:
                block = file.read(min(BLOCK_BYTES, left)) or bytes(min(BLOCK_BYTES, left))
                left -= len(block)
                yield block
        yield bytes(-wheel.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)

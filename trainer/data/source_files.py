"""Which files a path of `data.paths` means, and what each holds: a file, a glob, or a folder of files or a data set.

The standard library only: `inputs.py` looks at the files before torch is imported, and on a target before there is an
environment. `sources.py` reads what is found here.
"""

from __future__ import annotations

import glob
import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Format = Literal["jsonl", "json", "parquet", "dataset", "text", "python-docs"]
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".txt": "text", ".md": "text",
}  # fmt: skip
COMPRESSED = (".gz", ".zst")
PARQUET = b"PAR1"
LFS = b"version https://git-lfs"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")


TOPICS = "pydoc_data.topics"


class SourceError(ValueError):
    """Why a path means no data; names the path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file, or one data set in a folder, whose `files` hold its rows one after the other."""

    path: Path
    format: Format
    files: tuple[Path, ...]

    @property
    def compression(self) -> str:
        """The suffix of it, or nothing."""
        return self.path.suffix if self.format != "dataset" and self.path.suffix in COMPRESSED else ""

    @property
    def needs_pyarrow(self) -> bool:
        return self.format in ("parquet", "dataset") or self.compression == ".zst"


def resolve(path: Path, kind: str) -> list[Source]:
    """The sources that `path` means to data of this kind, in the order in which they are read: that of their names.
    Raises `SourceError` where there are none."""
    if not path.exists() and glob.has_magic(str(path)):
        names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
        found = [source for name in names for source in _here(Path(name), kind)]
        if not found:
            raise SourceError(f"nothing matches {path}")
        return found
    return _here(path, kind)


def may_need_pyarrow(text: str) -> bool:
    """Whether `text`, a path that lies elsewhere perhaps, may hold what only pyarrow reads: by its name alone."""
    path = Path(text)
    return path.suffix == ".zst" or FORMATS.get(_suffix(path), "parquet") == "parquet"


def python_docs() -> Source:
    """What needs no file at all."""
    return Source(path=Path(TOPICS), format="python-docs", files=())


def problem(path: Path, kind: str) -> str | None:
    """Why `path` is no data that can be read; from names and the ends of files alone."""
    try:
        files = [(source, file) for source in resolve(path, kind) for file in source.files]
    except SourceError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return next((said for source, file in files if (said := _file_problem(source, file))), None)


def _here(path: Path, kind: str) -> list[Source]:
    if not path.is_dir():
        return [_file(path, kind)]
    if (path / "dataset_dict.json").exists():
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        raise SourceError(f"{path} holds several data sets: name one, such as {path / (splits or ['train'])[0]}")
    if (path / "state.json").exists():
        return [_dataset(path)]
    fitting = {suffix for suffix, format in FORMATS.items() if kind == "text" or format != "text"}
    found = [
        _file(file, kind) for file in sorted(path.rglob("*"))
        if file.is_file() and _suffix(file) in fitting and not _hidden(file.relative_to(path))
    ]  # fmt: skip
    if not found:
        raise SourceError(f"{path} is a directory without any {', '.join(sorted(fitting))} (or these and .gz or .zst)")
    return found


def _file(path: Path, kind: str) -> Source:
    unknown: Format = "text" if kind == "text" else "jsonl"
    format = FORMATS.get(_suffix(path), unknown)
    return Source(path=path, format=unknown if format == "text" else format, files=(path,))


def _dataset(path: Path) -> Source:
    """What `datasets.save_to_disk` writes."""
    try:
        state = json.loads((path / "state.json").read_bytes())
        files = tuple(path / part["filename"] for part in state["_data_files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path}/state.json is not what datasets.save_to_disk writes: {error}") from None
    if state.get("_indices_data_files"):
        raise SourceError(f"{path} is a selection of rows of another data set: save it after flatten_indices()")
    return Source(path=path, format="dataset", files=files)


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix.lower()


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file_problem(source: Source, file: Path) -> str | None:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            # Opening a pipe that nobody writes to waits for ever.
            return f"{file} is no regular file, and data is read more than once: write it into a file"
        with file.open("rb") as content:
            head = content.read(len(LFS))
            if head == LFS:
                return f"{file} is a Git LFS pointer, not the file itself: git lfs pull fetches it"
            if source.format == "parquet":
                content.seek(0, 2)
                content.seek(max(0, content.tell() - len(PARQUET)))
                if not head.startswith(PARQUET):
                    return f"{file} is not a Parquet file"
                if content.read() != PARQUET:
                    return f"{file} is cut off: a Parquet file ends as it begins"
    except OSError as error:
        return f"{file}: {error.strerror or error}"
    if head.startswith(UTF_16) and source.format != "dataset" and not source.compression:
        return f"{file} is UTF-16; save it as UTF-8"
    return None

"""Documents as tokens in files: made once from the sources, by one process while others wait, and mapped, never read.

An entry is a folder named by what its content follows from: the content of the sources, the tokenizer with its chat
template, what a row means, and `VERSION`. Settings that only choose among documents or cut them (`sequence_length`,
packing, duplicates) are no part of it. It is written aside, synced and renamed; `header.json` has the size of each file
and a hash of itself, by which damage is noticed. Whoever makes it holds a lock that dies with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.data.source_files import Source
from trainer.data.source_hashes import content_of, hash_of
from trainer.data.sources import BadRecord, where
from trainer.files import sync_folder, write_synced

VERSION = 1
HEADER = "header.json"
TABLE = np.dtype([
    ("end", "<i8"), ("at", "<i8"), ("source", "<i4"), ("pair", "<i4"), ("trained", "<i8"), ("hash", "<u8", (2,)),
])  # fmt: skip
"""Of a document: the end of its tokens among all, where its record is, in which source, the place of the first of two
neighbouring tokens that are trained on, how many tokens are, and a hash of them all."""
FILES = ("tokens.i32", "trained.u8", "documents.bin", "first.i64")
NAMED_OF_A_REASON = 10

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    source: int
    at: int
    why: str


@dataclass(kw_only=True, slots=True)
class Refused:
    """Records that are not documents: how many for each reason, and the first of them."""

    counts: dict[str, int] = field(default_factory=dict)
    first: list[Refusal] = field(default_factory=list)

    def add(self, source: int, at: int, bad: BadRecord) -> None:
        self.counts[bad.reason] = self.counts.get(bad.reason, 0) + 1
        if self.counts[bad.reason] <= NAMED_OF_A_REASON:
            self.first.append(Refusal(source=source, at=at, why=" ".join(str(bad).split())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """What has been made of the sources. All arrays are mapped from files, or in memory where there is no cache."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    table: NDArray[Any]
    """One `TABLE` a document, in the order of the sources."""
    first: NDArray[np.int64]
    """By token id: the document that has it first, or -1."""
    names: tuple[Source, ...]
    records: int
    refused: Refused
    context_only: int
    digest: str
    """Of all documents' tokens and of which are trained on."""

    def __len__(self) -> int:
        return len(self.table)

    def where(self, document: int) -> str:
        return where(self.names[self.table["source"][document]], int(self.table["at"][document]))

    def place(self, bad: Refusal) -> str:
        return where(self.names[bad.source], bad.at)

    def begin(self, document: int) -> int:
        """Where its tokens begin among all."""
        return int(self.table["end"][document - 1]) if document else 0


class Writer:
    """Documents, one after the other, into the files of `folder`. Memory is that of one document."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused = Refused()
        self.records = self.context_only = self.documents = self.end = 0
        self._files: dict[str, IO[bytes]] = {name: (folder / name).open("wb") for name in FILES}
        self._digest = hashlib.sha256()
        self._first = np.full(0, -1, dtype=np.int64)
        self._begin()

    def _begin(self) -> None:
        self._hashes = hashlib.sha256(), hashlib.sha256()
        self._length = self._trained = 0
        self._pair, self._last = -1, False

    def write(self, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> None:
        """More of the document that is being written."""
        if not len(ids):
            return
        marks = trained.astype(np.uint8)
        for hashed, data in zip(self._hashes, (ids.astype("<i4"), marks), strict=True):
            hashed.update(data.tobytes())
        if self._pair < 0:
            joined = np.concatenate([[self._last], trained])
            pairs = np.flatnonzero(joined[:-1] & joined[1:])
            self._pair = self._length + int(pairs[0]) - 1 if len(pairs) else -1
        self._last = bool(trained[-1])
        self._length += len(ids)
        self._trained += int(marks.sum())
        self._files["tokens.i32"].write(ids.astype("<i4").tobytes())
        self._files["trained.u8"].write(marks.tobytes())
        there = np.unique(ids)
        if there[-1] >= len(self._first):
            self._first = np.concatenate([self._first, np.full(there[-1] + 1 - len(self._first), -1, dtype=np.int64)])
        self._first[there[self._first[there] < 0]] = self.documents

    def finish(self, source: int, at: int) -> None:
        """The document is whole; it has two neighbouring tokens that are trained on, or it is none."""
        self.records += 1
        if self._pair < 0:
            self._forget()
            self.refused.add(source, at, BadRecord("has no two tokens in a row to train on"))
        else:
            self.end += self._length
            self.documents += 1
            row = np.zeros(1, dtype=TABLE)
            row["end"], row["at"], row["source"], row["pair"] = self.end, at, source, self._pair
            # The same in however many parts it was written.
            both = hashlib.sha256(b"".join(hashed.digest() for hashed in self._hashes)).digest()
            row["trained"], row["hash"] = self._trained, np.frombuffer(both[:16], dtype="<u8")
            self._files["documents.bin"].write(row.tobytes())
            self._digest.update(both)
        self._begin()

    def _forget(self) -> None:
        for name, size in (("tokens.i32", 4), ("trained.u8", 1)):
            self._files[name].seek(self.end * size)
            self._files[name].truncate()
        self._first[self._first == self.documents] = -1

    def refuse(self, source: int, at: int, bad: BadRecord) -> None:
        self.records += 1
        self.refused.add(source, at, bad)

    def close(self, key: str, names: list[str]) -> None:
        """All of it synced, with its header, in which `names` are for people who wonder what an entry is of."""
        self._files["first.i64"].write(self._first.astype("<i8").tobytes())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        body = {
            "version": VERSION, "key": key, "records": self.records, "context_only": self.context_only,
            "digest": self._digest.hexdigest(), "sources": names, "counts": self.refused.counts,
            "first": [[bad.source, bad.at, bad.why] for bad in self.refused.first],
            "sizes": {name: (self.folder / name).stat().st_size for name in FILES},
        }  # fmt: skip
        write_synced(self.folder / HEADER, [json.dumps({"hash": hash_of(body), "body": body}).encode()])
        sync_folder(self.folder)


class Damaged(Exception):
    """Its text says what is wrong with an entry."""


def build_or_open(
    root: Path | None, sources: list[Source], settings: dict[str, Any], build: Callable[[Writer], None], say: Say
) -> Documents:
    """The documents of `sources`: what is in the cache at `root`, or else what `build` writes. `settings` is all else
    that they follow from. With no `root` nothing is kept. Raises `ConfigError` where no cache can be."""
    if root is None:
        with tempfile.TemporaryDirectory(prefix="trainer-data-") as name:
            writer = Writer(Path(name))
            build(writer)
            writer.close("", [])
            return _open(Path(name), sources, "")
    try:
        root.mkdir(parents=True, exist_ok=True)
        before = [content_of(root, source) for source in sources]
        key = hash_of({"version": VERSION, "settings": settings, "sources": before})[:32]
        with _locked(root / f"{key}.lock", say):
            try:
                return _open(root / key, sources, key)
            except FileNotFoundError:
                pass
            except Damaged as damage:
                say(f"the token cache {root / key} is damaged ({damage}): it is made anew")
            return _built(root, key, sources, before, build, say)
    except OSError as error:
        raise ConfigError(
            f"data.cache: {error.filename or root}: {error.strerror or error}; make room or name a folder that can be"
            " written"
        ) from None


def _built(root: Path, key: str, sources: list[Source], before: list[list[str]], build: Callable[[Writer], None],
           say: Say) -> Documents:  # fmt: skip
    aside = root / f"{key}.partial"
    # Nobody else writes there: a folder that is there is that of a process that has died.
    for old in (aside, root / key):
        shutil.rmtree(old, ignore_errors=True)
    aside.mkdir()
    started = time.monotonic()
    try:
        writer = Writer(aside)
        build(writer)
        if [content_of(root, source) for source in sources] != before:
            raise ConfigError("data.paths: a file was changed while it was read; start again when nobody writes to it")
        writer.close(key, [str(source.path) for source in sources])
        aside.rename(root / key)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(root)
    say(f"tokenised {writer.records} records in {time.monotonic() - started:.1f} s, kept in {root / key}")
    return _open(root / key, sources, key)


def _open(folder: Path, sources: list[Source], key: str) -> Documents:
    """Raises `FileNotFoundError` where there is no entry, and `Damaged`."""
    if not folder.exists():
        raise FileNotFoundError(folder)
    try:
        header = json.loads((folder / HEADER).read_bytes())
        body = header["body"]
        if header["hash"] != hash_of(body) or body["key"] != key:
            raise Damaged(f"{HEADER} is not what was written")
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise Damaged(f"{HEADER} cannot be read") from None
    for name, size in body["sizes"].items():
        there = (folder / name).stat().st_size if (folder / name).exists() else 0
        if there != size:
            raise Damaged(f"{name} has {there:,} of {size:,} bytes")
    tokens, trained, table, first = (
        _mapped(folder / name, dtype) for name, dtype in zip(FILES, ("<i4", np.bool_, TABLE, "<i8"), strict=True)
    )
    return Documents(
        tokens=tokens, trained=trained, table=table, first=first, names=tuple(sources), records=body["records"],
        refused=Refused(
            counts=body["counts"], first=[Refusal(source=source, at=at, why=why) for source, at, why in body["first"]]
        ),
        context_only=body["context_only"], digest=body["digest"],
    )  # fmt: skip


def _mapped(path: Path, dtype: Any) -> NDArray[Any]:
    # Nothing cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process tokenises the same data: waiting for it ({path})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield

"""Files to records: what stands in each line or row and where, read piece by piece, so that no file has to fit memory.

`source_files.py` says which files there are. A line, or a row of Parquet or of a saved data set, is a record; a plain
text file is one as a whole. Lines count from 1, as editors count them; rows and the items of a JSON array from 0, as
pyarrow and Python do. What cannot be read as a record is given as `BadRecord`, in its place.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from trainer.config import ConfigError
from trainer.data.source_files import Source

MAX_LINE_BYTES = 16 << 20
PIECE_CHARACTERS = 1 << 20
"""Of a long text that is tokenised at once."""
ROWS_AT_ONCE = 64
READ_BYTES = 1 << 20
COLUMNS = ("messages", "conversations", "tools")
HALF_A_PAIR = "holds half of a surrogate pair, which is no text"
_BOM = codecs.BOM_UTF8
_HALF = re.compile("[\ud800-\udfff]")


class BadRecord(Exception):
    """Why a record is not trained on: a reason that is counted, and the particulars of this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def where(source: Source, at: int) -> str:
    """The place of a record, for a person."""
    if source.format == "python-docs":
        return f"{source.path}:{list(python_docs())[at]}"
    if source.format in ("parquet", "dataset"):
        return f"{source.path} row {at}"
    if source.format == "json" and at < 0:
        return f"{source.path}[{-1 - at}]"
    return f"{source.path}:{at}" if at else str(source.path)


def read(source: Source, *, text_field: str | None) -> Iterator[tuple[int, Any]]:
    """(where, record) for each record: what a line of JSON or a row holds. With `text_field` for texts: each is then an
    iterator of the pieces of one text. Raises `ConfigError` for a file that is not what its name says."""
    try:
        if source.format == "python-docs":
            yield from enumerate(map(pieces, ([text] for text in python_docs().values())))
        elif source.format == "text":
            yield 0, _plain(source)
        elif source.format in ("parquet", "dataset"):
            yield from _texts(_rows(source, columns=[text_field] if text_field else list(COLUMNS)), text_field)
        else:
            yield from _texts(_json(source), text_field)
    except (OSError, EOFError, zlib.error) as error:  # all that gzip raises for what is no gzip, or half of one
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"data.paths: {source.path}: {said}") from None


def _texts(records: Iterator[tuple[int, Any]], text_field: str | None) -> Iterator[tuple[int, Any]]:
    for at, record in records:
        if text_field is None or isinstance(record, BadRecord):
            yield at, record
        elif not isinstance(record, dict):
            yield at, BadRecord("is not an object")
        elif not isinstance(record.get(text_field), str):
            yield at, BadRecord(f"has no text under {text_field!r} (data.text_field)")
        elif not record[text_field].isascii() and _HALF.search(record[text_field]):
            yield at, BadRecord(HALF_A_PAIR)
        else:
            yield at, pieces([record[text_field]])


# --- lines ----------------------------------------------------------------------------------------------------------


def _opened(source: Source) -> io.BufferedReader:
    path = source.files[0]
    if not source.compression:
        return path.open("rb")
    if source.compression == ".gz":
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(path)), READ_BYTES)
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), READ_BYTES)


def _json(source: Source) -> Iterator[tuple[int, Any]]:
    with _opened(source) as file:
        if source.format == "json" and file.peek(64).removeprefix(_BOM).lstrip().startswith(b"["):
            yield from _items(file)
            return
        for number, line in _lines(file):
            if isinstance(line, BadRecord):
                yield number, line
            elif line.strip():
                yield number, _parsed(line)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | BadRecord]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if number == 1:
            line = line.removeprefix(_BOM)
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, BadRecord(f"is longer than {MAX_LINE_BYTES >> 20} MiB")
        else:
            yield number, line


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRecord("is not JSON", str(error))


def _items(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """Of one JSON array, which is read as it comes: item i is at -1-i."""
    decoder, text, index = json.JSONDecoder(), "", 0
    incoming = codecs.iterdecode(iter(lambda: file.read(READ_BYTES), b""), "utf-8-sig", errors="surrogateescape")
    begun = False
    while True:
        text = text.lstrip().removeprefix("," if begun and index else "").lstrip()
        if not begun and text:
            text, begun = text[1:], True
            continue
        if text.startswith("]"):
            return
        try:
            # What ends with what has been read so far may go on: a number, or a text cut at its end.
            item, end = decoder.raw_decode(text)
            complete = end < len(text)
        except (ValueError, RecursionError) as error:
            complete, said = False, str(error)
        else:
            said = "ends too soon"
        if complete:
            # What no decoder could read stands there as half of a pair, which UTF-8 itself cannot hold.
            yield -1 - index, BadRecord("is not UTF-8") if _HALF.search(text, 0, end) else item
            text, index = text[end:], index + 1
            continue
        # As much again as there is, so that a long item is not parsed anew with every read.
        more, wanted = [], max(len(text), 1)
        while wanted > 0 and (chunk := next(incoming, None)) is not None:
            more.append(chunk)
            wanted -= len(chunk)
        if not more or len(text) > MAX_LINE_BYTES:
            yield -1 - index, BadRecord("is not JSON, and what follows it is lost", said)
            return
        text += "".join(more)


# --- plain text -----------------------------------------------------------------------------------------------------


def _plain(source: Source) -> Iterator[str]:
    with _opened(source) as file:
        reader = io.TextIOWrapper(file, encoding="utf-8-sig")  # takes every end of line for \n
        try:
            yield from pieces(iter(lambda: reader.read(PIECE_CHARACTERS), ""))
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.paths: {source.path} is not UTF-8 text: {error}") from None
        finally:
            with contextlib.suppress(ValueError):
                reader.detach()


@functools.cache
def python_docs() -> dict[str, str]:
    """The language reference that `help()` shows, by its topics; part of every Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("data.kind: this Python lacks its own documentation; use text or conversations") from None
    return dict(sorted(topics.items()))


def pieces(parts: Iterable[str]) -> Iterator[str]:
    """A text in pieces of at most `PIECE_CHARACTERS`, which begin at a line, if there is one with no space around its
    beginning: there tokenizers split a text in any case. A text that is short stays whole."""
    left = ""
    for part in parts:
        left += part
        while len(left) > PIECE_CHARACTERS:
            cut = _cut(left, PIECE_CHARACTERS)
            yield left[:cut]
            left = left[cut:]
    if left:
        yield left


def _cut(text: str, most: int) -> int:
    """Where the second piece of a text begins that is longer than `most`: else at the last word's space."""
    at = most
    while (at := text.rfind("\n", 1, at)) > 0:
        if not (text[at - 1].isspace() or text[at + 1].isspace()):
            return at + 1
    at = most
    while (at := text.rfind(" ", 1, at)) > 0:
        if not text[at + 1].isspace():
            return at
    return most


# --- tables ---------------------------------------------------------------------------------------------------------


def _rows(source: Source, *, columns: list[str]) -> Iterator[tuple[int, Any]]:
    import pyarrow

    at = 0
    for file in source.files:
        try:
            for batch in _parquet(file, columns) if source.format == "parquet" else _arrow(file, columns):
                for row in _plain_rows(batch):
                    yield at, row
                    at += 1
        except pyarrow.ArrowException as error:
            raise ConfigError(f"data.paths: {file}: {' '.join(str(error).split())}") from None


def _plain_rows(batch: Any) -> list[Any]:
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            return [BadRecord("is not UTF-8", str(error))]
        return [row for place in range(len(batch)) for row in _plain_rows(batch.slice(place, 1))]


def _parquet(file: Path, columns: list[str]) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, pre_buffer=False) as table:
        there = _there(file, table.schema_arrow.names, columns)
        yield from table.iter_batches(batch_size=ROWS_AT_ONCE, columns=there, use_threads=False)


def _arrow(file: Path, columns: list[str]) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as content, pyarrow.ipc.open_stream(content) as stream:
        there = _there(file, stream.schema.names, columns)
        for batch in stream:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.slice(start, ROWS_AT_ONCE).select(there)


def _there(file: Path, names: list[str], columns: list[str]) -> list[str]:
    there = [name for name in columns if name in names]
    if not set(there) - {"tools"}:
        wanted = " or ".join(repr(name) for name in columns if name != "tools")
        mend = "; data.text_field names the column" if len(columns) == 1 else ""
        raise ConfigError(f"data.paths: {file} has no column {wanted}; it has {', '.join(names)}{mend}")
    return there

"""The files that conversations are written to, whole at every moment: who is killed goes on as if nothing had happened.

A portion of conversations is appended and synced, and only then does `progress.json`, which is replaced whole, say that
it is there, and how long the files are. What lies behind that length when work begins anew was written by somebody who
did not get so far, and is cut off: no line is torn, none is there twice, and none is missing.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer import lock
from trainer.config import ConfigError
from trainer.files import write_whole
from trainer.kept import changed

TRAIN, HELD_OUT, PROGRESS = "train.jsonl", "held-out.jsonl", "progress.json"


class Store:
    """Raises `ConfigError` where another process writes there, or what is there was made in another way than
    `made_with`, which is plain data."""

    def __init__(self, directory: Path, *, made_with: dict[str, Any], complain: Any) -> None:
        self.directory = directory
        self.made_with = json.loads(json.dumps(made_with))
        self.next = 0
        """What has not been tried yet: the number of a conversation."""
        self.dropped: Counter[str] = Counter()
        self.written = {TRAIN: 0, HELD_OUT: 0}
        """Conversations."""
        self._bytes = {TRAIN: 0, HELD_OUT: 0}
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir: cannot make {directory}: {error.strerror}") from None
        self._lock = lock.hold(directory, complain=complain)
        self._go_on()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)

    @property
    def count(self) -> int:
        return sum(self.written.values())

    def questions(self) -> Iterator[str]:
        """What is asked in all conversations that are there. Raises `ConfigError` for a line that was not written
        here."""
        for name in self.written:
            path = self.directory / name
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    try:
                        yield asked_in(json.loads(line)["messages"])
                    except (ValueError, KeyError, TypeError, RecursionError):
                        raise ConfigError(f"{path}:{number}: has changed since it was written; choose another"
                                          " output_dir") from None  # fmt: skip

    def add(self, kept: Sequence[tuple[str, dict[str, Any]]], dropped: Counter[str], *, next_: int) -> None:
        """A portion: conversations with the file they belong to, and how many were dropped for which reason; what is
        tried next is number `next_`. Raises `ConfigError` where it cannot be written; then it is not there."""
        try:
            sizes = {name: self._append(name, [line for file, line in kept if file == name]) for name in self.written}
            written = {name: self.written[name] + sum(file == name for file, _ in kept) for name in self.written}
            self._note(next_=next_, dropped=self.dropped + dropped, written=written, sizes=sizes)
        except OSError as error:
            raise ConfigError(f"output_dir: {self.directory} cannot be written to: {error.strerror or error}") from None
        self.next, self.dropped, self.written, self._bytes = next_, self.dropped + dropped, written, sizes

    def _size(self, name: str) -> int:
        try:
            return (self.directory / name).stat().st_size
        except FileNotFoundError:
            return 0

    def _append(self, name: str, lines: Sequence[dict[str, Any]]) -> int:
        with (self.directory / name).open("r+b") as file:
            file.seek(self._bytes[name])
            file.write(b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def _note(self, *, next_: int, dropped: Counter[str], written: dict[str, int], sizes: dict[str, int]) -> None:
        facts = {
            "next": next_, "written": written, "dropped": dict(sorted(dropped.items())), "bytes": sizes,
            "made_with": self.made_with,
        }  # fmt: skip
        data = json.dumps(facts, indent=1).encode() + b"\n"
        write_whole(self.directory / PROGRESS, data, durable=True, locked=True)

    def _go_on(self) -> None:
        path = self.directory / PROGRESS
        try:
            facts = json.loads(path.read_bytes())
            was, sizes = facts["made_with"], dict(facts["bytes"])
            next_, written = int(facts["next"]), {name: int(facts["written"][name]) for name in self.written}
            dropped = Counter({str(reason): int(count) for reason, count in facts["dropped"].items()})
        except FileNotFoundError:
            for name in self.written:
                if self._size(name):
                    raise ConfigError(
                        f"output_dir: {self.directory} has a {name} without the {PROGRESS} that tells of it; choose"
                        " another"
                    ) from None
                (self.directory / name).touch()
            self._note(next_=0, dropped=Counter(), written=self.written, sizes=self._bytes)
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); choose another output_dir") from None
        if others := changed(was, self.made_with):
            raise ConfigError(
                f"output_dir: what {self.directory} holds was made with another {', '.join(others)}; choose another"
                " output_dir, or restore that"
            )
        for name in self.written:
            if (size := self._size(name)) < sizes[name]:
                raise ConfigError(
                    f"{self.directory / name} has {size:,} bytes of the {sizes[name]:,} that were written; choose"
                    " another output_dir"
                )
            os.truncate(self.directory / name, sizes[name])
        self.next, self.written, self.dropped, self._bytes = next_, written, dropped, sizes


def asked_in(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(one["content"] for one in messages if one["role"] != "assistant")

"""Verbs as real processes: asks the forkserver for one, waits for it, may end it by SIGKILL."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What one command answered. `code` is negative when a signal ended it."""

    words: list[str]
    code: int
    out: bytes
    err: str
    took_s: float
    killed: bool = False
    """By chaos, on purpose."""
    late: bool = False
    """It was ended since its time was over."""

    @property
    def verb(self) -> str:
        """Its name; to follow is another thing than to read."""
        return "logs -f" if "-f" in self.words else self.words[0]

    @property
    def answer(self) -> dict[str, Any] | None:
        """The one JSON object on stdout, if that is what stdout is."""
        try:
            value = json.loads(self.out)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


@dataclass(kw_only=True)
class Verb:
    """A command that runs."""

    pool: Pool
    name: int
    words: list[str]
    out: Path
    err: Path
    began: float
    over: threading.Event = field(default_factory=threading.Event)
    code: int = 0
    ended: float = 0.0
    killed: bool = False

    def kill(self) -> None:
        self.killed = True
        self.pool.ask({"kill": self.name})

    def wait(self, timeout_s: float) -> Said:
        late = not self.over.wait(max(0.0, self.began + timeout_s - time.monotonic()))
        if late:
            self.pool.ask({"kill": self.name})
            if not self.over.wait(60):
                raise RuntimeError(f"the forkserver does not answer for {self.words}")
        out, err = self.out.read_bytes(), self.err.read_text(errors="replace")
        self.out.unlink()
        self.err.unlink()
        return Said(
            words=self.words, code=self.code, out=out, err=err, took_s=self.ended - self.began,
            killed=self.killed, late=late,
        )  # fmt: skip


class Pool:
    """`with Pool() as pool:` has a forkserver inside."""

    def __enter__(self) -> Pool:
        self._folder = tempfile.TemporaryDirectory(prefix="sc-chaos-", dir="/tmp")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.chaos.forkserver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            start_new_session=True,  # Ctrl-C is for who waits for the table; the verbs under way go on
        )  # fmt: skip
        self._verbs: dict[int, Verb] = {}
        self._names = itertools.count()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        try:
            self._server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._folder.cleanup()

    def start(self, words: list[str], *, env: dict[str, str], cwd: Path) -> Verb:
        name = next(self._names)
        out, err = Path(self._folder.name) / f"{name}.out", Path(self._folder.name) / f"{name}.err"
        out.touch()
        err.touch()
        verb = Verb(pool=self, name=name, words=words, out=out, err=err, began=time.monotonic())
        self._verbs[name] = verb
        self.ask({"id": name, "argv": words, "env": env, "cwd": str(cwd), "out": str(out), "err": str(err)})
        return verb

    def ask(self, request: dict[str, Any]) -> None:
        assert self._server.stdin
        with self._lock:
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            self._server.stdin.flush()

    def _read(self) -> None:
        assert self._server.stdout
        for line in self._server.stdout:
            answer = json.loads(line)
            verb = self._verbs.pop(answer["id"])
            verb.code, verb.ended = answer["code"], time.monotonic()
            verb.over.set()

"""Asking the agent of a target: one request, one exec, frames back; the agent itself is sent when it is missing.

The frame decides what is true. An exit code without a frame proves nothing (255 has three meanings on the way through
ssh and pct), so without a final frame the answer is an error that says what was seen instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import secrets
import shlex
import sys
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from orchestrator import errors, frames, pythons
from orchestrator.inventory import Target
from orchestrator.model import Misfit, from_json
from orchestrator.transport.base import Completed, Transport

T = TypeVar("T")

HERE = Path(__file__).parent
TRAVELS = (
    "__init__.py", "record.py", "model", "errors.py", "ailments.py", "frames.py", "manifest.py", "logscan", "whole.py",
    "agent",
)  # fmt: skip
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
QUICK_S = 30.0
UNFIT = re.compile(r"(ModuleNotFound|Import|Syntax)Error|Fatal Python error|.*\b([Uu]nknown|[Ii]llegal) option")
"""What a Python says that is half installed, or no Python 3, before the agent could answer in a frame."""
READS = ("probe", "logs", "show", "history", "texts", "curves", "events", "send")
"""Verbs that leave no process and no file behind on the target: they may take a quicker way in."""
KINDS: dict[str, type[errors.SpecctlError]] = {
    "preflight": errors.PreflightError,
    "python": errors.PythonError,
    "notfound": errors.NotFound,
    "bundle": errors.BundleError,
    "usage": errors.ConfigError,
    "link": errors.LinkLost,
    "identity": errors.IdentityError,
}


@cache
def agent_files() -> dict[str, bytes]:
    """Path -> content of everything the agent is made of: specctl's own modules, and libtmux."""
    found: dict[str, bytes] = {}
    for name in TRAVELS:
        for path in _sources(HERE / name):
            found[f"orchestrator/{path.relative_to(HERE).as_posix()}"] = path.read_bytes()
    spec = importlib.util.find_spec("libtmux")
    if spec is None or not spec.submodule_search_locations:
        raise errors.ConfigError("libtmux is not installed beside specctl", hint="pip install specctl again")
    home = Path(spec.submodule_search_locations[0])
    for path in _sources(home):
        relative = path.relative_to(home)
        if relative.parts[0] not in ("test", "pytest_plugin.py"):
            found[f"libtmux/{relative.as_posix()}"] = path.read_bytes()
    return found


def _sources(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    return sorted(path.rglob("*.py"))


@cache
def agent_hash() -> str:
    total = hashlib.sha256()
    for name, content in sorted(agent_files().items()):
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()[:16]


def agent_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in sorted(agent_files().items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def agent_zip() -> bytes:
    """The agent without libtmux, for a look that leaves nothing behind."""
    import zipfile  # which a look at what is there already need not wait for

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(agent_files().items()):
            if name.startswith("orchestrator/"):
                archive.writestr(name, content)
    return buffer.getvalue()


@cache
def boot_source() -> str:
    return (HERE / "agent" / "boot.py").read_text()


def understood(cls: type[T], data: Any, target: Target) -> T:
    """`data`, which the agent of `target` sent, as a `cls`. Raises `AgentError` when it is none."""
    try:
        return from_json(cls, data)
    except Misfit as error:
        raise errors.AgentError(
            f"what its agent answered cannot be read: {error}", target=target.name,
            hint=f"specctl status {target.name} asks again; the run directories are in {target.workdir}/runs there",
        ) from error  # fmt: skip


class Agent:
    """The agent of one target."""

    def __init__(self, target: Target, transport: Transport) -> None:
        self.target, self.transport = target, transport

    @property
    def local(self) -> bool:
        return self.target.ssh is None and self.target.vmid is None

    def argv(self) -> list[str]:
        boot = [boot_source(), agent_hash(), self.target.workdir, self.target.user or ""]
        if self.local:
            return [sys.executable, "-I", "-S", "-c", *boot]
        return ["env", f"PATH={PATH}", self.target.python or "python3", "-I", "-S", "-c", *boot]

    def request(self, verb: str, token: str, deadline_s: float | None, **fields: Any) -> bytes:
        scrub = self.target.vmid is not None
        request: dict[str, Any] = {"token": token, "verb": verb, "scrub": scrub, **fields}
        if deadline_s is not None:
            request["deadline_s"] = deadline_s + 5
        return json.dumps(request, ensure_ascii=True).encode("ascii") + b"\n"

    def call(self, verb: str, *, payload: bytes = b"", deadline_s: float = QUICK_S, **fields: Any) -> dict[str, Any]:
        """The final frame of `verb`. Raises what the agent refused, or why it could not be asked."""
        try:
            return self._call(verb, payload, deadline_s, fields)
        except errors.PythonError as error:
            error.hint = pythons.hint(self.transport, self.target.user)
            raise

    def _call(self, verb: str, payload: bytes, deadline_s: float, fields: dict[str, Any]) -> dict[str, Any]:
        for _ in range(2):
            token = secrets.token_hex(8)
            request = self.request(verb, token, deadline_s, **fields)
            done = self._way(verb).run(self.argv(), stdin=request + payload, deadline_s=deadline_s)
            reader = frames.FrameReader(token)
            final = self._final(reader.feed(done.stdout))
            if final is None:
                raise self.unanswered(done, reader)
            if final.get("missing") == "agent":
                why = f" ({final['why']})" if final.get("why") else ""
                self.install(verb)
                continue
            return self.checked(final)
        raise errors.AgentError(f"the agent vanished right after it was installed{why}", target=self.target.name)

    def _way(self, verb: str) -> Transport:
        return self.transport.for_reads() if verb in READS else self.transport

    def install(self, verb: str) -> None:
        """Sends the agent and has it unpacked under its hash; where, depends on what it is for."""
        tar = agent_tar()
        token = secrets.token_hex(8)
        digest = hashlib.sha256(tar).hexdigest()
        request = self.request("install", token, 60.0, **{"for": verb, "size": len(tar), "sha256": digest})
        done = self._way(verb).run(self.argv(), stdin=request + tar, deadline_s=60.0)
        reader = frames.FrameReader(token)
        final = self._final(reader.feed(done.stdout))
        if final is None:
            raise self.unanswered(done, reader)
        self.checked(final)

    @contextmanager
    def stream(
        self, verb: str, *, payload: Iterable[bytes] = (), deadline_s: float | None, idle_s: float = 30.0,
        repair: bool = True, **fields: Any,
    ) -> Iterator[Iterator[dict[str, Any]]]:  # fmt: skip
        """All frames of `verb` as they come; the last is final. With a payload the agent must be there already (see
        `ensure`); without one it is sent if it is not, unless `repair` says no."""
        token = secrets.token_hex(8)

        def stdin() -> Iterator[bytes]:
            yield self.request(verb, token, deadline_s, **fields)
            yield from payload

        way = self._way(verb)
        with way.stream(self.argv(), stdin=stdin(), deadline_s=deadline_s, idle_s=idle_s) as stream:

            def answers() -> Iterator[dict[str, Any]]:
                reader = frames.FrameReader(token)
                for chunk in stream:
                    for frame in reader.feed(chunk):
                        if frame.get("missing") == "agent" and payload == () and repair:
                            self.install(verb)
                            with self.stream(
                                verb, deadline_s=deadline_s, idle_s=idle_s, repair=False, **fields
                            ) as rest:
                                yield from rest
                            return
                        if frame.get("final"):
                            yield self.checked(frame)
                            return
                        yield frame
                    if reader.damaged:
                        raise self._damaged()
                done = Completed(exit_code=stream.exit_code, stdout=b"", stderr=stream.stderr)
                raise self.unanswered(done, reader)

            yield answers()

    def ensure(self) -> None:
        """Makes sure that the agent is on the target."""
        self.call("probe", runs=[])

    def checked(self, final: dict[str, Any]) -> dict[str, Any]:
        error = final.get("error")
        if error is None:
            if final.get("missing") and "runs" not in final:
                raise errors.AgentError("its agent has vanished", target=self.target.name, hint="ask again")
            return final
        kind = KINDS.get(str(error["kind"]), errors.AgentError)
        raise kind(str(error["message"]), target=self.target.name, hint=error.get("hint"))

    def _damaged(self) -> errors.SpecctlError:
        return errors.NoAnswer(
            "something on the way has written into the agent's answer, and damaged it", target=self.target.name,
            hint="does a start-up file there (~/.bashrc, ~/.profile) leave a program behind that goes on writing? Send "
            "what it says to a file",
        )  # fmt: skip

    def unanswered(self, done: Completed, reader: frames.FrameReader) -> errors.SpecctlError:
        """What to say when no frame came: the transport's own reading of it, or what was seen instead."""
        if reader.damaged:
            return self._damaged()
        noise = bytes(reader.noise)
        explained = self.transport.explain(done)
        if explained is not None:
            return explained
        said = (done.stderr + b"\n" + noise).decode("utf-8", "replace").strip().splitlines()
        python = self.target.python or "python3"
        unfit = next((line for line in said if UNFIT.match(line)), None)
        if done.exit_code in (126, 127) or (unfit and done.exit_code):
            why = unfit or (said[-1] if said else f"exit code {done.exit_code}")
            return errors.PythonError(
                f"{python} cannot run specctl's agent there: {why}", target=self.target.name,
                hint="install Python 3.10 or newer there, or name one as `python:` of this target in hosts.yaml",
            )  # fmt: skip
        code = "no exit code" if done.exit_code is None else f"exit code {done.exit_code}"
        tail = ": " + " / ".join(said[-3:]) if said else ""
        hint = self.transport.trial
        if self.target.ssh is not None and self.target.vmid is None and noise.strip() and done.exit_code in (0, 1):
            hint = (
                f"try by hand: ssh {shlex.quote(self.target.ssh)} echo works; a start-up file of that user (~/.bashrc) "
                "may end the shell, or a forced command may take its place"
            )
        message = f"the agent gave no answer ({code}){tail.rstrip('.')}"
        return errors.NoAnswer(message, target=self.target.name, hint=hint)

    @staticmethod
    def _final(found: list[dict[str, Any]]) -> dict[str, Any] | None:
        return next((frame for frame in reversed(found) if frame.get("final")), None)

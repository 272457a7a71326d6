"""`attach`: the live session of a run, whose identity has been looked at; what is typed and shown is the caller's."""

from __future__ import annotations

import secrets
import select
import time
from dataclasses import dataclass

from orchestrator import errors, frames, health
from orchestrator.fleet import Fleet
from orchestrator.model import Probe
from orchestrator.remote import Agent
from orchestrator.resolve import Run, resolve
from orchestrator.transport.base import Completed
from orchestrator.transport.terminal import Between, Screen, Terminal

OPEN_S = 40.0
NOISE_BYTES = 64 << 10
SEEN = b"\n"
"""What the agent waits for before it becomes tmux."""


class HasEnded(errors.SpecctlError):
    """There is no session to be shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A session that has been entered: `first` is what it has shown already."""

    terminal: Terminal
    first: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    run: Run
    notes: list[str]


def find(fleet: Fleet, query: str | None) -> Found:
    """The live run that `query` means. Raises as `resolve` does, and `HasEnded`."""
    found = resolve(fleet, query)
    refuse_ended(found.run)
    return Found(run=found.run, notes=found.notes)


def refuse_ended(run: Run) -> None:
    """Raises `HasEnded` where there is no session to enter, and `UnreachableError` where nobody can tell."""
    if run.verdict.state == "UNREACHABLE":
        raise errors.UnreachableError(run.verdict.why, target=run.target.name, run_id=run.run_id)
    if not run.verdict.live:
        said, hint = "there is no session any more", f"specctl logs {run.run_id} -n 50; specctl show {run.run_id}"
        if run.probe.damaged is not None and run.probe.tree:
            said, hint = "nobody can tell which session is the run's", f"specctl stop {run.run_id} ends what is left"
        raise HasEnded(
            f"{said}: {run.verdict.state} ({run.verdict.why})", target=run.target.name, run_id=run.run_id, hint=hint
        )


def enter(fleet: Fleet, run: Run, screen: Screen, *, write: bool, utf8: bool) -> Session:
    """Enters the session of `run` with a terminal like `screen`. Raises what was refused there, and why."""
    agent = fleet.agent(run.target)
    agent.ensure()
    token = secrets.token_hex(8)
    request = agent.request(
        "attach", token, None, run_id=run.run_id, nonce=run.probe.nonce, write=write, term=screen.term, utf8=utf8
    )
    terminal = agent.transport.for_reads().terminal(
        [*agent.argv(), request.decode("ascii").strip()], screen, deadline_s=OPEN_S
    )
    try:
        line, rest = _answer(terminal, agent, token)
        terminal.write(SEEN)
        if line.endswith(b"\r\r\n"):
            between = Between(terminal)
            return Session(terminal=between, first=between.undo(rest))
        return Session(terminal=terminal, first=rest)
    except BaseException:
        terminal.close()
        raise


def _answer(terminal: Terminal, agent: Agent, token: str) -> tuple[bytes, bytes]:
    """Waits for the one frame, and returns its line and what came after it. What came before it is noise."""
    seen = bytearray()
    mark = frames.MARK + token.encode("ascii") + b" "
    until = time.monotonic() + OPEN_S
    while True:
        at = seen.find(mark)
        end = seen.find(b"\n", at) if at >= 0 else -1
        if end >= 0:
            reader = frames.FrameReader(token)
            [frame] = reader.feed(bytes(seen[at : end + 1])) or [{}]
            if agent.checked(frame).get("attached"):
                return bytes(seen[at : end + 1]), bytes(seen[end + 1 :])
            raise agent.unanswered(Completed(exit_code=None, stdout=b"", stderr=b""), reader)
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise errors.DeadlineExceeded(
                f"no session within {OPEN_S:g} s", target=agent.target.name,
                hint="the machine hangs, or is slow; ask again, or read: specctl logs -f",
            )  # fmt: skip
        if not select.select([terminal], [], [], min(left_s, 1.0))[0]:
            continue
        data = terminal.read()
        if data == b"":
            said = bytes(seen[-NOISE_BYTES:])
            raise agent.unanswered(Completed(exit_code=255, stdout=b"", stderr=said), frames.FrameReader(token))
        seen += data or b""


def look_again(fleet: Fleet, run: Run) -> Run:
    """The same run as it is now. Raises `UnreachableError` when that cannot be known."""
    [view] = fleet.probe([run.target], run_ids=[run.run_id])
    if view.error is not None:
        raise view.error
    probe: Probe | None = next((probe for probe in view.runs if probe.nonce == run.probe.nonce), None)
    if probe is None:
        raise errors.NotFound("its run directory has vanished", target=run.target.name, run_id=run.run_id)
    return Run(target=run.target, probe=probe, verdict=health.judge(probe))

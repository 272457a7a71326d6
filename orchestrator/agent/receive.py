"""`receive`: files from the laptop, for a place of this machine. The far end of a push.

`ask: place` answers where exactly they would lie, and whether they can; `ask: claims` what of them is there already;
else they come, as frames on stdin. One push to one place at a time: its record is locked, names the parts that grow
(for `prune`), and goes when all has come.
"""

from __future__ import annotations

import os
import pwd
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from orchestrator import frames
from orchestrator.agent import pushes, space
from orchestrator.agent.main import Call, Refusal
from orchestrator.agent.parcel import SYNCED, Busy, Incoming, NoRoom
from orchestrator.agent.tree import PART, Entry, at, decoded, encoded, entry, part_of, room, shown

NEWS_S = 0.5
IDLE_S = 600
"""So long nothing may come before the laptop is taken for gone."""
OURS = ("agents", "bundles", "envs", "wheels", "pushes", "pycache", "compile-cache", "prune.lock")


def run(call: Call) -> None:
    ask = call.request.get("ask")
    if ask == "place":
        call.emit({"final": True, **place(call)})
        return
    root = encoded(str(call.request["root"]))
    entries = read_entries(call)
    news = News(call.emit)
    parcel = Incoming(root, entries, tick=news.compared)
    if ask == "claims":
        call.emit({"final": True, **_look(parcel, entries)})
        return
    parts = [decoded(part_of(at(root, one.path))) for one in entries if one.kind == "file" and one.size >= SYNCED]
    with pushes.held(call, decoded(root), parts) as touch:
        news.touch = touch
        _receive(call, parcel, news)
    # Only now: whoever has heard the last word lets go of this process.
    files, _ = parcel.done
    call.emit({
        "final": True, "files": parcel.files, "same": parcel.same, "written": parcel.written,
        "resumed": parcel.resumed, "failed": parcel.failed, "sha256": parcel.hashes if files == 1 else {},
    })  # fmt: skip


class News:
    """Says now and then how far it is, so that silence means a dead link."""

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        self._emit, self._said_at, self._compared = emit, time.monotonic(), 0
        self.touch: Callable[[], None] = lambda: None
        """Says the same to the others on this machine."""

    def compared(self, count: int) -> None:
        self._compared += count
        self.say(lambda: {"compared": self._compared})

    def say(self, news: Callable[[], dict[str, Any]]) -> None:
        now = time.monotonic()
        if now - self._said_at >= NEWS_S:
            self._said_at = now
            signal.alarm(IDLE_S)
            self.touch()
            self._emit(news())


def incoming(call: Call) -> Iterator[dict[str, Any]]:
    """What the laptop sends after its request. Raises `Refusal` when it ends too early."""
    token = str(call.request["parcel"])
    while True:
        signal.alarm(IDLE_S)
        frame = frames.read(token, call.payload)
        if frame is None:
            raise Refusal("link", "what was sent has ended too early")
        if frame.get("end"):
            signal.alarm(0)
            return
        yield frame


def read_entries(call: Call) -> list[Entry]:
    entries: list[Entry] = []
    token = str(call.request["parcel"])
    while True:
        frame = frames.read(token, call.payload)
        if frame is None:
            raise Refusal("link", "the list of what is to be sent has ended too early")
        entries += map(entry, frame["entries"])
        if not frame["more"]:
            return entries


def place(call: Call) -> dict[str, Any]:
    """Where the source comes to lie. Raises `Refusal` when it cannot be told, or cannot be."""
    given, name, kind = str(call.request["dst"]), str(call.request["name"]), str(call.request["kind"])
    path = given
    if path == "~" or path.startswith("~/"):
        path = os.path.expanduser("~") + path[1:]
    full = os.path.join(encoded(call.paths.workdir), encoded(path))
    root = os.path.normpath(full)
    into = given.endswith(("/", "/..")) or given in (".", "..", "~")
    merge = given.endswith("/.")
    if os.path.isdir(root):
        if kind == "dir" and not merge and not into:
            _refuse_foreign(root, given, name, set(map(str, call.request["names"])))
        if into or (kind == "file" and os.path.isdir(root)):
            root = os.path.join(root, encoded(name))
    elif into or (merge and kind == "file"):
        root = os.path.join(root, encoded(name))
    text = decoded(root)
    tops = call.request["names"] if kind == "dir" and text == call.paths.workdir else [""]
    for one in (os.path.join(text, str(name)) for name in tops):
        for own in (f"{call.paths.workdir}/{name}" for name in OURS):
            if one.rstrip("/") == own or one.startswith(f"{own}/"):
                raise Refusal("usage", f"{shown(one)} is specctl's own there", "choose another place")
    above, free = room(root)
    if not os.path.isdir(above):
        raise Refusal("preflight", f"{shown(decoded(above))} is there, and is no folder", "choose another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise Refusal(
            "preflight",
            f"{shown(decoded(above))} cannot be written there by user {pwd.getpwuid(os.geteuid()).pw_name}",
            "choose another place, or set `user:` of this target in hosts.yaml",
        )  # fmt: skip
    there = os.path.lexists(part_of(root)) or os.path.lexists(root)
    disk = space.disk_of(decoded(above))
    return {"root": text, "there": there, "free": free, "disk": disk.words if disk else f"{free:,} are free"}


def _refuse_foreign(root: bytes, given: str, name: str, names: set[str]) -> None:
    """A folder that holds what the source does not was hardly meant to become a copy of it."""
    found = sorted(decoded(one) for one in os.listdir(root) if not one.startswith(PART))
    others = [one for one in found if one not in names]
    if not others:
        return
    listed = ", ".join(map(shown, others[:3])) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    raise Refusal(
        "usage", f"{shown(decoded(root))} is a folder there, and holds what the source does not ({listed})",
        f"{given}/ puts the source into it, as {name}; {given}/. merges the two (nothing is ever deleted)",
    )  # fmt: skip


def _look(parcel: Incoming, entries: list[Entry]) -> dict[str, Any]:
    claims = []
    for index, one in enumerate(entries):
        if one.kind == "file" and (claim := parcel.claim(index)) is not None:
            claims.append([index, *claim.wire()])
    return {"claims": claims, "conflicts": parcel.conflicts()}


def _receive(call: Call, parcel: Incoming, news: News) -> None:
    try:
        parcel.folders()
        for frame in incoming(call):
            parcel.accept(frame["events"], frame["raw"])
            news.say(lambda: {"done": parcel.done})
        parcel.finish()
    except Busy as busy:
        raise Refusal(
            "busy", f"another transfer writes {shown(decoded(busy.path))} right now", "wait for it to end, then repeat"
        ) from busy
    except NoRoom as error:
        raise Refusal(*_no_room(error, parcel)) from error
    finally:
        parcel.close()


def _no_room(error: NoRoom, parcel: Incoming) -> tuple[str, str, str]:
    files, _ = parcel.done
    where = shown(decoded(os.fsencode(error.filename)))
    disk = space.problem(error.filename, error)
    why = f"{error.strerror} ({disk})" if disk else error.strerror
    kept = f"; the {error.kept:,} bytes of it that came are kept beside it" if error.kept else ""
    return (
        "preflight",
        f"{where} cannot be written: {why}; {files:,} files are there{kept}",
        "make room there, then repeat the same command: it goes on where this one ended",
    )

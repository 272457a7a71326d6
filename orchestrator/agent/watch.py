"""Which logs a supervisor reads: the run's own, and those the program writes, as they come, go and are rotated.

Three things make a line say nothing of this run: it stood in the log before the run began (`foreign`), somebody else
writes the same log (`sharing`), or it is an old line that a process of the run copies into the run's own log, as the
`tail -f` of many a start script does. The last is believed only of lines that are equal, byte for byte, to what a
process of the run holds open for reading at that moment; a program that fails as it failed yesterday is heard.
"""

from __future__ import annotations

import os
import stat as stat_module
import time
from collections.abc import Callable, Mapping

from orchestrator.agent import foreign, sharing
from orchestrator.agent.follow import FOLLOWED_LIMIT, Follower
from orchestrator.agent.foreign import Held, Key, Snapshot
from orchestrator.agent.journal import Journal
from orchestrator.agent.merge import merge
from orchestrator.logscan import Event
from orchestrator.model import FollowedLog, Process, RunPaths, to_json

CLOSED_LIMIT = 16
COPIES_LIMIT = 1000
"""So many stretches of copied lines are written down, for who searches the log again."""
LOOK_S, QUICK_LOOK_S = 2.0, 0.02
SHARING_S, QUICK_SHARING_S = 2.0, 0.25
SELDOM_S = 10.0
PART_OF_A_CORE = 0.002
"""A look at many processes takes long: it is then made so much more seldom that it costs no more than this."""


class LogWatch:
    """The followers of one run; the first is the run's own log."""

    def __init__(
        self, paths: RunPaths, *, attempt: int, nonce: str, started_at: float, before: Snapshot,
        patterns: Mapping[str, str], journal: Journal, tree: Callable[[], list[Process]],
    ) -> None:  # fmt: skip
        """`tree`: asked for the run's processes as they are now. Raises `OSError` without the run's own log."""
        self.paths, self.nonce, self.started_at, self.before = paths, nonce, started_at, before
        self.patterns, self.journal, self.tree = patterns, journal, tree
        own = Follower(paths.log(attempt), patterns=patterns, copies=self._copies)
        self.followers: list[Follower] = [own]
        self.closed: list[FollowedLog] = []
        """Logs whose file is gone from its place and is open in no process of the run."""
        found = os.stat(own.path)
        self._own_key = (found.st_dev, found.st_ino)
        self._old_lines = {
            line for old in before.old.values() for line in old.text.splitlines() if line.strip()
        }  # fmt: skip
        self._copies_left = COPIES_LIMIT
        self._reads = False
        """Whether a process of the run was seen to read a log that is older than the run."""
        self._look_at = self._share_at = 0.0
        self.changed = False
        """Something other than bytes has changed in what `followed` says; whoever writes that down clears it."""

    def look(self, now: float, *, quick: bool) -> list[Event]:
        """Logs that have come, gone or moved since the last look, and what the ended ones say at their end.

        It does little when there is nothing to do: call it in every round.
        """
        for follower in self.followers[1:]:
            if follower.begun_again and follower.foreign is not None:
                follower.begun_again, self.changed = False, True
                self.journal.event("log_begun_again", **to_json(follower.foreign))
        own = self.followers[0]
        for start, end in own.copied[: self._copies_left]:
            self._copies_left -= 1
            self.journal.event("lines_copied", start=start, end=end)
        own.copied.clear()
        if time.monotonic() < self._look_at and not self._moved():
            return []
        begun_s = time.process_time()
        tree = self.tree()
        held = foreign.held(tree, self.paths.root)
        writing = {one.key for one in held if one.writing}
        reading = [one for one in held if not one.writing and not self._is_new(one)]
        self._reads = bool(reading)
        known = {self._own_key, *self._keys()}
        paths = [one.path for one in held if one.writing and not one.deleted and one.key not in known]
        paths += self._moved()
        known |= {(one.device, one.inode) for log in self.followed() if log.foreign for one in log.foreign.earlier}
        known |= {(log.foreign.device, log.foreign.inode) for log in self.closed if log.foreign}
        paths += foreign.grown([*self.before.named, *(one.path for one in reading)], self.before, known)
        events: list[Event] = []
        for path in dict.fromkeys(paths):
            events += self._take(path, writing, now)
        self._look_at = time.monotonic() + (QUICK_LOOK_S if quick else _pause_s(LOOK_S, begun_s))
        if paths or time.monotonic() >= self._share_at:
            begun_s = time.process_time()
            self._ask_who_writes(tree)
            self._share_at = time.monotonic() + (QUICK_SHARING_S if quick else _pause_s(SHARING_S, begun_s))
        return events + self._close_gone(writing, now)

    def followed(self) -> list[FollowedLog]:
        own, *others = [follower.followed() for follower in self.followers]
        return [own, *self.closed, *others]

    # --- coming -----------------------------------------------------------------------------------------------------

    def _take(self, path: str, writing: set[Key], now: float) -> list[Event]:
        """Follows the log at `path`: as a new one, or as what has taken the name of one that nobody writes any more."""
        log = foreign.describe(path, self.before, self.started_at)
        if log is None or (log.device, log.inode) in self._keys():
            return []
        events: list[Event] = []
        try:
            for follower in self.followers[1:]:
                if follower.path == log.path and follower.key not in writing and not follower.shared:
                    return follower.rotate(log, now)
            if len(self.followers) > FOLLOWED_LIMIT:
                idle = next((one for one in self.followers[1:] if one.key not in writing), None)
                if idle is None:
                    return []
                events = self._close(idle, now)
            self.followers.append(Follower(log.path, foreign=log, patterns=self.patterns))
            self.changed = True
        except OSError:
            return events
        self.journal.event("log_found", **to_json(log))
        return events

    def _keys(self) -> list[Key]:
        return [follower.key for follower in self.followers[1:]]

    def _moved(self) -> list[str]:
        """Followed names that now belong to another file."""
        keys, result = self._keys(), []
        for path in {follower.path for follower in self.followers[1:]}:
            key = _key_at(path)
            if key is not None and key not in keys:
                result.append(path)
        return result

    # --- whose lines ------------------------------------------------------------------------------------------------

    def _ask_who_writes(self, tree: list[Process]) -> None:
        mine = [one for one in self.followers[1:] if not one.shared]
        workdir = os.path.dirname(os.path.dirname(self.paths.root))
        found = sharing.others(
            [one.foreign for one in mine if one.foreign], workdir=workdir, run_id=self.paths.run_id, nonce=self.nonce,
            tree=tree,
        )
        for follower in mine:
            by = found.get(follower.path)
            if by is None:
                follower.note_unshared()
            else:
                follower.share(by)
                self.changed = True
                self.journal.event("log_shared", path=follower.path, by=by)

    def _is_new(self, one: Held) -> bool:
        """Whether the file was made while the run went on."""
        if one.key in self.before.old:
            return False
        born = foreign.birth_time(one.path)
        return one.path in self.before.absent or (born is not None and born >= self.started_at - 0.01)

    def _copies(self, lines: set[bytes]) -> set[bytes]:
        """Those of `lines` that a process of the run copies out of a log, where they are not this run's.

        Asked after the lines were read: whoever has copied them has the log open by now.
        """
        if not self._reads and self._old_lines.isdisjoint(lines):
            return set()
        result: set[bytes] = set()
        mine = {follower.key for follower in self.followers[1:] if not follower.shared}
        for one in foreign.held(self.tree(), self.paths.root):
            if one.writing or self._is_new(one):
                continue
            old = self.before.old.get(one.key)
            text = old.text if old is not None else b""
            if one.key not in mine:  # somebody else may be writing it just now
                text += b"\n" + foreign.end_of(one.path)
            result |= lines.intersection(text.splitlines())
        return {line for line in result if line.strip()}

    # --- going ------------------------------------------------------------------------------------------------------

    def _close_gone(self, writing: set[Key], now: float) -> list[Event]:
        events: list[Event] = []
        for follower in self.followers[1:]:
            if follower.key not in writing and not follower.behind and _key_at(follower.path) != follower.key:
                events += self._close(follower, now)
        return events

    def _close(self, follower: Follower, now: float) -> list[Event]:
        events = follower.finish(now)
        self.closed.append(follower.followed())
        follower.close()
        self.followers.remove(follower)
        self.changed = True
        if len(self.closed) > CLOSED_LIMIT:
            first, second = self.closed[:2]
            self.closed[:2] = [FollowedLog(summary=merge([first, second]), foreign=second.foreign)]
        return events


def _pause_s(least_s: float, begun_s: float) -> float:
    """How long to wait after work that began when this process had used `begun_s` seconds of a core."""
    return min(max(least_s, (time.process_time() - begun_s) / PART_OF_A_CORE), max(least_s, SELDOM_S))


def _key_at(path: str) -> Key | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat_module.S_ISREG(found.st_mode) else None

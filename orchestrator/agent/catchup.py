"""Reading a run's logs on where its supervisor, who is gone, stopped: a probe does it, and keeps what it found.

The program goes on without its supervisor, and may rotate its log or open another one meanwhile.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from orchestrator.agent import foreign, records, sharing
from orchestrator.agent.follow import FOLLOWED_LIMIT, Follower
from orchestrator.model import FollowedLog, LogSummary, Process, RunPaths, SupervisorRecord

CATCH_UP_BYTES = 64 << 20
"""How much unread log one probe reads."""


def catch_up(
    paths: RunPaths, supervisor: SupervisorRecord, logs: list[FollowedLog], *, own: str | None,
    patterns: dict[str, str], tree: list[Process], now: float,
) -> list[FollowedLog]:  # fmt: skip
    """Reads on where a supervisor that is gone stopped reading, and keeps what was found for the next probe.

    `own`: where the run's own log is, if it is shown to be that. `now`: by the run's clock."""
    known = logs
    logs = logs or [FollowedLog(summary=LogSummary())]
    by = others_of(paths, supervisor.nonce, logs)
    result = []
    for one in logs:
        if one.foreign is not None and one.foreign.path in by:
            until = max(one.foreign.base, one.summary.offset)
            one = dataclasses.replace(
                one, foreign=dataclasses.replace(one.foreign, shared=by[one.foreign.path], until=until)
            )
        elif (path := one.foreign.path if one.foreign else own) is not None:
            one = _read_on(one, path, patterns, now, since=supervisor.started_at, budget_bytes=CATCH_UP_BYTES)
        result.append(one)
    result += _opened_since(paths, supervisor, result, patterns, tree, now)
    if result != known:  # a run that somebody has looked at is not younger for that
        try:
            records.write_followed(paths, supervisor.nonce, supervisor.attempt, result)
        except OSError:
            pass  # a full or read-only disk: the next probe reads again
    return result


def _opened_since(
    paths: RunPaths, supervisor: SupervisorRecord, logs: list[FollowedLog], patterns: dict[str, str],
    tree: list[Process], now: float,
) -> list[FollowedLog]:  # fmt: skip
    """Logs that the program has made and opened since its supervisor was gone. What is older than the run is left
    alone: nobody noted how long it was then."""
    known = {(one.foreign.device, one.foreign.inode) for one in logs if one.foreign}
    known.add((supervisor.log_device, supervisor.log_inode))
    result: list[FollowedLog] = []
    for held in foreign.held(tree, paths.root):
        if held.writing and not held.deleted and held.key not in known and len(logs) + len(result) < FOLLOWED_LIMIT:
            known.add(held.key)
            log = foreign.describe(held.path, foreign.Snapshot(), supervisor.started_at)
            if log is not None and log.exact and (log.device, log.inode) == held.key:
                one = FollowedLog(summary=LogSummary(offset=log.base), foreign=log)
                result.append(_read_on(
                    one, log.path, patterns, now, since=supervisor.started_at, budget_bytes=CATCH_UP_BYTES,
                ))  # fmt: skip
    return result


def _read_on(
    one: FollowedLog, path: str, patterns: Mapping[str, str], now: float, *, since: float, budget_bytes: int
) -> FollowedLog:
    """`one` as it is after reading on where the supervisor, who is gone, stopped; also in the file that has taken the
    place of one that the program rotated away. `since`: when the run began."""
    names = [path]
    if one.foreign is not None:
        names = [found for found in [foreign.locate(path, (one.foreign.device, one.foreign.inode))] if found]
    for name in names:
        try:
            follower = Follower(
                name, foreign=one.foreign, summary=one.summary, patterns=patterns, grew_at=one.grew_at
            )
        except OSError:
            continue
        try:
            follower.advance(now, budget_bytes=budget_bytes)
            if one.foreign is not None and name != path and not follower.behind:
                newer = foreign.describe(path, foreign.Snapshot(), since)
                if newer is not None and newer.exact:
                    follower.rotate(newer, now)
                    follower.advance(now, budget_bytes=budget_bytes)
            return follower.followed()
        finally:
            follower.close()
    return one


def others_of(paths: RunPaths, nonce: str, logs: list[FollowedLog]) -> dict[str, str]:
    """Path -> who else writes it, of the logs that were the run's alone so far."""
    mine = [one.foreign for one in logs if one.foreign is not None and one.foreign.shared is None]
    workdir = os.path.dirname(os.path.dirname(paths.root))
    return sharing.others(mine, workdir=workdir, run_id=paths.run_id, nonce=nonce)

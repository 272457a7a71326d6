"""Who speaks in a line: the worker it names, and what stands in front of it (times, log levels).

`grammar.py` asks for the worker of a line with figures; `tracebacks.py` for whoever stands in front of any line.
"""

from __future__ import annotations

import re

PREFIX_NAME = (
    r"(?!(?:step|iter(?:ation)?|epoch|ep|batch|it|micro|eval|val|loss|pid|tid|line|v|seed|lr)[-_ :]?\d)"
    r"(?:(?:cuda|gpu|npu|rank):\d+|[A-Za-z][A-Za-z_]*(?:[-_ ]?[A-Za-z_]*\d+)+)"
)
"""Whoever stands in front of a line of a traceback: it says which lines belong together, and makes no worker."""
ROLES = (
    r"(?:rank|worker|drafter|target|trainer|learner|actor|replica|shard|thread(?:poolexecutor)?|default"
    r"|(?:spawn|fork|forkserver)?process|proc|device|gpu|cuda|npu|tpu)"
)
WORKER_NAME = rf"(?=(?:[A-Za-z]+[-_ ])*{ROLES}(?![A-Za-z])){PREFIX_NAME}"
MAX_NAME = 100
WORKER_KEY = re.compile(
    r"(?<![\w/.\-])[\"']?(?:worker[\"']?\s*[=:]\s*[\"']?"
    rf"(?P<name>\w[\w.:/-]{{0,{MAX_NAME - 1}}})|(?:local_|global_)?rank[\"']?\s*[=:]\s*(?P<rank>\d{{1,6}})(?![\w.]))",
    re.IGNORECASE,
)
WORKER_BRACKET = re.compile(rf"\[(?P<a>{WORKER_NAME})\]|\((?P<b>{WORKER_NAME})\)", re.IGNORECASE)
WORKER_BARE = re.compile(
    rf"(?P<name>{WORKER_NAME.replace(' ', '')}|(?:rank|worker|replica|gpu) \d+(?=:))(?::\s|\s+\|?\s*)", re.IGNORECASE
)
STAMP = (
    r"(?:[\[(]?\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?[\])]?:?"
    r"|[\[(]?\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?[\])]?:?"
    r"|[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+"
    r"|[\[(]?(?:DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)[\])]?(?::|(?=\s|\[)))"
)
LOGGED = re.compile(STAMP)
FRONT = re.compile(rf"\s+|[-|>:]\s|{STAMP}")


def front_end(line: str) -> int:
    """Where the timestamps and log levels in front of a line end."""
    end = 0
    while match := FRONT.match(line, end):
        end = match.end()
    return end


def worker_of(line: str, first: int) -> str | None:
    """The worker that `line` names: by key, or in front of the figure at `first`."""
    found = worker_span(line, first)
    return found[0] if found else None


def worker_span(line: str, first: int) -> tuple[str, int, int] | None:
    """The same name, and from where to where it stands in `line`."""
    match = WORKER_KEY.search(line)
    if match and match["rank"]:
        return f"rank{match['rank']}", *match.span("rank")
    if match:
        name = match["name"].rstrip(".:/-")
        return (name, match.start("name"), match.start("name") + len(name)) if name else None
    match = WORKER_BRACKET.search(line, 0, first)
    if match:
        group = "a" if match["a"] else "b"
        return match[group], *match.span(group)
    match = WORKER_BARE.match(line, front_end(line), first)
    return (match["name"], *match.span("name")) if match else None


def alone(line: str, first: int) -> bool:
    """Whether only times, levels and a worker's name stand in front of `first`."""
    front = WORKER_BRACKET.sub("", WORKER_KEY.sub("", line[front_end(line) : first])).strip(" :|-[(")
    return not front or WORKER_BARE.fullmatch(front + ": ") is not None

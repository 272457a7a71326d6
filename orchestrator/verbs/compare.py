"""`compare`: two runs, what changed between them, what became of the first one's failure, and how both train."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator import codediff, comparison, unexplained
from orchestrator.codediff import Code, FileChange, Text
from orchestrator.comparison import Answer, Failure, Side
from orchestrator.crew import Crew
from orchestrator.fleet import Fleet
from orchestrator.inventory import Target
from orchestrator.manifest import Entry
from orchestrator.model import BAD
from orchestrator.remote import understood
from orchestrator.resolve import LAST
from orchestrator.series import Series, Stretch, stretches
from orchestrator.verbs import log_errors
from orchestrator.verbs.show import Asked


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What the agent tells of a run beside its exceptions."""

    spec: Asked
    host: str
    env: dict[str, str]
    """Of each variable that was set, a hash of its value."""
    versions: dict[str, str]
    packages: dict[str, str] | None
    """What is installed in the environment that specctl made for it; None where it made none."""
    files: list[Entry] | None
    """None: its bundle was removed."""
    series: list[Series]
    """Of loss and tok/s, where there is any."""
    whole: bool
    """False: metrics.jsonl is so long that it was read in parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class One:
    """One of the two."""

    seen: log_errors.Result
    history: History
    side: Side

    @property
    def run_id(self) -> str:
        return self.side.run_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One thing that was done differently, but for files: `word` says which, `a` and `b` how."""

    word: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    a: One
    b: One
    files: list[FileChange]
    files_unknown: str | None
    """Why the files of the two cannot be compared."""
    config_diff: str
    changes: list[Change]
    answer: Answer
    training: dict[str, list[Stretch]]
    """Figure by figure, over the same steps."""
    notes: list[str]

    @property
    def changed(self) -> bool:
        return bool(self.files or self.config_diff or self.changes or self.files_unknown)


def run(fleet: Fleet, a: str, b: str | None) -> Result:
    """Raises as `resolve` does, and `IdentityError` for a run whose record or log cannot be shown to be its own."""
    crew = Crew(2)
    asked = [crew.do(partial(_one, fleet, query)) for query in (a, b or LAST)]
    one, other = (each.result() for each in asked)
    return between(fleet, one, other)


def between(fleet: Fleet, one: One, other: One) -> Result:
    """Of two that were gathered; asks for the texts of files that differ."""
    notes = [note for each in (one, other) for note in each.seen.notes]
    if one.run_id == other.run_id:
        notes.append("these are one and the same run")
    elif other.seen.probe.created_at < one.seen.probe.created_at:
        notes.append(f"B is older than A: specctl compare {other.run_id} {one.run_id} asks it the other way round")
    files, unknown = _files(fleet, one, other)
    config = _config_diff(one, other)
    changes = _target(one, other) + _gpus(one, other) + _changes(one.history, other.history) + _argv(one, other)
    changed = bool(files or unknown or config or changes)
    return Result(
        a=one, b=other, files=files, files_unknown=unknown, config_diff=config, changes=changes,
        answer=comparison.answer(one.side, other.side, changed=changed),
        training=_training(one.history, other.history), notes=notes,
    )  # fmt: skip


def _training(a: History, b: History) -> dict[str, list[Stretch]]:
    others = {series.metric: series for series in b.series}
    return {one.metric: stretches(one, others[one.metric]) for one in a.series if one.metric in others}


def _one(fleet: Fleet, query: str) -> One:
    return gathered(fleet, log_errors.run(fleet, query))


def gathered(fleet: Fleet, seen: log_errors.Result) -> One:
    return One(seen=seen, history=history_of(fleet, seen.target, seen.probe.run_id), side=side_of(seen))


def history_of(fleet: Fleet, target: Target, run_id: str) -> History:
    return understood(History, fleet.agent(target).call("history", run_id=run_id), target)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Texts:
    texts: dict[str, Text]


def texts_of(fleet: Fleet, target: Target, run_id: str, paths: Sequence[str]) -> dict[str, Text]:
    """Files of a run's bundle."""
    frame = fleet.agent(target).call("texts", run_id=run_id, paths=list(paths))
    return understood(_Texts, frame, target).texts


def side_of(seen: log_errors.Result) -> Side:
    verdict, probe = seen.verdict, seen.probe
    workers = {worker.name: worker.step for worker in verdict.workers}
    failures, printed = [], []
    for one in seen.found:
        if one.ended is None:
            printed.append(one.group.fingerprint)
            continue
        down = [name for name in one.group.down if name in verdict.workers_gone]
        steps = [step for name in down if (step := workers.get(name)) is not None]
        stepped = steps or [step for step in [verdict.step] if step is not None and not _before_steps(seen, down)]
        first = one.group.message.partition("\n")[0]
        failures.append(Failure(
            fingerprint=one.group.fingerprint, text=f"{one.group.type}: {first}" if first else one.group.type,
            workers=down, step=min(stepped, default=None), traceback=one.group.traceback,
        ))  # fmt: skip
    if (error := verdict.error) is not None:
        failures.sort(key=lambda failure: failure.fingerprint != error.fingerprint)
    elif not failures and verdict.state in BAD and verdict.state != "DEGRADED":
        end = unexplained.of(probe, verdict)
        failures.append(Failure(fingerprint=end.fingerprint, text=end.told, step=verdict.step))
    return Side(
        run_id=probe.run_id, state=verdict.state, why=verdict.why, live=verdict.live, step=verdict.step,
        phase=probe.summary.phase, workers=workers, failures=failures, printed=printed,
    )  # fmt: skip


def _before_steps(seen: log_errors.Result, down: list[str]) -> bool:
    """Whether these workers, who take steps as others do, had made none."""
    stepping = [
        worker for worker in seen.verdict.workers if worker.name in down and not worker.name.startswith("target")
    ]
    return bool(stepping) and all(worker.step is None for worker in stepping)


# --- what changed ---------------------------------------------------------------------------------------------------


def _files(fleet: Fleet, a: One, b: One) -> tuple[list[FileChange], str | None]:
    if a.history.spec.bundle == b.history.spec.bundle:
        return [], None
    gone = [f"the bundle of {one.run_id} was removed" for one in (a, b) if one.history.files is None]
    if a.history.files is None or b.history.files is None:
        return [], "; ".join(gone)
    return codediff.changes(
        Code(entries=a.history.files, texts=partial(texts_of, fleet, a.seen.target, a.run_id)),
        Code(entries=b.history.files, texts=partial(texts_of, fleet, b.seen.target, b.run_id)),
    ), None  # fmt: skip


def _config_diff(a: One, b: One) -> str:
    specs = a.history.spec, b.history.spec
    old, new = (spec.config_text or "" for spec in specs)
    names = (spec.config_path or "no configuration" for spec in specs)
    return codediff.unified(old, new, *names)


def _target(a: One, b: One) -> list[Change]:
    one, other = (f"{target.name} ({target.place})" for target in (a.seen.target, b.seen.target))
    return [Change(word="target", a=one, b=other)] if one != other else []


def _gpus(a: One, b: One) -> list[Change]:
    """Those that were claimed, or else those that were asked for."""
    claims = [one.seen.probe.gpu_claim for one in (a, b)]
    held = [", ".join(f"{gpu.name} {gpu.uuid}" for gpu in claim.held) if claim else "" for claim in claims]
    asked = [one.history.spec.gpus for one in (a, b)]
    one, other = (_said(words or numbers) for words, numbers in zip(held, asked, strict=True))
    return [Change(word="GPUs", a=one, b=other)] if one != other else []


def _changes(a: History, b: History) -> list[Change]:
    changes = []

    def compare(word: str, one: Any, other: Any) -> None:
        if one != other:
            changes.append(Change(word=word, a=_said(one), b=_said(other)))

    compare("host", a.host, b.host)
    for name in sorted({*a.versions, *b.versions}):
        compare(f"version of {name}", a.versions.get(name), b.versions.get(name))
    if a.packages is not None and b.packages is not None:
        for name in sorted({*a.packages, *b.packages}):
            compare(f"package {name}", a.packages.get(name), b.packages.get(name))
    elif a.spec.env_hash != b.spec.env_hash:
        compare("environment", a.spec.env_hash, b.spec.env_hash)
    for name in sorted({*a.env, *b.env}):
        if a.env.get(name) != b.env.get(name):
            theirs = "another value" if name in a.env and name in b.env else "set" if name in b.env else "not set"
            changes.append(Change(word=f"variable {name}", a="set" if name in a.env else "not set", b=theirs))
    compare("secrets", a.spec.secrets, b.spec.secrets)
    compare("patterns", a.spec.patterns, b.spec.patterns)
    return changes


def _argv(a: One, b: One) -> list[Change]:
    # The configuration's place is the run's own directory, which is another for every run.
    words = [
        ["{config}" if word.endswith(f"/{one.run_id}/config.yaml") else word for word in one.seen.probe.argv]
        for one in (a, b)
    ]
    return [] if words[0] == words[1] else [Change(word="command", a=shlex.join(words[0]), b=shlex.join(words[1]))]


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)

"""`diff`: from the code that a run was launched with to the code that stands here now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator import bundle, codediff
from orchestrator.codediff import Code, FileChange, Text
from orchestrator.errors import NotFound
from orchestrator.fleet import Fleet
from orchestrator.manifest import text_of
from orchestrator.resolve import Run, resolve
from orchestrator.verbs.compare import History, history_of, texts_of
from orchestrator.verbs.logs import refuse_damaged


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    run: Run
    history: History
    source: Path
    files: list[FileChange]
    notes: list[str]


def run(fleet: Fleet, query: str | None, *, source: Path) -> Result:
    """Raises as `resolve` and `collect` do, and `NotFound` for a run whose bundle was removed."""
    found = resolve(fleet, query)
    refuse_damaged(found.run)
    target, run_id = found.run.target, found.run.run_id
    history = history_of(fleet, target, run_id)
    if history.files is None:
        raise NotFound(
            "its bundle was removed, so its code cannot be compared", target=target.name, run_id=run_id,
            hint=f"specctl show {run_id} tells its commit, and --diff the changes it was launched with",
        )  # fmt: skip
    workdir = [Path(target.workdir).expanduser()] if target.ssh is None and target.vmid is None else []
    here = bundle.collect(source, without=workdir)
    files = codediff.changes(
        Code(entries=history.files, texts=partial(texts_of, fleet, target, run_id)),
        Code(entries=here.entries, texts=partial(_texts, here)),
    )
    return Result(run=found.run, history=history, source=source, files=files, notes=found.notes)


def _texts(here: bundle.Bundle, paths: Sequence[str]) -> dict[str, Text]:
    return {path: _text(here.files[path]) for path in paths}


def _text(path: Path) -> Text:
    if path.is_symlink():
        return Text(text=f"-> {path.readlink()}\n")
    text, why = text_of(path.read_bytes())
    return Text(text=text, why=why)

"""What every `--json` prints, as types: mypy holds `render/json.py` to them, and `schema.py` makes JSON Schema of them.

Nothing here is imported to print an answer. A `TypedDict` is an object that render writes down key by key; where a
whole record of a verb is printed, the record itself is the type, and `BESIDE` names those whose fields stand among an
object's own. How an answer may change is in docs/json.md; which version each is of, in `commands.ANSWERS`.
"""

from __future__ import annotations

from typing import Any

from orchestrator.answers import judged, moved, runs
from orchestrator.answers.base import Error, Head, Reach
from orchestrator.codediff import FileChange
from orchestrator.comparison import Side
from orchestrator.doctor.check import Outcome
from orchestrator.verbs import log_errors, plot, show, watch

ANSWERS: dict[str, tuple[Any, ...]] = {
    "launch": (runs.Launch, runs.Plan),
    "status": (runs.Status,),
    "logs": (runs.LogLine, runs.ErrorGroup),
    "stop": (runs.Stop,),
    "ls": (runs.Ls,),
    "show": (runs.Show,),
    "compare": (judged.Compare,),
    "errors": (judged.Errors,),
    "diff": (judged.Diff,),
    "plot": (judged.Plot,),
    "report": (judged.Report,),
    "watch": (watch.News,),
    "targets": (moved.Targets,),
    "doctor": (moved.Doctor,),
    "push": (moved.Push,),
    "pull": (moved.Pull,),
    "prune": (moved.Prune,),
}
"""Verb -> what it prints: one of these, or an `Error`."""
LINES = frozenset({"logs", "watch"})
"""Those that print one object a line."""
BESIDE: dict[Any, Any] = {
    runs.ErrorGroup: log_errors.Group,
    runs.Show: show.Shown,
    judged.Compared: Side,
    judged.File: FileChange,
    judged.PlotLine: plot.Line,
    moved.Surveyed: moved.Declared,
    moved.Checked: Outcome,
}

__all__ = ["ANSWERS", "BESIDE", "LINES", "Error", "Head", "Reach", "judged", "moved", "runs"]

"""`--json`: what other programs build on. One object, `schema_version` first; times are Unix seconds.

What each holds is typed in `orchestrator/answers`, of which `specctl schema VERB` is made: a key that is not there is
an error here. The files are the same as there.
"""

from __future__ import annotations

from orchestrator.render.json.base import of_error, text
from orchestrator.render.json.judged import of_compare, of_diff, of_errors, of_plot, of_report
from orchestrator.render.json.moved import of_doctor, of_prune, of_pull, of_push, of_targets
from orchestrator.render.json.runs import (
    of_error_group,
    of_launch,
    of_lines,
    of_ls,
    of_plan,
    of_run,
    of_show,
    of_status,
    of_stop,
)

__all__ = [
    "of_compare", "of_diff", "of_doctor", "of_error", "of_error_group", "of_errors", "of_launch", "of_lines", "of_ls",
    "of_plan", "of_plot", "of_prune", "of_pull", "of_push", "of_report", "of_run", "of_show", "of_status", "of_stop",
    "of_targets", "text",
]  # fmt: skip

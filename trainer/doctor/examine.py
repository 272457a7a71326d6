"""`python -m trainer doctor CONFIG`: what would cost a night, found before it begins.

Everything is looked at as the run would have it: its own target, data, devices, shapes and compiled functions. Each
check (`checks_*.py`) is a function of what has been got ready (`checkup.Patient`) and gives one `Finding`; one that
cannot be made, because what it needs has failed itself, says so. Nothing is written but what is kept for the next
start: tokenised data and compiled code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer import kept
from trainer.config import Config, ConfigError
from trainer.doctor import checks_data, checks_memory, checks_model, checks_step
from trainer.doctor.checkup import (
    Check,
    Finding,
    Missing,
    Patient,
    Quiet,
    fail,
    load_the_data,
    load_the_target,
    make_the_drafters,
)
from trainer.report.reporter import RunIdentity
from trainer.setup import on_this_machine

CHECKS = [
    Check(name="target", what="the target loads on its devices", look=load_the_target),
    Check(name="data", what="the data can be read and trained on", look=load_the_data),
    *checks_model.CHECKS,
    *checks_data.CHECKS,
    Check(name="drafters", what="drafters fit their devices, and what compiles, compiles", look=make_the_drafters),
    *checks_step.CHECKS,
    *checks_memory.CHECKS,
    *checks_step.RECORDED,
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    check: Check
    finding: Finding
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.check.name, "what": self.check.what, "seconds": round(self.seconds, 3),
            **dataclasses.asdict(self.finding),
        }  # fmt: skip


# --- the round ------------------------------------------------------------------------------------------------------


def examine(config: Config, *, quick: bool = False) -> Iterator[Result]:
    """Check after check, as each is done. Raises `ConfigError` for devices that this machine does not have."""
    directory = kept.run_directory(config, os.environ)
    reporter = Quiet(RunIdentity(directory=directory, run_id=directory.name))
    patient = Patient(config=on_this_machine(config, reporter), reporter=reporter, quick=quick)
    for check in CHECKS:
        started = time.monotonic()
        yield Result(check=check, finding=look(check, patient), seconds=time.monotonic() - started)


def look(check: Check, patient: Patient) -> Finding:
    try:
        return check.look(patient)
    except Missing as missing:
        return Finding(status="skip", evidence=f"needs {missing}, which could not be got ready")
    except ConfigError as error:
        said = str(error).removeprefix(f"{check.name}: ")
        return fail(said, "mend the configuration, or what it names")
    except Exception as error:  # whatever a check meets would meet the run: that is what it looks for
        text = "".join(traceback.format_exception(error))
        said = " ".join(str(error).split()) or "no message"
        return fail(f"{type(error).__name__}: {said[:300]}", "see the traceback in --json", traceback=text)


def doctor(config: Config, *, quick: bool = False, as_json: bool = False) -> int:
    """Examine, print, and return the exit code: 1 if a check failed."""
    shown: list[Result] = []
    started = time.monotonic()
    terminal = _terminal() if sys.stdout.isatty() and not as_json else None
    with terminal.status("doctor") if terminal else contextlib.nullcontext() as status:
        for result in examine(config, quick=quick):
            shown.append(result)
            if terminal:
                status.update(f"after {result.check.name}")
            elif not as_json:
                print("\n".join(lines(result)), flush=True)
    counts = {
        status: sum(result.finding.status == status for result in shown) for status in ("fail", "warn", "skip", "ok")
    }
    seconds = time.monotonic() - started
    if as_json:
        report = {"ok": not counts["fail"], "seconds": round(seconds, 3), "counts": counts,
                  "checks": [result.as_json() for result in shown]}  # fmt: skip
        print(json.dumps(report, indent=2, default=str))
        return int(counts["fail"] > 0)
    if terminal:
        terminal.print(_table(shown))
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    print(f"doctor: {told}, in {seconds:.1f} s", flush=True)
    return int(counts["fail"] > 0)


def lines(result: Result) -> list[str]:
    """For a log: what was found, and what to do about it."""
    finding = result.finding
    told = [f"{finding.status:<5} {result.check.name}: {finding.evidence}"]
    if finding.advice:
        told.append(f"      {result.check.name}: to do: {finding.advice}")
    return told


def _terminal() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()


def _table(shown: list[Result]) -> Any:
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for result in shown:
        finding = result.finding
        found = Text(finding.evidence)
        if finding.advice:
            found.append(f"\n-> {finding.advice}", style=styles[finding.status])
        table.add_row(Text(finding.status, style=styles[finding.status]), result.check.name, found)
    return table

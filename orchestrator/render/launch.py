"""How a launch looks while it climbs, and what it says at the end.

With a terminal the line at the bottom moves; without one every change is a plain line. Progress goes to stderr.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from orchestrator.model import Evidence, Rung
from orchestrator.plan import Plan
from orchestrator.render.text import colour, headline, size
from orchestrator.verbs.launch import Result


class Progress:
    """A `launch.Watcher` that prints. Use as a context manager."""

    def __init__(self, console: Console, *, live: bool = True) -> None:
        self.console = console
        self.begun = time.monotonic()
        self._live = Status("", console=console, spinner="dots") if live and console.is_terminal else None
        self._said = ""

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def step(self, text: str) -> None:
        self._busy(text, text)

    def phase(self, phase: str, detail: str) -> None:
        self._busy(phase, detail)

    def rung(self, rung: Rung, evidence: Evidence) -> None:
        spent = f"{time.monotonic() - self.begun:5.1f} s"
        self.console.print(
            f"[dim]{spent}[/]  [green]✓[/] [bold]{rung:<9}[/] {escape(evidence.value)}", highlight=False, soft_wrap=True
        )

    def _busy(self, brief: str, detail: str) -> None:
        """A terminal's last line shows the detail as it changes; plain lines are written for what is new only."""
        if self._live:
            self._live.update(f"[cyan]{escape(_one_line(detail, self.console.width - 4))}[/]")
        elif brief != self._said:
            self._said = brief
            spent = f"{time.monotonic() - self.begun:5.1f} s"
            self.console.print(f"{spent}  · {brief}", style="dim", highlight=False, markup=False, soft_wrap=True)


def _one_line(text: str, width: int) -> str:
    first = text.splitlines()[0] if text else ""
    return first if len(first) <= width else first[: max(0, width - 1)] + "…"


def show_result(console: Console, result: Result, *, program: str = "specctl") -> None:
    """The verdict, what it rests on, and what to type next; `program` is what to type for specctl itself."""
    spec, verdict = result.plan.spec, result.verdict
    state = verdict.state if verdict else "UNREACHABLE"
    console.print()
    word = "verified" if result.verified else "NOT VERIFIED"
    console.print(
        f"[{colour(state)}]{state}[/]  [bold]{spec.run_id}[/] on {escape(result.plan.target.name)} — {word}: reached "
        f"[bold]{result.rung}[/]" + (f", wanted {result.plan.until}" if result.rung != result.plan.until else ""),
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if result.verified and verdict:
        console.print(f"  {escape(verdict.why)}", highlight=False, soft_wrap=True)
    else:
        console.print(f"  {escape(result.why)}", highlight=False, soft_wrap=True)
    _show_foreign(console, result)
    _show_findings(console, result)
    if result.tail and not result.verified:
        console.print(f"\n  last lines of {escape(result.log)}:", highlight=False, soft_wrap=True)
        for line in result.tail:
            console.print("    " + line, highlight=False, markup=False, soft_wrap=True)
    console.print("\nNext:", highlight=False)
    for command in _next(result):
        console.print(f"  {program} {command}", style="cyan", highlight=False, markup=False, soft_wrap=True)


def _show_foreign(console: Console, result: Result) -> None:
    for log in result.probe.foreign_logs if result.probe else []:
        text = f"it writes a log of its own: {log.path}"
        if log.truncated:
            text += f" (the {size(log.before)} that were there before, {log.before:,} bytes, it has overwritten)"
        elif log.before:
            text += f" ({log.before:,} bytes were there before this run; only what comes after them is followed)"
        else:
            text += " (new, or empty before this run)"
        if not log.exact:
            text += "; its first lines may have been taken for old ones"
        console.print(f"  {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _show_findings(console: Console, result: Result) -> None:
    error = result.verdict.error if result.verdict else None
    findings = result.probe.summary.findings if result.probe else []
    shown = error or (findings[0] if findings and not result.verified else None)
    if shown is not None:
        label = "the failure" if error else "an exception in the text (nothing is known to have ended with it)"
        where = f" of worker {shown.worker}" if shown.worker else ""
        console.print(f"\n  {label}{where}, at byte {shown.offset:,} of this attempt's log:", highlight=False)
        for line in shown.traceback.splitlines() or [headline(shown)]:
            console.print("    " + line, style="red", highlight=False, markup=False, soft_wrap=True)
        if shown.hint:
            console.print(f"  hint: {shown.hint}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    elif findings:
        console.print(
            f"  note: an exception is in the text ({headline(findings[0])}), but nothing ended with it",
            style="yellow", highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def _next(result: Result) -> list[str]:
    commands = ["status", "logs @last --grep 'Exception|Error|tok/s|step=|drafter' -n 20"]
    if result.verdict is None or result.verdict.live:
        commands.append("stop @last")
    return commands


def show_plan(console: Console, plan: Plan) -> None:
    """What a launch would do; nothing has been done."""
    spec, bundle = plan.spec, plan.bundle
    project = sum(1 for name in bundle.files if name.startswith("project/"))
    source = f"{bundle.source} ({project} files)" if bundle.source else "none"
    if bundle.commit:
        source += f", git {bundle.commit[:12]}" + (" with uncommitted changes" if bundle.diff else "")
    if plan.requirements:
        environment = f"env {spec.env_hash}, made if it is not there from: {', '.join(plan.requirements)}"
    else:
        environment = plan.python or "nothing is prepared"
    rows = [
        ("target", f"{plan.target.name}: {plan.target.place}, workdir {plan.target.workdir}"),
        ("run id", f"{spec.run_id} (another one at each launch)"),
        ("program", " ".join(spec.argv)),
        ("project", source),
        ("bundle", f"{bundle.hash} ({len(bundle.files)} files; sent if it is not there)"),
        ("python", environment),
        ("env", ", ".join(spec.env) or "-"),
        ("secrets", ", ".join(spec.secrets) or "-"),
        ("until", plan.until),
    ]
    for name, value in rows:
        console.print(f"[bold]{name:<9}[/] {escape(value)}", highlight=False, soft_wrap=True)
    console.print("Nothing was done. The same command without --plan launches.", style="dim", highlight=False)

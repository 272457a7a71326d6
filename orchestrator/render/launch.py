"""How a launch looks while it climbs, and what it says at the end.

With a terminal the line at the bottom moves; without one every change is a plain line. Progress goes to stderr.
"""

from __future__ import annotations

import posixpath
import shlex
import time
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.text import Text

from orchestrator.health import headline
from orchestrator.logscan.launchers import is_report
from orchestrator.model import RUNGS, Evidence, Rung
from orchestrator.plan import Plan
from orchestrator.render.live import OnScreen
from orchestrator.render.text import at_home, colour, count, line, plain, size
from orchestrator.verbs.launch import Result

INDENT = 22
"""Where the words of a rung begin, and where they go on when they need a second row."""


class Progress(OnScreen):
    """A `launch.Watcher` that prints. Use as a context manager."""

    def __init__(self, console: Console, plan: Plan, *, live: bool = True) -> None:
        moves = live and console.is_interactive
        super().__init__(
            console, Live(self, console=console, refresh_per_second=10, transient=True) if moves else None
        )
        self.plan = plan
        self.begun = time.monotonic()
        self._bottom = Spinner("line" if plain(console) else "dots")
        self._busy_with = self._said = ""

    def __rich__(self) -> Spinner:
        """The line at the bottom: drawn anew all the time, so that its seconds go on while nothing else moves."""
        text = f"{time.monotonic() - self.begun:.0f} s  {self._busy_with}"
        self._bottom.update(text=Text(self.shortened(text), style="cyan"))
        return self._bottom

    def step(self, text: str) -> None:
        self._busy(text, text)

    def phase(self, phase: str, detail: str) -> None:
        self._busy(phase, detail)

    def output(self, line: str) -> None:
        self._busy_with = line

    def rung(self, rung: Rung | Literal["preflight", "claim"], evidence: Evidence) -> None:
        tick = "+" if plain(self.console) else "✓"
        text = Text.assemble(
            (f"{time.monotonic() - self.begun:5.1f} s", "dim"), "  ", (tick, "green"), " ", (f"{rung:<9}", "bold"), " ",
            at_home(evidence.value, self.plan.target),
        )  # fmt: skip
        line(self.console, text, first=0, indent=INDENT)

    def _busy(self, brief: str, detail: str) -> None:
        """A terminal's last line shows the detail as it changes; plain lines are written for what is new only."""
        self._busy_with = at_home(detail, self.plan.target)
        if self._shown is None and brief != self._said:
            self._said = brief
            spent = f"{time.monotonic() - self.begun:5.1f} s"
            text = f"{spent}  {'-' if plain(self.console) else '·'} {at_home(brief, self.plan.target)}"
            line(self.console, text, first=0, indent=INDENT - 10, style="dim")


def show_result(console: Console, result: Result, *, program: str = "specctl") -> None:
    """The verdict, what it rests on, and what to type next; `program` is what to type for specctl itself."""
    spec, verdict = result.plan.spec, result.verdict
    state = verdict.state if verdict else "UNREACHABLE"
    console.print()
    word = "verified" if result.verified else "waits in line" if result.queued else "NOT VERIFIED"
    wanted = f", wanted {result.plan.until}" if result.rung != result.plan.until else ""
    head = f"[{colour(state)}]{state}[/]  [bold]{spec.run_id}[/] on {escape(result.plan.target.name)}: {word}, reached "
    line(console, Text.from_markup(f"{head}[bold]{result.rung}[/]{wanted}"), first=0)
    if result.queued:
        line(console, "It starts by itself when it is its turn, whatever becomes of this machine.", style="cyan")
    why = verdict.why if result.verified and verdict else result.why
    for text in why.removeprefix(f"{state}: ").splitlines():
        line(console, text)
    _show_foreign(console, result, program)
    _show_findings(console, result)
    if result.tail and not result.verified:
        console.print()
        line(console, f"last lines of {posixpath.basename(result.log)}:")
        for text in result.tail:
            line(console, text, first=4, indent=6)
    console.print("\nNext:", highlight=False)
    for command in next_commands(result):
        console.print(f"  {program} {command}", style="cyan", highlight=False, markup=False, soft_wrap=True)


def _show_foreign(console: Console, result: Result, program: str) -> None:
    logs = result.probe.foreign_logs if result.probe else []
    # One that is plainly this run's has nothing to say that another one has not: `specctl show` lists them all.
    plain_ones = [log for log in logs if not (log.before or log.shared) and log.exact]
    for log in [log for log in logs if log not in plain_ones[1:]]:
        text = f"it writes a log of its own: {log.path}"
        if log.truncated:
            text += f" (the {size(log.before)} that were there before, {log.before:,} bytes, it has overwritten)"
        elif log.before:
            text += f" ({log.before:,} bytes were there before this run; only what comes after them is followed)"
        else:
            text += " (new, or empty before this run)"
            if len(plain_ones) > 1:
                text += f", and {len(plain_ones) - 1} more such: {program} show {result.plan.spec.run_id}"
        if log.shared:
            text += f"; {log.shared} writes it too, so nobody can tell whose a line is, and none is used"
        if not log.exact:
            text += "; its first lines may have been taken for old ones"
        line(console, text, style="yellow")


def _show_findings(console: Console, result: Result) -> None:
    error = result.verdict.error if result.verdict else None
    findings = result.probe.summary.findings if result.probe else []
    if result.verdict and result.verdict.last_words and result.verdict.last_words.before:
        findings = [one for one in findings if not is_report(one.type)]
    shown = error or (findings[0] if findings and not result.verified else None)
    if shown is not None:
        label = "the failure" if error else "an exception in the text (nothing is known to have ended with it)"
        where = f" of worker {shown.worker}" if shown.worker else ""
        console.print()
        line(console, f"{label}{where}, at byte {shown.offset:,} of this attempt's log:")
        for text in shown.traceback.splitlines() or [headline(shown)]:
            line(console, text, first=4, indent=6, style="red")
        if shown.hint:
            line(console, f"hint: {shown.hint}", style="yellow")
    elif findings:
        said = f"note: an exception is in the text ({headline(findings[0])}), but nothing ended with it"
        line(console, said, style="yellow")


def left(result: Result, *, program: str) -> str:
    """What to say when whoever watched has left."""
    run_id, verdict = result.plan.spec.run_id, result.verdict
    seen = f"last seen {verdict.state} ({verdict.why})" if verdict else "not looked at since its start"
    goes = "that does not stop it" if verdict is None or verdict.live else "it has ended"
    return f"stopped watching {run_id}: reached {result.rung}, {seen}; {goes}: {program} status {run_id}"


def next_commands(result: Result) -> list[str]:
    """What makes sense to type after this launch, with the run's full id: it may not be the last one for long."""
    run_id = result.plan.spec.run_id
    state = result.verdict.state if result.verdict else "UNREACHABLE"
    if state == "NEVER_STARTED":
        return [f"status {run_id}"]
    commands = [f"status {run_id}"]
    if result.queued:
        return [*commands, f"watch {run_id}", f"stop {run_id}"]
    if RUNGS.index(result.rung) >= RUNGS.index("process") or result.tail:
        look = "-n 50"
        if result.verified:
            look = "--grep 'Exception|Error|tok/s|step=|drafter' -n 20"
        elif result.verdict is not None and result.verdict.live:
            look = "-f"
        commands.append(f"logs {run_id} {look}")
    if result.verdict is None or result.verdict.live:
        commands.append(f"stop {run_id}")
    return commands


def show_plan(console: Console, plan: Plan) -> None:
    """What a launch would do; nothing has been done."""
    spec, bundle = plan.spec, plan.bundle
    project = sum(1 for name in bundle.files if name.startswith("project/"))
    source = f"{at_home(bundle.source)} ({count(project, 'file')})" if bundle.source else "none"
    if bundle.commit:
        source += f", git {bundle.commit[:12]}" + (" with uncommitted changes" if bundle.diff else "")
    if plan.requirements:
        environment = f"env {spec.env_hash}, made if it is not there from: {', '.join(plan.requirements)}"
        if house := plan.wheelhouse:
            environment += f"; out of {house.shown} alone ({count(len(house.wheels), 'file')}, {size(house.size)})"
    else:
        environment = plan.python or "nothing is prepared"
    config = "-"
    if spec.config_path:
        kept = "; {config} above is its copy in the run directory" if spec.trainer else "; read by specctl alone"
        config = f"{spec.config_path}{kept}"
    rows = [
        ("target", f"{plan.target.name}: {plan.target.place}, workdir {plan.target.workdir}"),
        ("run id", f"{spec.run_id} (another one at each launch)"),
        ("program", at_home(shlex.join(spec.argv).replace("'{config}'", "{config}"), plan.target)),
        ("config", config),
        ("project", source),
        ("bundle", f"{bundle.hash} ({count(len(bundle.files), 'file')}; sent if it is not there)"),
        ("python", at_home(environment, plan.target)),
        ("env", " ".join(f"{name}={shlex.quote(value)}" for name, value in spec.env.items()) or "-"),
        ("reads", ", ".join(f"{key}={path}" for key, path in plan.reads.items()) or "-"),
        ("secrets", f"{', '.join(spec.secrets)} (from your environment; never shown)" if spec.secrets else "-"),
        ("gpus", _gpus(plan)),
        ("until", plan.until),
    ]
    for name, value in rows:
        line(console, Text.assemble((f"{name:<9}", "bold"), " ", value), first=0, indent=10)
    console.print("Nothing was done. The same command without --plan launches.", style="dim", highlight=False)


def _gpus(plan: Plan) -> str:
    wish = plan.spec.wish
    if wish is None:
        return "none is claimed"
    names = ", ".join(wish.among)
    which = names or "all that it will see, if there are any"
    if wish.count is not None and wish.count != len(wish.among):
        which = f"{wish.count} of {names or 'those that it would see'}"
    return f"claims {which}" + ("; waits in line for them" if wish.queue else "")

"""One run on one page, read from top to bottom: what is known and by what, then what was asked, then the details."""

from __future__ import annotations

import posixpath
import shlex
import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from orchestrator.health import age, headline
from orchestrator.logscan.launchers import SIGNALS
from orchestrator.model import Finding, ForeignLog, Worker
from orchestrator.render.text import at_home, colour, count, line, named, number, one_line, size
from orchestrator.timeline import Event
from orchestrator.verbs.show import Result

LABEL = 12
FINDINGS = 4
PROCESSES = 8


Row = Callable[[str, str, str], None]
"""Takes a label, its value, and how that is shown."""


def show(console: Console, result: Result, *, program: str) -> None:
    def row(name: str, value: str, style: str) -> None:
        text = Text.assemble((f"{name:<{LABEL}}", "bold" if not name.startswith(" ") else "dim"), " ", (value, style))
        line(console, text, first=0, indent=LABEL + 1)

    page = _Page(result, row, clock, hints=True)
    verdict, run = result.run.verdict, result.run
    line(console, Text.assemble((verdict.state, colour(verdict.state)), "  ", (run.run_id, "bold"),
                                f" on {run.target.name}"), first=0)  # fmt: skip
    line(console, one_line(verdict.why))
    page.evidence()
    _failure(console, verdict.error)
    page.ending()
    console.print()
    page.asked()
    console.print()
    page.details()
    page.events()
    _following(console, result, program)


def rows(result: Result, when: Callable[[float], str]) -> list[tuple[str, str]]:
    """What a run was asked and what is known of it, beside its evidence and its failure, as labels and values."""
    found: list[tuple[str, str]] = []

    def row(name: str, value: str, style: str) -> None:
        found.append((name, value))

    page = _Page(result, row, when, hints=False)
    page.ending()
    page.asked()
    page.details()
    return found


def _failure(console: Console, error: Finding | None) -> None:
    if error is None:
        return
    console.print()
    line(console, Text.assemble(("failure", "bold red"), f" of worker {error.worker}" if error.worker else ""),
         first=0)  # fmt: skip
    for text in error.traceback.splitlines() or [headline(error)]:
        line(console, text, first=4, indent=6, style="red")
    if error.hint:
        line(console, f"hint: {error.hint}", first=4, style="yellow")


def _following(console: Console, result: Result, program: str) -> None:
    probe, run_id, live = result.run.probe, result.run.run_id, result.run.verdict.live
    words = [f"logs {run_id} -f" if live else f"logs {run_id} -n 50"] if probe.log.verified else []
    words += [f"attach {run_id}"] if live and probe.supervisor_alive else []
    words += [f"stop {run_id}"] if live or probe.tree else []
    if not words:
        return
    console.print()
    line(console, "Next:", first=0)
    for word in words:  # whole, however narrow it is: somebody may copy it
        console.print(f"  {program} {word}", style="cyan", highlight=False, markup=False, soft_wrap=True)


class _Page:
    """Row by row; `when` says a time, with its day where that is of use. `hints`: what to type for more."""

    def __init__(self, result: Result, row: Row, when: Callable[[float], str], *, hints: bool) -> None:
        self.result, self._emit, self.when, self.hints = result, row, when, hints
        self.run, self.shown = result.run, result.shown
        self.probe, self.verdict_, self.target = result.run.probe, result.run.verdict, result.run.target
        self.now = self.probe.observed_at

    # --- what is known ----------------------------------------------------------------------------------------------

    def evidence(self) -> None:
        at = self.when(self.now)
        rows = [(item.what, self._home(item.value)) for item in self.result.evidence]
        if self.result.rung != "step" and self.verdict_.live:
            rows.append(("not seen", self.result.missing))
        for name, value in rows:
            self._row(f"  {name}", value, style="yellow" if name == "not seen" else "")
        self._row("  seen at", f"{at}, by the clock of {self.shown.host}", style="dim")

    def ending(self) -> None:
        end, shown = self.probe.exit, self.shown
        if shown.stop is not None:
            how = "at once" if shown.stop.now else f"with {shown.stop.grace_s:.0f} s of grace"
            did = f"; {shown.stopper.doing}" if shown.stopper and not shown.stopper.finished else ""
            self._row("stop asked", f"by {shown.stop.by} at {self.when(shown.stop.at)}, {how}{did}")
        if end is None:
            return
        if end.never_started is not None:
            self._row("ended", f"{self.when(end.at)}: never started", style=colour("NEVER_STARTED"))
            return
        how = f"exit code {end.code}"
        if end.signal is not None:
            how = f"by {SIGNALS.get(end.signal, f'signal {end.signal}')}"
        took = f" after {age(end.at - self.probe.created_at)}"
        last = f", last step {end.last_step:,}" if end.last_step is not None else ""
        oom = f", {count(end.oom_kills, 'kill')} for memory in the container" if end.oom_kills else ""
        self._row("ended", f"{self.when(end.at)}{took}, {how}{last}{oom}" + (", a stop had asked for it" * end.stopped))

    # --- what was asked ---------------------------------------------------------------------------------------------

    def asked(self) -> None:
        self._identity()
        self._asked()
        self._deployed()

    def _identity(self) -> None:
        probe, record = self.probe, self.shown.supervisor
        boot = {True: "not restarted since", False: "restarted since then", None: "no start recorded"}[probe.same_boot]
        if probe.same_boot is None and (probe.unreadable or probe.damaged or probe.closed):
            boot = "the record of its start cannot be read"
        place = f"{self.target.place}, host {self.shown.host} ({boot})"
        if probe.elsewhere:
            place += f"; the run is of the host {probe.elsewhere}"
        if probe.closed is not None:
            self._row("where", place)
            self._row("directory", self._home(self.shown.root))
            return
        self._row("attempt", f"{probe.attempt}, nonce {probe.nonce[:8]}" + (
            f", supervisor pid {record.pid} {'alive' if probe.supervisor_alive else 'gone'}" if record else ""
        ))  # fmt: skip
        self._row("where", place)
        self._row("directory", self._home(self.shown.root))
        if probe.damaged is None:
            launched = f"{self.when(probe.created_at)}, {age(self.now - probe.created_at)} ago, by {probe.owner}"
            self._row("launched", launched)
        if probe.note:
            self._row("note", one_line(probe.note))

    def _asked(self) -> None:
        asked = self.shown.spec
        if asked is None:
            self._row("record", self.probe.damaged or self.probe.closed or "run.json cannot be read", style="yellow")
            return
        self._row("program", one_line(self._home(shlex.join(self.probe.argv))))
        if asked.config_text is not None:
            digest = (asked.config_sha256 or "")[:12]
            self._row("config", f"{asked.config_path}, sha256 {digest}" + " (--config prints it)" * self.hints)
        if asked.env:
            self._row("env", ", ".join(asked.env))
        if asked.secrets:
            self._row("secrets", f"{', '.join(asked.secrets)} (values are nowhere recorded)")
        if asked.patterns:
            self._row("patterns", ", ".join(f"{name}: {text}" for name, text in asked.patterns.items()))

    def _deployed(self) -> None:
        asked, record = self.shown.spec, self.shown.record
        if asked is None:
            return
        code = f"bundle {asked.bundle}"
        if asked.git_commit:
            code += f", git {asked.git_commit[:12]}"
        if asked.diff_bytes:
            code += f" with {size(asked.diff_bytes)} of uncommitted changes" + " (--diff prints them)" * self.hints
        self._row("code", code)
        found = {name: str(value).removeprefix(f"{name} ") for name, value in (record.versions or {}).items() if value}
        versions = [f"{name} {value}" for name, value in found.items() if name != "specctl"]
        environment = [f"environment {asked.env_hash}"] if asked.env_hash else []
        self._row("with", ", ".join([*environment, *versions, f"specctl {asked.specctl_version}"]))

    # --- the details ------------------------------------------------------------------------------------------------

    def details(self) -> None:
        self._processes()
        self._workers()
        self._logs()
        self._gpus()
        self._findings()
        self._checkpoints()

    def _processes(self) -> None:
        tree = self.probe.tree
        if self.probe.closed is not None:
            self._row("processes", "not known", style="yellow")
            return
        if not tree:
            self._row("processes", "none is left" if not self.verdict_.live else "none was seen")
            return
        for number_, process in enumerate(tree[:PROCESSES]):
            since = self.shown.since.get(str(process.pid))
            text = f"{process.pid} {one_line(process.name)}, state {process.state}"
            text += f", {age(self.now - since)}" if since is not None else ""
            text += "" if process.marked else ", without the mark (known by descent, start or log)"
            self._row("processes" if number_ == 0 else "", text)
        if len(tree) > PROCESSES:
            self._row("", f"and {len(tree) - PROCESSES} more: --json lists them")

    def _workers(self) -> None:
        gone = set(self.verdict_.workers_gone)
        for number_, worker in enumerate(sorted(self.verdict_.workers, key=lambda one: one.name not in gone)):
            text, style = self._worker(worker), ""
            if worker.name in gone:
                text, style = f"{text}, GONE" + (f": {worker.error}" if worker.error else ""), colour("DEGRADED")
            self._row("workers" if number_ == 0 else "", text, style=style)

    def _worker(self, worker: Worker) -> str:
        parts = [worker.name]
        if worker.step is not None:
            ago = f" {age(self.now - worker.step_at)} ago" if worker.step_at is not None else ""
            parts.append(f"step {worker.step:,}{ago}")
        if worker.tok_s is not None:
            parts.append(f"{number(worker.tok_s)} tok/s")
        if worker.loss is not None:
            parts.append(f"loss {number(worker.loss, 4)}")
        return ", ".join(parts)

    def _logs(self) -> None:
        log = self.probe.log
        if self.probe.closed is not None or self.probe.damaged is not None:
            self._row("log", f"{posixpath.basename(log.path)}, which is not shown: {log.why}", style="yellow")
            return
        text = f"{posixpath.basename(log.path)}, {size(log.size)}, {count(self.probe.summary.lines, 'line')} read"
        self._row("log", text + ("" if log.verified else f"; NOT this attempt's: {log.why}"),
                  style="" if log.verified else "yellow")  # fmt: skip
        for foreign in self.probe.foreign_logs:
            self._row("own log", _foreign(foreign))

    def _gpus(self) -> None:
        probe = self.probe
        claim = probe.gpu_claim
        if claim is not None and claim.held:
            state = "has claimed" if probe.supervisor_alive and self.verdict_.live else "had claimed"
            held = ", ".join(f"{one.number} ({one.uuid})" for one in claim.held)
            self._row("gpus", f"{state} {held} in {claim.claims_dir}")
        elif claim is not None:
            self._row("gpus", f"asks for {claim.wish} in {claim.claims_dir}")
        if not (probe.gpus_declared or probe.gpu_devices):
            return
        held = f"holds {', '.join(probe.gpu_devices)}" if probe.gpu_devices else "holds none"
        asked = f"asked for {', '.join(map(str, probe.gpus_declared))}; " if probe.gpus_declared else ""
        beat = probe.heartbeat
        memory = "".join(
            f", {size(bytes_)} on {name} by its heartbeat"
            for name, bytes_ in (beat.gpu_memory_bytes if beat else {}).items()
        )
        self._row("gpus", f"{asked}{held}{memory}")
        if self.shown.gpus_error:
            self._row("", self.shown.gpus_error, style="yellow")
        for gpu in self.shown.gpus:
            use = f"{gpu.get('utilization_percent')} % busy" if gpu.get("utilization_percent") is not None else ""
            memory = f"{number(gpu.get('memory_used_mib'), 0)} of {number(gpu.get('memory_total_mib'), 0)} MiB"
            self._row("", ", ".join(filter(None, [f"GPU {gpu.get('index')} {gpu.get('name')}", use, memory])))

    def _findings(self) -> None:
        findings, total = self.probe.summary.findings, self.probe.summary.findings_total
        if total == 1 and self.verdict_.error is not None:
            return  # it is the failure above
        for number_, finding in enumerate(findings[:FINDINGS]):
            times = f", {finding.count:,} times" if finding.count > 1 else ""
            text = f"{named(finding)} at byte {finding.offset:,}{times}"
            self._row("exceptions" if number_ == 0 else "", one_line(text), style="yellow")
        if total > min(FINDINGS, len(findings)):
            self._row("", f"{total:,} in all: specctl logs {self.run.run_id} --errors")

    def _checkpoints(self) -> None:
        whole = [one for one in self.shown.checkpoints if one.damage is None]
        if whole:
            last = whole[-1]
            text = f"step {last.step:,} whole, {size(last.bytes)}, {age(self.now - last.at)} ago"
            if len(whole) > 1:
                text += f"; also {', '.join(f'{one.step:,}' for one in whole[-2::-1][:6])}"
            self._row("checkpoints", text)
        for one in self.shown.checkpoints:
            if one.damage is not None:
                self._row("checkpoints" if not whole else "", f"step {one.step:,} NOT whole: {one.damage}",
                          style="yellow")  # fmt: skip

    def events(self) -> None:
        for number_, event in enumerate(self.shown.events):
            lead = "..." if number_ == 0 and self.shown.events_before else ""
            self._row("events" if number_ == 0 else "", f"{clock(event.at, day=False)} {lead}{_event(event)}")

    def _row(self, name: str, value: str, *, style: str = "") -> None:
        self._emit(name, value, style)

    def _home(self, text: str) -> str:
        return at_home(text, self.target)


def clock(at: float, *, day: bool = True) -> str:
    """The time of day here; the date before it, unless it is of today or not wanted."""
    then = time.localtime(at)
    short = time.strftime("%H:%M:%S", then)
    return short if not day or then[:3] == time.localtime()[:3] else time.strftime("%Y-%m-%d ", then) + short


def _foreign(log: ForeignLog) -> str:
    text = f"{log.path}, from byte {log.base:,} on: {size(log.own_bytes)} are this run's"
    if log.before:
        text += f", {size(log.before)} were there before" + (" and are overwritten" if log.truncated else "")
    if log.restarts:
        text += f", begun again {log.restarts} times"
    if log.shared:
        text += f"; {log.shared} writes it too"
    return text if log.exact else text + "; its first lines may have been taken for old ones"


def _event(event: Event) -> str:
    fields = event.fields
    if event.event == "phase":
        inner = fields.get("fields")
        return one_line(f"phase {fields.get('phase')}" + (f" {inner}" if inner and inner != "{}" else ""))
    if event.event == "exception":
        return one_line(f"exception {fields.get('type')}: {fields.get('message')}")
    if "path" in fields:  # a log or a checkpoint: what else is known of it stands above
        return one_line(f"{event.event} {fields['path']}")
    above = ("at", "last_words")
    told = {name: value for name, value in fields.items() if name not in above and value not in (None, "", 0, False)}
    told |= {"code": 0} if fields.get("code") == 0 else {}
    said = " ".join(f"{name}={value}" for name, value in told.items())
    return one_line(f"{event.event} {said}"[:160].rstrip())

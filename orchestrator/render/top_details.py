"""What `top` says of the selected run or target: state, reason, curves, workers and GPUs, the weightiest first."""

from __future__ import annotations

from rich.text import Text

from orchestrator.blame import said_by
from orchestrator.health import age, headline
from orchestrator.model import Worker
from orchestrator.render.status import claimants
from orchestrator.render.text import count, number, one_line
from orchestrator.render.top import Row, spark
from orchestrator.resolve import Run
from orchestrator.verbs.trend import Trends


def details(row: Row, trends: Trends, *, width: int, height: int, bars: str, program: str) -> list[Text]:
    """At most `height` lines about the selected run or target, the weightiest first."""
    return (_of_target(row, program) if row.run is None else _of_run(row, row.run, trends, width, bars))[:height]


def _of_run(row: Row, run: Run, trends: Trends, width: int, bars: str) -> list[Text]:
    verdict, probe = run.verdict, run.probe
    lead = Text.assemble((row.state, row.style), " ", (run.run_id, "bold"), f" on {run.target.name}")
    lead.append(f"  {row.old}" if row.old else f"  seen {row.seen} ago", style="magenta" if row.old else "dim")
    lines = [lead, Text(one_line(f"then: {verdict.why}" if row.old else verdict.why), style="dim" if row.old else "")]
    if verdict.error is not None and said_by(verdict.error) not in verdict.why:
        lines.append(Text(one_line(f"{headline(verdict.error)} in {verdict.error.worker or 'the run'}"), style="red"))
    for metric, name, digits in (("tok_s", "tok/s", 1), ("loss", "loss ", 4)):
        points = trends.of(run, metric)
        if points:
            first, last = points[0], points[-1]
            figures = f" {number(first[1], digits)} at step {first[0]:,.0f}"
            figures += f", {number(last[1], digits)} at {last[0]:,.0f}"
            room = max(10, width - len(name) - len(figures) - 2)
            curve = (spark(points, min(room, 120), bars), "cyan" if row.fresh else "dim")
            lines.append(Text.assemble(f"{name} ", curve, figures))
    names = [_worker(one, one.name in verdict.workers_gone, verdict.live,
                     probe.observed_at + (row.sighting.age_s or 0.0))
             for one in sorted(verdict.workers, key=lambda one: one.name not in verdict.workers_gone)]  # fmt: skip
    lines += [Text(one_line(text), style="bold red" if " GONE" in text else "" if row.fresh else "dim")
              for text in names]  # fmt: skip
    lines += _gpu_lines(row)
    if probe.note:
        lines.append(Text(one_line(f"note: {probe.note}"), style="dim"))
    lines.append(Text(one_line(f"owner {probe.owner} · {' '.join(probe.argv)}"), style="dim"))
    return lines


def _worker(one: Worker, gone: bool, live: bool, now: float) -> str:
    state = "GONE" if gone else "alive" if live else "ended"
    parts = [f"{one.name:<12} {state:<5}", f"step {'-' if one.step is None else f'{one.step:,}'}"]
    parts += [f"{number(one.tok_s)} tok/s"] if one.tok_s is not None else []
    parts += [f"loss {number(one.loss, 4)}"] if one.loss is not None else []
    parts += [f"{age(now - one.step_at)} ago"] if one.step_at is not None else []
    return "  ".join(parts) + (f"  {one.error}" if one.error else "")


def _gpu_lines(row: Row) -> list[Text]:
    """Every GPU of the target, with the runs that have claimed it, and those whose processes have it open."""
    view = row.sighting.view
    if view is None:
        return []
    style = "" if row.fresh else "dim"
    lines = [Text(one_line(view.gpus_error), style="yellow")] if view.gpus_error else []
    for gpu in view.gpus:
        use, used, total = gpu["utilization_percent"], gpu["memory_used_mib"], gpu["memory_total_mib"]
        said = f"GPU {gpu['index']} {gpu['name']}  {'-' if use is None else use} % busy  "
        said += f"{number(used, 0)} of {number(total, 0)} MiB"
        said += "".join(f"  claimed by {run_id}" for run_id in claimants(view.runs, gpu["index"]))
        device = f"/dev/nvidia{gpu['index']}"
        holders = [run.run_id for run in row.sighting.runs if device in run.probe.gpu_devices]
        said += f"  open in {', '.join(holders)}" if holders else "  open in no run"
        lines.append(Text(one_line(said), style=style))
    return lines


def _of_target(row: Row, program: str) -> list[Text]:
    one = row.sighting
    lines = [Text.assemble((one.target.name, "bold"), f" ({one.target.place}): ", (row.state, row.style))]
    lines[0].append(f" {row.old}" if row.old else f", seen {row.seen} ago")
    if one.error is not None:
        lines[0].append(". What runs there is unknown." if one.age_s is None else "")
        if one.error.hint:
            lines.append(Text(one_line(one.error.hint), style="cyan"))
    lines += _gpu_lines(row)
    if one.view is not None:
        live = sum(run.verdict.live for run in one.runs)
        lines.append(Text(f"{count(live, 'run')} live, {len(one.runs) - live} ended" if row.fresh else
                          f"{count(live, 'run')} lived when it was last seen"))  # fmt: skip
        if one.view.older:
            lines.append(Text(f"{one.view.older} older: {program} top --all", style="dim"))
        if one.view.no_workdir:
            lines.append(Text(f"no runs there, nor its workdir {one.target.workdir}", style="dim"))
    return lines

"""The command line: parse, call the verb, render, exit code; nothing else.

Results go to stdout, everything else to stderr. Exit codes: 0 yes, 1 the answer is no, 2 usage or configuration,
3 could not know, 4 no such run or target, 130 interrupted.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from orchestrator import plan as planning
from orchestrator.errors import SpecctlError
from orchestrator.fleet import Fleet
from orchestrator.inventory import load_inventory
from orchestrator.render import json as as_json
from orchestrator.render import launch as show_launch
from orchestrator.render import status as show_status
from orchestrator.render.text import BAD, age, colour, size
from orchestrator.verbs import launch as launch_verb
from orchestrator.verbs import logs as logs_verb
from orchestrator.verbs import status as status_verb
from orchestrator.verbs import stop as stop_verb

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

COMMAND = "specctl.command"


class Until(str, Enum):
    process = "process"
    step = "step"


class LaunchCommand(TyperCommand):
    """`--` separates TARGET and options from the program's own words, which click alone would mix up."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[COMMAND] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


InventoryOption = Annotated[
    str | None, typer.Option("--inventory", metavar="FILE", help="Which hosts.yaml to use.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for programs.")]


def _version(value: bool) -> None:
    if value:
        print(f"specctl {importlib.metadata.version('specctl')}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    inventory: InventoryOption = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Launch training on GPU hosts and in Proxmox containers, and never believe a run you have not just seen."""
    ctx.obj = inventory


@app.command(cls=LaunchCommand)
def launch(
    ctx: typer.Context,
    target: Annotated[str | None, typer.Argument(help="Where to run; hosts.yaml's default if left out.")] = None,
    config: Annotated[Path | None, typer.Option(help="Train with this configuration (YAML).")] = None,
    name: Annotated[str | None, typer.Option(metavar="SLUG", help="A word for the run id.")] = None,
    until: Annotated[Until, typer.Option(help="What must be seen for the launch to count.")] = Until.step,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="S", help="Seconds to wait for it.  [600, and compile warm-up's own 1800]"),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would be done, and do nothing.")] = False,
    note: Annotated[str, typer.Option(help="A line to remember the run by.", show_default=False)] = "",
    source: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The project to ship.  [the current directory]")
    ] = None,
    no_source: Annotated[bool, typer.Option("--no-source", help="Ship no project, only the trainer.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Start a run and climb the ladder of evidence: accepted, session, process, log, gpu, step.

    Returns 0 once the run has been seen to do what --until asks, and 1 with the reason if it has not. Ctrl-C stops the
    watching, never the run.
    """
    with _errors(json), _fleet(ctx, inventory) as fleet:
        request = planning.Request(
            target=target, config=config, command=ctx.meta.get(COMMAND, []), name=name, until=until.value,
            timeout_s=timeout, note=note, source=None if no_source else (source or Path.cwd()),
        )  # fmt: skip
        planned = planning.plan(request, fleet.inventory)
        if plan:
            print(as_json.text(as_json.of_plan(planned))) if json else show_launch.show_plan(_stdout(), planned)
            return
        try:
            with show_launch.Progress(_stderr()) as progress:
                result = launch_verb.run(planned, fleet, progress)
        except KeyboardInterrupt:
            run_id = planned.spec.run_id
            _say(f"stopped watching. If {run_id} was started, it goes on: specctl status {run_id}")
            raise typer.Exit(130) from None
        if json:
            print(as_json.text(as_json.of_launch(result)))
        else:
            show_launch.show_result(_stdout(), result, program=_program())
        raise typer.Exit(0 if result.verified else 1)


@app.command()
def status(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN|TARGET]...", help="Runs, targets or groups.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what ended more than 24 hours ago.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Show every run as it is right now, on all targets at once.

    Exits 3 when a target could not be asked, and 1 when a run that was named is not well.
    """
    with _errors(json), _fleet(ctx, inventory) as fleet:
        result = status_verb.run(fleet, words or [], everything=everything)
        for note in result.notes:
            _say(note)
        print(as_json.text(as_json.of_status(result))) if json else show_status.show(_stdout(), result)
        named = bool(words) and not set(words or []) & {*fleet.inventory.targets, *fleet.inventory.groups}
        bad = named and any(run.verdict.state in BAD for run in result.runs)
        raise typer.Exit(3 if result.unreachable else 1 if bad else 0)


@app.command()
def logs(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Argument(help="An id, a part of one, or @last; your only live run.")] = None,
    grep: Annotated[str | None, typer.Option("--grep", "-e", metavar="ERE", help="Only lines that match.")] = None,
    last: Annotated[int | None, typer.Option("-n", min=0, metavar="N", help="Only the last N lines.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    after: Annotated[int, typer.Option("-A", min=0, metavar="N", help="Lines after a match.")] = 0,
    before: Annotated[int, typer.Option("-B", min=0, metavar="N", help="Lines before a match.")] = 0,
    around: Annotated[int, typer.Option("-C", min=0, metavar="N", help="Lines around a match.")] = 0,
    ignore_case: Annotated[bool, typer.Option("-i", help="Ignore case.")] = False,
    invert: Annotated[bool, typer.Option("-v", help="Lines that do not match.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, metavar="K", help="Which attempt.  [the newest]")] = None,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """Print lines of a run's own log, searched where it lies.

    stdout is log lines only; one line on stderr says of which run, attempt and state, and how many matched of how many.
    Exits 1 when nothing matched; with -f, 0 or 1 by how the run ended, and 3 when the link was lost.
    """
    with _errors(json), _fleet(ctx, inventory) as fleet:
        request = logs_verb.Request(
            run=run, grep=grep, last=last, follow=follow, after=after or around, before=before or around,
            ignore_case=ignore_case, invert=invert, attempt=attempt,
        )  # fmt: skip
        out = sys.stdout.buffer
        with logs_verb.run(fleet, request) as found:
            for note in found.notes:
                _say(note)
            for line in found.lines:
                text = as_json.text(as_json.of_line(found, line)) if json else line.line
                out.write(text.encode("utf-8", "surrogateescape") + b"\n")
                if follow:
                    out.flush()
        out.flush()
        _say(_of_what(found))
        assert found.verdict is not None
        if follow:
            raise typer.Exit(1 if found.verdict.state in BAD else 0)
        raise typer.Exit(0 if found.matched else 1)


def _of_what(found: logs_verb.Logs) -> str:
    """The line that says what the lines were of: a wrong run's log is how a day was once lost."""
    probe, verdict = found.probe, found.verdict
    assert verdict is not None
    byte_age = age(probe.observed_at - probe.log.modified_at) + " ago" if probe.log.size else "no byte yet"
    text = (
        f"{probe.run_id} attempt {probe.attempt} on {found.target.name}: {verdict.state} ({verdict.why}); "
        f"{found.matched:,} of {found.total:,} lines; last byte {byte_age}"
    )
    for log in found.foreign:
        text += f"; also {log['path']} from byte {log['base']:,} on ({size(log['before'])} from before are not shown)"
    return text


@app.command()
def stop(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Argument(help="An id, a part of one, or @last; your only live run.")] = None,
    grace: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Seconds between TERM and KILL.")
    ] = stop_verb.GRACE_S,
    now: Annotated[bool, typer.Option("--now", help="KILL at once.")] = False,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> None:
    """End a run: TERM once, wait, KILL, look again. "Stopped" is said only when no process of it is left."""
    with _errors(json), _fleet(ctx, inventory) as fleet:
        try:
            result = stop_verb.run(fleet, run, grace_s=grace, now=now, tell=_say)
        except KeyboardInterrupt:
            _say("stopped watching; the stop goes on there: specctl status")
            raise typer.Exit(130) from None
        if json:
            print(as_json.text(as_json.of_stop(result)))
        else:
            _show_stop(_stdout(), result)
        raise typer.Exit(1 if result.remaining else 0)


def _show_stop(console: Console, result: stop_verb.Result) -> None:
    verdict, run_id = result.verdict, result.probe.run_id
    state = f"[{colour(verdict.state)}]{verdict.state}[/]"
    if result.remaining:
        console.print(f"{state} {run_id}: not stopped, {len(result.remaining)} processes are left:", highlight=False)
        for one in result.remaining:
            console.print(f"  pid {one.pid}  {one.name}  state {one.state}", highlight=False, markup=False)
        return
    lead = "no process of it is left" if result.was_live else "it had ended before; no process of it is left"
    console.print(f"{state} {run_id}: {lead} ({verdict.why})", highlight=False, soft_wrap=True)


# --- plumbing -------------------------------------------------------------------------------------------------------


def _program() -> str:
    """What to type for specctl here: its name if the shell would find it, else as it was typed."""
    return "specctl" if shutil.which("specctl") or not sys.argv[0].endswith("specctl") else sys.argv[0]


def _stdout() -> Console:
    return Console(highlight=False)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)


def _say(text: str) -> None:
    _stderr().print(text, style="dim", markup=False, soft_wrap=True)


@contextmanager
def _fleet(ctx: typer.Context, inventory: str | None) -> Iterator[Fleet]:
    found = load_inventory(inventory or ctx.obj, environ=os.environ, cwd=Path.cwd(), home=Path.home())
    fleet = Fleet(found)
    try:
        yield fleet
    finally:
        fleet.close()


@contextmanager
def _errors(json: bool) -> Iterator[None]:
    """Turns an error meant for people into its text and its exit code."""
    try:
        yield
    except SpecctlError as error:
        if json:
            print(as_json.text(as_json.of_error(error)))
        console = _stderr()
        console.print("error: ", style="bold red", end="")
        console.print(str(error), markup=False, soft_wrap=True)
        if error.hint:
            console.print(f"  {error.hint}", style="cyan", markup=False, soft_wrap=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # `specctl logs | head` has seen enough; Python must not complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def main(argv: list[str] | None = None) -> Any:
    return app(args=argv, prog_name="specctl")




if __name__ == "__main__":
    main()

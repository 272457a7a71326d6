"""`specctl logs`: lines of a run's own logs, or the exceptions in them."""

from __future__ import annotations

import sys
import time
from typing import Annotated, NoReturn

import typer

from orchestrator import streams, when
from orchestrator.cli.base import InventoryOption, RunArgument, errors, fleet_of, say, seconds
from orchestrator.errors import AgentError, ConfigError, NoAnswer, UnreachableError
from orchestrator.fleet import Fleet
from orchestrator.model import BAD
from orchestrator.render import json as as_json
from orchestrator.render import log_errors as show_errors
from orchestrator.render import logs as show_logs
from orchestrator.verbs import log_errors
from orchestrator.verbs import logs as verb

TIME_HELP = (
    "Only what was written since: 10m, 2h, 1d ago, or 14:00, 2026-11-29T14:00 by this machine's clock and time zone "
    "(which the container's clock need not agree with: the difference is observed). The lines begin at a mark that "
    "the supervisor makes every 5 s or MiB of growth: some may be older, none is missing."
)


def logs(
    ctx: typer.Context,
    run: RunArgument = None,
    grep: Annotated[str | None, typer.Option("--grep", "-e", metavar="ERE", help="Only lines that match.")] = None,
    last: Annotated[int | None, typer.Option("-n", min=0, metavar="N", help="Only the last N lines.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    after: Annotated[int | None, typer.Option("-A", min=0, metavar="N", help="Lines after a match.")] = None,
    before: Annotated[int | None, typer.Option("-B", min=0, metavar="N", help="Lines before a match.")] = None,
    around: Annotated[int | None, typer.Option("-C", min=0, metavar="N", help="Lines around a match.")] = None,
    ignore_case: Annotated[bool, typer.Option("-i", help="Ignore case.")] = False,
    invert: Annotated[bool, typer.Option("-v", help="Lines that do not match.")] = False,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help=TIME_HELP, show_default=False)] = None,
    exceptions: Annotated[
        bool, typer.Option("--errors", help="Every exception in the logs, grouped, with its whole traceback.")
    ] = False,
    attempt: Annotated[int | None, typer.Option(min=1, metavar="K", help="Which attempt.  [the newest]")] = None,
    patience: Annotated[
        float,
        typer.Option(
            "--patience", metavar="S", parser=seconds(0, 7 * 86400), show_default="300",
            help="With -f: how long a link that is lost is looked for; 0: not at all.",
        ),
    ] = verb.PATIENCE_S,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, for programs.")] = False,
    inventory: InventoryOption = None,
) -> None:  # fmt: skip
    """Print lines of a run's own logs, searched where they lie.

    stdout is log lines only; one line on stderr says of which run, attempt and state, and how many matched of how many.
    Where the program writes logs of its own, `==> PATH <==` on stderr says which file the next lines are of. Exits 1
    when nothing matched; with -f, 0 or 1 by how the run ended, and 3 when the link was lost and did not come back.
    --errors says of each exception how often and when it came, in which worker, and whether anything ended with it.
    """
    with errors(json), fleet_of(ctx, inventory) as fleet:
        if exceptions:
            given = {"--grep": grep, "-n": last, "-f": follow or None, "-A": after, "-B": before, "-C": around}
            given |= {"-i": ignore_case or None, "-v": invert or None}
            if beside := [option for option, value in given.items() if value is not None]:
                hint = "beside --errors there are --since, --attempt and --json"
                raise ConfigError(f"--errors and {', '.join(beside)} do not go together", hint=hint)
            at = _time(since)
            _print_errors(log_errors.run(fleet, run, attempt=attempt, since_at=at), at, json=json)
        given = {"-A": after, "-B": before, "-C": around, "-i": ignore_case or None, "-v": invert or None}
        alone = [option for option, value in given.items() if value is not None]
        if grep is None and alone:
            raise ConfigError(f"{', '.join(alone)} without --grep: there is nothing to match", hint="add --grep ERE")
        request = verb.Request(
            run=run, grep=grep, last=last, follow=follow, after=(around if after is None else after) or 0,
            before=(around if before is None else before) or 0, ignore_case=ignore_case, invert=invert, attempt=attempt,
            since_at=_time(since), places=json, patience_s=patience,
        )  # fmt: skip
        found = _print(fleet, request, json=json)
        say(show_logs.of_what(found, grep))
        assert found.verdict is not None
        if follow:
            raise typer.Exit(1 if found.verdict.state in BAD else 0)
        some = found.matched or (last == 0 and grep is None and found.total)
        raise typer.Exit(0 if some else 1)


def _time(since: str | None) -> float | None:
    if since is None:
        return None
    now = time.time()
    try:
        at = when.parse(since, now)
    except ValueError as error:
        raise ConfigError(f"--since {error}") from None
    if at > now:
        raise ConfigError(f"--since {since} lies in the future: nothing can have been written since", hint="date")
    return at


def _print(fleet: Fleet, request: verb.Request, *, json: bool) -> verb.Logs:
    """Prints the lines as they come, and beside them what happens to their logs and to the link."""
    with verb.run(fleet, request) as found:
        for note in found.notes:
            say(note)
        log = found.probe.log.path
        try:
            for item in found.items:
                if isinstance(item, verb.Lines):
                    if item.log != log:
                        log = item.log
                        say(show_logs.mark(log))
                    if json:
                        streams.write_text(as_json.of_lines(found, item))
                    else:
                        streams.write_bytes(item.data)
                    if request.follow:
                        sys.stdout.flush()
                elif isinstance(item, verb.Word):
                    say(item.text)
                elif isinstance(item, verb.Since):
                    say(show_logs.since(item, request.since_at or 0.0, found.probe.created_at, time.time()))
                else:
                    streams.end_if_unread()
        except KeyboardInterrupt:
            sys.stdout.flush()
            said = "broken off; there is more"
            if request.follow:
                goes = "the link is lost, and what has become of the run is not known"
                said = f"stopped following; {goes if found.link_lost else 'the run goes on'}"
            say(show_logs.broken_off(found, time.time(), said))
            raise typer.Exit(130) from None
        except UnreachableError as error:
            sys.stdout.flush()
            if isinstance(error, NoAnswer) or not isinstance(error, AgentError):
                say(show_logs.broken_off(found, time.time(), "link lost, state unknown"))
            raise
    sys.stdout.flush()
    return found


def _print_errors(result: log_errors.Result, since_at: float | None, *, json: bool) -> NoReturn:
    for note in result.notes:
        say(note)
    if result.since is not None:
        say(show_logs.since(result.since, since_at or 0.0, result.probe.created_at, time.time()))
    if json:
        for one in result.found:
            streams.write_line(as_json.text(as_json.of_error_group(result, one)))
    else:
        for text in show_errors.texts(result, time.time()):
            streams.write_text(text)
    say(show_errors.of_what(result))
    raise typer.Exit(0 if result.found else 1)

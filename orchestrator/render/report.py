"""Runs as one page of HTML that needs nothing else: no network, no file beside it.

What comes from a run is hostile until shown otherwise. Jinja escapes all of it, `visible` writes out what would move a
cursor or turn text around, and the page's own policy lets no script run but the one whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from orchestrator import whole
from orchestrator.bundle import REPORT, is_report
from orchestrator.errors import ConfigError, SpecctlError
from orchestrator.health import age
from orchestrator.render import show as show_show
from orchestrator.render.compare import KINDS, NAMES, diff_style, figure, file_line
from orchestrator.render.log_errors import in_workers
from orchestrator.render.plot import NAMES as FIGURES
from orchestrator.render.text import at_home, colour, count, number, one_line
from orchestrator.series import Series, gaps
from orchestrator.timeline import SHARES, Lane, Timeline
from orchestrator.verbs import compare, errors, plot, show
from orchestrator.verbs.report import Page, Pair, Result

SCRIPTS = ("zoom.js", "curves.js", "lanes.js", "page.js")
TEXT_CHARS = 200_000
"""Of a diff, a configuration or a traceback."""
COLOURS = 8
"""So many runs have a colour of their own; the ones after them begin again, with other dashes."""


def page(result: Result, *, program: str) -> str:
    """The whole page. Raises `ConfigError` without jinja2."""
    environment = template()
    style, script = _style(), _script()
    data = json.dumps(_data(result), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for character in "<>&":  # which could end the element it stands in
        data = data.replace(character, f"\\u{ord(character):04x}")
    from markupsafe import Markup

    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    now = time.time()
    zone = "UTC" if not time.localtime(now).tm_gmtoff else time.strftime("%Z (UTC%z)", time.localtime(now))
    return str(environment.get_template("report.html").render(
        mark=Markup(REPORT), policy=policy, style=Markup(style), script=Markup(script), data=Markup(data),
        made=_when(now), zone=zone, host=socket.gethostname(), program=program,
        runs=[_Run(page, number) for number, page in enumerate(result.pages)], unseen=result.unseen,
        pairs=[_Pair(pair, number) for number, pair in enumerate(result.pairs, 1)],
        kinds=[_Kind(kind, result) for kind in result.kinds], figures=_figures(result),
        metrics=[FIGURES.get(name, name) for name in result.metrics],
        others=sorted({name for _, drawn in _drawn(result) for name in drawn.there} - {*result.metrics, *SHARES}),
    ))  # fmt: skip


def refuse(path: Path, *, force: bool) -> None:
    """Raises `ConfigError` for a place where no page can be, and for a file that is no report, unless `force`."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a directory", hint=f"-o {path / 'report.html'}")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file", hint="-o - writes to stdout")
        if path.exists() and not force and not is_report(path):
            raise ConfigError(f"{path} is there already, and is no report", hint="choose another name, or add --force")
        if not path.resolve().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no such folder", hint="-o FILE names another place")
    except OSError as error:
        raise _unwritten(path, error) from None


def save(text: str, path: Path) -> int:
    """Writes it whole or not at all; returns its size in bytes. Raises `ConfigError`."""
    data = text.encode(errors="backslashreplace")
    try:
        whole.write_whole(path.resolve(), data)  # through a link: what it points to is replaced, and it stays
    except OSError as error:
        raise _unwritten(path, error) from None
    return len(data)


def _unwritten(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written: {error.strerror}", hint="-o FILE names another place")


# --- what it is made of ---------------------------------------------------------------------------------------------


def template() -> Any:
    """Where the page is made. Raises `ConfigError` without jinja2."""
    try:
        import jinja2
    except ImportError:
        raise ConfigError("a report needs jinja2", hint="pip install jinja2") from None
    return jinja2.Environment(
        loader=jinja2.PackageLoader("orchestrator.render", "page"), autoescape=True, finalize=visible,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def visible(value: Any) -> Any:
    """A text with what cannot be printed written out, line by line."""
    if isinstance(value, SpecctlError):
        value = str(value)
    if type(value) is not str or value.isprintable():
        return value
    lines = ("\t".join(one_line(part) for part in line.split("\t")) for line in value.split("\n"))
    return "\n".join(lines)


def _style() -> str:
    return resources.files("orchestrator.render").joinpath("page/report.css").read_text(encoding="utf-8")


def _script() -> str:
    folder = resources.files("orchestrator.render").joinpath("page")
    texts = [folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    return "\n".join(["(() => {", '"use strict";', *texts, "})();"])


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def cut(text: str, more: str) -> str:
    """At most `TEXT_CHARS` of it; `more` is what to type for the rest."""
    if len(text) <= TEXT_CHARS:
        return text
    return f"{text[:TEXT_CHARS]}\n... {len(text) - TEXT_CHARS:,} more characters: {more}"


# --- words ----------------------------------------------------------------------------------------------------------


TONES = {"green": "good", "cyan": "live", "yellow": "warn", "red": "bad", "magenta": "unknown"}


def tone(style: str) -> str:
    """The class of what the terminal shows in this colour."""
    return TONES.get(style.split()[-1] if style else "", "plain")


class _Run:
    """One run, as the template wants it."""

    def __init__(self, page: Page, index: int) -> None:
        self.page, self.index = page, index
        self.probe, self.verdict, self.target = page.run.probe, page.run.verdict, page.run.target
        self.id, self.tone = page.run.run_id, tone(colour(self.verdict.state))
        self.colour = index % COLOURS
        self.seen_at, self.launched = _when(self.probe.observed_at), _when(self.probe.created_at)
        self.known_launch = self.probe.damaged is None and self.probe.closed is None
        self.step = "-" if self.verdict.step is None else f"{self.verdict.step:,}"
        self.loss, self.tok_s = number(self.verdict.loss, 4), number(self.verdict.tok_s, 0)
        self.shown = page.shown if isinstance(page.shown, show.Result) else None
        self.shown_error = page.shown if isinstance(page.shown, SpecctlError) else None
        self.error = self.verdict.error
        self.traceback = cut(self.error.traceback, f"specctl logs {self.id} --errors") if self.error else ""
        self.lanes = _lanes(page.timeline) if isinstance(page.timeline, Timeline) else []
        self.lanes_error = page.timeline if isinstance(page.timeline, SpecctlError) else None
        self.search_error = page.searched if isinstance(page.searched, SpecctlError) else None
        asked = self.shown.shown.spec if self.shown else None
        self.config = cut((asked.config_text if asked else None) or "", f"specctl show {self.id} --config")
        self.config_path = asked.config_path if asked else None
        self.diff = _diff(cut((asked.diff if asked else None) or "", f"specctl show {self.id} --diff"))
        drawn = page.drawn if isinstance(page.drawn, plot.Drawn) else None
        self.drawn_error = page.drawn if isinstance(page.drawn, SpecctlError) else None
        self.has_figures = drawn is not None and any(one.metric not in SHARES for one in drawn.series)
        self.in_parts = drawn is not None and not drawn.whole
        self.left_out = page.events_left_out
        self.clock_set = age(abs(self.probe.clock_set_by_s)) if abs(self.probe.clock_set_by_s) >= 1 else ""

    @property
    def rung(self) -> str:
        return self.shown.rung if self.shown else "not known"

    @property
    def proof(self) -> str:
        """What was seen for the highest rung."""
        evidence = self.evidence
        return evidence[-1][1] if evidence else ""

    @property
    def evidence(self) -> list[tuple[str, str]]:
        if self.shown is None:
            return []
        found = [(one.what, at_home(one.value, self.target)) for one in self.shown.evidence]
        missing = self.shown.rung != "step" and self.verdict.live
        return [*found, ("not seen", self.shown.missing)] if missing else found

    @property
    def rows(self) -> list[tuple[str, str]]:
        return show_show.rows(self.shown, _when) if self.shown else []


def _diff(text: str) -> list[tuple[str, str]]:
    """(how it is shown, line)."""
    styles = {"green": "add", "red": "del", "cyan": "hunk", "bold": "file", "dim": "same"}
    return [(styles[diff_style(line)], line) for line in text.removesuffix("\n").split("\n")] if text else []


def _lanes(lanes: Timeline) -> list[tuple[str, list[str]]]:
    """What each lane says, in words: (worker, what it did)."""
    return [(lane.name or "the run", _said(lane, lanes.since) or ["nothing was written down"]) for lane in lanes.lanes]


def _said(lane: Lane, since: float) -> list[str]:
    said = []
    measured = [part for part in lane.parts if part.kind == "shares"]
    for part in lane.parts:
        if part.kind != "shares":
            said.append(f"{part.text[:WORDS]}, from {age(part.since - since)} on, for {age(part.until - part.since)}")
        elif part is measured[0]:
            total_s = sum(one.until - one.since for one in measured)
            means = [sum(one.shares[n] * (one.until - one.since) for one in measured) / total_s for n in range(4)]
            what = ", ".join(f"{word} {mean:.0%}" for word, mean in zip(WAITS, means, strict=True))
            until = measured[-1].until
            said.append(f"stepping from {age(part.since - since)} on, for {age(until - part.since)}: {what}")
    more = len(said) - SAID
    if more > 0:
        said = [*said[: SAID // 2], f"... {more:,} more", *said[-SAID // 2 :]]
    marks = [mark for mark in lane.marks if mark.kind != "checkpoint"]
    return said + [f"{mark.text[:WORDS]}, at {age(mark.at - since)}" for mark in marks[:SAID]]


SAID, WORDS = 24, 500
WAITS = ("busy", "waiting for input", "waiting for room", "waiting for peers")


class _Kind:
    """One exception, in all the runs."""

    def __init__(self, kind: errors.Kind, result: Result) -> None:
        numbers = {page.run.run_id: number for number, page in enumerate(result.pages)}
        self.type, self.fingerprint, self.hint = kind.type, kind.fingerprint, kind.hint
        self.first = kind.message.partition("\n")[0][:500]
        self.times = count(kind.count, "time")
        self.traceback = cut(kind.traceback, f"specctl logs {kind.seen[0].result.probe.run_id} --errors")
        self.ended = any(one.judged.ended for one in kind.seen)
        self.runs = [
            (numbers[one.result.probe.run_id], one.result.probe.run_id,
             (count(one.judged.group.count, "time") + in_workers(one.judged.group)),
             _when(one.judged.group.first.at), _when(one.judged.group.last.at), one.judged.why)
            for one in kind.seen
        ]  # fmt: skip


class _Pair:
    """What changed from the first run to another."""

    def __init__(self, pair: Pair, index: int) -> None:
        self.a, self.b, self.index = pair.a.run.run_id, pair.b.run.run_id, index
        self.error = pair.result if isinstance(pair.result, SpecctlError) else None
        if not isinstance(pair.result, compare.Result):
            return
        result = pair.result
        answer = result.answer
        self.headline, self.tone = answer.headline, tone(KINDS.get(answer.kind, "red"))
        self.sentence = f"{answer.sentence[:1].upper()}{answer.sentence[1:]}."
        self.notes, self.changed = result.notes, result.changed
        self.changes, self.files_unknown = result.changes, result.files_unknown
        self.files = [file_line(one) for one in result.files]
        diffs = [one.diff for one in result.files]
        # A configuration that lies in the project has changed there already.
        if _hunks(result.config_diff) not in map(_hunks, diffs):
            diffs.append(result.config_diff)
        self.diff = _diff(cut("".join(diffs), f"specctl compare {self.a} {self.b} --diff"))
        self.training = [
            (NAMES.get(metric, metric), f"{one.first:,} to {one.last:,}", figure(one.a, metric), figure(one.b, metric))
            for metric, found in result.training.items()
            for one in found
        ]  # fmt: skip


def _hunks(diff: str) -> list[str]:
    """A diff of one file without the file's names."""
    return diff.split("\n")[2:]


# --- figures, for the script ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    name: str
    title: str


def _figures(result: Result) -> list[Figure]:
    """Those that at least one run has written down, as they were asked for."""
    there = {one.metric for _, drawn in _drawn(result) for one in drawn.series}
    return [Figure(name=name, title=FIGURES.get(name, name)) for name in result.metrics if name in there]


def _drawn(result: Result) -> list[tuple[int, plot.Drawn]]:
    return [
        (number, page.drawn) for number, page in enumerate(result.pages) if isinstance(page.drawn, plot.Drawn)
    ]  # fmt: skip


def _data(result: Result) -> dict[str, Any]:
    return {
        "runs": [
            {"id": visible(page.run.run_id), "state": page.run.verdict.state, "colour": number % COLOURS,
             "dash": number}
            for number, page in enumerate(result.pages)
        ],
        "figures": [
            {
                "title": visible(figure.title),
                "series": [
                    _series(one, number, drawn.probe.created_at)
                    for number, drawn in _drawn(result)
                    for one in drawn.series
                    if one.metric == figure.name
                ],
            }
            for figure in _figures(result)
        ],
        "lanes": [
            _timeline(page.timeline, page.run.probe.created_at) if isinstance(page.timeline, Timeline) else None
            for page in result.pages
        ],
        "waits": [word.removeprefix("waiting for ") for word in WAITS],
    }  # fmt: skip


def _series(series: Series, number: int, created_at: float) -> dict[str, Any]:
    """Columns, a row each: a page holds many of them."""
    rows = series.rows
    steps, at = [series.step(row) for row in rows], [row.at - created_at for row in rows]
    return {
        "run": number, "worker": None if series.worker is None else visible(series.worker), "width": series.width,
        "step": steps, "at": _short(at), "n": [row.sums.count for row in rows],
        "mean": _short([row.sums.mean for row in rows]), "low": _short([row.sums.low for row in rows]),
        "high": _short([row.sums.high for row in rows]),
        "gaps": {"step": sorted(gaps(steps)), "time": sorted(gaps(at))},
    }  # fmt: skip


def _timeline(lanes: Timeline, created_at: float) -> dict[str, Any]:
    return {
        "since": _short([min(0.0, lanes.since - created_at)])[0], "until": _short([lanes.until - created_at])[0],
        "lanes": [
            {
                "name": visible(lane.name or "the run"),
                "parts": [
                    [*_short([part.since - created_at, part.until - created_at]), part.kind, visible(part.text[:WORDS]),
                     *([_short(part.shares)] if part.shares else [])]
                    for part in lane.parts
                ],
                "marks": [
                    [*_short([mark.at - created_at]), mark.kind, visible(mark.text[:WORDS])] for mark in lane.marks
                ],
            }
            for lane in lanes.lanes
        ],
    }  # fmt: skip


def _short(values: Sequence[float | None]) -> list[float | None]:
    """As many digits as can be seen."""
    return [None if value is None else float(f"{value:.7g}") for value in values]

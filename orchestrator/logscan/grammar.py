r"""What counts as a step, a figure or a phase in a line of text; `docs/step-lines.md` says it to users.

**Step**: `step=12`, `step: 12`, `"step": 12`, also `iter`, `iteration`, `global_step`, `train_step`, `train/step`; an
optional total (`step=12/1000`, `Step [12/1000]`). With only a space between (`Step 12`) it counts when the line holds
nothing else, or a loss or a tok/s besides: `Step 1: download the data` is prose. Words that often mean something else
(`steps`, `it`, `update`, `num_updates`, `batch 12/1000`) and a bare position (`[12/1000]`, `12/1000` in front) count
only beside a loss or a tok/s. `eval_step=`, `val/step`, `stepsize`, `steps_per_epoch=` are other words, and so is all
that a line of an evaluation says. An epoch is no step. A line that only says where to resume from, or lists arguments,
is no step.

**Progress bar** (tqdm): a frame is a step if the bar is named so (`Epoch 3:`, `Training:`, `Steps:`) or shows a loss or
a tok/s. A nameless one may be of anything: `progress.py` takes its position for the step of a loss line without one
(`{'loss': 2.3, 'epoch': 0.1}`), and from then on its frames are steps.

**tok/s**: `tok/s=`, `toks/s`, `tokens/s`, `tokens/sec`, `tok_s`, `tok_per_sec`, `tokens_per_second`, each also with
`_per_gpu` or `/gpu`, `tps`, `tgs`, `wps`, and a figure in front of the unit (`310 tok/s`). **Others**: `loss`,
`train_loss`, `train/loss`, `total_loss` and the like; `lr`, `learning_rate`; `grad_norm`, `gnorm`. Numbers may be
`1,234`, `1_234`, `1.2k`, `2.3e-4`, `nan`, `-inf`, `tensor(2.3)`.

**Worker**: `worker=NAME` anywhere, with any name; `rank=3` (rank3); `[drafter-0]` or `(drafter-0)` or `[rank3]:` before
the first figure, or the bare name in front (`drafter-0: step=12`), after timestamps and log levels. Such a name ends in
a number, and one of its words says that it is one of several that work (`names.ROLES`). `layer0: loss=0.2` names no
worker.

**Phase**: `phase=compile_warmup unit=3/12 seconds=1.2`. A line with a phase is a step only if it also has a figure.

`patterns` (step, tok_s, loss, lr, grad_norm, worker -> regular expression with one group) are tried first, then this
grammar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.logscan.names import MAX_NAME, alone, front_end, worker_of

FIGURE_NAMES = ("step", "weak", "tok_s", "loss", "lr", "grad_norm")
MAX_STEP_DIGITS = 15
PATTERN_NAMES = ("step", "tok_s", "loss", "lr", "grad_norm", "worker")

# A gate on lower-cased bytes, since nearly all lines say nothing. Each word is looked for by the letter of it that is
# rarest in prose, and what stands before that letter is looked back at: most of a log is passed over faster so.
VALUE_BEGINS = rb"[\"']?(?:\s*[=:]|\s+[\"'\[]?\s*[-+]?(?:[\d.]|nan|inf))"
GATE = re.compile(
    rb"p(?:(?<=step)s?|(?<=tp)s|hase)%(b)s|r(?<=iter)(?:ation)?%(b)s|loss(?:/train|_step)?%(b)s|g(?<=tg)s%(b)s"
    rb"|k(?:(?<=tok)(?:en)?s?(?:[/_][sp]| per s)|(?<=traceback) \(most)|%%\||x(?<=ex)ception in thread "
    rb"|\"(?<=file \")[^\"\n]+\", line \d+\s*$|y(?:(?<=fatal py)thon error|(?<=shared memory))"
    rb"|m(?<=term)inate called a" % {b"b": VALUE_BEGINS},
    re.MULTILINE,
)

NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:_\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?[km]?"
    r"|[-+]?(?:nan|inf(?:inity)?)"
)
TOKENS_PER_SECOND = r"tok(?:en)?s?(?:/s(?:ec(?:ond)?)?|_s|[_ ]per[_ ]s(?:ec(?:ond)?)?)(?:(?:/|_per_)(?:gpu|device))?"
FIGURE = re.compile(
    r"(?<![\w/.\-])(?=[a-z])(?:train(?:ing)?[/_. ])?(?:"
    r"(?P<step>(?:global[_ ]|optimizer[_ ])?step|iteration|iter)"
    r"|(?P<weak>(?:global[_ ])?steps|it|(?:num_)?updates?|batch)"
    rf"|(?P<tok_s>{TOKENS_PER_SECOND}|tps|tgs|wps)"
    r"|(?P<loss>(?:(?:total|avg|average|mean|running|lm|ce|batch|step)[_ ])?loss(?:/train|_step)?)"
    r"|(?P<lr>lr|learning[_ ]rate)|(?P<grad_norm>grad[_ ]norm|gnorm)"
    r")[\"']?(?P<sep>\s*[=:]\s*|\s+)[\"']?(?:(?:tensor|np\.float\d+)\(|\[\s*)?"
    rf"(?P<value>{NUMBER})(?![\w%]|\.\w|:\d|,\d)(?P<scale> [km](?!\w))?(?:\s*/\s*(?P<total>\d[\d,_]*))?",
    re.IGNORECASE,
)
FIGURE_FIRST = re.compile(rf"(?<![\w./])(?P<value>{NUMBER}) ?{TOKENS_PER_SECOND}(?![\w=:/])", re.IGNORECASE)
EVALUATION = r"(?:eval(?:uat\w+)?|val(?:id\w*)?|predict\w*|sanity|test(?:ing)?(?= (?:set|loss|step|batch)|[:\])]))"
EVALUATED = re.compile(rf"[\[(<|]*{EVALUATION}(?![\w/.=\-])", re.IGNORECASE)
"""In front of a line: what follows is of an evaluation."""
EVALUATED_FIGURE = re.compile(r"(?<![\w/.\-])(?:eval(?:uation)?|val(?:id(?:ation)?)?|test) \Z", re.IGNORECASE)
"""In front of a figure: it is of an evaluation."""
POSITION = re.compile(
    r"(?P<word>[A-Za-z]*)[:=]? ?[\[(]\s*(?P<n>\d{1,15})/(?P<total>\d{1,15})(?=[\s\]),:])(?!\s+\d\d?:\d\d)"
)
POSITION_IN_FRONT = re.compile(r"\s*(?P<n>\d{1,15})/(?P<total>\d{1,15})(?![\w/.:])(?!\s+\d\d?:\d\d)")
POSITION_WORDS = ("", "train", "training", "batch", "it", "iter", "update")
BAR = re.compile(r"(?P<name>[^\r]*?)(?P<percent>\d{1,3})%\|[^|]*\|\s*(?P<n>\d{1,15})/(?P<total>\d{1,15}) \[")
"""A frame of tqdm's: `Epoch 3:  23%|##3       | 120/500 [00:12<00:40,  9.55it/s, loss=2.31]`."""
BARE_FRAME = re.compile(r"\s*\d{1,3}%\|[^|]*\|\s*(?P<n>\d{1,15})/(?P<total>\d{1,15}) \[[\d:<?, .]*(?:it/s|s/it)\]\s*")
"""A frame that says nothing else."""
BAR_OF_STEPS = re.compile(r"(?:train(?:ing)?|steps?|(?:train(?:ing)? )?epoch\b[^|]{0,40})\s*:?\s*$", re.IGNORECASE)

PHASE = re.compile(
    rf"(?<![\w/.\-])[\"']?phase[\"']?\s*[=:]\s*[\"']?(?P<name>[A-Za-z][\w./-]{{0,{MAX_NAME - 1}}})", re.IGNORECASE
)
FIELD = re.compile(r"(?<![\w/.\-])(?P<key>[A-Za-z_][\w./-]*)=(?P<value>[^\s,;]+)")
RESUME = re.compile(r"\b(?:resum|restor|load|continu|from (?:the )?(?:checkpoint|step))", re.IGNORECASE)
LISTED = re.compile(r"\b(?:config\w*|args|arguments|hparams|hyperparameters|namespace)\s*[:=(]", re.IGNORECASE)


@dataclass(slots=True)
class Reading:
    """What one line says. `step` and the others are None where it says nothing of them."""

    step: int | None = None
    tok_s: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    worker: str | None = None
    phase: str | None = None
    bar: tuple[int, int] | None = None
    """(position, total) of a nameless progress bar, which may be the training's."""
    fields: dict[str, str] = field(default_factory=dict)
    spans: list[tuple[str, int, int]] | None = None
    """(name, start, end) of each figure, where every one stands behind its own name, or is a bar's; else None."""
    drawn: tuple[int, int] | None = None
    """From where to where the drawing of a bar stands whose position is the step: `  23%|##3       | `."""


def number(text: str) -> float:
    """The value of what NUMBER matched: `1,234`, `1.2k`, `-inf`."""
    text = text.lower().replace(",", "").replace("_", "")
    scale = {"k": 1e3, "m": 1e6}.get(text[-1])
    return float(text[:-1]) * scale if scale else float(text)


class Grammar:
    """The grammar above, with a run's own patterns in front."""

    def __init__(self, patterns: Mapping[str, str] | None = None) -> None:
        """Raises ValueError, naming the pattern, when one is unknown or is no regular expression with one group."""
        self.patterns: dict[str, re.Pattern[str]] = {}
        for name, text in (patterns or {}).items():
            if name not in PATTERN_NAMES:
                raise ValueError(f"patterns: unknown name {name!r}; the names are {', '.join(PATTERN_NAMES)}")
            try:
                compiled = re.compile(text)
            except re.error as error:
                raise ValueError(f"patterns: {name}: {text!r} is not a regular expression: {error}") from error
            if compiled.groups != 1:
                raise ValueError(f"patterns: {name}: {text!r} needs exactly one group, it has {compiled.groups}")
            self.patterns[name] = compiled

    def read(self, line: str) -> Reading | None:
        """What `line` says, or None when that is nothing."""
        frame = BARE_FRAME.fullmatch(line) if "%|" in line and not self.patterns else None
        if frame:
            return Reading(bar=(int(frame["n"]), int(frame["total"])))
        reading = Reading()
        own_step = self._own(line, reading)
        found = _Found(first=len(line), figures=reading.tok_s is not None or reading.loss is not None)
        if not EVALUATED.match(line, front_end(line)):
            _figures(line, reading, found)
        phase = PHASE.search(line)
        if phase:
            reading.phase = phase["name"]
            reading.fields = {m["key"]: m["value"] for m in FIELD.finditer(line) if m["key"].lower() != "phase"}
            found.first = min(found.first, phase.start())
        # A step that stands without any figure: is it progress, or only mentioned?
        if reading.step is not None and not own_step and not found.figures:
            prose = found.by_space and not (found.last and alone(line, found.first))
            if LISTED.search(line) or (not found.others and (phase or prose or RESUME.search(line))):
                reading.step = None
        if (reading.step, reading.tok_s, reading.loss, reading.phase, reading.bar) == (None,) * 5:
            return None
        if reading.worker is None:
            reading.worker = worker_of(line, found.first)
        return reading

    def _own(self, line: str, reading: Reading) -> bool:
        """Applies the run's own patterns; True when its step pattern matched."""
        for name, pattern in self.patterns.items():
            match = pattern.search(line)
            if not match or match[1] is None:
                continue
            text = match[1].strip()
            if name == "worker":
                reading.worker = text[:MAX_NAME] or None
                continue
            try:
                value = number(text) if text else math.nan
            except ValueError:
                continue
            if name != "step":
                setattr(reading, name, value)
            elif 0 <= value < 10**MAX_STEP_DIGITS:
                reading.step = int(value)
        return reading.step is not None


@dataclass(slots=True)
class _Found:
    first: int
    """Where the first figure stands."""
    figures: bool = False
    """Whether there is a loss or a tok/s."""
    others: bool = False
    """Whether there is any figure beside the step."""
    by_space: bool = False
    """Whether only a space stands between the step and its number."""
    last: bool = False
    """Whether nothing follows the step."""


def _figures(line: str, reading: Reading, found: _Found) -> None:
    """Fills in the figures that `reading` does not have yet."""
    weak: int | None = None
    spans: list[tuple[str, int, int]] = []
    for match in FIGURE.finditer(line):
        name = next(key for key in FIGURE_NAMES if match[key] is not None)
        if getattr(reading, "step" if name == "weak" else name) is not None:
            continue
        if EVALUATED_FIGURE.search(line, max(0, match.start() - 12), match.start()):
            continue
        if name in ("step", "weak"):
            step = _whole(match["value"])
            if step is None or (name == "weak" and match[0][:5].lower() == "batch" and match["total"] is None):
                continue
            if name == "weak":
                weak = step if weak is None else weak
                continue
            reading.step = step
            spans.append(("step", match.start("value"), match.end("value")))
            found.by_space = not match["sep"].strip()
            found.last = not line[match.end() :].strip(" .:|-)]")
        else:
            scale = (match["scale"] or "").strip() if name == "tok_s" else ""
            setattr(reading, name, number(match["value"] + scale))
            spans.append((name, match.start("value"), match.end("scale" if match["scale"] else "value")))
            found.others = True
        found.first = min(found.first, match.start())
    if reading.tok_s is None and "tok" in line.lower():
        ahead = FIGURE_FIRST.search(line)
        if ahead:
            reading.tok_s = number(ahead["value"])
            spans.append(("tok_s", ahead.start("value"), ahead.end("value")))
    found.figures = reading.tok_s is not None or reading.loss is not None
    found.others = found.others or found.figures
    if reading.step is None:
        _place(line, reading, found, weak, spans)
    elif "%|" not in line:
        reading.spans = spans


def _place(
    line: str, reading: Reading, found: _Found, weak: int | None, spans: list[tuple[str, int, int]]
) -> None:
    """The step of a line that has no word for it: a bar's, a weak word's or a position's."""
    bar = BAR.search(line) if "%|" in line else None
    if bar:
        name, position = line[front_end(line) : bar.start("percent")], (int(bar["n"]), int(bar["total"]))
        if found.figures or BAR_OF_STEPS.search(name):
            reading.step = position[0]
            reading.spans, reading.drawn = [*spans, ("step", *bar.span("n"))], (bar.start("percent"), bar.start("n"))
            found.others = True
        elif alone(line, bar.start("percent")):
            reading.bar = position
    elif found.figures:
        places = _positions(line)
        reading.step = weak if weak is not None else _position(places)
        if weak is None and not places and "%|" not in line:
            reading.spans = spans


def _positions(line: str) -> list[re.Match[str]]:
    """`[12/1000]` anywhere, or `12/1000` in front; not of an epoch, and no date."""
    if "/" not in line:
        return []
    places = [place for place in POSITION.finditer(line) if place["word"].lower() in POSITION_WORDS]
    front = POSITION_IN_FRONT.match(line, front_end(line))
    return [front, *places] if front else places


def _position(places: list[re.Match[str]]) -> int | None:
    return next((int(one["n"]) for one in places if 2 <= int(one["total"]) >= int(one["n"])), None)


def _whole(text: str) -> int | None:
    digits = text.replace(",", "").replace("_", "")
    return int(digits) if digits.isdigit() and len(digits) <= MAX_STEP_DIGITS else None

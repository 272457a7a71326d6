r"""What counts as a step, a figure, a worker or a phase in a line of text.

**Step**: `step=12`, `step: 12`, `"step": 12`, also `iter`, `iteration`, `global_step`, `train_step`, `train/step`; an
optional total (`step=12/1000`). With only a space between (`Step 12`, `step 12/1000`) it counts when the line holds
nothing else, or a loss or a tok/s besides: `Step 1: download the data` is prose. `eval_step=`, `val/step`, `stepsize`,
`steps_per_epoch=` are other words. A line that only says where to resume from is no step.

**tok/s**: `tok/s=`, `toks/s`, `tokens/s`, `tokens/sec`, `tok_s`, `tok_per_sec`, `tokens_per_sec`, `tokens_per_second`,
`tps`, `tgs`, and a figure in front of the unit (`310 tok/s`). **Others**: `loss`, `train_loss`, `train/loss`; `lr`,
`learning_rate`; `grad_norm`, `gnorm`. Numbers may be `1,234`, `1_234`, `1.2k`, `2.3e-4`, `nan`, `-inf`, `tensor(2.3)`.

**Worker**: `worker=NAME` anywhere, with any name; `[drafter-0]` or `(drafter-0)` or `[rank3]:` before the first figure,
or the bare name in front (`drafter-0: step=12`), after timestamps and log levels. Such a name ends in a number, and one
of its words says that it is one of several that work: rank, worker, drafter, target, trainer, learner, actor, replica,
shard, thread, proc(ess), device, gpu, cuda, npu, tpu (`local_rank3`, `ForkProcess-2`, `ThreadPoolExecutor-0_1`,
`cuda:0`). `layer0: loss=0.2` names no worker.

**Phase**: `phase=compile_warmup unit=3/12 seconds=1.2`. A line with a phase is a step only if it also has a figure.

`patterns` (step, tok_s, loss, worker -> regular expression with one group) are tried first, then this grammar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

FIGURE_NAMES = ("step", "tok_s", "loss", "lr", "grad_norm")
MAX_STEP_DIGITS = 15
PATTERN_NAMES = ("step", "tok_s", "loss", "worker")

# Two gates on lower-cased bytes, since nearly all lines say nothing: a cheap search for where a word may stand, and a
# closer look there. What the closer look asks for begins with what the search found.
GATE = re.compile(
    rb"step|iter|loss|tok|tps|tgs|phase|traceback \(|in thread |file \"|fatal python|terminate called|shared memory"
)
CLOSER = re.compile(
    rb"(?:step|iter(?:ation)?|loss|tps|tgs|phase)[\"']?(?:\s*[=:]|\s+[\"']?[-+]?[\d.ni])|tok(?:en)?s?[/_][sp]"
    rb"|traceback \(most|in thread |file \"[^\"\n]+\", line \d+\s*$|fatal python error|terminate called a"
    rb"|shared memory",
    re.MULTILINE,
)

NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:_\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?[km]?"
    r"|[-+]?(?:nan|inf(?:inity)?)"
)
TOKENS_PER_SECOND = r"tok(?:en)?s?(?:/s(?:ec(?:ond)?)?|_s|_per_s(?:ec(?:ond)?)?)"
FIGURE = re.compile(
    r"(?<![\w/.\-])(?:train(?:ing)?[/_. ])?(?:"
    r"(?P<step>(?:global[_ ]|optimizer[_ ])?step|iteration|iter)"
    rf"|(?P<tok_s>{TOKENS_PER_SECOND}|tps|tgs)"
    r"|(?P<loss>loss)|(?P<lr>lr|learning_rate)|(?P<grad_norm>grad[_ ]norm|gnorm)"
    r")[\"']?(?P<sep>\s*[=:]\s*|\s+)[\"']?(?:(?:tensor|np\.float\d+)\()?"
    rf"(?P<value>{NUMBER})(?![\w%]|\.\w|:\d)(?:/(?P<total>[\d,_]+))?",
    re.IGNORECASE,
)
FIGURE_FIRST = re.compile(rf"(?<![\w./])(?P<value>{NUMBER}) ?{TOKENS_PER_SECOND}(?![\w=:])", re.IGNORECASE)

PREFIX_NAME = (
    r"(?!(?:step|iter(?:ation)?|epoch|ep|batch|it|micro|eval|val|loss|pid|tid|line|v|seed|lr)[-_ :]?\d)"
    r"(?:(?:cuda|gpu|npu|rank):\d+|[A-Za-z][A-Za-z_]*(?:[-_ ]?[A-Za-z_]*\d+)+)"
)
"""Whoever stands in front of a line of a traceback: it says which lines belong together, and makes no worker."""
ROLES = (
    r"(?:rank|worker|drafter|target|trainer|learner|actor|replica|shard|thread(?:poolexecutor)?"
    r"|(?:spawn|fork|forkserver)?process|proc|device|gpu|cuda|npu|tpu)"
)
WORKER_NAME = rf"(?=(?:[A-Za-z]+[-_ ])*{ROLES}(?![A-Za-z])){PREFIX_NAME}"
MAX_NAME = 100
WORKER_KEY = re.compile(
    rf"(?<![\w/.\-])[\"']?worker[\"']?\s*[=:]\s*[\"']?(?P<name>\w[\w.:/-]{{0,{MAX_NAME - 1}}})", re.IGNORECASE
)
WORKER_BRACKET = re.compile(rf"\[(?P<a>{WORKER_NAME})\]|\((?P<b>{WORKER_NAME})\)", re.IGNORECASE)
WORKER_BARE = re.compile(rf"(?P<name>{WORKER_NAME.replace(' ', '')})(?::\s|\s+\|?\s*)", re.IGNORECASE)
STAMP = (
    r"(?:[\[(]?\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?[\])]?:?"
    r"|[\[(]?\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?[\])]?:?"
    r"|[\[(]?(?:DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)[\])]?(?::|(?=\s)))"
)
LOGGED = re.compile(STAMP)
FRONT = re.compile(rf"\s+|[-|>:]\s|{STAMP}")
PHASE = re.compile(
    rf"(?<![\w/.\-])[\"']?phase[\"']?\s*[=:]\s*[\"']?(?P<name>[A-Za-z][\w./-]{{0,{MAX_NAME - 1}}})", re.IGNORECASE
)
FIELD = re.compile(r"(?<![\w/.\-])(?P<key>[A-Za-z_][\w./-]*)=(?P<value>[^\s,;]+)")
RESUME = re.compile(r"\b(?:resum|restor|load|continu|from (?:the )?(?:checkpoint|step))", re.IGNORECASE)


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
    fields: dict[str, str] = field(default_factory=dict)


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
        reading = Reading()
        own_step = self._own(line, reading)
        found = self._figures(line, reading)
        first = found.first
        phase = PHASE.search(line)
        if phase:
            reading.phase = phase["name"]
            reading.fields = {m["key"]: m["value"] for m in FIELD.finditer(line) if m["key"].lower() != "phase"}
            first = min(first, phase.start())
        # A step that stands without any figure: is it progress, or only mentioned?
        bare = reading.step is not None and not own_step and not found.others
        if bare and (phase or RESUME.search(line) or (found.by_space and not (found.last and _alone(line, first)))):
            reading.step = None
        if reading.step is None and reading.tok_s is None and reading.loss is None and reading.phase is None:
            return None
        if reading.worker is None:
            reading.worker = worker_of(line, first)
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

    @staticmethod
    def _figures(line: str, reading: Reading) -> _Found:
        """Fills in the figures that `reading` does not have yet."""
        found = _Found(first=len(line), others=reading.tok_s is not None or reading.loss is not None)
        for match in FIGURE.finditer(line):
            name = next(key for key in FIGURE_NAMES if match[key] is not None)
            if getattr(reading, name) is not None:
                continue
            if name == "step":
                digits = match["value"].replace(",", "").replace("_", "")
                if not digits.isdigit() or len(digits) > MAX_STEP_DIGITS:
                    continue
                reading.step = int(digits)
                found.by_space = not match["sep"].strip()
                found.last = not line[match.end() :].strip(" .:|-)]")
            else:
                setattr(reading, name, number(match["value"]))
                found.others = True
            found.first = min(found.first, match.start())
        if reading.tok_s is None:
            ahead = FIGURE_FIRST.search(line)
            if ahead:
                reading.tok_s, found.others = number(ahead["value"]), True
        return found


@dataclass(slots=True)
class _Found:
    first: int
    """Where the first figure stands."""
    others: bool = False
    """Whether there is a figure beside the step."""
    by_space: bool = False
    """Whether only a space stands between the step and its number."""
    last: bool = False
    """Whether nothing follows the step."""


def _alone(line: str, first: int) -> bool:
    """Whether only times, levels and a worker's name stand in front of `first`."""
    front = WORKER_BRACKET.sub("", WORKER_KEY.sub("", line[front_end(line) : first])).strip(" :|-[(")
    return not front or WORKER_BARE.fullmatch(front + ": ") is not None


def front_end(line: str) -> int:
    """Where the timestamps and log levels in front of a line end."""
    end = 0
    while match := FRONT.match(line, end):
        end = match.end()
    return end


def worker_of(line: str, first: int) -> str | None:
    """The worker that `line` names: by key, or in front of the figure at `first`."""
    match = WORKER_KEY.search(line)
    if match:
        return match["name"].rstrip(".:/-") or None
    match = WORKER_BRACKET.search(line, 0, first)
    if match:
        return match["a"] or match["b"]
    match = WORKER_BARE.match(line, front_end(line), first)
    return match["name"] if match else None

"""Every example of docs/step-lines.md, read by the scanner."""

import re
from pathlib import Path

import pytest
import yaml

from orchestrator.logscan import PhaseEvent, Scanner, StepEvent

PAGE = (Path(__file__).parents[2] / "docs" / "step-lines.md").read_text()
BLOCKS = re.findall(r"^```(\S+)( patterns)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PATTERNS = yaml.safe_load(next(body for kind, _, body in BLOCKS if kind == "yaml"))["patterns"]


def said(events, before, after):
    """What the page would say of a line."""
    words = []
    for event in events:
        if isinstance(event, StepEvent):
            figures = {"loss": event.loss, "grad norm": event.grad_norm, "tok/s": event.tok_s, "lr": event.lr}
            words.append(f"step {event.step}")
            words += [f"{name} {value}" for name, value in figures.items() if value is not None]
            words += [f"worker {event.worker}"] if event.worker else []
        elif isinstance(event, PhaseEvent):
            words.append(f"phase {event.phase}")
    if not words and after.loss != before.loss:
        words.append(f"loss {after.loss}")
    return words or ["nothing"]


def numbers(words):
    """`lr 0.0001` and `lr 1e-4` are the same."""
    return sorted(re.sub(r"[\d.]+(?:e-?\d+)?$", lambda number: repr(float(number[0])), word) for word in words)


@pytest.mark.parametrize(("patterns", "body"), [(own, body) for kind, own, body in BLOCKS if kind == "lines"])
def test_each_line_says_what_the_page_says(patterns, body):
    scanner = Scanner(patterns=PATTERNS if patterns else None)
    examples = [re.split(r"\s+-> ", line) for line in body.splitlines()]
    assert examples
    for line, expected in examples:
        before = scanner.summary()
        events = scanner.feed(f"{line}\n".encode(), 1.0)
        assert numbers(said(events, before, scanner.summary())) == numbers(expected.split(", ")), line


def test_the_form_for_a_nameless_bar_is_one():
    (form,) = re.findall(r"`step: '(.*)'`", PAGE)
    events = Scanner(patterns={"step": form}).feed(b" 50%|###   | 120/500 [00:12<00:40,  9.55it/s]\r", 1.0)
    assert [event.step for event in events] == [120]

"""Any chunking of a log gives the same events, and a scanner that goes on from a summary misses and repeats nothing."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.logscan import Cleaner, OffsetMap, Scanner, StepEvent
from orchestrator.model import LogSummary, from_json, to_json

FRAGMENTS = [
    b"step=1 loss=2.0 tok/s=100\n",
    b"step=2 loss=nan tok/s=1,234\r\n",
    b"worker=drafter-0 step=3 loss=1.5 tok/s=1.2k\n",
    b"[drafter-1] step=4 tok/s=300\r",
    b"drafter-1: \x1b[31mst\x1b[0mep=5\x1b]0;title\x07 loss=3\n",
    b"phase=compile_warmup unit=3/12\n",
    b"phase=train worker=target-0\n",
    b"Exception in thread drafter-0:\n",
    b"Exception in thread drafter-1 (run):\n",
    b"Traceback (most recent call last):\n",
    b"[rank0]: Traceback (most recent call last):\n",
    b"[rank0]:   File \"a.py\", line 3, in f\n",
    b"[rank0]: ValueError: zero\n",
    b"  File \"a.py\", line 3, in f\n",
    b"  File \"b.py\", line 4, in g\n    step(step=3, loss=2)\n",
    b"RuntimeError: boom\n",
    b"torch._dynamo.exc.Unsupported: call\nmore of it\n",
    b"KeyError: 'b'\r\n",
    b"\n",
    b"The above exception was the direct cause of the following exception:\n",
    b"insufficient shared memory (shm)\n",
    b"  + Exception Group Traceback (most recent call last):\n"
    b"  | ExceptionGroup: eg (1)\n  +-+---- 1 ----\n    | OSError: x\n",
    b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n  File \"x.py\", line 3 in f\n",
    b"  File \"bad.py\", line 1\n    def (\nSyntaxError: invalid syntax\n",
    b"  worker=drafter-0 step=3 loss=1.5 tok/s=1.2k\n",
    b"ValueErrorstep=1 loss=2.0 tok/s=100\n",
    b": x\n",
    b"Exception in thread step=1 loss=2.0 tok/s=100\n",
    b"drafter-0:\n",
    b"plain words that say nothing\n",
    b"\0\0\0half \xe2\x82 bad \xff utf-8 \xe2\x82\xac\n",
    b"10%|#\r20%|##\r",
    b"\r 10%|# | 10/100 [00:01<00:09, 9.55it/s]",
    b"\r 11%|# | 11/100 [00:01<00:09, 9.55it/s]",
    b"\r100%|##| 25/25 [00:01<00:00, 9.55it/s]\n",
    b"\r{'loss': 2.31, 'epoch': 0.1}\n",
    b"Epoch 3:  23%|##3  | 120/500 [00:12<00:40,  9.55it/s, train_loss=2.31]\r",
    b"\r\n",
    b"\x1b[2K\x1b",
    b"step=",
]

logs = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map(b"".join)


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def words(events: list) -> list[str]:
    """Events as text: nan is not equal to itself."""
    return [repr(event) for event in events]


def scan(data: bytes, cuts: list[int]) -> tuple[list, LogSummary]:
    scanner = Scanner()
    events = [event for chunk in chunks(data, cuts) for event in scanner.feed(chunk, 5.0)]
    events += scanner.finish(5.0)
    return words(events), scanner.summary()


@settings(max_examples=400, deadline=None)
@given(logs, st.lists(st.integers(0, 5000), max_size=8))
def test_any_chunking_gives_the_same_events_and_summary(data, cuts):
    assert scan(data, cuts) == scan(data, [])


@settings(max_examples=60, deadline=None)
@given(logs)
def test_one_byte_at_a_time_gives_the_same_events_and_summary(data):
    assert scan(data, list(range(len(data)))) == scan(data, [])


@settings(max_examples=600, deadline=None)
@given(logs, st.lists(st.integers(0, 5000), min_size=1, max_size=5))
def test_scanners_that_go_on_from_a_summary_see_what_one_scanner_sees(data, stops):
    events, summary = [], None
    for stop in [*sorted({stop % (len(data) + 1) for stop in stops}), len(data)]:
        scanner = Scanner(summary=summary)
        assert scanner.resume_offset == (summary.offset if summary else 0)
        events += scanner.feed(data[scanner.resume_offset : stop], 5.0)
        summary = from_json(LogSummary, json.loads(json.dumps(to_json(scanner.summary()), allow_nan=False)))
        assert summary == scanner.summary()
    events += scanner.finish(5.0)
    assert (words(events), scanner.summary()) == scan(data, [])


figures = st.one_of(
    st.integers(0, 10**10).map(str), st.floats(0, 1e6).map(lambda value: f"{value:.3f}"), st.floats(0, 1).map(str),
    st.sampled_from(["1,234", "1_234", "1.2k", "2e-4", "nan", "-inf", "-3.5", "12,5", "2,310", "3.", "1.2.3", "7%"]),
)  # fmt: skip
FORMS = [
    "step={} loss={} tok/s={}", "worker=drafter-{} step={} loss={}", "[rank{}]: step {} | loss {} | {} tok/s",
    "2026-11-29 14:00:{} INFO step: {} loss: {} lr: {}", "step {}/{} loss {} time {}ms", "rank={} step={} tok/s={}",
    "[Epoch {}] step={} loss={}", "{}% step={} loss={} grad norm: {}", "iter {}: loss {}, mfu {}",
    "step={} step={} x{}",
    "v{} step={} loss={} step {} of {}", "step={}, loss={}, config: {}", "eval step={} loss={}", "step={}:{} loss={}",
]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(FORMS), min_size=1, max_size=3), st.data())
def test_lines_that_look_alike_are_read_as_if_each_were_the_first(forms, data):
    lines = data.draw(st.lists(st.builds(
        lambda form, numbers: f"{form.format(*numbers)}\n".encode(), st.sampled_from(forms),
        st.lists(figures, min_size=5, max_size=5),
    ), max_size=12))  # fmt: skip
    events, summary = [], None
    for line in lines:
        scanner = Scanner(summary=summary)
        events += scanner.feed(line, 5.0)
        summary = scanner.summary()
    if summary is not None:
        assert (words(events), summary) == scan(b"".join(lines), [])


ALIKE = [
    "step={step} loss={loss} tok/s={rate}", "step={step} worker=drafter-{worker} loss={loss} tok/s={rate}",
    "[rank{worker}] step {step} | loss {loss} | {rate} tok/s", '{{"step": {step}, "loss": {loss}, "lr": {rate}}}',
    "2026-11-29 14:00:0{worker},123 INFO step:   {step} | loss   {loss} |  {rate} ms",
    "{{'loss': {loss}, 'epoch': {rate}}}",
    "Epoch {worker}:  {step}%|##{worker}    | {step}/500 [00:12<00:40,  {rate}it/s, loss={loss}]",
    " {step}%|##  | {step}/25 [00:12<00:40, {rate}it/s]",
    "Traceback (most recent call last):\n  File \"a.py\", line 3, in f\nValueError: of drafter-{worker}",
    "Exception in thread drafter-{worker}:\nTraceback (most recent call last):\nKeyError: {step}\nstep=7",
]
stretches = st.lists(st.tuples(
    st.sampled_from(ALIKE), st.integers(0, 30), st.integers(0, 3),
    st.lists(st.tuples(
        st.integers(-1, 2), st.integers(0, 2), st.sampled_from(["1.5", "2.25", "3", "1e-05", "2.5E+08", "1e30"]),
        st.sampled_from(["100.0", "99.5"]),
    ), min_size=1, max_size=40),
), max_size=5)  # fmt: skip


def text_of(stretch) -> bytes:
    form, step, worker, rows = stretch
    lines = []
    for ahead, other, loss, rate in rows:
        step = max(0, step + ahead)
        lines.append(form.format(step=step, worker=worker + other, loss=loss, rate=rate) + "\n")
    return "".join(lines).encode()


@settings(max_examples=300, deadline=None)
@given(stretches)
def test_step_lines_that_are_read_together_say_what_they_say_one_by_one(stretches):
    data = b"".join(map(text_of, stretches))
    together, alone, sampled = Scanner(), Scanner(), Scanner(sample=True)
    events = together.feed(data, 5.0)
    events_alone = [event for line in data.splitlines(True) for event in alone.feed(line, 5.0)]
    some = sampled.feed(data, 5.0)
    assert words(events) == words(events_alone)
    assert together.summary() == alone.summary() == sampled.summary()
    steps = [event for event in events if isinstance(event, StepEvent)]
    told = [event for event in some if isinstance(event, StepEvent)]
    assert set(words(some)) <= set(words(events))
    assert [event for event in events if not isinstance(event, StepEvent)] == [
        event for event in some if not isinstance(event, StepEvent)
    ]
    newest = {event.worker: event for event in steps}
    assert newest == {event.worker: event for event in told}


@settings(max_examples=300, deadline=None)
@given(logs)
def test_every_offset_is_where_the_line_begins_in_the_file(data):
    starts = {0}
    for at, byte in enumerate(data):
        if byte == 10 or (byte == 13 and data[at + 1 : at + 2] != b"\n"):
            starts.add(at + 1)
    scanner = Scanner()
    events = scanner.feed(data, 5.0) + scanner.finish(5.0)
    summary = scanner.summary()
    assert {event.offset for event in events if hasattr(event, "offset")} <= starts
    assert {finding.offset for finding in summary.findings} <= starts


def clean(data: bytes, cuts: list[int]) -> bytes:
    cleaner = Cleaner()
    blocks = [block for chunk in chunks(data, cuts) for block in cleaner.feed(chunk)] + cleaner.finish()
    return b"".join(block.data for block in blocks)


@settings(max_examples=400, deadline=None)
@given(logs, st.lists(st.integers(0, 5000), max_size=8))
def test_any_chunking_is_cleaned_to_the_same_bytes_and_offsets(data, cuts):
    whole = clean(data, [])
    assert clean(data, cuts) == whole
    assert not set(whole) & set(b"\r\0\b\x1b")
    whole.decode()
    cleaner, offsets = Cleaner(), OffsetMap()
    for chunk in chunks(data, cuts):
        for block in cleaner.feed(chunk):
            offsets.add(block)
    for block in cleaner.finish():
        offsets.add(block)
    position = 0
    for line in whole.splitlines(True):
        raw = data[offsets.raw(position) :]
        raw_line = raw.splitlines(True)[0]
        assert clean(raw_line, []) == line
        position += len(line)

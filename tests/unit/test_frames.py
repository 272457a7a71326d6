"""Frames: an answer is taken as it was sent, or not at all."""

from __future__ import annotations

import io

import pytest

from orchestrator import frames

RAW = b"a line of the log\n" * 1000
SENT = frames.encode("0123", {"id": 1}, RAW) + frames.encode("0123", {"final": True})


def read(data: bytes, *, by: int) -> tuple[list[dict[str, object]], frames.FrameReader]:
    reader = frames.FrameReader("0123")
    return [frame for at in range(0, len(data), by) for frame in reader.feed(data[at : at + by])], reader


@pytest.mark.parametrize("by", [1, 7, 100_000])
def test_frames_come_out_as_they_were_sent_with_noise_around_them(by: int) -> None:
    found, reader = read(b"Welcome!\n" + SENT + b"bye\n", by=by)
    assert found == [{"id": 1, "raw": RAW}, {"final": True}]
    assert not reader.damaged and bytes(reader.noise) == b"Welcome!\nbye\n"


@pytest.mark.parametrize("by", [1, 7, 100_000])
@pytest.mark.parametrize("at", [25, 100, len(SENT) // 2, len(SENT) - 70])
def test_what_somebody_writes_into_a_frame_is_never_taken_for_a_part_of_it(at: int, by: int) -> None:
    found, reader = read(SENT[:at] + b"a line of noise\n" + SENT[at:], by=by)
    assert found == [] and reader.damaged


def test_a_frame_from_here_that_was_damaged_on_its_way_ends_what_is_read_there() -> None:
    assert frames.read("0123", io.BytesIO(SENT)) == {"id": 1, "raw": RAW}
    assert frames.read("0123", io.BytesIO(SENT.replace(b"of the log", b"on the log", 1))) is None

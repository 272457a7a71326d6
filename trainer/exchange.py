"""What devices are told in an exchange: the replicas' buffers added up where they lie, first within a device, then once
between devices.

`replicas.Replicas.average` has one thread tell all devices, since under a GIL several would not be faster. The order of
addition is fixed: by device, in the order of the lowest ranks there, and on a device by rank; all replicas end with the
same bits. Nobody waits for a device. Each adds up on a stream of its own, which the others only see through events,
and sends from a second one, so that what comes and what goes share no queue: torch makes a copy between two devices
wait for, and be waited for by, the current streams of both.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stretch of a flat buffer, and the CUDA event after which it holds what is to be added up."""

    low: int
    high: int
    ready: Any = None


class Lane:
    """A stream of a device for its side of exchanges."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._reached = torch.cuda.Event()

    def after(self, other: Lane) -> None:
        """What is told to this one from now on comes after what was told to `other` so far."""
        # One event will do: who waits for it waits for the place where it was recorded last before.
        self.stream.wait_event(other.reached())

    def reached(self) -> Any:
        """The event after what was told so far, until this is asked again."""
        self._reached.record(self.stream)
        return self._reached


class Lanes:
    """Of one side on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.adds, self.sends = Lane(device), Lane(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a replica brings: `flat` [P] of any device, in the same `parts` as everybody's."""

    flat: Tensor
    parts: Sequence[Part]


class Side:
    """The replicas of one device, by rank; what they have together gathers in the first one's buffer."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.offers: list[Offer] = []
        self.lanes: Lanes | None = None
        self.done: Any = None
        """The event after the latest exchange, on CUDA."""

    def bring(self, offers: Mapping[int, Offer]) -> None:
        """What the next exchange is of, by rank; always on the same device."""
        self.offers = [offers[rank] for rank in self.ranks]
        device = self.offers[0].flat.device
        if self.lanes is None and device.type == "cuda":
            self.lanes = Lanes(device)

    def views(self, number: int) -> list[Tensor]:
        """Everybody's part of that number, once they are ready."""
        found = []
        for offer in self.offers:
            part = offer.parts[number]
            if self.lanes is not None:
                self.lanes.adds.stream.wait_event(part.ready)
            found.append(offer.flat[part.low : part.high])
        return found

    def on_adds(self) -> None:
        """What follows is told to the lane on which this side adds up."""
        if self.lanes is not None:
            torch.cuda.set_stream(self.lanes.adds.stream)

    def sends_what_it_has(self) -> None:
        if self.lanes is not None:
            self.lanes.sends.after(self.lanes.adds)

    def has_sent(self) -> None:
        """It may overwrite what the others were to fetch."""
        if self.lanes is not None:
            self.lanes.adds.after(self.lanes.sends)


def exchange(sides: Sequence[Side], *, mean: bool) -> None:
    """Make everybody's buffer the sum of all, or their `mean`, part after part as each is ready; after a side's `done`
    it has it, and nobody reads there any more."""
    with contextlib.ExitStack() as streams:
        for side in sides:
            if side.lanes is not None:
                streams.enter_context(torch.cuda.stream(side.lanes.adds.stream))
        for number in range(len(sides[0].offers[0].parts)):
            views = [side.views(number) for side in sides]
            firsts = _distances(sides, views) if mean else None
            _add_up(sides, views)
            _spread(sides, views, firsts)
        for side in sides:
            if side.lanes is not None:
                side.done = side.lanes.adds.reached()


def _distances(sides: Sequence[Side], views: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Leave of everybody's its distance from the first replica's, of which each side gets a copy: the mean of equals is
    then what they are, while 3 * x / 3 need not be x."""
    sides[0].sends_what_it_has()
    sides[0].on_adds()
    firsts = [views[0][0].clone(), *(_fetch(sides[0], side, views[0][0]) for side in sides[1:])]
    sides[0].has_sent()
    for side, own, first in zip(sides, views, firsts, strict=True):
        side.on_adds()
        for view in own:
            view.sub_(first)
    return firsts


def _add_up(sides: Sequence[Side], views: Sequence[Sequence[Tensor]]) -> None:
    """The sum of all in each side's first."""
    for side, (total, *others) in zip(sides, views, strict=True):
        side.on_adds()
        for other in others:
            total.add_(other)
    if len(sides) == 1:
        return
    totals = [own[0] for own in views]
    slices = _slices(len(totals[0]), count=len(sides))
    fetched: list[list[Tensor | None]] = [[None] * len(sides) for _ in sides]
    for side in sides:
        side.sends_what_it_has()
    for source, target in _pairs(len(sides)):
        fetched[target][source] = _fetch(sides[source], sides[target], totals[source][slices[target]])
    for place, side in enumerate(sides):
        side.has_sent()
        side.on_adds()
        own = totals[place][slices[place]]
        before = [one for one in fetched[place][:place] if one is not None]
        for one in before[1:]:
            before[0].add_(one)
        # a + b and b + a are the same bits.
        for one in (*before[:1], *fetched[place][place + 1 :]):
            own.add_(one)
    if len(sides) > 2:
        for side in sides:
            side.sends_what_it_has()
        for source, target in _pairs(len(sides)):
            part = slices[source]
            # Over what this source has fetched from there, and so after all that was done to it.
            _copy(sides[source], sides[target], totals[source][part], totals[target][part])
        for side in sides:
            side.has_sent()


def _slices(size: int, *, count: int) -> list[slice]:
    """What of a part each side adds up for all. Of two each does it all: as many bytes travel as if they shared it out
    and fetched the other's share, in half the copies."""
    if count == 2:
        return [slice(0, size)] * 2
    return [slice(size * place // count, size * (place + 1) // count) for place in range(count)]


def _pairs(count: int) -> list[tuple[int, int]]:
    """Every source with every other target, so that as many as possible are under way at a time."""
    return [
        (source, (source + shift) % count) for shift, source in itertools.product(range(1, count), range(count))
    ]  # fmt: skip


def _spread(sides: Sequence[Side], views: Sequence[Sequence[Tensor]], firsts: Sequence[Tensor] | None) -> None:
    """Each side's sum, or the mean that it makes of it, to all its replicas."""
    count = sum(map(len, views))
    for place, (side, (total, *others)) in enumerate(zip(sides, views, strict=True)):
        side.on_adds()
        if firsts is not None:
            total.div_(count).add_(firsts[place])
        if others:
            torch._foreach_copy_(others, [total] * len(others))


def _fetch(source: Side, target: Side, values: Tensor) -> Tensor:
    target.on_adds()  # whose memory it is
    room = torch.empty_like(values, device=target.offers[0].flat.device)
    if source.lanes is not None and target.lanes is not None:
        source.lanes.sends.after(target.lanes.adds)
    _copy(source, target, values, room)
    return room


def _copy(source: Side, target: Side, values: Tensor, room: Tensor) -> None:
    """`values` of `source` into `room` of `target`, where what `source` sends comes after all that was done so far. The
    target may read it then, and the source has to wait, as `has_sent` has it, to change them."""
    target.on_adds()
    if source.lanes is None or target.lanes is None:
        room.copy_(values)  # to or from the CPU: this thread waits, as nothing else would order it
        return
    torch.cuda.set_stream(source.lanes.sends.stream)
    room.copy_(values, non_blocking=True)
    # Between two devices torch sees to this by itself.
    target.lanes.adds.after(source.lanes.sends)


def event_here(device: torch.device) -> Any:
    """What is told to `device` after it may rely on what its current stream was told so far. In a graph that is being
    recorded: after it in the graph's latest launch."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(external=torch.cuda.is_current_stream_capturing())
    event.record(torch.cuda.current_stream(device))
    return event

"""Nothing of an exchange between devices is left to luck: whatever touches the same memory is in an order that streams
and events give, and every wait is there for a reason."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.simulated_streams import CUDA, Late, Machine
from tests.trainer.test_replicas import in_threads, unlike
from trainer.exchange import Part, event_here
from trainer.replicas import Replicas

PARTS = {"whole": [(0, 1003)], "in three": [(700, 1003), (0, 1), (1, 700)]}


def exchanged(layout: str, *, mean: bool, bounds: list[tuple[int, int]], machine: Machine | None = None
              ) -> list[list[Any]]:  # fmt: skip
    """What each replica had after each of two exchanges, between which it overwrites what it got; on the CPU, or on a
    machine on which every part comes late, and nothing has run yet."""
    count = len(layout)
    given, got = [unlike(count), unlike(count)[::-1]], [[] for _ in range(count)]
    tensor = machine.tensor if machine else torch.clone

    def work(rank: int) -> None:
        with torch.cuda.stream(streams[rank]) if machine else contextlib.nullcontext():
            flat = tensor(torch.zeros(1003))
            for buffers in given:
                late, parts = tensor(buffers[rank]), []
                for low, high in bounds:
                    flat[low:high].copy_(late[low:high])
                    parts.append(Part(low=low, high=high, ready=event_here(flat.device)))
                replicas.average(rank, flat, parts=parts, mean=mean)
                got[rank].append(flat.clone())
                flat.fill_(math.nan)

    with machine.installed() if machine else contextlib.nullcontext():
        streams = [torch.cuda.Stream(CUDA) if machine else None for _ in range(count)]
        replicas = Replicas(count, layout)
        assert in_threads(count, work) == [None] * count
    return got


def same(got: list[list[Late]], expected: list[list[Tensor]]) -> bool:
    return all(torch.equal(one.content, other) for own, others in zip(got, expected, strict=True)
               for one, other in zip(own, others, strict=True))  # fmt: skip


@pytest.mark.parametrize("bounds", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("layout", ["aaa", "ab", "aabb", "abab", "abc", "aabbcd", "abcd", "ddcbaa"])
def test_devices_may_be_as_late_as_they_like(layout: str, mean: bool, bounds: list[tuple[int, int]]) -> None:
    machine = Machine()
    got = exchanged(layout, mean=mean, bounds=bounds, machine=machine)
    assert machine.races == set()
    expected = exchanged(layout, mean=mean, bounds=bounds)
    for seed in range(4):
        machine.run(seed)
        assert same(got, expected), f"seed {seed}"


def test_without_any_one_of_its_waits_an_exchange_would_be_wrong() -> None:
    sites, raced, wrong = set(), set(), set()
    for layout in ("ab", "abc"):
        asked = {"layout": layout, "mean": True, "bounds": PARTS["whole"]}
        expected, machine = exchanged(**asked), Machine()
        exchanged(**asked, machine=machine)
        sites |= machine.waits
        for site in machine.waits:
            machine = Machine(dropped=site)
            got = exchanged(**asked, machine=machine)
            machine.run(seed=0)
            raced |= {site} if machine.races else set()
            wrong |= {site} if not same(got, expected) else set()
    assert sites - raced == set(), "needless, or not looked at closely enough"
    assert wrong and wrong <= raced, "wrong by an order that was allowed, and not found"


def test_operations_on_the_same_memory_race_unless_an_event_orders_them() -> None:
    machine = Machine()
    with machine.installed():
        one, other, event = torch.cuda.Stream(CUDA), torch.cuda.Stream(CUDA), torch.cuda.Event()
        with torch.cuda.stream(one):
            values = machine.tensor(torch.zeros(4))
            event.record(one)
            values[:2].fill_(1)
        other.wait_event(event)
        event.record(one)  # too late for who waits already
        with torch.cuda.stream(other):
            values[2:].fill_(2)
            assert machine.races == set()
            values[1:3].clone()
        [(first, second)] = machine.races
        assert first.startswith("fill_ on stream 0 at test_") and second.startswith("clone on stream 1 at test_")
        other.wait_event(event)
        with torch.cuda.stream(other):
            values.fill_(3)
        assert len(machine.races) == 1


def test_memory_is_not_given_away_before_all_streams_are_through_with_it() -> None:
    for waits in (True, False):
        machine = Machine()
        with machine.installed():
            one, other, event = torch.cuda.Stream(CUDA), torch.cuda.Stream(CUDA), torch.cuda.Event()
            with torch.cuda.stream(one):
                values = machine.tensor(torch.zeros(4))
            event.record(one)
            other.wait_event(event)
            with torch.cuda.stream(other):
                copy = values[1:].clone()
            event.record(other)
            if waits:
                one.wait_event(event)
            del values
        assert [second.split()[0] for _, second in machine.races] == ([] if waits else ["free"])
        machine.run(0)
        del copy

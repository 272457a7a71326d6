"""Rows in steps: every step of one bucket, no row left out or seen too soon, and gone on with from the cursor alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from trainer.data.order import Cursor, Order, pad_to


def steps(order: Order, count: int, number: int, cursor: Cursor | None = None) -> list[tuple[list[int], Cursor]]:
    found, cursor = [], cursor or Cursor()
    for _ in range(number):
        indices, cursor = order.take(cursor, count)
        found.append((indices.tolist(), cursor))
    return found


def an_order(*counts: int, seed: int = 5) -> Order:
    """So many rows of 8, of 16, of 24 tokens, ..."""
    return Order(torch.cat([torch.full((count,), 8 * (at + 1)) for at, count in enumerate(counts)]), seed=seed)


def test_a_row_lies_in_the_smallest_bucket_that_it_fits() -> None:
    assert pad_to(torch.tensor([1, 16, 17, 32, 33, 64]), [16, 32, 64]).tolist() == [16, 16, 32, 32, 64, 64]


def test_every_epoch_takes_every_row_once_in_an_order_of_its_own_and_can_be_gone_on_with() -> None:
    order = an_order(10)
    found = steps(order, 4, 5)
    taken, cursors = [row for rows, _ in found for row in rows], [cursor for _, cursor in found]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert taken[:10] != taken[10:]
    assert cursors[2] == Cursor(epoch=1, position=2)
    assert order.take(cursors[2], 4)[0].tolist() == taken[12:16]
    assert order.take(Cursor(), 25)[1] == Cursor(epoch=2, position=5)


@pytest.mark.parametrize(("counts", "batch"), [((10,), 4), ((13, 7, 22), 4), ((1, 50), 8), ((3, 2), 16), ((9, 9), 3)])
def test_the_rows_of_a_step_are_of_one_bucket_and_each_bucket_goes_round_and_round(counts: tuple[int, ...], batch: int
                                                                                   ) -> None:  # fmt: skip
    order = an_order(*counts)
    number = 20 * sum(counts) // batch
    taken: dict[int, list[int]] = {}
    for rows, _ in steps(order, batch, number):
        (bucket,) = {int(order.padded_R[row]) for row in rows}
        taken.setdefault(bucket, []).extend(rows)
    assert len(taken) == len(counts)
    for bucket, rows in taken.items():
        own = sorted((order.padded_R == bucket).nonzero().flatten().tolist())
        rounds = [sorted(rows[at : at + len(own)]) for at in range(0, len(rows), len(own))]
        assert all(one == own for one in rounds[:-1]) and set(rounds[-1]) <= set(own)


@pytest.mark.parametrize(("counts", "batch"), [((13, 7, 22), 4), ((1, 50), 8), ((3, 2), 16)])
def test_any_cursor_goes_on_with_the_steps_that_would_have_come(counts: tuple[int, ...], batch: int) -> None:
    found = steps(an_order(*counts), batch, 40)
    for at, (_, cursor) in enumerate(found[:-3]):
        # Of an order that has read nothing before, as in a new process.
        assert steps(an_order(*counts), batch, 3, cursor) == found[at + 1 : at + 4]


def test_buckets_come_in_turns_as_often_as_they_have_rows() -> None:
    order = an_order(400, 200)
    short = [int(order.padded_R[rows[0]]) == 8 for rows, _ in steps(order, 4, 150)]
    assert sum(short) == 100
    assert max(len(list(run)) for _, run in itertools.groupby(short)) < 30


def test_another_seed_is_another_order() -> None:
    assert steps(an_order(30, 30), 4, 5) == steps(an_order(30, 30), 4, 5) != steps(an_order(30, 30, seed=6), 4, 5)


def test_the_order_of_an_epoch_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **options: drawn.append(1) or randperm(*args, **options))
    order, cursor = an_order(6, 4), Cursor()
    while cursor.epoch < 2:
        _, cursor = order.take(cursor, 3)
    assert len(drawn) <= 3

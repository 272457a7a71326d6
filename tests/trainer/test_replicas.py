"""Replicas that add up gradients in threads, and the proof that catches one that has drifted."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable

import pytest
import torch

import trainer.replicas
from trainer.config import OptimizerConfig
from trainer.exchange import Part
from trainer.kernels import plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import generator_for, lay_out
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.optim import AdamW, FlatWeights
from trainer.pipeline import Aborted, Channel
from trainer.replicas import Replicas, ReplicasDiffer, check_equal, weight_hash


def in_threads(count: int, work: Callable[[int], None]) -> list[BaseException | None]:
    """Run `work(rank)` in `count` threads; what each raised."""
    raised: list[BaseException | None] = [None] * count

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return raised


def test_every_replica_ends_with_the_same_bits_added_in_the_order_of_the_ranks() -> None:
    # Values whose sum depends on the order of addition.
    parts = [torch.randn(1003, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (4 * rank) for rank in range(3)]
    expected = (parts[0] + parts[1]) + parts[2]
    replicas, gradients = Replicas(3), [part.clone() for part in parts]
    assert in_threads(3, lambda rank: replicas.average(rank, gradients[rank])) == [None] * 3
    for gradient in gradients:
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_the_mean_of_equals_is_what_they_are_to_the_bit(count: int) -> None:
    """A step that is refused leaves what replicas meet halfway with where it was."""
    weights = torch.randn(10_007, generator=torch.Generator().manual_seed(1))
    replicas, buffers = Replicas(count), [[weights.clone()] for _ in range(count)]
    assert in_threads(count, lambda rank: replicas.mean(rank, buffers[rank])) == [None] * count
    assert all(torch.equal(buffer, weights) for (buffer,) in buffers)


def test_the_mean_of_replicas_that_differ_is_theirs_and_the_same_for_all() -> None:
    parts = [torch.randn(1003, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    replicas, buffers = Replicas(3), [[part.clone()] for part in parts]
    assert in_threads(3, lambda rank: replicas.mean(rank, buffers[rank])) == [None] * 3
    assert all(torch.equal(buffer, buffers[0][0]) for (buffer,) in buffers)
    torch.testing.assert_close(buffers[0][0], torch.stack(parts).mean(dim=0))


def test_a_replica_may_change_its_gradients_as_soon_as_it_has_them() -> None:
    replicas, gradients = Replicas(3), [torch.full((200_000,), float(rank + 1)) for rank in range(3)]

    def work(rank: int) -> None:
        for _ in range(50):
            gradients[rank].fill_(rank + 1)
            replicas.average(rank, gradients[rank])
            assert (gradients[rank] == 6).all()
            gradients[rank].zero_()

    assert in_threads(3, work) == [None] * 3


def test_a_layers_gradients_are_ready_for_the_others_before_the_backward_is_over() -> None:
    shape = DrafterShape(hidden=16, captured=2, layers=3, heads=2, kv_heads=1, head_dim=8, intermediate=24,
                         rms_norm_eps=1e-6, rope_theta=1e4)  # fmt: skip
    blocks = lay_out(
        torch.arange(4, 12)[None], torch.ones(1, 8, dtype=torch.bool), torch.tensor([[1, 4]]),
        torch.ones(1, 2, dtype=torch.bool), block_size=2, mask_token_id=3, gamma=2.0,
    )  # fmt: skip
    ends = FrozenEnds(embedding_VH=torch.ones(12, 16), head_VH=torch.ones(12, 16))
    flats, taken = [], []
    for early in (False, True):
        drafter = Drafter(shape)
        drafter.initialise(generator_for("weights"))
        flat = FlatWeights(drafter)
        if early:
            flat.collect_early(lambda: taken.append(len(taken)) or len(taken), least_bytes=1)
        features = torch.randn(1, 8, 32, generator=generator_for("features"))
        for _ in range(2):
            drafter(features, blocks, ends, plain(DenseAttention())).square().sum().backward()
            flat.collect()
        flats.append(flat)
    assert torch.equal(flats[0].gradients, flats[1].gradients)
    parts = flats[1].parts
    assert [part.ready for part in parts] == list(range(len(parts) + 1, 2 * len(parts) + 1)), "in this order"
    layer = flats[1].named(flats[1].gradients)["layers.2.self_attn.qkv_proj.weight"].data_ptr()
    assert flats[1].gradients[parts[0].low :].data_ptr() == layer, "the last layer first"
    covered = sorted((part.low, part.high) for part in parts)
    assert covered[0][0] == 0 and covered[-1][1] == len(flats[1].exchanged)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))


def test_a_replicas_own_norm_is_of_what_it_took_whatever_others_have_added_since() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(9, 70), torch.nn.Linear(70, 3))
    flat = FlatWeights(module)
    taken = itertools.count()

    def exchange() -> None:  # of a part may begin with its event
        part = flat.parts[next(taken) % len(flat.parts)]
        flat.gradients[part.low : part.high] = math.nan

    flat.collect_early(exchange)
    for scale in (1.0, 2.0):
        flat.gradients.zero_()  # nothing else stands between the parameters
        gradients = torch.autograd.grad(module(torch.ones(1, 9)).sum() * scale, list(module.parameters()))
        (module(torch.ones(1, 9)).sum() * scale).backward()
        flat.collect()
        expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert flat.norm() == pytest.approx(float(expected), rel=1e-6)


def test_parts_are_added_up_each_on_its_own_to_the_same_bits() -> None:
    buffers = [torch.randn(1003, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(3)]
    expected = (buffers[0] + buffers[1]) + buffers[2]
    parts, replicas = [Part(low=700, high=1003), Part(low=0, high=1), Part(low=1, high=700)], Replicas(3)
    assert in_threads(3, lambda rank: replicas.average(rank, buffers[rank], parts=parts)) == [None] * 3
    assert all(torch.equal(buffer, expected) for buffer in buffers)


def test_replicas_that_differ_in_one_bit_are_found_and_equal_ones_are_not() -> None:
    weights = [torch.linspace(-1, 1, 501) for _ in range(3)]
    check_equal({f"drafter-{rank}": int(weight_hash(one)) for rank, one in enumerate(weights)}, step=7)
    weights[1][333] = torch.nextafter(weights[1][333], torch.tensor(9.0))
    with pytest.raises(ReplicasDiffer, match="after step 7"):
        check_equal({f"drafter-{rank}": int(weight_hash(one)) for rank, one in enumerate(weights)}, step=7)


def test_the_hash_changes_with_every_single_weight_and_with_every_swap_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainer.replicas.HASH_CHUNK, "cpu", 50)
    weights = torch.linspace(-1, 1, 130)
    hashes = [int(weight_hash(weights)), int(weight_hash(weights.clone()))]
    for index, other in itertools.combinations_with_replacement(range(len(weights)), 2):
        changed = weights.clone()
        changed[[index, other]] = weights[[other, index]] if index != other else 1.0000001
        hashes.append(int(weight_hash(changed)))
    assert hashes[0] == hashes[1] and len(set(hashes)) == len(hashes) - 1


def test_abort_frees_a_replica_that_waits_for_the_others() -> None:
    replicas = Replicas(2)

    def work(rank: int) -> None:
        if rank == 0:
            replicas.meet()
        else:
            replicas.abort()

    raised = in_threads(2, work)
    assert isinstance(raised[0], Aborted)


def test_a_channel_is_bounded_keeps_order_and_lets_go_of_waiters_when_closed() -> None:
    channel: Channel[int] = Channel(2)
    got: list[int] = []

    def work(rank: int) -> None:
        if rank == 0:
            for item in itertools.count():
                channel.put(item)
                assert len(channel) <= 2
        else:
            while len(got) < 5:
                got.append(channel.get())
            channel.close()

    raised = in_threads(2, work)
    assert got == [0, 1, 2, 3, 4]
    assert isinstance(raised[0], Aborted) and raised[1] is None
    with pytest.raises(Aborted):
        channel.put(9)


def test_flat_adamw_equals_torch_on_the_parameters_themselves() -> None:
    def module() -> torch.nn.Module:
        torch.manual_seed(3)
        linear, norm = torch.nn.Linear, torch.nn.RMSNorm
        return torch.nn.Sequential(linear(7, 5, bias=False), norm(5), linear(5, 3, bias=False))

    config = OptimizerConfig(lr=0.1, weight_decay=0.5, clip_norm=0.25)
    ours, theirs = module(), module()
    flat = FlatWeights(ours)
    optimizer = AdamW(flat, config)
    matrices = [parameter for parameter in theirs.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in theirs.parameters() if parameter.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": norms, "weight_decay": 0.0}], lr=0.1, betas=(0.9, 0.95)
    )
    for step in range(4):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
        ours(x).square().sum().backward()
        flat.collect()
        reference.zero_grad()
        theirs(x).square().sum().backward()
        norm = flat.gradients.norm()
        assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.25).item(), rel=1e-5)
        optimizer.lr.fill_(0.1)
        optimizer.step(norm=norm, broken=torch.zeros(()))
        reference.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-5)

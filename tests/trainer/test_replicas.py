"""Replicas that add up gradients in threads, and the proof that catches one that has drifted."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trainer.replicas
from trainer.exchange import Part
from trainer.kernels import plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import generator_for, lay_out
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.optim import PART_BYTES, AdamW, FlatWeights
from trainer.pipeline import Aborted, Channel
from trainer.replicas import Replicas, ReplicasDiffer, check_equal, weight_hash
from trainer.sections import OptimizerConfig


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


def summed(buffers: list[torch.Tensor], devices: str) -> torch.Tensor:
    """Their sum in the order that `exchange` promises; a letter of `devices` is one."""
    own = [
        functools.reduce(torch.add, (buffer for buffer, one in zip(buffers, devices, strict=True) if one == device))
        for device in dict.fromkeys(devices)
    ]
    return functools.reduce(torch.add, own)


def unlike(count: int) -> list[torch.Tensor]:
    """Buffers whose sum depends on the order of addition."""
    return [torch.randn(1003, generator=generator_for("buffer", rank)) * 10.0 ** (rank % 5) for rank in range(count)]


LAYOUTS = ("a", "aa", "aaa", "ab", "aba", "abc", "aabb", "abcd", "aabbc", "aaabbb", "abcdefg", "aaaabbbb", "abcdefgh")
"""A replica on each of these devices."""
PARTS = {"whole": [], "in three": [Part(low=700, high=1003), Part(low=0, high=1), Part(low=1, high=700)]}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("devices", LAYOUTS)
def test_every_replica_ends_with_the_same_bits_added_by_device_and_then_by_rank(devices: str, parts: list[Part]
                                                                               ) -> None:  # fmt: skip
    count, before = len(devices), unlike(len(devices))
    expected = summed(before, devices)
    replicas, gradients = Replicas(count, devices), [buffer.clone() for buffer in before]
    assert in_threads(count, lambda rank: replicas.average(rank, gradients[rank], parts=parts)) == [None] * count
    assert all(torch.equal(gradient, expected) for gradient in gradients)


class Operations(TorchDispatchMode):
    """What a device would be told, by name; views are not."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("a", {}),
        ("aaa", {"add_": 2, "_foreach_copy_": 1}),
        ("ab", {"empty_like": 2, "copy_": 2, "add_": 2}),
        ("aaabbb", {"empty_like": 2, "copy_": 2, "add_": 4 + 2, "_foreach_copy_": 2}),
        # Each fetches its slice from three and is fetched from by three.
        ("abcd", {"empty_like": 12, "copy_": 12 + 12, "add_": 12}),
    ],
)
def test_devices_are_told_no_more_than_it_takes(devices: str, expected: dict[str, int]) -> None:
    count, seen = len(devices), Counter[str]()
    replicas, gradients = Replicas(count, devices), unlike(count)

    def work(rank: int) -> None:
        with Operations(seen):
            replicas.average(rank, gradients[rank])

    assert in_threads(count, work) == [None] * count
    assert seen == expected


@pytest.mark.parametrize("devices", LAYOUTS)
def test_the_mean_of_equals_is_what_they_are_to_the_bit(devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is refused leaves what replicas meet halfway with where it was."""
    monkeypatch.setattr(trainer.replicas, "MEAN_CHUNK", 4000)
    weights, count = torch.randn(10_007, generator=torch.Generator().manual_seed(1)), len(devices)
    replicas, buffers = Replicas(count, devices), [[weights.clone()] for _ in range(count)]
    assert in_threads(count, lambda rank: replicas.mean(rank, buffers[rank])) == [None] * count
    assert all(torch.equal(buffer, weights) for (buffer,) in buffers)


@pytest.mark.parametrize("devices", LAYOUTS)
def test_the_mean_of_replicas_that_differ_is_theirs_and_the_same_for_all(devices: str, monkeypatch: pytest.MonkeyPatch
                                                                        ) -> None:  # fmt: skip
    monkeypatch.setattr(trainer.replicas, "MEAN_CHUNK", 400)
    count = len(devices)
    parts = [torch.randn(1003, generator=torch.Generator().manual_seed(rank)) for rank in range(count)]
    replicas, buffers = Replicas(count, devices), [[part.clone()] for part in parts]
    assert in_threads(count, lambda rank: replicas.mean(rank, buffers[rank])) == [None] * count
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


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        # Of 14 MB each, and 7 MB before them.
        ({"hidden": 576, "layers": 3, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 1536}, [[2, 1], [0]]),
        ({"hidden": 576, "layers": 4, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 1536},
         [[3, 2], [1, 0]]),
        # Of 772 MB each, and 336 MB before them.
        ({"hidden": 4096, "layers": 5, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 12288},
         [[4], [3], [2], [1], [0], []]),
        ({"hidden": 16, "layers": 3, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 24}, [[2, 1, 0]]),
    ],
    ids=["smollm2", "one more layer", "qwen3-8b", "tiny"],
)  # fmt: skip
def test_layers_travel_together_until_they_are_worth_a_copy(sizes: dict[str, int], layers: list[list[int]]) -> None:
    with torch.device("meta"):
        flat = FlatWeights(Drafter(DrafterShape(**sizes, captured=5, rms_norm_eps=1e-6, rope_theta=1e4)))
        flat.collect_early(lambda: None)
    assert flat.parts[0].high == len(flat.exchanged) and flat.parts[-1].low == 0
    assert all(one.low == other.high for one, other in itertools.pairwise(flat.parts)), "from the end to the beginning"
    assert len(flat.parts) == 1 or all(4 * (part.high - part.low) >= PART_BYTES for part in flat.parts)
    there = [
        [number for number in reversed(range(sizes["layers"])) if any(
            place.name.startswith(f"layers.{number}.") and len(place.shape) > 1 and part.low <= place.start < part.high
            for place in flat.places
        )] for part in flat.parts
    ]  # fmt: skip
    assert there == layers


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


def test_who_comes_last_after_an_abort_changes_nobodys_gradients() -> None:
    replicas, before = Replicas(2), unlike(2)
    gradients = [buffer.clone() for buffer in before]
    replicas.abort()
    for rank, gradient in enumerate(gradients):
        with pytest.raises(Aborted):
            replicas.average(rank, gradient)
    assert all(torch.equal(*pair) for pair in zip(gradients, before, strict=True))


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

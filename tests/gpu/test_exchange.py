"""Gradients between replicas and features between devices, while the devices are busy: every bit as if they waited."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.support import losses
from tests.trainer.test_replicas import in_threads, summed
from trainer.exchange import Part, event_here
from trainer.model.blocks import generator_for
from trainer.model.target import Target, decoder_layers, load_target
from trainer.replica import Replica
from trainer.replicas import Replicas
from trainer.sections import TargetConfig

Settings = dict[str, Any]
CUDA = torch.device("cuda:0")
CYCLES = 3_000_000
"""A device is held up for about 2 ms: much longer than a thread takes to tell it the next things."""
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SIZE = 300_000


def unlike(count: int, step: int) -> list[Tensor]:
    """Buffers whose sum depends on the order of addition."""
    return [torch.randn(SIZE, generator=generator_for(rank, step)) * 10.0 ** (rank % 5) for rank in range(count)]


def averaged_under_load(layout: str, devices: dict[str, torch.device], *, mean: bool) -> None:
    """Steps of threads whose devices are late with every part of their gradients, and which overwrite what they got."""
    count, steps, wrong = len(layout), 6, []
    replicas = Replicas(count, layout)
    inputs = [unlike(count, step) for step in range(steps)]
    ends = [SIZE, 200_001, 70_000, 0]

    def work(rank: int) -> None:
        device = devices[layout[rank]]
        torch.cuda.set_device(device)
        flat = torch.zeros(SIZE, device=device)
        given, got = [buffers[rank].to(device) for buffers in inputs], []
        with torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda.synchronize(device)
            for one in given:
                parts = []
                for high, low in itertools.pairwise(ends):
                    torch.cuda._sleep(CYCLES * (1 + (rank + low) % 3))
                    flat[low:high].copy_(one[low:high])
                    parts.append(Part(low=low, high=high, ready=event_here(device)))
                if mean:
                    replicas.mean(rank, [flat])
                else:
                    replicas.average(rank, flat, parts=parts)
                torch.cuda._sleep(CYCLES * (rank % 2))
                got.append(flat.clone())
                flat.fill_(float("nan"))
            torch.cuda.current_stream().synchronize()
        results[rank] = [one.cpu() for one in got]

    results: dict[int, list[Tensor]] = {}
    assert in_threads(count, work) == [None] * count
    for step, buffers in enumerate(inputs):
        if mean:
            exact = torch.stack(buffers).double().mean(dim=0)
            # Rounding is that of the largest of what is added.
            atol = 2**-22 * max(float(buffer.abs().max()) for buffer in buffers)
            torch.testing.assert_close(results[0][step].double(), exact, rtol=0, atol=atol)
        expected = results[0][step] if mean else summed(buffers, layout)
        wrong += [(step, rank) for rank in range(count) if not torch.equal(results[rank][step], expected)]
    assert wrong == []


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("layout", ["aaa", "ab", "aabb", "abab", "abc", "aabbcd"])
def test_replicas_of_devices_that_are_late_end_with_the_same_bits(layout: str, mean: bool) -> None:
    """All on one device, which counts as several: whatever orders them is said, and nothing left to torch."""
    averaged_under_load(layout, dict.fromkeys(layout, CUDA), mean=mean)


@two_devices
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("layout", ["ab", "abab", "aaabbb", "abc", "aabbcd"])
def test_replicas_of_real_devices_that_are_late_end_with_the_same_bits(layout: str, mean: bool) -> None:
    there = torch.cuda.device_count()
    averaged_under_load(layout, {one: torch.device("cuda", "abcd".index(one) % there) for one in layout}, mean=mean)


@pytest.mark.parametrize("recorded", [True, False])
def test_features_that_leave_late_are_not_overwritten_by_the_next_forward(tiny_target: Path, recorded: bool) -> None:
    target = load_target(TargetConfig(path=str(tiny_target), captured_layers=3), CUDA)
    ids = [torch.randint(4, 400, (2, 128), generator=generator_for(number)).pin_memory() for number in range(12)]
    elsewhere, left = torch.device("cpu"), []
    with target.stream():
        expected = [target.features(one).cpu() for one in ids]
        if recorded:
            target.record([(ids[0],)])
            expected = [target.features(one).cpu() for one in ids]
        torch.cuda.synchronize()
        for one in ids:
            features_BSF = target.features(one)
            with target.handing_over(features_BSF, elsewhere):
                torch.cuda._sleep(CYCLES)
                left.append(features_BSF.clone())
            del features_BSF
    torch.cuda.synchronize()
    assert [torch.equal(one.cpu(), other) for one, other in zip(left, expected, strict=True)] == [True] * len(ids)


def test_the_next_forward_does_not_wait_until_features_have_left(tiny_target: Path) -> None:
    target = load_target(TargetConfig(path=str(tiny_target), captured_layers=3), CUDA)
    ids = torch.randint(4, 400, (2, 128), generator=generator_for("ids")).pin_memory()
    ran = torch.cuda.Event()
    last = decoder_layers(target.model)[target.layer_ids[-1]]
    last.register_forward_hook(lambda *_: ran.record(torch.cuda.current_stream()))
    overtook = False
    with target.stream():
        for attempt in range(6):  # this thread may be late, but not always later than the device
            features_BSF = target.features(ids)
            with target.handing_over(features_BSF, torch.device("cpu")):
                torch.cuda._sleep(100_000_000 << attempt)
                gone = torch.cuda.current_stream().record_event()
            target.features(ids)
            ran.synchronize()
            overtook = overtook or not gone.query()
            torch.cuda.current_stream().synchronize()
            assert gone.query(), "their memory is given away before they have left"
            if overtook:
                break
    assert overtook


@two_devices
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_hand_over_on_a_stream_of_its_own_changes_no_bit(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    on_gpu |= {"cuda_graphs": graphs, "devices": {"target": ["cuda:0"], "drafter": ["cuda:1"] * 3}}
    accept = Replica.accept

    def late(self: Replica, **given: Any) -> Any:
        if threading.current_thread().name.startswith("target-"):
            torch.cuda._sleep(CYCLES)
        return accept(self, **given)

    found = {}
    for name in ("aside", "in turn", "late"):
        with monkeypatch.context() as patched:
            if name == "in turn":
                patched.setattr(Target, "handing_over", lambda *_: contextlib.nullcontext())
            if name == "late":
                patched.setattr(Replica, "accept", late)
            training = train({**on_gpu, "output_dir": str(tmp_path / name)})
        found[name] = losses(tmp_path / name), training.members[0].flat.weights.cpu()
    for name in ("in turn", "late"):
        assert found[name][0] == found["aside"][0] and torch.equal(found[name][1], found["aside"][1])


@two_devices
def test_six_drafters_on_two_devices_hold_the_same_weights(train: Callable[..., Any], on_gpu: Settings) -> None:
    devices = {"target": ["cuda:0"], "drafter": ["cuda:0", "cuda:1"] * 3}
    training = train({**on_gpu, "devices": devices, "batch_size": 6, "cuda_graphs": "on"})
    weights = [member.flat.weights.cpu() for member in training.members.values()]
    assert len(weights) == 6 and all(torch.equal(one, weights[0]) for one in weights)


@two_devices
def test_features_go_from_device_to_device_and_never_through_the_host(
    train: Callable[..., Any], on_gpu: Settings, tmp_path: Path
) -> None:
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def watch(training: Any) -> None:
        training.saves.off = True
        torch.cuda.synchronize()
        profile.start()

    on_gpu |= {"devices": {"target": ["cuda:0"], "drafter": ["cuda:1"]}, "cuda_graphs": "on"}
    training = train(on_gpu, before=watch)
    for device in range(2):
        torch.cuda.synchronize(device)
    profile.stop()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [(one["name"], one["args"]["bytes"]) for one in traced if one.get("cat") == "gpu_memcpy"]
    rows, length = on_gpu["batch_size"], on_gpu["data"]["sequence_length"]
    bytes_each = training.targets[0].ends.embedding_VH.element_size()
    features_bytes = bytes_each * rows * length * training.members[0].drafter.fc.weight.shape[1]
    direct = [size for name, size in copies if "PtoP" in name and size == features_bytes]
    assert len(direct) == on_gpu["steps"], sorted({name for name, _ in copies})
    by_host = [(name, size) for name, size in copies if ("HtoD" in name or "DtoH" in name) and size >= features_bytes]
    assert by_host == []

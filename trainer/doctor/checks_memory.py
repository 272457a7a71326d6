"""The doctor on memory: what the planner says, beside what one real step takes.

Measured is what lives on a device, and what each worker there takes for its own work while the others rest; at the
worst all do so at once, which is what the planner adds up too. On CUDA torch's allocator keeps the account, on the CPU
`live_bytes.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from trainer.doctor.checks_step import as_it_was, batch_of, take_step
from trainer.doctor.checkup import Check, Finding, Patient, fail, ok, warn
from trainer.feed import step_blocks, target_inputs
from trainer.plan import forecast
from trainer.plan.forecast import GIB, Memory
from trainer.plan.live_bytes import LiveBytes, bytes_of

WITHIN = 0.1
"""How far plan and measurement may be apart; on CUDA, where a plan is too high, nothing is in danger."""


def measured(patient: Patient) -> dict[str, Memory]:
    """By device, of the longest bucket."""
    config, length = patient.config, patient.config.data.sequence_length
    found: dict[str, Memory] = {}
    models: set[int] = set()
    for target in patient.targets:
        here = found.setdefault(str(target.device), Memory())
        if id(target.model) not in models:
            models.add(id(target.model))
            here.target += bytes_of(*target.model.parameters(), *target.model.buffers())
        ids_BS, mask_BS, starts_BS = patient.rows.cut(torch.arange(patient.share) % len(patient.rows), length)
        blocks = step_blocks(config, ids_BS, mask_BS, starts_BS, step=1)
        inputs = target_inputs(config, ids_BS, blocks)

        def forward(target: Any = target, inputs: Any = inputs) -> None:
            with target.stream():
                target.features(*inputs)

        here.work += peak_of(target.device, forward)
    ends_there = {bytes_key(tensor) for target in patient.targets for tensor in target.model.parameters()}
    for member in patient.members.values():
        here = found.setdefault(str(member.device), Memory())
        for tensor in (member.ends.embedding_VH, member.ends.head_VH):
            if bytes_key(tensor) not in ends_there:
                ends_there.add(bytes_key(tensor))
                here.frozen_ends += bytes_of(tensor)
        here.drafters += bytes_of(*member.state(), member.flat.exchanged, *member.drafter.parameters())
        batch = batch_of(patient, member, length)
        here.queues += (config.queue_depth + 1) * bytes_of(batch.features_BSF, *batch.blocks.tensors())
        with as_it_was(member):
            here.work += take_step(patient, member, batch, measure=peak_of)
    return found


def bytes_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_of(device: torch.device, work: Callable[[], Any]) -> int:
    """Bytes that `work` takes on `device` at the most, beyond what was there before."""
    if device.type != "cuda":
        # Compiled functions would take the counting for another kind of tensor.
        with torch.compiler.set_stance("force_eager"), LiveBytes() as live:
            work()
        return live.peak
    torch.cuda.synchronize(device)
    # Each worker of a run has one of its own, which an earlier check has made here already.
    torch._C._cuda_clearCublasWorkspaces()
    # What somebody has left here, and goes away meanwhile, would be counted against what the work takes.
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def memory(patient: Patient) -> Finding:
    config, target = patient.config, patient.target
    _ = patient.member
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    planned, without_graphs = (
        forecast.memory(
            config.model_copy(update={"cuda_graphs": graphs}), target.model.config, patient.shape,
            layer_ids=target.layer_ids, parameters=parameters,
        ) for graphs in (config.cuda_graphs, "off")
    )  # fmt: skip
    found = measured(patient)
    told, apart, full = [], {}, []
    for name, here in found.items():
        apart[name] = without_graphs[name].peak / here.peak - 1
        told.append(
            f"{name}: {here.peak / GIB:.3f} GiB measured, {without_graphs[name].peak / GIB:.3f} planned"
            f" ({apart[name]:+.1%}; a step's work {here.work / GIB:.3f} and {without_graphs[name].work / GIB:.3f})"
        )
        room = _room(name)
        if room is not None and planned[name].peak > room:
            full.append(
                f"{name} has {room / GIB:.1f} GiB, and the run is planned to take {planned[name].peak / GIB:.1f}"
            )
    facts = {
        "planned": {name: _by_part(one) for name, one in planned.items()},
        "measured": {name: _by_part(one) for name, one in found.items()}, "apart": apart,
    }  # fmt: skip
    said = "; ".join(told)
    if full:
        return fail(
            f"{'; '.join(full)}; {said}", "a smaller batch_size, drafter.anchors or data.sequence_length", **facts
        )
    off = [name for name, by in apart.items() if by < -WITHIN or (by > WITHIN and name == "cpu")]
    if off:
        return warn(said, "the plan of this shape is not to be relied on; what was measured is", **facts)
    return ok(said, **facts)


def _by_part(one: Memory) -> dict[str, int]:
    return {
        "target": one.target, "frozen_ends": one.frozen_ends, "drafters": one.drafters, "queues": one.queues,
        "work": one.work, "peak": one.peak,
    }  # fmt: skip


def _room(name: str) -> int | None:
    """Bytes of the device altogether; of the CPU unknown, where its memory is shared with whatever else runs."""
    if name == "cpu":
        return None
    return int(torch.cuda.get_device_properties(torch.device(name)).total_memory)


CHECKS = [Check(name="memory", what="the planner's peak, beside a measured step", look=memory)]

"""How a run goes on without a worker that has failed: who may be missing, and what the others agree on.

All threads have left by then. Replicas may have been caught on either side of an optimizer step, so they take over the
state of the one that is furthest on; with `sync: params`, where they differ on purpose, the mean of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized

import torch

from trainer.config import Config
from trainer.nonfinite import NonFinite
from trainer.pipeline import Crew
from trainer.replica import Replica
from trainer.replicas import ReplicasDiffer
from trainer.watchdog import NoProgress


def why_not(config: Config, crew: Crew, groups: Mapping[str, Sized]) -> str | None:
    """Why a run may not go on without the worker that failed. `groups`: the workers of each stage that may lose one."""
    assert crew.failed is not None
    if config.on_worker_death == "stop":
        return "on_worker_death: stop"
    if isinstance(crew.error, (NonFinite, ReplicasDiffer)):
        return "what failed is the training, not the worker"
    if isinstance(crew.error, NoProgress):
        return "it has not ended, it hangs"
    stage = crew.failed.rpartition("-")[0]
    if stage not in groups:
        return f"there is no other {stage}"
    return None if len(groups[stage]) > 1 else f"it was the last {stage}"


@torch.no_grad()
def agree(config: Config, members: Mapping[int, Replica]) -> int:
    """Bring all replicas to one state; returns how many optimizer steps are in it."""
    for member in members.values():
        if member.device.type == "cuda":
            torch.cuda.synchronize(member.device)
    source = max(members.values(), key=lambda member: member.steps_done)
    for buffers in zip(source.state(), *(member.state() for member in members.values()), strict=True):
        agreed, *own = buffers
        if config.sync == "params":
            agreed = torch.stack([buffer.to(agreed.device) for buffer in own]).mean(dim=0)
        for buffer in own:
            if buffer is not agreed:
                buffer.copy_(agreed)
    for member in members.values():
        member.flat.spread()
        member.resume_at(source.steps_done, refused=source.refused)
        if member.device.type == "cuda":
            torch.cuda.synchronize(member.device)
    return source.steps_done

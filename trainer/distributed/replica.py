"""A replica whose drafter torch's DDP or FSDP2 keeps in step with those of the other processes.

What it computes and how a micro-batch comes to it is `replica.Replica`'s; gradients are added up by the engine during
the backward, and AdamW works on what this process holds: with DDP all weights, with FSDP2 a shard of each. `weights`,
`moments`, `averages` and `served` gather: all processes call them together, and the one that leads gets them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from trainer.config import Config
from trainer.distributed.ranks import Ranks
from trainer.kernels import Kernels, KernelSets, RunLayer, Shape
from trainer.micro_batch import MicroBatch
from trainer.model.drafter import Drafter, FrozenEnds
from trainer.optim import MOMENTS, AdamWInPlace, Ema
from trainer.replica import Replica
from trainer.replicas import weight_hash
from trainer.steps import Figures


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatheredFigures(Figures):
    """This process's own, with those of all."""

    by_rank: list[Figures]
    stops_R: Tensor
    """Which processes had been asked to stop when they began the step."""


class RankReplica(Replica):
    """`asked_to_stop` is asked in each step. See `Replica` for the rest."""

    def __init__(self, drafter: Drafter, ends: FrozenEnds, kernels: KernelSets, config: Config, device: torch.device,
                 *, ranks: Ranks, asked_to_stop: Callable[[], bool]) -> None:  # fmt: skip
        self.ranks, self._asked_to_stop = ranks, asked_to_stop
        super().__init__(drafter, ends, kernels, config, device)
        # Both engines give the mean of the processes' gradients, and their sum is wanted.
        self.scale = float(ranks.size)
        self._gathered = torch.zeros(ranks.size, len(self._figures) + 2, device=device, dtype=torch.float64)
        """By process: `Figures`, whether it is to stop, the weights' hash."""

    def _hold(self, config: Config) -> None:
        self.shards = config.engine == "fsdp2"
        if self.shards:
            self.kernels = _OutsideKernels(self.kernels)
            self._module: nn.Module = _sharded(self.drafter, self.ends.head_VH.dtype, self.device, self.ranks)
        else:
            with self.stream():  # on which its hooks expect the gradients then
                self._module = DistributedDataParallel(self.drafter, gradient_as_bucket_view=True)
        self._parameters = {
            name.replace(".inner.", "."): parameter for name, parameter in self.drafter.named_parameters()
        }
        self._own = {name: _local(parameter.detach()) for name, parameter in self._parameters.items()}
        self._moments = {
            key: {name: torch.zeros_like(own) for name, own in self._own.items()} for key in MOMENTS
        }
        settings = config.optimizer
        self.optimizer = AdamWInPlace(
            list(self._own.values()),
            [settings.weight_decay if parameter.dim() > 1 else 0.0 for parameter in self._parameters.values()],
            [{key: moments[name] for key, moments in self._moments.items()} for name in self._own], settings,
        )  # fmt: skip
        self._averages = {name: Ema(own, settings.ema) for name, own in self._own.items()} if settings.ema else {}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- a step ---

    def step(self, batches: Iterable[MicroBatch], *, lr: float, hashed: bool, **_alone: Any) -> GatheredFigures:
        """One optimizer step on the micro-batch of this process, together with the others; see `Replica.step`."""
        self._stalls = []
        for batch in batches:
            self.loss_and_gradients(batch)
        self.optimizer.lr.fill_(lr)
        with self.timer.measure("optimizer", self.device, self.steps_done + 1):
            self._update()
        self.steps_done += 1
        own = self._gathered[self.ranks.rank].clone()
        own[:-2] = self._figures
        own[-2].fill_(float(self._asked_to_stop()))
        if hashed and not self.shards:
            own[-1:].view(torch.int64).copy_(self.hash())
        dist.all_gather(list(self._gathered.unbind()), own)
        if self._stream is None:
            return self._figures_for_all(self._gathered.clone(), hashed=hashed, done=None)
        host = self._gathered.to("cpu", non_blocking=True)
        return self._figures_for_all(host, hashed=hashed, done=self._stream.record_event())

    def _figures_for_all(self, host: Tensor, *, hashed: bool, done: Any) -> GatheredFigures:
        found = [
            self._figures_of(
                one[:-2], hash=one[-1:].view(torch.int64) if hashed and not self.shards else None, done=done,
                stalls=self._stalls if rank == self.ranks.rank else [],
            ) for rank, one in enumerate(host)
        ]  # fmt: skip
        own = found[self.ranks.rank]
        facts = {field.name: getattr(own, field.name) for field in dataclasses.fields(Figures)}
        return GatheredFigures(**facts, by_rank=found, stops_R=host[:, -2])

    def hash(self) -> Tensor:
        """Of all weights, where every process has them all."""
        hashes = [weight_hash(own.flatten()) for own in self._own.values()]
        return functools.reduce(lambda one, other: one * 31 + other, hashes)  # modulo 2**64

    def loss_and_gradients(self, batch: MicroBatch) -> None:
        self._begin(batch)
        with self.timer.measure("drafter forward + backward", self.device, batch.step):
            self._forward_backward(batch.inputs())

    def _forward_backward(self, inputs: Mapping[str, Tensor], *, kernels: Kernels | None = None) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        loss, weight, slots_2k = self._losses(inputs, module=self._module, kernels=kernels)
        # Times 1; and of a loss that is not finite every gradient is nan, by which all get to know of it.
        loss.backward(loss.detach() * 0 + 1)
        self._loss.copy_(loss.detach() / self.scale)
        self._weight.copy_(weight / self.scale)
        self._slots_2k.copy_(slots_2k)
        # There is no gradient of this process alone; only its loss says whether what is not finite is its own.
        self._own_norm.copy_(self._loss * 0)

    def _update(self) -> None:
        for part, parameter in zip(self.optimizer.parts, self._parameters.values(), strict=True):
            part.grad = _local(parameter.grad)
        norm = torch.stack(torch._foreach_norm([part.grad for part in self.optimizer.parts])).norm()
        if self.shards:
            square = norm.square()
            dist.all_reduce(square)
            norm = square.sqrt()
        weight = None
        if self._alpha is not None:  # see `Replica._finish`
            weight = self._weight.clone()
            dist.all_reduce(weight)
            norm = norm / weight
        skip = self._refuse_unless(torch.isfinite(norm))
        self.optimizer.step(norm=norm, broken=skip, weight=weight)
        if self._averages:
            share = next(iter(self._averages.values())).share(taken=self.optimizer.taken, broken=skip)
            for average in self._averages.values():
                average.take(share)
        self._note_figures(norm, skip)

    def record(self, batches: Iterable[MicroBatch], **_facts: Any) -> None:
        raise RuntimeError("torch's engines launch theirs themselves")

    # --- what is held, together with the others ---

    def weights(self) -> dict[str, Tensor]:
        return self._whole(self._own)

    def averages(self) -> dict[str, Tensor]:
        return self._whole({name: average.weights for name, average in self._averages.items()})

    def served(self) -> dict[str, Tensor]:
        return self.averages() if self._averages else self.weights()

    def moments(self) -> dict[str, Tensor]:
        return {
            f"{key}.{name}": tensor for key, own in self._moments.items() for name, tensor in self._whole(own).items()
        }

    def state(self) -> list[Tensor]:
        averages = [average.weights for average in self._averages.values()]
        return list(itertools.chain(self._own.values(), *(own.values() for own in self._moments.values()), averages))

    @property
    def state_bytes(self) -> int:
        copies = 1 + len(MOMENTS) + bool(self._averages)
        return sum(4 * copies * parameter.numel() for parameter in self._parameters.values())

    def begin_with(self, weights: dict[str, Tensor]) -> None:
        """`weights` are there in every process."""
        for name, full in self.drafter.together(weights).items():
            self._place(name, self._own[name], full.to(self.device))
            if self._averages:
                self._averages[name].weights.copy_(self._own[name])
                self._averages[name].begins = True

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor], averages: dict[str, Tensor], *,
                steps_done: int, refused: int, begun_with_weights: bool = False) -> None:  # fmt: skip
        """What the process that leads has read; the others give nothing."""
        self._take_over(self._own, weights)
        for key, own in self._moments.items():
            prefix = f"{key}."
            found = {name.removeprefix(prefix): tensor for name, tensor in moments.items() if name.startswith(prefix)}
            self._take_over(own, found)
        if self._averages:
            self._take_over({name: one.weights for name, one in self._averages.items()}, averages or weights)
            for average in self._averages.values():
                average.begins = begun_with_weights
        self.resume_at(steps_done, refused=refused)

    def _take_over(self, own: Mapping[str, Tensor], found: dict[str, Tensor]) -> None:
        fulls = self.drafter.together(found)
        for name, local in own.items():
            shape = self._parameters[name].shape
            full = torch.empty(shape, device=self.device)
            if self.ranks.leads:
                full.copy_(fulls[name].view(shape))
            dist.broadcast(full, src=0)
            self._place(name, local, full)

    def _place(self, name: str, local: Tensor, full: Tensor) -> None:
        """Of `full`, what this process holds of the parameter of this name."""
        parameter = self._parameters[name]
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
        local.copy_(full)

    def _whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One after the other, so that a device never holds more than one whole one."""
        found = {}
        for name, local in own.items():
            parameter = self._parameters[name]
            if isinstance(parameter, DTensor):
                whole = DTensor.from_local(
                    local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                    stride=parameter.stride(),
                ).full_tensor()  # fmt: skip
                local = whole.cpu() if self.ranks.leads else whole
            if self.ranks.leads:
                found[name] = local
        return self.drafter.apart(found)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Outside(nn.Module):
    """A layer whose hooks, by which FSDP gathers its weights, are outside of what is compiled."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, run: Callable[..., Tensor], slots_BTH: Tensor, context_BSH: Tensor) -> Tensor:
        return run(self.inner, slots_BTH, context_BSH)


class _OutsideKernels:
    """`KernelSets` for layers that are each inside of an `_Outside`."""

    def __init__(self, sets: KernelSets) -> None:
        self._sets, self.compiles = sets, sets.compiles

    def of(self, shape: Shape) -> Kernels:
        kernels = self._sets.of(shape)
        return dataclasses.replace(
            kernels, first_layer=_from_outside(kernels.first_layer), layer=_from_outside(kernels.layer)
        )  # fmt: skip


def _from_outside(run: RunLayer) -> RunLayer:
    def layer(module: Any, slots_BTH: Tensor, context_BSH: Tensor, *rest: Any) -> Tensor:
        out: Tensor = module(lambda inner, slots, context: run(inner, slots, context, *rest), slots_BTH, context_BSH)
        return out

    return layer


def _sharded(drafter: nn.Module, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> nn.Module:
    """Each layer's weights, and what is outside of the layers, in float32 shards; gathered in `dtype`."""
    mesh = init_device_mesh(device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for number, layer in enumerate(drafter.layers):
        drafter.layers[number] = fully_shard(_Outside(layer), mesh=mesh, mp_policy=policy)
    return fully_shard(drafter, mesh=mesh, mp_policy=policy)

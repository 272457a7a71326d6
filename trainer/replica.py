"""One drafter on one device: its weights, its optimizer, and what it does with a micro-batch.

A drafter thread owns one `Replica`; the compile plan borrows it once, before the threads start. On CUDA a replica works
on a stream of its own, and nothing in a step waits for the device: a step's figures are copied to the host as it goes
on, and read when the next one is under way. What a step does there is recorded beforehand (`record`), and then launched
as two CUDA graphs, with the exchange of gradients between them: `_forward_backward` and `_finish`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.clock import Span, Timer, mark
from trainer.config import Config
from trainer.data.order import Cursor
from trainer.exchange import Part, event_here
from trainer.graphs import Graphs
from trainer.kernels import Kernels, KernelSets
from trainer.micro_batch import MicroBatch, shape_of
from trainer.model.blocks import Blocks, bring
from trainer.model.drafter import Drafter, FrozenEnds
from trainer.model.loss import block_loss
from trainer.optim import AdamW, Ema, FlatWeights
from trainer.replicas import Replicas, weight_hash
from trainer.report.throughput import Amount
from trainer.steps import Figures


class Replica:
    """One `drafter`, which nobody else has, with its optimizer on `device`, and the target's frozen ends there, which
    others may share.

    `flat.weights` and `flat.gradients` [P] are its weights and gradients in float32; see `optim.FlatWeights`.
    """

    def __init__(self, drafter: Drafter, ends: FrozenEnds, kernels: KernelSets, config: Config, device: torch.device
                 ) -> None:  # fmt: skip
        self.device = device
        self.ends, self.kernels = ends, kernels
        self.drafter = drafter.to(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._intake = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._hold(config)
        self._chunk_rows, self._alpha = config.loss.chunk_rows, config.loss.pace_alpha
        # What a step reads and leaves on the device, each time in the same place.
        self._loss, self._weight, self._own_norm, self._weight_sum, self._refused = (
            torch.zeros(5, device=device).unbind()
        )  # fmt: skip
        self._may_refuse = self._allowed = config.max_refused
        """Steps that may change nothing because something is not finite; after one more nothing changes any more."""
        self._doubt_1 = torch.zeros(1, device=device)
        """nan if anything of this replica's own is not finite, else 0."""
        self._slots_2k = torch.zeros(2, config.drafter.block_size - 1, device=device)
        self._figures = torch.zeros(5 + self._slots_2k.numel(), device=device, dtype=torch.float64)
        """All that `Figures` holds, so that one copy brings it to the host."""
        self.scale = 1.0
        """Of the gradients: as many as there are replicas, where each steps on its own share's alone."""
        self.steps_done = 0
        """Optimizer steps, begun at least as far as the device is concerned."""
        self._stalls: list[Span] = []
        self.timer = Timer()
        """Of the run, which sets it."""
        self._graphs = Graphs(self._stream)
        self._parts: dict[Hashable, list[Part]] = {}
        """Of each graph that takes gradients early: the parts, with the events that it records when it runs."""

    def _hold(self, config: Config) -> None:
        """Weights, optimizer and moving average of the fresh drafter, each where it will stay."""
        self.flat = FlatWeights(self.drafter, self.ends.head_VH.dtype)
        self.optimizer = AdamW(self.flat, config.optimizer)
        self.ema = Ema(self.flat.weights, config.optimizer.ema) if config.optimizer.ema is not None else None

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """What this replica does belongs inside: its own stream, where there are streams."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def exchange_early(self) -> None:
        """Let a layer's gradients be ready for the others as soon as they are there; before anything is compiled."""
        self.flat.collect_early(functools.partial(event_here, self.device))

    def accept(self, *, step: int, rows: list[int], features_BSF: Tensor, blocks: Blocks, weight_sum: float,
               amount: Amount, cursor: Cursor, made: Span | None = None, made_by: int = 0) -> MicroBatch:  # fmt: skip
        """A micro-batch with its tensors brought to this replica's device; called by a target thread.

        `features_BSF` is [rows, S, captured * H], in the target's type and on its device; `blocks` has the same rows.
        """
        ready = None
        elsewhere = self._intake is not None and features_BSF.device != self.device
        # A copy from another device holds up nothing that this replica does meanwhile. torch has the other device make
        # it, on its current stream: see `Target.handing_over`.
        with torch.cuda.stream(self._intake) if elsewhere else contextlib.nullcontext():
            if elsewhere and self.timer.on and features_BSF.is_cuda:
                # Or the time that it takes would begin with the target's.
                torch.cuda.current_stream(self.device).wait_event(
                    torch.cuda.current_stream(features_BSF.device).record_event()
                )
            with self.timer.measure("hand-over", self.device, step):
                features_BSF, blocks = bring(features_BSF, self.device), blocks.to(self.device)
            if self._stream is not None:
                ready = torch.cuda.current_stream(self.device).record_event()
                for tensor in (features_BSF, *blocks.tensors()):
                    # Made on another stream: its memory must not be given away before this replica's has read it.
                    tensor.record_stream(self._stream)
        return MicroBatch(
            step=step, rows=rows, features_BSF=features_BSF, blocks=blocks, weight_sum=weight_sum,
            amount=amount, cursor=cursor, made=made, made_by=made_by, ready=ready,
        )  # fmt: skip

    def average(self, replicas: Replicas, place: int) -> None:
        """Bring the other replicas' gradients into the flat ones; on CUDA while the rest of the backward goes on."""
        replicas.average(place, self.flat.exchanged, parts=self.flat.parts)

    def share_doubts(self, replicas: Replicas, place: int) -> None:
        """Let all replicas refuse the step that one of them has to refuse, where gradients do not tell them."""
        replicas.average(place, self._doubt_1)

    def meet_halfway(self, replicas: Replicas, place: int) -> None:
        """Go on from the mean of all replicas' states."""
        replicas.mean(place, self.state())
        self.flat.spread()

    def step(self, batches: Iterable[MicroBatch], *, lr: float, hashed: bool,
             average: Callable[[], None] | None = None, share_doubts: Callable[[], None] | None = None,
             after: Callable[[], None] | None = None) -> Figures:  # fmt: skip
        """One optimizer step on `batches` together. `average` brings the other replicas' gradients into the flat ones;
        without that, `share_doubts` brings their doubts; `after` may change the weights that the optimizer has left. A
        step in which anything is not finite changes nothing; after more of them than the configuration allows, no step
        does. `hashed`: the figures hold the new weights' hash."""
        self._stalls = []
        for number, batch in enumerate(batches):
            self.flat.adds = number > 0
            self.loss_and_gradients(batch)
        self.flat.adds = False
        step = self.steps_done + 1
        for exchange in (average, share_doubts):
            if exchange is not None:
                with self.timer.measure("exchange", self.device, step):
                    exchange()
        self.optimizer.lr.fill_(lr)
        finish = functools.partial(self._finish, averaged=average is not None)
        with self.timer.measure("optimizer", self.device, step):
            self._run(("finish", average is not None), {}, finish)
        self.steps_done = step
        if after is not None:
            after()
        hash_ = weight_hash(self.flat.weights) if hashed else None
        if self._stream is None:
            return self._figures_of(self._figures.clone(), hash=hash_, done=None)
        host = self._figures.to("cpu", non_blocking=True)
        host_hash = None if hash_ is None else hash_.to("cpu", non_blocking=True)
        return self._figures_of(host, hash=host_hash, done=self._stream.record_event(), stalls=self._stalls)

    def _figures_of(self, host: Tensor, **facts: Any) -> Figures:
        return Figures(values_5=host[:5], slots_2k=host[5:].view_as(self._slots_2k), **facts)

    def loss_and_gradients(self, batch: MicroBatch) -> None:
        """Fill the flat gradients, or add to them, and so with this share's part of the step's loss.

        Once compiling is forbidden, a batch of a shape that was not warmed is an error that names it.
        """
        self._begin(batch)
        with self.timer.measure("drafter forward + backward", self.device, batch.step):
            self._run((batch.shape, self.flat.adds), batch.inputs(), self._forward_backward)

    def _begin(self, batch: MicroBatch) -> None:
        if batch.ready is not None:
            begin = mark(self.device)
            torch.cuda.current_stream(self.device).wait_event(batch.ready)
            self._stalls.append(Span(begin=begin, end=mark(self.device)))
        self._weight_sum.fill_(batch.weight_sum / self.scale)

    # --- what a device does in a step -------------------------------------------------------------------------------

    def record(self, batches: Iterable[MicroBatch], *, averaged: bool, several: bool) -> None:
        """Have what a step does launched as CUDA graphs from now on: for the shapes of `batches`; with gradients that
        are `averaged` over replicas or not; and, if a step takes `several` micro-batches, for the later ones of them
        too. Raises `RuntimeError` where torch cannot; then all is as it was before.

        Changes the gradients and nothing else. Belongs on the main thread, while no worker runs.
        """
        self.forget_graphs()
        try:
            for batch in batches:
                for adds in (False, True)[: 1 + several]:
                    self.flat.adds = adds
                    key, inputs = (batch.shape, adds), batch.inputs()
                    with self.stream():
                        if batch.ready is not None:
                            torch.cuda.current_stream(self.device).wait_event(batch.ready)
                        self._weight_sum.fill_(batch.weight_sum)
                        self._forward_backward(inputs)  # libraries make their workspaces at the first call
                        self._graphs.record(key, inputs, self._forward_backward)
                    self._parts[key] = list(self.flat.parts)
            finish = functools.partial(self._finish, averaged=averaged)
            self._graphs.record(("finish", averaged), {}, finish)
        except BaseException:
            self.forget_graphs()
            self.flat.drop()
            raise
        finally:
            self.flat.adds = False

    def forget_graphs(self) -> None:
        """Back to launching kernel by kernel."""
        self._graphs.clear()
        self._parts.clear()

    def _run(self, key: Hashable, inputs: dict[str, Tensor], work: Callable[[Mapping[str, Tensor]], None]) -> None:
        if key not in self._graphs:
            work(inputs)
            return
        self._graphs.launch(key, inputs)
        if parts := self._parts.get(key):
            self.flat.parts = list(parts)

    def again(self, batch: MicroBatch, kernels: Kernels) -> Tensor:
        """Forward and backward of `batch` once more by `kernels`, kernel by kernel, with the weights as they are now;
        returns the loss. From any thread while no other uses this replica."""
        with torch.cuda.device(self.device) if self._stream else contextlib.nullcontext(), self.stream():
            if batch.ready is not None:
                torch.cuda.current_stream(self.device).wait_event(batch.ready)
            self._weight_sum.fill_(batch.weight_sum / self.scale)
            self._forward_backward(batch.inputs(), kernels=kernels)
        self.wait()
        return self._loss

    def wait(self) -> None:
        """Until the device has done all that it was told to here."""
        for stream in (self._intake, self._stream):
            if stream is not None:
                stream.synchronize()

    def _losses(self, inputs: Mapping[str, Tensor], *, module: Any, kernels: Kernels | None = None
                ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """What `block_loss` makes of a micro-batch's `inputs`; `module` is the drafter, or what stands around it."""
        blocks = Blocks(**{name: tensor for name, tensor in inputs.items() if name != "features_BSF"})
        features_BSF = inputs["features_BSF"].to(self.ends.head_VH.dtype)
        kernels = kernels or self.kernels.of(shape_of(features_BSF, blocks))
        slots_BTH = module(features_BSF, blocks, self.ends, kernels)
        return block_loss(
            slots_BTH, blocks, self.ends.head_VH, weight_sum=self._weight_sum, chunk_rows=self._chunk_rows,
            head_loss=kernels.head_loss, alpha=self._alpha,
        )  # fmt: skip

    def _forward_backward(self, inputs: Mapping[str, Tensor], *, kernels: Kernels | None = None) -> None:
        loss, weight, slots_2k = self._losses(inputs, module=self.drafter, kernels=kernels)
        self._note(self.flat.weight, weight)  # before the first gradients are ready for the others
        # Times 1; and of a loss that is not finite every gradient is nan, by which all replicas get to know of it.
        loss.backward(loss.detach() * 0 + 1)
        self.flat.collect()
        self._note(self._loss, loss.detach() / self.scale)
        self._note(self._weight, weight / self.scale)
        self._note(self._slots_2k, slots_2k)
        self._own_norm.copy_(self.flat.norm())
        doubt = self._own_norm * 0
        # Not `flat.weight`, to which others may have been added by now.
        self._doubt_1.copy_(doubt if self._alpha is None else doubt / self._weight)

    def _note(self, total: Tensor, own: Tensor) -> None:
        total.copy_(total + own if self.flat.adds else own)

    def _finish(self, _inputs: Mapping[str, Tensor], *, averaged: bool) -> None:
        """From the gradients, of all replicas or its own, to the next weights; and what the step came to."""
        norm = self.flat.gradients.norm() if averaged else self._own_norm
        # D-PACE's weights come out of the forward, too late for a sum over the whole step to be known to it. So the
        # gradients, which are linear in 1 / that sum, are added up without it, the sum with them as one float more,
        # and what divides them for clipping divides them by it as well: no pass over them, no wait, no exchange more.
        weight = self.flat.weight if self._alpha is not None else None
        if weight is not None:
            norm = norm / weight
        # By what all replicas know alike, to the bit: averaged gradients, or everybody's doubts.
        sound = torch.isfinite(norm if averaged else self._doubt_1[0])
        skip = self._refuse_unless(sound)
        self.optimizer.step(norm=norm, broken=skip, weight=weight)
        if self.ema is not None:
            self.ema.update(taken=self.optimizer.taken, broken=skip)
        self._note_figures(norm, skip)

    def _refuse_unless(self, sound: Tensor) -> Tensor:
        """1.0 if the step is to change nothing, else 0.0; a step that is not `sound` is counted."""
        over = self._refused > self._allowed
        self._refused += ~sound
        return (over | ~sound).float()

    def _note_figures(self, norm: Tensor, skip: Tensor) -> None:
        values_5 = torch.stack([self._loss, self._own_norm, norm, self._weight, skip])
        self._figures.copy_(torch.cat([values_5, self._slots_2k.flatten()]))

    def weights(self) -> dict[str, Tensor]:
        """In float32, no copy, by the names that the servers load."""
        return self.drafter.apart(self.flat.named(self.flat.weights))

    def averages(self) -> dict[str, Tensor]:
        """The weights' moving average, no copy, by the same names; empty if none is kept."""
        return self.drafter.apart(self.flat.named(self.ema.weights)) if self.ema is not None else {}

    def served(self) -> dict[str, Tensor]:
        """Those that a server would be given."""
        return self.averages() or self.weights()

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's own state, no copy, by the weight's name: `exp_avg.NAME`, `exp_avg_sq.NAME`."""
        return {
            f"{key}.{name}": tensor
            for key, flat in self.optimizer.moments.items()
            for name, tensor in self.drafter.apart(self.flat.named(flat)).items()
        }

    def begin_with(self, weights: dict[str, Tensor]) -> None:
        """Take these, which a drafter has learnt before, instead of fresh ones. A moving average begins with them."""
        for name, tensor in self.weights().items():
            tensor.copy_(weights[name])
        self.flat.spread()
        if self.ema is not None:
            self.ema.weights.copy_(self.flat.weights)
            self.ema.begins = True

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor], averages: dict[str, Tensor], *,
                steps_done: int, refused: int, begun_with_weights: bool = False) -> None:  # fmt: skip
        """Take over what a checkpoint holds; names or shapes that do not fit are a `RuntimeError` or `KeyError`.
        Without `averages` a moving average goes on from the weights. `begun_with_weights`: see `begin_with`."""
        if self.ema is not None:
            self.ema.begins = begun_with_weights
        found = {**weights, **moments}
        for name, tensor in {**self.weights(), **self.moments()}.items():
            tensor.copy_(found[name].view_as(tensor))
        for name, tensor in self.averages().items():
            tensor.copy_((averages or weights)[name].view_as(tensor))
        self.flat.spread()
        self.resume_at(steps_done, refused=refused)

    def resume_at(self, steps_done: int, *, refused: int) -> None:
        """Go on as after `steps_done` steps, of which `refused` changed nothing, with whatever weights and moments
        there are."""
        self.steps_done = steps_done
        self._refused.fill_(refused)
        self._allowed = max(self._may_refuse, refused)  # with less allowed now, the next one is too many, not the last
        self.optimizer.resume_at(steps_done - refused)

    @property
    def refused(self) -> int:
        """Steps that have changed nothing so far; waits for the device."""
        return int(self._refused)

    def state(self) -> list[Tensor]:
        """The flat buffers that a replica goes on from: weights, moments, the moving average if there is one."""
        averages = [self.ema.weights] if self.ema is not None else []
        return [self.flat.weights, *self.optimizer.moments.values(), *averages]

    @property
    def state_bytes(self) -> int:
        """What a checkpoint of it takes."""
        return sum(buffer.nbytes for buffer in self.state())

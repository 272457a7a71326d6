"""The doctor on what is trained: the leak test, and a whole step at the run's real shapes on every device."""

from __future__ import annotations

import collections
import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data.order import Cursor
from trainer.doctor import leak, leak_cases
from trainer.doctor.checkup import Check, Finding, Patient, fail, ok, warn
from trainer.doctor.leak import Leak
from trainer.doctor.leak_cases import Case
from trainer.feed import step_blocks, target_inputs
from trainer.kernels import plain
from trainer.micro_batch import MicroBatch
from trainer.model.attention import DenseAttention
from trainer.model.drafter import Drafter
from trainer.model.loss import PLAIN, block_loss
from trainer.replica import Replica
from trainer.report.throughput import Amount
from trainer.steps import Figures
from trainer.warmup import settle

Measure = Callable[[torch.device, Callable[[], Any]], Any]

GRADIENTS_ALIKE = {torch.float32: 1e-2, torch.bfloat16: 0.15}
"""How far gradients may be off, by the type of the arithmetic; a kernel that is wrong is off by a large part."""
A_DEFECT = "a defect of the trainer: a drafter that was trained so is worthless; do not train with it"


def cases(patient: Patient) -> list[Case]:
    _ = patient.member
    if "cases" not in patient.kept:
        # What is compiled has shapes of its own; else a second row is enough to see that rows are apart.
        count = patient.share if patient.member.kernels.compiles else min(patient.share, 2)
        patient.kept["cases"] = list(leak_cases.cases(patient.config, patient.rows, patient.target, count=count))
    found: list[Case] = patient.kept["cases"]
    return found


# --- the leak test --------------------------------------------------------------------------------------------------


def rules(patient: Patient) -> Finding:
    broken = [said for case in cases(patient) for said in leak_cases.broken_rules(case, patient.config)]
    if broken:
        return fail(f"{broken[0]}" + (f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""), A_DEFECT,
                    broken=broken[:50])  # fmt: skip
    blocks = sum(case.blocks.valid_BN.numel() for case in cases(patient))
    return ok(f"{blocks} blocks of {len(cases(patient))} kinds of rows stand where they may and hold what they must")


def hidden_states(patient: Patient) -> Finding:
    found: list[Leak] = []
    ways = collections.Counter[str]()
    for case in cases(patient):
        for name, (draft, backward) in leak.drafts_of(patient.member, case).items():
            if patient.quick and not backward:
                continue
            # FlexAttention is only to show that its mask is the same one.
            blocks, places = (2, 8) if backward and not patient.quick else (1, 4)
            found += leak.leaks(
                case, draft, gradients=backward, blocks=blocks, positions=places,
                head_VH=patient.member.ends.head_VH,
            )  # fmt: skip
            ways[name] += 1
    return _told(found, f"{_kinds(patient)}, by perturbation and by gradient, {' and '.join(ways)}: nothing seen that"
                        " may not be, all that may be")  # fmt: skip


def text(patient: Patient) -> Finding:
    case = cases(patient)[0]
    draft, _ = next(iter(leak.drafts_of(patient.member, case).values()))
    apart = leak.text_alone_differs(case, patient.target)
    if apart > leak.ALIKE[case.features_BSF.dtype] * 2:
        return fail(f"hidden states of a text differ by {apart:.1%} from those of the same text cut off at an anchor",
                    "the target looks ahead, or across documents: choose another one, or leave data.packing out",
                    apart=apart)  # fmt: skip
    found = leak.token_leaks(case, patient.config, patient.target, draft, positions=1 if patient.quick else 4)
    return _told(found, f"a changed token moves no block before it; hidden states of a text cut off at an anchor differ"
                        f" by {apart:.2%}")  # fmt: skip


def served(patient: Patient) -> Finding:
    found: list[Leak] = []
    for case in cases(patient):
        draft, _ = next(iter(leak.drafts_of(patient.member, case).values()))
        found += leak.served_otherwise(case, patient.config, patient.member, draft, blocks=2 if patient.quick else 4)
    return _told(found, "a block drafted alone, behind the text before it and without a mask, comes out the same")


def _kinds(patient: Patient) -> str:
    return "; ".join(case.name for case in cases(patient))


def _told(found: Iterable[Leak], fine: str) -> Finding:
    by_kind: dict[str, list[str]] = {}
    for one in found:
        by_kind.setdefault(one.what, []).append(one.where)
    if not by_kind:
        return ok(fine)
    said = "; ".join(f"a block depends on {what} ({where[0]}; {len(where)} times)" for what, where in by_kind.items()
                     if what not in (leak.BLIND, leak.APART))  # fmt: skip
    blind = "; ".join(f"a block does not see {what} ({by_kind[what][0]}; {len(by_kind[what])} times)"
                      for what in (leak.BLIND, leak.APART) if what in by_kind)  # fmt: skip
    return fail("; ".join(part for part in (said, blind) if part), A_DEFECT, leaks=by_kind)


# --- a step ---------------------------------------------------------------------------------------------------------


def batch_of(patient: Patient, member: Replica, length: int) -> MicroBatch:
    """A micro-batch of this bucket's own rows, or of others cut to its length, as the feed makes them."""
    config, rows, target = patient.config, patient.rows, patient.target
    own = (rows.order.padded_R == length).nonzero().squeeze(1)
    own = own if len(own) else torch.arange(len(rows))
    ids_BS, mask_BS, starts_BS = rows.cut(own[torch.arange(patient.share) % len(own)], length)
    blocks = step_blocks(config, ids_BS, mask_BS, starts_BS, step=leak_cases.STEP)
    with target.stream():
        features = target.features(*target_inputs(config, ids_BS, blocks))
        return member.accept(
            step=leak_cases.STEP, rows=[], features_BSF=features, blocks=blocks,
            weight_sum=float(blocks.weights_BNk.sum()), amount=Amount(tokens=ids_BS.numel()), cursor=Cursor(),
        )  # fmt: skip


def take_step(patient: Patient, member: Replica, batch: MicroBatch, *, measure: Measure | None = None) -> Any:
    """Forward, backward and optimizer, in a thread of its own as in a run: the figures, or what `measure` makes of the
    device and the step."""
    done: list[Any] = []

    def one() -> Figures:
        with member.stream():
            if member.device.type == "cuda" and torch.cuda.current_device() != (member.device.index or 0):
                raise RuntimeError(f"the thread for {member.device} works on cuda:{torch.cuda.current_device()}")
            return member.step([batch], lr=patient.config.optimizer.lr, hashed=True)

    def work() -> None:
        try:
            settle(patient.config, member)
            done.append(one() if measure is None else measure(member.device, one))
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=work, name="doctor")
    thread.start()
    thread.join()
    _wait_for(member)
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def step(patient: Patient) -> Finding:
    _ = patient.member
    first = {member.device: member for member in reversed(patient.members.values())}
    told = []
    for device, member in first.items():
        for length in patient.config.data.lengths:
            before = member.flat.weights.clone()
            with as_it_was(member):
                figures = take_step(patient, member, batch_of(patient, member, length))
                still = [name for name, tensor in member.flat.named(member.flat.gradients).items() if not tensor.any()]
                moved = float((member.flat.weights != before).float().mean())
            where = f"{patient.share} x {length} tokens on {device}"
            if not (math.isfinite(figures.loss) and math.isfinite(figures.norm)):
                return fail(
                    f"{where}: loss {figures.loss}, gradient norm {figures.norm}", "see target.dtype, drafter.dtype"
                )
            if still:
                return fail(f"{where}: no gradient reaches {', '.join(still)}", A_DEFECT)
            if moved < 0.5:
                return fail(f"{where}: the optimizer moved {moved:.0%} of the weights", A_DEFECT)
            told.append(f"{where}: loss {figures.own_mean:.3f}, gradient norm {figures.norm:.3g}")
    return ok("forward, backward, optimizer at the run's shapes: " + "; ".join(told))


def determinism(patient: Patient) -> Finding:
    member = patient.member
    length = patient.config.data.lengths[0 if patient.quick else -1]
    hashes = []
    for _ in range(2):
        with as_it_was(member):
            figures = take_step(patient, member, batch_of(patient, member, length))
            assert figures.hash is not None
            hashes.append((int(figures.hash), figures.loss, figures.norm))
    if hashes[0] != hashes[1]:
        said = f"the same step gave other weights the second time (loss {hashes[0][1]!r} and {hashes[1][1]!r})"
        advice = "runs cannot be repeated to the bit"
        return fail(said, advice) if member.device.type == "cpu" else warn(said, advice)
    return ok(f"the same step twice on {member.device}, target and all: the same bits")


def kernels(patient: Patient) -> Finding:
    """What is compiled, forward and backward, against what is written, in float32 and row by row."""
    member, config = patient.member, patient.config
    if not member.kernels.compiles:
        return ok("nothing is compiled: the CPU runs everything as it is written")
    batch = batch_of(patient, member, config.data.sequence_length)

    def gradients(_device: torch.device, _step: Callable[[], Any]) -> Tensor:
        with member.stream():
            member.loss_and_gradients(batch)
            return member.flat.gradients.clone()

    try:
        found = take_step(patient, member, batch, measure=gradients)
        expected = _as_written(patient, member, batch)
    except torch.OutOfMemoryError:
        return warn("there is no room for the same step as it is written", "compare with fewer drafter.anchors once")
    apart = {
        name: float((place - expected[name]).norm() / expected[name].norm().clamp(min=1e-30))
        for name, place in member.flat.named(found).items()
    }  # fmt: skip
    worst = max(apart, key=apart.__getitem__)
    said = f"compiled gradients differ by {apart[worst]:.2%} at most from those of the same step as it is written, in"
    said += f" float32 ({worst})"
    if not apart[worst] < GRADIENTS_ALIKE[member.ends.head_VH.dtype]:
        return fail(said, "another version of torch: this one compiles the drafter to something else", apart=apart)
    return ok(said, apart=apart)


def _as_written(patient: Patient, member: Replica, batch: MicroBatch) -> dict[str, Tensor]:
    """Gradients by the parameter's name."""
    device, config = member.device, patient.config
    drafter = Drafter(member.drafter.shape).to(device)
    drafter.load_state_dict(member.weights())
    ends = member.ends.to(device, torch.float32)
    with member.stream():
        for row in range(len(batch.features_BSF)):
            part = slice(row, row + 1)
            blocks = batch.blocks.rows(part)
            slots_BTH = drafter(batch.features_BSF[part].float(), blocks, ends, plain(DenseAttention()))
            loss, *_ = block_loss(
                slots_BTH, blocks, ends.head_VH, weight_sum=batch.weight_sum, chunk_rows=config.loss.chunk_rows,
                head_loss=PLAIN[False], alpha=config.loss.pace_alpha,
            )  # fmt: skip
            loss.backward()
    _wait_for(member)
    return {name: parameter.grad for name, parameter in drafter.named_parameters() if parameter.grad is not None}


def first_loss(patient: Patient) -> Finding:
    member, config = patient.member, patient.config
    case = cases(patient)[0]
    draft, _ = next(iter(leak.drafts_of(member, case).values()))
    count = case.blocks.anchors_BN.shape[1]
    hidden_RH = draft(case.features_BSF, case.blocks).detach().unflatten(1, (count, -1))[:, :, 1:].flatten(0, 2)
    labels_R, weights_R = case.blocks.labels_BNk.flatten(), case.blocks.weights_BNk.flatten()
    trained = (weights_R > 0).nonzero().squeeze(1)[: config.loss.chunk_rows]
    if not len(trained):
        return warn("no slot of these rows is trained on", "see `anchors in the data`")
    hidden, labels = hidden_RH[trained.to(hidden_RH.device)], labels_R[trained].to(hidden_RH.device)
    head_VH = member.ends.head_VH
    found = float(F.cross_entropy(F.linear(hidden, head_VH).float(), labels))
    blank_RH = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    # Slots begin as the mask token's embedding. What layers that add nothing leave of it is no guess but that token
    # itself, with great confidence where the head is tied; a fresh drafter is near to that.
    mask_RH = member.ends.embedding_VH[config.drafter.mask_token_id].float().cpu().expand(hidden.shape)

    def loss_of(states_RH: Tensor) -> float:
        states_RH = F.rms_norm(states_RH, states_RH.shape[-1:]).to(hidden)
        return float(F.cross_entropy(F.linear(states_RH, head_VH).float(), labels))

    chance, nothing, level = loss_of(blank_RH), loss_of(mask_RH), math.log(head_VH.shape[0])
    said = f"{found:.2f}; ln of the vocabulary is {level:.2f}, states without meaning give {chance:.2f}, the bare mask"
    said += f" token {nothing:.2f}"
    facts = {"loss": found, "ln_vocabulary": level, "chance": chance, "nothing_added": nothing}
    if found < 0.5 * level:
        return fail(f"{said}: far too good for a drafter that has learnt nothing", "it sees what it predicts", **facts)
    if not found < 1.5 * max(level, chance, nothing):
        advice = "see the target's embedding and head, and drafter.dtype"
        return fail(f"{said}: far worse than guessing", advice, **facts)
    return ok(said, **facts)


def graphs(patient: Patient) -> Finding:
    on_gpu = [member for member in patient.members.values() if member.device.type == "cuda"]
    _ = patient.member
    if not on_gpu or patient.config.cuda_graphs == "off" or patient.warmup is None:
        return ok("none are recorded")
    batch, said, hashes = (
        batch_of(patient, on_gpu[0], patient.config.data.sequence_length),
        len(patient.reporter.said),
        [],
    )
    for recorded in (False, True):
        if recorded:
            patient.warmup.record(averaged=False, several=False)
        with as_it_was(on_gpu[0]):
            hashes.append(int(take_step(patient, on_gpu[0], batch).hash))
    if missing := [line for line in patient.reporter.said[said:] if " none: " in line]:
        return warn(missing[0], "the run goes on without, much slower where models are small")
    if hashes[0] != hashes[1]:
        return fail("a recorded step leaves other weights than one that is launched kernel by kernel", A_DEFECT)
    return ok("a recorded step leaves the bits of one that is launched kernel by kernel")


@contextlib.contextmanager
def as_it_was(member: Replica) -> Iterator[None]:
    """Weights and moments are fresh afterwards, as they were before."""
    with member.stream():
        state = [tensor.clone() for tensor in member.state()]
    done, refused = member.steps_done, member.refused
    try:
        yield
    finally:
        with member.stream():
            for tensor, was in zip(member.state(), state, strict=True):
                tensor.copy_(was)
            member.flat.spread()
            member.resume_at(done, refused=refused)
        _wait_for(member)


def _wait_for(member: Replica) -> None:
    """What this thread reads next is done by then, on whichever stream."""
    if member.device.type == "cuda":
        torch.cuda.synchronize(member.device)


CHECKS = [
    Check(name="anchors and blocks", what="anchors and what stands in blocks follow the rules", look=rules),
    Check(name="leak: hidden states", what="no logit depends on what its block may not see", look=hidden_states),
    Check(name="leak: text", what="nor by way of the target", look=text),
    Check(name="as served", what="a block drafted alone comes out as in training", look=served),
    Check(name="step", what="a whole step at the run's real shapes on each device", look=step),
    Check(name="kernels", what="what is compiled computes what is written, forward and backward", look=kernels),
    Check(name="determinism", what="the same step twice leaves the same weights", look=determinism),
    Check(name="first loss", what="a fresh drafter is as good as guessing", look=first_loss),
]
RECORDED = [
    Check(name="graphs", what="a step can be recorded as a CUDA graph, and stays the same", look=graphs),
]
"""Last: what is recorded keeps its memory, and no step takes any of its own afterwards."""

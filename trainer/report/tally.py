"""What a run has done so far and how fast, for its log: told of every step once it is judged (`train.py`)."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainer import compile_plan
from trainer.config import Config
from trainer.decode.acceptance import Acceptance
from trainer.feed import Feed
from trainer.model.flops import Peaks
from trainer.model.target import Target
from trainer.replica import Replica
from trainer.report.reporter import RunStep, WorkerStep
from trainer.report.stages import Stages
from trainer.report.throughput import WARM_UP_STEPS, Amount, Decay, SpeedChange, Throughput, total
from trainer.steps import Step


class Tally:
    """`targets` and `members` are this process's own, by number and by rank: those that are left when it is asked. It
    is one of `processes` that are alike."""

    def __init__(self, config: Config, targets: Mapping[int, Target], members: Mapping[int, Replica], *,
                 processes: int = 1) -> None:  # fmt: skip
        self.config, self.targets, self.members = config, targets, members
        self.processes, self.drafters = processes, processes * len(config.devices.drafter)
        self.tokens = 0
        """Trained on since the run began, in whatever process."""
        self.warm_up_steps = WARM_UP_STEPS
        self.decay = Decay()
        dtypes = [(target.device, target.model.dtype) for target in targets.values()]
        dtypes += [(member.device, member.ends.head_VH.dtype) for member in members.values()]
        self.peaks = Peaks(dtypes, given_tflops=config.peak_tflops)

    def start(self, now: float) -> None:
        """The first step begins."""
        self.throughput = Throughput(
            workers=self.drafters, now=now, warm_up_steps=self.warm_up_steps
        )  # fmt: skip

    def crew(self, feed: Feed, stages: Stages) -> None:
        """Those who work from here on."""
        self.feed, self.stages = feed, stages

    def add(self, step: Step, now: float) -> SpeedChange | None:
        """Whether the run has become slower, or has recovered."""
        amounts = [Amount()] * self.drafters
        for share in step.shares:
            amounts[share.rank] = share.amount
        self.throughput.add(amounts, now=now)
        self.stages.judged(step)
        tokens = int(total(amounts).tokens)
        self.tokens += tokens
        return self.decay.stepped(tokens, now=now)

    def of(self, step: Step, now: float, *, lost: list[str], skipped: int, accepted: Acceptance | None) -> RunStep:
        """What is to be logged after it."""
        rates, shares = self.throughput.rates(), self.stages.shares(now)
        figures: dict[str, dict[str, Any]] = {name: {} for name in shares}
        for number, throughput in self.feed.throughputs.items():
            (rate,) = throughput.rates()
            peak = self.peaks.of(self.targets[number].device)
            figures[f"target-{number}"] = {"tok_s": rate.tokens, "mfu": peak and rate.target_flop / peak}
        for share in step.shares:
            if share.rank not in self.members:
                continue
            rate, peak = rates[share.rank], self.peaks.of(self.members[share.rank].device)
            figures[share.worker] = {
                "tok_s": rate.tokens, "mfu": peak and rate.drafter_flop / peak, "loss": share.figures.own_mean,
            }  # fmt: skip
        whole = total(rates)
        return RunStep(
            step=step.number,
            steps=self.config.steps,
            loss=step.loss,
            tok_s=whole.tokens,
            positions_s=whole.positions,
            recent_tok_s=self.decay.recent_tok_s,
            mfu=self.peaks.all and whole.flop / (self.peaks.all * self.processes),
            lr=step.lr,
            grad_norm=step.norm,
            slot_p=step.slot_probabilities,
            tau=accepted.tau if accepted else None,
            kept=accepted.by_slot if accepted else [],
            epoch=step.cursor.epoch,
            tokens=self.tokens,
            queued=self.feed.queued,
            queue_size=self.feed.room,
            step_s=self.throughput.step_s,
            compiles=compile_plan.watch.compiles,
            memory_peak_bytes=memory_peak_bytes(self.peaks.devices),
            workers=[WorkerStep(name=name, **shares[name], **figures[name]) for name in shares],
            lost=lost,
            skipped=skipped,
        )


def memory_peak_bytes(devices: Iterable[torch.device]) -> dict[str, int]:
    """By device: the most that tensors have taken at once; on the CPU, the most that the whole process has."""
    return {
        str(device): torch.cuda.max_memory_allocated(device) if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        for device in devices
    }  # fmt: skip

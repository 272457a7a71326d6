"""Who waits for whom: each worker's busy and waiting time between two logged steps, as shares of it.

A thread that feeds a GPU is ahead of it, so its own waiting says little: a drafter's device may have nothing to do
while its thread has long gone on, and a target's may compute while its thread waits for room. What the devices measured
(`clock.Span`) corrects both, once it has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer.pipeline import CAUSES, Worker
from trainer.steps import Step


class Stages:
    """`on_device` names the workers whose work is measured on their device."""

    def __init__(self, workers: Mapping[str, Worker], *, on_device: Iterable[str], now: float) -> None:
        self.workers = workers
        self._device_s = dict.fromkeys(on_device, 0.0)
        self._since = now
        self._before = {name: worker.waited_s(now) for name, worker in workers.items()}
        self._device_before = dict(self._device_s)

    def judged(self, step: Step) -> None:
        """A step's figures have arrived, and what its devices measured with them."""
        for share in step.shares:
            if share.worker not in self.workers:  # of another process, which knows for itself
                continue
            self.workers[share.worker].waited_on_device("input", share.figures.stalled_s)
            for number, made in share.made:
                if (name := f"target-{number}") in self._device_s:
                    self._device_s[name] += made.seconds()

    def shares(self, now: float) -> dict[str, dict[str, float]]:
        """By worker: `busy`, `wait_input`, `wait_room`, `wait_peers` since the last time this was asked."""
        since_s = max(now - self._since, 1e-9)
        found = {}
        for name, worker in self.workers.items():
            waited = worker.waited_s(now)
            part = {cause: min((waited[cause] - self._before[name][cause]) / since_s, 1.0) for cause in CAUSES}
            busy = max(0.0, 1.0 - sum(part.values()))
            if name in self._device_s:
                busy = min((self._device_s[name] - self._device_before[name]) / since_s, 1.0)
                part["room"] = min(part["room"], 1.0 - busy)
            self._before[name] = waited
            found[name] = {"busy": busy, **{f"wait_{cause}": part[cause] for cause in CAUSES}}
        self._since, self._device_before = now, dict(self._device_s)
        return found

"""What a step came to: the replicas' shares of it, whether all of it is finite, and whose fault it is if not.

Replica 0 makes a `Step` of what all replicas have begun, and asks it once the figures have reached the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.data import Cursor
from trainer.replica import Figures, MicroBatch


class NonFinite(ArithmeticError):
    """A loss or gradient of `worker` is nan or infinite; no replica's weights have been touched by it."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one replica contributes to a step."""

    batch: MicroBatch
    figures: Figures

    @property
    def own_mean(self) -> float:
        """The mean loss of its own slots. One whose blocks all were padding contributed nothing: 0, not 0/0."""
        return self.figures.loss / max(self.batch.weight / self.batch.weight_sum, 1e-12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step that all replicas have begun. Its figures are worth reading after `wait`."""

    number: int
    lr: float
    shares: list[Share]

    @property
    def arrived(self) -> bool:
        return all(share.figures.arrived for share in self.shares)

    def wait(self) -> None:
        for share in self.shares:
            share.figures.wait()

    @property
    def cursor(self) -> Cursor:
        """Where the data goes on after it."""
        return self.shares[0].batch.cursor

    @property
    def loss(self) -> float:
        return sum(share.figures.loss for share in self.shares)

    @property
    def norm(self) -> float:
        """Of the gradients of all together."""
        return self.shares[0].figures.norm

    @property
    def hashes(self) -> list[int]:
        """Of the replicas' weights after it, if it was a step that has them."""
        return [int(share.figures.hash) for share in self.shares if share.figures.hash is not None]

    def check_finite(self, *, last_checkpoint: str) -> None:
        """Raises `NonFinite`. A replica of its own before all together: its gradients have reached the others' by now,
        no weights have."""
        for rank, share in enumerate(self.shares):
            loss, norm = share.figures.loss, share.figures.own_norm
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._refuse(f"drafter-{rank}", f"loss {loss}, gradient norm {norm}", share.batch.rows, last_checkpoint)
        if not math.isfinite(self.norm):
            rows = [row for share in self.shares for row in share.batch.rows]
            self._refuse("drafter-0", f"all drafters together: gradient norm {self.norm}", rows, last_checkpoint)

    def _refuse(self, worker: str, what: str, rows: list[int], last_checkpoint: str) -> None:
        raise NonFinite(
            worker,
            f"{worker}: {what} at step {self.number} (data rows {rows}); no weights have changed since step"
            f" {self.number - 1}; last good checkpoint: {last_checkpoint}",
        )

"""GPUs that a run has to itself: what it asks for, what it holds, and what stands in its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from orchestrator.record import record

UNSEEN = "something not visible from here"


@record
class GpuWish:
    """Which GPUs a run is to have to itself."""

    among: list[str] = field(default_factory=list)
    """`0`, `0:1` (a MIG device) as nvidia-smi numbers them there, or UUIDs; empty: all that the program would see."""
    count: int | None = None
    """Any so many of these; None: all of them."""
    wanted: bool = False
    """`gpus:` or --gpus names them, so that they are to be seen in use."""
    must: bool = False
    """--gpus or --queue has asked for it, or the launch has found what to claim: without a claim nothing starts."""
    queue: bool = False
    """Wait in line for what is not free."""
    claims_dir: str | None = None
    """The folder of the claims there; None: one that the container has for itself."""
    place: str = ""
    """Where the run is, for who looks from another container: `gpu1, container 200 on pve1`."""


@record
class Claimant:
    """Who holds a GPU or waits for one, as it stands in the folder of the claims."""

    run_id: str
    place: str
    host: str
    owner: str
    boot: str
    """The kernel's boot id: it is the node's, so that all its containers have the same."""
    since: float

    @property
    def words(self) -> str:
        """`run 2026... of root@laptop (gpu1, container 200 on pve1; host gpu1)`."""
        where = "; ".join(filter(None, (self.place, f"host {self.host}")))
        return f"run {self.run_id} of {self.owner or 'somebody'} ({where})"


@record
class Device:
    """One device that can be claimed: a GPU, or a MIG device of one."""

    number: str
    """`0`, or `0:1` for a MIG device."""
    uuid: str
    name: str = ""

    @property
    def card(self) -> int:
        """The number of the GPU whose it is; -1: it is none."""
        number = self.number.partition(":")[0]
        return int(number) if number.isascii() and number.isdigit() else -1


@record
class Obstacle:
    """Why a run cannot have a GPU now."""

    gpu: str
    """Its number."""
    what: str
    """`held by run ...`, `used by something not visible from here (...)`."""
    since: float | None = None
    run_id: str | None = None
    """The run whose claim it is."""


@record
class InLine:
    """Where a queued run stands, as it was just seen in the folder of the claims."""

    position: int
    """1: nobody is before it."""
    ahead: list[str] = field(default_factory=list)
    """The runs before it in line, the next one last."""
    obstacles: list[Obstacle] = field(default_factory=list)
    problem: str | None = None
    """Why it cannot be seen."""


@record
class GpuClaim:
    """What a run has asked for and has got (gpus.json); its lock, not this file, is the claim."""

    nonce: str
    claims_dir: str
    pool: list[Device]
    count: int
    asked_at: float
    queued_at: float | None = None
    """Since when it waits in line, or when that began."""
    granted_at: float | None = None
    held: list[Device] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        return self.queued_at is not None and self.granted_at is None

    @property
    def wish(self) -> str:
        """`GPU 0, 1`, or `1 of GPU 0, 1`."""
        numbers = listed([one.number for one in self.pool])
        return numbers if self.count == len(self.pool) else f"{self.count} of {numbers}"


def listed(numbers: Sequence[str]) -> str:
    return f"GPU {', '.join(numbers)}"


def told(obstacles: Sequence[Obstacle], now: float) -> str:
    """`GPU 0, 1 held by run ... for 3.1 h; GPU 2 used by something not visible from here (...)`."""
    groups: dict[tuple[str, float | None], list[str]] = {}
    for one in obstacles:
        groups.setdefault((one.what, one.since), []).append(one.gpu)
    return "; ".join(
        f"{listed(numbers)} {what}" + (f" for {age(now - since)}" if since is not None else "")
        for (what, since), numbers in groups.items()
    )


def age(seconds: float) -> str:
    """`12 s`, `4 min`, `3.1 h`, `2.0 d`."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `13th`."""
    return f"{number}{'th' if 10 < number % 100 < 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"

"""Which of torchrun's processes this one is, and what a configuration may ask of several; known before torch is there.

`python -m torch.distributed.run --nproc-per-node N -m trainer train CONFIG` starts N processes and says in the
environment of each who it is. Every one of them runs `training.RankTraining`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer.config import Config, ConfigError
from trainer.sections import Devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    rank: int
    """Of all processes, from 0."""
    size: int
    local_rank: int
    """Of those of this machine."""
    local_size: int

    @property
    def leads(self) -> bool:
        """Writes checkpoints, and speaks for the run."""
        return self.rank == 0

    @property
    def speaks_here(self) -> bool:
        """Says for all of this machine what they all find out alike."""
        return self.local_rank == 0


def ranks_from_environment(environ: Mapping[str, str]) -> Ranks | None:
    """None where torchrun has not started this process."""
    try:
        rank, size, local_rank = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return Ranks(rank=rank, size=size, local_rank=local_rank, local_size=int(environ["LOCAL_WORLD_SIZE"]))
    except (KeyError, ValueError):
        return None


def settled(config: Config, ranks: Ranks | None) -> Config:
    """`config` with the engine that it means. Raises `ConfigError` for what cannot be done by so many processes."""
    if ranks is None:
        if config.engine in ("ddp", "fsdp2"):
            raise ConfigError(
                f"engine: {config.engine} needs a process for each device, which torchrun starts: python -m"
                " torch.distributed.run --standalone --nproc-per-node N -m trainer train CONFIG"
            )
        return config.model_copy(update={"engine": "threads"})
    if config.engine == "threads":
        raise ConfigError(
            f"engine: threads is one process, and torchrun has started {ranks.size}; say ddp or fsdp2, or start"
            " python -m trainer train by itself"
        )
    engine = "ddp" if config.engine == "auto" else config.engine
    if problem := next(_problems(config, ranks, engine), None):
        raise ConfigError(problem)
    return config.model_copy(update={"engine": engine})


def _problems(config: Config, ranks: Ranks, engine: str) -> Iterator[str]:
    if config.batch_size % ranks.size:
        yield f"batch_size: must be a multiple of the {ranks.size} processes, is {config.batch_size}"
    devices, all_auto, all_cpu = config.devices, Devices(target=["auto"], drafter=["auto"]), ["cpu"] * ranks.size
    if devices != all_auto and (devices.drafter != all_cpu or set(devices.target) != {"cpu"}):
        yield (
            f"devices: under torchrun each of the {ranks.size} processes has one device, for its target and its"
            f" drafter; say auto, or cpu for {ranks.size} drafters"
        )
    refused = {
        "sync": config.sync == "params" and "params",
        "on_worker_death": config.on_worker_death == "degrade" and "degrade",
        "cuda_graphs": config.cuda_graphs == "on" and "on",
    }
    for key, value in refused.items():
        if value:
            yield f"{key}: {value} is not there under torchrun (engine: {engine}); leave it out, or train in threads"


def own_devices(config: Config, ranks: Ranks, *, gpus: int) -> Devices:
    """Those of one process, on a machine with so many GPUs. Raises `ConfigError` where there are too few."""
    if not gpus or config.devices.named():
        return Devices(target=["cpu"], drafter=["cpu"])
    if gpus < ranks.local_size:
        raise ConfigError(
            f"devices: torchrun has started {ranks.local_size} processes here, and torch sees {gpus} CUDA"
            " devices; start as many"
        )
    own = [f"cuda:{ranks.local_rank}"]
    return Devices(target=own, drafter=own)

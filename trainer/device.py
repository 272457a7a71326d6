"""The one device that a verb works on, by the name that its `--device` gives."""

from __future__ import annotations

import torch

from trainer.config import ConfigError


def device_for(name: str | None) -> torch.device:
    """Left out, a GPU if there is one. Raises `ConfigError` for one that is not here."""
    if name is None:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device

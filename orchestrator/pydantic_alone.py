"""Keeps pydantic from looking for plugins: for that it reads the metadata of every package installed.

To learn that there are none, and what it imports to learn it, is a tenth of a command's start. Whoever makes pydantic
build its first model (typer does, for a command's options) should come through here.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def load() -> None:
    loader: Any = ModuleType("pydantic.plugin._loader")
    loader.get_plugins = tuple
    sys.modules.setdefault(loader.__name__, loader)

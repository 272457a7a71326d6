"""Imports paramiko without invoke, which it takes along for an ssh_config that `ssh -G` reads here.

invoke brings asyncio, unittest and a YAML reader: a third of a command's start. paramiko does without where it is not
installed, and says so only to who asks for a `Match exec`. Whoever imports paramiko first should come through here.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def load() -> None:
    if "invoke" in sys.modules or "paramiko" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules["invoke"] = None  # what a module is that shall not be found
    try:
        importlib.import_module("paramiko")
    finally:
        del modules["invoke"]

"""Imports paramiko without what it brings along: invoke, for an ssh_config that `ssh -G` reads here, and the reader of
packages' metadata, for its own version.

invoke brings asyncio, unittest and a YAML reader: a third of a command's start. paramiko does without where it is not
installed, and says so only to who asks for a `Match exec`. The metadata brings email and zipfile, and the version is in
a folder's name. Whoever imports paramiko first should come through here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load() -> None:
    if "invoke" in sys.modules or "paramiko" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    stand_ins: dict[str, Any] = {"invoke": None}  # what a module is that shall not be found
    version = _version()
    if version is not None and "importlib.metadata" not in modules:
        stand_ins["importlib.metadata"] = _Metadata(version)
    modules.update(stand_ins)
    try:
        importlib.import_module("paramiko")
    finally:
        for name in stand_ins:
            modules.pop(name, None)


class _Metadata(ModuleType):
    """`importlib.metadata`, imported when it is asked for more than paramiko's version."""

    def __init__(self, version: str) -> None:
        super().__init__("importlib.metadata")
        self._version = version

    def version(self, name: str) -> str:
        return self._version if name == "paramiko" else str(self.__getattr__("version")(name))

    def __getattr__(self, name: str) -> Any:
        sys.modules.pop(self.__name__, None)
        return getattr(importlib.import_module(self.__name__), name)


def _version() -> str | None:
    found = importlib.util.find_spec("paramiko")
    folder = Path(found.origin).parents[1] if found and found.origin else Path()
    [*named] = folder.glob("paramiko-*.dist-info")
    return named[0].name.removesuffix(".dist-info").partition("-")[2] if len(named) == 1 else None

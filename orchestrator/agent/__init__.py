"""The agent: the program that answers for a container.

It is a command, never a daemon: one call answers one request and ends. It travels to the target as one bundle with
libtmux inside, so everything here imports only the standard library, libtmux and specctl's own pure modules.
"""

import sys
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """`inspect`, imported when it is asked for. dataclasses brings it, a tenth of a probe's life, to write docstrings
    for those that have none: records have theirs."""

    def __getattr__(self, name: str) -> Any:
        import inspect

        return getattr(inspect, name)


if "dataclasses" not in sys.modules and "inspect" not in sys.modules:
    sys.modules["inspect"] = _Later("inspect")
    import dataclasses  # noqa: F401

    del sys.modules["inspect"]

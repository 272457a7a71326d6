"""Logs that only repeat what the run's own log says: `python train.py | tee train.log` writes every line twice.

Nothing is taken for a repetition that has not been compared byte by byte, from the first byte that is this run's.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from orchestrator.agent.lines import Section

CHUNK_BYTES = 1 << 20


class Repeat:
    """A log, and how far it is known to repeat the run's own."""

    def __init__(self, section: Section, own: Section, beat: Callable[[], None]) -> None:
        """`beat`: called now and then while they are compared, which takes a quarter of a second a GiB, or the disk's
        own time."""
        self.section, self._own, self._beat = section, own, beat
        self._offset = section.base
        self.line = section.base
        """Where the first line begins that is not known to stand in the own log."""

    def holds(self, *, over: bool) -> bool:
        """Whether it still does. `over`: what the own log has not got by now, it will not get."""
        section, own = self.section, self._own
        size = section.size  # asked for first: `tee` writes its output before its files
        if section.end is not None or size < self._offset:
            return False
        while self._offset < size:
            self._beat()
            data = os.pread(section.fd, min(CHUNK_BYTES, size - self._offset), self._offset)
            twin = os.pread(own.fd, len(data), self._offset - section.base + own.base)
            if not data.startswith(twin) or (over and len(twin) < len(data)):
                pairs = enumerate(zip(data, twin, strict=False))
                self._pass(data[: next((at for at, (one, other) in pairs if one != other), len(twin))])
                return False
            self._pass(twin)
            if len(twin) < len(data):
                return True
        return True

    def _pass(self, data: bytes) -> None:
        if cut := data.rfind(b"\n") + 1:
            self.line = self._offset + cut
        self._offset += len(data)

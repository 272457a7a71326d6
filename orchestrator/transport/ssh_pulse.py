"""Whether there is still somebody at the other end of a connection: who is silent is asked, and given up in the end.

TCP alone does not tell of a peer that is frozen, nor soon of one that is gone. Silence is counted in seconds in which
this program itself was running: a closed lid or a Ctrl-Z is nobody's silence.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import paramiko
from paramiko.packet import Packetizer
from paramiko.ssh_exception import SSHException

SILENT_S = 15
ASK_S = 3
"""After so many seconds of silence, and again after each answer."""


class Heard(Packetizer):
    """Counts what comes."""

    messages = 0

    def read_message(self) -> tuple[int, paramiko.Message]:
        found = super().read_message()
        self.messages += 1
        return found


class Pulse(threading.Thread):
    """Watches over one connection for as long as it lasts, and calls `lost` when nothing was heard for too long."""

    def __init__(self, transport: paramiko.Transport, lost: Callable[[], None]) -> None:
        super().__init__(name="ssh pulse", daemon=True)
        self._transport, self._lost = transport, lost
        self._asking: threading.Thread | None = None
        self.gone = False
        """Nothing was heard for `SILENT_S`."""
        self.start()

    def run(self) -> None:
        silent_s, heard = 0, -1
        while self._transport.is_active():
            time.sleep(1.0)
            now = getattr(self._transport.packetizer, "messages", 0)
            silent_s, heard = (silent_s + 1 if now == heard else 0), now
            if silent_s >= SILENT_S:
                self.gone = True
                self._lost()
                return
            if silent_s >= ASK_S and (self._asking is None or not self._asking.is_alive()):
                # A peer that does not read can block even the question.
                self._asking = threading.Thread(target=self._ask, daemon=True)
                self._asking.start()

    def _ask(self) -> None:
        with contextlib.suppress(SSHException, EOFError, OSError):
            self._transport.global_request("keepalive@openssh.com", wait=True)

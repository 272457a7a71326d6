"""A link to a node that counts its bytes, and that can be cut, held or refused at any of them.

A relay on loopback: specctl dials it, it dials the node's sshd. What is to happen at the N-th byte of one direction
happens exactly there, before anything else is passed on; so a fault in the middle of a verb needs no luck.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

UP, DOWN = "up", "down"
"""To the node, and from it."""
PIECE = 1 << 16


class Wire:
    """`with Wire(port) as wire:` takes connections on `wire.port`, and passes them on to `port` of loopback."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._open: list[socket.socket] = []
        self._at: tuple[str, int, Callable[[], None]] | None = None
        self.bytes = {UP: 0, DOWN: 0}
        """Passed on since the last `at`, over all connections."""
        self._server: socket.socket | None = None
        self.port = 0

    def __enter__(self) -> Wire:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self.cut()
        self.let_go()

    def listen(self) -> None:
        """Takes connections, on the port of before if there was one."""
        self._server = socket.create_server(("127.0.0.1", self.port))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def refuse(self) -> None:
        """Takes no new connections; those that are open stay."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # close alone does not wake who waits in accept
            self._server.close()
            self._server = None

    def cut(self) -> None:
        """Ends every connection, for both sides."""
        with self._lock:
            ends, self._open = self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Lets nothing pass from now on. Connections stay, nobody is told."""
        self._flows.clear()

    def let_go(self) -> None:
        self._flows.set()

    def at(self, direction: str, count: int, action: Callable[[], None]) -> None:
        """Does `action` once when so many more bytes have passed in that direction, and not one more."""
        with self._lock:
            self.bytes = {UP: 0, DOWN: 0}
            self._at = (direction, count, action)

    def count(self) -> None:
        """Counts from nought, and does nothing."""
        with self._lock:
            self.bytes, self._at = {UP: 0, DOWN: 0}, None

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                near, _ = server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open += [near, far]
            for direction, source, sink in ((UP, near, far), (DOWN, far, near)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(direction, source, sink), daemon=True).start()

    def _pass_on(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                self._flows.wait()
                while data:
                    part, action = self._until(direction, data)
                    sink.sendall(part)
                    data = data[len(part) :]
                    if action is not None:
                        action()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _until(self, direction: str, data: bytes) -> tuple[bytes, Callable[[], None] | None]:
        """What of `data` may pass before something is to happen, and what that is."""
        with self._lock:
            begun = self.bytes[direction]
            if self._at is None or self._at[0] != direction or begun + len(data) < self._at[1]:
                self.bytes[direction] += len(data)
                return data, None
            _, count, action = self._at
            self._at = None
            self.bytes[direction] = count
            return data[: count - begun], action


def ssh_config(folder: Path, lab_run: Path, port: int, **options: str) -> Path:
    """An ssh_config with the lab's node `pve` behind another port, and `options` above the usual ones."""
    ssh = lab_run / "ssh"
    host_key = " ".join((ssh / "host_key.pub").read_text().split()[:2])
    known = folder / "known_hosts"
    known.write_text(f"[127.0.0.1]:{port} {host_key}\n")
    login = (ssh / "ssh_config").read_text().partition("User ")[2].split()[0]
    usual = {
        "HostName": "127.0.0.1", "Port": str(port), "User": login, "IdentityFile": f"{ssh}/id",
        "IdentitiesOnly": "yes", "UserKnownHostsFile": str(known), "StrictHostKeyChecking": "yes", "BatchMode": "yes",
        "LogLevel": "ERROR",
    }  # fmt: skip
    path = folder / "ssh_config"
    path.write_text("Host pve\n" + "".join(f"  {name} {value}\n" for name, value in {**usual, **options}.items()))
    return path

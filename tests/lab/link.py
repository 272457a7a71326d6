"""Cuts the link to a node as a pulled cable does: nothing arrives, nothing is answered, nobody says goodbye.

A socket filter that lets no packet through is put on every socket of the node's sshd, the listening one too, and its
processes are stopped, so that nothing leaves either: no host rule, no interface, no other program is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

PIDFD_GETFD = 438
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""A BPF program of one instruction: return 0 bytes."""


def cut(node_pid: int, port: int) -> None:
    """Cuts what the sshd below process `node_pid` has on `port`. Cutting twice is fine."""
    pids = sshd_of(node_pid)
    for pid in pids:
        send(pid, signal.SIGSTOP)
    program = struct.pack("HP", 1, ctypes.addressof(DROP_ALL))
    for one in _sockets(pids, port):
        one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def mend(node_pid: int, port: int) -> None:
    """Undoes `cut`: what the client's kernel still repeats arrives, as after a cable is back in."""
    pids = sshd_of(node_pid)
    for one in _sockets(pids, port):
        with contextlib.suppress(FileNotFoundError):  # it had none
            one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    for pid in pids:
        send(pid, signal.SIGCONT)


def is_cut(node_pid: int) -> bool:
    return any(state == "T" for _, state in _sshd(node_pid))


def sshd_of(node_pid: int) -> list[int]:
    return [pid for pid, _ in _sshd(node_pid)]


def _sshd(node_pid: int) -> list[tuple[int, str]]:
    """(pid, state) of the node's sshd processes, wherever in its tree they are."""
    children: dict[int, list[tuple[int, str, str]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            head, _, rest = path.read_text(errors="replace").rpartition(")")
            state, parent = rest.split()[:2]
            children.setdefault(int(parent), []).append((int(path.parent.name), head.partition("(")[2], state))
    found, todo = [], [node_pid]
    while todo:
        for pid, name, state in children.get(todo.pop(), []):
            todo.append(pid)
            if name.startswith("sshd"):
                found.append((pid, state))
    return found


def _sockets(pids: list[int], port: int) -> Iterator[socket.socket]:
    """The TCP sockets of `pids` whose own end is `port`, as descriptors of this process; closed after use."""
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    if not str(entry.readlink()).startswith("socket:"):
                        continue
                    fd = libc.syscall(PIDFD_GETFD, pidfd, int(entry.name), 0)
                    if fd < 0:
                        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                    with socket.socket(fileno=fd) as one:
                        if one.family == socket.AF_INET and one.getsockname()[1] == port:
                            yield one
            finally:
                os.close(pidfd)


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

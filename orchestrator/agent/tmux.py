"""Which tmux there is, in which locale it starts, and where its server of this workdir listens.

`place.py` asks before anything is sent, `start.py` before the session is made; what cannot be had is a `Refusal`.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass

from orchestrator import ailments
from orchestrator.agent import system
from orchestrator.agent.main import Refusal
from orchestrator.model import WorkPaths

SOCKET_BYTES = 107
"""The longest path of a Unix socket."""
CONDA = ("conda", "miniconda3", "miniforge3")
ALIAS_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
UTF8 = "C.UTF-8"
ASK_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tmux:
    """A tmux that works here."""

    program: str
    version: str
    """`tmux 3.3a`, as it says itself."""
    locale: str
    """The `LC_ALL` it starts with: without UTF-8 it does not."""


def find() -> Tmux:
    """The first tmux that is new enough and starts; raises `Refusal` that names all that were found instead."""
    found, locales = [], {}
    for program in candidates():
        said, locale = _ask(program)
        found.append(ailments.Tmux(program=program, said=said, starts=locale is not None))
        locales[program] = locale
    chosen = ailments.tmux(found, os.pathsep.join(_folders()))
    if isinstance(chosen, ailments.Ailment):
        raise Refusal("preflight", chosen.what, chosen.hint)
    return Tmux(program=chosen.program, version=chosen.said, locale=locales[chosen.program] or UTF8)


def version() -> str:
    try:
        return find().version
    except Refusal:
        return "none"


def candidates() -> list[str]:
    """Every tmux there is, in the order of the search."""
    found: dict[str, str] = {}
    for folder in _folders():
        path = os.path.join(folder, "tmux")
        if os.path.isfile(path) and os.access(path, os.X_OK):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _folders() -> list[str]:
    """PATH, and where people put programs that they may not install: beside their Python, conda's, their own."""
    home = os.path.expanduser("~")
    conda = [f"{root}/{name}/bin" for root in ("/opt", home) for name in CONDA]
    beside = os.path.dirname(sys.executable)
    return list(dict.fromkeys([*system.search_path().split(os.pathsep), beside, *conda, f"{home}/.local/bin"]))


def _ask(program: str) -> tuple[str, str | None]:
    """(what it says to -V, the locale it said it in; None: it says why it does not start)."""
    done = _run(program, UTF8)
    if done[0] and ailments.LOCALE.search(done[1]):
        for name in _utf8_locales():
            if not (other := _run(program, name))[0]:
                return other[1], name
    return done[1], None if done[0] else UTF8


def _run(program: str, locale: str) -> tuple[int, str]:
    environ = {"PATH": system.search_path(), "LC_ALL": locale, "HOME": os.path.expanduser("~")}
    try:
        done = subprocess.run(
            [program, "-V"], stdin=subprocess.DEVNULL, capture_output=True, env=environ, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    text = (done.stdout + done.stderr).decode("utf-8", "replace").strip()
    return done.returncode, " / ".join(text.splitlines()) or f"exit code {done.returncode}"


def _utf8_locales() -> list[str]:
    try:
        listed = subprocess.run(["locale", "-a"], stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    except OSError:
        return []
    names = listed.decode("utf-8", "replace").split()
    return [name for name in names if re.search(r"\.utf-?8$", name, re.IGNORECASE)]


def socket_of(paths: WorkPaths) -> str:
    """Where the server of this user and workdir listens, by a path that fits into a socket's address.

    The socket itself is always in the workdir, where no cleaner of /tmp comes by. A deep workdir is reached by a link
    that only this user can have made; it is made anew whenever it is gone. Raises `Refusal` if none can be.
    """
    socket = paths.tmux_socket(os.geteuid())
    if len(os.fsencode(socket)) <= SOCKET_BYTES:
        return socket
    name = f"specctl-{os.geteuid()}-{hashlib.sha256(os.fsencode(paths.workdir)).hexdigest()[:16]}"
    for folder in ALIAS_FOLDERS:
        alias = os.path.join(folder, name)
        try:
            os.symlink(paths.workdir, alias)
        except FileExistsError:
            pass
        except OSError:
            continue
        try:
            if os.lstat(alias).st_uid == os.geteuid() and os.readlink(alias) == paths.workdir:
                return os.path.join(alias, os.path.basename(socket))
        except OSError:
            continue  # something else stands there
    raise Refusal(
        "preflight",
        f"the workdir's path is too long for a tmux socket: {socket} has {len(os.fsencode(socket))} bytes, "
        f"{SOCKET_BYTES} are possible, and no shorter name for it can be made in {', '.join(ALIAS_FOLDERS)}",
        "choose a shorter `workdir:` in hosts.yaml",
    )

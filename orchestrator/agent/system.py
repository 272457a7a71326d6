"""What this machine has: a PATH worth searching, an environment to start from, tmux, GPUs.

`pct exec` hands over the node's environment and a PATH without /usr/local, so nothing here trusts what it was given.
"""

from __future__ import annotations

import grp
import os
import pwd

PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
LEAKED = ("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "TMUX", "TMUX_PANE", "OLDPWD", "_", "SHLVL")


def search_path() -> str:
    """The caller's PATH with the usual directories added at its end."""
    given = [part for part in os.environ.get("PATH", "").split(os.pathsep) if part]
    return os.pathsep.join(dict.fromkeys([*given, *PATH]))


def base_environ(*, scrub: bool) -> dict[str, str]:
    """The environment a program starts from. `scrub`: forget everything inherited (it is the node's, not ours)."""
    who = account()
    environ = {} if scrub else {name: value for name, value in os.environ.items() if name not in LEAKED}
    environ.setdefault("LANG", "C.UTF-8")
    environ.update(PATH=os.pathsep.join(PATH) if scrub else search_path(), HOME=who.pw_dir, USER=who.pw_name)
    environ.update(LOGNAME=who.pw_name, SHELL=who.pw_shell or "/bin/sh")
    return environ


def account() -> pwd.struct_passwd:
    """Who this is; a uid that nothing knows has its number for a name, and the home it was given."""
    try:
        return pwd.getpwuid(os.geteuid())
    except KeyError:
        home = os.environ.get("HOME") or "/"
        return pwd.struct_passwd((str(os.geteuid()), "x", os.geteuid(), os.getegid(), "", home, "/bin/sh"))


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def group_of(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"


def which(program: str) -> str | None:
    found = (f"{folder}/{program}" for folder in search_path().split(os.pathsep))
    return next((path for path in found if os.path.isfile(path) and os.access(path, os.X_OK)), None)


"""Checks of the machine that runs live on: its user, programs, tmux, Python and disks. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from orchestrator import ailments
from orchestrator.agent.tmux import SOCKET_BYTES
from orchestrator.ailments import Ailment, Tmux
from orchestrator.doctor.check import Check, Examined, Outcome, ok
from orchestrator.pythons import OLDEST

LITTLE_DISK_BYTES, LITTLE_INODES = 2 << 30, 10_000
NETWORK = re.compile(r"nfs|cifs|smb|9p|sshfs|ceph|lustre|gluster")


def user(examined: Examined) -> Iterator[Outcome]:
    seen, hands = examined.seen, examined.hands
    wanted = examined.target.user or ""
    if "user-missing" in seen.facts:
        name = f"-u {wanted} user{wanted}" if wanted.isdigit() else wanted
        add = f"adduser -D {name}" if hands.manager == "apk" else f"useradd -m {name}"
        yield Outcome(
            status="fail", what=f"there is no user {wanted!r} there, and `user:` of hosts.yaml names it",
            evidence=f"id {wanted} finds nobody", mend=hands.inside(add),
        )  # fmt: skip
    elif "user-other" in seen.facts:
        yield Outcome(
            status="fail", what=f"only root can run as another user, and {wanted!r} is asked for",
            evidence=f"the login is {seen.one('login')}",
            mend="log in as root or as that user (ssh: in hosts.yaml), or drop `user:`",
        )  # fmt: skip
    else:
        yield ok(f"{seen.user} (uid {seen.one('uid')}), groups {', '.join(seen.groups)}")


def home(examined: Examined) -> Iterator[Outcome]:
    seen, path = examined.seen, examined.seen.one("home")
    state = seen.one("home-is").split()
    status = "fail" if examined.target.workdir.startswith("~") and "directory" not in state else "warn"
    make = f"mkdir -p {shlex.quote(path)} && chown {seen.user} {shlex.quote(path)}"
    if "directory" not in state:
        yield Outcome(
            status="fail" if status == "fail" else "warn", what=f"{seen.user} has no home directory there: {path}",
            evidence=f"test -d {path} says no", mend=examined.hands.inside(make),
        )  # fmt: skip
    elif "writable" not in state:
        yield Outcome(
            status="warn", what=f"{seen.user} cannot write in its home directory {path}: caches have no place",
            evidence=f"test -w {path} says no", mend=examined.hands.inside(make),
        )  # fmt: skip
    else:
        yield ok(path)


def programs(examined: Examined) -> Iterator[Outcome]:
    seen = examined.seen
    if seen.program("grep") is None:
        yield Outcome(
            status="warn", what=ailments.NO_GREP.what,
            evidence=f"PATH={seen.one('path')}, and the usual folders", mend=examined.hands.install("grep"),
        )  # fmt: skip
        return
    lacks = [folder for folder in ("/usr/local/bin",) if folder not in seen.one("path").split(":")]
    added = f"; specctl adds {', '.join(lacks)}" if lacks else ""
    yield ok(f"the login's PATH is {seen.one('path')}{added}")


def locale(examined: Examined) -> Iterator[Outcome]:
    seen = examined.seen
    complaint = _no_locale(examined)
    if complaint:
        mend = examined.hands.install("libc-bin")
        if examined.hands.manager == "apt-get":  # the package is there, and its locale was thrown away
            mend = examined.hands.inside("apt-get update && apt-get install -y --reinstall libc-bin")
        yield Outcome(status="fail", what="no UTF-8 locale is there", evidence=complaint, mend=mend)
        return
    there = seen.one("utf8") or "a C library that needs none"
    yield ok(f"UTF-8 locales: {there.strip()}; the login's own is {seen.one('locale')}")


def _no_locale(examined: Examined) -> str:
    """What a tmux says that finds no UTF-8 locale."""
    said = [one.said for one in _tmuxes(examined) if not one.starts and ailments.LOCALE.search(one.said)]
    return said[0] if said else ""


def tmux(examined: Examined) -> Iterator[Outcome]:
    found = _tmuxes(examined)
    chosen = ailments.tmux(found, "the login's PATH, /usr/local, conda's folders and ~/.local/bin")
    if not isinstance(chosen, Ailment):
        yield ok(f"{chosen.said}, {chosen.program}")
        return
    if chosen.kind == "locale":
        yield Outcome(status="unknown", what="no tmux starts before there is a UTF-8 locale")
        return
    mend = examined.hands.install("tmux")
    if chosen.kind == "unfit":
        mend += "   # if that brings the same one: conda install -c conda-forge tmux"
    evidence = "; ".join(f"{one.program} -V: {one.said}" for one in found) or f"PATH={examined.seen.one('path')}"
    yield Outcome(status="fail", what=chosen.what, evidence=evidence, mend=mend)


def _tmuxes(examined: Examined) -> list[Tmux]:
    found = []
    for row in examined.seen.all("tmux"):
        if match := re.match(r"(.*?) (\d+) (.*)$", row):
            program, code, said = match.groups()
            found.append(Tmux(program=program, said=said.strip() or f"exit code {code}", starts=code == "0"))
    return found


def socket(examined: Examined) -> Iterator[Outcome]:
    seen, hands = examined.seen, examined.hands
    path, listed, said = seen.one("socket"), seen.one("socket-is"), seen.text("socket-says")
    quoted = shlex.quote(path)
    if len(path.encode()) > SOCKET_BYTES:
        yield ok(f"{path} is too long for a socket: a launch makes a shorter name for it")
    elif not listed:
        if server := seen.all("server"):
            yield Outcome(
                status="fail", what="a tmux server lives whose socket is gone: its runs go on, and nobody can attach",
                evidence=f"pid {server[0]} serves {path}, and nothing is there",
                mend=hands.inside(f"kill -USR1 {server[0]}"),
            )  # fmt: skip
            return
        yield ok(f"{path} is made at the first launch")
    elif not listed.startswith("s"):
        yield Outcome(
            status="fail", what=f"{path} is no socket, and tmux needs one there", evidence=listed,
            mend=hands.inside(f"rm -r {quoted}"),
        )  # fmt: skip
    elif listed.split()[2] not in (seen.user, seen.one("uid")):
        yield Outcome(
            status="fail", what=f"the tmux socket {path} belongs to {listed.split()[2]}, and tmux refuses another's",
            evidence=listed, mend=hands.inside(f"chown {seen.user} {quoted}"),
        )  # fmt: skip
    elif re.search(r"error connecting|unsafe permissions|not allowed|access", said):
        yield Outcome(
            status="fail", what=f"tmux cannot use its socket {path}", evidence=f"{said}; {listed}",
            mend=hands.inside(f"chmod 600 {quoted}"),
        )  # fmt: skip
    elif "protocol version" in said:
        yield Outcome(
            status="fail", what="the tmux server of the runs there is of another version than the tmux of today",
            evidence=said, mend="let its runs end, or stop them, before the next launch: specctl status "
            + examined.target.name,
        )  # fmt: skip
    else:
        live = 0 if "no server" in said else len(said.splitlines())
        yield ok(f"{path}, {'no server at the moment' if not live else 'its server answers'}")


def python(examined: Examined) -> Iterator[Outcome]:
    seen, target = examined.seen, examined.target
    path, said = seen.one("python"), seen.text("python-says")
    version = re.search(r"^T version (\d+)\.(\d+)\.(\d+)$", said, re.MULTILINE)
    mend = examined.python_hint or examined.hands.install("python3", "python3-venv")
    if examined.python_hint and "apt-get install python3" in examined.python_hint and not target.python:
        mend = examined.hands.install("python3", "python3-venv")
    named = f"`python:` of hosts.yaml, {path}," if target.python else path
    if version is None:
        what, evidence = f"{path} is not there", f"PATH={seen.one('path')}, and the usual folders"
        if code := seen.one("python-code"):
            what = f"{named} does not run there"
            evidence = said.splitlines()[-1] if said else f"exit code {code}"
        yield Outcome(status="fail", what=what, evidence=evidence, mend=mend)
        return
    number = f"{version[1]}.{version[2]}.{version[3]}"
    if (int(version[1]), int(version[2])) < OLDEST:
        yield Outcome(
            status="fail", what=f"{named} is Python {number}; specctl's agent needs {OLDEST[0]}.{OLDEST[1]} or newer",
            evidence=f"{path} says version {number}", mend=mend,
        )  # fmt: skip
        return
    if lacking := re.findall(r"^T lacks (.*)$", said, re.MULTILINE):
        yield Outcome(
            status="fail", what=f"{named} is not a whole Python: it has no module {lacking[0].partition(':')[0]}",
            evidence="; ".join(lacking), mend=mend,
        )  # fmt: skip
        return
    without = re.findall(r"^T without (.*)$", said, re.MULTILINE)
    if without and not target.python and not examined.local:
        yield Outcome(
            status="warn", what=f"{path} has no {' and no '.join(without)}: it makes no environments, which "
            "`requirements:` and the trainer need", evidence=f"Python {number} finds no module of that name",
            mend=examined.hands.install("python3-venv"),
        )  # fmt: skip
        return
    yield ok(f"Python {number}, {path}")


def workdir(examined: Examined) -> Iterator[Outcome]:
    seen, hands = examined.seen, examined.hands
    path, nearest, place = seen.one("workdir"), seen.one("nearest"), seen.place("workdir")
    if place is None:
        yield Outcome(status="unknown", what="the workdir could not be looked at")
        return
    evidence = f"{nearest}: {seen.one('nearest-is')}"
    problem = ailments.unusable_folder(
        nearest, user=seen.user, is_directory=place.is_directory, writable=place.writable, disk=place.disk
    )
    quoted, mount = shlex.quote(path), place.mount
    if problem:
        if mount.read_only:
            mend = hands.inside(f"mount -o remount,rw {shlex.quote(mount.at)}")
            evidence += f"; {mount.at} is mounted ro"
        elif not place.is_directory:
            mend = hands.inside(f"mv {shlex.quote(nearest)} {shlex.quote(nearest + '.away')}")
        elif not place.writable:
            mend = hands.inside(f"mkdir -p {quoted} && chown {seen.user} {quoted}")
        else:
            mend = _make_room(examined, mount.at)
        yield Outcome(status="fail", what=f"the workdir {path} cannot be used: {problem}", evidence=evidence, mend=mend)
        return
    if closed := ailments.runs_no_programs(mount, path):
        yield Outcome(
            status="warn" if examined.target.python else "fail", what=closed.what,
            evidence=f"{mount.at} is mounted {','.join(sorted(mount.options))}",
            mend=hands.inside(f"mount -o remount,exec {shlex.quote(mount.at)}"),
        )  # fmt: skip
    elif mount.kind in ("tmpfs", "ramfs"):
        yield Outcome(
            status="warn", what=f"the workdir {path} is in memory: logs and checkpoints end with the next restart",
            evidence=f"{mount.at} is a {mount.kind}",
            mend=f"choose a `workdir:` of {examined.target.name} on a disk in hosts.yaml",
        )  # fmt: skip
    elif NETWORK.search(mount.kind):
        yield Outcome(
            status="warn", what=f"the workdir {path} is on a network file system: a launch tries its locks and sockets",
            evidence=f"{mount.at} is {mount.kind}",
            mend=f"choose a `workdir:` of {examined.target.name} on a local disk in hosts.yaml",
        )  # fmt: skip
    else:
        yield ok(f"{path}{'' if path == nearest else ' (not made yet)'}, on {mount.kind or 'a disk'} at {mount.at}")


def disk(examined: Examined) -> Iterator[Outcome]:
    place = examined.seen.place("workdir")
    if place is None or place.disk is None:
        yield Outcome(status="unknown", what="df tells nothing of the workdir's file system")
        return
    room, grow = place.disk, _make_room(examined, place.mount.at)
    if room.read_only or ailments.lacks_room(room, 0):
        yield Outcome(status="unknown", what="the workdir comes first")
    elif room.free_bytes < LITTLE_DISK_BYTES:
        yield Outcome(status="warn", what="little room is left for checkpoints and environments", evidence=room.words,
                      mend=grow)  # fmt: skip
    elif room.free_inodes is not None and room.free_inodes < LITTLE_INODES:
        yield Outcome(
            status="warn", what=f"only {room.free_inodes:,} more files can be made there, and an environment has more",
            evidence=f"df -i of {place.mount.at}", mend=grow,
        )  # fmt: skip
    else:
        yield ok(room.words)


def _make_room(examined: Examined, mount: str) -> str:
    target, prune = examined.target, f"specctl prune {examined.target.name}"
    volume = examined.node.mounted(mount) if examined.node is not None else None
    if target.vmid is None or volume is None:
        return f"{prune}   # or a `workdir:` on another disk, in hosts.yaml"
    return f"{prune}   # or: {examined.hands.on_node(f'pct resize {target.vmid} {volume} +20G')}"


def tmp(examined: Examined) -> Iterator[Outcome]:
    place = examined.seen.place("tmp")
    if place is None:
        yield Outcome(status="unknown", what="/tmp could not be looked at")
        return
    at, mount, inside = shlex.quote(place.path), place.mount, examined.hands.inside
    trouble = ailments.tmp(
        place.path, user=examined.seen.user, usable=place.is_directory and place.writable, mount=mount, disk=place.disk
    )  # fmt: skip
    if trouble is None:
        yield ok(f"{place.path}: {place.disk.words}" if place.disk else place.path)
        return
    evidence, mend = {
        "closed": (
            f"test -w {place.path} says no" + (f"; {mount.at} is mounted ro" if mount.read_only else ""),
            inside(f"mkdir -p {at} && chmod 1777 {at}"),
        ),
        "noexec": (
            f"{mount.at} is mounted noexec",
            f"set env: {{TMPDIR: ...}} of {examined.target.name} in hosts.yaml to a folder of a disk, or "
            + inside(f"mount -o remount,exec {shlex.quote(mount.at)}"),
        ),
        "full": (place.disk.words if place.disk else "", inside(f"du -ax {at} | sort -rn | head")),
    }[trouble.kind]
    yield Outcome(status="warn", what=trouble.what, evidence=evidence, mend=mend)


CHECKS = [
    Check(name="user", asks="there is the user that runs are started as, and this login may become it", look=user,
          part="who", launch=True),
    Check(name="home", asks="that user has a home directory, and can write in it", look=home, part="who",
          personal=True),
    Check(name="programs", asks="PATH, and grep", look=programs, part="system", launch=True),
    Check(name="locale", asks="a UTF-8 locale is installed, without which tmux does not start", look=locale,
          part="tmux", launch=True),
    Check(name="tmux", asks="a tmux of 3.2a or newer starts", look=tmux, part="tmux", launch=True),
    Check(name="tmux socket", asks="the socket of the runs' tmux server is there if its server is, and this user's",
          look=socket, part="tmux", personal=True),
    Check(name="python", asks="a whole Python of 3.10 or newer runs, and can make environments", look=python,
          part="python", launch=True),
    Check(name="workdir", asks="the workdir is a directory, or can be made; it can be written, runs programs, and "
          "outlives a restart", look=workdir, part="workdir", launch=True, personal=True),
    Check(name="disk", asks="room and inodes for checkpoints and environments", look=disk, part="workdir", launch=True),
    Check(name="tmp", asks="/tmp (or TMPDIR) can be written, runs programs, and has room", look=tmp, part="tmp",
          launch=True, personal=True),
]  # fmt: skip

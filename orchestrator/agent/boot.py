"""What `python3 -I -S -c` runs on a target: become the run's user, find or install the agent, hand over.

This file's text travels as one argument, so it is short, imports nothing of specctl, and must be readable by any
Python 3.6, if only to say that it is too old. argv: AGENT_HASH WORKDIR USER. stdin: one line of JSON, then payload;
where stdin is somebody's terminal, the line is a fourth argument.
"""

import errno
import json
import os
import stat
import sys
import time
import zlib
from typing import Any, BinaryIO, Callable, Dict, Iterator, Optional, Tuple

READS = (
    "probe", "show", "logs", "errors", "history", "texts", "curves", "events", "stop", "survey", "attach", "send",
    "prune",
)  # fmt: skip
FOLDERS = ("", "agents", "bundles", "envs", "runs", "wheels")
"""Where a launch writes: below the workdir, each belongs to whoever came first."""
OUTSIDE = ("/tmp", "/dev/shm")
"""Where a look may put the agent when the workdir is full or closed."""
CHOOSE = "choose another `workdir:` in hosts.yaml"


def boot(agent: str, workdir: str, user: str, line: str = "") -> int:
    stdin = sys.stdin.buffer
    try:
        request = json.loads(line or stdin.readline().decode("ascii"))
    except ValueError:
        sys.stderr.write("the request did not arrive: a shell start-up file there that reads stdin takes it away\n")
        return 1
    reads = request.get("for", request["verb"]) in READS

    def answer(**payload: object) -> int:
        body = json.dumps(payload, separators=(",", ":")).encode("ascii")
        frame = b"\x1especctl1 %s %08x %s\n" % (request["token"].encode("ascii"), zlib.crc32(body), body)
        sys.stdout.buffer.write(frame)
        sys.stdout.buffer.flush()
        return 0

    def refuse(kind: str, message: str, hint: Optional[str] = None) -> int:
        return answer(final=True, error={"kind": kind, "message": message, "hint": hint or None})

    if sys.version_info < (3, 10):
        have = "%s there is Python %d.%d" % (sys.executable or "python3", sys.version_info[0], sys.version_info[1])
        return refuse("python", have + "; specctl's agent needs 3.10 or newer")
    if request.get("scrub"):  # `pct exec` hands over the node's environment, which is not this container's
        import pwd

        os.environ.clear()
        os.environ.update(PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", LANG="C.UTF-8")
        os.environ["HOME"] = pwd.getpwuid(os.geteuid()).pw_dir
        os.umask(0o022)
    if user and os.geteuid() == 0:
        import pwd

        try:
            who = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
        except KeyError:
            return refuse("preflight", "there is no user %r on the target" % user,
                          "create it there, or change `user:` in hosts.yaml")
        if workdir.startswith("~") and not os.path.isdir(who.pw_dir) and not reads:
            return refuse("preflight", "%s has no home directory there (%s)" % (who.pw_name, who.pw_dir),
                          "name an absolute `workdir:` in hosts.yaml")
        os.environ.update(HOME=who.pw_dir, USER=who.pw_name, LOGNAME=who.pw_name, SHELL=who.pw_shell or "/bin/sh")
        if not reads:
            make_room(os.path.abspath(os.path.expanduser(workdir)), who.pw_uid, who.pw_gid)
        os.initgroups(who.pw_name, who.pw_gid)
        os.setgid(who.pw_gid)
        os.setuid(who.pw_uid)
        os.umask(0o022)
        os.chdir("/")  # where root was may be closed to this user
        if not os.access(sys.executable, os.R_OK | os.X_OK):
            return refuse("python", "%s may not run %s" % (who.pw_name, sys.executable))
    elif user:
        import pwd

        try:
            name = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            name = ""
        if user not in (name, str(os.geteuid())):
            return refuse("preflight", "only root can run as another user, and %r is asked for" % user,
                          "log in as root or as that user, or drop `user:` in hosts.yaml")
    # A run that itself calls specctl must not lend its mark to the tmux server that its child run may start.
    for name in ("SPECCTL_RUN_ID", "SPECCTL_RUN_DIR", "SPECCTL_ATTEMPT", "SPECCTL_NONCE"):
        os.environ.pop(name, None)
    workdir = os.path.abspath(os.path.expanduser(workdir))
    if request["verb"] == "survey":
        return survey(stdin, request, workdir, refuse)
    gone = False
    if reads:
        # To look at a target leaves nothing there: without a workdir there is no run, and none is made to say so.
        try:
            os.stat(workdir)
        except (FileNotFoundError, NotADirectoryError):
            gone = True
            if not marked(workdir):
                return answer(final=True, missing="workdir", workdir=workdir, now=time.time(), runs=[], older=0,
                              gpus=[], gpus_error=None)
        except OSError as error:
            return refuse("preflight", "the workdir cannot be looked into: %s" % error)
    else:
        problem = unusable(workdir)
        if problem:
            return refuse("preflight", *problem)
    homes = agent_homes(workdir, agent, reads, request["verb"] == "install")
    if gone:
        next(homes)  # a workdir that was moved away, under its runs, must find its place free
    if request["verb"] == "install":
        return install(stdin, request, workdir, homes, answer, refuse)
    home = next(filter(os.path.isdir, homes), None)
    if home is None:
        return answer(final=True, missing="agent")
    sys.path.insert(0, home)
    try:
        from orchestrator.agent.main import main

        return main(request, stdin, workdir)
    except Exception as error:  # main lets through only what shows that the agent is not whole
        lacking = getattr(error, "name", None) or "orchestrator"
        if lacking.split(".")[0] not in ("orchestrator", "libtmux"):
            return refuse("python", "%s there has no module %s: it is not a whole Python" % (sys.executable, lacking))
        broken = "%s.%d.broken" % (home, os.getpid())  # a cleaner or a crash has been at it: it is sent again
        try:
            os.rename(home, broken)
        except OSError:
            return refuse("preflight", "specctl's agent in %s is damaged and cannot be replaced: %s" % (home, error))
        import shutil

        shutil.rmtree(broken, ignore_errors=True)
        return answer(final=True, missing="agent", why="%s: %s" % (type(error).__name__, error))


def marked(workdir: str) -> bool:
    """Whether a living process was launched in the workdir."""
    mark = b"SPECCTL_RUN_DIR=" + os.fsencode(workdir) + b"/runs/"
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/environ" % name, "rb") as file:
                    if mark in file.read():
                        return True
            except OSError:
                continue
    return False


def make_room(workdir: str, uid: int, gid: int) -> None:
    """Makes, as root and for the user, the first missing folder of the workdir where only root may make one."""
    missing = workdir
    while not os.path.lexists(os.path.dirname(missing)):
        missing = os.path.dirname(missing)
    if os.path.lexists(missing):
        return
    os.setegid(gid)
    os.seteuid(uid)
    may = os.access(os.path.dirname(missing), os.W_OK | os.X_OK, effective_ids=True)
    os.seteuid(0)
    os.setegid(0)
    if not may:  # else it makes its own, below: root must not make folders where another user can swap them for links
        try:
            os.mkdir(missing, 0o755)
            os.chown(missing, uid, gid)
        except OSError:
            pass  # the user will be told why it cannot be had


def unusable(workdir: str) -> Optional[Tuple[str, str]]:
    """Why this user cannot launch in the workdir, and what to do about it; None when nothing speaks against it."""
    try:
        os.makedirs(workdir, exist_ok=True)
        for folder in FOLDERS:
            path = os.path.join(workdir, folder).rstrip("/")
            if os.path.isdir(path) and not os.access(path, os.W_OK | os.X_OK):
                if os.statvfs(path).f_flag & os.ST_RDONLY:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
                owner, me = name_of(os.stat(path).st_uid), name_of(os.geteuid())
                hint = "give %s a `workdir:` of its own in hosts.yaml, or there: chown -R %s %s" % (me, me, workdir)
                return "%s belongs to %s, and %s cannot write there" % (path, owner, me), hint
    except OSError as error:
        return cannot_write(workdir, error)
    return None


def cannot_write(workdir: str, error: OSError) -> Tuple[str, str]:
    where = "the workdir %s" % workdir
    if error.errno == errno.EROFS:
        return "%s is on a read-only file system" % where, CHOOSE
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        room = os.statvfs(nearest(workdir))
        free = "%.1f of %.1f MiB free" % tuple(n * room.f_frsize / 2.0**20 for n in (room.f_bavail, room.f_blocks))
        if room.f_files and not room.f_favail:
            free = "no free inodes: too many files"
        return "%s is full (%s, %s)" % (where, error.strerror, free), "make room there, or " + CHOOSE
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return "%s cannot be made: %s is not a directory" % (where, error.filename or workdir), CHOOSE
    named = ": %s" % error.filename if error.filename else ""
    return "%s cannot be written by %s%s: %s" % (where, name_of(os.geteuid()), named, error.strerror), CHOOSE


def nearest(path: str) -> str:
    """It, or what there is of the way to it."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "uid %d" % uid


def survey(stdin: BinaryIO, request: dict, workdir: str, refuse: Callable[..., int]) -> int:  # type: ignore[type-arg]
    """The agent came along as a zip: to ask what a target has leaves nothing there, not even itself."""
    try:
        fd = os.memfd_create("specctl-agent")
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(stdin.read(request["size"]))
        sys.path.insert(0, "/proc/self/fd/%d" % fd)
        from orchestrator.agent.main import main
    except (OSError, ImportError) as error:
        return refuse("python", "%s there cannot run specctl's agent: %s" % (sys.executable, error))
    return main(request, stdin, workdir)


def agent_homes(workdir: str, agent: str, reads: bool, make: bool) -> Iterator[str]:
    """Where the agent may be. A full or closed workdir must not keep one from looking, nor from stopping what fills it:
    for that there are folders outside it, this user's alone, which with `make` are made when they are needed."""
    yield os.path.join(workdir, "agents", agent)
    for parent in OUTSIDE if reads else ():
        folder = "%s/specctl-agents-%d" % (parent, os.geteuid())
        try:
            if make and not os.path.lexists(folder):
                os.mkdir(folder, 0o700)
            seen = os.lstat(folder)
        except OSError:
            continue
        if stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and not seen.st_mode & 0o022:
            yield os.path.join(folder, agent)


def install(
    stdin: BinaryIO,
    request: Dict[str, Any],
    workdir: str,
    homes: Iterator[str],
    answer: Callable[..., int],
    refuse: Callable[..., int],
) -> int:
    import hashlib

    data = stdin.read(request["size"])
    if hashlib.sha256(data).hexdigest() != request["sha256"]:
        return refuse("link", "the agent did not arrive whole (%d of %d bytes)" % (len(data), request["size"]))
    problem = ("", "")
    for home in homes:
        try:
            unpack(data, home)
        except OSError as error:
            problem = problem if problem[0] else cannot_write(workdir, error)
        else:
            return answer(final=True, installed=home)
    return refuse("preflight", *problem)


def unpack(data: bytes, home: str) -> None:
    """Makes `home`, whole or not at all. Raises `OSError`."""
    import compileall
    import io
    import shutil
    import tarfile

    folder = os.path.dirname(home)
    workdir = os.path.dirname(folder)
    room = os.statvfs(workdir)
    aside = "%s.%d" % (home, os.getpid())
    try:
        if room.f_bavail * room.f_frsize < 3 * len(data):  # with its bytecode
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.makedirs(aside)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(aside)
        compileall.compile_dir(aside, quiet=2)
        try:
            os.rename(aside, home)
        except OSError:
            if not os.path.isdir(home):  # somebody else may have installed the same agent meanwhile
                raise
            shutil.rmtree(aside)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        for path in (folder, workdir):
            try:
                os.rmdir(path)
            except OSError:
                pass  # it holds something, so that it was there before
        raise


if __name__ == "__main__":
    sys.exit(boot(*sys.argv[1:5]))

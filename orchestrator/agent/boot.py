"""What `python3 -I -S -c` runs on a target: become the run's user, find or install the agent, hand over.

This file's text travels as one argument, so it is short, imports nothing of specctl, and must be readable by any
Python 3.6, if only to say that it is too old. argv: AGENT_HASH WORKDIR USER. stdin: one line of JSON, then payload.
"""

import json
import os
import sys
import time
import zlib
from typing import BinaryIO, Callable

READS = ("probe", "show", "logs", "stop")


def boot(agent: str, workdir: str, user: str) -> int:
    stdin = sys.stdin.buffer
    line = stdin.readline()
    request = json.loads(line.decode("ascii"))

    def answer(**payload: object) -> int:
        body = json.dumps(payload, separators=(",", ":")).encode("ascii")
        frame = b"\x1especctl1 %s %08x %s\n" % (request["token"].encode("ascii"), zlib.crc32(body), body)
        sys.stdout.buffer.write(frame)
        sys.stdout.buffer.flush()
        return 0

    def refuse(kind: str, message: str, hint: str = "") -> int:
        return answer(final=True, error={"kind": kind, "message": message, "hint": hint or None})

    if sys.version_info < (3, 10):
        have = "%d.%d" % sys.version_info[:2]
        return refuse("preflight", "python3 is %s there; specctl's agent needs 3.10 or newer" % have,
                      "install a newer Python and name it as `python:` of this target in hosts.yaml")
    if request.get("scrub"):  # `pct exec` hands over the node's environment, which is not this container's
        import pwd

        os.environ.clear()
        os.environ.update(PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", LANG="C.UTF-8")
        os.environ["HOME"] = pwd.getpwuid(os.geteuid()).pw_dir
    if user and os.geteuid() == 0:
        import pwd

        try:
            who = pwd.getpwnam(user)
        except KeyError:
            return refuse("preflight", "there is no user %r on the target" % user,
                          "create it there, or change `user:` in hosts.yaml")
        os.environ.update(HOME=who.pw_dir, USER=user, LOGNAME=user, SHELL=who.pw_shell or "/bin/sh")
        workdir = os.path.expanduser(workdir)
        if not os.path.isdir(workdir) and request["verb"] not in READS:
            try:
                os.makedirs(workdir)
                os.chown(workdir, who.pw_uid, who.pw_gid)
            except OSError:
                pass  # the user may still be able to make it; if not, the error below is the true one
        os.initgroups(user, who.pw_gid)
        os.setgid(who.pw_gid)
        os.setuid(who.pw_uid)
    elif user:
        import pwd

        if pwd.getpwuid(os.geteuid()).pw_name != user:
            return refuse("preflight", "only root can run as another user, and %r is asked for" % user,
                          "log in as root or as that user, or drop `user:` in hosts.yaml")
    # A run that itself calls specctl must not lend its mark to the tmux server that its child run may start.
    for name in ("SPECCTL_RUN_ID", "SPECCTL_RUN_DIR", "SPECCTL_ATTEMPT", "SPECCTL_NONCE"):
        os.environ.pop(name, None)
    workdir = os.path.abspath(os.path.expanduser(workdir))
    if request["verb"] in READS:
        # To look at a target leaves nothing there: without a workdir there is no run, and none is made to say so.
        try:
            os.stat(workdir)
        except (FileNotFoundError, NotADirectoryError):
            return answer(final=True, missing="workdir", workdir=workdir, now=time.time(), runs=[], older=0, gpus=[],
                          gpus_error=None)
        except OSError as error:
            return refuse("preflight", "the workdir cannot be looked into: %s" % error)
    home = os.path.join(workdir, "agents", agent)
    if request["verb"] == "install":
        return install(stdin, request, home, answer, refuse)
    if not os.path.isdir(home):
        return answer(final=True, missing="agent")
    sys.path.insert(0, home)
    from orchestrator.agent.main import main

    return main(request, stdin, workdir)


def install(stdin: BinaryIO, request: dict, home: str, answer: Callable[..., int], refuse: Callable[..., int]) -> int:  # type: ignore[type-arg]
    import compileall
    import hashlib
    import io
    import shutil
    import tarfile

    data = stdin.read(request["size"])
    if hashlib.sha256(data).hexdigest() != request["sha256"]:
        return refuse("link", "the agent did not arrive whole (%d of %d bytes)" % (len(data), request["size"]))
    aside = "%s.%d" % (home, os.getpid())
    try:
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
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        return refuse("preflight", "the workdir cannot be written: %s" % error,
                      "choose another `workdir:` in hosts.yaml, or make room there")
    return answer(final=True, installed=home)


if __name__ == "__main__":
    sys.exit(boot(*sys.argv[1:4]))

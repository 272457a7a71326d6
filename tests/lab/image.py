"""What a lab needs before there is one: root, a few packages, and the containers' root image, made once and cached."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MINE = "" if os.geteuid() == 0 else f"-{os.geteuid()}"
CACHE = Path(os.environ.get("SPECCTL_LAB_CACHE") or f"/var/tmp/specctl-lab{MINE}/cache")
TOOLS = {  # what must be there -> the Debian package it comes from
    "lxc-start": "lxc",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "mmdebstrap": "mmdebstrap",
    "newuidmap": "uidmap",
    "sudo": "sudo",
    "fish": "fish",
    "ip": "iproute2",
    "/usr/bin/python3": "python3",
}
SUITE = "bookworm"
CONTAINER_PACKAGES = ["python3", "tmux", "procps", "tini", "grep", "systemd-sysv", "libpam-systemd"]
RECIPE = [
    "--variant=minbase",
    f"--include={','.join(CONTAINER_PACKAGES)}",
    *(f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")),
    '--customize-hook=rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*',
    SUITE,
]
IMAGE = f"root-{hashlib.sha256(' '.join(RECIPE).encode()).hexdigest()[:8]}"
SHIFT = 100_000
"""Where the node maps root of an unprivileged container to."""


class LabUnavailable(Exception):
    """This machine or this user cannot have a lab; the message says why and what to do."""


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def setup(*, install: bool = True) -> None:
    """Make sure of root, packages and root image. With `install` False, missing packages are an error."""
    if os.geteuid() != 0:
        raise LabUnavailable("the lab needs root, for containers and mounts: run it with sudo, or in a root container")
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / "setup.lock"):
        missing = sorted({package for tool, package in TOOLS.items() if not find_tool(tool)})
        if missing and not install:
            raise LabUnavailable(f"missing: {', '.join(missing)}; run: ./lab setup")
        if missing:
            print(f"installing: {' '.join(missing)}", file=sys.stderr, flush=True)
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            install_argv = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing]
            step(["apt-get", "update", "-qq"], f"cannot install {', '.join(missing)}", env=quiet)
            step(install_argv, f"cannot install {', '.join(missing)}", env=quiet)
        if not (CACHE / IMAGE).is_dir():
            print(f"making the containers' root image, once: {CACHE / IMAGE}", file=sys.stderr, flush=True)
            aside = CACHE / f"{IMAGE}.tmp"
            shutil.rmtree(aside, ignore_errors=True)
            step(["mmdebstrap", "--quiet", *RECIPE[:-1], SUITE, str(aside)], "cannot make the containers' root image")
            aside.rename(CACHE / IMAGE)


def shifted_image() -> str:
    """The root image with its owners moved to where an unprivileged container's are; made at the first need."""
    name = f"{IMAGE}-shifted"
    with locked(CACHE / "setup.lock"):
        if not (CACHE / name).is_dir():
            aside = CACHE / f"{name}.tmp"
            shutil.rmtree(aside, ignore_errors=True)
            step(["cp", "-a", "--reflink=auto", str(CACHE / IMAGE), str(aside)], "cannot copy the root image")
            for path in [aside, *aside.rglob("*")]:
                seen = path.lstat()
                os.lchown(path, seen.st_uid + SHIFT, seen.st_gid + SHIFT)
                if not path.is_symlink():  # a change of owner has taken the setuid bits
                    path.chmod(seen.st_mode & 0o7777)
            aside.rename(CACHE / name)
    return name


def step(argv: list[str], what: str, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", env=env)
    except FileNotFoundError:
        raise LabUnavailable(f"{what}: {argv[0]} is not on this machine (the lab is made for Debian)") from None
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-800:]
        raise LabUnavailable(f"{what}: `{' '.join(argv[:3])} ...` exited {done.returncode}: {tail}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_until(condition: object, what: str, *, timeout_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"lab: {what}: not within {timeout_s:g} s")
        time.sleep(0.01)

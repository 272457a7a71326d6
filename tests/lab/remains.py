"""What is left of a node that is gone: its folder and its cgroup, found by the lock that its processes held."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from tests.lab.image import CACHE, wait_until

RUNS = CACHE.parent / "run"


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_abandoned(run: Path) -> bool:
    """Whether the node's processes have let go of its lock. One that is exiting has no command line any more, but
    still its open files: looking for its command line would call the node gone too early."""
    try:
        with (run / "lock").open() as lock:
            return try_lock(lock.fileno())
    except FileNotFoundError:  # swept, or its maker died before it had one
        return True


def cgroup_of(run: Path) -> str:
    return f"specctl-lab-{run.name}"


def remove_cgroup(run: Path) -> None:
    """Remove the node's cgroups. They are gone from use once its processes are, which can take a moment."""
    if os.geteuid() != 0:
        return  # a user's node has none
    script = (
        'mount -t cgroup2 cgroup2 /sys/fs/cgroup; cd /sys/fs/cgroup; [ ! -e "$1" ] || '
        'find "$1" -depth -type d -exec rmdir {} + 2>/dev/null; [ ! -e "$1" ]'
    )
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", cgroup_of(run)]
    wait_until(lambda: subprocess.run(argv).returncode == 0, f"cgroup {cgroup_of(run)} stays in use")


def destroy(run: Path) -> None:
    """Remove the cgroups and files of a node that is gone. The caller holds RUNS/.lock."""
    remove_cgroup(run)
    shutil.rmtree(run)


def sweep() -> None:
    """Destroy what crashed labs left: their lock is free. The caller holds RUNS/.lock."""
    for run in RUNS.iterdir():
        if run.is_dir() and is_abandoned(run):
            destroy(run)

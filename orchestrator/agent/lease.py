"""What a launch is about to use stays: a bundle, an environment or a wheel is marked when a launch finds it there.

Between the moment in which a launch finds its bundle on the target and the record of its run that names it, nothing
says who needs it; an environment may be made meanwhile for an hour. So what is found is marked by its time, and a
prune leaves alone what was marked within `LEASE_S`. Marking and removing exclude each other: a launch finds a thing
marked, or gone.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.model import WorkPaths

LEASE_S = 24 * 3600.0
"""Longer than a launch can take from its first look to the record of its run."""


def found(home: str, marker: str = "") -> bool:
    """Whether the thing `home`, a folder of a folder of the workdir, is whole; it then stays for `LEASE_S`."""
    place = os.path.join(home, marker) if marker else home
    if not os.path.exists(place):
        return False
    with _locked(os.path.dirname(os.path.dirname(home)), fcntl.LOCK_SH):
        try:
            os.utime(place)
        except FileNotFoundError:
            return False
        except PermissionError:
            pass  # another user's: whoever may remove it cannot read this user's runs, and so removes nothing
    return True


@contextmanager
def pruning(paths: WorkPaths) -> Iterator[None]:
    """Inside it no launch finds anything; to be held for moments only."""
    with _locked(paths.workdir, fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(workdir: str, how: int) -> Iterator[None]:
    fd = os.open(f"{workdir}/prune.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)

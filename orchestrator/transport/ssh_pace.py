"""How many logins one user has under way at one sshd: a few, over all specctl processes of this machine.

sshd drops connections at random once ten are not logged in yet (MaxStartups 10:30:100), everybody's counted. The
places are files that are locked; without them, or when they are long in coming, one goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import time
from collections.abc import Iterator

from orchestrator import index
from orchestrator.transport.base import Limits

PLACES = 4
PATIENCE_S = 10.0
"""A process that holds a place may be stopped or hang; that must not stop the others for good."""


@contextlib.contextmanager
def turn(where: str, limits: Limits) -> Iterator[None]:
    """Inside, a login at the sshd `where` may be under way. Raises the error of a limit that is reached meanwhile."""
    place = _wait_for_place(where, limits)
    try:
        yield
    finally:
        if place is not None:
            os.close(place)


def _wait_for_place(where: str, limits: Limits) -> int | None:
    folder = index.folder() / "logins"
    name = hashlib.sha256(where.encode(errors="surrogateescape")).hexdigest()[:16]
    patient_until = time.monotonic() + PATIENCE_S
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while time.monotonic() < patient_until:
            for number in random.sample(range(PLACES), PLACES):
                place = os.open(folder / f"{name}.{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return place
                except OSError as error:
                    os.close(place)
                    if not isinstance(error, BlockingIOError):
                        raise
            limits.left_s()
            time.sleep(random.uniform(0.01, 0.04))
    except OSError:
        pass  # a home that is read-only or full must not stop a look at a run
    return None

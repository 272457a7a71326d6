"""Into a container through its node: wraps another transport's argv, and tells why pct, LXC or sudo did not let it in.

What a message lacks (whose login, which lock, on which node instead) the node is asked for then.
"""

from __future__ import annotations

import math

from orchestrator.errors import ContainerError, SpecctlError
from orchestrator.inventory import Attach
from orchestrator.transport.base import Completed, Limits, Stdin, Stream, Transport
from orchestrator.transport.node import ENTER, LOOK, ON_NODE
from orchestrator.transport.pct_errors import Entrance, seen_in
from orchestrator.transport.terminal import Screen, Terminal

_GUARD = ENTER + '\nenter "$@"\n'
_RAW_GUARD = ENTER + '\nstty raw -echo 2>/dev/null\nenter "$@"\n'
"""With a terminal on the node and another in the container, only the inner one may turn keys into signals."""
_LOOK = LOOK + '\nlook "$1"\n'
_LOOK_DEADLINE_S = 10.0


class PctTransport(Transport):
    """Runs commands in one container of the node that `inner` reaches, as root of the container.

    The environment there is nearly empty, without HOME and USER, and a PATH that may know no /usr/local.
    """

    def __init__(
        self,
        inner: Transport,
        vmid: int,
        *,
        node: str | None = None,
        target: str | None = None,
        attach: Attach = "auto",
        reads: bool = False,
    ) -> None:
        super().__init__(target or inner.target)
        self._inner, self._reads = inner, reads
        self._entrance = Entrance(vmid=vmid, ssh=node, attach=attach)
        self.late, self.trial = self._entrance.late, self._entrance.trial

    def for_reads(self) -> Transport:
        at = self._entrance
        return PctTransport(self._inner, at.vmid, node=at.ssh, target=self.target, attach=at.attach, reads=True)

    def _open(self, argv: list[str], stdin: Stdin, limits: Limits, stderr_limit: int) -> Stream:
        # A second later than here, so that the deadline is told by the one who waits, and cleaned up after there.
        limit_s = "none" if limits.deadline_s is None else str(math.ceil(limits.deadline_s) + 1)
        attach = "pct" if self._entrance.attach == "auto" and not self._reads else self._entrance.attach
        guarded = [*ON_NODE, _GUARD, "specctl-enter", str(self._entrance.vmid), limit_s, attach, *argv]
        return self._inner._open(guarded, stdin, limits, stderr_limit)

    def terminal(self, argv: list[str], screen: Screen, *, deadline_s: float) -> Terminal:
        attach = "pct" if self._entrance.attach == "auto" and not self._reads else self._entrance.attach
        guarded = [*ON_NODE, _RAW_GUARD, "specctl-enter", str(self._entrance.vmid), "none", attach, *argv]
        return self._inner.terminal(guarded, screen, deadline_s=deadline_s)

    def close(self) -> None:
        self._inner.close()

    def explain(self, completed: Completed) -> SpecctlError | None:
        """Also what keeps a container from being entered. Asks the node for what the message lacks."""
        if (lost := super().explain(completed)) is not None:
            return lost
        argv = [*ON_NODE, _LOOK, "specctl-look", str(self._entrance.vmid)]
        try:
            looked = self._inner.run(argv, deadline_s=_LOOK_DEADLINE_S).stdout.decode(errors="replace")
        except SpecctlError as error:
            return error
        said = completed.stderr.decode(errors="replace")
        found = self._entrance.reason(said, completed.exit_code, seen_in(looked))
        return None if found is None else ContainerError(found[0], target=self.target, hint=found[1])

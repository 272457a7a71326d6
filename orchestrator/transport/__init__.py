"""How bytes reach a target and come back: this machine, SSH, and `pct` over either.

`open_transport` picks by target; a `NodePool` keeps one connection a node for as long as the command runs. paramiko is
imported only when a target has `ssh:`, since that alone takes longer than a local probe.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from orchestrator.crew import Crew
from orchestrator.inventory import Target
from orchestrator.transport import paramiko_alone
from orchestrator.transport.base import Completed, Stream, Transport
from orchestrator.transport.fanout import Leg, Request, fanout
from orchestrator.transport.local import LocalTransport

if TYPE_CHECKING:
    from orchestrator.transport.ssh import SshNode
    from orchestrator.transport.ssh_options import Jump

__all__ = ["Completed", "Leg", "NodePool", "Request", "Stream", "Transport", "fanout", "open_transport"]

CLOSE_S = 0.5


class NodePool:
    """The connections of one command: one a node, made when first needed, closed together."""

    def __init__(self, *, ssh_config: str | None = None, accept_new: bool = False) -> None:
        self._ssh_config, self._accept_new = ssh_config, accept_new
        self.trusted: list[str] = []
        """What `accept_new` led to, a sentence a host."""
        self._nodes: dict[Jump, SshNode] = {}
        self._lock = threading.Lock()

    def node(self, ssh: str | None, *, target: str | None = None) -> Transport:
        """The transport to a node itself: an SSH host, or this machine when `ssh` is None. Connects to nothing yet."""
        if ssh is None:
            return LocalTransport(target or "local")
        from orchestrator.transport.ssh_options import Jump

        node = self._ssh_node(Jump(host=ssh, via=None))
        from orchestrator.transport.ssh import SshTransport

        return SshTransport(node, target)

    def _ssh_node(self, host: Jump) -> SshNode:
        from orchestrator.transport import ssh_config

        with self._lock:
            if host not in self._nodes:
                # ssh reads its configuration while paramiko is being imported, which takes longer.
                options = Crew(1).do(partial(ssh_config.resolve, host.host, self._ssh_config, via=host.via))
                paramiko_alone.load()
                from orchestrator.transport.ssh import SshNode

                self._nodes[host] = SshNode(
                    host.host, ssh_config_file=self._ssh_config, via=host.via, options=options,
                    trust=self.trusted.append if self._accept_new else None,
                    hop=self._ssh_node,
                )  # fmt: skip
            return self._nodes[host]

    def close(self) -> None:
        with self._lock:
            nodes = list(self._nodes.values())
        # One that is just being dialled would have to be waited for, and who leaves by Ctrl-C waits for nobody.
        closing = [threading.Thread(target=node.close, daemon=True) for node in nodes]
        for thread in closing:
            thread.start()
        over = time.monotonic() + CLOSE_S
        for thread in closing:
            thread.join(timeout=max(0.0, over - time.monotonic()))

    def __enter__(self) -> NodePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_transport(target: Target, pool: NodePool) -> Transport:
    """The way into `target`: its node, or its container on that node. Connects to nothing yet."""
    node = pool.node(target.ssh, target=target.name)
    if target.vmid is None:
        return node
    from orchestrator.transport.pct import PctTransport

    return PctTransport(node, target.vmid, node=target.ssh, target=target.name, attach=target.attach)

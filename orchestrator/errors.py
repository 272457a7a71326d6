"""Everything that can go wrong and be said to a person; each error maps to one exit code.

An error says what happened, where (target, run id), why, and what to type next. The command line prints it without a
traceback; a traceback therefore always means a bug of specctl itself.
"""

from __future__ import annotations


class SpecctlError(Exception):
    """Base of all errors meant for people. `hint` is the next thing to type or look at."""

    exit_code = 1

    def __init__(self, message: str, *, target: str | None = None, run_id: str | None = None, hint: str | None = None):
        super().__init__(message)
        self.message, self.target, self.run_id, self.hint = message, target, run_id, hint

    def __str__(self) -> str:
        where = " ".join(part for part in (self.target, self.run_id) if part)
        return f"{where}: {self.message}" if where else self.message


# exit 1: the answer is no
class NotVerified(SpecctlError):
    """A launch did not reach the rung that was asked for."""


class PreflightError(SpecctlError):
    """Something the run needs is missing on the target; nothing was started."""


class PythonError(PreflightError):
    """The target has no Python there that can run the agent."""


class BundleError(SpecctlError):
    """The code could not be bundled or did not arrive whole."""


# exit 2: usage or configuration
class ConfigError(SpecctlError):
    exit_code = 2


# exit 3: could not know
class UnreachableError(SpecctlError):
    """The target could not be asked, so nothing is known of its runs."""

    exit_code = 3
    may_pass = True
    """Whether asking again may help, with nothing changed."""


class HostKeyError(UnreachableError):
    """The node's host key is unknown, or is not the one on record."""

    may_pass = False


class AuthError(UnreachableError):
    """The node refused every key that was offered."""

    may_pass = False


class DeadlineExceeded(UnreachableError):
    """No complete answer came within the deadline."""


class LinkLost(UnreachableError):
    """The connection ended before the answer was complete."""


class ContainerError(UnreachableError):
    """`pct` itself failed: no such container, not running, frozen, on another node."""


class AgentError(UnreachableError):
    """The agent in the container could not run or did not answer in a frame."""

    may_pass = False


class NoAnswer(AgentError):
    """The agent ended without a frame: it, or what carried it, was ended."""

    may_pass = True


class IdentityError(AgentError):
    """What stands under a run's name cannot be shown to be that run's."""


# exit 4: no such run or target
class NotFound(SpecctlError):
    exit_code = 4


class Ambiguous(NotFound):
    """More than one run fits; the message lists them."""

"""Whether a host is the one it should be: its key against the user's known_hosts files, then against specctl's own.

Nothing is ever asked, and the user's files are only read. What `--accept-new` trusts is written into a file of
specctl's own, `known_hosts` in its state folder, which is read after the user's and never outvotes them.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko

from orchestrator import index, whole
from orchestrator.errors import HostKeyError
from orchestrator.record import record
from orchestrator.transport import known_hosts
from orchestrator.transport.known_hosts import HostEntry, Judgement
from orchestrator.transport.ssh_options import SshOptions

Trust = Callable[[str], None]
"""Is told, in a sentence, of each host that was new and is trusted from now on."""


def own_file() -> Path:
    """Where the keys are that `--accept-new` trusted."""
    return index.folder() / "known_hosts"


@record
class Records:
    """What is on record of hosts' keys, as it was read just now."""

    theirs: list[HostEntry]
    """Of the user's files and the system's."""
    own: list[HostEntry]

    def types(self, name: str) -> list[str]:
        """The key types to ask for first."""
        return known_hosts.types_on_record([*self.theirs, *self.own], name)


def read(options: SshOptions) -> Records:
    """Raises nothing for files that are missing or broken."""
    return Records(theirs=known_hosts.read(options.known_hosts_files), own=known_hosts.read([str(own_file())]))


def check(key: paramiko.PKey, records: Records, options: SshOptions, *, target: str, trust: Trust | None) -> None:
    """Raises `HostKeyError` unless `key` is on record. A host without any record is put there, if `trust` is told."""
    judgement = _judge(key, records, options)
    if judgement.standing == "known":
        return
    if judgement.standing == "unknown" and trust is not None:
        _remember(key, options, target, trust)
        return
    raise _error(judgement, key, options, target)


def _judge(key: paramiko.PKey, records: Records, options: SshOptions) -> Judgement:
    name = options.record_name
    bare = options.hostname if name == options.where else None
    theirs = known_hosts.judge(records.theirs, name, key.get_name(), key.asbytes(), bare_name=bare)
    if theirs.standing != "unknown":
        return theirs
    own = known_hosts.judge(records.own, name, key.get_name(), key.asbytes())
    return theirs if own.standing == "unknown" else own


def _remember(key: paramiko.PKey, options: SshOptions, target: str, trust: Trust) -> None:
    path = own_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            # Somebody else may have met the host meanwhile, and another key.
            judgement = _judge(key, Records(theirs=[], own=known_hosts.read([str(path)])), options)
            if judgement.standing == "unknown":
                _append(path, f"{options.record_name} {key.get_name()} {base64.b64encode(key.asbytes()).decode()}\n")
    except OSError as error:
        raise HostKeyError(
            f"the host key of {options.where} is new, and cannot be remembered in {path}: {error.strerror}",
            target=target,
            hint="make that file writable, or set XDG_STATE_HOME to a folder that is",
        ) from error
    if judgement.standing == "unknown":
        trust(f"{options.where} is trusted from now on, by {_shown(key)} in {path}")
    elif judgement.standing != "known":
        raise _error(judgement, key, options, target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _append(path: Path, line: str) -> None:
    """The file with one more line, whole at any moment."""
    before = path.read_bytes() if path.exists() else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    whole.write_whole(path, before + line.encode(), mode=0o600, durable=True)


# --- what to say ----------------------------------------------------------------------------------------------------


def _error(judgement: Judgement, key: paramiko.PKey, options: SshOptions, target: str) -> HostKeyError:
    shown = _shown(key)
    say = {"revoked": _revoked, "changed": _changed}.get(judgement.standing, _unknown)
    message, hint = say(judgement, shown, options)
    return HostKeyError(message, target=target, hint=hint)


def _shown(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {known_hosts.fingerprint(key.asbytes())}"


def _revoked(judgement: Judgement, shown: str, options: SshOptions) -> tuple[str, str]:
    line = f"{judgement.entries[0].file}:{judgement.entries[0].line}"
    return (
        f"the host key of {options.where} is revoked by {line}: the server shows {shown}",
        f"give the host a new key (ssh-keygen -A there), or remove that line if it is wrong: {line}",
    )


def _changed(judgement: Judgement, shown: str, options: SshOptions) -> tuple[str, str]:
    recorded = ", ".join(
        f"{entry.key_type} {known_hosts.fingerprint(entry.key)} ({entry.file}:{entry.line})"
        for entry in judgement.entries
    )
    files = dict.fromkeys(entry.file for entry in judgement.entries)
    remove = " && ".join(_forget(file, options.record_name) for file in files)
    shared = any(set(entry.patterns) & set("*?,") for entry in judgement.entries)
    return (
        f"the host key of {options.where} has changed: on record is {recorded}, but the server shows {shown}; "
        "either it was installed anew, or somebody is in between",
        f"if you know why it changed{' (the line is about other hosts, too)' if shared else ''}: {remove}",
    )


def _forget(file: str, name: str) -> str:
    argv = ["ssh-keygen", "-f", file, "-R", name]
    return shlex.join(argv if os.access(file, os.W_OK) else ["sudo", *argv])


def _unknown(judgement: Judgement, shown: str, options: SshOptions) -> tuple[str, str]:
    there = [file for file in options.known_hosts_files if Path(file).is_file()]
    on_record = f"{' and '.join(there)} has none for it" if there else "there is no known_hosts file"
    more = ""
    ask = ["-o", "StrictHostKeyChecking=ask"]
    if judgement.authority:
        more = (
            "; a @cert-authority line names it, but specctl cannot check host certificates: "
            "its plain key has to be on record as well"
        )
        # Else `ssh` would be content with the certificate, and record nothing.
        ask += ["-o", f"HostKeyAlgorithms={shown.split()[0]}"]
    elif options.verify_by_dns:
        more = "; VerifyHostKeyDNS is set, but specctl asks no DNS for keys"
    hint = f"compare that with the host's own (ssh-keygen -lf /etc/ssh/{_public_file(shown)} there), then "
    if options.known_hosts_files and options.known_hosts_files[0] != "/dev/null":
        hint += f"accept it: {options.ssh_command_with(ask)} true; or "
    return (
        f"the host key of {options.where} is not known: the server shows {shown}, "
        f"and {on_record}{more}",
        f"{hint}let specctl trust it as it is now: specctl --accept-new status",
    )


def _public_file(shown: str) -> str:
    """The name under which sshd keeps such a key."""
    kind = shown.split()[0].removeprefix("ssh-").partition("-")[0]
    return f"ssh_host_{kind}_key.pub"

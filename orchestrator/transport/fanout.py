"""Many containers of one node in one command: `fanout` sends all requests at once and yields each answer as it comes.

The legs run on the node, with its sh, tar, xargs, timeout and flock and nothing else: a bounded number at once, each
ended there when its time is up, each answer sent whole. Requests travel as a tar archive on stdin, so nothing of them
is ever quoted. A frozen container answers at once, and no leg waits for another call's: nothing is shared between two.
"""

from __future__ import annotations

import io
import math
import re
import secrets
import tarfile
from collections.abc import Iterator, Sequence
from itertools import pairwise

from orchestrator.errors import ContainerError, DeadlineExceeded, SpecctlError, UnreachableError
from orchestrator.inventory import Attach
from orchestrator.record import record
from orchestrator.transport.base import Completed, Stream, Transport
from orchestrator.transport.node import ENTER, LOOK, ON_NODE
from orchestrator.transport.pct import PctTransport
from orchestrator.transport.pct_errors import Entrance, seen_in

PARALLEL = 8
_OVERHEAD_S = 20.0
"""Connecting, unpacking, and the node being busy."""

_BOOT = r"""
export TOKEN="$1" LIMIT_S="$2" FOLDER SPECCTL_UID
SPECCTL_UID=$(id -u) || exit 1
FOLDER=$(mktemp -d /dev/shm/specctl.XXXXXXXX 2>/dev/null || mktemp -d) || exit 1
trap 'rm -rf "$FOLDER"' EXIT
trap 'exit 129' HUP INT TERM
tar --no-same-owner -xf - -C "$FOLDER" || exit 1
cd "$FOLDER/legs" || exit 1
printf '%s\0' * | xargs -0 -n 1 -P "$3" sh ../leg
"""

_LEG = r"""
leg=${FOLDER:?}/legs/${1:?}
cd / || exit 1
: >"$leg/out"
: >"$leg/err"
: >"$leg/seen"
exec 3<"$leg/out" 4<"$leg/err"
xargs -0 -x -a "$leg/argv" sh "$FOLDER/run" "$leg" 2>>"$leg/err" 3<&- 4<&-
[ -s "$leg/code" ] || echo "none 0" >"$leg/code"
read -r code <"$leg/code"
out=$(stat -c %s - <&3) err=0 seen=0
[ ! -s /proc/self/fd/4 ] || err=$(stat -c %s - <&4)
[ ! -s "$leg/seen" ] || seen=$(stat -c %s "$leg/seen")
{
    flock 9
    printf '\036specctl-leg %s %s %s %s %s %s\n' "$TOKEN" "$1" "$code" "$out" "$err" "$seen"
    head -c "$out" <&3
    [ "$err" = 0 ] || head -c "$err" <&4
    [ "$seen" = 0 ] || cat "$leg/seen"
} 9>"$FOLDER/lock"
true 2>/dev/null >"$leg/out" >"$leg/err" || rm -rf "$leg"
exit 0
"""
"""The answers are opened before anything runs: lxc-attach gives the files it writes to to root, whoever asked. Unset
variables end it: a login shell that was replaced by another one would run the archive itself, line by line. With fifty
containers a program more is fifty more: the shell does by itself what it can."""

_RUN = (
    ENTER
    + LOOK
    + r"""
leg=$1 vmid=$2 attach=$3
shift 3
read -r began _ </proc/uptime
exec >>"$leg/out" 2>>"$leg/err" <"$leg/stdin"
if [ -z "$vmid" ]; then
    timeout -s KILL "$LIMIT_S" "$@"
    code=$?
else
    (enter "$vmid" "$LIMIT_S" "$attach" "$@")
    code=$?
    [ $code != 137 ] || frozen "$vmid"
    [ $code = 0 ] || look "$vmid" >"$leg/seen"
fi
read -r ended _ </proc/uptime
echo "$code $((${ended%.*} - ${began%.*}))" >"$leg/code"
"""
)


@record
class Request:
    """One command for one container of the node, or for the node itself."""

    vmid: int | None
    argv: list[str]
    stdin: bytes = b""
    attach: Attach = "pct"
    target: str | None = None
    """The name that errors carry; the node's when None."""


@record
class Leg:
    """The answer to the request at `index`: what came back, or why nothing did."""

    index: int
    result: Completed | SpecctlError


def fanout(
    node: Transport,
    requests: Sequence[Request],
    *,
    leg_timeout_s: float,
    parallel: int = PARALLEL,
    ssh: str | None = None,
) -> Iterator[Leg]:
    """Run `requests` on the node that `node` reaches (never a container), and yield their legs as they end.

    Every request gets exactly one leg; nothing is raised for what happens to one. `ssh` is the node's name for hints.
    """
    pending = dict(enumerate(requests))
    if not pending:
        return
    token = secrets.token_hex(8)
    waves = math.ceil(len(requests) / parallel)
    argv = [*ON_NODE, _BOOT, "specctl-fanout", token, str(math.ceil(leg_timeout_s)), str(parallel)]
    failure: SpecctlError
    try:
        deadline_s = waves * (leg_timeout_s + 2) + _OVERHEAD_S
        with node.stream(argv, stdin=_pack(requests), deadline_s=deadline_s) as stream:
            reader = _Reader(token)
            for chunk in stream:
                for answer in reader.feed(chunk):
                    request = pending.pop(answer.index, None)
                    if request is not None:
                        result = _result(node, request, ssh, leg_timeout_s, answer)
                        yield Leg(index=answer.index, result=result)
            if not pending:
                return
            failure = _unrun(node, next(iter(pending.values())), ssh, stream)
    except SpecctlError as error:
        failure = error
    for index, request in pending.items():
        named = type(failure)(failure.message, target=request.target or node.target, hint=failure.hint)
        yield Leg(index=index, result=named)


def _pack(requests: Sequence[Request]) -> bytes:
    """The archive: the two scripts, and for each leg its argv (NUL after each, vmid and attach first) and its stdin."""
    files = {"leg": _LEG.encode(), "run": _RUN.encode()}
    for index, request in enumerate(requests):
        words = ["" if request.vmid is None else str(request.vmid), request.attach, *request.argv]
        files[f"legs/{index:06}/argv"] = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
        files[f"legs/{index:06}/stdin"] = request.stdin
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o600
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


@record
class _Answer:
    """What came back of one leg."""

    index: int
    code: int | None
    elapsed_s: int
    stdout: bytes
    stderr: bytes
    seen: bytes
    """What the node showed of the container, if the command failed."""


class _Reader:
    """Feed bytes, get whole answers."""

    def __init__(self, token: str) -> None:
        self._header = re.compile(rb"\x1especctl-leg %s (\d+) (\d+|none) (\d+) (\d+) (\d+) (\d+)\n" % token.encode())
        self._buffer = bytearray()
        self._needed = 0

    def feed(self, data: bytes) -> Iterator[_Answer]:
        self._buffer += data
        # A large answer comes in many chunks: look again only when it can be whole.
        while len(self._buffer) >= self._needed and (match := self._header.search(self._buffer)):
            index, code, elapsed_s = int(match[1]), None if match[2] == b"none" else int(match[2]), int(match[3])
            ends = [match.end()]
            for size in match.group(4, 5, 6):
                ends.append(ends[-1] + int(size))
            if len(self._buffer) < ends[-1]:
                self._needed = ends[-1]
                return
            stdout, stderr, seen = (bytes(self._buffer[start:end]) for start, end in pairwise(ends))
            del match  # it holds the buffer, which could then not shrink
            del self._buffer[: ends[-1]]
            self._needed = 0
            yield _Answer(index=index, code=code, elapsed_s=elapsed_s, stdout=stdout, stderr=stderr, seen=seen)


def _unrun(node: Transport, request: Request, ssh: str | None, stream: Stream) -> SpecctlError:
    """Why the node's script ended before its time."""
    done = Completed(exit_code=stream.exit_code, stdout=b"", stderr=stream.stderr)
    if request.vmid is not None and (error := PctTransport(node, request.vmid, node=ssh).explain(done)) is not None:
        return error
    said = " ".join(stream.stderr.decode(errors="replace").split())[-500:]
    if re.search(r"\btar: .*archive", said):
        return UnreachableError(
            "the request did not arrive whole: a shell start-up file there that reads from stdin takes it away",
            hint="ask only `if [ -t 0 ]` in it, or set it aside",
        )
    return UnreachableError(
        f"the node did not run it: {said or stream.why_unknown or f'exit code {stream.exit_code}'}",
        hint="is there room in /dev/shm or /tmp of the node?",
    )


def _result(
    node: Transport, request: Request, ssh: str | None, leg_timeout_s: float, answer: _Answer
) -> Completed | SpecctlError:
    target, said = request.target or node.target, answer.stderr.decode(errors="replace")
    if answer.code is None:
        words = " ".join(said.split())[-300:]
        return UnreachableError(f"the node did not run it: {words or 'it left no exit code'}", target=target)
    if request.vmid is not None and not answer.stdout and answer.code != 0:
        entrance = Entrance(vmid=request.vmid, ssh=ssh, attach=request.attach)
        found = entrance.reason(said, answer.code, seen_in(answer.seen.decode(errors="replace")))
        if found is not None:
            return ContainerError(found[0], target=target, hint=found[1])
    # A program may be killed by others, too, but hardly that late.
    if answer.code == 137 and answer.elapsed_s >= int(leg_timeout_s):
        return DeadlineExceeded(
            f"no complete answer within {leg_timeout_s:g} s", target=target,
            hint=Entrance(vmid=vmid, ssh=ssh, attach=request.attach).late if (vmid := request.vmid) else node.late,
        )  # fmt: skip
    return Completed(exit_code=answer.code, stdout=answer.stdout, stderr=answer.stderr)

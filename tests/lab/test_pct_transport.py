"""The pct transport and the fan-out against a real node's sshd, `pct` and LXC containers."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator

import pytest

from orchestrator.errors import ContainerError, DeadlineExceeded, LinkLost, UnreachableError
from orchestrator.inventory import Target
from orchestrator.transport import Completed, Leg, NodePool, Request, Transport, fanout, open_transport
from tests.lab.lab import Lab, wait_until

STOPPED, FROZEN, MISSING = 183, 184, 999
NASTY = ["", "a b", 'it\'s "q" $HOME `x` $(y)', "line\nbreak\n", "*?[a]", "-n", "--", "--keep-env", "ünï☃", "\\ ; & |"]
ECHO = ["python3", "-c", "import os, sys; print('|'.join(os.fsencode(a).hex() for a in sys.argv[1:]))", *NASTY]
ECHOED = ("|".join(text.encode().hex() for text in NASTY) + "\n").encode()


@pytest.fixture(scope="module")
def containers(lab: Lab) -> Iterator[Lab]:
    """The lab with, besides 101 and 102, a stopped and a frozen container."""
    lab.define(STOPPED)
    lab.container(FROZEN)
    lab.freeze(FROZEN)
    yield lab
    lab.thaw(FROZEN)
    lab.stop(FROZEN)
    for vmid in (STOPPED, FROZEN):
        lab.undefine(vmid)


@pytest.fixture
def pool(lab: Lab) -> Iterator[NodePool]:
    with NodePool(ssh_config=str(lab.ssh_config)) as pool:
        yield pool


def into(pool: NodePool, vmid: int) -> Transport:
    return open_transport(Target(name=f"ct{vmid}", ssh="pve", vmid=vmid), pool)


def test_a_command_runs_in_the_container_with_its_stdin_streams_and_exit_code(lab: Lab, pool: NodePool) -> None:
    done = into(pool, 101).run(["sh", "-c", "cat; hostname; echo err >&2; exit 7"], stdin=b"in\n", deadline_s=60)
    assert done == Completed(exit_code=7, stdout=b"in\nct101\n", stderr=b"err\n")


def test_every_argument_arrives_in_the_container_byte_for_byte(lab: Lab, pool: NodePool) -> None:
    assert into(pool, 101).run(ECHO, deadline_s=60).stdout == ECHOED


def test_a_large_stdin_arrives_whole(lab: Lab, pool: NodePool) -> None:
    block = os.urandom(2**20)
    done = into(pool, 102).run(["sha256sum"], stdin=(block for _ in range(64)), deadline_s=120)
    assert done.stdout.split()[0].decode() == hashlib.sha256(block * 64).hexdigest()


def test_exit_codes_that_pct_uses_too_are_the_program_s_own(lab: Lab, pool: NodePool) -> None:
    transport = into(pool, 101)
    for code in (1, 2, 4, 124, 255):
        done = transport.run(["sh", "-c", f"exit {code}"], deadline_s=60)
        assert done.exit_code == code
        assert transport.explain(done) is None
    assert transport.run(["sh", "-c", "kill -9 $$"], deadline_s=60).exit_code == 137


@pytest.mark.parametrize(
    ("vmid", "message", "hint"),
    [
        (STOPPED, f"container {STOPPED} is not running", f"ssh pve pct start {STOPPED}"),
        (FROZEN, f"container {FROZEN} is frozen", f"ssh pve lxc-unfreeze -n {FROZEN}"),
        (MISSING, f"there is no container {MISSING} on node pve; its containers: 101, 102", "ssh pve pct list"),
    ],
)
def test_a_container_that_cannot_answer_says_why_and_what_to_do(
    containers: Lab, pool: NodePool, vmid: int, message: str, hint: str
) -> None:
    transport = into(pool, vmid)
    error = transport.explain(transport.run(["true"], deadline_s=60))
    assert isinstance(error, ContainerError)
    assert str(error).startswith(f"ct{vmid}: {message}")
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    ("folder", "message"),
    [("lxc", "container 250 is on node pve2, not on pve"), ("qemu-server", "250 is a virtual machine on node pve2")],
)
def test_a_container_of_another_node_is_named_with_that_node(
    lab: Lab, pool: NodePool, folder: str, message: str
) -> None:
    lab.on_node(["sh", "-c", f"mkdir -p /etc/pve/nodes/pve2/{folder} && touch /etc/pve/nodes/pve2/{folder}/250.conf"])
    try:
        transport = into(pool, 250)
        error = transport.explain(transport.run(["true"], deadline_s=60))
        assert isinstance(error, ContainerError)
        assert error.message.startswith(message)
    finally:
        lab.on_node(["rm", "-r", "/etc/pve/nodes/pve2"])


def test_a_program_that_the_container_does_not_have_is_named(lab: Lab, pool: NodePool) -> None:
    transport = into(pool, 101)
    done = transport.run(["no-such-program"], deadline_s=60)
    assert done.exit_code == 127
    assert 'container 101 cannot run "no-such-program"' in str(transport.explain(done))


def test_past_the_deadline_nothing_lingers_in_the_container(lab: Lab, pool: NodePool) -> None:
    with pytest.raises(DeadlineExceeded):
        into(pool, 101).run(["sh", "-c", "trap '' TERM HUP; while :; do sleep 31.7; done"], deadline_s=2)
    wait_until(lambda: lab.inside(101, ["pgrep", "-f", "sleep 31.7"]).returncode == 1, "it ended", timeout_s=30)


def test_a_stream_out_of_a_container_ends_when_it_falls_silent(lab: Lab, pool: NodePool) -> None:
    with into(pool, 101).stream(["sh", "-c", "echo beat; exec sleep 41.7"], deadline_s=20, idle_s=2) as stream:
        chunks = iter(stream)
        assert next(chunks) == b"beat\n"
        with pytest.raises(LinkLost, match="ct101: nothing was heard for 2 s"):
            next(chunks)


# --- fan-out --------------------------------------------------------------------------------------------------------


def collect(legs: Iterator[Leg], count: int) -> list[object]:
    """The results by index, each exactly once."""
    found = {}
    for leg in legs:
        assert leg.index not in found
        found[leg.index] = leg.result
    assert sorted(found) == list(range(count))
    return [found[index] for index in range(count)]


def left_on_node(lab: Lab) -> str:
    return lab.on_node(["sh", "-c", "ls -d /dev/shm/specctl.* /tmp/tmp.* 2>/dev/null"]).stdout


def test_all_containers_of_a_node_answer_in_one_command_each_for_itself(containers: Lab, pool: NodePool) -> None:
    vmids = [101, 102, STOPPED, FROZEN, MISSING, None]
    script = 'cat; printf "%s." "$@"; echo "to stderr" >&2; exit 5'
    requests = [
        Request(vmid=vmid, argv=["sh", "-c", script, "sh", *NASTY], stdin=b"in\n", target=f"t{vmid}") for vmid in vmids
    ]
    node = pool.node("pve")
    ok = Completed(exit_code=5, stdout=b"in\n" + "".join(f"{n}." for n in NASTY).encode(), stderr=b"to stderr\n")
    results = collect(fanout(node, requests, leg_timeout_s=30, ssh="pve"), len(vmids))
    assert results[0] == results[1] == results[5] == ok
    assert [str(error) for error in results[2:5]] == [
        f"t{STOPPED}: container {STOPPED} is not running",
        f"t{FROZEN}: container {FROZEN} is frozen: nothing in it can answer",
        f"t{MISSING}: there is no container {MISSING} on node pve; its containers: 101, 102, {STOPPED}, {FROZEN}",
    ]
    assert all(isinstance(error, ContainerError) and error.hint for error in results[2:5])
    wait_until(lambda: left_on_node(containers) == "", "the node is clean")


def test_large_answers_of_many_legs_do_not_mix(lab: Lab, pool: NodePool) -> None:
    script = "head -c 700000 /dev/zero | tr '\\0' \"$1\"; head -c 300000 /dev/zero | tr '\\0' \"$1\" >&2"
    letters = "abcdefghijkl"
    requests = [
        Request(vmid=101 + number % 2, argv=["sh", "-c", script, "sh", letter]) for number, letter in enumerate(letters)
    ]
    for letter, result in zip(letters, collect(fanout(pool.node("pve"), requests, leg_timeout_s=60), 12), strict=True):
        code = letter.encode()
        assert result == Completed(exit_code=0, stdout=code * 700_000, stderr=code * 300_000)


def test_a_stuck_leg_is_ended_on_the_node_and_costs_only_itself(lab: Lab, pool: NodePool) -> None:
    stuck = ["sh", "-c", "trap '' TERM HUP; echo part; while :; do sleep 51.7; done"]
    requests = [Request(vmid=101, argv=stuck, target="gpu1"), Request(vmid=102, argv=["echo", "here"])]
    legs = fanout(pool.node("pve"), requests, leg_timeout_s=3)
    first = next(legs)
    assert (first.index, first.result) == (1, Completed(exit_code=0, stdout=b"here\n", stderr=b""))
    [second] = legs
    assert isinstance(second.result, DeadlineExceeded)
    assert str(second.result) == "gpu1: no complete answer within 3 s"
    wait_until(lambda: lab.inside(101, ["pgrep", "-f", "sleep 51.7"]).returncode == 1, "it ended", timeout_s=30)
    wait_until(lambda: left_on_node(lab) == "", "the node is clean")


def test_a_program_s_own_exit_124_is_no_timeout(lab: Lab, pool: NodePool) -> None:
    requests = [Request(vmid=101, argv=["sh", "-c", f"exit {code}"]) for code in (124, 137, 255, 123)]
    results = collect(fanout(pool.node("pve"), requests, leg_timeout_s=60), 4)
    assert [result.exit_code for result in results if isinstance(result, Completed)] == [124, 137, 255, 123]


def test_a_second_call_does_not_queue_behind_a_stuck_leg(lab: Lab, pool: NodePool) -> None:
    node, go = pool.node("pve"), ["sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.05; done; rm /tmp/go"]
    waiting: list[object] = []

    def wait_for_go() -> None:
        waiting.extend(collect(fanout(node, [Request(vmid=101, argv=go)], leg_timeout_s=60), 1))

    thread = threading.Thread(target=wait_for_go)
    thread.start()
    wait_until(lambda: lab.inside(101, ["pgrep", "-f", "/tmp/go"]).returncode == 0, "the first call waits")
    [result] = collect(fanout(node, [Request(vmid=101, argv=["echo", "quick"])], leg_timeout_s=60), 1)
    assert result == Completed(exit_code=0, stdout=b"quick\n", stderr=b"")
    assert waiting == [], "the first call ended before the second: nothing was shown"
    lab.inside(101, ["touch", "/tmp/go"])
    thread.join(60)
    assert waiting == [Completed(exit_code=0, stdout=b"", stderr=b"")]


def test_a_node_that_is_not_there_gives_every_request_its_own_error(lab: Lab) -> None:
    with NodePool(ssh_config=str(lab.ssh_config)) as pool:
        requests = [Request(vmid=101, argv=["true"], target="a"), Request(vmid=102, argv=["true"], target="b")]
        results = collect(fanout(pool.node("root@127.0.0.1:1"), requests, leg_timeout_s=5), 2)
    assert all(isinstance(result, UnreachableError) for result in results)
    assert [str(result).split(":")[0] for result in results] == ["a", "b"]


def test_no_requests_are_no_connection(lab: Lab, pool: NodePool) -> None:
    assert list(fanout(pool.node("root@127.0.0.1:1"), [], leg_timeout_s=5)) == []

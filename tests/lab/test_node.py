"""Nodes as people have them: a login that is not root, other shells and locales, a host environment that leaks.

All of it on a real node: real sshd, sudo, shells and LXC, and the `pct` stand-in.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import pytest

from orchestrator.errors import ContainerError, DeadlineExceeded, SpecctlError
from orchestrator.inventory import Attach, Target
from orchestrator.transport import Completed, Leg, NodePool, Request, Transport, fanout, open_transport
from tests.driver import Specctl, poll_until
from tests.lab.lab import USER, Lab, wait_until

LOGIN = f"{USER}@pve"
RULE = f"{USER} ALL=(root) NOPASSWD: /usr/local/sbin/pct exec 101 -- *"
NASTY = [
    "",
    "a b",
    'it\'s "q" $HOME `x` $(y)',
    "line\nbreak\n",
    "*?[a]",
    "-n",
    "--",
    "--keep-env",
    "ünï☃",
    "\\ ; & |",
    "a\\'b",
]
STUBBORN = "trap '' TERM HUP; echo part; while :; do sleep {}; done"


@pytest.fixture
def pool(lab: Lab) -> Iterator[NodePool]:
    with NodePool(ssh_config=str(lab.ssh_config)) as pool:
        yield pool


@pytest.fixture
def sudo(lab: Lab) -> Iterator[Lab]:
    """The lab, whose other login may enter container 101 and do nothing else."""
    lab.set_sudo(RULE)
    yield lab
    lab.set_sudo("")


def into(pool: NodePool, vmid: int, *, ssh: str = LOGIN, attach: Attach = "auto") -> Transport:
    return open_transport(Target(name=f"ct{vmid}", ssh=ssh, vmid=vmid, attach=attach), pool)


def results(legs: Iterator[Leg]) -> list[Completed | SpecctlError]:
    return [leg.result for leg in sorted(legs, key=lambda leg: leg.index)]


def runs_inside(lab: Lab, pattern: str, vmid: int = 101) -> bool:
    return lab.inside(vmid, ["pgrep", "-f", pattern]).returncode == 0


@contextlib.contextmanager
def hidden(lab: Lab, path: str) -> Iterator[None]:
    """The node does not have this program."""
    assert lab.on_node(["mount", "--bind", "/dev/null", path]).returncode == 0
    try:
        yield
    finally:
        assert lab.on_node(["umount", path]).returncode == 0


@contextlib.contextmanager
def home_file(lab: Lab, name: str, text: str) -> Iterator[None]:
    """A file in the home directory of root on the node."""
    assert lab.on_node(["sh", "-c", 'printf %s "$1" >/root/"$2"', "sh", text, name]).returncode == 0
    try:
        yield
    finally:
        lab.on_node(["rm", f"/root/{name}"])


# --- a login that is not root ---------------------------------------------------------------------------------------


def test_a_user_whose_sudo_allows_just_pct_exec_enters_with_every_byte(sudo: Lab, pool: NodePool) -> None:
    script = 'cat; printf "%s." "$@"; id -u; echo err >&2; exit 7'
    done = into(pool, 101).run(["sh", "-c", script, "sh", *NASTY], stdin=b"in\n", deadline_s=60)
    out = b"in\n" + "".join(f"{word}." for word in NASTY).encode() + b"0\n"
    assert done == Completed(exit_code=7, stdout=out, stderr=b"err\n")


def test_that_line_of_sudoers_grants_nothing_else(sudo: Lab, pool: NodePool) -> None:
    for command in (["pct", "list"], ["pct", "exec", "102", "--", "id"], ["pct", "exec", "101", "--keep-env", "1", "--", "id"],
                    ["pct", "push", "101", "/etc/shadow", "/x"], ["lxc-attach", "-n", "101"], ["sh"]):  # fmt: skip
        done = pool.node(LOGIN).run(["sudo", "-n", *command], deadline_s=60)
        assert (done.exit_code, done.stderr) == (1, b"sudo: a password is required\n"), command


def test_the_fan_out_runs_as_the_user_and_only_its_legs_as_root(sudo: Lab, pool: NodePool) -> None:
    requests = [
        Request(vmid=None, argv=["id", "-un"]),
        Request(vmid=101, argv=["sh", "-c", "id -un; cat"], stdin=b"in"),
        Request(vmid=102, argv=["id"], target="b"),
    ]
    node, inside, refused = results(fanout(pool.node(LOGIN), requests, leg_timeout_s=60, ssh=LOGIN))
    assert node == Completed(exit_code=0, stdout=f"{USER}\n".encode(), stderr=b"")
    assert inside == Completed(exit_code=0, stdout=b"root\nin", stderr=b"")
    assert isinstance(refused, ContainerError)
    assert str(refused).startswith(f"b: container 102 is entered as root of {LOGIN}, but the login is {USER}, and sudo")
    wait_until(lambda: sudo.on_node(["ls", "/dev/shm"]).stdout == "", "the node is clean")


def test_what_a_user_may_not_kill_is_ended_all_the_same(sudo: Lab, pool: NodePool) -> None:
    argv = ["sh", "-c", STUBBORN.format("61.7")]
    [late] = results(fanout(pool.node(LOGIN), [Request(vmid=101, argv=argv, target="a")], leg_timeout_s=2))
    assert isinstance(late, DeadlineExceeded) and str(late) == "a: no complete answer within 2 s"
    with pytest.raises(DeadlineExceeded):
        into(pool, 101).run(["sh", "-c", STUBBORN.format("62.7")], deadline_s=1)
    wait_until(lambda: not runs_inside(sudo, "sleep 6[12].7"), "it ended", timeout_s=30)
    wait_until(lambda: sudo.on_node(["pgrep", "-x", "sudo"]).returncode == 1, "sudo ended", timeout_s=30)


def test_a_frozen_container_is_seen_without_root_before_and_while_it_is_asked(sudo: Lab, pool: NodePool) -> None:
    answers: list[Completed | SpecctlError] = []
    argv = ["sh", "-c", "sleep 63.7"]
    legs = fanout(pool.node(LOGIN), [Request(vmid=101, argv=argv)], leg_timeout_s=2, ssh=LOGIN)
    asking = threading.Thread(target=lambda: answers.extend(results(legs)))
    asking.start()
    wait_until(lambda: runs_inside(sudo, "sleep 63.7"), "it is being asked")
    sudo.freeze(101)
    try:
        again = into(pool, 101)
        error = again.explain(again.run(["true"], deadline_s=60))
        asking.join(60)
        frozen = "container 101 is frozen: nothing in it can answer"
        assert error is not None and error.message == frozen
        assert error.hint == f"thaw it: as root on {LOGIN}: lxc-unfreeze -n 101"
        [answer] = answers
        assert isinstance(answer, ContainerError) and answer.message == frozen
    finally:
        sudo.thaw(101)
    wait_until(lambda: not runs_inside(sudo, "sleep 63.7"), "what hung has ended by itself", timeout_s=30)


@pytest.mark.parametrize(
    ("rule", "trouble"),
    [
        ("", "sudo asks for a password"),
        (f"Defaults:{USER} !authenticate", "sudo does not let it"),
        (f"Defaults:{USER} !authenticate\n{USER} ALL=(root) /usr/bin/true", "sudo does not let it"),
        (f"Defaults:{USER} requiretty\n{RULE}", "sudo fails (sudo: sorry, you must have a tty to run sudo)"),
    ],
)
def test_each_way_of_not_being_allowed_is_one_message(lab: Lab, pool: NodePool, rule: str, trouble: str) -> None:
    lab.set_sudo(rule)
    way = into(pool, 101)
    error = way.explain(way.run(["true"], deadline_s=60))
    lab.set_sudo("")
    assert isinstance(error, ContainerError)
    assert str(error) == f"ct101: container 101 is entered as root of {LOGIN}, but the login is {USER}, and {trouble}"
    assert error.hint is not None and RULE in error.hint and "docs/proxmox-access.md" in error.hint


@pytest.mark.parametrize("attach", ["auto", "lxc"])
def test_the_line_that_the_message_shows_is_the_one_that_helps(lab: Lab, pool: NodePool, attach: Attach) -> None:
    way = into(pool, 101, attach=attach)
    error = way.explain(way.run(["true"], deadline_s=60))
    assert error is not None and error.hint is not None
    line = error.hint.partition("write this line: ")[2].partition("   (")[0]
    lab.set_sudo(line)
    try:
        assert way.run(["printf", "%s", *NASTY], deadline_s=60).stdout == "".join(NASTY).encode()
    finally:
        lab.set_sudo("")


def test_a_node_without_sudo_says_what_to_install(lab: Lab, pool: NodePool) -> None:
    with hidden(lab, "/usr/bin/sudo"):
        way = into(pool, 101)
        error = way.explain(way.run(["true"], deadline_s=60))
    assert error is not None and error.message.endswith(f"but the login is {USER}, and there is no sudo")
    assert error.hint is not None and "apt-get install sudo, then visudo" in error.hint and RULE in error.hint


# --- attach: pct, lxc, auto -----------------------------------------------------------------------------------------


def test_what_only_looks_goes_past_pct_where_it_may_and_what_starts_something_does_not(
    lab: Lab, pool: NodePool
) -> None:
    auto, lxc, pct = (into(pool, 101, ssh="pve", attach=attach) for attach in ("auto", "lxc", "pct"))
    hello = Completed(exit_code=0, stdout=b"hello\n", stderr=b"")
    with hidden(lab, "/usr/local/sbin/pct"):
        for way in (auto.for_reads(), lxc, lxc.for_reads()):
            assert way.run(["echo", "hello"], deadline_s=60) == hello
        for way in (auto, pct, pct.for_reads()):
            error = way.explain(way.run(["echo", "hello"], deadline_s=60))
            assert error is not None and error.message == "pve has no pct, so it has no container 101"
        fast = [Request(vmid=101, argv=["echo", "hello"], attach=attach) for attach in ("auto", "lxc")]
        assert results(fanout(pool.node("pve"), fast, leg_timeout_s=60)) == [hello, hello]


def test_without_lxc_attach_auto_takes_pct_and_lxc_says_so(lab: Lab, pool: NodePool) -> None:
    with hidden(lab, "/usr/bin/lxc-attach"):
        assert into(pool, 101, ssh="pve").for_reads().run(["echo", "hello"], deadline_s=60).stdout == b"hello\n"
        way = into(pool, 101, ssh="pve", attach="lxc")
        error = way.explain(way.run(["true"], deadline_s=60))
    assert error is not None
    assert error.message == "pve has no lxc-attach, which attach: lxc of this target asks for"
    assert error.hint == "set attach: auto in hosts.yaml, or leave it out"


def test_a_user_without_the_right_to_lxc_attach_is_served_by_pct(sudo: Lab, pool: NodePool) -> None:
    assert into(pool, 101).for_reads().run(["echo", "hello"], deadline_s=60).stdout == b"hello\n"


def test_by_either_way_a_container_that_cannot_answer_says_the_same(lab: Lab, pool: NodePool) -> None:
    lab.on_node(["sh", "-c", "mkdir -p /etc/pve/nodes/pve2/lxc && touch /etc/pve/nodes/pve2/lxc/251.conf"])
    lab.define(185, lock="migrate")
    lab.freeze(102)
    lab.define(102, lock="backup")
    try:
        said: list[list[str]] = []
        for attach in ("auto", "lxc", "pct"):
            requests = [Request(vmid=vmid, argv=["true"], attach=attach) for vmid in (185, 102, 251, 998)]  # type: ignore[arg-type]
            answers = results(fanout(pool.node("pve"), requests, leg_timeout_s=60, ssh="pve"))
            said.append([str(error) for error in answers if isinstance(error, ContainerError)])
            said[-1].append(into(pool, 101, ssh="pve", attach=attach).run(["nope"], deadline_s=60).stderr.decode())  # type: ignore[arg-type]
    finally:
        lab.define(102)
        lab.thaw(102)
        lab.undefine(185)
        lab.on_node(["rm", "-r", "/etc/pve/nodes/pve2"])
    assert said[0] == said[1] == said[2]
    assert said[0][:4] == [
        "pve: container 185 is not running, and is locked (migrate): it cannot start before that has ended",
        "pve: container 102 is frozen and locked (backup): nothing in it can answer until that has ended",
        "pve: container 251 is on node pve2, not on pve",
        "pve: there is no container 998 on node pve; its containers: 101, 102, 185",
    ]


def test_a_lock_alone_keeps_nobody_out(lab: Lab, pool: NodePool) -> None:
    lab.define(102, lock="backup")
    try:
        for attach in ("auto", "lxc", "pct"):
            way = into(pool, 102, ssh="pve", attach=attach).for_reads()  # type: ignore[arg-type]
            assert way.run(["echo", "hello"], deadline_s=60) == Completed(exit_code=0, stdout=b"hello\n", stderr=b"")
    finally:
        lab.define(102)


def test_a_container_that_stops_under_a_command_is_told_as_stopped(lab: Lab, pool: NodePool) -> None:
    way = into(pool, 102, ssh="pve")
    done: list[Completed] = []
    asking = threading.Thread(target=lambda: done.append(way.run(["sleep", "64.7"], deadline_s=60)))
    asking.start()
    wait_until(lambda: runs_inside(lab, "sleep 64.7", 102), "it is being asked")
    lab.stop(102)
    try:
        asking.join(60)
        error = way.explain(done[0])
        assert isinstance(error, ContainerError)
        assert str(error) == "ct102: container 102 stopped while it was being asked"
    finally:
        lab.start(102)


# --- the login's shell ----------------------------------------------------------------------------------------------

NOISE = r"""
printf '\033[1;32mWelcome to pve\033[0m\nlast login: yesterday\n'
echo 'a warning' >&2
export LANG=de_DE.UTF-8 LC_ALL=de_DE.UTF-8 LANGUAGE=de CDPATH=/tmp ENV=/etc/profile
cd /tmp
sleep 0.3
"""


def echoes(pool: NodePool) -> None:
    """Commands and fan-out through the root login of the node bring every byte there, and the answer back."""
    script = 'printf "%s." "$@"; cat'
    out = "".join(f"{word}." for word in NASTY).encode() + b"in"
    done = into(pool, 101, ssh="pve").run(["sh", "-c", script, "sh", *NASTY], stdin=b"in", deadline_s=60)
    assert done.stdout.endswith(out) and done.exit_code == 0
    requests = [Request(vmid=vmid, argv=["sh", "-c", script, "sh", *NASTY], stdin=b"in") for vmid in (101, 102)]
    for result in results(fanout(pool.node("pve"), requests, leg_timeout_s=60)):
        assert result == Completed(exit_code=0, stdout=out, stderr=b"")


def test_a_start_up_file_may_print_colour_wait_and_change_folder_and_language(lab: Lab, pool: NodePool) -> None:
    with home_file(lab, ".bashrc", NOISE):
        assert b"Welcome" in pool.node("pve").run(["true"], deadline_s=60).stdout
        echoes(pool)
        way = into(pool, 998, ssh="pve")
        error = way.explain(way.run(["true"], deadline_s=60))
        assert error is not None and error.message.startswith(
            "there is no container 998 on node pve; its containers: 101, 102"
        )


@pytest.mark.parametrize("shell", ["/usr/bin/fish", "/bin/dash"])
def test_the_login_shell_may_be_another_one(lab: Lab, pool: NodePool, shell: str) -> None:
    with home_file(lab, ".lab-shell", f"{shell}\n"):
        echoes(pool)


@pytest.mark.parametrize("start_up", ["exec cat >/dev/null", "exit 3", "exec sh", "exec fish"])
def test_a_shell_that_does_not_run_commands_is_named_as_what_is_wrong(lab: Lab, pool: NodePool, start_up: str) -> None:
    with home_file(lab, ".bashrc", start_up):
        way = into(pool, 101, ssh="pve")
        secret = b'{"token": "1", "secrets": {"KEY": "hush"}}\n'
        error = way.explain(way.run(["true"], stdin=secret, deadline_s=60))
        errors = [error, *results(fanout(pool.node("pve"), [Request(vmid=101, argv=["true"])] * 2, leg_timeout_s=9))]
    for error in errors:
        assert isinstance(error, ContainerError)
        assert error.message.startswith("the login shell on ") and "does not run what it is given" in error.message
        assert error.hint is not None and "~/.bashrc" in error.hint
        assert "hush" not in str(error)

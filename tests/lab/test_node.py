"""Nodes as people have them: a login that is not root, other shells and locales, a host environment that leaks.

All of it on a real node: real sshd, sudo, shells and LXC, and the `pct` stand-in.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    for command in (
        "pct list", "pct exec 102 -- id", "pct exec 101 --keep-env 1 -- id", "pct push 101 /etc/shadow /x",
        "lxc-attach -n 101", "sh",
    ):  # fmt: skip
        done = pool.node(LOGIN).run(["sudo", "-n", *command.split()], deadline_s=60)
        assert (done.exit_code, done.stderr) == (1, b"sudo: a password is required\n"), command


@pytest.mark.parametrize(("block", "attach", "lines"), [(0, "auto", 2), (1, "lxc", 1)])
def test_the_lines_of_the_documentation_are_the_right_ones(
    lab: Lab, pool: NodePool, block: int, attach: Attach, lines: int
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "proxmox-access.md").read_text()
    rules = re.findall(r"```sudoers\n(.*?)```", page, re.DOTALL)[block]
    assert len(rules.splitlines()) == lines
    lab.set_sudo(rules.replace("train", USER).replace("200", "101").replace("/usr/sbin/pct", "/usr/local/sbin/pct"))
    try:
        assert into(pool, 101, attach=attach).run(["id", "-u"], deadline_s=60).stdout == b"0\n"
        assert into(pool, 102, attach=attach).run(["id", "-u"], deadline_s=60).exit_code == 1
    finally:
        lab.set_sudo("")


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
    legs = fanout(pool.node(LOGIN), [Request(vmid=101, argv=argv)], leg_timeout_s=5, ssh=LOGIN)
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
@pytest.mark.real_lab("a second user of the node")
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


@pytest.mark.real_lab("a second user of the node")
def test_a_node_without_sudo_says_what_to_install(lab: Lab, pool: NodePool) -> None:
    with hidden(lab, "/usr/bin/sudo"):
        way = into(pool, 101)
        error = way.explain(way.run(["true"], deadline_s=60))
    assert error is not None and error.message.endswith(f"but the login is {USER}, and there is no sudo")
    assert error.hint is not None and "apt-get install sudo, then visudo" in error.hint and RULE in error.hint


# --- attach: pct, lxc, auto -----------------------------------------------------------------------------------------


@pytest.mark.real_lab("the programs of a real node")
def test_what_only_looks_goes_past_pct_where_it_may_and_a_start_does_not(lab: Lab, pool: NodePool) -> None:
    auto, lxc, pct = (into(pool, 101, ssh="pve", attach=attach) for attach in ("auto", "lxc", "pct"))
    hello = Completed(exit_code=0, stdout=b"hello\n", stderr=b"")
    with hidden(lab, "/usr/local/sbin/pct"):
        for way in (auto.for_reads(), lxc, lxc.for_reads()):
            assert way.run(["echo", "hello"], deadline_s=60) == hello
        for way in (auto, pct, pct.for_reads()):
            error = way.explain(way.run(["echo", "hello"], deadline_s=60))
            assert error is not None and error.message == "pve has no pct any more, though it is a Proxmox node"
        fast = [Request(vmid=101, argv=["echo", "hello"], attach=attach) for attach in ("auto", "lxc")]
        assert results(fanout(pool.node("pve"), fast, leg_timeout_s=60)) == [hello, hello]


@pytest.mark.real_lab("the programs of a real node")
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


def test_a_start_up_file_that_takes_the_request_away_is_named(lab: Lab, pool: NodePool) -> None:
    with home_file(lab, ".bashrc", "read -r answer"):
        requests = [Request(vmid=vmid, argv=["true"], stdin=b"\n", target="a") for vmid in (101, 102)]
        for error in results(fanout(pool.node("pve"), requests, leg_timeout_s=60, ssh="pve")):
            assert str(error).startswith("a: the request did not arrive whole: a shell start-up file there that reads")


# --- all of specctl through such a node -----------------------------------------------------------------------------

LEAK = """
export LEAKED=leak HOME=/leak USER=leak LOGNAME=leak SHELL=/leak/sh SSH_AUTH_SOCK=/leak/agent LC_TIME=leak LANG=leak
export PYTHONPATH=/leak PYTHONHOME=/leak PYTHONSTARTUP=/leak TMUX=/leak,1,0 TMPDIR=/leak VIRTUAL_ENV=/leak CDPATH=/leak
"""
SHOWS = """
import json, os, sys, time
print(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}), flush=True)
step = 0
while True:
    step += 1
    print(f"step={step} tok/s=1", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def specctl(lab: Lab) -> Iterator[Specctl]:
    driver = Specctl(SPECCTL_SSH_CONFIG=str(lab.ssh_config))
    yield driver
    end = "kill -9 $(grep -al SPECCTL_RUN_ID= /proc/[0-9]*/environ | cut -d/ -f3) $(pgrep tmux)"
    end += "; rm -rf /data /tmp/specctl-agents-* /dev/shm/specctl-agents-*"
    for vmid in (101, 102):
        lab.inside(vmid, ["sh", "-c", end])
    driver.close()


@pytest.fixture
def tools_in_usr_local(lab: Lab) -> Iterator[None]:
    """Container 101 has python3 and tmux where only /usr/local/bin in PATH finds them."""
    away = (
        "for n in python3 tmux; do real=$(readlink -f /usr/bin/$n); mv /usr/bin/$n /usr/bin/not-$n; "
        "[ -e $real ] || real=/usr/bin/not-$n; ln -s $real /usr/local/bin/$n; done"
    )
    back = "for n in python3 tmux; do rm /usr/local/bin/$n; mv /usr/bin/not-$n /usr/bin/$n; done"
    lab.inside(101, ["sh", "-ec", away], check=True)
    yield
    lab.inside(101, ["sh", "-ec", back], check=True)


def shown(specctl: Specctl, run_id: str) -> dict[str, Any]:
    """What the program SHOWS was started with."""
    line = specctl("logs", run_id, "--grep", "argv").out.splitlines()[0]
    return dict(json.loads(line[line.index("{") :]))


def leaks(lab: Lab, word: str) -> str:
    """Command lines of container 101's processes that have a word in their environment."""
    script = 'grep -al "$1" /proc/[0-9]*/environ | while read -r f; do tr "\\0" " " <"${f%environ}cmdline"; done'
    return lab.inside(101, ["sh", "-c", script, "sh", word], text=True).stdout


def test_quotes_blanks_and_newlines_arrive_and_nothing_of_the_node_does(
    specctl: Specctl, lab: Lab, pool: NodePool, tools_in_usr_local: None
) -> None:
    value = "two\nlines, $HOME and 'quotes'"
    workdir, note = "/data/my run; $x", 'it\'s "$HOME"; echo X'
    inventory = {"targets": {"a": {"ssh": "pve", "vmid": 101, "workdir": workdir, "env": {"VALUE": value}}}}
    specctl.inventory.write_text(json.dumps(inventory))
    with home_file(lab, ".bashrc", LEAK):
        given = into(pool, 101, ssh="pve").run(["env"], deadline_s=60).stdout.decode()
        assert {line.partition("=")[0] for line in given.splitlines()} <= {"PATH", "LC_ALL", "TERM", "container"}
        done = specctl.launch("--until", "process", "--note", note, "--", "python3", "-c", SHOWS, *NASTY, target="a")
        assert done.code == 0, done.err
        seen = shown(specctl, done.json["run_id"])
        assert seen["argv"] == NASTY
        assert seen["env"]["VALUE"] == value
        assert seen["env"]["HOME"] == "/root" and seen["env"]["USER"] == "root"
        assert seen["cwd"].startswith(f"{workdir}/runs/")
        assert not [name for name, text in seen["env"].items() if "leak" in text or name.startswith(("SSH", "SUDO"))]
        assert leaks(lab, "leak") == "" and leaks(lab, "SSH_") == ""
        assert "supervise" in leaks(lab, "HOME=/root"), "the search finds nothing at all"
        assert specctl.status()["note"] == note


def test_a_user_with_sudo_launches_looks_and_stops(specctl: Specctl, sudo: Lab) -> None:
    specctl.inventory.write_text(
        f"defaults: {{ssh: {LOGIN}, workdir: /data/w}}\ntargets: {{a: {{vmid: 101}}, b: {{vmid: 102}}}}\n"
    )
    done = specctl.launch("--until", "process", "--", "python3", "-c", SHOWS, target="a")
    assert done.code == 0, done.err
    assert not [name for name in shown(specctl, done.json["run_id"])["env"] if name.startswith(("SUDO", "SSH"))]
    assert leaks(sudo, "SUDO_") == ""
    answer = specctl("status", "--json")
    assert answer.code == 3 and [run["state"] for run in answer.json["runs"]] == ["RUNNING"]
    assert "NOPASSWD: /usr/local/sbin/pct exec 102 -- *" in json.dumps(answer.json["targets"])
    assert specctl("stop", "@last").code == 0


def test_containers_that_are_met_for_the_first_time_get_the_agent_by_a_status(specctl: Specctl, lab: Lab) -> None:
    specctl.inventory.write_text(
        "defaults: {ssh: pve, workdir: /data/w}\n"
        "targets: {a: {vmid: 101}, b: {vmid: 102}, c: {vmid: 101, workdir: /data/v}}\n"
    )
    for vmid in (101, 102):
        lab.inside(vmid, ["mkdir", "-p", "/data/w", "/data/v"], check=True)
    done = specctl("status", "--json")
    assert done.code == 0 and [row["reachable"] for row in done.json["targets"]] == [True] * 3
    for vmid, folder in ((101, "w"), (101, "v"), (102, "w")):
        assert lab.inside(vmid, ["sh", "-c", f"ls /data/{folder}/agents"], text=True).stdout.strip()


def test_who_leaves_a_status_waits_for_no_target_that_is_stuck(specctl: Specctl, lab: Lab) -> None:
    lab.inside(102, ["sh", "-c", "mkdir -p /data; echo 'exec sleep 65.7' >/data/slow; chmod +x /data/slow"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        specctl.inventory.write_text(
            f"""
defaults: {{workdir: /data/w}}
targets:
  a: {{ssh: pve, vmid: 101}}
  slow: {{ssh: pve, vmid: 102, python: /data/slow}}
  mute: {{ssh: "root@127.0.0.1:{mute.getsockname()[1]}"}}
"""
        )
        mute.settimeout(60)
        status = specctl.start("status")
        dialled, _ = mute.accept()
        with dialled:
            poll_until(lambda: runs_inside(lab, "sleep 65.7", 102), what="the slow target was asked")
            status.send_signal(signal.SIGINT)
            out, err = status.communicate(timeout=60)
            assert (status.returncode, out) == (130, ""), err
            assert runs_inside(lab, "sleep 65.7", 102), "it has ended by itself: nothing was shown"
    lab.inside(102, ["pkill", "-f", "sleep 65.7"])

"""The pct stand-in against recordings of the real program: the same commands through ssh, the same words and codes.

`recorded/*.txt` are transcripts of pve-container 6.1.10 over real LXC: a command after `---`, what it printed (both
streams), and its exit code. What cannot be the same here is masked on both sides (`mask`) or named in SKIPPED.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.lab import Lab, wait_until

RECORDED = Path(__file__).parent / "recorded"
SKIPPED = {
    "cat /proc/self/cgroup": "the recording machine's cgroups",
    "pct config 104": "the recording lab's own root image",
    "103": "an unprivileged container, which this lab does not have yet",
    "pct bogus": "the stand-in lists only the commands it has",
    "pct st 101": "likewise",
    "/proc/cpuinfo": "the recording machine's processor",
    "/etc/hostname": "the recording machine's name",
    "shutdown 101 --timeout": "a guest that ignores shutdown takes 11 s",
    "cd /srv": "the recording's root image had no /srv",
    "-- ps ": "process ids",
    "ls -la": "process ids and times",
    "show-environment": "the recording client's environment",
    "/environ": "the recording client's environment",
    "quick": "whether the session has ended by the next command is a race",
    "-L sp": "likewise",
}
STDIN = [b"hello\n", bytes(2_000_000), b"", bytes(3_000_000)]
"""What the recorded commands marked `(stdin)` were given, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    file: str
    line: int
    command: str
    output: str
    code: int


def recording(name: str, *, first: int = 0, last: int = sys.maxsize) -> list[Case]:
    """The cases of one file (or of some of its lines), in order; they build on what earlier ones left behind."""
    cases, command, output, start = [], None, "", 0
    lines = (RECORDED / name).read_text(errors="surrogateescape").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if line.startswith("--- "):
            command, output, start = line[4:].strip().removeprefix("[ssh] "), "", number
        elif command is not None and (end := re.search(r"rc=(\d+)(?: .*)?$", line)):
            output += line[: end.start()]
            cases.append(Case(file=name, line=start, command=command, output=output, code=int(end[1])))
            command = None
        else:
            output += line
    return [case for case in cases if first <= case.line <= last]


def mask(output: str) -> str:
    """`output` without what differs from machine to machine, or from day to day."""
    output = re.sub(r"(?m)^(SSH_CLIENT|SSH_CONNECTION|SHLVL|_)=.*$", r"\1=...", output)
    output = re.sub(r"(?m)^MOTD_SHOWN=.*\n", "", output)  # set by PAM, where it is used
    output = re.sub(r"(?m)^([-d][-rwx]{9} +\d+ +\S+ +\S+ +\d+)(?: [A-Z].*?)?( /\S+)?$", r"\1\2", output)
    output = re.sub(r"(?m)^total \d+$", "total", output)
    output = re.sub(r"\(created [^)]*\)", "(created)", output)
    output = re.sub(r"\S*attach\.c: (\w+): \d+ ", r"attach.c: \1: ", output)  # LXC's source lines
    lines = output.splitlines()
    if lines and all(re.match(r"\w+=", line) for line in lines):
        lines.sort()
    return "\n".join(lines)


@pytest.fixture(scope="module")
def node(lab_ready: None) -> Iterator[Lab]:
    """A node of its own, as the recordings had it: they say 101, and find an empty /root."""
    with Lab() as node:
        for vmid, name in ((101, "trainer-a"), (102, "trainer-b"), (103, "trainer-c")):
            node.container(vmid, hostname=name)
        files = "mkdir -p bt/dir hdir; printf hello | tee h.txt bt/h; ln -s h.txt h.lnk; ln -s h bt/l"
        big = "head -c 3000000 /dev/zero | tee big3m >bt/big"
        assert node.on_node(["sh", "-ec", f"cd /tmp; {files}; {big}"]).returncode == 0
        yield node


@pytest.fixture(scope="module")
def ssh(node: Lab) -> Iterator[list[str]]:
    """argv of an ssh client to the node, on one shared connection."""
    with tempfile.TemporaryDirectory(prefix="ssh-") as folder:
        shared = ["ssh", "-F", str(node.ssh_config), "-o", f"ControlPath={folder}/%C"]
        opened = subprocess.run(
            [*shared, "-o", "ControlMaster=yes", "-o", "ControlPersist=60", "pve", "true"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30,
        )  # fmt: skip
        assert opened.returncode == 0
        yield [*shared, "pve"]
        subprocess.run([*shared, "-O", "exit", "pve"], capture_output=True, timeout=10)


@pytest.fixture(autouse=True)
def running(node: Lab) -> None:
    """Every test starts with container 101 running and without a lock."""
    if node.on_node(["pct", "status", "101"]).stdout != "status: running\n":
        node.start(101)
    node.define(101, hostname="trainer-a")


@pytest.fixture(scope="module", autouse=True)
def locked_out(node: Lab, ssh: list[str]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Commands that run into a held configuration lock. They take 10 s, so they start first and are asked last."""
    with held(ssh, 103):
        commands = ("pct push 103 /etc/hosts /tmp/hosts", "pct shutdown 103")
        yield {command: subprocess.Popen([*ssh, command], stderr=subprocess.PIPE) for command in commands}


@contextlib.contextmanager
def held(ssh: list[str], vmid: int) -> Iterator[None]:
    """Hold a container's configuration lock."""
    command = f"flock /run/lock/lxc/pve-config-{vmid}.lock sh -c 'echo held; read line'"
    holder = subprocess.Popen([*ssh, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin and holder.stdout
    assert holder.stdout.readline() == b"held\n"
    try:
        yield
    finally:
        holder.communicate(b"\n", timeout=20)


def replay(ssh: list[str], cases: list[Case]) -> None:
    """Run the cases in order; fail with all that came out differently."""
    differences, replayed = [], 0
    stdin = iter(STDIN)
    for case in cases:
        text = case.command.removeprefix("(stdin) ")
        given = next(stdin) if text != case.command else b""
        if any(part in text for part in SKIPPED):
            continue
        done = subprocess.run([*ssh, f"exec 2>&1; {text}"], input=given, stdout=subprocess.PIPE, timeout=60)
        lab = f"{mask(done.stdout.decode(errors='surrogateescape'))}\nrc={done.returncode}"
        real = f"{mask(case.output)}\nrc={case.code}"
        replayed += 1
        if lab != real:
            differences.append(f"{case.file}:{case.line}: {text}\n-- real:\n{real}\n-- lab:\n{lab}")
    assert replayed
    assert not differences, "\n\n".join(differences).encode(errors="backslashreplace").decode()


def test_exec_says_and_returns_what_the_real_one_does(node: Lab, ssh: list[str]) -> None:
    replay(ssh, recording("real-exec.txt"))


def test_every_command_answers_as_recorded_whatever_the_container_is(node: Lab, ssh: list[str]) -> None:
    node.define(104)
    try:
        replay(ssh, recording("bat-real.txt"))
    finally:
        node.undefine(104)


def test_push_and_pull_fail_as_silently_as_the_real_ones(node: Lab, ssh: list[str]) -> None:
    replay(ssh, recording("real-push.txt"))


def test_a_backup_lock_stops_the_same_commands_with_the_same_words(node: Lab, ssh: list[str]) -> None:
    node.define(101, hostname="trainer-a", lock="backup")
    replay(ssh, recording("real-lock.txt", first=2, last=39))


def test_start_stop_shutdown_and_reboot_answer_as_recorded(node: Lab, ssh: list[str]) -> None:
    node.stop(101)
    replay(ssh, recording("lock-real.txt", first=55, last=80))


def test_tmux_in_a_container_answers_as_recorded(node: Lab, ssh: list[str]) -> None:
    replay(ssh, recording("real-tmux.txt"))


def test_bytes_pass_exec_unchanged_both_ways(ssh: list[str]) -> None:
    data = os.urandom(3_000_000)
    done = subprocess.run([*ssh, "pct exec 101 -- cat"], input=data, capture_output=True, timeout=60)
    assert (done.stdout == data, done.stderr, done.returncode) == (True, b"", 0)


def test_a_command_that_needs_the_configuration_lock_waits_for_it_and_says_so(ssh: list[str]) -> None:
    with held(ssh, 102):
        push = subprocess.Popen([*ssh, "pct push 102 /etc/hosts /tmp/hosts"], stderr=subprocess.PIPE)
        assert push.stderr
        assert push.stderr.readline() == b"trying to acquire lock...\n"
    assert (push.stderr.read(), push.wait(timeout=20)) == (b" OK\n", 0)


def test_a_frozen_container_looks_running_takes_files_and_hangs_exec(node: Lab, ssh: list[str]) -> None:
    def answer(command: str) -> tuple[int, bytes]:
        done = subprocess.run([*ssh, command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=30)
        return done.returncode, done.stdout

    node.freeze(102)
    try:
        assert answer("pct status 102") == (0, b"status: running\n")
        assert answer("timeout 1 pct exec 102 -- echo works") == (124, b"")
        assert answer("pct push 102 /tmp/h.txt /tmp/f && pct pull 102 /tmp/f /tmp/back; cat /tmp/back") == (0, b"hello")
    finally:
        node.thaw(102)
    wait_until(lambda: answer("timeout 5 pct exec 102 -- echo works") == (0, b"works\n"), "the container did not thaw")


@pytest.mark.parametrize(("call", "said"), [("status 101", "status: running\n"), ("exec 101 -- true", "")])
def test_a_set_cost_is_paid_in_cpu_time_by_every_call(node: Lab, call: str, said: str) -> None:
    node.set_pct_cost(0.3)
    try:
        done = node.on_node(["bash", "-c", f"TIMEFORMAT='%U %S'; time pct {call}"])
    finally:
        node.set_pct_cost(0)
    assert done.stdout == said
    assert sum(map(float, done.stderr.split())) >= 0.25


def test_a_lock_that_stays_held_is_given_up_after_ten_seconds(locked_out: dict[str, subprocess.Popen[bytes]]) -> None:
    why = b"trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-103.lock' - got timeout\n"
    answers = {command: (process.communicate(timeout=30)[1], process.returncode)
               for command, process in locked_out.items()}  # fmt: skip
    assert answers == {"pct push 103 /etc/hosts /tmp/hosts": (why, 4), "pct shutdown 103": (why, 255)}

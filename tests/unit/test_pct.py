"""Why a container cannot be entered, by the words that pct, LXC and sudo really say, and only by them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import LinkLost
from orchestrator.inventory import Attach
from orchestrator.transport import quoting
from orchestrator.transport.base import Completed
from orchestrator.transport.local import LocalTransport
from orchestrator.transport.pct import PctTransport
from orchestrator.transport.pct_errors import Entrance, Seen, seen_in

ROOT = Seen(
    answered=True, user="root", tools={"pct": "/usr/sbin/pct", "lxc-attach": "/usr/bin/lxc-attach"}, listens=True
)
LXC = "lxc-attach: 101: ../src/lxc/attach.c: "
NO_INIT = (
    f"{LXC}get_attach_context: 406 Connection refused - Failed to get init pid\n"
    f"{LXC}lxc_attach: 1470 Connection refused - Failed to get attach context\n"
)
START = "start it: ssh root@pve1:2222 pct start 101"
RULE = "train ALL=(root) NOPASSWD: /usr/sbin/pct exec 101 -- *"


def explain(
    said: str,
    exit_code: int | None = 255,
    *,
    ssh: str | None = "root@pve1:2222",
    attach: Attach = "auto",
    seen: Seen = ROOT,
) -> str | None:
    found = Entrance(vmid=101, ssh=ssh, attach=attach).reason(said, exit_code, seen)
    return None if found is None else " | ".join(found)


def seen(**facts: object) -> Seen:
    return Seen(**{"answered": True, "user": "root", "tools": ROOT.tools, "listens": True, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "exit_code", "message"),
    [
        ("container '101' not running!\n", 255, f"container 101 is not running | {START}"),
        (
            "perl: warning: Setting locale failed.\nperl: warning: Falling back.\r\ncontainer '101' not running!\r\n",
            255,
            f"container 101 is not running | {START}",
        ),
        (
            "trying to acquire lock...\ncan't lock file '/run/lock/lxc/pve-config-101.lock' - got timeout\n",
            4,
            "container 101 is locked: another pct command holds its configuration | "
            "wait for that command, then ask again",
        ),
        (
            "CT is locked (backup)\n",
            255,
            "container 101 is locked (backup) | wait for it to end, or, if it was cut short: "
            "ssh root@pve1:2222 pct unlock 101",
        ),
        (
            "specctl-node: container 101 is frozen\n",
            255,
            "container 101 is frozen: nothing in it can answer | thaw it: ssh root@pve1:2222 lxc-unfreeze -n 101",
        ),
        (
            "lxc-attach: 101: ../src/lxc/attach.c: lxc_attach_run_command: 1841 No such file or directory - "
            'Failed to exec "python3"\n',
            127,
            'container 101 cannot run "python3": No such file or directory | '
            "install it there, or check python: of this target in hosts.yaml",
        ),
        (
            NO_INIT,
            1,
            "container 101 cannot be entered: Connection refused - Failed to get init pid | it may be starting or "
            "stopping: ask again, or try by hand: ssh root@pve1:2222 pct exec 101 -- true",
        ),
        (
            "specctl-node: no pct on this node\n",
            255,
            "root@pve1:2222 has no pct, so it has no container 101 | a container needs a Proxmox node: "
            "check ssh: in hosts.yaml, or drop vmid: for a plain machine",
        ),
        (
            "ipcc_send_rec[1] failed: Connection refused\nipcc_send_rec[2] failed: Connection refused\n"
            "Unable to load access control list: Connection refused\n",
            111,
            "the cluster file system of root@pve1:2222 (/etc/pve) is down, and without it there is no container: "
            "ipcc_send_rec[1] failed: Connection refused | look there: ssh root@pve1:2222 systemctl status pve-cluster",
        ),
        (
            "Can't locate PVE/LXC.pm in @INC (you may need to install the PVE::LXC module) (@INC contains: /etc/perl) "
            "at /usr/share/perl5/PVE/CLI/pct.pm line 12.\nBEGIN failed--compilation aborted at /usr/sbin/pct line 6.\n",
            2,
            "pct of root@pve1:2222 does not work: Can't locate PVE/LXC.pm in @INC | mend it there (an upgrade that was "
            "cut short?), then try by hand: ssh root@pve1:2222 pct exec 101 -- true",
        ),
        (
            "specctl-node: no lxc-attach on this node\n",
            255,
            "root@pve1:2222 has no lxc-attach, which attach: lxc of this target asks for | "
            "set attach: auto in hosts.yaml, or leave it out",
        ),
    ],
)
def test_each_failure_is_an_error_of_its_own_with_the_next_command(said: str, exit_code: int, message: str) -> None:
    assert explain(said, exit_code) == message


@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        ("sudo: a password is required\n", "sudo asks for a password"),
        ("sudo: unable to resolve host pve: Name or service not known\nsudo: a password is required\n",
         "sudo asks for a password"),
        ("sudo: a terminal is required to read the password; either use the -S option to read from standard input or "
         "configure an askpass helper\n", "sudo asks for a password"),
        ("train is not in the sudoers file.\n", "sudo does not let it"),
        ("train is not in the sudoers file.  This incident will be reported.\n", "sudo does not let it"),
        ("Sorry, user train is not allowed to execute '/usr/sbin/pct exec 101 -- true' as root on pve.\n",
         "sudo does not let it"),
        ("Sorry, user train may not run sudo on pve.\n", "sudo does not let it"),
        ("sudo: sorry, you must have a tty to run sudo\n", "sudo fails (sudo: sorry, you must have a tty to run sudo)"),
        ("please run as root\n", "pct was not run as root"),
        ("ipcc_send_rec[1] failed: Unknown error -1\n", "pct was not run as root"),
    ],
)  # fmt: skip
def test_a_login_that_may_not_enter_is_told_the_one_line_that_lets_it(said: str, trouble: str) -> None:
    assert explain(said, 1, ssh="pve1", seen=seen(user="train")) == (
        f"container 101 is entered as root of pve1, but the login is train, and {trouble} | as root there: visudo -f "
        f"/etc/sudoers.d/specctl, and write this line: {RULE}   (docs/proxmox-access.md says what that grants); "
        "or log in as root: ssh: root@HOST"
    )


def test_the_line_is_for_the_program_that_is_used_and_sudo_is_to_be_installed_first() -> None:
    said = explain("specctl-node: no sudo on this node\n", seen=seen(user="train"))
    assert (
        said is not None and "there is no sudo" in said and "as root there: apt-get install sudo, then visudo" in said
    )
    said = explain("sudo: a password is required\n", attach="lxc", seen=seen(user="train"))
    assert said is not None and "train ALL=(root) NOPASSWD: /usr/bin/lxc-attach -n 101 --clear-env -- *" in said


def test_a_warning_of_sudo_alone_is_no_reason() -> None:
    assert explain("sudo: unable to resolve host pve: Name or service not known\n", 1) is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "container '101' not running!\n",
            "container 101 is not running, and is locked (migrate): it cannot start before that has ended | wait for "
            f"it, or, if it was cut short: ssh root@pve1:2222 pct unlock 101; then {START}",
        ),
        (
            "specctl-node: container 101 is frozen\n",
            "container 101 is frozen and locked (migrate): nothing in it can answer until that has ended | wait for "
            "it, or, if it was cut short, thaw it: ssh root@pve1:2222 lxc-unfreeze -n 101",
        ),
    ],
)
def test_a_lock_is_told_where_it_is_what_one_waits_for(said: str, message: str) -> None:
    assert explain(said, seen=seen(lock="migrate", listens=False)) == message


def test_a_node_with_pct_but_without_etc_pve_lacks_its_cluster_file_system() -> None:
    said = "specctl-node: no /etc/pve/local on this node\n"
    assert (explain(said, attach="lxc", seen=seen()) or "").startswith("the cluster file system of root@")
    plain = explain(said, attach="lxc", seen=seen(tools={}))
    assert plain is not None and plain.startswith("root@pve1:2222 has no pct, so it has no container 101")
    removed = explain("specctl-node: no pct on this node\n", seen=seen(cluster=True, tools={}))
    assert removed is not None and removed.startswith("root@pve1:2222 has no pct any more, though it is a Proxmox node")


def test_what_needs_root_is_not_offered_as_a_command_of_another_login() -> None:
    said = explain("container '101' not running!\n", ssh="train@pve1", seen=seen(user="train"))
    assert said == "container 101 is not running | start it: as root on train@pve1: pct start 101"


def test_a_container_that_is_gone_when_lxc_or_the_kill_of_its_processes_is_looked_into_is_stopped() -> None:
    gone = seen(listens=False)
    assert explain(NO_INIT, 1, seen=gone) == f"container 101 is not running | {START}"
    assert explain("", 137, seen=gone) == f"container 101 stopped while it was being asked | {START}"
    assert explain("", 137) is None, "it runs: a program of its own may have been killed"


def test_a_login_shell_that_runs_nothing_is_told_with_what_it_said() -> None:
    nothing = Seen(answered=False)
    said = explain("Unmatched '''.\n", 1, ssh="pve1", seen=nothing)
    assert said is not None
    assert said.startswith(
        "the login shell on pve1 does not run what it is given; it said: Unmatched ''' | try by hand"
    )
    assert "~/.bashrc" in said and "ssh pve1 echo works" in said
    said = explain("sudo: Undefined variable.\n", 1, seen=nothing)
    assert said is not None and said.startswith("the login shell "), "csh took the script apart"
    said = explain("", 0, seen=nothing)
    assert said is not None and "it said: nothing, and ended with exit code 0" in said


@pytest.mark.parametrize(
    ("said", "exit_code"),
    [
        ("", 255),
        ("", 2),
        ("Traceback (most recent call last):\n", 1),
        ("container '102' not running!\n", 255),
        ("my log: container '101' not running!\n", 1),
        ("Configuration file 'nodes/pve/lxc/1011.conf' does not exist\n", 2),
    ],
)
def test_an_exit_code_or_another_text_alone_means_nothing(said: str, exit_code: int) -> None:
    assert explain(said, exit_code) is None


def test_without_ssh_the_hint_is_the_bare_command() -> None:
    assert (
        explain("container '101' not running!\n", ssh=None) == "container 101 is not running | start it: pct start 101"
    )


def test_what_a_node_shows_is_read_between_the_noise_of_its_shell() -> None:
    text = (
        "\x1b[32mwelcome, user: nobody\x1b[0m\nuser: train\r\npct: /usr/sbin/pct\nlxc-attach: \nlistens\nlock: backup\n"
        "node: nodes/pve\nat: nodes/pve2/qemu-server/101.conf\nhere: lxc/100.conf\nhere: lxc/200.conf\n"
    )
    assert seen_in(text) == Seen(
        answered=True, user="train", tools={"pct": "/usr/sbin/pct"}, lock="backup", listens=True, cluster=True,
        at=[("pve2", "qemu-server")], here=["100", "200"],
    )  # fmt: skip
    assert seen_in("This account is currently not available.\n") == Seen(answered=False)


def test_a_lost_link_is_told_as_such() -> None:
    lost = Completed(exit_code=None, stdout=b"", stderr=b"", why_unknown="the connection ended", link_lost=True)
    error = PctTransport(LocalTransport(), 101, target="gpu1").explain(lost)
    assert isinstance(error, LinkLost)
    assert str(error) == "gpu1: the connection ended"


def test_success_is_never_explained_away() -> None:
    done = Completed(exit_code=0, stdout=b"", stderr=b"container '101' not running!\n")
    assert PctTransport(LocalTransport(), 101, target="gpu1").explain(done) is None


SHELLS = [shell for shell in ("dash", "bash", "zsh", "mksh", "fish") if shutil.which(shell)]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_word_passes_the_login_shell_unchanged(shell: str) -> None:
    words = [
        "",
        "a b",
        'it\'s "q" $HOME `x` $(y)',
        "line\nbreak\n",
        "*?[a]",
        "-n",
        "--",
        "ünï☃",
        "\\ ; & |",
        "a\\'b\\\\c\\",
    ]
    words += ["!x ~ {a,b} %s", "\\n", "~", "=ls", "%1", "#x", "X=1", "^a", "(b)", "<c>", "\t", "@last"]
    show = [sys.executable, "-c", "import os, sys; print('|'.join(os.fsencode(a).hex() for a in sys.argv[1:]))"]
    line = quoting.join([*show, *words])
    done = subprocess.run([shell, "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("|".join(word.encode().hex() for word in words) + "\n", "")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12), max_size=6))
def test_any_words_are_read_back_by_sh(words: list[str]) -> None:
    line = quoting.join(["printf", "%s\\0", *words])
    done = subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert done.stdout == b"".join(os.fsencode(word) + b"\0" for word in words or [""])


def test_without_an_ssh_target_paramiko_is_never_imported() -> None:
    code = (
        "import sys; from orchestrator.inventory import Target; from orchestrator.transport import NodePool, "
        "open_transport; open_transport(Target(name='a', vmid=101), NodePool()); print('paramiko' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"

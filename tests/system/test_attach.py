"""`specctl attach`: a real terminal on a run's real session, on this machine and over a real sshd."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from orchestrator.fleet import Fleet
from orchestrator.inventory import load_inventory
from orchestrator.transport.terminal import Screen
from orchestrator.verbs import attach
from tests.driver import Specctl, poll_until
from tests.sshd import LoopbackSshd
from tests.terminal import Typed, typed

LEAVE = "\x02d"


@pytest.fixture
def over_ssh(sshd: LoopbackSshd) -> Iterator[Specctl]:
    driver = Specctl(SPECCTL_SSH_CONFIG=str(sshd.ssh_config))
    driver.inventory.write_text(
        f"targets:\n  box: {{ssh: node1, workdir: {driver.workdir}, python: {sys.executable}}}\n"
    )
    yield driver
    sshd.resume()
    driver.close()


def steps(specctl: Specctl, target: str = "local") -> str:
    done = specctl.launch("--until", "process", "--", sys.executable, specctl.program("steps.py"), target=target)
    return str(done.json["run_id"])


def test_what_is_no_terminal_is_told_what_to_type_instead(specctl: Specctl) -> None:
    done = specctl("attach", "some-run")
    assert (done.code, done.out) == (2, "")
    assert "needs a terminal" in done.err and "specctl logs some-run -f" in done.err


def test_a_run_that_has_ended_has_no_session_and_says_how_it_ended(specctl: Specctl) -> None:
    run_id = specctl.launch("--", "sh", "-c", "exit 3").json["run_id"]
    with typed(specctl, "attach", run_id, columns=200) as terminal:
        assert terminal.end() == 1
        assert "FAILED (exit code 3)" in terminal.text and f"specctl logs {run_id}" in terminal.text
        assert not terminal.raw


def test_the_session_shows_the_log_read_only_follows_the_window_and_is_left_as_it_was(specctl: Specctl) -> None:
    run_id = steps(specctl)
    with typed(specctl, "attach", run_id) as terminal:
        before = terminal.settings
        terminal.until("step=")
        assert "Ctrl-B d leaves" in terminal.until(f" {run_id} "), "how to leave is said before and at the bottom"
        assert terminal.raw
        terminal.seen = b""
        terminal.resize(70, 12)
        os.kill(terminal.pid, signal.SIGWINCH)
        # Everything is drawn anew, in rows 1 to 12.
        terminal.until_bytes(b"[1;12r")
        terminal.type("\x03\x03q\r\x02:kill-session\r")
        terminal.type(LEAVE)
        assert terminal.end() == 0
        assert "[detached" in terminal.text and f"left {run_id}; it goes on: RUNNING" in terminal.text
        assert terminal.settings == before, "the terminal is given back as it was lent"
    assert specctl.status(run_id)["state"] == "RUNNING", "a slip of the hand reaches no program"


def test_a_session_that_ends_while_one_looks_says_how_the_run_ended(specctl: Specctl) -> None:
    run_id = steps(specctl)
    with typed(specctl, "attach", run_id, "--write", columns=200) as terminal:
        terminal.until("step=")
        specctl("stop", run_id, "--now")
        assert terminal.end() == 0
        assert f"left {run_id}; STOPPED" in terminal.text and not terminal.raw


def test_a_socket_that_a_cleaner_took_is_made_anew_and_a_signal_gives_the_terminal_back(specctl: Specctl) -> None:
    run_id = steps(specctl)
    [socket] = specctl.workdir.glob("tmux-*")
    socket.unlink()
    with typed(specctl, "attach", run_id, TERM="of-no-known-kind") as terminal:
        before = terminal.settings
        terminal.until("step=")
        assert socket.exists() and terminal.raw
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.end() == 128 + signal.SIGTERM
        assert terminal.settings == before and b"\x1b[?1049l" in terminal.seen, "given back, even when told to end"


def test_tmux_empties_the_terminal_first_so_it_waits_until_the_answer_has_been_read(
    specctl: Specctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = steps(specctl)
    [socket] = specctl.workdir.glob("tmux-*")

    def clients() -> str:
        argv = ["tmux", "-S", str(socket), "list-clients"]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    fleet = Fleet(load_inventory(str(specctl.inventory), environ={}, cwd=specctl.project, home=specctl.home))
    monkeypatch.setattr(attach, "SEEN", b"")
    screen = Screen(term="xterm", columns=80, rows=24)
    session = attach.enter(fleet, attach.find(fleet, run_id).run, screen, write=False, utf8=True)
    with session.terminal as terminal:
        assert not clients() and not session.first
        terminal.write(b"\n")
        poll_until(clients, what="a client")
    fleet.close()


def test_somebody_elses_session_of_that_name_is_not_shown(specctl: Specctl) -> None:
    run_id = steps(specctl)
    [socket] = specctl.workdir.glob("tmux-*")
    tmux = ["tmux", "-S", str(socket)]
    subprocess.run([*tmux, "rename-session", "-t", f"={run_id}", "other"], check=True)
    subprocess.run([*tmux, "new-session", "-d", "-s", run_id, "sleep 600"], check=True)
    with typed(specctl, "attach", run_id, columns=200) as terminal:
        assert terminal.end() == 1
        assert "no pane of it is the run's supervisor" in terminal.text


def test_over_ssh_keys_sizes_and_the_end_travel_and_a_dead_link_gives_the_terminal_back(
    over_ssh: Specctl, sshd: LoopbackSshd
) -> None:
    run_id = steps(over_ssh, "box")
    sshd.make_noisy("noise of a shell")
    with typed(over_ssh, "attach", run_id) as terminal:
        before = terminal.settings
        terminal.until("step=")
        assert "noise of a shell" not in terminal.text
        terminal.seen = b""
        terminal.resize(70, 12)
        os.kill(terminal.pid, signal.SIGWINCH)
        terminal.until_bytes(b"[1;12r")
        terminal.type(LEAVE)
        assert terminal.end() == 0 and terminal.settings == before
    with typed(over_ssh, "attach", run_id, columns=200) as terminal:
        terminal.until("step=")
        sshd.stop()
        assert terminal.end() == 3
        assert "connection ended" in terminal.text or "lost" in terminal.text
        assert terminal.settings == before and terminal.seen.count(b"\x1b[?1049l"), "the other screen is left, too"
    assert over_ssh.processes(run_id)


LENDS = """
import sys
from orchestrator import terminal
from orchestrator.transport.terminal import LocalTerminal
argv = ["sh", "-c", r"printf '\\033[2;5rleft'"]
with LocalTerminal(argv, terminal.screen(), {"PATH": "/usr/bin:/bin"}) as other, terminal.Lent() as lent:
    lent.carry(other, b"")
print("given", "back")
"""


def test_a_program_that_leaves_only_a_part_of_the_screen_to_scroll_leaves_it_for_nobody_else(specctl: Specctl) -> None:
    """tmux's last words are lost where a loaded terminal does not take them at once."""
    terminal = Typed([sys.executable, "-c", LENDS], cwd=specctl.project, environ=specctl.environ)
    terminal.until("given back")
    assert terminal.end() == 0
    part, whole = terminal.seen.index(b"\x1b[2;5r"), terminal.seen.index(b"\x1b7\x1b[r\x1b8")
    assert part < whole < terminal.seen.index(b"given back")

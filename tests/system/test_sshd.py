"""The loopback sshd of the fixtures is a real one: it lets its key in, keeps others out, and can be made to fail."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sshd import LoopbackSshd, answers, make_key


def run(argv: list[str], timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)


def test_an_openssh_client_logs_in_with_the_written_configuration_alone(sshd: LoopbackSshd) -> None:
    known_hosts = sshd.known_hosts.read_text()
    done = run(sshd.ssh("id -u; echo $HOME; exit 7"))
    assert (done.stdout, done.stderr, done.returncode) == (f"{os.geteuid()}\n{sshd.home}\n", "", 7)
    assert sshd.known_hosts.read_text() == known_hosts


def test_another_key_is_refused(sshd: LoopbackSshd, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    config = tmp_path / "config"
    config.write_text(sshd.ssh_config.read_text().replace(f"{sshd.root}/id", str(tmp_path / "other")))
    done = run(["ssh", "-F", str(config), "node1", "true"])
    assert done.returncode == 255
    assert "Permission denied (publickey" in done.stderr


def test_a_noisy_shell_start_up_prints_before_the_command_does(sshd: LoopbackSshd) -> None:
    sshd.make_noisy("it's noise")
    assert run(sshd.ssh("echo answer")).stdout == "it's noise\nanswer\n"
    sshd.make_quiet()
    assert run(sshd.ssh("echo answer")).stdout == "answer\n"


def test_a_rotated_host_key_is_refused_on_the_same_port(sshd: LoopbackSshd) -> None:
    port = sshd.port
    sshd.rotate_host_key()
    done = run(sshd.ssh("true"))
    assert done.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr
    assert sshd.port == port


def test_a_paused_server_keeps_the_link_open_and_its_commands_running(sshd: LoopbackSshd, tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    script = f"echo up; until [ -e {go} ]; do sleep 0.02; done; echo after; touch {done}"
    client = subprocess.Popen(sshd.ssh(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert client.stdout
    assert client.stdout.readline() == "up\n"
    with sshd.paused():
        go.touch()
        poll_until(done.exists)
        assert not select.select([client.stdout], [], [], 0.2)[0]
        assert client.poll() is None
    assert client.communicate(timeout=10)[0] == "after\n"
    assert client.returncode == 0


def test_a_stopped_server_drops_its_sessions_and_refuses_new_ones_until_it_is_started(sshd: LoopbackSshd) -> None:
    client = subprocess.Popen(
        sshd.ssh("echo up; read line"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )
    assert client.stdout and client.stdin
    assert client.stdout.readline() == "up\n"
    sshd.stop()
    assert client.wait(timeout=10) == 255
    client.stdin.close()
    client.stdout.close()
    assert not answers(sshd.port)
    assert "Connection refused" in run(sshd.ssh("true")).stderr
    sshd.start()
    assert run(sshd.ssh("true")).returncode == 0


def test_a_port_that_another_program_took_is_an_error_in_sshds_own_words(sshd: LoopbackSshd) -> None:
    sshd.stop()
    with socket.create_server(("127.0.0.1", sshd.port)):
        with pytest.raises(RuntimeError, match="Address already in use"):
            sshd.start()


def poll_until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up_at, "not within 10 s"
        time.sleep(0.01)

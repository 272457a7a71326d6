"""What can happen to the way to a node, and to who goes it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.driver import Done, poll_until
from tests.lab.gate import FOLDER, Gate, gate
from tests.lab.matrix import DEADLINE_S, WORKDIR, Scene, fault
from tests.sshd import make_key
from tests.terminal import Typed, typed
from tests.wire import Wire, ssh_config

LARGE = 4 << 20
ASLEEP_S = 35.0
"""Longer than any verb waits for a sign of life, or for a short answer."""


# --- the way there --------------------------------------------------------------------------------------------------


@contextmanager
def another_way(scene: Scene, *, port: int | None = None, known: str | None = None, **options: str) -> Iterator[None]:
    """The node is dialled in another way, until it is left."""
    usual = scene.specctl.environ["SPECCTL_SSH_CONFIG"]
    path = ssh_config(scene.specctl.home, scene.lab.run, port or port_of(scene), **options)
    if known is not None:
        (scene.specctl.home / "known_hosts").write_text(known)
    scene.specctl.environ["SPECCTL_SSH_CONFIG"] = str(path)
    try:
        yield
    finally:
        scene.specctl.environ["SPECCTL_SSH_CONFIG"] = usual


def port_of(scene: Scene) -> int:
    return int(scene.lab.ssh_config.read_text().partition("Port ")[2].split()[0])


@contextmanager
def listening(*, take: bool, words: bytes = b"") -> Iterator[int]:
    """A port where something else is: it says `words`, or nothing at all; with `take` False nothing takes the call."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if take:
            server.listen(64)

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(words)

        if words:
            threading.Thread(target=answer, daemon=True).start()
        yield int(server.getsockname()[1])
        if words:
            server.shutdown(socket.SHUT_RDWR)


@fault
def the_name_of_the_node_does_not_resolve(scene: Scene) -> Iterator[None]:
    scene.start()
    with another_way(scene, HostName="nowhere.invalid"):
        yield


@fault
def the_port_of_the_node_is_closed(scene: Scene) -> Iterator[None]:
    scene.start()
    with listening(take=False) as port, another_way(scene, port=port):
        yield


@fault
def something_else_speaks_on_the_port(scene: Scene) -> Iterator[None]:
    scene.start()
    with listening(take=True, words=b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, another_way(scene, port=port):
        yield


@fault
def the_node_takes_the_connection_and_says_nothing(scene: Scene) -> Iterator[None]:
    scene.start()
    with listening(take=True) as port, another_way(scene, port=port, ConnectTimeout="1"):
        yield


@fault
def the_host_key_of_the_node_is_unknown(scene: Scene) -> Iterator[None]:
    scene.start()
    with another_way(scene, known=""):
        yield


@fault
def the_host_key_of_the_node_has_changed(scene: Scene) -> Iterator[None]:
    scene.start()
    make_key(other := scene.specctl.home / "other")
    key = " ".join(other.with_suffix(".pub").read_text().split()[:2])
    with another_way(scene, known=f"[127.0.0.1]:{port_of(scene)} {key}\n"):
        yield


@fault
def the_node_refuses_the_key(scene: Scene) -> Iterator[None]:
    scene.start()
    make_key(other := scene.specctl.home / "other")
    with another_way(scene, IdentityFile=str(other)):
        yield


@fault
def the_jump_host_is_down(scene: Scene) -> Iterator[None]:
    scene.start()
    with listening(take=False) as port, another_way(scene, ProxyJump=f"root@127.0.0.1:{port}"):
        yield


# --- in the middle of a verb ----------------------------------------------------------------------------------------


class Middle:
    """Every verb, each met in the middle of what it does: its request is there, and its answer is not."""

    def __init__(self, scene: Scene, stack: ExitStack, at: Gate) -> None:
        self.scene, self.at = scene, at
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._stack = stack

    def _attach(self) -> None:
        self.attached: Typed = self._stack.enter_context(typed(self.scene.specctl, *self.scene.words("attach")))
        self.settings = self.attached.settings

    def begin(self, *, attach_shows: bool = True) -> None:
        scene, at = self.scene, self.at
        (scene.specctl.project / "large").write_bytes(os.urandom(LARGE))
        scene.inside(f"head -c {LARGE} /dev/urandom >{scene.run_dir()}/code/large")
        scene.say["push"] = ["push", scene.target, "large", f"{WORKDIR}/pushed"]
        scene.say["pull"] = ["pull", scene.run_id, "large", "--to", "pulled"]
        scene.say["logs_f"] = ["logs", scene.run_id, "-f"]
        if attach_shows:
            self._attach()
        at.hold("start")
        self._start("launch")
        self._start("logs_f")
        for verb, agent in (("push", "receive"), ("pull", "send")):
            at.hold(agent, "halfway")
            self._start(verb)
        at.until_came("follow")
        for agent in ("start", "receive", "send"):
            at.until_held(agent)
        if attach_shows:
            self.attached.until("step=")
        # Last and at once those that soon give up on an agent that says nothing, as one does that is held.
        last = ["logs", "status", "stop"]
        for verb in last:
            at.hold(verb)
            self._start(verb)
        if not attach_shows:
            at.hold("attach")
            self._attach()
            last.append("attach")
        for verb in last:
            at.until_held(verb)

    def _start(self, verb: str) -> None:
        self.processes[verb] = self.scene.specctl.start(*self.scene.words(verb))

    def go_on(self) -> None:
        """Whatever was held back goes on."""
        self.at.open()

    def asked(self, verb: str) -> Done:
        """What the verb said in the end."""
        if verb == "attach":
            code = self.attached.end(timeout_s=DEADLINE_S)
            assert self.attached.settings == self.settings, "the terminal was not given back as it was"
            return Done(code=code, out=self.attached.text, err="")
        process = self.processes[verb]
        out, err = process.communicate(timeout=DEADLINE_S)
        assert "Traceback (most recent call last)" not in err, err
        if verb == "logs_f":
            written = self.scene.inside(f"tail -n +2 {self.scene.run_dir()}/{self.scene.run_id}.a1.log")
            assert out == written or (process.returncode == 130 and written.startswith(out)), "lost or doubled lines"
        return Done(code=process.returncode, out=out, err=err)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@contextmanager
def in_the_middle(scene: Scene, *, attach_shows: bool = True) -> Iterator[Middle]:
    scene.start()
    with ExitStack() as stack:
        at = stack.enter_context(gate(scene))
        middle = Middle(scene, stack, at)
        stack.callback(middle.close)
        middle.begin(attach_shows=attach_shows)
        scene.asking = middle.asked
        yield middle
        scene.asking = None


def sessions(scene: Scene) -> list[int]:
    """The processes of sshd that serve a connection, as the node counts."""
    return [pid for pid, words in processes(scene) if words.startswith("sshd: root")]


def processes(scene: Scene) -> list[tuple[int, str]]:
    """Pid, as the node counts, and words of everything that runs on the node and in its containers."""
    script = "for p in /proc/[0-9]*; do printf '%s ' ${p#/proc/}; tr '\\0\\n' '  ' <$p/cmdline 2>/dev/null; echo; done"
    found = (line.partition(" ") for line in scene.on_node(script).splitlines())
    return [(int(pid), words) for pid, _, words in found]


def signal_sessions(scene: Scene, pids: list[int], name: str) -> None:
    scene.on_node(f"kill -{name} {' '.join(map(str, pids))} 2>/dev/null; :")


def until_nobody_is_left(scene: Scene) -> None:
    """No agent that served a verb, nor anything that led to one, is left on the node or in its containers."""

    def left() -> list[str]:
        serving = ("specctl-bound", "specctl-enter", "specctl-fanout", "runs on a target", f"{FOLDER}/python")
        return [words[:300] for _, words in processes(scene) if any(word in words for word in serving)]

    try:
        poll_until(lambda: not left(), timeout_s=40)
    except AssertionError:
        raise AssertionError(f"left on the node: {left()}") from None


def transfers_go_on(scene: Scene) -> None:
    """What was broken off is not sent twice."""
    push, pull = (scene.specctl(*scene.words(verb), "--json") for verb in ("push", "pull"))
    for done, moved in ((push, "sent_bytes"), (pull, "pulled_bytes")):
        assert done.code == 0 and done.json[moved] < LARGE * 3 // 4, done
    here = scene.specctl.project
    assert scene.inside(f"sha256sum <{WORKDIR}/pushed").split()[0] == sha256(here / "large")
    assert scene.inside(f"sha256sum <{scene.run_dir()}/code/large").split()[0] == sha256(here / "pulled" / "large")


def sha256(path: Path) -> str:
    return subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]


@fault
def sshd_is_killed_in_the_middle_of_a_verb(scene: Scene) -> Iterator[None]:
    with in_the_middle(scene) as middle:
        signal_sessions(scene, sessions(scene), "KILL")
        middle.go_on()
        yield
        until_nobody_is_left(scene)
        transfers_go_on(scene)


@fault
def sshd_is_frozen_in_the_middle_of_a_verb(scene: Scene) -> Iterator[None]:
    with in_the_middle(scene) as middle:
        frozen = sessions(scene)
        signal_sessions(scene, frozen, "STOP")
        middle.go_on()
        yield
        signal_sessions(scene, frozen, "CONT")
        until_nobody_is_left(scene)
        transfers_go_on(scene)


@fault
def the_link_is_cut_in_the_middle_of_a_verb(scene: Scene) -> Iterator[None]:
    """As by a pulled cable: nothing arrives, nobody says goodbye; it is put back once all but the follower have given
    up."""
    with in_the_middle(scene) as middle:
        scene.lab.cut()
        try:
            middle.go_on()
            said = {verb: middle.asked(verb) for verb in ("status", "logs", "launch", "push", "pull", "attach", "stop")}
        finally:
            scene.lab.mend()
        scene.asking = lambda verb: said.get(verb) or middle.asked(verb)
        yield
        until_nobody_is_left(scene)
        transfers_go_on(scene)


@fault
def ctrl_c_in_the_middle_of_a_verb(scene: Scene) -> Iterator[None]:
    with in_the_middle(scene, attach_shows=False) as middle:
        middle.attached.type("\x03")
        for process in middle.processes.values():
            process.send_signal(signal.SIGINT)
        for verb, process in middle.processes.items():
            assert process.wait(timeout=30) == 130, f"{verb}: {process.returncode}"
        middle.go_on()
        yield
        until_nobody_is_left(scene)
        transfers_go_on(scene)


@fault
def the_laptop_sleeps_in_the_middle_of_a_verb(scene: Scene) -> Iterator[None]:
    with in_the_middle(scene) as middle:
        pids = [middle.attached.pid, *(process.pid for process in middle.processes.values())]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        middle.go_on()
        time.sleep(ASLEEP_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        yield


@fault
def the_link_is_away_for_a_while(scene: Scene) -> Iterator[None]:
    scene.start()
    with Wire(port_of(scene)) as wire, another_way(scene, port=wire.port):
        follower = scene.specctl.start("logs", scene.run_id, "-f")
        out, err = follower.stdout, follower.stderr
        assert out is not None and err is not None
        shown = [out.readline()]
        reader = threading.Thread(target=lambda: shown.append(out.read()))
        reader.start()
        wire.refuse()
        wire.cut()
        said = ""
        while "(3rd try)" not in said:
            said += err.readline()
        away = {verb: scene.ask(verb) for verb in ("status", "stop")}
        wire.listen()
        while "the link is back" not in said:
            said += err.readline()
        assert scene.specctl("stop", scene.run_id).code == 0
        said += err.read()
        reader.join()
        code = follower.wait(timeout=DEADLINE_S)
    written = scene.inside(f"tail -n +2 {scene.run_dir()}/{scene.run_id}.a1.log")
    assert "".join(shown) == written, "logs -f lost or doubled something"
    away["logs_f"] = Done(code=code, out="", err=said)
    scene.asking = lambda verb: away.get(verb) or scene.ask(verb)
    yield

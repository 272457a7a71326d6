"""`specctl watch`: whoever is not looking is told of everything, at least once, by an id that stays the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socketserver
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator import herald
from orchestrator.agent import vigil
from orchestrator.agent.journal import Journal
from orchestrator.agent.vigil import Vigil
from orchestrator.model import FollowedLog, LogSummary, RunPaths, ScanState
from tests.driver import Specctl, alive, poll_until
from tests.sshd import LoopbackSshd

LOSES_ONE = """
import os, sys, threading, time
def drafter(name):
    for step in range(1, 100000):
        print(f"step={step} worker={name} loss=1 tok/s=10", flush=True)
        time.sleep(0.05)
        if step == 3 and name == "drafter-1":
            raise RuntimeError("first")
        if os.path.exists(sys.argv[1]):
            os._exit(3)
for name in ("drafter-0", "drafter-1"):
    threading.Thread(target=drafter, args=(name,), name=name).start()
"""


def launched(specctl: Specctl, **target: str) -> tuple[str, Path]:
    """A run that goes on without one of its workers, until the file is there."""
    over = specctl.home / "over"
    (specctl.project / "loses.py").write_text(LOSES_ONE)
    run = specctl.launch("--until", "process", "--", sys.executable, "loses.py", str(over), **target).json["run_id"]
    poll_until(lambda: specctl.status(run)["state"] == "DEGRADED", timeout_s=60)
    return run, over


def test_what_happens_is_told_in_order_and_the_end_by_how_it_was(specctl: Specctl) -> None:
    run, over = launched(specctl)
    with specctl.start("watch", run, "--json") as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert first["kind"] == "exception" and first["text"].startswith("RuntimeError: first in drafter-1")
        assert first["id"].startswith(f"{run}:") and first["run_id"] == run
        over.touch()
        rest = [json.loads(line) for line in watching.stdout]
        assert watching.wait(60) == 1
    assert [news["kind"] for news in rest] == ["worker", "end"] and rest[-1]["id"] == f"{run}:end"
    assert rest[-1]["text"].startswith("FAILED: exit code 3")
    again = [json.loads(line)["id"] for line in specctl("watch", run, "--json").out.splitlines()]
    assert again == [news["id"] for news in (first, *rest)], "the same thing has the same id for ever"
    assert [json.loads(line)["kind"] for line in specctl("watch", run, "--json", "--on", "end").out.splitlines()] == [
        "end"
    ]


def test_workers_that_are_done_or_told_to_stop_have_not_died(specctl: Specctl) -> None:
    (specctl.project / "ends.py").write_text("""
import json, os
of = {"time": 1.0, "source": "trainer", "attempt": 1, "nonce": os.environ["SPECCTL_NONCE"], "event": "worker_down"}
with open(os.path.join(os.environ["SPECCTL_RUN_DIR"], "events.jsonl"), "a") as file:
    for worker, reason in ("loader-0", "done"), ("drafter-1", "failed"), ("target-0", "aborted"):
        file.write(json.dumps({**of, "worker": worker, "reason": reason}) + "\\n")
""")
    run = specctl.launch("--until", "process", "--", sys.executable, "ends.py").json["run_id"]
    poll_until(lambda: specctl.status(run)["state"] == "SUCCEEDED", timeout_s=60)
    told = [json.loads(line)["text"] for line in specctl("watch", run, "--json", "--on", "worker").out.splitlines()]
    assert told == ["drafter-1 died"]


def test_a_command_is_run_until_it_works_and_a_watch_that_was_killed_goes_on_where_it_was(specctl: Specctl) -> None:
    run, over = launched(specctl)
    told, ready = specctl.home / "told", specctl.home / "ready"
    whole = specctl.home / "whole.jsonl"
    command = f'[ -e {ready} ] && echo "$SPECCTL_ID $SPECCTL_KIND" >> {told} && cat >> {whole}'
    with specctl.start("watch", run, "--exec", command) as watching:
        assert watching.stderr is not None
        poll_until(lambda: "is not told yet: --exec ended with 1" in watching.stderr.readline())
        assert not told.exists()
        ready.touch()
        poll_until(lambda: told.exists() and len(told.read_text().splitlines()) == 2)
        watching.kill()
    over.touch()
    done = specctl("watch", run, "--exec", command)
    assert done.code == 1
    ids = [line.split()[0] for line in told.read_text().splitlines()]
    # What was told when it was killed may be told twice, which its id shows.
    assert list(dict.fromkeys(ids))[-1] == f"{run}:end" and len(set(ids)) == 3 <= len(ids) <= 4
    assert "has been told already" in specctl("watch", run, "--exec", command).err
    assert len(told.read_text().splitlines()) == len(ids)
    specctl("watch", run, "--exec", command, "--again")
    assert len(told.read_text().splitlines()) == len(ids) + 3
    assert {json.loads(line)["id"] for line in whole.read_text().splitlines()} == set(ids)


def test_records_that_no_supervisor_writes_are_passed_over_and_the_rest_is_told(specctl: Specctl) -> None:
    run, over = launched(specctl)
    over.touch()
    poll_until(lambda: specctl.status(run)["state"] == "FAILED")
    path = specctl.run_dir(run) / "events.jsonl"
    nonce = json.loads(path.read_text().splitlines()[0])["nonce"]
    odd = [f'"time": {time}, "event": "exception"' for time in ("1e999", "-1", "1" + "0" * 400, "NaN", '"now"')]
    odd += ['"time": 1, "event": "exception", "message": "told", "count": 1e999, "n": 1' + "0" * 400]
    with path.open("a") as file:
        file.writelines(f'{{"nonce": "{nonce}", {fields}}}\n' for fields in [*odd, '"time": "' + "[" * 99_999 + '"'])
    for options in ((), ("--json",)):
        done = specctl("watch", run, "--on", "exception", *options)
        assert done.code == 1 and len(done.out.splitlines()) == 2 and "told" in done.out


def test_stalls_and_falls_are_told_in_words_and_each_kind_only_where_it_is_asked_for(specctl: Specctl) -> None:
    (specctl.project / "ends.py").write_text("""
import json, os
of = {"time": 1.0, "source": "supervisor", "attempt": 1, "nonce": os.environ["SPECCTL_NONCE"]}
with open(os.path.join(os.environ["SPECCTL_RUN_DIR"], "events.jsonl"), "a") as file:
    for event in (
        {"event": "stalled", "step": 1200, "silent_s": 130.0, "limit_s": 120.0}, {"event": "stall_over", "step": 1201},
        {"event": "decay", "tok_s": 900.0, "before_tok_s": 2000.0}, {"event": "decay_over", "tok_s": 1990.0},
        {"event": "checkpoint", "step": 1200},
    ):
        file.write(json.dumps({**of, **event}) + "\\n")
""")
    run = specctl.launch("--until", "process", "--", sys.executable, "ends.py").json["run_id"]
    poll_until(lambda: specctl.status(run)["state"] == "SUCCEEDED", timeout_s=60)

    def told(*on: str) -> list[str]:
        return [json.loads(line)["text"] for line in specctl("watch", run, "--json", *on).out.splitlines()]

    stall = ["no step for 2 min at step 1,200 (limit 2 min)", "it steps again at step 1,201"]
    fall = ["tok/s has fallen to 900 from 2,000", "tok/s is as it was before"]
    assert told("--on", "stall") == stall and told("--on", "decay") == fall
    assert told()[:-1] == [*stall, *fall], "a checkpoint is told only where it is asked for"


@contextlib.contextmanager
def server(answers: list[int]) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Answers with each code in turn, and with the last for ever; what it was sent, with the key that it came by."""
    sent: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append((
                self.headers["Idempotency-Key"], json.loads(self.rfile.read(int(self.headers["Content-Length"]))),
            ))  # fmt: skip
            self.send_response(answers[min(len(sent), len(answers)) - 1])
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_address[1]}/hook?token=s3cret", sent
        finally:
            httpd.shutdown()
            thread.join()


def test_a_webhook_is_asked_again_with_the_same_key_and_its_url_is_kept_nowhere(specctl: Specctl) -> None:
    run, over = launched(specctl)
    over.touch()
    with server([503, 200]) as (url, sent):
        done = specctl("watch", run, SPECCTL_WEBHOOK=url)
    assert done.code == 1 and "127.0.0.1 answers 503" in done.err
    keys = [key for key, _ in sent]
    assert keys[0] == keys[1] and len(sent) == 4 and keys[-1] == f"{run}:end"
    assert [news["id"] for _, news in sent] == keys and sent[0][1]["fields"]["message"] == "first"
    kept = [path for path in specctl.home.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert "s3cret" not in done.out + done.err and not kept
    with server([404]) as (url, _):
        refused = specctl("watch", run, "--again", SPECCTL_WEBHOOK=url)
    assert refused.code == 2 and "127.0.0.1 answers 404" in refused.err


class Odd(socketserver.StreamRequestHandler):
    """A server that answers every request with the same bytes, whatever they are."""

    answer = b""

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.server.asked.append(self.client_address)  # type: ignore[attr-defined]
        self.wfile.write(self.answer)


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[object]]]:
    handler = type("Handler", (Odd,), {"answer": answer})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as one:
        one.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{one.server_address[1]}/", one.asked  # type: ignore[attr-defined]
        finally:
            one.shutdown()
            thread.join()


def test_a_webhook_that_sends_on_has_told_nobody(specctl: Specctl) -> None:
    run, over = launched(specctl)
    over.touch()
    with server([200]) as (there, sent), answering(f"HTTP/1.1 302 Found\r\nLocation: {there}\r\n\r\n".encode()) as (
        url, asked,
    ):  # fmt: skip
        done = specctl("watch", run, "--webhook", url)
    assert done.code == 2 and "127.0.0.1 answers 302 to --webhook" in done.err and "give that one" in done.err
    assert len(asked) == 1 and not sent and "s3cret" not in done.err
    with server([200]) as (url, sent):
        assert specctl("watch", run, "--webhook", url.replace("//", "//me:p%40ss@")).code == 1
    assert len(sent) == 3, "nothing counts as told that nobody was told of"


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n"]
)
def test_a_webhook_that_speaks_no_http_is_asked_again(specctl: Specctl, answer: bytes) -> None:
    run, over = launched(specctl)
    over.touch()
    with answering(answer) as (url, asked), specctl.start("watch", run, "--webhook", url) as watching:
        assert watching.stderr is not None
        poll_until(lambda: "answers in no HTTP that can be read" in watching.stderr.readline())
        poll_until(lambda: len(asked) > 1)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130 and "Traceback" not in watching.stderr.read()
    with answering(b"HTTP/1.1 404 \x1b[2J\r\n\r\n") as (url, _):
        refused = specctl("watch", run, "--webhook", url)
    assert refused.code == 2 and "\x1b" not in refused.err and r"404 \x1b[2J" in refused.err


def test_texts_that_no_terminal_and_no_variable_can_hold_are_told_all_the_same(specctl: Specctl) -> None:
    run, over = launched(specctl)
    over.touch()
    poll_until(lambda: specctl.status(run)["state"] == "FAILED")
    path, told = specctl.run_dir(run) / "events.jsonl", specctl.home / "told"
    nonce = json.loads(path.read_text().splitlines()[0])["nonce"]
    odd = {"time": 1, "nonce": nonce, "event": "exception", "type": "T", "worker": "\U0001f525" * 19_000}
    with path.open("a") as file:
        file.write(json.dumps({**odd, "message": "\0 \x1b[2J \ud800 \u202e"}) + "\n")
    plain = specctl("watch", run, "--on", "exception")
    assert plain.code == 1 and r"T: \x00 \x1b[2J \ud800 \u202e in" in plain.out and plain.out.count("\n") == 2
    command = f'echo "$SPECCTL_TEXT" | head -c 11 >> {told}; echo printed'
    done = specctl("watch", run, "--on", "exception", "--exec", command, "--json", LC_ALL="C")
    assert len(done.objects) == 2 and done.objects[1]["fields"]["message"] == "\0 \x1b[2J \ud800 \u202e"
    assert done.err.count("printed") == 2, "with --json stdout has nothing but what happened"
    assert told.read_bytes() == b"RuntimeErro" + b"T:  \x1b[2J ? "


def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(
    specctl: Specctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(herald, "COMMAND_S", 0.5)
    pids = specctl.home / "pids"
    news = {"id": "r:1", "run_id": "r", "target": "t", "kind": "end", "text": "x"}
    with pytest.raises(herald.NotTold, match=r"did not end within"):
        herald.command(f"sleep 1000 & echo $! > {pids}; wait")(news)
    poll_until(lambda: not alive(int(pids.read_text())))


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_nothing_is_missing_after_a_link_that_was_lost(specctl: Specctl, sshd: LoopbackSshd, asleep: bool) -> None:
    """`asleep`: this side stands still meanwhile, as on a laptop whose lid is closed."""
    specctl.inventory.write_text(
        f"targets:\n  box: {{ssh: node1, workdir: {specctl.workdir}, python: {sys.executable}}}\n"
    )
    specctl.environ["SPECCTL_SSH_CONFIG"] = str(sshd.ssh_config)
    run, over = launched(specctl, target="box")
    with specctl.start("watch", run, "--json") as watching:
        assert watching.stdout is not None and watching.stderr is not None
        assert [json.loads(watching.stdout.readline())["kind"] for _ in range(2)] == ["exception", "worker"]
        if asleep:
            os.kill(watching.pid, signal.SIGSTOP)
        sshd.stop()
        if not asleep:
            poll_until(lambda: "link lost" in watching.stderr.readline())
        over.touch()
        poll_until(lambda: (specctl.run_dir(run) / "exit.json").exists())
        sshd.start()
        if asleep:
            os.kill(watching.pid, signal.SIGCONT)
        assert json.loads(watching.stdout.readline())["id"] == f"{run}:end"
        assert watching.wait(60) == 1


def test_what_nobody_can_tell_of_is_refused(specctl: Specctl) -> None:
    run, over = launched(specctl)
    over.touch()
    wrong = specctl("watch", run, "--on", "exeption")
    assert wrong.code == 2 and "--on exeption: there is exception, worker, stall" in wrong.err
    assert "two watches" in specctl("watch", run, "--exec", "true", "--webhook", "http://127.0.0.1:1/").err
    for url in ("127.0.0.1:80", "http://[::1", "http://127.0.0.1:99999/", "http://127.0.0.1:x/", "ftp://h/"):
        refused = specctl("watch", run, "--webhook", url)
        assert refused.code == 2 and "is no http:// or https:// URL" in refused.err
    for url in ("http://127.0.0.1/a b", "http://127.0.0.1/\xe9"):
        assert "characters that a URL cannot have" in specctl("watch", run, "--webhook", url).err


# --- what no line says ----------------------------------------------------------------------------------------------


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`look(step, at, now, ...)` of a supervisor's vigil, and the events that it has noted."""
    monkeypatch.setattr(vigil, "EVERY_S", 0.0)
    paths = RunPaths(root=str(tmp_path), run_id="run")
    one = Vigil(paths, Journal(paths, attempt=1, nonce="n"), nonce="n", created_at=0.0)

    def look(now: float, **summary: Any) -> list[tuple[str, Any]]:
        before = _noted(paths)
        one.look(lambda: [FollowedLog(summary=LogSummary(**summary))], now)
        return _noted(paths)[len(before) :]

    return look


def _noted(paths: RunPaths) -> list[tuple[str, Any]]:
    try:
        lines = Path(paths.events).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(event["event"], event.get("step")) for event in map(json.loads, lines)]


def test_a_stall_is_noted_once_and_so_is_its_end(notes: Any) -> None:
    stepping = {"steps_seen": 9, "step_interval_s": 1.0}
    assert notes(100.0, step=9, step_at=99.0, **stepping) == []
    assert notes(218.0, step=9, step_at=99.0, **stepping) == []
    assert notes(220.0, step=9, step_at=99.0, **stepping) == [("stalled", 9)]
    assert notes(900.0, step=9, step_at=99.0, **stepping) == []
    assert notes(901.0, step=10, step_at=900.5, **stepping) == [("stall_over", 10)]
    # A slow run may be silent for longer, and one that says what it does for longer still.
    assert notes(1200.0, step=11, step_at=901.0, steps_seen=11, step_interval_s=60.0) == []
    assert notes(1400.0, step=12, step_at=1201.0, phase="checkpoint", phase_at=1202.0, **stepping) == []
    assert notes(9000.0, step=12, step_at=1201.0, phase="checkpoint", phase_at=1202.0, **stepping) == [("stalled", 12)]


def test_the_supervisor_notes_while_it_lasts_that_a_program_has_become_slow(specctl: Specctl) -> None:
    over = specctl.home / "over"
    (specctl.project / "slows.py").write_text("""
import os, sys, time
for step in range(1, 16):
    print(f"step={step} loss=1 tok/s={100 if step < 11 else 30}", flush=True)
    time.sleep(0.05)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
""")
    run = specctl.launch("--until", "process", "--", sys.executable, "slows.py", str(over)).json["run_id"]
    with specctl.start("watch", run, "--json", "--on", "decay") as watching:
        assert watching.stdout is not None
        news = json.loads(watching.stdout.readline())
        over.touch()
        assert news["kind"] == "decay" and news["text"] == "tok/s has fallen to 30 from 100", news
        assert watching.stdout.read() == "" and watching.wait(60) == 0


def test_a_run_that_becomes_slow_is_noted_once_until_it_is_as_it_was(notes: Any) -> None:
    def figures(*tok_s: float) -> dict[str, Any]:
        return {"step": 5, "step_at": 10.0, "tok_s": tok_s[-1], "scan": ScanState(recent_tok_s=list(tok_s))}

    assert notes(11.0, **figures(100.0, 98.0)) == []
    assert notes(12.0, **figures(100.0, 98.0, 50.0, 52.0)) == [("decay", None)]
    assert notes(13.0, **figures(98.0, 50.0, 52.0, 51.0)) == [] and notes(14.0, **figures(50.0, 60.0)) == []
    assert notes(15.0, **figures(60.0, 95.0)) == [("decay_over", None)]


def test_a_watch_ends_with_an_interrupt(specctl: Specctl) -> None:
    run, _ = launched(specctl)
    with specctl.start("watch", run) as watching:
        assert watching.stdout is not None and "exception" in watching.stdout.readline()
        os.kill(watching.pid, signal.SIGINT)
        assert watching.wait(60) == 130

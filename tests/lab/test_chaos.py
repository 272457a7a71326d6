"""Chaos: that its oracle finds each kind of lie, and its observer what is there; and a bounded part of it for CI.

The long run is `make chaos`, its table docs/chaos.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.driver import poll_until
from tests.lab.chaos import oracle
from tests.lab.chaos.__main__ import run
from tests.lab.chaos.kinds import KINDS
from tests.lab.chaos.lane import Lane
from tests.lab.chaos.ledger import Ledger
from tests.lab.chaos.observer import Process, Truth
from tests.lab.chaos.oracle import Case, Finding, Lie, Story
from tests.lab.chaos.pool import Pool

TOKEN, OTHER = "tok-0001-0-1-abcdef", "tok-0001-0-2-abcdef"
RUN_ID = "20260101-000000-act-0001"
NOT_YET = Truth(token=TOKEN, run_id=None, starts=0, ended=False, alive=frozenset())
LIVES = Truth(token=TOKEN, run_id=RUN_ID, starts=1, ended=False, alive=frozenset({7}), log=b"one\ntwo\n")
DEAD = Truth(token=TOKEN, run_id=RUN_ID, starts=1, ended=True, alive=frozenset(), log=b"one\ntwo\nthree\n")
KILLED = replace(DEAD, ended=False)
LEFT = "exit code 3; 1 process (7) left, which specctl stop ends"


def case(before: Truth, after: Truth, kind: str = "steps", *deeds: str) -> Case:
    return Case(before=before, after=after, story=Story(kind=KINDS[kind], deeds=set(deeds)))


def lies(found: Iterable[Finding]) -> list[Lie]:
    return [finding.lie for finding in found]


# --- the oracle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["RUNNING", "STARTING", "STALLED", "STOPPING"])
def test_a_run_that_was_dead_before_and_is_said_to_live_is_a_false_alive(state: str) -> None:
    assert lies(oracle.state(state, "step 12", case(DEAD, DEAD))) == [Lie.FALSE_ALIVE]
    assert lies(oracle.state(state, "step 12", case(NOT_YET, NOT_YET))) == [Lie.FALSE_ALIVE]
    assert not lies(oracle.state(state, "step 12", case(LIVES, LIVES)))
    assert not lies(oracle.state(state, "step 12", case(LIVES, DEAD))), "it ended while the verb ran: a race"
    assert not lies(oracle.state(state, "step 12", case(NOT_YET, LIVES)))


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "KILLED", "STOPPED", "LOST", "NEVER_STARTED"])
def test_a_run_that_lives_afterwards_and_is_said_to_be_over_is_a_false_dead(state: str) -> None:
    assert lies(oracle.state(state, "exit code 0", case(LIVES, LIVES))) == [Lie.FALSE_DEAD]
    assert lies(oracle.state(state, "exit code 0", case(NOT_YET, LIVES))) == [Lie.FALSE_DEAD]


def test_what_is_said_to_be_left_of_an_ended_run_must_have_been_there() -> None:
    assert not lies(oracle.state("FAILED", LEFT, case(LIVES, LIVES)))
    assert lies(oracle.state("FAILED", LEFT, case(DEAD, DEAD))) == [Lie.FALSE_ALIVE]
    assert lies(oracle.state("STOPPING", "no process is left; how", case(LIVES, LIVES))) == [Lie.FALSE_DEAD]
    assert not lies(oracle.state("STOPPING", "no process is left; how", case(DEAD, DEAD)))


def test_a_run_that_has_begun_is_not_queued() -> None:
    assert lies(oracle.state("QUEUED", "accepted 3 s ago", case(LIVES, LIVES))) == [Lie.FALSE_DEAD]
    assert lies(oracle.state("QUEUED", "accepted 3 s ago", case(DEAD, DEAD))) == [Lie.FALSE_ALIVE]
    assert not lies(oracle.state("QUEUED", "accepted 3 s ago", case(NOT_YET, LIVES)))


@pytest.mark.parametrize(
    ("state", "why", "truth", "kind", "deed", "true"),
    [
        ("SUCCEEDED", "exit code 0 after step 9", DEAD, "steps", "", True),
        ("SUCCEEDED", "exit code 0 after step 9", KILLED, "steps", "SIGKILL", False),
        ("FAILED", "exit code 3", DEAD, "exit3", "", True),
        ("FAILED", "exit code 4", DEAD, "exit3", "", False),
        ("FAILED", "exit code 1", DEAD, "steps", "", False),
        ("KILLED", "SIGSEGV", DEAD, "segv", "", True),
        ("KILLED", "SIGTERM", KILLED, "steps", "SIGTERM", True),
        ("KILLED", "SIGKILL", KILLED, "steps", "SIGTERM", False),
        ("KILLED", "SIGKILL", KILLED, "steps", "", False),
        ("STOPPED", "stopped as asked (SIGTERM)", KILLED, "steps", "stop", True),
        ("STOPPED", "stopped as asked (SIGTERM)", DEAD, "steps", "", False),
        ("LOST", "no process and no exit record", KILLED, "steps", "supervisor", True),
        ("LOST", "no process and no exit record", DEAD, "steps", "", False),
        ("NEVER_STARTED", "no such program", NOT_YET, "steps", "", True),
        ("NEVER_STARTED", "no such program", DEAD, "steps", "", False),
        ("DEGRADED", "drafter-1 died", LIVES, "worker", "", True),
        ("DEGRADED", "drafter-1 died", LIVES, "steps", "", False),
    ],
)
def test_an_end_must_be_what_the_program_did_or_what_was_done_to_it(
    state: str, why: str, truth: Truth, kind: str, deed: str, true: bool
) -> None:
    deeds = {deed} - {""}
    assert lies(oracle.state(state, why, case(truth, truth, kind, *deeds))) == ([] if true else [Lie.WRONG_END])


def test_a_stop_that_leaves_something_alive_leaves_an_orphan_and_so_does_one_that_names_what_is_dead() -> None:
    assert lies(oracle.stopped(0, [], case(LIVES, LIVES))) == [Lie.ORPHAN]
    assert not lies(oracle.stopped(0, [], case(LIVES, DEAD)))
    assert not lies(oracle.stopped(1, [{"pid": 7}], case(LIVES, LIVES)))
    assert lies(oracle.stopped(1, [{"pid": 7}], case(DEAD, DEAD))) == [Lie.FALSE_ALIVE]


def test_a_launch_that_is_verified_has_begun_and_one_that_lives_is_verified() -> None:
    assert lies(oracle.launched(True, None, case(NOT_YET, NOT_YET), undisturbed=True)) == [Lie.FALSE_ALIVE]
    assert lies(oracle.launched(False, "FAILED", case(NOT_YET, LIVES, "deaf"), undisturbed=True)) == [Lie.WRONG_CODE]
    assert not lies(oracle.launched(False, "FAILED", case(NOT_YET, LIVES, "exit3"), undisturbed=True))
    assert not lies(oracle.launched(False, "LOST", case(NOT_YET, LIVES), undisturbed=False))
    assert not lies(oracle.launched(True, None, case(NOT_YET, LIVES), undisturbed=True))


def test_what_stays_in_a_container_where_no_run_lives_is_left_behind() -> None:
    shell = Process(pid=70, inner=7, name="sh", token=None, supervises=None, agent=False)
    assert lies(oracle.left_behind([shell, replace(shell, agent=True)])) == [Lie.LEFT_BEHIND]
    assert lies(oracle.left_behind([replace(shell, supervises=RUN_ID)])) == [Lie.LEFT_BEHIND]
    assert not lies(oracle.left_behind([shell]))


def test_one_launch_begins_once() -> None:
    assert lies(oracle.started_once(TOKEN, 2, [RUN_ID])) == [Lie.DOUBLE_START]
    assert lies(oracle.started_once(TOKEN, 1, [RUN_ID, f"{RUN_ID}x"])) == [Lie.DOUBLE_START]
    assert not lies(oracle.started_once(TOKEN, 1, [RUN_ID]))


def test_a_run_that_is_there_is_known() -> None:
    assert lies(oracle.exists(False, case(LIVES, LIVES))) == [Lie.FALSE_DEAD]
    assert lies(oracle.exists(False, case(DEAD, DEAD))) == [Lie.LOST_BYTES]
    assert not lies(oracle.exists(False, case(DEAD, replace(DEAD, run_id=None)))), "it was removed meanwhile"


def test_a_line_of_another_run_is_seen_among_its_own() -> None:
    assert lies(oracle.own_lines(f"{TOKEN} 1\n{OTHER} 1\n".encode(), TOKEN)) == [Lie.WRONG_RUN]
    assert not lies(oracle.own_lines(f"{TOKEN} 1\nno token\n".encode(), TOKEN))


@pytest.mark.parametrize(
    ("shown", "true"),
    [
        (b"one\ntwo\n", True),
        (b"one\ntwo\nthr\n", True),  # as it stood meanwhile; a line without an end is given one
        (b"one\ntwo\nthree\n", True),
        (b"one\n", False),
        (b"", False),
        (b"two\nthree\n", False),
        (b"one\ntwo\ntwo\nthree\n", False),
        (b"two\none\n", False),
        (b"one\ntwo\nthree\nfour\n", False),
    ],
)
def test_every_byte_that_is_in_the_log_is_shown_in_order_and_once(shown: bytes, true: bool) -> None:
    found = lies(oracle.whole_log(shown, b"one\ntwo\n", b"one\ntwo\nthree\n", "logs"))
    assert found == ([] if true else [Lie.LOST_BYTES])


def test_the_last_lines_and_those_that_match_are_those_of_some_moment() -> None:
    before, after = b"a 1\nb 2\na 3\n", b"a 1\nb 2\na 3\na 4\n"
    for shown in (b"b 2\na 3\n", b"a 3\na 4\n"):
        assert not lies(oracle.last_lines(shown, before, after, 2, "logs"))
    for shown in (b"a 1\nb 2\n", b"a 4\n", b"a 1\na 4\n", b""):
        assert lies(oracle.last_lines(shown, before, after, 2, "logs")) == [Lie.LOST_BYTES]
    for shown in (b"a 1\na 3\n", b"a 1\na 3\na 4\n"):
        assert not lies(oracle.matching_lines(shown, before, after, b"a", "logs"))
    for shown in (b"a 1\n", b"a 1\nb 2\na 3\n", b"a 3\na 4\n"):
        assert lies(oracle.matching_lines(shown, before, after, b"a", "logs")) == [Lie.LOST_BYTES]


def test_lines_that_say_where_they_stand_must_stand_there() -> None:
    def said(*lines: tuple[int, str]) -> list[dict[str, object]]:
        return [{"log": "/w/x.a1.log", "offset": 90 + offset, "line": line} for offset, line in lines]

    truth = case(LIVES, DEAD)
    assert not lies(oracle.placed_lines(said((0, "one"), (4, "two")), truth))
    assert lies(oracle.placed_lines(said((0, "one"), (8, "three")), truth)) == [Lie.LOST_BYTES]
    assert lies(oracle.placed_lines(said((0, "one")), truth)) == [Lie.LOST_BYTES]
    assert lies(oracle.placed_lines(said((0, "one"), (4, "two"), (8, OTHER)), truth)) == [Lie.WRONG_RUN, Lie.LOST_BYTES]
    own = {"log": "/w/own.log", "offset": 0, "line": "mine"}
    with_own = case(replace(LIVES, own=b"mine\nmine too\n"), replace(DEAD, own=b"mine\nmine too\n"))
    assert lies(oracle.placed_lines([*said((0, "one"), (4, "two")), own], with_own)) == [Lie.LOST_BYTES]


def test_a_traceback_an_unknown_exit_code_and_a_verb_that_hangs_are_counted() -> None:
    def manners(code: int, err: str = "", *, killed: bool = False, late: bool = False) -> list[Lie]:
        return lies(oracle.manners(["status"], code, err, killed=killed, late=late))

    trace = 'Traceback (most recent call last):\n  File "orchestrator/verbs/status.py", line 1\n'
    assert manners(1, trace) == [Lie.CRASH]
    assert manners(7) == [Lie.CRASH] and manners(-9) == [Lie.CRASH] and manners(-9, killed=True) == []
    assert manners(-9, late=True) == [Lie.LATE]
    assert all(manners(code) == [] for code in (0, 1, 3, 4, 130))
    assert lies(oracle.code(["status"], 0, {1})) == [Lie.WRONG_CODE]


def test_the_last_word_of_logs_is_read() -> None:
    said = f"note\n{RUN_ID} attempt 1 on cta: RUNNING (step 3, 10 tok/s (ok)); 1,000 of 1,000 lines; last\n"
    assert oracle.last_word(said) == (RUN_ID, "RUNNING", "step 3, 10 tok/s (ok)")


def test_each_kind_of_lie_has_a_test_here() -> None:
    text = Path(__file__).read_text()
    assert [lie for lie in Lie if f"Lie.{lie.name}" not in text] == []


# --- the observer ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


def test_the_observer_sees_from_outside_what_begins_forks_writes_and_dies(lab_ready: None, pool: Pool) -> None:
    with Lane(0, seed=1, pool=pool, ledger=Ledger(seed=1)) as lane:
        box = lane.boxes[0]
        assert not box.observer.truth(TOKEN, box.observer.look()).started
        script = f"cd /root && exec python3 - daemon {TOKEN}"
        act = Path(oracle.__file__).with_name("act.py").read_text()
        lane.lab.inside(box.vmid, ["sh", "-c", f"{script} >/dev/null 2>&1"], input=act, check=True)
        poll_until(lambda: box.observer.truth(TOKEN, box.observer.look()).starts == 1)
        poll_until(lambda: box.observer.truth(TOKEN, box.observer.look()).alive)

        def killed() -> bool:
            """The daemon that the program has left behind, or still the one that is just leaving it behind."""
            for process in box.observer.look().processes:
                if process.token == TOKEN:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
            return bool(box.observer.truth(TOKEN, box.observer.look()).dead)

        poll_until(killed)
        assert not box.observer.truth(TOKEN, box.observer.look()).ended, "it did not leave by itself"


# --- the bounded part -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [11, 12, 13, 14])
def test_a_short_chaos_has_no_false_word(lab_ready: None, seed: int) -> None:
    ledger = run(seed=seed, launches=4, lanes=1)
    assert not ledger.said, "\n\n".join([*ledger.said, f"again: make chaos SEED={seed} LAUNCHES=4 LANES=1"])
    assert ledger.launches >= 4 and sum(ledger.judged.values()) > 4, "and the oracle was asked"

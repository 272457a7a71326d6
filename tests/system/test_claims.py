"""Claims and the line, as processes meet them: real locks, real deaths, in whatever order things happen."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.agent import claimed, claims, locks
from orchestrator.agent.claims import Claims
from orchestrator.model import Claimant, Device, GpuClaim, Obstacle, to_json
from tests.driver import PROGRAMS, poll_until

ROOT = Path(__file__).parents[2]
ONE, TWO, THREE = (Device(number=str(n), uuid=f"GPU-{n}1111111-2222-3333-4444-555555555555") for n in range(3))
ALL = (ONE, TWO, THREE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "claims"
    path.mkdir()
    path.chmod(0o1777)
    return path


def who(name: str) -> Claimant:
    return Claimant(run_id=name, place="box, container 200 on pve1", host="gpu1", owner="a@laptop",
                    boot=claimed.boot_id(), since=time.time())  # fmt: skip


def claimant(folder: Path, name: str, pool: Sequence[Device] = (ONE,), count: int | None = None) -> Claims:
    return Claims(str(folder), pool, count or len(pool), who(name))


def in_the_way(folder: Path, pool: Sequence[Device] = (ONE,)) -> list[Obstacle]:
    return claimed.obstacles(str(folder), pool, claimed.ahead(claimed.line(str(folder)), pool, None), deep=False)


class Process:
    """A claimant of its own, which waits in line and then holds what it has got until it is let go or killed."""

    def __init__(
        self, folder: Path, name: str, *, count: int = 1, names: str = "0", prefix: Sequence[str] = ()
    ) -> None:
        self.done = folder.parent / "done"
        self.running = subprocess.Popen(
            [*prefix, sys.executable, "-S", PROGRAMS / "claims_gpus.py", ROOT, folder, name, str(count),
             ",".join(ALL[int(number)].uuid for number in names), self.done],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.running.stdout is not None
        self.first = self.running.stdout.readline()

    def until_it_has(self) -> str:
        assert self.running.stdout is not None
        line = self.first
        while line.startswith("in line"):
            line = self.running.stdout.readline()
        return line

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()

    def let_go(self) -> None:
        self.running.communicate("")


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(name: str, **more: object) -> Process:
        started.append(Process(folder, name, **more))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def test_a_claim_names_its_holder_and_is_void_the_moment_that_is_killed(
    folder: Path, start: Callable[..., Process]
) -> None:
    holder = start("first")
    assert holder.first == f"has {ONE.uuid}\n"
    [found] = in_the_way(folder)
    assert found.run_id == "first" and found.what == (
        "held by run first of a@laptop (box, container 200 on pve1; host gpu1)"
    )
    assert claimant(folder, "second").take({}, wait=False) == [found]
    holder.kill()
    assert in_the_way(folder) == [], "what it has left in the folder names nobody"
    second = claimant(folder, "second")
    assert second.take({}, wait=False) == [] and in_the_way(folder)[0].run_id == "second"
    second.release()
    assert in_the_way(folder) == []


def test_the_name_that_a_dead_holder_has_left_is_not_its_successors(folder: Path) -> None:
    old = claimant(folder, "old")
    assert old.take({}, wait=False) == []
    old.release()
    fd = locks.open_shared(claimed.lock_path(str(folder), ONE))
    assert locks.take(fd, claimed.HELD)
    assert [one.what for one in in_the_way(folder)] == ["held by somebody who is just taking it"]
    claim = GpuClaim(nonce="", claims_dir=str(folder), pool=[ONE], count=1, asked_at=0.0, held=[ONE])
    assert claimed.lost(claim, "old") == ["0"]
    os.close(fd)


def test_a_holder_under_another_kernel_is_told_with_what_must_not_be(folder: Path) -> None:
    far = Claims(str(folder), (ONE,), 1, dataclasses.replace(who("far"), boot="another"))
    assert far.take({}, wait=False) == []
    assert [one.what for one in in_the_way(folder)] == [
        f"held by {who('far').words}, under another kernel: the folder is shared by machines, and must not be"
    ]
    far.release()


def test_a_child_of_the_holder_keeps_nothing(folder: Path) -> None:
    mine = claimant(folder, "first")
    assert mine.take({}, wait=False) == []
    child = subprocess.Popen(["sleep", "600"], close_fds=False)
    mine.release()
    assert in_the_way(folder) == []
    child.kill()
    child.wait()


def test_twenty_who_wait_get_it_one_after_another_in_order(folder: Path, start: Callable[..., Process]) -> None:
    holder = start("holder")
    waiting = [start(f"run-{n:02}") for n in range(20)]
    assert [one.first for one in waiting] == [f"in line {n}\n" for n in range(1, 21)]
    claim = GpuClaim(nonce="", claims_dir=str(folder), pool=[ONE], count=1, asked_at=0.0, queued_at=0.0)
    stands = claimed.stand(claim, "run-19")
    assert stands.position == 20 and stands.ahead[-1] == "run-18" and stands.obstacles[0].run_id == "holder"
    for number in (3, 11, 12, 19):  # in the middle, beside each other, at the end
        waiting[number].kill()
    assert claimed.stand(claim, "run-18").position == 16
    left = [one for number, one in enumerate(waiting) if number not in (3, 11, 12, 19)]
    holder.kill()
    for one in left:
        assert one.until_it_has() == f"has {ONE.uuid}\n"
        one.let_go()
    got = left[0].done.read_text().splitlines()
    assert got == ["holder", *(f"run-{n:02}" for n in range(20) if n not in (3, 11, 12, 19))]
    assert claimed.line(str(folder)) == [] and in_the_way(folder) == []


@pytest.mark.parametrize("scene", ["nobody is there", "it gets in line", "it gets out of line"])
def test_killed_at_any_point_it_stands_in_nobodys_way(folder: Path, scene: str) -> None:
    """Each call that goes to the kernel is in turn the last that a process makes."""
    for point in itertools.count(1):
        blocker = claimant(folder, "blocker")
        if scene != "nobody is there":
            assert blocker.take({}, wait=False) == []
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                blocker.release()  # of this process' own copies of the open files; the lock is the parent's, too
                mine = claimant(folder, "dies", ALL[:2])
                if scene == "it gets out of line":
                    assert mine.take({}, wait=True)
                    os.close(writing)
                    os.read(reading, 1)
                    assert len(claimed.line(str(folder))) == 1
                die_at(point)
                mine.take({}, wait=True)
            finally:
                os._exit(0)
        if scene == "it gets out of line":
            poll_until(lambda: claimed.line(str(folder)))
            blocker.release()
        os.close(writing)
        os.close(reading)
        _, status = os.waitpid(pid, 0)
        blocker.release()
        assert claimed.line(str(folder)) == [] and in_the_way(folder, ALL) == []
        after = claimant(folder, "after", ALL)
        assert after.take({}, wait=False) == [], f"call {point}"
        names = sorted(path.name for path in folder.iterdir())
        assert names == sorted(["turn.lock", *(f"{one.uuid}.lock" for one in ALL)])
        after.release()
        if os.waitstatus_to_exitcode(status) == 0:
            break
    assert point > 10, "it has calls to die at"


def die_at(point: int) -> None:
    """Kills this process at its `point`-th call to the kernel from now on."""
    left = [point]

    def counted(frame: object, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__module__", "") in ("posix", "fcntl"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(counted)


def test_several_gpus_are_taken_at_once_or_not_at_all_so_that_nobody_waits_for_ever(
    folder: Path, start: Callable[..., Process]
) -> None:
    holder = start("holder", names="1")
    pairs = [start(f"pair-{n}", names=names, count=2) for n, names in enumerate(["01", "12", "02", "012"])]
    assert all(one.first.startswith("in line") for one in pairs)
    assert [one.what for one in in_the_way(folder, [ONE])] == [f"free, but {who('pair-0').words} waits for it"]
    holder.let_go()
    for one in pairs:
        assert one.until_it_has().count("GPU-") == 2
        one.let_go()


def test_whoever_comes_later_takes_nothing_from_those_in_line_and_what_they_do_not_want_at_once(folder: Path) -> None:
    first, second, third = claimant(folder, "a", [ONE]), claimant(folder, "b", [ONE, TWO]), claimant(folder, "c", [TWO])
    assert first.take({}, wait=True) == []
    assert second.take({}, wait=True)
    assert [one.run_id for one in third.take({}, wait=False)] == ["b"]
    assert claimant(folder, "d", [THREE]).take({}, wait=False) == []
    assert claimant(folder, "e", [ONE, TWO, THREE], 1).take({}, wait=False)
    first.release()
    assert second.take({}, wait=True) == [] and second.number is None


def test_any_of_several_is_one_that_is_free_and_that_nobody_uses(folder: Path) -> None:
    first = claimant(folder, "a", ALL, 1)
    assert first.take({ONE.uuid: "used by x"}, wait=False) == [] and list(first.held) == [TWO.uuid]
    second = claimant(folder, "b", ALL, 1)
    assert second.take({ONE.uuid: "used by x"}, wait=False) == [] and list(second.held) == [THREE.uuid]
    third = claimant(folder, "c", ALL, 1)
    assert next(one.what for one in third.take({ONE.uuid: "used by x"}, wait=False)) == "used by x"
    second.release()
    first.release()


class Model:
    """Claimants in one process, step by step: each has open files of its own, which is all that the kernel asks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.waiting, self.holding = folder, list[Claims](), list[Claims]()
        self.names = itertools.count()

    def come(self, pool: list[Device], count: int) -> None:
        new = claimant(self.folder, f"r{next(self.names)}", pool, min(count, len(pool)))
        self.waiting.append(new)
        self.ask(new)

    def ask(self, one: Claims) -> None:
        before = self.waiting[: self.waiting.index(one)]
        pool = {gpu.uuid for gpu in one.pool}
        reserved = {gpu.uuid for other in before for gpu in other.pool}
        taken = {uuid for other in self.holding for uuid in other.held}
        obstacles = one.take({}, wait=True)
        may = len(pool - reserved - taken) >= one.count
        assert (obstacles == []) == may, "exactly who is next, and has all free, gets it"
        if may:
            assert len(one.held) == one.count and not taken & set(one.held) and set(one.held) <= pool - reserved
            self.waiting.remove(one)
            self.holding.append(one)
        else:
            assert not one.held and one.number is not None

    def die(self, one: Claims) -> None:
        """Its files are closed, and nothing is cleaned up."""
        for fd in (*one.held.values(), *([one._ticket] if one._ticket is not None else [])):
            os.close(fd)
        (self.waiting if one in self.waiting else self.holding).remove(one)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.lists(st.sampled_from(ALL), min_size=1, unique=True), st.integers(1, 3)),
        st.tuples(st.just("ask"), st.integers(0, 9)), st.tuples(st.just("die"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 9)),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_in_whatever_order_things_happen_the_first_in_line_is_next_and_everybody_gets_its_turn(
    folder: Path, steps: list[tuple[object, ...]]
) -> None:
    model = Model(folder)
    for what, *rest in steps:
        everybody = [*model.waiting, *model.holding]
        if what == "come":
            model.come(*rest)  # type: ignore[arg-type]
        elif what == "ask" and model.waiting:
            model.ask(model.waiting[int(str(rest[0])) % len(model.waiting)])
        elif what == "die" and everybody:
            model.die(everybody[int(str(rest[0])) % len(everybody)])
        elif what == "end" and model.holding:
            model.holding.pop(int(str(rest[0])) % len(model.holding)).release()
    while model.waiting:
        for one in [*model.waiting]:
            model.ask(one)
        assert model.holding, "somebody can always go on"
        model.holding.pop(0).release()
    while model.holding:
        model.holding.pop().release()
    assert in_the_way(folder, ALL) == [] and claimed.line(str(folder)) == []


def test_many_at_once_never_have_the_same_gpu(folder: Path) -> None:
    """Each of six processes takes two of three, marks them as its own, and lets them go, again and again."""
    children = []
    for number in range(6):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                random.seed(number)
                for turn in range(8):
                    mine = claimant(folder, f"p{number}-{turn}", random.sample(ALL, 3), 2)
                    while mine.take({}, wait=True):
                        time.sleep(0.001)
                    for uuid in mine.held:
                        os.close(os.open(folder.parent / uuid, os.O_CREAT | os.O_EXCL))
                    for uuid in mine.held:
                        (folder.parent / uuid).unlink()
                    mine.release()
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6


def test_a_cleaner_of_old_files_takes_nobody_the_place_in_line(folder: Path) -> None:
    holder, first = claimant(folder, "holder"), claimant(folder, "a")
    assert holder.take({}, wait=False) == [] and first.take({}, wait=True)
    [ticket] = folder.glob("*.ticket")
    assert first.in_line
    ticket.unlink()
    assert claimed.line(str(folder)) == [] and not first.in_line
    assert first.take({}, wait=True) and first.in_line
    assert [one.claimant.run_id for one in claimed.line(str(folder))] == ["a"]
    holder.release()
    assert first.take({}, wait=True) == []


def test_a_holder_whose_lock_has_been_removed_makes_it_anew_unless_another_was_quicker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LOOK_S", 0.0)
    holder = claimant(folder, "holder", [ONE, TWO])
    assert holder.take({}, wait=False) == []
    for one in (ONE, TWO):
        (folder / f"{one.uuid}.lock").unlink()
    thief = claimant(folder, "thief", [TWO])
    assert thief.take({}, wait=False) == []
    holder.keep()
    assert [one.run_id for one in in_the_way(folder, [ONE, TWO])] == ["holder", "thief"]
    claim = GpuClaim(nonce="", claims_dir=str(folder), pool=[ONE, TWO], count=2, asked_at=0.0, held=[ONE, TWO])
    assert claimed.lost(claim, "holder") == ["1"]
    thief.release()
    holder.keep()
    assert claimed.lost(claim, "holder") == []
    holder.release()
    assert in_the_way(folder, [ONE, TWO]) == []


def test_nothing_is_followed_or_waited_for_that_somebody_has_put_there(folder: Path) -> None:
    target = folder.parent / "precious"
    target.write_text("precious")
    (folder / f"{ONE.uuid}.lock").symlink_to(target)
    os.mkfifo(folder / f"{TWO.uuid}.lock")
    for one in (ONE, TWO):
        [found] = claimant(folder, "a", [one]).take({}, wait=False)
        assert "out of reach" in found.what and one.uuid in found.what
    (folder / "turn.lock").unlink()
    (folder / "turn.lock").symlink_to(target)
    with pytest.raises(OSError):
        claimant(folder, "a", [THREE]).take({}, wait=False)
    assert target.read_text() == "precious"


def test_what_somebody_has_written_there_does_nothing_to_a_terminal(folder: Path) -> None:
    first, second = (Claims(str(folder), [ONE], 1, who(f"\x1b[2J{name}\n" + "x" * 999)) for name in "ab")
    assert first.take({}, wait=False) == []
    with pytest.raises(OSError):
        second.take({}, wait=True)  # no name for a file
    [found] = in_the_way(folder)
    assert found.what.isprintable() and found.what.startswith("held by run ?[2Ja?xxx") and len(found.what) < 300
    fd = locks.open_shared(str(folder / "000000000001.ticket"))
    assert locks.take(fd)
    os.write(fd, json.dumps(to_json(claimed.Ticket(number=7, claimant=second.claimant, uuids=[ONE.uuid]))).encode())
    [ticket] = claimed.line(str(folder))
    assert ticket.number == 1 and ticket.claimant.run_id.isprintable()
    os.truncate(fd, 9)
    assert claimed.line(str(folder)) == []
    os.close(fd)


def test_a_turn_that_somebody_does_not_let_go_of_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "TURN_S", 0.0)
    fd = locks.open_shared(str(folder / "turn.lock"))
    assert locks.take(fd)
    [found] = claimant(folder, "a").take({}, wait=False)
    assert "turn.lock is not let go of" in found.what
    os.close(fd)
    assert claimant(folder, "a").take({}, wait=False) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_users_share_what_each_of_them_has_made(folder: Path) -> None:
    mine = claimant(folder, "root's")
    assert mine.take({}, wait=False) == []
    mine.release()
    folder.parent.chmod(0o755)
    for path in (folder.parent, *folder.parent.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o001)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(1)
            os.setuid(1)
            os.umask(0o077)
            its = claimant(folder, "daemon's", ALL)
            code = 0 if its.take({}, wait=True) == [] else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert mine.take({}, wait=False) == [] and {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666}
    mine.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of their own, with other ids, are root's to make")
def test_containers_that_mount_the_same_folder_share_claims_and_line(
    folder: Path, start: Callable[..., Process]
) -> None:
    """Two sets of namespaces: users with ids of their own, processes that do not see each other, another mount."""
    for path in (folder.parent, *folder.parent.parents):
        if not path.stat().st_mode & 0o005:
            path.chmod(path.stat().st_mode | 0o005)
    folder.parent.chmod(0o777)
    inside = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--"]
    first = start("in-one", prefix=inside)
    assert first.first == f"has {ONE.uuid}\n"
    second = start("in-the-other", prefix=inside)
    assert second.first == "in line 1\n"
    assert in_the_way(folder)[0].run_id == "in-one"
    first.kill()
    assert second.until_it_has() == f"has {ONE.uuid}\n"


def test_the_folder_is_made_for_everybody_or_it_is_said_why_it_will_not_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PLACES", ("/nowhere", str(folder)))
    old = os.umask(0o077)
    try:
        made = claims.folder_of(None)
    finally:
        os.umask(old)
    assert made == f"{folder}/specctl-gpus" and Path(made).stat().st_mode & 0o7777 == 0o1777
    assert claims.folder_of(None) == made
    Path(made).rmdir()
    Path(made).symlink_to(folder.parent)
    with pytest.raises(locks.Unusable, match="is no folder"):
        claims.folder_of(None)
    with pytest.raises(locks.Unusable, match="No such file") as caught:
        claims.folder_of(str(folder / "not-mounted"))
    assert "mount it into the container" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_folder_that_is_mounted_read_only_is_called_that(folder: Path) -> None:
    ask = f"""
mount -t tmpfs -o mode=1777 none {folder} && mount -o remount,ro {folder} && exec {sys.executable} -c '
from orchestrator.agent import locks
try: locks.check("{folder}", make=False)
except locks.Unusable as error: print(error.message, error.hint)'"""
    done = subprocess.run(["unshare", "-m", "sh", "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "is mounted read-only" in done.stdout and "remount,rw" in done.stdout, done

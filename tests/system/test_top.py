"""`specctl top`: the whole screen, by its keys, over real runs; and in a real terminal, with what may befall that."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from orchestrator.fleet import Fleet
from orchestrator.inventory import parse_inventory
from orchestrator.tui.app import Top
from orchestrator.tui.lists import Lines, RunList
from orchestrator.verbs import top, top_kept
from tests.driver import Specctl, poll_until
from tests.screen import drive, row, select, shown, until
from tests.sshd import LoopbackSshd
from tests.terminal import Typed, typed

STEPS = 'n=0; while sleep 0.2; do n=$((n+1)); echo "step=$n loss=0.$n tok/s=100"; done'


@pytest.fixture(scope="module")
def specctl() -> Iterator[Specctl]:
    """With a run that steps, one that has lost a worker, and one that has failed."""
    driver = Specctl()
    driver.program("one_thread_dies.py")
    driver.launch("--name", "stepping", "--note", "first light", "--", "sh", "-c", STEPS)
    driver.launch("--name", "worker-dies", "--", sys.executable, "one_thread_dies.py")
    driver.launch("--name", "failing", "--", "sh", "-c", "echo step=1 loss=0.5; exit 3")
    yield driver
    driver.close()


@pytest.fixture(autouse=True)
def as_its_user(specctl: Specctl, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, specctl.environ[name])
    monkeypatch.delenv("NO_COLOR", raising=False)


# --- what is shown --------------------------------------------------------------------------------------------------


def test_runs_their_curves_workers_and_the_log_of_the_selected_one_are_shown(specctl: Specctl) -> None:
    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: "2 runs live, 1 ended · 1 target" in shown(app), "a look")
        assert row(app, "-failing-").startswith("FAILED")
        await select(app, pilot, "worker-dies")
        await until(pilot, lambda: re.search(r"^step=\d+ worker=drafter", shown(app), re.MULTILINE), "its log")
        said = shown(app)
        assert re.search(r"drafter-0 +GONE .*RuntimeError: Detected", said) and "drafter-1    alive" in said
        await until(pilot, lambda: re.search(r"tok/s [▁-█]{20}", shown(app)), "its curve")
        await select(app, pilot, "stepping")
        await until(pilot, lambda: re.search(r"^step=\d+ loss=0", shown(app), re.MULTILINE), "the other log")
        assert "worker=drafter" not in shown(app), "a log of one run is none of another's"

        def newest() -> int:
            return max(map(int, re.findall(r"^step=(\d+) ", shown(app), re.MULTILINE)))

        so_far = newest()
        await until(pilot, lambda: newest() > so_far + 3, "lines as they come")
        assert re.search(r"RUNNING .*-stepping-.* local .*100\.0 [▁-█ ]+", row(app, "-stepping-"))

    drive(specctl, scenario)


def test_what_says_nothing_new_is_not_drawn_again(specctl: Specctl) -> None:
    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: row(app, "-failing-"), "a look")
        app.board.pause(True)
        drawn: list[int] = []
        runs = app.query_one(RunList)
        render = runs.render_line
        runs.render_line = lambda y: (drawn.append(y), render(y))[1]  # type: ignore[method-assign]
        runs.refresh()
        await until(pilot, lambda: len(drawn) > 1, "drawing")
        drawn.clear()
        for _ in range(5):
            app._show()
            await pilot.pause(0.05)
        assert not drawn
        await pilot.press("down")
        await until(pilot, lambda: drawn, "drawing")
        assert set(drawn) == {0, 1}

    drive(specctl, scenario, words=("failing",), every_s=3600)


@pytest.mark.parametrize("size", [(80, 24), (40, 20), (200, 60), (20, 8)], ids=str)
def test_it_fits_into_terminals_of_all_sizes(specctl: Specctl, size: tuple[int, int]) -> None:
    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: "RUNNING" in row(app, "stepping-") or size[0] < 40, "a look")
        assert all(len(line) <= size[0] for line in shown(app).split("\n"))
        await pilot.resize_terminal(100, 30)
        line = await until(pilot, lambda: row(app, "-stepping-"), "a look")
        assert line.startswith("RUNNING") and " local " in line
        await pilot.resize_terminal(*size)
        await pilot.pause()
        assert all(len(line) <= size[0] for line in shown(app).split("\n"))

    drive(specctl, scenario, size=size)


def test_a_named_run_is_the_only_one_that_is_looked_at(specctl: Specctl) -> None:
    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: row(app, "-failing-"), "a look")
        assert "stepping" not in shown(app) and "0 runs live, 1 ended" in shown(app)

    drive(specctl, scenario, words=("failing",))


def test_the_next_one_begins_with_what_was_seen_and_says_how_old_it_is(specctl: Specctl) -> None:
    fleet = Fleet(parse_inventory(specctl.inventory.read_text()))
    asked, _ = top.asks(fleet, ["local"])
    first = top.Board(fleet, asked, everything=False, every_s=0.5)
    first.start()
    poll_until(lambda: first.sightings()[0].fresh)
    first.stop()
    top_kept.keep(first)
    second = top.Board(fleet, asked, everything=False, every_s=0.5)
    top_kept.recall(second)
    second.pause(True)
    app = Top(fleet, second, program="specctl", plain=False)

    async def main() -> None:
        async with app.run_test(size=(140, 30)) as pilot:
            await until(pilot, lambda: row(app, "-stepping-"), "the list")
            await until(pilot, lambda: "was RUNNING" in row(app, "-stepping-"), "getting old")
            assert "not seen for" in shown(app) and ", 3 not known" in shown(app)
            second.pause(False)
            await until(pilot, lambda: row(app, "-stepping-").startswith("RUNNING"), "an answer")

    asyncio.run(main())
    second.stop()
    fleet.close()


# --- targets that do not answer -------------------------------------------------------------------------------------


def test_a_target_that_falls_silent_keeps_its_row_in_the_past_tense_and_holds_up_nobody(
    specctl: Specctl, sshd: LoopbackSshd
) -> None:
    more = (
        f"  there: {{ssh: {sshd.alias}, workdir: {specctl.home / 'there'}, python: {sys.executable}}}\n"
        f"  dead: {{ssh: 'nobody@127.0.0.1:1'}}\nssh_config: {sshd.ssh_config}\n"
    )
    specctl.inventory.with_name("more.yaml").write_text(specctl.inventory.read_text() + more)
    away = specctl(
        "--inventory", str(specctl.inventory.with_name("more.yaml")), "launch", "there", "--json", "--name", "away",
        "--", "sh", "-c", STEPS,
    ).json["run_id"]  # fmt: skip
    looks: list[str] = []

    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: row(app, away).startswith("RUNNING"), "a look")
        assert "UNREACHABLE (target)" in row(app, " dead ").replace("  ", " ").replace("  ", " ")
        ask = app.fleet.agent
        app.fleet.agent = lambda target: (looks.append(target.name), ask(target))[1]  # type: ignore[method-assign]
        with sshd.paused():
            await until(pilot, lambda: row(app, away).startswith("was RUNNING"), "silence")
            await select(app, pilot, "-away-")
            assert re.search(rf"was RUNNING {away} on there  not seen for \d+ s", shown(app))
            looks.clear()
            await until(pilot, lambda: looks.count("local") > 3, "looks at the others")
            assert looks.count("there") == 0, "who owes an answer is not asked again"
            assert row(app, "-stepping-").startswith("RUNNING")
        await until(pilot, lambda: row(app, away).startswith("RUNNING"), "an answer")
        sshd.stop()
        await until(pilot, lambda: row(app, away).startswith("was RUNNING"), "the link's end")
        await until(pilot, lambda: "refused the connection" in shown(app), "why")
        sshd.start()
        await pilot.press("r")
        await until(pilot, lambda: row(app, away).startswith("RUNNING"), "an answer")

    try:
        drive(specctl, scenario, more=more)
    finally:
        specctl.kill(away)


# --- keys -----------------------------------------------------------------------------------------------------------


def test_keys_open_logs_exceptions_and_help_and_close_them(specctl: Specctl) -> None:
    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        await select(app, pilot, "worker-dies")
        await pilot.press("e")
        await until(pilot, lambda: "-- 1 of 1: RuntimeError: Detected" in shown(app), "exceptions")
        assert "raise RuntimeError(" in app.screen.query_one(Lines).text
        await pilot.press("s")
        assert "Stop " not in shown(app), "its keys are its own"
        await pilot.press("escape", "enter")
        await until(pilot, lambda: len(re.findall(r"^step=\d+ worker=", shown(app), re.MULTILINE)) > 25, "its log")
        await pilot.press("escape", "question_mark")
        await until(pilot, lambda: "G its end" in shown(app), "help")
        await pilot.press("q")
        await until(pilot, lambda: row(app, "worker-dies"), "the list")

    drive(specctl, scenario)


def test_a_filter_and_an_order_are_chosen_and_the_selected_run_stays_selected(specctl: Specctl) -> None:
    def runs(app: Top) -> list[str]:
        return [one.run.run_id.split("-")[2] for one in app.query_one(RunList).rows if one.run]

    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        await select(app, pilot, "-stepping-")
        assert runs(app) == ["worker", "stepping", "failing"]
        await pilot.press("o")
        assert runs(app) == ["failing", "worker", "stepping"] and "by newest" in shown(app)
        assert app.selected and app.selected.run and "-stepping-" in app.selected.run.run_id
        await pilot.press("slash", *"light", "enter")
        await until(pilot, lambda: runs(app) == ["stepping"] and "only 'light'" in shown(app), "the filter")
        await pilot.press("escape")
        await until(pilot, lambda: len(runs(app)) == 3, "the whole list")
        await pilot.click(RunList, offset=(3, 0))
        assert app.selected and app.selected.run and "-failing-" in app.selected.run.run_id
        await pilot.press("s")
        await until(pilot, lambda: "has ended: FAILED" in shown(app), "a word")

    drive(specctl, scenario)


def test_a_stop_asks_first_names_the_run_and_its_target_and_ends_nothing_else(specctl: Specctl) -> None:
    victim = specctl.launch("--name", "victim", "--", "sh", "-c", STEPS).json["run_id"]
    other = next(path.name for path in (specctl.workdir / "runs").iterdir() if "-stepping-" in path.name)

    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        await select(app, pilot, "-victim-")
        await pilot.press("s")
        await until(pilot, lambda: f"Stop {victim}" in shown(app), "asking")
        assert "on local (this machine)?" in shown(app)
        await pilot.press("n")
        await until(pilot, lambda: "on local (this machine)?" not in shown(app), "the list")
        assert specctl.processes(victim) and not app.stops
        await pilot.press("s", "y")
        await until(pilot, lambda: row(app, victim).startswith("STOPPED"), "the end")
        await until(pilot, lambda: "no process of it is left" in shown(app), "a word")
        assert app.selected and app.selected.run and app.selected.run.run_id == victim, "still the one that was meant"

    drive(specctl, scenario)
    assert not specctl.processes(victim) and specctl.processes(other)


# --- in a terminal --------------------------------------------------------------------------------------------------


class Tmux:
    """A terminal as people have it: specctl in a shell in a real tmux pane."""

    def __init__(self, specctl: Specctl, columns: int, rows: int, command: str, **environ: str) -> None:
        self.socket = specctl.home / "pane"
        kept = {name: value for name, value in specctl.environ.items() if name not in ("COLUMNS", "TMUX", "NO_COLOR")}
        self.environ = {**kept, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PS1": "$ ", **environ}
        self("new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(specctl.project), "bash", "--norc")
        self.type(command, "Enter")

    def __call__(self, *words: str) -> str:
        argv = ["tmux", "-f", "/dev/null", "-S", str(self.socket), *words]
        return subprocess.run(argv, env=self.environ, capture_output=True, text=True, check=True).stdout

    def type(self, *keys: str) -> None:
        self("send-keys", *keys)

    def until(self, pattern: str, *, colours: bool = False) -> str:
        show = ("capture-pane", "-p", "-e") if colours else ("capture-pane", "-p")
        try:
            poll_until(lambda: re.search(pattern, self(*show), re.MULTILINE), timeout_s=60.0, what=pattern)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self(*show)}") from None
        return self(*show)

    def close(self) -> None:
        self("kill-server")


@pytest.fixture
def pane(specctl: Specctl) -> Iterator[Callable[..., Tmux]]:
    panes: list[Tmux] = []

    def opened(columns: int, rows: int, command: str, **environ: str) -> Tmux:
        panes.append(Tmux(specctl, columns, rows, command, **environ))
        return panes[-1]

    yield opened
    for one in panes:
        one.close()


def test_in_a_real_terminal_it_lends_it_to_attach_and_gives_it_back_as_it_was(
    specctl: Specctl, pane: Callable[..., Tmux]
) -> None:
    terminal = pane(100, 30, f"stty -a > before; {sys.executable} -m orchestrator top; echo code=$?; stty -a > after")
    terminal.until(r"^RUNNING .*-stepping-")
    terminal.type("/")
    terminal.until("words in run, target")
    terminal.type("stepping", "Enter")
    terminal.until(r"only 'stepping'")
    terminal.type("a")
    terminal.until(r"read-only: Ctrl-B d leaves")
    terminal("resize-window", "-x", "90", "-y", "25")
    terminal.type("C-b")
    terminal.type("d")
    terminal.until(r"^specctl top .*only 'stepping'(.*\n)+.*\? Help l Logs")
    terminal("resize-window", "-x", "100", "-y", "30")
    terminal.type("C-c")
    terminal.until("code=130")
    poll_until(lambda: (specctl.project / "after").exists() and (specctl.project / "after").read_text())
    assert (specctl.project / "after").read_text() == (specctl.project / "before").read_text()


def test_no_color_means_none_and_what_is_old_can_be_told_without(specctl: Specctl) -> None:
    with typed(specctl, "top", NO_COLOR="1", columns=140) as terminal:
        terminal.until("-failing-")
        terminal.until("FAILED")
        terminal.type("q")
        assert terminal.end() == 0
        codes = {int(code) for found in re.findall(rb"\x1b\[([0-9;]*)m", terminal.seen) for code in found.split(b";")
                 if code}  # fmt: skip
        assert codes <= {0, 1, 2, 4, 7, 39, 49}, "bold, dim, underlined, reversed, and the terminal's own colours"
    with typed(specctl, "top", LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") as terminal:
        terminal.until("-failing-")
        terminal.type("q")
        assert terminal.end() == 0 and terminal.seen.isascii()


def test_it_ends_with_its_terminal_and_by_a_signal(specctl: Specctl) -> None:
    with typed(specctl, "top") as terminal:
        terminal.until("-failing-")
        before = terminal.raw
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.end() == 143 and before and not terminal.raw
    terminal = typed(specctl, "top")
    terminal.until("-failing-")
    os.close(terminal.fd)
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == -signal.SIGHUP


def program(specctl: Specctl, path: Path) -> Typed:
    """A Python program in a terminal of its own."""
    kept = {name: value for name, value in specctl.environ.items() if name not in ("COLUMNS", "TMUX")}
    environ = {**kept, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2])}
    return Typed([sys.executable, str(path)], cwd=specctl.project, environ=environ)


def test_a_terminal_that_goes_ends_it_even_where_hang_ups_are_ignored(specctl: Specctl, tmp_path: Path) -> None:
    ignoring = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    ignoring += "from orchestrator.__main__ import main\nsys.argv = ['specctl', 'top']; sys.exit(main())"
    (tmp_path / "ignoring.py").write_text(ignoring)
    terminal = program(specctl, tmp_path / "ignoring.py")
    terminal.until("-failing-")
    os.close(terminal.fd)
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1]) == 128 + signal.SIGHUP


def test_it_ends_alike_if_it_sees_before_the_kernel_tells_it_that_its_terminal_is_gone(specctl: Specctl) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    # Of a terminal that is nobody's own, nobody is told that it goes.
    with subprocess.Popen([sys.executable, "-m", "orchestrator", "top"], cwd=specctl.project, stdin=theirs,
                          stdout=theirs, stderr=theirs, env={**specctl.environ, "TERM": "xterm-256color"},
                          start_new_session=True) as top:  # fmt: skip
        os.close(theirs)
        seen = b""
        while b"-failing-" not in seen:
            seen += os.read(ours, 65536)
        os.close(ours)
        assert top.wait(60) == -signal.SIGHUP


def test_without_a_terminal_or_textual_it_says_what_to_do(specctl: Specctl) -> None:
    done = specctl("top")
    assert done.code == 2 and done.err.splitlines()[0] == "error: top needs a terminal that can be drawn on"
    hiding = "import sys; sys.modules['textual'] = None; sys.modules['textual.app'] = None\n"
    hiding += "from orchestrator.__main__ import main; sys.argv = ['specctl', 'top']; sys.exit(main())"
    (specctl.project / "hiding.py").write_text(hiding)
    with program(specctl, specctl.project / "hiding.py") as terminal:
        assert terminal.end() == 2
        assert "error: top needs textual" in terminal.text and "pip install textual" in terminal.text


def test_words_that_fit_nothing_are_told_before_anything_is_drawn(specctl: Specctl) -> None:
    with typed(specctl, "top", "no-such-run") as terminal:
        assert terminal.end() == 4
        assert "no run 'no-such-run' on local" in terminal.text and b"\x1b[?1049h" not in terminal.seen


def test_the_selected_one_is_named_where_there_is_none(specctl: Specctl) -> None:
    async def scenario(app: Top, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: row(app, "-failing-"), "a look")
        await pilot.press("slash", *"nothing-has-this", "enter")
        await until(pilot, lambda: "nothing is selected" in str(app.query_one("#details", Static).content), "a word")
        await pilot.press("s", "l", "e", "a")
        await until(pilot, lambda: "select a run first" in shown(app), "a word")

    drive(specctl, scenario)

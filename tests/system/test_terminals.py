"""How answers look where they are read: terminals of any width, pipes, no colour, no unicode."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.driver import Specctl, poll_until
from tests.terminal import typed

POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NOTE = "a note of several words that would not fit into the last column of a terminal of eighty columns · größer"
TABLES = (("status",), ("ls",), ("targets",), ("show", "failing"))


@pytest.fixture(scope="module")
def specctl() -> Iterator[Specctl]:
    """A run that fails with a long reason, and one target that nobody answers for."""
    driver = Specctl()
    driver.inventory.write_text(
        f"targets:\n  local: {{workdir: {driver.workdir}}}\n  away: {{ssh: 'root@127.0.0.1:1', vmid: 101}}\n"
        "  afar: {ssh: 'root@127.0.0.1:1', vmid: 102}\n"
    )
    del driver.environ["NO_COLOR"]
    driver.launch("--name", "failing", "--note", NOTE, "--", "sh", "-c", "echo step=1 loss=0.5; exit 3")
    yield driver
    driver.close()


def test_a_pipe_gets_whole_lines_that_grep_finds(specctl: Specctl) -> None:
    for columns in ("40", "80"):
        for words in (("status",), ("ls",)):
            rows = [line for line in specctl(*words, COLUMNS=columns).out.splitlines() if "-failing-" in line]
            assert rows and "FAILED" in rows[0] and NOTE in rows[0], "one line a run, whatever COLUMNS says"
            assert rows[0] == rows[0].rstrip()
    silent = [line for line in specctl("status", COLUMNS="40").out.splitlines() if "UNREACHABLE" in line]
    assert len(silent) == 1 and silent[0].endswith("What runs there is unknown.")
    assert silent[0].startswith("UNREACHABLE away, afar (2 targets on root@127.0.0.1:1): "), "said once"
    error = specctl("logs", "no-such-run", COLUMNS="40").err.splitlines()
    assert len(error) == 2, "an error and its hint"


@pytest.mark.parametrize("words", TABLES, ids=" ".join)
def test_a_pipe_has_no_colours_unless_it_is_told_so_and_nothing_that_moves(
    specctl: Specctl, words: tuple[str, ...]
) -> None:
    plain = specctl(*words)
    assert "\x1b" not in plain.out + plain.err
    coloured = specctl(*words, FORCE_COLOR="1")
    assert COLOUR.search(coloured.out)
    assert "\x1b" not in COLOUR.sub("", coloured.out + coloured.err)
    stripped = [re.sub(r"\d", "#", text) for text in (COLOUR.sub("", coloured.out), plain.out)]
    assert stripped[0].split()[:6] == stripped[1].split()[:6]


@pytest.mark.parametrize("words", TABLES, ids=" ".join)
@pytest.mark.parametrize("columns", [40, 130])
def test_a_terminal_is_never_written_past_its_edge(specctl: Specctl, words: tuple[str, ...], columns: int) -> None:
    with typed(specctl, *words, columns=columns) as terminal:
        code = terminal.end()
        assert code == (0 if words[0] == "show" else 3)
        lines = terminal.text.replace("\r", "").splitlines()
    for line in lines:
        # What is longer holds a word that no cut may fall into: an id or a path, to be copied.
        assert len(line) < columns or len(max(line.split(), key=len)) > columns - 16, line
    text = " ".join(" ".join(lines).split())
    assert "failing" in text or words == ("targets",)


@pytest.mark.parametrize("words", TABLES, ids=" ".join)
def test_what_the_encoding_has_not_is_written_in_ascii(specctl: Specctl, words: tuple[str, ...]) -> None:
    done = specctl(*words, **POSIX)
    assert done.out.isascii() and done.err.isascii()
    assert "?" not in done.out.replace("gr??er", "").replace("sshd running there, and is that its port?", "")
    assert specctl(*words).out.count("·") == 0 or " - " in done.out


def test_help_is_ascii_there_too(specctl: Specctl) -> None:
    for words in (("--help",), ("launch", "--help")):
        out = specctl(*words, **POSIX).out
        assert out.isascii() and "?" not in out
        assert "bool" not in out, "an option without a value is shown without one"


def test_no_colour_and_a_dumb_terminal(specctl: Specctl) -> None:
    with typed(specctl, "ls", NO_COLOR="1") as terminal:
        terminal.end()
        codes = {code for found in COLOUR.findall(terminal.seen.decode()) for code in found[2:-1].split(";")}
        assert codes <= {"", "0", "1", "2"}, "bold and dim are no colours"
    with typed(specctl, "ls", TERM="dumb", columns=200) as terminal:
        terminal.end()
        assert "\x1b" not in terminal.seen.decode()
        assert any("-failing-" in line and "FAILED" in line for line in terminal.text.splitlines()), "200 are 200"
    with typed(specctl, "launch", "local", "--", sys.executable, "-c", "print('step=1')", TERM="dumb") as terminal:
        terminal.end()
        assert "\x1b" not in terminal.seen.decode(), "where nothing can move, nothing does"
        assert "accepted" in terminal.text


def test_a_watched_status_goes_on_until_an_interrupt_and_leaves_what_it_saw_last(specctl: Specctl) -> None:
    program = "import time\nfor n in range(1, 10**6): print(f'step={n} loss=1 tok/s=5', flush=True); time.sleep(.05)"
    run = specctl.launch("--name", "watched", "--", sys.executable, "-c", program).json["run_id"]
    with typed(specctl, "status", run, "--watch", "--every", "0.5", columns=160) as terminal:
        first = int(re.search(rf"{run}\s+local\s+RUNNING\s+([\d,]+)", terminal.until("tok/s"))[1].replace(",", ""))
        poll_until(lambda: (specctl.status(run)["step"] or 0) > first + 20)
        assert specctl("stop", run).code == 0
        terminal.until("STOPPED")
        terminal.type("\x03")
        assert terminal.end() == 130
        after = terminal.seen.decode().rpartition("\x1b[?1049l")[2]
        assert run in after and "STOPPED" in after, "what it saw last stays on the terminal"
    done = specctl("status", "--watch")
    assert done.code == 2 and "--watch needs a terminal" in done.err

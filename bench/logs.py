"""How fast `specctl logs` is, end to end: real runs, the real command, and grep itself on the same file beside it.

    python -m bench.logs [--gib 5] [--dirty-gib 1] [--show-millions 1] [--stream-gib 1] [--ssh NODE] [--only NAME ...]

grep: `--grep` on a log that is clean, beside `grep -a -E` on that file; and on one that is dirty throughout, beside
`sed | grep`; goes alternate, so that what else the machine does meets both. show: a whole log, as JSON, its end.
follow: from a line's writing to its printing; and a large log streamed while it is written: nothing lost, and the
memory of both sides. `--ssh`: over an SSH host, which must be this machine, since the logs are looked at from here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.runs import SPECCTL, Bench, bench, header, row, rss_mib, say_where, spread
from bench.texts import coloured, loading, logged, make, mixed

GOES = 5
PATTERNS = {
    "a word that is nowhere": "out of memory",
    "a word of 1 line in 20": "grad norm",
    "an expression that few match": "loss 2[.]0[0-9]+ .*norm: 0[.]1",
}
SED = "s/\\x1b\\[[0-9;]*[A-Za-z]//g; s/\\r/\\n/g"
PRINTS = """
import sys
text, size = open(sys.argv[1], "rb").read(), int(sys.argv[2])
while size > 0:
    sys.stdout.buffer.write(text[:size]); size -= len(text)
"""
STAMPS = """
import time
for n in range(600): print(time.time(), flush=True); time.sleep(0.033)
"""
NUMBERS = """
import hashlib, os, sys, time
size, n, seen = int(sys.argv[1]), 0, hashlib.sha256()
while not os.path.exists("go"): time.sleep(0.01)
while size > 0:
    lines = b"".join(b"%012d is the number of this line, which stands here once and is never lost on its way\\n" % k
                     for k in range(n, n + 5000))
    sys.stdout.buffer.write(lines)
    seen.update(lines); size -= len(lines); n += 5000
sys.stdout.buffer.flush()
open("seen", "w").write(seen.hexdigest())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=5.0)
    parser.add_argument("--dirty-gib", type=float, default=1.0)
    parser.add_argument("--show-millions", type=float, default=1.0)
    parser.add_argument("--stream-gib", type=float, default=1.0)
    parser.add_argument("--ssh")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    say_where("python -m bench.logs " + " ".join(sys.argv[1:]))
    for name in options.only:
        PARTS[name](options)


def printed(one: Bench, text: bytes, size: int) -> tuple[str, Path]:
    """A run that has printed so much of this text, and whose supervisor has read it; and its log."""
    (one.project / "text").write_bytes(text)
    answer = one.launch(sys.executable, "-c", PRINTS, "text", str(size))
    one.wait_for_end(answer["run_id"])
    return str(answer["run_id"]), Path(answer["log"])


def timed(argv: Sequence[str] | str, one: Bench) -> tuple[float, int, float]:
    """(seconds, lines, MiB of the largest process) of a command whose output goes to a file."""
    begun = time.perf_counter()
    with (one.home / "out").open("wb") as out:
        process = subprocess.Popen(
            argv, shell=isinstance(argv, str), cwd=one.project, env={**one.environ, "LC_ALL": "C.UTF-8"}, stdout=out,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        _, _, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - begun
    with (one.home / "out").open("rb") as file:
        return took, sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b"")), usage.ru_maxrss / 1024


def grep(options: argparse.Namespace) -> None:
    header("`--grep` on ...", "pattern", "lines", "specctl, s", "beside it, s", "ratio", "most memory, MiB")
    dirty = make(coloured, 1_000_000) + make(loading, 1_000_000) + b"\n"
    cases: tuple[tuple[str, float, bytes, Callable[[str, Path], str]], ...] = (
        ("a clean log", options.gib, make(mixed, 2_000_000), lambda pattern, log: f"grep -a -E -e '{pattern}' {log}"),
        (
            "a dirty log", options.dirty_gib, dirty,
            lambda pattern, log: f"LC_ALL=C sed '{SED}' {log} | grep -a -E -e '{pattern}'",
        ),
    )  # fmt: skip
    for name, gib, text, beside in cases:
        if not gib:
            continue
        with bench(options.ssh) as one:
            run_id, log = printed(one, text, int(gib * 2**30))
            for what, pattern in PATTERNS.items():
                ours, theirs, most, lines = [], [], 0.0, -1
                for _ in range(GOES):
                    took, lines, memory = timed([*SPECCTL, "logs", run_id, "--grep", pattern], one)
                    ours.append(took)
                    most = max(most, memory)
                    took, found, _ = timed(beside(pattern, log), one)
                    assert found == lines, (name, what, found, lines)
                    theirs.append(took)
                ratio = statistics.median(ours) / statistics.median(theirs)
                row(
                    f"{name} of {gib:g} GiB", what, f"{lines:,}", spread(ours), spread(theirs), f"{ratio:.2f}",
                    f"{most:.0f}",
                )  # fmt: skip
    print()


def show(options: argparse.Namespace) -> None:
    count = int(options.show_millions * 1e6)
    lines = make(logged, count * 130).splitlines(True)
    text = b"".join(lines[:20_000])
    with bench(options.ssh) as one:
        run_id, log = printed(one, text, len(text) * (count // 20_000))
        count = count // 20_000 * 20_000
        header(f"{count:,} lines, {log.stat().st_size / 1e6:,.0f} MB", "s", "thousand lines/s", "most memory, MiB")
        for name, words, wanted in (
            ("the whole log", [], count), ("`--json`", ["--json"], count), ("`-n 100`", ["-n", "100"], 100),
            ("`--grep`, all match", ["--grep", "step"], count),
            ("`--grep -C 2`, none match", ["--grep", "^$", "-C", "2"], 0),
        ):  # fmt: skip
            took, most = [], 0.0
            for _ in range(GOES):
                seconds, found, memory = timed([*SPECCTL, "logs", run_id, *words], one)
                assert found == wanted, (name, found)
                took.append(seconds)
                most = max(most, memory)
            row(name, spread(took), spread([count / seconds / 1e3 for seconds in took], ".0f"), f"{most:.0f}")
    print()


def follow(options: argparse.Namespace) -> None:
    header("`-f`", "found")
    with bench(options.ssh) as one:
        answer = one.launch(sys.executable, "-c", STAMPS)
        late = []
        with started(one, "logs", str(answer["run_id"]), "-f") as process:
            assert process.stdout is not None
            for number, line in enumerate(process.stdout):
                if number >= 100:  # what was there already when it began is no delay
                    late.append((time.time() - float(line)) * 1e3)
        late.sort()
        row(f"a line is printed, {len(late)} lines", f"{statistics.median(late):.0f} ms after it was written; "
            f"p99 {late[int(len(late) * 0.99)]:.0f} ms, at most {late[-1]:.0f} ms")  # fmt: skip
    with bench(options.ssh) as one:
        size = int(options.stream_gib * 2**30)
        answer = one.launch(sys.executable, "-c", NUMBERS, str(size))
        code = one.home / "w" / "runs" / answer["run_id"] / "code"
        with started(one, "logs", str(answer["run_id"]), "-f") as process:
            assert process.stdout is not None
            memory = Memory(process.pid, one)
            (code / "go").touch()
            begun, seen, got = time.perf_counter(), hashlib.sha256(), 0
            for piece in iter(lambda out=process.stdout: out.read1(1 << 20), b""):
                seen.update(piece)
                got += len(piece)
                memory.look(got / size)
            took = time.perf_counter() - begun
        whole = seen.hexdigest() == (code / "seen").read_text()
        said = "nothing lost" if whole else "NOT WHAT WAS WRITTEN"
        row(f"{got / 2**30:.2f} GiB streamed", f"{said}, {got / 1e6 / took:.0f} MB/s")
        row("memory of the command, MiB", memory.words(0))
        row("memory of its agent, MiB", memory.words(1))
    print()


def started(one: Bench, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*SPECCTL, *words], cwd=one.project, env=one.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


class Memory:
    """How much memory a command and its agent have, over what has been streamed."""

    def __init__(self, pid: int, one: Bench) -> None:
        self.pid, self.workdir = pid, f"{one.home}/w".encode()
        self.at: list[tuple[float, float, float]] = []
        self._agent = 0

    def look(self, part: float) -> None:
        if self.at and part < self.at[-1][0] + 0.01:
            return
        if not self._agent or not rss_mib(self._agent):
            self._agent = self._find()
        self.at.append((part, rss_mib(self.pid), rss_mib(self._agent)))

    def _find(self) -> int:
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except OSError:
                continue
            if self.workdir in words and b"-c" in words:
                return int(entry.name)
        return 0

    def words(self, which: int) -> str:
        values = [one[1 + which] for one in self.at if one[1 + which]]
        if len(values) < 10:
            return "not seen"
        first, last = values[: len(values) // 10], values[-(len(values) // 10) :]
        medians = f"{statistics.median(first):.0f} in the first tenth, {statistics.median(last):.0f} in the last"
        return f"{medians}, at most {max(values):.0f}"


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"grep": grep, "show": show, "follow": follow}

if __name__ == "__main__":
    main()

"""Tokenised data on disk: made once, whoever asks for it first; made anew when anything it follows from has changed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import IMPORTS, all_rows, poll
from tests.trainer.templates import CHATML
from trainer.config import ConfigError
from trainer.data import source_hashes, token_cache
from trainer.data.rows import Rows, load_rows
from trainer.sections import DataConfig

PROGRAM = """
import os, resource, signal, sys
from pathlib import Path
from transformers import AutoTokenizer
from trainer.config import ConfigError
from trainer.sections import DataConfig
from trainer.data.rows import load_rows
from trainer.data import chat_template

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])

def say(line):
    os.write(1, f"{line}\\n".encode())  # at once, among several processes

def load(path, cache, **changes):
    config = DataConfig(**{"kind": "conversations", "paths": [str(path)], "sequence_length": 512, **changes})
    return load_rows(config, tokenizer, mask_token_id=3, seed=1, cache=cache, say=say)

def forked(run):
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except ConfigError as error:
            say(f"refused: {error}")
        finally:
            os._exit(1)
    return child
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target)


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    return write_talks(tmp_path / "talks.jsonl", 40)


def write_talks(path: Path, count: int, *, words: int = 20) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            said = f"{number} " + " ".join(f"word {(number * 7 + word) % 89}" for word in range(words))
            turns = [{"role": "user", "content": said}, {"role": "assistant", "content": said.upper()}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def load(tokenizer: Any, path: Path, cache: Path | None, **changes: Any) -> tuple[Rows, list[str]]:
    """And what it says."""
    said: list[str] = []
    config = DataConfig(**{"kind": "conversations", "paths": [str(path)], "sequence_length": 512, **changes})
    return load_rows(config, tokenizer, mask_token_id=3, seed=1, cache=cache, say=said.append), said


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir() and path.name != "hashes")


@pytest.fixture
def program(tiny_target: Path, tmp_path: Path) -> Iterator[Any]:
    """Start a Python program that begins with `PROGRAM`."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, *arguments: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": IMPORTS, "TOKENIZERS_PARALLELISM": "false"}
        argv = [sys.executable, "-c", PROGRAM + body, str(tiny_target), *map(str, arguments)]
        started.append(subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ))  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_what_is_in_the_cache_is_what_was_made_and_is_not_made_again(tokenizer: Any, talks: Path, tmp_path: Path
                                                                      ) -> None:  # fmt: skip
    cache = tmp_path / "cache"
    plain, _ = load(tokenizer, talks, None)
    made, said = load(tokenizer, talks, cache)
    again, nothing = load(tokenizer, talks, cache)
    assert [line.split()[0] for line in said] == ["tokenised"] and nothing == []
    assert plain.digest() == made.digest() == again.digest()
    for one, other in zip(all_rows(plain), all_rows(again), strict=True):
        assert one.equal(other)
    assert [again.where(row) for row in range(40)] == [f"{talks}:{line}" for line in range(1, 41)]


def test_an_entry_serves_the_same_content_elsewhere_under_its_own_name(tokenizer: Any, talks: Path, tmp_path: Path
                                                                        ) -> None:  # fmt: skip
    cache, copy = tmp_path / "cache", tmp_path / "copy.jsonl"
    first, _ = load(tokenizer, talks, cache)
    shutil.copy(talks, copy)
    rows, said = load(tokenizer, copy, cache)
    assert said == [] and rows.where(3) == f"{copy}:4" and rows.digest() == first.digest()


def test_settings_that_only_choose_and_cut_need_no_entry_of_their_own(tokenizer: Any, talks: Path, tmp_path: Path
                                                                       ) -> None:  # fmt: skip
    cache = tmp_path / "cache"
    whole, _ = load(tokenizer, talks, cache)
    digests = {whole.digest()}
    for changes in ({"sequence_length": 128}, {"packing": True}, {"packing": True, "sequence_length": 1024}):
        rows, said = load(tokenizer, talks, cache, **changes)
        assert said == []
        digests.add(rows.digest())
    assert len(digests) == 4 and len(entries(cache)) == 1


def test_another_template_tokenizer_or_meaning_is_another_entry(tokenizer: Any, talks: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    cache = tmp_path / "cache"
    load(tokenizer, talks, cache)
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.chat_template = CHATML
    load(other, talks, cache)
    other.add_tokens(["WORD"])
    load(other, talks, cache)
    lines = tmp_path / "lines.txt"
    shutil.copy(talks, lines)
    load(tokenizer, lines, cache, kind="text")
    assert len(entries(cache)) == 4


def test_a_file_that_is_changed_in_place_is_noticed_though_size_and_time_are_as_before(
    tokenizer: Any, talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_hashes, "TICK_NS", 0)  # the file is new, and its hash would not be kept yet
    cache, before = tmp_path / "cache", talks.stat()
    first, _ = load(tokenizer, talks, cache)
    (note,) = (cache / "hashes").iterdir()
    kept = note.stat().st_mtime_ns
    load(tokenizer, talks, cache)
    assert note.stat().st_mtime_ns == kept, "it is not hashed again while nothing changes"

    def change() -> bool:
        with talks.open("r+b") as file:
            file.write(b'{"messages": [{"role": "user", "content": "9 ')
        os.utime(talks, ns=(before.st_atime_ns, before.st_mtime_ns))
        return talks.stat().st_ctime_ns != before.st_ctime_ns

    poll(change)
    now = talks.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    second, said = load(tokenizer, talks, cache)
    assert said and second.digest() != first.digest()


def test_a_hash_taken_right_after_a_change_is_not_trusted(tokenizer: Any, talks: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(source_hashes, "TICK_NS", 10**15)
    load(tokenizer, talks, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("hashes/*"))


@pytest.mark.parametrize("file", [*token_cache.FILES, token_cache.HEADER])
@pytest.mark.parametrize("how", ["cut off", "gone"])
def test_a_damaged_entry_is_noticed_and_made_anew(file: str, how: str, tokenizer: Any, talks: Path, tmp_path: Path
                                                   ) -> None:  # fmt: skip
    cache = tmp_path / "cache"
    first, _ = load(tokenizer, talks, cache)
    (entry,) = entries(cache)
    if how == "gone":
        (entry / file).unlink()
    else:
        os.truncate(entry / file, (entry / file).stat().st_size - 3)
    rows, said = load(tokenizer, talks, cache)
    assert said[0].startswith(f"the token cache {entry} is damaged ({file} ") and said[1].startswith("tokenised")
    assert rows.digest() == first.digest() and load(tokenizer, talks, cache)[1] == []


def test_a_header_that_was_changed_is_noticed(tokenizer: Any, talks: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(tokenizer, talks, cache)
    (entry,) = entries(cache)
    header = entry / token_cache.HEADER
    header.write_text(header.read_text().replace('"records": 40', '"records": 41'))
    assert load(tokenizer, talks, cache)[1][0].endswith("(header.json is not what was written): it is made anew")


def test_one_of_several_processes_tokenises_and_the_others_take_what_it_made(program: Any, tmp_path: Path) -> None:
    talks = write_talks(tmp_path / "talks.jsonl", 600)
    process = program(
        """
children = [forked(lambda: say(f"digest {load(sys.argv[2], Path(sys.argv[3])).digest()}")) for _ in "1234"]
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
""",
        talks, tmp_path / "cache",
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    said = out.splitlines()
    assert len([line for line in said if line.startswith("tokenised 600 records")]) == 1, out
    assert len(digests := [line for line in said if line.startswith("digest ")]) == 4 and len(set(digests)) == 1, out


def test_who_finds_another_at_it_says_so_and_waits(program: Any, tokenizer: Any, talks: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(tokenizer, talks, cache)
    (entry,) = entries(cache)
    shutil.rmtree(entry)
    with entry.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = program("load(sys.argv[2], Path(sys.argv[3]))", talks, cache)
        line = process.stdout.readline()
        assert line == f"another process tokenises the same data: waiting for it ({entry}.lock)\n"
        assert not entry.exists()
    out, err = process.communicate(timeout=60)
    assert out.startswith("tokenised 40 records"), err


def test_who_is_killed_at_it_leaves_neither_a_lock_nor_half_an_entry(program: Any, tokenizer: Any, tmp_path: Path
                                                                      ) -> None:  # fmt: skip
    talks, cache = write_talks(tmp_path / "talks.jsonl", 600), tmp_path / "cache"
    process = program(
        """
original, calls = chat_template.Template.encode, []
def encode(self, batch):
    calls.append(batch)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch)
chat_template.Template.encode = encode
load(sys.argv[2], Path(sys.argv[3]))
""",
        talks, cache,
    )  # fmt: skip
    process.communicate(timeout=60)
    assert process.returncode == -9
    (half,) = entries(cache)
    assert half.suffix == ".partial"
    rows, said = load(tokenizer, talks, cache)
    assert said[0].startswith("tokenised 600") and len(rows) == 600
    assert [entry.suffix for entry in entries(cache)] == [""]


def test_no_room_is_told_in_a_line_and_leaves_nothing(program: Any, tmp_path: Path) -> None:
    talks, cache = write_talks(tmp_path / "talks.jsonl", 600), tmp_path / "cache"
    process = program(
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(forked(lambda: load(sys.argv[2], Path(sys.argv[3]))), 0)[1]))
""",
        talks, cache,
    )  # fmt: skip
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (
        1, f"refused: data.cache: {cache}: File too large; make room or name a folder that can be written\n",
    ), err  # fmt: skip
    assert entries(cache) == []


def test_a_cache_where_nothing_can_be_written_is_refused(tokenizer: Any, talks: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.cache: .*talks\.jsonl.*; make room or name a folder"):
        load(tokenizer, talks, talks / "cache")


def test_memory_does_not_grow_with_the_data(program: Any, tmp_path: Path) -> None:
    process = program(
        """
import json
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trainer.data.order import Cursor

# Of long words, to have much text with little work.
words = [f"{number}-" * 40 for number in range(100)]
known = {word: number for number, word in enumerate(["?", "one", "two", "spare", *words])}
alone = Tokenizer(models.WordLevel(known, unk_token="?"))
alone.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=alone, chat_template=tokenizer.chat_template)
folder = Path(sys.argv[2])

def made(count):
    path = folder / f"{count}.jsonl"
    with path.open("w") as file:
        for number in range(count):
            text = " ".join(words[(number * 7 + place * place) % 100] for place in range(60))
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\\n")
    return path

def memory_bytes(which):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(which)]
    return int(line.split()[1]) << 10

load(made(500), folder / "cache", packing=True)
large, before = made(5000), memory_bytes("VmHWM")
rows = load(large, folder / "cache", packing=True)
say(f"{large.stat().st_size} {memory_bytes('VmHWM') - before}")
before, cursor = memory_bytes("RssAnon"), Cursor()
for _ in range(len(rows) // 4):
    indices, cursor = rows.take(cursor, 4)
    rows.cut(indices, 512)
say(f"{memory_bytes('RssAnon') - before}")
""",
        tmp_path,
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    size, grown = map(int, out.splitlines()[-2].split())
    read = int(out.splitlines()[-1])
    assert size > 60 << 20
    assert grown < size / 4 and read < size / 8, (size, grown, read)

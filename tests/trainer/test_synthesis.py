"""Data that the target writes itself: whole whatever interrupts it, without repetitions, and of known origin."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import taught
from tests.trainer.support import REPOSITORY, poll, records, write_config
from trainer.__main__ import main
from trainer.data.rows import load_rows
from trainer.decode.engine import Engine
from trainer.decode.generate import engine_for, generate, run
from trainer.model.target import as_ids, load_target, load_tokenizer
from trainer.sections import DataConfig, TargetConfig
from trainer.synthesis import author, filters
from trainer.synthesis.config import DrawnConfig

FILES = ("train.jsonl", "held-out.jsonl")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wanted(taught_target: Path, tmp_path: Path) -> dict[str, Any]:
    """A configuration as plain data: 24 conversations in portions of 16."""
    return {
        "target": {"path": str(taught_target), "dtype": "float32"}, "output_dir": str(tmp_path / "out"),
        "conversations": 24, "batch_size": 4, "seed": 5, "held_out_fraction": 0.3,
        "question": {"max_tokens": 24, "temperature": 0.8}, "answer": {"max_tokens": 32, "temperature": 0.6},
        "openings": {"sums": ["What is", "Add"], "counting": ["Count"], "free": [""]},
    }  # fmt: skip


def content(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in FILES}


def questions(directory: Path, name: str) -> list[str]:
    return [record["messages"][0]["content"] for record in records(directory, name)]


def test_who_is_killed_goes_on_as_if_nothing_had_happened(wanted: dict[str, Any], tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(["synthesize", str(write_config({**wanted, "output_dir": str(whole)}, tmp_path / "a.yaml"))]) == 0
    endless = write_config({**wanted, "output_dir": str(broken), "conversations": 10_000}, tmp_path / "b.yaml")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "synthesize", str(endless)], cwd=REPOSITORY, env=environment,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    poll(lambda: process.poll() is not None or records(broken, FILES[0]), timeout_s=120)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    # As if it had been killed in the middle of a line, the next portion's.
    for name in FILES:
        with (broken / name).open("ab") as file:
            file.write(b'{"messages": [{"role": "us')
    assert main(["synthesize", str(write_config({**wanted, "output_dir": str(broken)}, tmp_path / "b.yaml"))]) == 0
    there, expected = content(broken), content(whole)
    # The one that was killed may have got further than 24.
    assert all(there[name].startswith(expected[name]) and there[name].endswith(b"\n") for name in FILES)
    asked = [question for name in FILES for question in questions(broken, name)]
    assert len(set(asked)) == len(asked) >= 24


def test_who_is_asked_for_more_goes_on_where_it_was_and_tries_nothing_twice(wanted: dict[str, Any], tmp_path: Path
                                                                           ) -> None:  # fmt: skip
    found = []
    for name, steps in (("at-once", [24]), ("in-two", [14, 24])):
        for count in steps:
            settings = {**wanted, "output_dir": str(tmp_path / name), "conversations": count}
            assert main(["synthesize", str(write_config(settings, tmp_path / "config.yaml"))]) == 0
        found.append((content(tmp_path / name), json.loads((tmp_path / name / "progress.json").read_bytes())))
    assert found[0] == found[1]


def test_a_training_reads_what_was_written_and_its_origin_stands_beside_it(
    wanted: dict[str, Any], taught_target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["synthesize", str(write_config(wanted, tmp_path / "c.yaml"))]) == 0
    written = [record for name in FILES for record in records(out, name)]
    assert len(written) == 24 and {record["category"] for record in written} == {"sums", "counting", "free"}
    for record in written:
        origin = record["provenance"]
        assert origin["seed"] == 5 and origin["answer"]["temperature"] == 0.6 and len(origin["target"]) == 64
        assert origin["torch"] == importlib.metadata.version("torch") and "transformers" in origin
    assert not set(questions(out, FILES[0])) & set(questions(out, FILES[1]))
    assert all(filters.held_out(filters.key_of(text), 0.3) for text in questions(out, FILES[1]))
    target = load_target(TargetConfig(path=str(taught_target), dtype="float32", layer_ids=[0]), torch.device("cpu"))
    data = DataConfig(kind="conversations", paths=[str(out / name) for name in FILES], sequence_length=96)
    rows = load_rows(data, target.tokenizer, mask_token_id=3, seed=0, cache=tmp_path / "cache", say=lambda line: None)
    assert len(rows) == 24 and rows.dropped.bad_count == 0

    # More may be asked for later; another seed in the same place may not.
    before = content(out)
    assert main(["synthesize", str(write_config({**wanted, "conversations": 30}, tmp_path / "c.yaml"))]) == 0
    assert sum(len(records(out, name)) for name in FILES) == 30
    assert all(content(out)[name].startswith(before[name]) for name in FILES)


def test_who_waits_for_the_first_portion_reads_how_far_it_is_and_no_more_is_tried_than_may_be_needed(
    wanted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(author, "SAID_EVERY_S", 0.0)
    assert main(["synthesize", str(write_config({**wanted, "conversations": 4}, tmp_path / "c.yaml"))]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["phase=load_target", "phase=synthesize", "writing questions: 1 of 8 are begun, 1 tokens"]
    assert any(line.startswith("writing answers: ") for line in said)


def test_answers_that_came_to_no_end_are_dropped_or_kept_as_far_as_they_go(
    wanted: dict[str, Any], taught_target: Path, tmp_path: Path
) -> None:
    wanted["answer"] |= {"max_tokens": 12}
    found = {}
    for choice, conversations in (("drop", 3), ("keep", 24)):
        asked = {**wanted, "answer": {**wanted["answer"], "unfinished": choice}, "output_dir": str(tmp_path / choice),
                 "conversations": conversations}  # fmt: skip
        assert main(["synthesize", str(write_config(asked, tmp_path / "c.yaml"))]) == 0
        found[choice] = [record["messages"][-1] for name in FILES for record in records(tmp_path / choice, name)]
    assert not any("unfinished" in answer for answer in found["drop"])
    broken, ended = ([one for one in found["keep"] if one.get("unfinished", False) is cut] for cut in (True, False))
    assert broken and ended
    tokenizer = load_tokenizer(taught_target)
    tokens = [tokenizer(one["content"], add_special_tokens=False)["input_ids"] for one in (*broken, *ended)]
    assert {len(one) for one in tokens[: len(broken)]} <= {11, 12, 13} and min(map(len, tokens[len(broken) :])) < 11
    # Who kept none has tried more for each.
    tried = {choice: json.loads((tmp_path / choice / "progress.json").read_bytes()) for choice in found}
    assert tried["keep"]["next"] / 24 < tried["drop"]["next"] / 3
    assert tried["drop"]["dropped"]["the answer has not come to its end"] > 0
    assert "the answer has not come to its end" not in tried["keep"]["dropped"]


def test_what_was_made_in_another_way_is_not_gone_on_from(
    wanted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["synthesize", str(write_config({**wanted, "conversations": 4}, tmp_path / "c.yaml"))]) == 0
    before = content(tmp_path / "out")
    capsys.readouterr()
    assert main(["synthesize", str(write_config({**wanted, "seed": 6}, tmp_path / "c.yaml"))]) == 2
    said = capsys.readouterr().err
    assert "seed" in said and said.count("\n") == 1
    (tmp_path / "out" / "train.jsonl").write_bytes(b"")
    assert main(["synthesize", str(write_config(wanted, tmp_path / "c.yaml"))]) == 2
    assert "bytes" in capsys.readouterr().err
    assert before["train.jsonl"]


def test_a_line_that_has_changed_since_is_told_and_nothing_is_written_behind_it(
    wanted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["synthesize", str(write_config({**wanted, "conversations": 4}, tmp_path / "c.yaml"))]) == 0
    config = str(write_config({**wanted, "conversations": 6}, tmp_path / "more.yaml"))
    file = Path(wanted["output_dir"]) / "train.jsonl"
    first, *others = file.read_bytes().splitlines(keepends=True)
    for spoilt in (b"\0" + first[1:], b"[]".ljust(len(first) - 1) + b"\n"):
        file.write_bytes(spoilt + b"".join(others))
        assert main(["synthesize", config]) == 2
        assert f"{file}:1: has changed since it was written; choose another output_dir" in capsys.readouterr().err
        assert file.read_bytes() == spoilt + b"".join(others)


def test_regenerate_puts_the_targets_own_answers_into_conversations(
    wanted: dict[str, Any], taught_target: Path, tmp_path: Path
) -> None:
    asked = ["Count from two to five.", "What is one plus two?"]
    turns = [
        {"role": "user", "content": asked[0]}, {"role": "assistant", "content": "No idea."},
        {"role": "user", "content": asked[1]}, {"role": "assistant", "content": "None either."},
    ]  # fmt: skip
    lines = [
        {"messages": turns, "category": "kept"},
        {"messages": [{"role": "user", "content": "x"}]},
        {"conversations": [{"from": "human", "value": "Add six and nine, please."}, {"from": "gpt", "value": "17"}]},
    ]
    source = tmp_path / "others.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    del wanted["conversations"], wanted["openings"]
    wanted |= {"paths": [str(source)], "held_out_fraction": 0, "answer": {"temperature": 0, "max_tokens": 60}}
    assert main(["regenerate", str(write_config(wanted, tmp_path / "c.yaml"))]) == 0

    first, second = records(tmp_path / "out", "train.jsonl")
    target = load_target(TargetConfig(path=str(taught_target), dtype="float32", layer_ids=[0]), torch.device("cpu"))

    def says(messages: list[dict[str, str]]) -> str:
        text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        made = generate(target, None, [as_ids(target.tokenizer, text, chat=False)], max_tokens=60)
        return str(target.tokenizer.decode(made.continuations[0].tokens, skip_special_tokens=True)).strip()

    said = first["messages"]
    assert [one["content"] for one in said if one["role"] == "user"] == asked[: len(said) // 2]
    # The second answer sees the first as it is now.
    for at in range(1, len(said), 2):
        assert said[at] == {"role": "assistant", "content": says(said[:at])}
    assert first["category"] == "kept" and first["source"] == "others.jsonl:1"
    assert second["messages"][1]["content"] == says(second["messages"][:1])
    told = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert told["dropped"] == {"the conversation has no assistant turn": 1} and told["next"] == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"conversations": None}, "conversations"), ({"paths": ["x.jsonl"]}, "regenerate"),
        ({"openings": {"free": []}}, "openings"), ({"answer": {"max_tokens": 300}}, "answer.max_tokens"),
        ({"target": {"path": "nowhere"}}, "nowhere"),
        ({"answer": {"temperature": "1e-320"}}, "answer.temperature: must be 0, or at least 0.001"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_is_one_line(
    change: dict[str, Any], said: str, wanted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {key: value for key, value in {**wanted, **change}.items() if value is not None}
    assert main(["synthesize", str(write_config(settings, tmp_path / "c.yaml"))]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err


def test_a_loop_is_known_by_where_it_begins_and_a_list_is_none() -> None:
    tale, turn = list(range(100, 160)), [7, 8, 9, 10, 11]
    assert filters.loop(tale) is None and filters.loop(turn * 3) is None and filters.loop([]) is None
    begins = filters.loop(tale + turn * 20)
    assert begins is not None and len(tale) <= begins <= len(tale) + len(turn)
    # Of a long one, with a word in it that changes now and then.
    verse = list(range(200, 240))
    begins = filters.loop(tale + verse + [1, *verse, 2, *verse, 3, *verse])
    assert begins is not None and len(tale) + len(verse) <= begins <= len(tale) + len(verse) + 8
    assert filters.loop([token for number in range(40) for token in (5, 6, number, 9)]) is None
    assert filters.loop(turn * 20 + tale) is None, "it has come out of it"


def test_a_text_that_is_given_up_ends_there_and_all_others_are_as_without(
    taught_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(TargetConfig(path=str(taught_target), dtype="float32", layer_ids=[0]), torch.device("cpu"))
    prompts = [as_ids(target.tokenizer, f"Count from {word} to nine.", chat=True) for word in taught.DIGITS[:8]]
    whole = generate(target, None, prompts, max_tokens=100, stop_ids=[], batch_size=3)

    def hopeless(tokens: list[int]) -> bool:
        return len(tokens) >= 64 and sum(tokens[:40]) % 3 == 0

    for ahead in (0, 1):  # as on a GPU, where a round more is under way by then
        monkeypatch.setattr(Engine, "ahead", ahead)
        engine = engine_for(target, None, prompts, max_tokens=100, batch_size=3, sampling=None, stop_ids=[])
        made = run(engine, prompts, max_tokens=100, hopeless=hopeless)
        lengths = [64 if hopeless(one.tokens) else 100 for one in whole.continuations]
        assert set(lengths) == {64, 100}
        for one, other, length in zip(made.continuations, whole.continuations, lengths, strict=True):
            assert one.tokens == other.tokens[:length] and not one.ended


def test_filters_know_what_is_no_good_to_learn_from() -> None:
    drawn = DrawnConfig(min_tokens=3)
    assert filters.fault("a b c", [1, 2, 3], ended=True, drawn=drawn) is None
    assert filters.fault("a b c", [1, 2, 3], ended=False, drawn=drawn) == "has not come to its end"
    assert filters.fault("a b", [1, 2], ended=True, drawn=drawn) == "is too short"
    assert filters.fault("a \N{REPLACEMENT CHARACTER} c", [1, 2, 3], ended=True, drawn=drawn) == "holds what is no text"
    assert filters.repetition(list(range(50))) == 0 and filters.repetition([1, 2, 3] * 20) > 0.9
    assert filters.key_of("What  is\n this?") == filters.key_of("what is this?") != filters.key_of("what is that?")
    shares = [filters.held_out(filters.key_of(str(number)), 0.2) for number in range(2000)]
    assert 300 < sum(shares) < 500

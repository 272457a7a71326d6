"""Text to rows: what is trained on, what is refused and named, and an order that can be gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import all_rows
from trainer.config import ConfigError
from trainer.data.rows import Rows, load_rows
from trainer.sections import DataConfig

LENGTH = 64
TALK = {"messages": [
    {"role": "system", "content": "be short"}, {"role": "user", "content": "what is one and one?"},
    {"role": "assistant", "content": "it is two"}, {"role": "user", "content": "and two?"},
    {"role": "assistant", "content": "four"},
]}  # fmt: skip
SHAREGPT = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]}


@pytest.fixture
def tokenizer(tiny_target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target)


def load(tokenizer: Any, tmp_path: Path, lines: list[Any], **changes: Any) -> Rows:
    path = tmp_path / "talks.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    config = DataConfig(**{"kind": "conversations", "paths": [str(path)], "sequence_length": LENGTH, **changes})
    return load_rows(config, tokenizer, mask_token_id=3, seed=1)


def trained_text(rows: Rows, row: int, tokenizer: Any) -> str:
    ids_RS, loss_mask_RS, _ = all_rows(rows)
    return str(tokenizer.decode(ids_RS[row][loss_mask_RS[row]]))


def test_only_what_the_assistant_wrote_is_trained_on_with_its_end_token(tokenizer: Any, tmp_path: Path) -> None:
    rows = load(tokenizer, tmp_path, [TALK, SHAREGPT], sequence_length=128)
    assert trained_text(rows, 0, tokenizer) == "it is two<|end|>four<|end|>"
    assert trained_text(rows, 1, tokenizer) == "good day<|end|>"
    whole = tokenizer.decode(all_rows(rows)[0][0][: rows.lengths_R[0]])
    assert whole == tokenizer.apply_chat_template(TALK["messages"], tokenize=False)


def test_bad_rows_are_counted_and_named_by_file_and_line_and_good_ones_kept(tokenizer: Any, tmp_path: Path) -> None:
    lines = [
        SHAREGPT,
        "{not json",
        "",
        {"text": "hello"},
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"conversations": [{"from": "alien", "value": "?"}]},
        {"messages": [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "too late"}]},
        [1, 2],
        SHAREGPT,
    ]
    rows = load(tokenizer, tmp_path, lines)
    assert len(rows) == 2
    path = tmp_path / "talks.jsonl"
    assert [bad.where for bad in rows.dropped.first] == [f"{path}:{number}" for number in (2, 4, 5, 6, 7, 8, 10, 9)]
    assert (rows.dropped.records, rows.dropped.bad_count) == (10, 8)
    whys = " | ".join(bad.why for bad in rows.dropped.first)
    for expected in ("is not JSON", "has none of 'messages', 'conversations'", "holds no list of turns",
                     "no assistant turn", "a turn without a text: messages[0].content", "from is 'alien'",
                     "no two assistant tokens in a row within 64", "is not an object"):  # fmt: skip
        assert expected in whys


def test_of_many_bad_rows_one_of_each_reason_is_named_before_a_second(tokenizer: Any, tmp_path: Path) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b b b b"}]})
    dropped = load(tokenizer, tmp_path, ["{"] * 5 + ['{"messages": []}'] + ["{"] * 3 + [good]).dropped
    path = tmp_path / "talks.jsonl"
    assert [bad.where for bad in dropped.examples(3)] == [f"{path}:{line}" for line in (1, 2, 6)]
    assert dropped.examples(100) == dropped.first


def test_bytes_that_are_not_text_are_a_bad_row_not_a_crash(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_bytes(b'{"messages": "\xff\xfe"}\n' + json.dumps(SHAREGPT).encode() + b"\n")
    config = DataConfig(kind="conversations", paths=[str(path)], sequence_length=LENGTH)
    rows = load_rows(config, tokenizer, mask_token_id=3, seed=1)
    assert len(rows) == 1 and rows.dropped.first[0].where == f"{path}:1"


DEEP = "[" * 700 + "]" * 700
BOTTOMLESS = '"' + "[" * 90_000 + '"'


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("5", "has tool calls that are no list"),
        ("true", "has tool calls that are no list"),
        ('[{"name": "f", "arguments": ' + DEEP + "}]", "is nested too deeply"),
        ('[{"name": "f", "arguments": ' + BOTTOMLESS + "}]", "is nested too deeply"),
        ('[]}], "tools": ' + BOTTOMLESS, "is nested too deeply"),
    ],
)
def test_tool_calls_of_any_form_are_a_bad_row_not_a_crash(calls: str, said: str, tokenizer: Any, tmp_path: Path
                                                           ) -> None:  # fmt: skip
    record = '{"messages": [{"role": "assistant", "content": "yes", "tool_calls": ' + calls + "}"
    record = record if '"tools"' in calls else f"{record}]}}"
    path = tmp_path / "talks.jsonl"
    path.write_text(f"{record}\n{json.dumps(SHAREGPT)}\n", encoding="utf-8")
    config = DataConfig(kind="conversations", paths=[str(path)], sequence_length=LENGTH)
    rows = load_rows(config, tokenizer, mask_token_id=3, seed=1)
    assert rows.dropped.bad == {said: 1} and rows.dropped.first[0].where == f"{path}:1"


def test_sources_without_any_record_are_told_as_such(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.paths: .*talks\.jsonl: no record is in there"):
        load(tokenizer, tmp_path, [])


def test_nothing_to_train_on_is_a_configuration_error_that_names_the_first_reason(tokenizer: Any, tmp_path: Path
                                                                                   ) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match=r"1 bad; the first: .*talks\.jsonl:1: is not JSON"):
        load(tokenizer, tmp_path, ["nonsense"])
    with pytest.raises(ConfigError, match="No such file"):
        load(tokenizer, tmp_path, [SHAREGPT], paths=[str(tmp_path / "none.jsonl")])


def test_a_mask_token_that_occurs_in_the_data_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "see <|mask|> here"}]}
    with pytest.raises(ConfigError, match=r"mask_token_id: 3 .* occurs in the data"):
        load(tokenizer, tmp_path, [talk])


def test_text_becomes_rows_of_one_document_each_padded_behind(tokenizer: Any, tmp_path: Path) -> None:
    documents = [tmp_path / "one.txt", tmp_path / "two.txt"]
    texts = ["first document " * 30, "second"]
    for path, text in zip(documents, texts, strict=True):
        path.write_text(text)
    config = DataConfig(kind="text", paths=[str(path) for path in documents], sequence_length=LENGTH)
    rows = load_rows(config, tokenizer, mask_token_id=3, seed=1)
    ids_RS, loss_mask_RS, _ = all_rows(rows)
    decoded = [tokenizer.decode(ids[:length]) for ids, length in zip(ids_RS, rows.lengths_R, strict=True)]
    assert "".join(decoded[:-1]) == texts[0] and decoded[-1] == texts[1]
    for mask, length in zip(loss_mask_RS, rows.lengths_R, strict=True):
        assert mask[:length].all() and not mask[length:].any()


def test_python_docs_need_no_file(tokenizer: Any) -> None:
    config = DataConfig(kind="python-docs", sequence_length=LENGTH)
    rows = load_rows(config, tokenizer, mask_token_id=3, seed=1)
    assert len(rows) > 1000 and not rows.dropped.bad


def test_a_row_says_which_files_and_lines_it_is_made_of(tokenizer: Any, tmp_path: Path) -> None:
    rows = load(tokenizer, tmp_path, [SHAREGPT, "nonsense", "", SHAREGPT], packing=True, sequence_length=128)
    path = tmp_path / "talks.jsonl"
    assert [rows.where(row) for row in range(len(rows))] == [f"{path}:1, {path}:4"]
    alone = load(tokenizer, tmp_path, [SHAREGPT, "nonsense", "", SHAREGPT])
    assert [alone.where(row) for row in range(len(alone))] == [f"{path}:1", f"{path}:4"]

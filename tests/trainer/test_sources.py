"""The forms data comes in: whatever the file, the same documents, each named by where it stands."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.support import TrainerProcess, write_config
from trainer.config import Config, ConfigError, check_inputs
from trainer.data import source_files, sources
from trainer.data.rows import Rows, load_rows
from trainer.data.sources import BadRecord
from trainer.sections import DataConfig

TALKS = [
    {"messages": [{"role": "user", "content": f"{number} and one?"}, {"role": "assistant", "content": f"é {number}"}]}
    for number in range(150)
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": turns["messages"][0]["content"]},
                       {"from": "gpt", "value": turns["messages"][1]["content"]}]} for turns in TALKS
]  # fmt: skip


@pytest.fixture
def tokenizer(tiny_target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target)


def lines(records: list[Any]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def saved(folder: Path, records: list[Any]) -> Path:
    """As `datasets.save_to_disk` does it: two files of Arrow's stream format, and what they are."""
    folder.mkdir()
    table, names = pa.Table.from_pylist(records), ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 100), table.slice(100)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(part, max_chunksize=40)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def as_parquet(path: Path, records: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=40)
    return path


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


FORMS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "lines": (lambda at: written(at / "a.jsonl", lines(TALKS)), "a.jsonl:18"),
    "sharegpt": (lambda at: written(at / "a.jsonl", lines(SHAREGPT)), "a.jsonl:18"),
    "windows": (lambda at: written(at / "a.jsonl", b"\xef\xbb\xbf" + lines(TALKS).replace(b"\n", b"\r\n")),
                "a.jsonl:18"),
    "lines in .json": (lambda at: written(at / "a.json", lines(TALKS)), "a.json:18"),
    "array": (lambda at: written(at / "a.json", json.dumps(SHAREGPT, indent=1).encode()), "a.json[17]"),
    "array, windows": (lambda at: written(at / "a.json", b"\xef\xbb\xbf " + json.dumps(TALKS).encode()), "a.json[17]"),
    "gzip": (lambda at: written(at / "a.jsonl.gz", gzip.compress(lines(TALKS))), "a.jsonl.gz:18"),
    "gzipped array": (lambda at: written(at / "a.json.gz", gzip.compress(json.dumps(TALKS).encode())),
                      "a.json.gz[17]"),
    "zstd": (lambda at: written(at / "a.jsonl.zst", zstd(lines(TALKS))), "a.jsonl.zst:18"),
    "parquet": (lambda at: as_parquet(at / "a.parquet", TALKS), "a.parquet row 17"),
    "data set": (lambda at: saved(at / "set", SHAREGPT), "set row 17"),
    "folder": (lambda at: written(at / "in" / "b.jsonl", lines(TALKS[10:])).parent / written(
        at / "in" / "a.jsonl", lines(TALKS[:10])).parent, "b.jsonl:8"),
    "glob": (lambda at: written(at / "x" / "p-2.jsonl", lines(TALKS[10:])).parent / written(
        at / "x" / "p-1.jsonl", lines(TALKS[:10])).with_name("p-*.jsonl").name, "p-2.jsonl:8"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_documents_and_says_where_each_is(form: str, tokenizer: Any, tmp_path: Path) -> None:
    make, place = FORMS[form]
    plain = tmp_path / "plain"
    plain.mkdir()
    expected = load(tokenizer, written(plain / "talks.jsonl", lines(TALKS)))
    rows = load(tokenizer, make(tmp_path))
    assert rows.digest() == expected.digest() and len(rows) == 150 and not rows.dropped.bad
    assert rows.where(17).endswith(f"/{place}")


def load(tokenizer: Any, path: Path, **changes: Any) -> Rows:
    config = DataConfig(**{"kind": "conversations", "paths": [str(path)], "sequence_length": 64, **changes})
    return load_rows(config, tokenizer, mask_token_id=3, seed=1)


def test_a_data_set_that_datasets_itself_has_saved(tokenizer: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(TALKS).save_to_disk(str(tmp_path / "set"))
    expected = load(tokenizer, written(tmp_path / "talks.jsonl", lines(TALKS)))
    assert load(tokenizer, tmp_path / "set").digest() == expected.digest()
    datasets.DatasetDict({"test": datasets.Dataset.from_list(TALKS)}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ConfigError, match=r"both holds several data sets: name one, such as .*both/test"):
        load(tokenizer, tmp_path / "both")


def test_a_text_of_a_line_or_a_row_is_a_document(tokenizer: Any, tmp_path: Path) -> None:
    records = [{"body": f"text {number} " * 20, "other": 1} for number in range(20)]
    digests = set()
    for path in (written(tmp_path / "a.jsonl", lines(records)), as_parquet(tmp_path / "a.parquet", records)):
        rows = load(tokenizer, path, kind="text", text_field="body")
        digests.add(rows.digest())
    assert len(digests) == 1
    assert rows.where(0) == f"{path} row 0" and rows.where(1) == f"{path} row 0 from token 64"
    with pytest.raises(ConfigError, match=r"a\.parquet has no column 'text'; it has body, other; data\.text_field nam"):
        load(tokenizer, path, kind="text")
    bad = load(tokenizer, written(tmp_path / "b.jsonl", lines([*records, {"text": 5}])), kind="text", text_field="body")
    assert bad.dropped.bad == {"has no text under 'body' (data.text_field)": 1}


def test_a_line_that_is_too_long_is_skipped_and_the_next_is_read(tokenizer: Any, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 20)
    long = {"messages": [{"role": "user", "content": "x" * (3 << 20)}, {"role": "assistant", "content": "y"}]}
    path = written(tmp_path / "a.jsonl", lines([TALKS[0], long, TALKS[1]]))
    rows = load(tokenizer, path)
    assert [rows.where(row) for row in range(len(rows))] == [f"{path}:1", f"{path}:3"]
    assert [(bad.where, bad.why) for bad in rows.dropped.first] == [(f"{path}:2", "is longer than 1 MiB")]


def test_an_array_that_breaks_off_or_is_broken_loses_what_follows_and_says_so(tokenizer: Any, tmp_path: Path) -> None:
    text = json.dumps(TALKS)
    for broken in (text[:-20], text.replace("149 and", '"', 1)):
        path = written(tmp_path / "a.json", broken.encode())
        rows = load(tokenizer, path)
        (bad,) = rows.dropped.first
        assert len(rows) == 149
        assert bad.where == f"{path}[149]" and bad.why.startswith("is not JSON, and what follows it is lost")


def test_bytes_that_are_no_text_spoil_one_record_of_an_array_or_a_table(tokenizer: Any, tmp_path: Path) -> None:
    array = written(tmp_path / "a.json", lines([TALKS]).replace(b'"17 and', b'"17 \xff'))
    texts = [f"text {number} of some length".encode() for number in range(100)]
    texts[17] += b"\xff"
    column = pa.StringArray.from_buffers(
        100, pa.py_buffer(b"".join(len(b"".join(texts[:end])).to_bytes(4, "little") for end in range(101))),
        pa.py_buffer(b"".join(texts)),
    )  # fmt: skip
    pq.write_table(pa.table({"text": column}), tmp_path / "b.parquet")
    for path, kind, place in ((array, "conversations", "[17]"), (tmp_path / "b.parquet", "text", " row 17")):
        rows = load(tokenizer, path, kind=kind)
        assert [bad.where for bad in rows.dropped.first] == [f"{path}{place}"]
        assert list(rows.dropped.bad) == ["is not UTF-8"] and rows.dropped.records in (100, 150)


def test_half_of_a_surrogate_pair_in_a_text_is_a_bad_record(tokenizer: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"text": "a good text"}\n{"text": "half \\ud83d of one"}\n')
    rows = load(tokenizer, path, kind="text")
    assert [bad.where for bad in rows.dropped.first] == [f"{path}:2"] and len(rows) == 1


def test_a_pipe_and_a_device_are_refused_and_never_waited_for(settings: dict[str, Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        settings["data"] = {"kind": "text", "paths": [str(path)], "sequence_length": 48}
        with pytest.raises(ConfigError, match=rf"{path} is no regular file, and data is read more than once"):
            check_inputs(Config.model_validate(settings))


@pytest.mark.parametrize(("text", "said"), [
    ("", r"'' is no path: it is empty"), ("a\0b", "is no path"), ("a" * 5000, "File name too long"),
])  # fmt: skip
def test_what_can_be_no_path_is_told_by_its_key(settings: dict[str, Any], text: str, said: str) -> None:
    settings["data"] = {"kind": "text", "paths": [text], "sequence_length": 48}
    with pytest.raises(ConfigError, match=rf"^data\.paths\[0\]: .*{said}"):
        check_inputs(Config.model_validate(settings))


@given(st.lists(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
), max_size=12), st.integers(1, 9), st.sampled_from([None, 1]))  # fmt: skip
def test_an_array_is_read_piece_by_piece_to_what_it_is(items: list[Any], size: int, indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "READ_BYTES", size)
        import io

        data = json.dumps(items, indent=indent, ensure_ascii=False).encode()
        assert list(sources._items(io.BytesIO(data))) == [(-1 - index, item) for index, item in enumerate(items)]


@given(st.lists(st.sampled_from(["word", " ", "\n", "\n\n", "  indented", "\t", "é", "a longer line of text\n"]),
                max_size=80).map("".join), st.integers(4, 40))  # fmt: skip
def test_pieces_of_a_text_are_the_text_and_begin_where_a_line_does(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_CHARACTERS", size)
        found = list(sources.pieces([text[:7], text[7:]]))
    assert "".join(found) == text
    assert all(found)


def test_a_text_is_tokenised_in_pieces_as_it_is_as_a_whole(tokenizer: Any, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    text = Path(json.__file__).read_text(encoding="utf-8") * 3
    path = written(tmp_path / "a.txt", text.encode())
    whole = load(tokenizer, path, kind="text")
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 500)
    assert len(list(sources.pieces([text]))) > 20
    assert load(tokenizer, path, kind="text").digest() == whole.digest()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.parquet", b"PAR1 and then nothing", "a.parquet is cut off: a Parquet file ends as it begins"),
        ("a.parquet", b"{}", "a.parquet is not a Parquet file"),
        ("a.jsonl", "{}".encode("utf-16"), "a.jsonl is UTF-16; save it as UTF-8"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "a.jsonl is a Git LFS pointer"),
        ("none/b.jsonl", None, "No such file or directory"),
        ("*.jsonl", None, "nothing matches"),
        (".", None, "is a directory without any .json, .jsonl, .ndjson, .parquet"),
    ],
)
def test_what_is_no_data_is_told_before_anything_is_read(
    settings: dict[str, Any], tmp_path: Path, name: str, data: bytes | None, said: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if data is not None:
        (folder / name).write_bytes(data)
    settings["data"] = {"kind": "conversations", "paths": [str(folder / name)], "sequence_length": 48}
    with pytest.raises(ConfigError, match=r"^data\.paths\[0\]: ") as caught:
        check_inputs(Config.model_validate(settings))
    assert said in str(caught.value)


def test_half_a_gzip_and_a_parquet_of_other_columns_end_the_run_by_name(tokenizer: Any, tmp_path: Path) -> None:
    half = written(tmp_path / "a.jsonl.gz", gzip.compress(lines(TALKS))[:-30])
    with pytest.raises(ConfigError, match=r"data\.paths: .*a\.jsonl\.gz: "):
        load(tokenizer, half)
    other = as_parquet(tmp_path / "b.parquet", [{"question": "a", "tools": "b"}])
    with pytest.raises(ConfigError, match=r"b\.parquet has no column 'messages' or 'conversations'; it has question"):
        load(tokenizer, other)


def test_without_pyarrow_a_table_is_refused_before_torch_is_imported(
    start_trainer: Callable[..., TrainerProcess], settings: dict[str, Any], tmp_path: Path
) -> None:
    path = as_parquet(tmp_path / "a.parquet", TALKS)
    settings["data"] = {"kind": "conversations", "paths": [str(path)], "sequence_length": 48}
    planted = "import sys; sys.modules['pyarrow'] = sys.modules['torch'] = None"
    code, _, err = start_trainer(write_config(settings, tmp_path / "config.yaml"), planted=planted).finish()
    assert code == 2
    assert err == f"trainer: data.paths[0]: {path} cannot be read without pyarrow: pip install pyarrow\n"


def test_lines_that_are_no_objects_are_bad_records_in_their_place(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b'{"a": 1}\n\n[' + b"[" * 100_000 + b"\n\xff\n{}\n")
    (source,) = source_files.resolve(path, "conversations")
    found = list(sources.read(source, text_field=None))
    assert [at for at, _ in found] == [1, 3, 4, 5]
    assert [isinstance(record, BadRecord) for _, record in found] == [False, True, True, False]

"""`python -m trainer data CONFIG`: what would be trained on, and what is dropped and why, before a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.trainer.support import IMPORTS, events, write_config
from tests.trainer.test_token_cache import write_talks
from trainer.__main__ import main
from trainer.config import ConfigError, load_config


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """58 that can be trained on; line 59 is broken, and line 60 has no answer."""
    path = write_talks(tmp_path / "talks.jsonl", 58, words=4)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"messages": [\n' + json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n")
    return path


@pytest.fixture
def config(settings: dict[str, Any], talks: Path, tmp_path: Path) -> Path:
    settings["data"] = {"kind": "conversations", "paths": [str(talks)], "sequence_length": 160, "buckets": [64, 160]}
    return write_config(settings, tmp_path / "config.yaml")


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["data", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.err if code == 2 else captured.out


def test_it_shows_samples_with_what_is_trained_on_between_marks(
    config: Path, talks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, config, "--row", f"{talks.name}:3")
    text = "2 word 14 word 15 word 16 word 17"
    assert re.search(rf"^{talks}:3: [0-9]+ tokens, [0-9]+ trained on ", out)
    assert f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n[[{text.upper()}<|end|>]]\n" in out
    assert shown(capsys, config, "--samples", 5).count(" trained on ─") == 5
    assert "trained on ─" not in shown(capsys, config, "--samples", 0)


def test_in_a_terminal_it_is_in_colour_and_nothing_in_a_text_moves_the_cursor(config: Path, talks: Path) -> None:
    from trainer.data import report

    with talks.open("a", encoding="utf-8") as file:
        turns = [{"role": "user", "content": "\x1b[2Jcleared"}, {"role": "assistant", "content": "no \x07 bell"}]
        file.write(json.dumps({"messages": turns}) + "\n")
    console = Console(force_terminal=True, width=100, color_system="standard")
    with console.capture() as capture:
        report.show(
            report.report(load_config(str(config)), samples=1, row=f"{talks}:61", say=print), console
        )
    out = capture.get()
    assert "\x1b[1;32mno \ufffd bell<|end|>\x1b[0m" in out and "[[" not in out
    assert "\ufffd[2Jcleared" in out and "\x1b[2J" not in out and "\x07" not in out


def test_what_is_counted_is_what_a_run_counts(config: Path, settings: dict[str, Any], talks: Path, train: Any,
                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    said = json.loads(shown(capsys, config, "--json"))
    training = train({**settings, "steps": 1})
    (event,) = events(Path(settings["output_dir"]), "data")
    for key in ("records", "rows", "bad", "bad_by_reason", "tokens", "trained_on", "duplicates", "cut"):
        assert said[key] == event[key], key
    assert said["bad_by_reason"] == {"is not JSON": 1, "has no assistant turn": 1}
    assert [bad["where"] for bad in said["bad_rows"]] == [f"{talks}:59", f"{talks}:60"]
    masks = [training.rows.cut(training.rows.order.padded_R.new_tensor([row]), 160)[1] for row in range(58)]
    assert said["trained_on"] == sum(int(mask.sum()) for mask in masks)
    assert said["anchors"]["least_places"] == min(int((mask[:, 1:] & mask[:, :-1]).sum()) for mask in masks)
    lengths = training.rows.lengths_R
    assert [one["up_to"] for one in said["lengths"]] == list(range(20, 161, 20))
    for one in said["lengths"]:
        assert one["count"] == int(((lengths > one["up_to"] - 20) & (lengths <= one["up_to"])).sum())
    assert sum(bucket["rows"] for bucket in said["buckets"]) == 58 and said["if_packed"]["rows"] < 58
    assert sum(stretch["tokens"] for stretch in said["samples"][0]["stretches"] if stretch["trained_on"]) > 2


def test_what_is_cut_is_counted_in_conversations_and_tokens(
    config: Path, settings: dict[str, Any], talks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with talks.open("a", encoding="utf-8") as file:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "0123456789" * 40}]
        file.write(json.dumps({"messages": turns}) + "\n")
    cut = json.loads(shown(capsys, config, "--json"))
    settings["data"] |= {"sequence_length": 1000, "buckets": [1000]}
    whole = json.loads(shown(capsys, write_config(settings, config), "--json"))
    assert (cut["cut"], whole["cut"], whole["cut_tokens"]) == (1, 0, 0)
    assert cut["cut_tokens"] == whole["tokens"] - cut["tokens"] > 0


def test_under_specctl_it_shares_what_is_tokenised_with_the_runs_of_the_same_workdir(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "workdir" / "runs" / "a-run"
    run.mkdir(parents=True)
    monkeypatch.setenv("SPECCTL_RUN_DIR", str(run))
    shown(capsys, config)
    assert list((tmp_path / "workdir" / "token-cache").glob("*/tokens.i32"))


def test_no_weights_are_needed(config: Path, settings: dict[str, Any], tiny_target: Path, tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_target.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    settings["target"]["path"] = str(model)
    write_config(settings, config)
    assert "58 with " in shown(capsys, config)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("talks.jsonl:59", "talks.jsonl:59 is not JSON: "),
        ("talks.jsonl:60", "talks.jsonl:60 has no assistant turn"),
        ("talks.jsonl:99", "talks.jsonl:99 is not there: no record begins there"),
        ("other.jsonl:1", "--row: other.jsonl:1 is in none of the sources "),
    ],
)
def test_a_row_that_is_not_trained_on_is_told_why(config: Path, row: str, said: str,
                                                  capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    assert said in shown(capsys, config, "--row", row, code=2)


def test_duplicates_are_counted_and_dropped_if_that_is_wanted(config: Path, settings: dict[str, Any], talks: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    lines = talks.read_text().splitlines(keepends=True)
    talks.write_text("".join([*lines[:58], *lines[:7], lines[3]]))
    kept = json.loads(shown(capsys, config, "--json"))
    assert (kept["duplicates"], kept["rows"]) == (8, 66)
    settings["data"]["duplicates"] = "drop"
    write_config(settings, config)
    dropped = json.loads(shown(capsys, config, "--json"))
    assert (dropped["duplicates"], dropped["rows"]) == (8, 58)
    assert "talks.jsonl:60 is a duplicate: dropped" in shown(capsys, config, "--row", f"{talks}:60", code=2)


def test_too_many_bad_records_stop_a_run_before_it_starts(
    config: Path, settings: dict[str, Any], talks: Path, train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings["data"]["max_bad_fraction"] = 0.03
    write_config(settings, config)
    with pytest.raises(ConfigError) as caught:
        train(settings)
    message = str(caught.value)
    assert message.startswith(
        "data: 2 of 60 records are bad (1 x is not JSON, 1 x has no assistant turn), more than data.max_bad_fraction"
        f" allows (0.03); mend them, or raise it; for example {talks}:59: is not JSON: "
    )
    assert message.endswith(f"; {talks}:60: has no assistant turn") and "\n" not in message
    assert "a run would not start: data: 2 of 60 records are bad" in shown(capsys, config, code=1).replace("\n", " ")
    assert json.loads(shown(capsys, config, "--json", code=1))["refusal"] == message
    assert "2 are bad" in shown(capsys, config, "--row", f"{talks.name}:3"), "a row was asked for, and is there"
    settings["data"]["max_bad_fraction"] = 0.04
    train({**settings, "steps": 1})


def test_python_docs_are_shown_by_their_topics(settings: dict[str, Any], tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    settings["data"] = {"kind": "python-docs", "sequence_length": 48}
    config = write_config(settings, tmp_path / "config.yaml")
    out = shown(capsys, config, "--row", "pydoc_data.topics:lambda", "--samples", 9)
    assert out.count("pydoc_data.topics:lambda") > 3 and "pydoc_data.topics:lambda from token 48: 48 tokens, 48" in out
    assert shown(capsys, config, "--row", "pydoc_data.topics:lambda from token 48").count("topics:lambda") == 1


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_who_reads_only_the_first_line_gets_no_traceback(config: Path, options: tuple[str, ...]) -> None:
    argv = [sys.executable, "-m", "trainer", "data", str(config), *options]
    environment = {**os.environ, "PYTHONPATH": IMPORTS}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 141
    assert b"Traceback" not in said and b"BrokenPipe" not in said


def test_an_interruption_is_a_word_and_no_traceback(config: Path) -> None:
    planted = "import trainer.data.report as r, signal, os; r.load_rows = lambda *a, **k: os.kill(os.getpid(), 2)"
    program = f"{planted}; import sys, trainer.__main__ as m; sys.exit(m.main({['data', str(config)]!r}))"
    argv = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": IMPORTS}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (130, "trainer: interrupted\n")

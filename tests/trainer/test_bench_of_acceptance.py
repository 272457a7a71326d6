"""The benches of what a drafter is worth: runs whose records are torn or gone, and files that are none of theirs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from bench import ablations, acceptance


def bench(monkeypatch: pytest.MonkeyPatch, module: str, *argv: object) -> str:
    """What it says as it exits; empty after a good end."""
    monkeypatch.setattr(sys, "argv", [module, *map(str, argv)])
    try:
        {"acceptance": acceptance, "ablations": ablations}[module].main()
    except SystemExit as ended:
        return str(ended.code)
    return ""


@pytest.mark.usefixtures("one_thread")
def test_a_run_without_figures_is_decoded_with_and_its_minutes_are_not_known(
    learnt_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(learnt_run, tmp_path / "run")
    (run / "metrics.jsonl").unlink(missing_ok=True)
    (run / "events.jsonl").write_text('{"time": 1, "event": "phase", "phase": "train"}\n{"time": 2, "eve')
    (run / "checkpoints" / "step-999999").mkdir()
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    turns = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a thing"}]
    data.write_text(json.dumps({"messages": turns}))
    settings = ["--data", data, "--out", out, "--max-tokens", 4, "--compile", "auto", "off"]
    assert not bench(monkeypatch, "acceptance", "measure", run, "--last", *settings)
    row, other = map(json.loads, out.read_text().splitlines())
    assert row["minutes"] is None and row["step"] < 999999 and row["tau"] >= 1
    # On a CPU nothing is compiled, and both are the same.
    assert row["tau"] == other["tau"] and not row["compiled"] and row["plain_tok_s"] != other["plain_tok_s"]
    assert not bench(monkeypatch, "acceptance", "measure", run / "checkpoints" / f"step-{row['step']}", *settings[:-3])
    again = json.loads(out.read_text().splitlines()[2])
    assert (again["run"], again["step"], again["tau"]) == (row["run"], row["step"], row["tau"])
    assert not bench(monkeypatch, "acceptance", "show", out, "--png", tmp_path / "curve.png")
    assert f"| run | {row['step']:,} | - |" in capsys.readouterr().out and (tmp_path / "curve.png").stat().st_size


def test_what_is_not_theirs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, other, empty = tmp_path / "gone", tmp_path / "other.jsonl", tmp_path / "empty"
    other.write_text('{"messages": []}\n')
    empty.touch()
    assert bench(monkeypatch, "acceptance", "show", gone) == f"{gone}: No such file or directory"
    assert bench(monkeypatch, "acceptance", "show", other).startswith(f"{other}:1: is no line that")
    assert bench(monkeypatch, "acceptance", "show", empty) == f"{empty}: nothing has been measured"
    out = tmp_path / "no" / "out.jsonl"
    said = bench(monkeypatch, "acceptance", "measure", tmp_path, "--data", other, "--out", out)
    assert said == f"{out}: No such file or directory", "before anything is measured"
    assert bench(monkeypatch, "ablations", gone) == f"{gone}: No such file or directory"
    empty.write_text("a: b: c")
    assert bench(monkeypatch, "ablations", empty).startswith(f"{empty} is not YAML: ")
    empty.write_text("steps")
    assert bench(monkeypatch, "ablations", empty) == f"{empty} is no configuration: it holds no keys"

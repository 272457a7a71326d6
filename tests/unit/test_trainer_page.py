"""docs/trainer.md and docs/decoding.md: their tables are what the code says, their examples are read without a word."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import load_config
from trainer.synthesis.config import load_synthesis

ROOT = Path(__file__).parents[2]
PAGE, DECODING = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("trainer.md", "decoding.md"))


@pytest.mark.parametrize(("page", "least"), [(PAGE, 70), (DECODING, 20)], ids=["trainer", "decoding"])
def test_every_key_is_there_as_the_program_knows_it(page: str, least: int) -> None:
    checked = [sys.executable, str(ROOT / "scripts" / "config_page.py"), "--check"]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|.*\| (.*?) \|$", page, re.MULTILINE)
    silent = [key for key, takes, words in rows if not words and not takes.startswith("[keys of its own]")]
    assert len(rows) >= least and not silent, "every key says what it means"


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "chat.yaml").write_text(example)
    assert load_config(str(tmp_path / "chat.yaml")).data.paths == ["chat.jsonl"]


def test_the_example_of_synthesis_is_a_configuration(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", DECODING, re.DOTALL)
    (tmp_path / "synthesis.yaml").write_text(example)
    assert load_synthesis(str(tmp_path / "synthesis.yaml"), verb="synthesize").answer.max_tokens == 512

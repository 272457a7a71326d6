"""What outlives a run: the folders of compiled code and tokenised data, by which the next start is quicker; and in what
it was made otherwise than now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import Config, expand_path
from trainer.sections import DataConfig


def run_directory(config: Config, environ: Mapping[str, str]) -> Path:
    """Where a run of `config` writes, for what looks at it beforehand: by it the same folders are found."""
    directory = environ.get("SPECCTL_RUN_DIR") or expand_path(config.output_dir, key="output_dir")
    return Path(directory).absolute()


def compile_cache(config: Config, directory: Path, environ: Mapping[str, str]) -> str:
    """The folder of compiled code, of a run with this directory."""
    if config.compile_cache is not None:
        return str(expand_path(config.compile_cache, key="compile_cache").absolute())
    return environ.get("TORCHINDUCTOR_CACHE_DIR") or str(kept_folder(directory, "compile-cache", environ))


def token_cache(config: DataConfig, directory: Path, environ: Mapping[str, str]) -> Path:
    """The folder of tokenised data, of a run with this directory."""
    if config.cache is not None:
        return expand_path(config.cache, key="data.cache").absolute()
    return kept_folder(directory, "token-cache", environ)


def kept_folder(directory: Path, name: str, environ: Mapping[str, str]) -> Path:
    """Of what outlives the run with this directory: with specctl that is WORKDIR/runs/RUN_ID, and what is kept is kept
    in WORKDIR, which is of this machine alone."""
    directory = directory.absolute()
    return (directory.parents[1] if environ.get("SPECCTL_RUN_DIR") else directory.parent) / name


def changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys by which the two differ, also those that only one of them has."""
    return [key for key in {**was, **now} if was.get(key) != now.get(key)]

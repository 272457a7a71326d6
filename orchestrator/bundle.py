"""The code that runs: the trainer and the project's files, named by the hash of their content.

In a git checkout the project is what git tracks and what it neither tracks nor ignores; elsewhere it is everything but
`IGNORED` and what the trainer has written. A file too big to be code is refused by name: data belongs on the target.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import io
import os
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from orchestrator.errors import BundleError, ConfigError
from orchestrator.manifest import Entry, bundle_hash

IGNORED = (
    ".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", "*.egg-info", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".tox", ".ipynb_checkpoints", ".DS_Store", "wandb", "build", "dist",
    "token-cache", "compile-cache",
)  # fmt: skip
FILE_MIB, TOTAL_MIB, FILES = 20, 200, 20_000
DIFF_BYTES = 1 << 20
TRAINING = "trainer.lock"
"""In a folder that the trainer, run without specctl, has written its records and checkpoints to."""
REPORT, REPORT_BYTES = '<meta name="generator" content="specctl report">', 2048
"""By which a page of `specctl report` is known, within so many bytes."""
PACKAGES = ("trainer", "typedyaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """Files by their path in the bundle, and where they came from."""

    files: dict[str, Path]
    entries: list[Entry]
    commit: str | None = None
    diff: str | None = None
    source: str | None = None
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash", bundle_hash(self.entries))

    @property
    def size(self) -> int:
        return sum(path.lstat().st_size for path in self.files.values())

    def tar(self) -> Iterator[bytes]:
        """The bundle as an uncompressed tar, a piece at a time."""
        buffer = io.BytesIO()
        kinds = {entry.path: entry for entry in self.entries}
        with tarfile.open(fileobj=buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for name, path in self.files.items():
                info = tarfile.TarInfo(name)
                if kinds[name].kind == "link":
                    info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
                    tar.addfile(info)
                else:
                    try:
                        data = path.read_bytes()
                    except OSError as error:
                        _unreadable(error)
                    if hashlib.sha256(data).hexdigest() != kinds[name].sha256:
                        raise BundleError(f"{path} changed while it was being sent", hint="launch again")
                    info.size, info.mode = len(data), 0o755 if kinds[name].kind == "program" else 0o644
                    tar.addfile(info, io.BytesIO(data))
                yield buffer.getvalue()
                buffer.seek(0)
                buffer.truncate()
        yield buffer.getvalue()


def collect(source: Path | None, *, without: Iterable[Path] = ()) -> Bundle:
    """The bundle of the trainer and of the project at `source` (None: no project), `without` what lies in these
    folders: a workdir inside the project would ship every run again with the next. Raises `BundleError`."""
    try:
        return _collect(source, without)
    except OSError as error:
        _unreadable(error)


def _collect(source: Path | None, without: Iterable[Path]) -> Bundle:
    files: dict[str, Path] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"package {package} is not installed beside specctl", hint="pip install specctl again")
        home = Path(spec.submodule_search_locations[0])
        for path in sorted(home.rglob("*.py")):
            files[f"trainer/{package}/{path.relative_to(home).as_posix()}"] = path
    commit = diff = None
    if source is not None:
        if not source.is_dir():
            raise ConfigError(
                f"--source {source}: {'not a directory' if source.exists() else 'no such directory'}",
                hint="name the project's own folder, or ship none with --no-source",
            )
        inside = _git(source, "rev-parse", "--is-inside-work-tree") == "true\n"
        names = git_files(source) if inside else plain_files(source)
        kept_out = [f"{os.path.relpath(folder, source)}/" for folder in without]
        names = [
            name for name in names
            if not name.startswith(tuple(kept_out)) and not (name.endswith(".html") and is_report(source / name))
        ]  # fmt: skip
        _refuse_big(source, names, in_git=inside)
        files.update({f"project/{name}": source / name for name in names})
        if inside:
            commit = (_git(source, "rev-parse", "--verify", "-q", "HEAD") or "").strip() or None
            diff = (_git(source, "diff", "HEAD", "--", ".") or "")[:DIFF_BYTES] if commit else None
    return Bundle(
        files=files, entries=[_entry(name, path) for name, path in files.items()], commit=commit, diff=diff,
        source=str(source) if source else None,
    )  # fmt: skip


def _unreadable(error: OSError) -> NoReturn:
    raise BundleError(
        f"{error.filename} cannot be read, and what is only half the project is not shipped: {error.strerror}",
        hint="make it readable, have git ignore it, or ship another folder with --source DIR, or none with --no-source",
    ) from error


def git_files(root: Path) -> list[str]:
    """Tracked files and untracked ones that are not ignored, submodules' included, that exist right now."""
    listing = _git(root, "ls-files", "-coz", "--exclude-standard") or ""
    names = []
    for name in sorted(set(filter(None, listing.split("\0")))):
        path = root / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or another checkout inside this one
            names += [f"{name.rstrip('/')}/{inner}" for inner in git_files(path)]
        elif path.is_symlink() or path.is_file():
            names.append(name)
    return names


def plain_files(root: Path) -> list[str]:
    names = []
    for folder, folders, found in os.walk(root, onerror=_unreadable):
        if TRAINING in found:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not _ignored(name))
        base = Path(folder).relative_to(root)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in sorted(found) + links:
            path = Path(folder) / name
            if not _ignored(name) and (path.is_symlink() or path.is_file()):
                names.append((base / name).as_posix())
        if len(names) > FILES:
            break
    return names


def is_report(path: Path) -> bool:
    """Whether `specctl report` has written this file."""
    if not path.is_file():  # such as a link that leads nowhere
        return False
    with path.open("rb") as file:
        return REPORT.encode() in file.read(REPORT_BYTES)


def _ignored(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED)


def _refuse_big(root: Path, names: list[str], *, in_git: bool) -> None:
    sizes = sorted(((root / name).lstat().st_size, name) for name in names)
    big = [(size, name) for size, name in sizes if size > FILE_MIB << 20]
    aside = "add it to .gitignore" if in_git else "keep it outside this folder"
    hint = f"{aside} (data belongs on the target), or ship another folder with --source DIR, or none with --no-source"
    if big:
        listed = ", ".join(f"{name} ({size / (1 << 20):.0f} MiB)" for size, name in reversed(big[-5:]))
        raise BundleError(f"{root}: too big to be code (over {FILE_MIB} MiB): {listed}", hint=hint)
    total = sum(size for size, _ in sizes)
    if len(names) > FILES or total > TOTAL_MIB << 20:
        listed = ", ".join(f"{name} ({size / (1 << 20):.1f} MiB)" for size, name in reversed(sizes[-5:]))
        raise BundleError(
            f"{root} holds {len(names):,} files, {total >> 20} MiB: that is more than a project's code "
            f"(at most {FILES:,} files, {TOTAL_MIB} MiB). The largest: {listed}",
            hint="launch from the project's own folder, or name it with --source DIR (--no-source ships none)",
        )


def _entry(name: str, path: Path) -> Entry:
    if path.is_symlink():
        return Entry(path=name, kind="link", sha256=hashlib.sha256(os.fsencode(path.readlink())).hexdigest())
    program = bool(path.stat().st_mode & 0o100)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Entry(path=name, kind="program" if program else "file", sha256=digest)


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None

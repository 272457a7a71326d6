"""Why a program could not be started, from the kernel's bare word for it, and what to launch instead."""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import shutil

MACHINES = {0x03: "32-bit x86", 0x28: "32-bit arm", 0x3E: "x86_64", 0xB7: "aarch64", 0xF3: "riscv"}
"""Of an ELF header, as it counts them."""
BUILTINS = frozenset({".", "alias", "cd", "eval", "exec", "export", "set", "source", "ulimit", "umask", "unset"})
"""Words of a shell that are no programs."""


def why_not(program: str, error: OSError, *, cwd: str, path: str) -> str:
    """One line about `error`, which starting `program` in `cwd` with the PATH `path` gave."""
    said = os.strerror(error.errno or 0)
    if error.filename == cwd:
        return f"working directory {cwd}: {said}"
    full = os.path.join(cwd, program)
    if error.errno == errno.ENOENT and not os.path.lexists(full) and (meant := _shells(program)):
        return f"{program}: {meant}"
    if "/" not in program:
        return _not_in_path(program, error, cwd, path)
    if os.path.isdir(full):
        return f"{program} is a directory, not a program"
    if error.errno == errno.ENOENT:
        return _missing(program, full)
    if error.errno == errno.EACCES and os.path.isfile(full):
        if os.access(full, os.X_OK):
            return f"{program}: {said} (its #! interpreter cannot be run, or its file system forbids programs: noexec)"
        return f"{program} is not executable: chmod +x it, or launch -- {_interpreter(program)} {program}"
    if error.errno == errno.ENOEXEC:
        return f"{program} {_no_format(program, full)}"
    return f"{program}: {said}"


def _shells(program: str) -> str:
    """What to launch instead of a word that only a shell would understand; nothing for any other."""
    if re.match(r"[A-Za-z_]\w*=", program):
        return f"sets a variable, and is no program: launch -- env {shlex.quote(program)} ..."
    if program in BUILTINS:
        return "is a shell's word, and there is no shell: launch -- sh -c '...'"
    if len(program.split()) > 1:
        whole = f"sh -c {shlex.quote(program)}" if re.search(r"[;&|<>$`*\n]", program) else program
        return f"no such program; in quotes it is one word: launch -- {whole}"
    return ""


def _not_in_path(program: str, error: OSError, cwd: str, path: str) -> str:
    beside = ""
    if os.path.isfile(full := f"{cwd}/{program}"):
        runs = os.access(full, os.X_OK) and _head(full)[:2] in (b"#!", b"\x7fE")
        beside = f"; the project has a {program}: launch -- {'' if runs else _interpreter(program) + ' '}./{program}"
    elif shutil.which(f"{program}3", path=path):
        beside = f"; there is a {program}3: launch -- {program}3 ..."
    if error.errno == errno.EACCES:
        found = [folder for folder in path.split(os.pathsep) if os.path.exists(os.path.join(folder, program))]
        return f"{program}: {os.strerror(errno.EACCES)} ({', '.join(found) or 'on its PATH'}){beside}"
    if error.errno == errno.ENOEXEC:
        folder = next((one for one in path.split(os.pathsep) if os.path.exists(os.path.join(one, program))), "")
        return f"{program} {_no_format(program, os.path.join(folder, program))}"
    return f"{program}: not found (searched {path}){beside}"


def _missing(program: str, full: str) -> str:
    if program.startswith("~"):
        return f"{program}: ~ is a shell's word, and there is no shell: write the whole path, or launch -- sh -c '...'"
    if not os.path.exists(full):
        if program.startswith("/"):
            return f"{program}: no such file on the target"
        return f"{program}: no such file in the project that was shipped (what git ignores is not)"
    line = _head(full).split(b"\n", 1)[0]
    if line.endswith(b"\r"):
        return f"{program}: its first line ends in a carriage return, as Windows writes it: dos2unix {program}"
    if line.startswith(b"#!"):
        return f"{program}: its interpreter does not exist there ({line[2:].strip().decode('utf-8', 'replace')})"
    return f"{program}: the loader that it is linked for does not exist there (a program of another system?)"


def _no_format(program: str, full: str) -> str:
    head = _head(full)
    if head[:4] == b"\x7fELF" and len(head) >= 20:
        made_for = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
        return f"is a program for {MACHINES.get(made_for, 'another machine')}, and this is {platform.machine()}"
    if not head:
        return "is an empty file"
    if b"\0" in head:
        return "is not a program of this system"
    return f"has no #! line to say what runs it: begin it with one, or launch -- {_interpreter(program)} {program}"


def _interpreter(program: str) -> str:
    return {".py": "python3", ".sh": "bash"}.get(os.path.splitext(program)[1], "sh")


def _head(full: str) -> bytes:
    try:
        with open(full, "rb") as file:
            return file.read(256)
    except OSError:
        return b"\0"

"""A name for a run, to be a part of its id: as it was given, or a command's, which is its script's, else its program's,
else its shell's; and which file that script is. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import PurePosixPath

SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
RUNNERS = frozenset({"python", "python2", "python3", "torchrun", "accelerate", "deepspeed", "uv", "poetry", "conda"})
RUNNING_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
WRAPPERS = frozenset({
    "env", "nohup", "exec", "nice", "ionice", "time", "timeout", "setsid", "stdbuf", "sudo", "numactl",
})  # fmt: skip
BUILTINS = frozenset({
    ".", ":", "[", "cd", "do", "done", "echo", "else", "eval", "exit", "export", "false", "fi", "for", "if", "printf",
    "pushd", "popd", "read", "set", "sleep", "source", "then", "trap", "true", "ulimit", "umask", "unset", "wait",
    "while",
})  # fmt: skip
"""Words of a shell that say nothing of what it is run for."""
SUBCOMMANDS = frozenset({"launch", "run", "exec"})
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
ARITHMETIC = re.compile(r"\$?\(\(.*?\)\)", re.DOTALL)
DURATION = re.compile(r"[\d.:]+[smh]?")

MOST = 40


def problem(name: str) -> str | None:
    """Why a name that was given cannot be a part of an id, where it becomes lower case and its signs dashes."""
    if len(name) > MOST:
        return f"has {len(name)} characters, at most {MOST} are possible"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or not re.search(r"[A-Za-z0-9]", name):
        return "may hold letters a-z, digits, dashes, underscores and dots"
    return None


def name_of(argv: list[str]) -> str:
    """`train` for `bash -c 'cd x && exec python train.py'`, `sh` for `sh -c 'exit 3'`."""
    words = _after_wrappers(argv)
    if not words:
        return _stem(argv[0]) if argv else "run"
    program = _stem(words[0])
    if program in SHELLS:
        return _of_shell(words[1:]) or program
    return _of_runner(words, program) if program in RUNNERS else program


def script_of(argv: list[str]) -> str | None:
    """The script that a Python or a shell is told to run, from the folder that it starts in; None where that is not
    beyond doubt (a shell looks for a bare name on its PATH too)."""
    words = _after_wrappers(argv)
    if not words or any(word.startswith("-") for word in argv[: len(argv) - len(words)]):
        return None
    shell = _stem(words[0]) in SHELLS
    if not shell and not re.fullmatch(r"python[\d.]*", PurePosixPath(words[0]).name):
        return None
    options = r"-[efluvx]+" if shell else r"-[BbdEIOPqsSuvx]+"
    script = next((word for word in words[1:] if not re.fullmatch(options, word)), "-")
    if script.startswith(("-", "/", "~", "{")) or (shell and "/" not in script and not script.endswith(".sh")):
        return None
    return script


def _of_runner(words: list[str], program: str) -> str:
    for at, word in enumerate(words[1:], 1):
        if word == "-m" and at + 1 < len(words):
            if words[at + 1] in RUNNING_MODULES and len(words) > at + 2:
                return _of_runner(words[at + 1 :], words[at + 1].rpartition(".")[2])
            return words[at + 1].rpartition(".")[2]
        if word == "-c":
            return program
        if word.startswith("-") or word in SUBCOMMANDS or DURATION.fullmatch(word):
            continue
        inner = _stem(word)
        return _of_runner(words[at:], inner) if inner in RUNNERS else inner
    return program


def _of_shell(words: list[str]) -> str | None:
    """Its script's name, or that of the first program that its `-c` text runs."""
    for at, word in enumerate(words):
        if not word.startswith("-"):
            return _stem(word)
        if re.fullmatch(r"-[a-z]*c", word):
            return next(iter(_names(words[at + 1])), None) if at + 1 < len(words) else None
    return None


def _names(text: str) -> Iterable[str]:
    """What a shell's text runs, in order."""
    text = ARITHMETIC.sub(":", text).replace("\n", " ; ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    try:
        tokens = [*lexer, ";"]
    except ValueError:  # quotes that do not close: the shell will say so
        return
    for token in tokens:
        if token and set(token) <= set("();<>|&"):
            if command and (words := _after_wrappers(command)) and words[0] not in BUILTINS:
                yield name_of(words)
            command = []
        elif command or token not in ("if", "then", "do", "else", "while", "!"):
            command.append(token)


def _after_wrappers(argv: list[str]) -> list[str]:
    at, wrapped = 0, False
    while at < len(argv):
        word = argv[at]
        if _stem(word) in WRAPPERS:
            wrapped = True
        elif not ASSIGNMENT.match(word) and not (wrapped and (word.startswith("-") or DURATION.fullmatch(word))):
            break
        at += 1
    return argv[at:]


def _stem(word: str) -> str:
    return PurePosixPath(word).stem or "run"

"""Bad input of every kind: one message that says what, where and what to do; its exit code; nothing half-made left."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.agent import spawn
from tests.driver import Specctl, poll_until
from tests.sshd import LoopbackSshd
from tests.trainer.support import REPOSITORY

DEMO = (REPOSITORY / "configs" / "smollm2-cpu.yaml").read_text(encoding="utf-8")
PYTHON = sys.executable
Typed = Callable[..., tuple[int, str]]


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Everything below, with its size and time: what is made, changed or removed shows."""
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in root.rglob("*")}


@pytest.fixture
def typed(specctl: Specctl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Types a command in this process, to be quick; (exit code, stderr). It must say nothing on stdout and leave
    everything in the home, project and workdir as it was."""
    for name, value in specctl.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(specctl.project)

    def run(*words: str) -> tuple[int, str]:
        before = tree(specctl.home)
        code = cli.main(list(words))
        said = capsys.readouterr()
        assert tree(specctl.home) == before and said.out == ""
        return code, said.err

    return run


def one_message(err: str) -> tuple[str, str]:
    """(the message, what to do); there is nothing else."""
    lines = err.splitlines()
    assert 1 <= len(lines) <= 2 and lines[0].startswith("error: "), err
    return lines[0], lines[1] if len(lines) == 2 else ""


# --- what is typed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said", "hint"),
    [
        (["lunch"], 2, "no such command 'lunch'; did you mean launch?", "specctl --help"),
        (["xyzzy"], 2, "no such command 'xyzzy'; there are launch, status, top, logs, stop", "specctl --help"),
        (["kill", "@last"], 2, "no such command 'kill'; did you mean stop?", "specctl --help"),
        (["help", "launch"], 2, "no such command 'help'", "specctl launch --help"),
        (["targets", "--accept-new"], 2, "--accept-new stands before the verb", "specctl --accept-new targets"),
        (["push", "local", "a", "local:/b c"], 2, "the target is named once", "specctl push local SRC '/b c'"),
        (["push", "local"], 2, "missing argument 'SRC'", "specctl push TARGET SRC DST; specctl push --help"),
        (["--invntory", "x", "status"], 2, "--invntory; did you mean --inventory?", "specctl --help"),
        (["launch", "--confg", "x.yaml"], 2, "--confg; did you mean --config?", "specctl launch --help"),
        (["launch", "--confg=x.yaml", "word"], 2, "--confg; did you mean --config?", "specctl launch --help"),
        (["launch", "local", "--untill", "step"], 2, "--untill; did you mean --until?", "specctl launch --help"),
        (["launch", "bash", "--norc"], 2, "the program's own words stand after --", "-- bash --norc"),
        (["launch", "--until", "fun", "--", "true"], 2, "'--until': 'fun' is not one of 'process', 'step'", "--help"),
        (["launch", "--timeout", "-1", "--", "true"], 2, "'-1' is no number of seconds between 0.1", "--help"),
        (["launch", "--config"], 2, "option '--config' requires an argument", "specctl launch --help"),
        (["launch", "--plan=3"], 2, "'--plan' does not take a value", "specctl launch --help"),
        (["launch"], 2, "nothing to launch", "--config FILE, or specctl launch [TARGET] -- CMD..."),
        (["launch", "locl", "--", "true"], 4, "no target 'locl' in", "did you mean 'local'?"),
        (["launch", "--", "local", "bash", "x.sh"], 2, "local is a target", "specctl launch local -- bash x.sh"),
        (["launch", "local"], 2, "nothing to launch", "specctl launch local --config FILE"),
        (["launch", "--no-source", "--", "python3", "x.py"], 2, "x.py: --no-source ships no project", "a full path"),
        (["launch", "--", ""], 2, "has an empty name", "-- CMD..."),
        (["launch", "--source", "no", "--", "true"], 2, "--source no: no such directory", "--no-source"),
        (["launch", "--source", "../hosts.yaml", "--", "true"], 2, "hosts.yaml: not a directory", "--no-source"),
        (["launch", "--note", "a\nb", "--", "true"], 2, r"--note 'a\nb': is one line", ""),
        (["launch", "--name", "my run", "--", "true"], 2, "--name 'my run': may hold letters", "--name my-run"),
        (["launch", "--name", '"q"; rm', "--", "true"], 2, "may hold letters", "--name q-rm"),
        (["launch", "--name", "größe", "--", "true"], 2, "--name 'größe': may hold letters a-z", "--name gr-e"),
        (["launch", "--name", "a\nb", "--", "true"], 2, r"--name 'a\nb': may hold", "--name a-b"),
        (["launch", "--name", "", "--", "true"], 2, "--name '': may hold letters", "--name run"),
        (["launch", "--name", "x" * 300, "--", "true"], 2, "has 300 characters, at most 40", "--name xxx"),
        (["logs", "-n", "-1"], 2, "'-n': must be greater than or equal to 0", "specctl logs --help"),
        (["logs", "--grep", "x", "-A", "y"], 2, "'-A': needs a whole number", "specctl logs --help"),
        (["logs", "--attempt", "0"], 2, "'--attempt': must be greater than or equal to 1", "specctl logs --help"),
        (["stop", "--gracee", "3"], 2, "--gracee; did you mean --grace?", "specctl stop --help"),
        (["stop", "locl"], 4, "no run 'locl' on local", "did you mean local?"),
        (["stop", "local"], 4, "no run 'local' on local", "is a target or group, and this needs one run"),
        (["--inventory", "no.yaml", "status"], 2, "no.yaml: no such file", "--inventory names it"),
        (["status", "nothing-like-it"], 4, "no run 'nothing-like-it' on local", "specctl launch starts one"),
    ],
)  # fmt: skip
def test_what_is_typed_wrong_is_one_message_and_the_next_thing_to_type(
    typed: Typed, words: list[str], code: int, said: str, hint: str
) -> None:
    # The agent is no half-made thing, but it is made: what a question about runs needs is there before.
    got, err = typed(*words)
    message, advice = one_message(err)
    assert got == code and said in message and hint in advice, err


def test_a_script_that_is_not_shipped_is_missed_before_anything_is_sent(specctl: Specctl, typed: Typed) -> None:
    subprocess.run(["git", "init", "-q", specctl.project], check=True)
    for name, text in ((".gitignore", "mine.py\n"), ("mine.py", ""), ("src/train.py", ""), ("folder/__main__.py", "")):
        (specctl.project / name).parent.mkdir(exist_ok=True)
        (specctl.project / name).write_text(text)
    (specctl.project / "linked").symlink_to("src")
    for script, said, hint in (
        ("mine.py", "it is there, but ignored", "git add -f mine.py"),
        ("train.py", f"no such file among those that are shipped from {specctl.project}", "did you mean src/train.py?"),
        ("src/trian.py", "src/trian.py: no such file", "did you mean src/train.py?"),
        ("other.py", "other.py: no such file", "--source DIR"),
    ):
        code, err = typed("launch", "--", "python3", script)
        message, advice = one_message(err)
        assert code == 2 and said in message and hint in advice, err
    for script in ("./src/train.py", "folder", "linked/train.py", "../x.py", "."):
        assert specctl("launch", "--plan", "--", "python3", script).code == 0


# --- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (DEMO.replace("  lr:", "  lrr:"), "c.yaml:29: optimizer.lrr: unknown key; did you mean 'lr'?"),
        (DEMO.replace("steps: 2000", "stepps: 2000"), "c.yaml:4: stepps: unknown key; did you mean 'steps'?"),
        (DEMO.replace("steps: 2000", "steps: many"), "c.yaml:4: steps: needs a whole number"),
        (DEMO.replace("steps: 2000", "steps: -2"), "c.yaml:4: steps: must be greater than or equal to 1, is '-2'"),
        (DEMO.replace("token_id: 3 ", "token_id: -3 "), "drafter.mask_token_id: must be greater than or equal to 0"),
        (DEMO.replace("fraction: 0.01", "fraction: 7"), "optimizer.warmup_fraction: must be less than or equal to 1"),
        ("", "c.yaml:1: is empty"),
        ("a: [1", "c.yaml:1: is not YAML"),
        ("- a\n", "c.yaml:1: needs a mapping (key: value) at the top, is a list"),
        ("steps: 1\n\tseed: 2\n", "c.yaml:2: is not YAML: a tab; YAML indents with spaces alone"),
        (DEMO + "seed: 8\n", ": seed: duplicate key (first on line 3)"),
        (DEMO + "requirements: &a [x]\n", "anchors and aliases are not read here"),
        (b"steps: \xff\n", "c.yaml:1: is not UTF-8 text"),
        (b"\x7fELF\x02\x01\x01\0\0", "c.yaml:1: "),
        ("targets: {local: {}}\n", "c.yaml:1: targets: unknown key"),
        ("a" * 2_000_000, "c.yaml: has 2,000,000 bytes, and at most 1,048,576 are read"),
        (None, "c.yaml: cannot be read: No such file or directory; did you mean 'd.yaml'?"),
        ("directory", "c.yaml: is a directory, not a file; in it: inner.yaml"),
        ("pipe", "c.yaml: is not a regular file"),
    ],
)
def test_a_bad_configuration_is_one_message_with_file_line_and_key(
    specctl: Specctl, typed: Typed, content: str | bytes | None, said: str
) -> None:
    path = specctl.project / "c.yaml"
    if content is None:
        (specctl.project / "d.yaml").write_text(DEMO)
    elif content == "directory":
        path.mkdir()
        (path / "inner.yaml").write_text(DEMO)
    elif content == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, err = typed("launch", "--config", "c.yaml")
    message, hint = one_message(err)
    assert code == 2 and said in message, err
    assert ("--inventory" in hint) == (content == "targets: {local: {}}\n")


@pytest.mark.parametrize("content", [DEMO.encode("utf-8-sig"), DEMO.replace("\n", "\r\n").encode()])
def test_how_other_systems_write_a_file_is_no_mistake(specctl: Specctl, content: bytes) -> None:
    (specctl.project / "c.yaml").write_bytes(content)
    assert specctl("launch", "--plan", "--config", "c.yaml").code == 0


def without_privileges() -> None:
    """Root, but bound by modes as everybody is: no CAP_DAC_OVERRIDE, no CAP_DAC_READ_SEARCH after the next exec."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)


def test_what_may_not_be_read_is_named_and_half_a_project_is_not_shipped(specctl: Specctl) -> None:
    def launch(*words: str) -> str:
        done = subprocess.run(
            [PYTHON, "-m", "orchestrator", "launch", *words], cwd=specctl.project, env=specctl.environ,
            capture_output=True, text=True, preexec_fn=without_privileges, check=False,
        )  # fmt: skip
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr and not specctl.workdir.exists()
        return done.stderr

    secret, folder = specctl.project / "secret.key", specctl.project / "folder"
    secret.write_text("x")
    secret.chmod(0)
    assert f"error: {secret} cannot be read, and what is only half the project is not shipped" in launch("--", "true")
    secret.unlink()
    folder.mkdir(mode=0)
    assert f"error: {folder} cannot be read" in launch("--", "true")
    folder.rmdir()
    (specctl.project / "c.yaml").write_text(DEMO)
    (specctl.project / "c.yaml").chmod(0)
    assert "error: c.yaml: cannot be read: Permission denied" in launch("--config", "c.yaml")


# --- programs that cannot run ---------------------------------------------------------------------------------------

MACHINE = bytes([0xB7 if os.uname().machine == "x86_64" else 0x3E])
ELF = Path(PYTHON).read_bytes()[:4096]


@pytest.mark.parametrize(
    ("program", "content", "mode", "said"),
    [
        ("./prog", b"echo hi\n", 0o755, "./prog has no #! line to say what runs it: begin it with one, or launch"),
        ("./prog.py", b"print(1)\n", 0o755, "or launch -- python3 ./prog.py"),
        ("./prog", b"#!/bin/sh\n", 0o644, "./prog is not executable: chmod +x it, or launch -- sh ./prog"),
        ("./prog", b"#!/no/such/sh\n", 0o755, "./prog: its interpreter does not exist there (/no/such/sh)"),
        ("./prog", b"#!/bin/sh\r\n", 0o755, "ends in a carriage return, as Windows writes it: dos2unix ./prog"),
        ("./prog", ELF[:18] + MACHINE + ELF[19:], 0o755, f"and this is {os.uname().machine}"),
        ("./prog", b"", 0o755, "./prog is an empty file"),
        ("./prog", None, 0o755, "./prog is a directory, not a program"),
        ("./nothing", b"", 0o755, "./nothing: no such file in the project that was shipped"),
        ("/no/prog", b"", 0o755, "/no/prog: no such file on the target"),
        ("~/prog", b"", 0o755, "~/prog: ~ is a shell's word"),
        ("prog", b"#!/bin/sh\n", 0o755, "prog: not found (searched /usr/bin:/bin); the project has a prog: launch -- "),
        ("prog.py", b"print(1)\n", 0o755, "the project has a prog.py: launch -- python3 ./prog.py"),
        ("python3 ./prog", b"", 0o755, "in quotes it is one word: launch -- python3 ./prog"),
        ("cd x && ./prog", b"", 0o755, "in quotes it is one word: launch -- sh -c 'cd x && ./prog'"),
        ("CUDA_VISIBLE_DEVICES=0", b"", 0o755, "sets a variable, and is no program: launch -- env CUDA_VISIBLE_DE"),
        ("source", b"", 0o755, "source: is a shell's word, and there is no shell: launch -- sh -c '...'"),
        ("./prog/x", b"", 0o755, "./prog/x: Not a directory"),
    ],
)
def test_why_a_program_cannot_be_started_is_said_in_full(
    tmp_path: Path, program: str, content: bytes | None, mode: int, said: str
) -> None:
    path = tmp_path / ("prog.py" if program.endswith(".py") else "prog")
    path.mkdir() if content is None else path.write_bytes(content)
    path.chmod(mode)
    environ = {"PATH": "/usr/bin:/bin"}
    with pytest.raises(OSError) as caught:
        subprocess.Popen([program], cwd=tmp_path, env=environ, preexec_fn=without_privileges)
    assert said in spawn.why_not(program, caught.value, cwd=str(tmp_path), path=environ["PATH"])


def test_a_name_that_is_there_with_a_3_behind_it_is_offered(tmp_path: Path) -> None:
    (tmp_path / "thing3").write_text("#!/bin/sh\n")
    (tmp_path / "thing3").chmod(0o755)
    missing = FileNotFoundError(errno.ENOENT, "", "thing")
    assert "there is a thing3: launch -- thing3" in spawn.why_not("thing", missing, cwd="/", path=str(tmp_path))


def test_a_program_that_cannot_run_leaves_its_record_and_nothing_else_and_a_slip_in_its_name_finds_it(
    specctl: Specctl,
) -> None:
    (specctl.project / "prog").write_text("echo hi\n")
    (specctl.project / "prog").chmod(0o755)
    done = specctl.launch("--", "./prog")
    run = specctl.run_dir(done.json["run_id"])
    assert done.code == 1 and done.json["state"] == "NEVER_STARTED" and "no #! line" in done.json["error"]["message"]
    assert not specctl.processes(run.name) and not (run / "env").exists()
    assert not list(specctl.workdir.rglob("*.tmp"))
    for near in ("progg", run.name[:-1] + ("0" if run.name[-1] != "0" else "1")):
        done = specctl("logs", near)
        assert done.code == 4 and f"did you mean {run.name} (NEVER_STARTED)?" in done.err


# --- what a program reads -------------------------------------------------------------------------------------------


def test_data_that_is_not_there_stops_a_launch_before_anything_is_prepared(specctl: Specctl) -> None:
    (specctl.home / "corpus.txt").write_text("x")
    specctl.inventory.write_text(
        f"targets:\n  local: {{workdir: {specctl.workdir}, env: {{DATA: {specctl.home}}}, secrets: [TOKEN]}}\n"
    )
    (specctl.project / "run.yaml").write_text(
        "requirements: [a-package-that-nobody-has]\n"
        "data: [$DATA/corpus.txt, run.yaml, /, $DATA/korpus.txt, ~/none, data/x, $UNSET/x, $TOKEN/x]\n"
    )
    done = specctl.launch("--config", "run.yaml", "--", "true", TOKEN="/hunter2")
    message = done.json["error"]["message"]
    assert done.code == 1 and done.json["state"] == "NEVER_STARTED"
    assert "on local, data[3]: $DATA/korpus.txt" in message and f"did you mean {specctl.home}/corpus.txt?" in message
    assert "data[4]: ~/none" in message and "data[5]: data/x is not in the project that was shipped" in message
    assert "data[6]: $UNSET/x names $UNSET, which is not set in the run's environment" in message
    assert "data[7]: $TOKEN/x is not there" in message and "hunter2" not in message
    assert "correct data[3] in run.yaml" in message and not any(f"data[{index}]" in message for index in range(3))
    assert not (specctl.workdir / "envs").exists() or not list((specctl.workdir / "envs").iterdir())
    run = specctl.run_dir(done.json["run_id"])
    assert {path.name for path in run.iterdir()} == {"run.json", "exit.json", "start.lock", "claim"}


def test_a_trainers_model_and_files_are_looked_at_where_they_are(specctl: Specctl) -> None:
    model = specctl.home / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 300, "num_hidden_layers": 6}))
    (model / "tokenizer.json").write_text("{}")
    text = DEMO.replace("~/.cache/specctl/models/SmolLM2-135M-Instruct", str(model) + "\n  layer_ids: [1, 9]")
    text = text.replace("kind: python-docs", "kind: text\n  paths: [/no/corpus.txt]").replace("id: 3 ", "id: 300 ")
    text = text.replace("drafter:\n  layers", f"drafter:\n  start_from: {specctl.home}\n  layers")
    (specctl.project / "c.yaml").write_text(text + "requirements: [a-package-that-nobody-has]\n")
    done = specctl.launch("--config", "c.yaml")
    message = done.json["error"]["message"]
    assert done.code == 1 and done.json["state"] == "NEVER_STARTED"
    assert f"target.path: {model} holds no weights (model.safetensors or pytorch_model.bin" in message
    assert f"drafter.mask_token_id: 300 is no token of {model}, which has 300: 0 to 299" in message
    assert "target.layer_ids: must rise, from 0 to 5 at most; is [1, 9]" in message
    assert "data.paths[0]: /no/corpus.txt is not there" in message
    assert f"drafter.start_from: no drafter in {specctl.home} (config.json is missing; {model} has one)" in message


# --- bytes and secrets ----------------------------------------------------------------------------------------------

HOSTILE = ["it's", '"$HOME"', "`id`", "; echo X", "a\nb", "", "--", "-n", "{config}", "*", "\\", "ä漢", "%s", "a\tb ",
           os.fsdecode(b"\xff\xfe"), "!x", "~", "$(id)"]  # fmt: skip
SHOW = """
import json, os, sys, time
raw = [os.fsencode(word).hex() for word in sys.argv[1:]]
print(json.dumps([raw, os.environb[b"PLAIN"].hex(), len(os.environb[b"SECRET"]), os.environb[b"SECRET"][:1].hex()]))
n = 0
while True:
    n += 1
    print(f"step={n} tok/s=1", flush=True)
    time.sleep(0.1)
"""
PLAIN = 'it\'s "$HOME" `id` $(id)\nline two\ttab ä漢 \\ %s'
HUNTER = f"hunter2-{secrets.token_hex(4)}"
"""No other test of this machine has the same in its processes' environments."""
SECRET = os.fsdecode(b"%b \xffline one\n%b line two $HOME 'x'" % ((HUNTER.encode(),) * 2))


def holders(word: bytes, *roots: Path) -> list[Path]:
    """The files below that hold it, whatever they are."""
    return [path for root in roots for path in root.rglob("*") if path.is_file() and word in path.read_bytes()]


def command_lines_and_environments(word: bytes) -> list[tuple[str, bytes]]:
    """(pid, its command line) of each process that shows it to everybody, or carries it in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (os.getpid(), os.getppid()):
            try:
                line, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            if word in line or word in environ:
                found.append((entry.name, line))
    return found


@pytest.fixture(params=["local", "box"])
def anywhere(request: pytest.FixtureRequest, sshd: LoopbackSshd) -> Iterator[tuple[Specctl, str]]:
    """This machine, and an SSH host, both with the same environment to give to a program."""
    driver = Specctl(SPECCTL_SSH_CONFIG=str(sshd.ssh_config))
    common = f"workdir: {driver.workdir}, env: {{PLAIN: {json.dumps(PLAIN)}, EMPTY: ''}}, secrets: [SECRET]"
    driver.inventory.write_text(
        f"targets:\n  local: {{{common}}}\n  box: {{{common}, ssh: node1, python: {json.dumps(PYTHON)}}}\n"
    )
    yield driver, request.param
    driver.close()


def test_words_and_values_arrive_byte_for_byte_and_a_secret_is_nowhere_but_in_its_program(
    anywhere: tuple[Specctl, str],
) -> None:
    specctl, target = anywhere
    (specctl.project / "show.py").write_text(SHOW)
    done = specctl.launch("--", PYTHON, "show.py", *HOSTILE, target=target, SECRET=SECRET)
    assert done.code == 0, done.err
    run = specctl.run_dir(done.json["run_id"])
    told = json.loads((run / f"{run.name}.a1.log").read_text().splitlines()[1])
    secret = os.fsencode(SECRET)
    assert told == [[os.fsencode(word).hex() for word in HOSTILE], PLAIN.encode().hex(), len(secret), secret[:1].hex()]

    assert [line for _, line in command_lines_and_environments(HUNTER.encode()) if b"show.py" not in line] == []
    assert not holders(b"hunter2", specctl.workdir, specctl.home / "state", specctl.project)
    socket = next(specctl.workdir.glob("tmux-*"))
    shown = subprocess.run(["tmux", "-S", socket, "show-environment", "-g"], capture_output=True, check=True).stdout
    assert b"hunter2" not in shown
    said = [done.out, done.err]
    plan = ("launch", target, "--plan", "--", "true")
    asked = [plan, (*plan[:3], "--json", *plan[3:]), ("show", run.name), ("show", run.name, "--json")]
    for words in asked if target == "box" else []:
        one = specctl(*words, SECRET=SECRET)
        assert one.code == 0, one.err
        said += [one.out, one.err]
    assert not any("hunter2" in text for text in said)
    specctl("stop", run.name, "--now")
    poll_until(lambda: not specctl.processes(run.name))
    assert not holders(b"hunter2", specctl.workdir, specctl.home / "state")


def test_a_missing_secret_and_a_failing_program_show_no_value(specctl: Specctl) -> None:
    specctl.inventory.write_text(f"targets:\n  local: {{workdir: {specctl.workdir}, secrets: [SECRET, OTHER]}}\n")
    done = specctl("launch", "--", "true", SECRET=SECRET)
    assert done.code == 2 and "the secret OTHER is not in your environment" in done.err and "hunter2" not in done.err
    assert "export OTHER=..." in done.err and not specctl.workdir.exists()
    never = specctl.launch("--", "no-such-program", SECRET=SECRET, OTHER="")
    assert never.code == 1 and "hunter2" not in never.out + never.err
    assert not holders(b"hunter2", specctl.workdir, specctl.home / "state")


def test_a_secret_that_stands_where_it_would_be_recorded_is_refused_without_showing_it(specctl: Specctl) -> None:
    local = f"workdir: {specctl.workdir}, secrets: [TOKEN]"
    specctl.inventory.write_text(f"targets:\n  local: {{{local}}}\n  given: {{{local}, env: {{A: hf_hunter2}}}}\n")
    (specctl.project / "run.yaml").write_text("data: [/hf_hunter2/x]\n")
    for words, place in (
        (["local", "--", "serve", "--token=hf_hunter2"], "the command after --"),
        (["local", "--note", "by hf_hunter2", "--", "true"], "--note"),
        (["given", "--", "true"], "env: of hosts.yaml"),
        (["local", "--config", "run.yaml", "--", "true"], "run.yaml"),
    ):
        done = specctl("launch", *words, TOKEN="hf_hunter2")
        assert done.code == 2 and f"the value of the secret TOKEN stands in {place}" in done.err, done.err
        assert "hunter2" not in done.err and not specctl.workdir.exists()

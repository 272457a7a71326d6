"""Programs as people write them: start scripts that leave at once, their own packages, launchers, bars, many logs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.driver import Specctl, poll_until

PYTHON = sys.executable
PAGE = Path(__file__).parents[2] / "docs" / "step-lines.md"
LOOP = """
import sys, time
def main(form="iter {0}: loss {1:.4f}, time 12.31ms, mfu 3.21%"):
    for step in range(1, 100000):
        print(form.format(step, 5 / step))
        time.sleep(0.02)
"""


@pytest.fixture
def project(specctl: Specctl) -> Path:
    """A package of the user's own, below src/, as it is run with `python -m mine`."""
    package = specctl.project / "src" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "loop.py").write_text(LOOP)
    (package / "__main__.py").write_text("from mine import loop\nloop.main()\n")
    return specctl.project


START = {
    "leaves at once": "set -euo pipefail\nnohup python -m mine > train.log 2>&1 &\necho started $!",
    "pipes into tee": "set -euo pipefail\nmkdir -p logs/today\npython -m mine 2>&1 | tee logs/today/run.log",
    "becomes the program": "exec 2>&1\nexec > out.log\nexec -a trainer python -m mine",
    "and then": "sh -c 'echo preparing && exec \"$0\" -m mine' \"$PY\"",
    "in a session of its own": "setsid -f python -m mine > late.log 2>&1",
    "without an environment": "exec env -i PYTHONPATH=src \"$PY\" -u -m mine",
}


def test_start_scripts_are_followed_to_their_program_and_stopped_with_it(specctl: Specctl, project: Path) -> None:
    launches = {}
    head = f"PY={PYTHON}\nexport PYTHONPATH=src PATH={Path(PYTHON).parent}:$PATH\n"
    for name, script in START.items():
        (project / f"{name}.sh").write_text(f"#!/bin/bash\n{head}{script}\n")
    for name in START:
        launches[name] = specctl.start("launch", "local", "--json", "--", "bash", f"{name}.sh")
    for name, script in START.items():
        out, err = launches[name].communicate(timeout=120)
        assert launches[name].returncode == 0, name + out + err
        done = json.loads(out)
        wrote = [Path(path).name for path in re.findall(r"\S+\.log\b", script)]
        assert [Path(log["path"]).name for log in done["foreign_logs"]] == wrote, name
        assert done["state"] == "RUNNING" and specctl("stop", done["run_id"], "--now").code == 0, name
        assert not specctl.processes(done["run_id"]), name


def test_make_train_fails_as_its_program_does(specctl: Specctl, project: Path) -> None:
    (project / "src" / "mine" / "loop.py").write_text("def main():\n    print('step=1 loss=2')\n    {}['vocabulary']\n")
    (project / "Makefile").write_text(f"train:\n\tPYTHONPATH=src {PYTHON} -m mine\n")
    done = specctl.launch("--", "make", "train")
    assert done.code == 1 and done.json["state"] == "FAILED"
    assert (done.json["error"]["type"], done.json["error"]["message"]) == ("KeyError", "'vocabulary'")


def test_the_form_that_the_page_teaches_is_launched_as_it_says(specctl: Specctl, project: Path) -> None:
    [keys] = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (specctl.home / "keys.yaml").write_text(keys)
    form = "(alpha) Epoch {0} done, mean error {1:.3f}, speed 1.5k"
    (project / "src" / "mine" / "__main__.py").write_text(f"from mine import loop\nloop.main({form!r})\n")
    done = specctl.launch(
        "--config", str(specctl.home / "keys.yaml"), "--", "env", "PYTHONPATH=src", PYTHON, "-m", "mine"
    )
    assert done.code == 0, done.err
    row = specctl.status(done.json["run_id"])
    assert row["step"] > 1 and row["tok_s"] == 1500 and [one["name"] for one in row["workers"]] == ["alpha"]


def test_a_bar_as_transformers_draws_it_is_its_steps(specctl: Specctl) -> None:
    tqdm = pytest.importorskip("tqdm").__file__
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(tqdm).parents[1])!r})
from tqdm import tqdm
for shard in tqdm(range(50)): pass
bar = tqdm(total=100000)
for step in range(1, 100000):
    time.sleep(0.01)
    bar.update(1)
    if step % 20 == 0:
        bar.write(str({{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}}))
"""
    done = specctl.launch("--", PYTHON, "-c", program)
    assert done.code == 0, done.err
    row = specctl.status(done.json["run_id"])
    assert 20 <= row["step"] < 100_000 and row["loss"] == 2.31


def test_several_logs_at_once_are_followed_and_add_up(specctl: Specctl) -> None:
    elsewhere = Path("/dev/shm") / f"{specctl.home.name}.log"  # another file system
    (specctl.project / "many.py").write_text(f"""
import os, time
os.makedirs("runs/new/rank0"); os.makedirs("runs/new/rank1")
ranks = [open(f"runs/new/rank{{n}}/log.txt", "w", buffering=1) for n in (0, 1)]
events = open("runs/new/events.out.tfevents.1.host", "wb", buffering=0)
other = open({str(elsewhere)!r}, "w", buffering=1)
linked = open({str(specctl.home / "linked" / "up.log")!r}, "w", buffering=1)
step = 0
while True:
    step += 1
    events.write(b"\\x00\\x01step=999999 loss=1\\n")
    print("nothing to see here", file=other)
    print("nor here", file=linked)
    for n, rank in enumerate(ranks):
        print(f"[rank{{n}}] step {{step}} loss {{n + 1}} 50 tok/s", file=rank)
    time.sleep(0.02)
""")
    (specctl.home / "real").mkdir()
    (specctl.home / "linked").symlink_to(specctl.home / "real")
    try:
        done = specctl.launch("--", PYTHON, "many.py")
        assert done.code == 0, done.err
        found = poll_until(
            lambda: len(found := specctl.status(done.json["run_id"])["foreign_logs"]) == 4 and found
        )  # fmt: skip
        logs = {log["path"] for log in found}
        code = specctl.run_dir(done.json["run_id"]) / "code" / "runs" / "new"
        assert logs == {
            f"{code}/rank0/log.txt", f"{code}/rank1/log.txt", str(elsewhere), str(specctl.home / "real" / "up.log"),
        }  # fmt: skip
        rows = [specctl.status(done.json["run_id"]) for _ in range(3)]
        assert {(row["tok_s"], row["loss"], len(row["workers"])) for row in rows} == {(100.0, 1.5, 2)}
    finally:
        elsewhere.unlink(missing_ok=True)


RANKS = '''
import os, sys, time
if "speak" in sys.argv:
    print("steps follow", flush=True)
if os.environ["RANK"] == "1":
    print("tool: error: no such option: --foo", file=sys.stderr, flush=True)
    sys.exit(2)
time.sleep(600)
'''


@pytest.mark.parametrize("tee", [[], ["--tee", "3"]])
def test_what_a_rank_said_that_ended_without_an_exception_is_told_and_not_its_launchers(
    specctl: Specctl, tee: list[str]
) -> None:
    pytest.importorskip("torch")
    (specctl.project / "ranks.py").write_text(RANKS)
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *tee, "ranks.py"]
    done = specctl.launch("--", *torchrun, *(["speak"] if tee else []), OMP_NUM_THREADS="1")
    words = f"last line before ChildFailedError: {'[default1]:' if tee else ''}tool: error: no such option: --foo"
    row = specctl.status(done.json["run_id"])
    assert row["why"] == f"exit code 1 (rank 1 ended with exit code 2); {words}"
    found = specctl("errors", done.json["run_id"], "--json").json
    assert [one["last_words"]["text"] for one in found["without_exception"]] == [words.partition(": ")[2]]
    assert found["errors"] == []


def test_a_rank_that_is_killed_is_what_ended_the_run_and_not_what_that_broke(specctl: Specctl) -> None:
    pytest.importorskip("torch")
    (specctl.project / "ranks.py").write_text('''
import os, signal, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1, 100000):
    print(f"step {step} | loss: {5 / step:.4f} | 120 tok/s", flush=True)
    if step == 4 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))
''')
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py"]
    done = specctl.launch("--", *torchrun, OMP_NUM_THREADS="1")
    row = specctl.status(done.json["run_id"])
    assert row["why"].endswith(": ChildFailedError: rank 1 was killed by SIGKILL"), row["why"]


def test_torchrun_whose_rank_dies_ends_with_what_the_rank_said(specctl: Specctl) -> None:
    pytest.importorskip("torch")
    (specctl.project / "ddp.py").write_text("""
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1, 100000):
    dist.all_reduce(torch.zeros(1))
    print(f"step {step} | loss: {5 / step:.4f} | 120 tok/s", flush=True)
    if step == 4 and dist.get_rank() == 1:
        raise RuntimeError("rank 1 has had enough")
""")
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--tee", "3", "ddp.py"]
    done = specctl.launch("--", *torchrun, OMP_NUM_THREADS="1")
    assert done.code == 1 and done.json["state"] == "FAILED", done.out + done.err
    error = done.json["error"]
    assert (error["type"], error["message"]) == ("RuntimeError", "rank 1 has had enough")
    assert "1" in error["worker"] and 'line 10, in <module>' in error["traceback"]

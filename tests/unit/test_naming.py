"""What a run of a command is called."""

from __future__ import annotations

import pytest

from orchestrator.naming import name_of, script_of


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["bash", "start_training.sh"], "start_training"),
        (["bash", "-c", "cd x && exec python train.py --lr 1"], "train"),
        (["bash", "-lc", "FOO=1 torchrun --nproc-per-node 2 src/main.py"], "main"),
        (["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer", "train"],
         "trainer"),
        (["python", "-m", "torch.distributed.run"], "run"),
        (["bash", "-c", "for i in 1 2; do python eval.py; done"], "eval"),
        (["sh", "-c", "echo saved; exit 3"], "sh"),
        (["sh", "-c", "n=0; while sleep 1; do n=$((n+1)); ((m++)); echo step=$n; done"], "sh"),
        (["sh", "-c", "n=$((2 * (3 + 4))); python train.py --n $n"], "train"),
        (["bash", "-c", "it's not closed"], "bash"),
        (["bash", "-c"], "bash"),
        (["python", "-m", "package.train"], "train"),
        (["python3.11", "-u", "a/b.py"], "b"),
        (["/usr/bin/python3", "-c", "print(1)"], "python3"),
        (["env", "A=1", "nohup", "./run.sh"], "run"),
        (["timeout", "5m", "bash", "a.sh"], "a"),
        (["accelerate", "launch", "train.py"], "train"),
        (["true"], "true"),
        (["env"], "env"),
        ([], "run"),
    ],
)
def test_a_command_is_called_by_what_it_runs(argv: list[str], name: str) -> None:
    assert name_of(argv) == name


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python3 -u a/b.py --lr 1", "a/b.py"),
        ("/opt/venv/bin/python3.11 b.py", "b.py"),
        ("env A=1 nohup python b.py", "b.py"),
        ("bash -e start.sh", "start.sh"),
        ("bash start", None),  # could be on the PATH
        ("env -C src python b.py", None),  # starts in another folder
        ("python -X dev b.py", None),
        ("python -m b", None),
        ("python -c b.py", None),
        ("python /opt/b.py", None),
        ("python", None),
        ("torchrun b.py", None),
        ("./b.py", None),
    ],
)
def test_the_script_of_a_command_is_told_only_where_it_is_beyond_doubt(command: str, script: str | None) -> None:
    assert script_of(command.split()) == script

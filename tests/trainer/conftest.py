"""A tiny random target made on the spot, configurations for it, and real trainer processes to watch.

The tiny target is a real Hugging Face Llama with a real byte-level tokenizer, small enough that a run takes a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import taught
from tests.trainer.support import IMPORTS, REPOSITORY, TrainerProcess, small_run, train_here

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """What is this small is slower on two."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random 6-layer Llama, hidden size 64; token 3 (<|mask|>) is spare."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("tiny-target")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|start|>", "<|end|>", "<|mask|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = Path(subprocess.__file__).read_text(encoding="utf-8").splitlines()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def learnt_run(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `exports.py`."""
    from tests.trainer.exports import make_run

    directory = tmp_path_factory.mktemp("learnt-run")
    make_run(directory, tiny_target)
    return directory


@pytest.fixture(scope="session")
def made(learnt_run: Path) -> Any:
    """What is exported of it."""
    from trainer.export import package, source

    found = source.find(learnt_run, which="auto", target=None, say=pytest.fail)
    return package.package(found, format="zlab", dtype="float32", target_name="the/target")


@pytest.fixture(scope="session")
def replay(made: Any) -> Any:
    """What the trainer drafts with it."""
    from tests.trainer.exports import CPU, prompts_of
    from trainer.export import gate

    return gate.replay(made, prompts_of, device=CPU, arithmetic="float32")


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path) -> dict[str, Any]:
    """A configuration as plain data, to be changed by the test: 2 drafters, 6 steps."""
    return small_run(tiny_target, tmp_path / "out")


@pytest.fixture
def train() -> Callable[..., Any]:
    """Train in this process, into the configuration's output directory; returns what `Training` held at the end."""
    return train_here


@pytest.fixture
def start_trainer(tmp_path: Path) -> Iterator[Callable[..., TrainerProcess]]:
    """Start `python -m trainer train`, as specctl would; `planted` is Python that runs first, to break something."""
    started: list[subprocess.Popen[str]] = []

    def start(config: Path, *options: str, planted: str = "", run_dir: Path | None = None) -> TrainerProcess:
        run_dir = run_dir or tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        environment = {
            **os.environ, "PYTHONPATH": IMPORTS,
            "SPECCTL_RUN_DIR": str(run_dir), "SPECCTL_RUN_ID": "a-run",
            "SPECCTL_ATTEMPT": "2", "SPECCTL_NONCE": "abc123",
        }  # fmt: skip
        arguments = ["train", str(config), *options]
        argv = [sys.executable, "-m", "trainer", *arguments]
        if planted:
            program = f"{planted}\nimport sys, trainer.__main__ as m\nsys.exit(m.main({arguments!r}))"
            argv = [sys.executable, "-c", program]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        started.append(process)
        return TrainerProcess(process, run_dir)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def torchrun() -> Iterator[Callable[..., TrainerProcess]]:
    """Start a training in so many processes as a user types it, without specctl; it writes to its output directory."""
    started: list[subprocess.Popen[str]] = []

    def start(config: Path, processes: int) -> TrainerProcess:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECCTL_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
             "-m", "trainer", "train", str(config)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
            env={**environment, "PYTHONPATH": IMPORTS},
        )  # fmt: skip
        started.append(process)
        return TrainerProcess(process, Path(json.loads(config.read_text())["output_dir"]))

    yield start
    for process in started:
        process.terminate()  # by which it ends those that it has started, and kills them after a while
        process.communicate()


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """See `fork_server.py`."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.fork_server"], cwd=REPOSITORY, text=True,
        env={**os.environ, "PYTHONPATH": IMPORTS}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    yield server
    server.communicate()


@pytest.fixture(scope="session")
def taught_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny target after it has learnt to answer (`taught.py`)."""
    return taught.shared(tmp_path_factory, "taught-target", lambda to: taught.teach_target(tiny_target, to))


@pytest.fixture(scope="session")
def taught_run(taught_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run, with one checkpoint, whose drafter has learnt to draft for the taught target; beside its
    checkpoints lie `chat.jsonl`, that it was trained on, and `held-out.jsonl`."""
    return taught.shared(tmp_path_factory, "taught-run", lambda to: taught.train_drafter(taught_target, to))

"""On a GPU rounds are CUDA graphs: the same texts as kernel by kernel, and the target's own up to ties."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import taught
from tests.trainer.support import events
from trainer.decode import loaded, parity
from trainer.decode.generate import Generated, end_ids, engine_for, generate, run
from trainer.decode.loaded import Loaded
from trainer.decode.sampling import Sampling

DTYPES = ["float32", "bfloat16"]


def load(taught_run: Path, dtype: Any, device: str = "cuda:0") -> Loaded:
    return loaded.load(taught_run, target=None, device=torch.device(device), dtype=dtype, say=lambda line: None)


def prompts_for(target: Any, count: int) -> list[list[int]]:
    """Of one conversation and of several, so that rounds look at contexts of more than one length."""
    draw, found = random.Random(3), []
    for number in range(count):
        messages = [one for _ in range(1 + number % 4) for one in taught.conversation(draw)][:-1]
        text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found.append(target.tokenizer(text)["input_ids"])
    return found


def tau_of_one_conversation(made: Generated) -> float:
    """Of the prompts that are like those the drafter was taught. Behind several conversations target and drafter are
    on ground that is new to both, and hardly a token stays."""
    acceptance = functools.reduce(operator.add, (one.acceptance for one in made.continuations[::4]))
    assert acceptance.verifications > 100 and acceptance.tau is not None
    return acceptance.tau


@pytest.fixture(scope="module")
def tau_on_the_cpu(taught_run: Path) -> float:
    found = load(taught_run, "float32", "cpu")
    made = generate(found.target, found.block_drafter, prompts_for(found.target, 60), max_tokens=32, batch_size=16)
    return tau_of_one_conversation(made)


def texts(made: Generated) -> list[list[int]]:
    return [one.tokens for one in made.continuations]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=50)], ids=str)
@pytest.mark.parametrize("drafted", [True, False])
def test_graphs_write_what_the_same_kernels_write_one_by_one(
    taught_run: Path, dtype: str, sampling: Sampling, drafted: bool
) -> None:
    found = load(taught_run, dtype)
    drafter, prompts = (found.block_drafter if drafted else None), prompts_for(found.target, 40)
    engines = [
        engine_for(found.target, drafter, prompts, max_tokens=32, batch_size=8, sampling=sampling,
                   stop_ids=end_ids(found.target), graphs=graphs, say=pytest.fail)
        for graphs in (True, False)
    ]  # fmt: skip
    assert [engine.rounds.recorded for engine in engines] == [True, False] and len(engines[0].lengths) > 1
    recorded, plain = (run(engine, prompts, max_tokens=32, seed=1) for engine in engines)
    assert texts(recorded) == texts(plain)
    # And again in the same memory, which holds what was there before.
    assert texts(run(engines[0], prompts, max_tokens=32, seed=1)) == texts(plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_size", [1, 16])
def test_greedy_is_the_targets_own_text_up_to_ties_and_drafts_stay_as_on_the_cpu(
    taught_run: Path, tau_on_the_cpu: float, dtype: str, batch_size: int
) -> None:
    found = load(taught_run, dtype)
    prompts = prompts_for(found.target, 60)
    made = generate(found.target, found.block_drafter, prompts, max_tokens=32, batch_size=batch_size)
    plain = generate(found.target, None, prompts, max_tokens=32, batch_size=1)
    differences = [
        parity.first_difference(found.target, one.prompt, one.tokens, other.tokens)
        for one, other in zip(made.continuations, plain.continuations, strict=True)
    ]
    assert all(difference is None or difference.tie for difference in differences), differences
    assert sum(difference is None for difference in differences) >= (60 if dtype == "float32" else 40)
    assert tau_on_the_cpu > 1.5
    assert tau_of_one_conversation(made) == pytest.approx(tau_on_the_cpu, rel=0.05 if dtype == "float32" else 0.15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafted", [True, False])
def test_compiled_rounds_write_what_they_write_uncompiled_up_to_ties(
    taught_run: Path, dtype: str, drafted: bool
) -> None:
    found = load(taught_run, dtype)
    drafter, prompts = (found.block_drafter if drafted else None), prompts_for(found.target, 40)
    engines = [
        engine_for(found.target, drafter, prompts, max_tokens=32, batch_size=8, sampling=None,
                   stop_ids=end_ids(found.target), compiled=compiled, say=pytest.fail)
        for compiled in (True, False)
    ]  # fmt: skip
    assert [engine.rounds.compiled for engine in engines] == [True, False]
    ours, theirs = (run(engine, prompts, max_tokens=32) for engine in engines)
    differences = [
        parity.first_difference(found.target, one.prompt, one.tokens, other.tokens)
        for one, other in zip(ours.continuations, theirs.continuations, strict=True)
    ]
    assert all(difference is None or difference.tie for difference in differences), differences
    assert sum(difference is None for difference in differences) >= (40 if dtype == "float32" else 25)
    assert texts(run(engines[0], prompts, max_tokens=32)) == texts(ours)


def test_a_compiled_round_is_far_fewer_kernels(taught_run: Path) -> None:
    found = load(taught_run, "bfloat16")
    for drafter in (found.block_drafter, None):
        counts = [kernels_of_a_round(found.target, drafter, compiled=compiled) for compiled in (True, False)]
        print(f"{'drafted' if drafter else 'alone'}: {counts[1]} kernels a round, compiled {counts[0]}")
        assert counts[0] < 0.6 * counts[1]


def kernels_of_a_round(target: Any, drafter: Any, *, compiled: bool) -> int:
    engine = engine_for(target, drafter, [[5]], max_tokens=100, batch_size=1, sampling=None, stop_ids=(),
                        compiled=compiled, say=pytest.fail)  # fmt: skip
    engine.admit([0], [[5]], max_tokens=[100])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.collect(engine.launch([0]))
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def test_what_torch_cannot_compile_is_recorded_as_it_is_and_said(taught_run: Path) -> None:
    found = load(taught_run, "float32")
    prompts, told = prompts_for(found.target, 8), []

    def texts_with(say: Any) -> tuple[bool, list[list[int]]]:
        engine = engine_for(found.target, found.block_drafter, prompts, max_tokens=16, batch_size=4, sampling=None,
                            stop_ids=end_ids(found.target), compiled=True, say=say)  # fmt: skip
        assert engine.rounds.recorded
        return engine.rounds.compiled, texts(run(engine, prompts, max_tokens=16))

    compiled, expected = texts_with(pytest.fail)
    assert compiled
    torch._dynamo.reset()
    for layer in found.target.model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    assert texts_with(told.append) == (False, expected)
    assert len(told) == 1 and told[0].startswith("rounds are not compiled, slower: ")


def test_a_training_evaluates_with_graphs_beside_its_own(
    taught_target: Path, taught_run: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    settings = taught.drafter_settings(taught_target, taught_run / "chat.jsonl", tmp_path / "out")
    settings |= {"steps": 20, "evaluate_every": 5, "devices": {"target": ["cuda:0"], "drafter": ["cuda:0", "cuda:0"]}}
    settings["target"] |= {"dtype": "auto"}
    settings["drafter"] |= {"heads": 4, "kv_heads": 2, "head_dim": 64, "block_size": 8}
    settings["evaluation"] = {"paths": [str(taught_run / "held-out.jsonl")], "max_tokens": 32}
    training = train(settings)
    assert training.evaluations._engine.rounds.recorded
    assert [one["step"] for one in events(tmp_path / "out", "evaluation")] == [5, 10, 15, 20]
    found = loaded.load(tmp_path / "out", target=None, device=torch.device("cuda:0"), say=lambda line: None)
    made = generate(found.target, found.block_drafter, training.evaluations._prompts, max_tokens=32, batch_size=8)
    told = events(tmp_path / "out", "evaluation")[-1]["tau"]
    assert made.acceptance.tau == pytest.approx(told, abs=0.3)

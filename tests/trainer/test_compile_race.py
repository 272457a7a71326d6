"""The compile race that killed the drafters this project was born from: what it is, and why the plan leaves it no room.

On the CPU the compiled functions are traced (`aot_eager`) and not turned into code: the race is one of the tracer's, so
it is the same one. tests/gpu/test_compile_race.py has it on a GPU, with FlexAttention.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.fx import Tracer
from torch.fx.experimental.proxy_tensor import make_fx

from tests.trainer.support import documents
from trainer import compile_plan, kernels
from trainer.compile_plan import LateCompile, SeveralForms
from trainer.config import Config, ConfigError
from trainer.micro_batch import MicroBatch
from trainer.replica import Replica
from trainer.report.records import RunIdentity
from trainer.report.reporter import Reporter
from trainer.setup import keep_compiled_code

Train = Callable[..., Any]
THREADS = 3


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """A compiler that has compiled nothing."""

    def forget() -> None:
        compile_plan.watch.open()
        torch._dynamo.reset()
        kernels.kernels_for.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def traced(settings: dict[str, Any]) -> dict[str, Any]:
    settings["devices"]["drafter"] = ["cpu"] * THREADS
    return {**settings, "batch_size": 2 * THREADS, "compile_on_cpu": "aot_eager", "steps": 4}


def in_thread(name: str, work: Callable[[], Any]) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_a_thread_that_traces_kills_one_that_only_calls_what_has_long_been_compiled() -> None:
    """What the plan is for. Later versions of torch keep the tracer's flag by thread."""
    double = torch.compile(lambda x: torch.sin(x) * 2, backend="aot_eager", dynamic=False)
    double(torch.ones(3))
    tracing, called = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        tracing.set()
        called.wait()
        return x.sin()

    tracer = threading.Thread(target=lambda: make_fx(slow)(torch.ones(3)))
    tracer.start()
    tracing.wait()
    error = in_thread("drafter-0", lambda: double(torch.ones(3)))
    called.set()
    tracer.join()
    by_thread = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 14)
    assert by_thread == (error is None)
    assert by_thread or "using FX to symbolically trace a dynamo-optimized function" in str(error)


def test_after_the_warm_up_no_thread_traces_or_compiles_however_often_a_run_starts(
    train: Train, traced: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traces: list[str] = []
    trace = Tracer.trace

    def noted(*arguments: Any, **options: Any) -> Any:
        traces.append(threading.current_thread().name)
        return trace(*arguments, **options)

    monkeypatch.setattr(Tracer, "trace", noted)
    for attempt in range(3):
        torch._dynamo.reset()
        kernels.kernels_for.cache_clear()
        before = compile_plan.watch.compiles
        training = train({**traced, "output_dir": f"{traced['output_dir']}-{attempt}"})
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "compile_warmup unit=1/1" in line]
        assert compile_plan.watch.compiles > before
        assert f" compiled={compile_plan.watch.compiles - before} " in line
        assert training.members[0].kernels.of((2, 48, 8)).compiled
    assert set(traces) == {"MainThread"}


def test_what_is_traced_trains_like_what_is_run_as_written(train: Train, traced: dict[str, Any]) -> None:
    weights = []
    for mode in ("off", "aot_eager"):
        training = train({**traced, "compile_on_cpu": mode, "output_dir": f"{traced['output_dir']}-{mode}"})
        weights.append(training.members[0].flat.weights)
    assert (weights[0] - weights[1]).abs().max() < 1e-3


def test_a_shape_that_was_not_warmed_is_refused_in_the_worker_that_met_it(
    train: Train, traced: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Replica.loss_and_gradients

    def shorter(self: Replica, batch: MicroBatch) -> None:
        if batch.step == 2 and threading.current_thread().name == "drafter-1":
            batch = dataclasses.replace(batch, features_BSF=batch.features_BSF[:, :-8])
        return original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", shorter)
    train(traced, expect=1)
    said = capsys.readouterr().err
    assert "Exception in thread drafter-1" in said
    assert "drafter-1: a micro-batch of 2 x (40 tokens, 8 anchors) on cpu is not in the compile plan" in said


def test_what_was_warmed_for_another_shape_is_refused_by_its_guard(train: Train, traced: dict[str, Any]) -> None:
    member = train(traced).members[0]
    kernels = member.kernels.of((2, 48, 8))
    mask = torch.ones(2, 1, 32, 72, dtype=torch.bool)
    slots, context, rope = torch.ones(2, 32, 64), torch.ones(2, 40, 64), (torch.ones(2, 72, 16), torch.ones(2, 72, 16))
    error = in_thread("drafter-1", lambda: kernels.first_layer(member.drafter.layers[0], slots, context, rope, mask))
    assert "fail_on_recompile" in str(error) and "size mismatch" in str(error)


def test_every_bucket_is_warmed_and_none_compiles_after_that(
    train: Train, traced: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    traced["data"] |= {"paths": documents(tmp_path), "buckets": [16, 32, 48]}
    traced["drafter"]["anchors"] = 20
    original, seen, compiles = Replica.loss_and_gradients, set(), []

    def noted(self: Replica, batch: MicroBatch) -> torch.Tensor:
        if threading.current_thread().name != "MainThread":
            seen.add(batch.shape)
        return original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", noted)
    training = train({**traced, "steps": 30}, before=lambda _: compiles.append(compile_plan.watch.compiles))
    assert training.steps_done == 30 and compiles == [compile_plan.watch.compiles]
    assert seen == {(2, 16, 15), (2, 32, 20), (2, 48, 20)}
    assert "phase=compile_warmup unit=3/3 device=cpu shape=2x48+20x4 compiled=" in capsys.readouterr().out


@torch._functorch.config.patch(enable_autograd_cache=False)
def test_a_backward_that_was_not_warmed_is_refused_although_its_forward_was() -> None:
    # Without that a compiled one might be found that an earlier process has left on the disk.
    double = torch.compile(lambda x: torch.sin(x) * 2, backend="inductor", dynamic=False)
    (unit,) = compile_plan.plan([torch.device("cpu")], rows=1, context_length=1, anchors=1, block_size=2)

    def forward_only(_unit: compile_plan.Unit) -> dict[str, CodeType]:
        double(torch.ones(3, requires_grad=True))
        return {}

    compile_plan.warm_up([unit], forward_only, say=lambda _: None)
    error = in_thread("drafter-7", lambda: double(torch.ones(3, requires_grad=True)).sum().backward())
    assert isinstance(error, LateCompile)
    assert str(error).startswith("drafter-7: torch began to compile (lazy_backward) after the warm-up")


def test_a_function_with_two_forms_is_refused_before_a_worker_exists() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 2

    compiled = torch.compile(double, backend="aot_eager", dynamic=False)
    (unit,) = compile_plan.plan([torch.device("cpu")], rows=1, context_length=1, anchors=1, block_size=2)

    def two_shapes(_unit: compile_plan.Unit) -> dict[str, CodeType]:
        compiled(torch.ones(3))
        compiled(torch.ones(4))
        return {"double on cpu": double.__code__}

    with pytest.raises(SeveralForms, match="double on cpu was compiled 2 times"):
        compile_plan.warm_up([unit], two_shapes, say=lambda _: None)


def test_torchs_limit_on_forms_is_an_error_and_no_slow_code() -> None:
    chunk = kernels.kernels_for(torch.device("cpu"), compile_on_cpu="aot_eager").of((1, 64, 8)).head_loss.chunk
    with torch._dynamo.config.patch(recompile_limit=1):
        chunk(torch.randn(4, 16), torch.randn(50, 16), torch.arange(4))
        with pytest.raises(FailOnRecompileLimitHit):
            chunk(torch.randn(5, 16), torch.randn(50, 16), torch.arange(5))


def test_a_torch_that_lacks_what_the_plan_needs_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_plan.check_torch()
    monkeypatch.delattr(torch.compiler, "set_stance")
    monkeypatch.setattr(compile_plan, "NEEDED", (*compile_plan.NEEDED, "torch._dynamo.no_module.function"))
    with pytest.raises(ConfigError, match=r"lacks torch\.compiler\.set_stance, torch\._dynamo\.no_module\.function,"):
        compile_plan.check_torch()


@pytest.mark.parametrize(
    ("key", "environ", "expected"),
    [
        (None, {}, "{tmp}/runs/compile-cache"),
        (None, {"SPECCTL_RUN_DIR": "x"}, "{tmp}/compile-cache"),
        (None, {"TORCHINDUCTOR_CACHE_DIR": "/mine"}, "/mine"),
        ("$CACHES/code", {"TORCHINDUCTOR_CACHE_DIR": "/mine"}, "/caches/code"),
    ],
    ids=["alone", "under specctl", "the user's own", "configured"],
)
def test_compiled_code_outlives_the_run(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        key: str | None, environ: dict[str, str], expected: str) -> None:  # fmt: skip
    monkeypatch.setenv("CACHES", "/caches")
    reporter = Reporter(RunIdentity(directory=tmp_path / "runs" / "a-run", run_id="a-run"))
    keep_compiled_code(Config.model_validate({**settings, "compile_cache": key}), reporter, environ)
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == expected.format(tmp=tmp_path)


def test_threads_that_share_functions_of_one_form_find_them_at_every_call(
    train: Train, traced: dict[str, Any]
) -> None:
    training = train({**traced, "steps": 60, "log_every": 60})
    assert training.steps_done == 60


def test_what_a_backward_computes_again_in_a_thread_with_other_settings_is_the_same_form() -> None:
    """On CUDA that is a thread of autograd's, which may be older than what this run has set."""
    shape, threads = (1, 64, 8), torch.get_num_threads()
    kernel_set = kernels.kernels_for(torch.device("cpu"), compile_on_cpu="aot_eager", loss_kernel="chunked").of(shape)
    hidden = torch.randn(40, 16).requires_grad_()
    loss = kernel_set.head_loss(hidden, torch.randn(50, 16), torch.arange(40), chunk_rows=20).sum()

    def backward() -> None:
        torch.set_num_threads(threads + 1)
        loss.backward()

    try:
        assert in_thread("autograd", backward) is None
    finally:
        torch.set_num_threads(threads)
    compile_plan._check_forms(kernel_set.compiled)
    assert hidden.grad is not None

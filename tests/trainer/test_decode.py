"""Decoding with a drafter writes what the target alone writes: token for token, or drawn from the same distribution."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import taught
from trainer.__main__ import main
from trainer.config import ConfigError
from trainer.decode import loaded, parity
from trainer.decode.acceptance import Acceptance
from trainer.decode.engine import BlockDrafter, Engine
from trainer.decode.generate import Generated, end_ids, generate
from trainer.decode.loaded import Loaded
from trainer.decode.sampling import Sampling, draw, keep_sampled
from trainer.kernels import plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import lay_out
from trainer.model.drafter import Drafter, DrafterShape
from trainer.model.target import as_ids, load_target
from trainer.sections import TargetConfig

CPU = torch.device("cpu")
SMOLLM2 = Path("~/.cache/specctl/models/SmolLM2-135M-Instruct").expanduser()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained(taught_run: Path) -> Loaded:
    return loaded.load(taught_run, target=None, device=CPU, say=lambda line: None)


def prompts_for(target: Any, count: int, *, seed: int) -> list[list[int]]:
    """Questions as they were taught, and as many beginnings of other lengths that were not."""
    draw, tokenizer = random.Random(seed), target.tokenizer
    found = []
    for number in range(count):
        text = tokenizer.apply_chat_template(
            taught.conversation(draw)[:1], tokenize=False, add_generation_prompt=True
        )  # fmt: skip
        if number % 2:
            text = text[draw.randrange(len(text) - 1) :][: draw.randrange(2, 60)]
        found.append(tokenizer(text)["input_ids"])
    return found


def alone(target: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What transformers' own generation writes: a way that shares nothing with this one but the model."""
    found: list[list[int]] = [[] for _ in prompts]
    ends = sorted(end_ids(target))
    for length in {len(prompt) for prompt in prompts}:
        own = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[number] for number in own])
        made = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, eos_token_id=ends,
            pad_token_id=0,
        )  # fmt: skip
        for number, row in zip(own, made[:, length:].tolist(), strict=True):
            end = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
            found[number] = row[:end]
    return found


def texts(made: Generated) -> list[list[int]]:
    return [one.tokens for one in made.continuations]


def test_greedy_is_the_targets_own_greedy_text_token_for_token_whatever_is_decoded_beside_it(trained: Loaded) -> None:
    prompts = prompts_for(trained.target, 200, seed=5)
    expected = alone(trained.target, prompts, 24)
    made = generate(trained.target, trained.block_drafter, prompts[:30], max_tokens=24)
    assert texts(made) == expected[:30]
    made = generate(trained.target, trained.block_drafter, prompts, max_tokens=24, batch_size=16)
    assert texts(made) == expected
    assert [one.ended for one in made.continuations] == [text[-1] in end_ids(trained.target) for text in expected]
    # Otherwise it would show nothing: blocks are kept in part, rows are of different lengths, and texts end.
    assert made.acceptance.tau is not None and made.acceptance.tau > 1.5
    assert len({one.acceptance.verifications for one in made.continuations}) > 5
    assert 50 < sum(one.ended for one in made.continuations) < 200


@pytest.mark.parametrize("drafted", [True, False])
def test_a_round_launched_before_the_one_before_it_is_read_changes_nothing(
    trained: Loaded, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, drafter = prompts_for(trained.target, 40, seed=13), trained.block_drafter if drafted else None
    plain = generate(trained.target, drafter, prompts, max_tokens=24, batch_size=6)
    one_by_one, launched = run_counting(monkeypatch, trained, drafter, prompts)
    assert one_by_one == texts(plain)
    # As on a GPU.
    monkeypatch.setattr(Engine, "ahead", 1)
    made = generate(trained.target, drafter, prompts, max_tokens=24, batch_size=6)
    assert texts(made) == texts(plain) and made.acceptance == plain.acceptance
    assert [one.ended for one in made.continuations] == [one.ended for one in plain.continuations]
    _, ahead = run_counting(monkeypatch, trained, drafter, prompts)
    assert ahead > launched  # some for texts that had ended meanwhile


def run_counting(monkeypatch: pytest.MonkeyPatch, trained: Loaded, drafter: Any, prompts: Any) -> tuple[Any, int]:
    """Texts, and rounds that were launched for them."""
    count, launch = 0, Engine.launch

    def counted(engine: Engine, active: Any) -> Any:
        nonlocal count
        count += 1
        return launch(engine, active)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "launch", counted)
        made = generate(trained.target, drafter, prompts, max_tokens=24, batch_size=6)
    return texts(made), count


def test_without_a_drafter_the_same_code_writes_the_targets_own_text(trained: Loaded) -> None:
    prompts = prompts_for(trained.target, 20, seed=6)
    made = generate(trained.target, None, prompts, max_tokens=24, batch_size=8)
    assert texts(made) == alone(trained.target, prompts, 24)
    assert made.acceptance.tau == 1 and made.acceptance.by_slot == []


def test_a_drafter_that_is_always_wrong_costs_time_and_changes_nothing(trained: Loaded) -> None:
    prompts = prompts_for(trained.target, 12, seed=7)
    wrong = Drafter(trained.block_drafter.drafter.shape)
    wrong.initialise(torch.Generator().manual_seed(1))
    drafter = BlockDrafter(drafter=wrong, ends=trained.block_drafter.ends, block_size=6, mask_token_id=3)
    made = generate(trained.target, drafter, prompts, max_tokens=20, batch_size=4)
    assert texts(made) == texts(generate(trained.target, None, prompts, max_tokens=20))
    assert made.acceptance.tau is not None and made.acceptance.tau < 1.2


def test_in_bfloat16_a_text_differs_from_the_plain_one_only_from_a_tie_on(taught_run: Path) -> None:
    trained = loaded.load(taught_run, target=None, device=CPU, dtype="bfloat16", say=lambda line: None)
    prompts = prompts_for(trained.target, 24, seed=8)
    made = generate(trained.target, trained.block_drafter, prompts, max_tokens=24, batch_size=8)
    plain = generate(trained.target, None, prompts, max_tokens=24, batch_size=1)
    found = [
        parity.first_difference(trained.target, one.prompt, one.tokens, other.tokens)
        for one, other in zip(made.continuations, plain.continuations, strict=True)
    ]
    assert all(difference is None or difference.tie for difference in found), found
    assert sum(difference is None for difference in found) > 14


def test_a_fault_is_no_tie(trained: Loaded) -> None:
    prompt = prompts_for(trained.target, 1, seed=9)[0]
    (text,) = alone(trained.target, [prompt], 8)
    broken = [*text[:3], (text[3] + 1) % 400, *text[4:]]
    difference = parity.first_difference(trained.target, prompt, broken, text)
    assert difference is not None and difference.place == 3 and not difference.tie
    assert parity.first_difference(trained.target, prompt, text, text) is None


def test_stop_tokens_end_a_text_inside_a_block_and_nothing_goes_past_max_tokens(trained: Loaded) -> None:
    (prompt,) = prompts_for(trained.target, 1, seed=10)
    (text,) = alone(trained.target, [prompt], 24)
    for most in range(1, len(text)):
        made = generate(trained.target, trained.block_drafter, [prompt], max_tokens=most, stop_ids=[])
        assert texts(made) == [text[:most]] and not made.continuations[0].ended
    for at, token in enumerate(text):
        made = generate(trained.target, trained.block_drafter, [prompt], max_tokens=24, stop_ids=[token])
        assert texts(made) == [text[: text.index(token) + 1]] and made.continuations[0].ended, at


def test_tokens_come_as_they_are_written_and_add_up(trained: Loaded) -> None:
    prompts = prompts_for(trained.target, 5, seed=11)
    heard: dict[int, list[int]] = {number: [] for number in range(5)}
    made = generate(
        trained.target, trained.block_drafter, prompts, max_tokens=16, batch_size=2,
        on_tokens=lambda number, tokens: heard[number].extend(tokens),
    )  # fmt: skip
    assert list(heard.values()) == texts(made)


def test_every_verification_is_counted_once(trained: Loaded) -> None:
    prompts = prompts_for(trained.target, 30, seed=12)
    made = generate(trained.target, trained.block_drafter, prompts, max_tokens=24, batch_size=10)
    for one in made.continuations:
        counted = one.acceptance
        # The token behind the prompt belongs to none; what was drafted past max_tokens was kept, and cut.
        assert 0 <= counted.tokens + 1 - len(one.tokens) < 6 or not one.tokens
        assert counted.tokens == counted.verifications + sum(counted.kept_k) - (
            # A drafted token that ended the text was the last one, with no other behind it.
            counted.verifications - counted.reached_k[0] + sum(
                counted.kept_k[slot] - counted.reached_k[slot + 1] for slot in range(4)
            ) if one.ended else 0
        )  # fmt: skip
        assert all(kept <= reached for kept, reached in zip(counted.kept_k, counted.reached_k, strict=True))


def test_each_block_is_drafted_as_a_training_would_fill_it_and_sees_nothing_that_was_not_kept(trained: Loaded) -> None:
    target, own, most = trained.target, trained.block_drafter, 24
    block, prompts = own.block_size, prompts_for(target, 20, seed=13)
    made = generate(target, own, prompts, max_tokens=most, batch_size=7, stop_ids=())
    written = generate(target, None, prompts, max_tokens=most + block, batch_size=7, stop_ids=())
    total = Acceptance(block_size=block)
    for prompt, text, found in zip(prompts, texts(written), made.continuations, strict=True):
        ids = [*prompt, *text]
        drafted_Nk = filled(trained, ids, range(len(prompt), len(prompt) + most))
        expected, anchor = Acceptance(block_size=block), len(prompt)
        while anchor < len(prompt) + most - 1:
            pairs = zip(drafted_Nk[anchor - len(prompt)], ids[anchor + 1 :], strict=False)
            kept = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            expected.add(count=kept + 1, kept=kept)
            anchor += kept + 1
        assert found.acceptance == expected
        total += expected
    assert 0 < total.kept_k[0] < total.verifications  # some were kept, others not


def filled(trained: Loaded, ids: list[int], anchors: range) -> list[list[int]]:
    """What the drafter says in slots 1, 2, ... of blocks at `anchors`, by the forward of a training."""
    target, own = trained.target, trained.block_drafter
    ids_1S, anchors_1N = torch.tensor([ids]), torch.tensor([list(anchors)])
    blocks = lay_out(
        ids_1S, torch.ones_like(ids_1S).bool(), anchors_1N, torch.ones_like(anchors_1N).bool(),
        block_size=own.block_size, mask_token_id=own.mask_token_id, gamma=1.0,
    )  # fmt: skip
    with torch.no_grad():
        slots_1TH = own.drafter(target.features(ids_1S), blocks, own.ends, plain(DenseAttention()))
        slots_NkH = slots_1TH[0].unflatten(0, (len(anchors), -1))[:, 1:]
        found: list[list[int]] = (slots_NkH @ own.ends.head_VH.T).argmax(dim=-1).tolist()
    return found


# --- drawn ----------------------------------------------------------------------------------------------------------


def test_what_rejection_leaves_is_distributed_as_the_target() -> None:
    """Of 5 tokens, 3 slots: every sequence's exact probability is known."""
    draws, slots, vocabulary = 120_000, 3, 5
    generator = torch.Generator().manual_seed(17)
    target_KV = torch.rand(slots, vocabulary, generator=generator).pow(2)
    drafted_kV = torch.rand(slots - 1, vocabulary, generator=generator).pow(2)
    target_KV[1, 2] = drafted_kV[0, 4] = 0  # what one of them never says
    target_KV, drafted_kV = (one / one.sum(dim=1, keepdim=True) for one in (target_KV, drafted_kV))
    uniform = torch.rand(draws, 2 * slots, generator=generator)
    target, drafted = target_KV.expand(draws, -1, -1), drafted_kV.expand(draws, -1, -1)
    draft = draw(drafted, uniform[:, : slots - 1])
    kept, following = keep_sampled(draft, drafted, target, uniform[:, slots - 1 : -2], uniform[:, -1])
    counts = Counter(
        (*row[:count], said) for row, count, said in zip(draft.tolist(), kept.tolist(), following.tolist(), strict=True)
    )
    # The slots are independent of one another here: of all that got as far, the token at a slot is the target's.
    for slot in range(slots):
        reached = [sequence for sequence in counts if len(sequence) > slot]
        seen = torch.zeros(vocabulary)
        for sequence in reached:
            seen[sequence[slot]] += counts[sequence]
        assert chi_square_fits(seen, target_KV[slot]), (slot, seen, target_KV[slot])


def chi_square_fits(seen: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Whether counts fit probabilities. Of draws that do, one set in a million is told not to; the draws of these tests
    are always the same, so that a test that passes goes on passing."""
    possible = probabilities > 0
    assert not seen[~possible].any()
    expected = probabilities[possible].double() * seen.sum()
    statistic = ((seen[possible] - expected).square() / expected).sum()
    freedom = int(possible.sum()) - 1
    survival = torch.special.gammaincc(torch.tensor(freedom / 2.0), (statistic / 2).float())
    return bool(survival > 1e-6)


@pytest.fixture(scope="module")
def five_tokens(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target of few tokens, which can be asked for all its probabilities, and a drafter that often agrees with it."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("five-tokens")
    words = {word: number for number, word in enumerate("abcdefgh")}
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), pad_token="h")
    fast.save_pretrained(directory)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, tie_word_embeddings=False, pad_token_id=7, bos_token_id=None, eos_token_id=None,
        initializer_range=0.4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return load_target(TargetConfig(path=str(directory), dtype="float32", captured_layers=1), CPU)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.8), Sampling(temperature=1.3, top_k=3)], ids=str,
)  # fmt: skip
def test_drawn_texts_are_distributed_as_the_targets_own(five_tokens: Any, sampling: Sampling) -> None:
    target, count, length = five_tokens, 6000, 3
    shape = DrafterShape(
        hidden=32, captured=1, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32, rms_norm_eps=1e-6,
        rope_theta=10_000.0,
    )  # fmt: skip
    drafter = Drafter(shape).requires_grad_(False)
    drafter.initialise(torch.Generator().manual_seed(2), std=0.3)
    made = generate(
        target, BlockDrafter(drafter=drafter, ends=target.ends, block_size=3, mask_token_id=6), [[0, 1]] * count,
        max_tokens=length, batch_size=500, sampling=sampling, seed=4, stop_ids=[],
    )  # fmt: skip
    assert made.acceptance.tau is not None and 1.2 < made.acceptance.tau < 2.9
    exact = torch.ones(())
    for _ in range(length):
        exact = exact[..., None] * next_probabilities(target, sampling, [0, 1], exact.dim())
    seen = torch.zeros(8, 8, 8)
    for text in texts(made):
        seen[tuple(text)] += 1
    # What is expected too seldom for the statistic is one class.
    rare = (exact * count < 5).flatten()
    seen, exact = seen.flatten(), exact.flatten()
    merged = torch.cat((seen[~rare], seen[rare].sum()[None])), torch.cat((exact[~rare], exact[rare].sum()[None]))
    assert chi_square_fits(*merged)


@torch.no_grad()
def next_probabilities(target: Any, sampling: Sampling, prompt: list[int], depth: int) -> torch.Tensor:
    """[8] * depth + [8]: of the token behind the prompt and every sequence of `depth` tokens."""
    sequences = torch.cartesian_prod(*[torch.arange(8)] * depth).view(8**depth, depth) if depth else torch.zeros(1, 0)
    ids = torch.cat((torch.tensor(prompt).expand(len(sequences), -1), sequences.long()), dim=1)
    return warped(target.model(ids).logits[:, -1], sampling).view([8] * (depth + 1))


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """By transformers' own processors."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return logits.softmax(dim=-1)


def test_a_drawn_text_follows_from_seed_and_number_not_from_what_is_beside_it(trained: Loaded) -> None:
    prompts, sampling = prompts_for(trained.target, 10, seed=13), Sampling(temperature=0.9)
    made = [
        texts(generate(trained.target, trained.block_drafter, prompts, max_tokens=16, batch_size=size,
                       sampling=sampling, seed=seed))
        for size, seed in ((1, 1), (4, 1), (4, 2))
    ]  # fmt: skip
    assert made[0] == made[1] and made[1] != made[2]


def test_a_number_close_to_one_never_draws_what_has_no_weight() -> None:
    weights = torch.tensor([[0.3, 0.7, 0.0, 0.0]])
    assert draw(weights, torch.tensor([1 - 2**-24])).tolist() == [1]
    assert draw(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([0.0])).tolist() == [2]


# --- what cannot be decoded -----------------------------------------------------------------------------------------


def test_what_is_no_drafter_or_not_its_target_is_one_line(taught_run: Path, tmp_path: Path) -> None:
    def refusal(path: Path, target: str | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            loaded.load(path, target=target, device=CPU, say=lambda line: None)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refusal(tmp_path / "nowhere").endswith("is not there; name a run's directory, or one of its"
                                                  " checkpoints/step-N, or an export")  # fmt: skip
    assert "holds no checkpoints" in refusal(tmp_path)
    assert "--target: there is no model" in refusal(taught_run, str(tmp_path))
    damaged = tmp_path / "step-150"
    damaged.mkdir()
    for file in (taught_run / "checkpoints" / "step-150").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[:-1])
    assert "no checkpoint that can be read" in refusal(damaged)


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0, 1e-320])
def test_a_temperature_at_which_nothing_is_probable_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature: must be 0 or from 0\.001 to 100"):
        Sampling(temperature=temperature)


def test_a_prompt_without_a_token_is_refused(trained: Loaded) -> None:
    with pytest.raises(ValueError, match="no token"):
        generate(trained.target, None, [[1], []], max_tokens=2)


# --- the commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def trainer(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`python -m trainer` in this process, which has torch already."""

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return Done(code=code, out=out, err=err)

    return run


def test_generate_prints_what_the_target_itself_would_say_and_what_the_drafter_saved(
    trainer: Callable[..., Done], trained: Loaded, taught_run: Path
) -> None:
    asked = "Count from two to five."
    done = trainer("generate", str(taught_run), "--prompt", asked, "--max-tokens", "40")
    assert done.code == 0, done.err
    tokenizer = trained.target.tokenizer
    ids = tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True)["input_ids"]
    (said,) = alone(trained.target, [ids], 40)
    assert done.out == tokenizer.decode(said, skip_special_tokens=True) + "\n"
    assert "τ=" in done.err and "step-150" in done.err


def test_evaluate_measures_an_export_by_category_and_says_what_its_figures_are(
    trainer: Callable[..., Done], trained: Loaded, taught_run: Path, tmp_path: Path
) -> None:
    export = tmp_path / "export"
    assert trainer("export", str(taught_run), "--to", str(export), "--no-gate").code == 0
    found, drawn = tmp_path / "found.json", tmp_path / "found.png"
    options = ["--data", str(taught_run / "held-out.jsonl"), "--prompts", "12", "--max-tokens", "40"]
    missing = trainer("evaluate", str(export), *options)
    assert missing.code == 2 and "--target DIR" in missing.err
    done = trainer(
        "evaluate", str(export), *options, "--target", trained.target.model.config._name_or_path, "--out", str(found),
        "--png", str(drawn),
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "bonus" in done.out and drawn.read_bytes().startswith(b"\x89PNG")
    figures = json.loads(found.read_text())
    assert set(figures["categories"]) == {"sums", "counting"} and figures["all"]["prompts"] == 12
    assert figures["all"]["same"] == 12 and figures["all"]["different"] == 0
    assert len(figures["all"]["kept_by_slot"]) == 5 and figures["all"]["tau"] > 1.5
    # Alone, the target needs one for each token behind the first.
    assert figures["all"]["plain_verifications"] == figures["all"]["tokens"] - 12
    assert figures["all"]["tok_s"] > 0 and figures["all"]["plain_tok_s"] > 0
    total = sum(one["verifications"] for one in figures["categories"].values())
    assert figures["all"]["verifications"] == total
    # Each slot that stays is one more token of a verification.
    assert figures["all"]["tau"] == pytest.approx(1 + sum(figures["all"]["kept_by_slot"]), abs=0.3)


def test_what_a_user_can_get_wrong_is_one_line_with_exit_code_2(
    trainer: Callable[..., Done], taught_run: Path, tmp_path: Path
) -> None:
    for arguments, said in (
        (["generate", str(tmp_path), "--prompt", "x"], "holds no checkpoints"),
        (["generate", str(taught_run), "--prompt", "x", "--top-p", "2"], "--top-p"),
        (["generate", str(taught_run), "--prompt", "x", "--max-tokens", "0"], "--max-tokens"),
        (["evaluate", str(taught_run), "--data", str(tmp_path / "none.jsonl")], "none.jsonl"),
    ):
        done = trainer(*arguments)
        assert (done.code, done.out) == (2, "") and said in done.err, done
        assert done.err.count("\n") == 1


def test_what_the_target_has_no_positions_for_is_refused(trained: Loaded) -> None:
    generate(trained.target, trained.block_drafter, [[1] * 100], max_tokens=256 - 100 - 5)
    with pytest.raises(ConfigError, match="256 positions"):
        generate(trained.target, trained.block_drafter, [[1] * 100], max_tokens=256 - 100 - 4)


def test_the_real_smollm2_says_token_for_token_what_it_says_alone() -> None:
    if not (SMOLLM2 / "COMPLETE.json").exists():
        missing = f"no target in {SMOLLM2}: run scripts/fetch_smollm2.py"
        if os.environ.get("CI") == "true":
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    target = load_target(TargetConfig(path=str(SMOLLM2), dtype="float32"), CPU)
    shape = DrafterShape(
        hidden=576, captured=5, layers=1, heads=9, kv_heads=3, head_dim=64, intermediate=256, rms_norm_eps=1e-5,
        rope_theta=100_000.0,
    )  # fmt: skip
    drafter = Drafter(shape).requires_grad_(False)
    drafter.initialise(torch.Generator().manual_seed(2))
    asked = ("What is the capital of France?", "Count to five.")
    prompts = [as_ids(target.tokenizer, text, chat=True) for text in asked]
    block_drafter = BlockDrafter(drafter=drafter, ends=target.ends, block_size=4, mask_token_id=3)
    made = generate(target, block_drafter, prompts, max_tokens=10, batch_size=2)
    assert texts(made) == alone(target, prompts, 10)
    assert "Paris" in target.tokenizer.decode(made.continuations[0].tokens)

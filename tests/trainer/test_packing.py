"""Several documents in a row: each is trained on as if it were alone, by the target and by the drafter."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import trainer.model.target
from tests.trainer.support import all_rows, documents, losses
from trainer.config import ConfigError
from trainer.data.packing import pack
from trainer.data.rows import load_rows
from trainer.kernels import plain
from trainer.micro_batch import MicroBatch
from trainer.model.attention import DenseAttention
from trainer.model.blocks import Blocks, generator_for, lay_out, pick_anchors
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.model.loss import block_loss
from trainer.model.target import Target, load_target, see_that_documents_stay_apart
from trainer.replica import Replica
from trainer.sections import DataConfig

LENGTHS, PADDING, SIZE = [9, 14, 2, 12], 5, 4
STARTS = [0, 9, 23, 25]
SHAPE = DrafterShape(
    hidden=64, captured=3, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, rms_norm_eps=1e-6,
    rope_theta=10_000.0,
)  # fmt: skip
TABLE_VH = torch.randn(400, 64, generator=generator_for("table")) * 0.1
ENDS = FrozenEnds(embedding_VH=TABLE_VH, head_VH=TABLE_VH)


def starts_of(lengths: list[int], padding: int) -> Tensor:
    parts, start = [], 0
    for length in (*lengths, padding):
        parts.append(torch.full((length,), start))
        start += length
    return torch.cat(parts)[None]


# --- which go together ----------------------------------------------------------------------------------------------


def test_every_document_is_in_one_row_and_no_row_is_too_long() -> None:
    lengths = torch.randint(2, 513, (3000,), generator=generator_for("lengths")).tolist()
    rows = pack(lengths, 512)
    assert sorted(document for row in rows for document in row) == list(range(3000))
    used = [sum(lengths[document] for document in row) for row in rows]
    assert max(used) <= 512
    assert sum(used) / (512 * len(rows)) > 0.98, "of documents of all lengths almost nothing is left over"
    assert rows == pack(lengths, 512)


def test_documents_that_fit_into_no_row_together_stay_alone() -> None:
    assert pack([8, 8, 7], 14) == [[0], [1], [2]]
    assert pack([6, 8, 8, 7], 14) == [[1], [2, 0], [3]]


def test_a_hundred_thousand_documents_pack_in_a_moment() -> None:
    lengths = torch.randint(2, 2049, (100_000,), generator=generator_for("lengths")).tolist()
    started = time.process_time()
    pack(lengths, 2048)
    assert time.process_time() - started < 5


def test_a_packed_row_cut_anywhere_is_the_beginning_of_the_whole(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_target)
    config = DataConfig(kind="text", paths=documents(tmp_path), sequence_length=72, packing=True)
    rows = load_rows(config, tokenizer, mask_token_id=3, seed=1)
    every = torch.arange(len(rows))
    whole = rows.cut(every, 72)
    assert (whole[2].amax(dim=1) > 30).any(), "documents that begin behind where it is cut"
    for length in (1, 8, 30, 71):
        assert all(torch.equal(cut, full[:, :length]) for cut, full in zip(rows.cut(every, length), whole, strict=True))


def test_a_packed_row_is_its_documents_one_behind_the_other(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_target)
    config: dict[str, Any] = {"kind": "text", "paths": documents(tmp_path), "sequence_length": 72}
    alone = load_rows(DataConfig(**config), tokenizer, mask_token_id=3, seed=1)
    rows = load_rows(DataConfig(**config, packing=True), tokenizer, mask_token_id=3, seed=1)
    assert len(rows) < len(alone) and rows.lengths_R.sum() == alone.lengths_R.sum() and rows.digest() != alone.digest()
    found = []
    ids_RS, loss_mask_RS, starts_RS = all_rows(rows)
    for row in range(len(rows)):
        starts = starts_RS[row]
        for start in starts.unique().tolist():
            (there,) = (starts == start).nonzero(as_tuple=True)
            assert there.tolist() == list(range(start, start + len(there)))
            if start < rows.lengths_R[row]:
                found.append(ids_RS[row, there].tolist())
                assert loss_mask_RS[row, there].all()
            else:
                assert not loss_mask_RS[row, there].any()
    expected = [ids[:length].tolist() for ids, length in zip(all_rows(alone)[0], alone.lengths_R, strict=True)]
    assert sorted(found) == sorted(expected)


# --- the target -----------------------------------------------------------------------------------------------------

OPT: tuple[str, dict[str, Any]] = ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32})
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}), ("Qwen3", {"head_dim": 16}), ("GPT2", {}), ("Mistral", {"sliding_window": 5}), OPT,
]  # fmt: skip


def a_target(family: str, options: dict[str, Any], tokenizer: Any) -> Target:
    """Of large random weights, so that whatever is seen shows."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, attn_implementation="sdpa", **options,
    )  # fmt: skip
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
    model.requires_grad_(False).eval()
    return Target(model, tokenizer, layer_ids=[1, 2, 3], device=torch.device("cpu"), files={})


def apart(target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Features of two rows of documents: packed, of each document alone, and of the row as if it were one document."""
    ids_BS = torch.randint(4, 400, (2, sum(LENGTHS) + PADDING), generator=generator_for("ids"))
    positions_BS = (torch.arange(ids_BS.shape[1]) - starts_of(LENGTHS, PADDING)).expand(2, -1)
    real = sum(LENGTHS)
    alone = torch.cat([target.features(part) for part in ids_BS[:, :real].split(LENGTHS, dim=1)], dim=1)
    return target.features(ids_BS, positions_BS)[:, :real], alone, target.features(ids_BS)[:, :real]


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=str)
def test_a_documents_features_in_a_packed_row_are_those_of_the_document_alone(family: str, options: dict[str, Any]
                                                                             ) -> None:  # fmt: skip
    packed, alone, mixed = apart(a_target(family, options, None))
    assert (packed - alone).abs().max() < 1e-4
    assert (mixed - alone).abs().max() > 1, "it does matter"


def test_so_are_those_of_a_target_that_was_loaded(tiny_target: Path, settings: dict[str, Any]) -> None:
    from trainer.config import Config

    target = load_target(Config.model_validate(settings).target, torch.device("cpu"))
    packed, alone, mixed = apart(target)
    assert (packed - alone).abs().max() < 1e-4 * alone.abs().max()
    assert (mixed - alone).abs().max() > 0.1 * alone.abs().max()


def test_a_target_that_mixes_documents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for family, options in FAMILIES:
        see_that_documents_stay_apart(a_target(family, options, None))
    monkeypatch.setattr(trainer.model.target, "documents_mask", lambda positions_BS: None)
    with pytest.raises(ConfigError, match=r"data\.packing: OPTForCausalLM mixes the documents of a row"):
        see_that_documents_stay_apart(a_target(*OPT, None))


def test_what_documents_are_compared_by_is_read_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    target = a_target(*FAMILIES[0], None)
    original, made = target.features, []

    def features(*given: Tensor) -> Tensor:
        made.append(original(*given))
        return made[-1]

    @contextlib.contextmanager
    def stream() -> Iterator[None]:
        yield
        for tensor in made:  # another stream's turn: it finds whatever is there by then
            tensor.copy_(torch.randn(tensor.shape) * tensor.abs().max())

    monkeypatch.setattr(target, "features", features)
    monkeypatch.setattr(target, "stream", stream)
    see_that_documents_stay_apart(target)
    assert len(made) == 3


# --- the drafter ----------------------------------------------------------------------------------------------------


def a_drafter() -> Drafter:
    module = Drafter(SHAPE)
    module.initialise(generator_for(5), std=0.1)
    return module


def laid_out(ids_BS: Tensor, loss_mask_BS: Tensor, anchors: list[int], starts_BS: Tensor | None = None) -> Blocks:
    anchors_BN = torch.tensor([anchors])
    return lay_out(
        ids_BS, loss_mask_BS, anchors_BN, torch.ones_like(anchors_BN, dtype=torch.bool), starts_BS=starts_BS,
        block_size=SIZE, mask_token_id=3, gamma=4.0,
    )  # fmt: skip


ANCHORS = [[0, 3, 7], [0, 1, 12], [0], [5, 10]]
"""Of each document, counted from its start; some so near to its end that their slots would reach into the next one."""


def a_packed_row() -> tuple[Tensor, Tensor, Tensor, Blocks]:
    """Ids, loss mask, features and blocks."""
    length = sum(LENGTHS) + PADDING
    ids_BS = torch.randint(4, 400, (1, length), generator=generator_for("ids"))
    loss_mask_BS = torch.ones(1, length, dtype=torch.bool)
    loss_mask_BS[0, 11], loss_mask_BS[0, sum(LENGTHS) :] = False, False
    features = torch.randn(1, length, 192, generator=generator_for("features"))
    anchors = [start + anchor for start, own in zip(STARTS, ANCHORS, strict=True) for anchor in own]
    return ids_BS, loss_mask_BS, features, laid_out(ids_BS, loss_mask_BS, anchors, starts_of(LENGTHS, PADDING))


def loss_and_gradients(drafter: Drafter, features: Tensor, blocks: Blocks) -> tuple[Tensor, list[Tensor]]:
    loss, *_ = block_loss(
        drafter(features, blocks, ENDS, plain(DenseAttention())), blocks, TABLE_VH, weight_sum=7.0, chunk_rows=1000
    )
    return loss.detach(), list(torch.autograd.grad(loss, list(drafter.parameters())))


def test_a_packed_rows_loss_and_gradients_are_the_sum_of_its_documents_alone() -> None:
    drafter, (ids_BS, loss_mask_BS, features, blocks) = a_drafter(), a_packed_row()
    loss, gradients = loss_and_gradients(drafter, features, blocks)
    parts = []
    for start, length, anchors in zip(STARTS, LENGTHS, ANCHORS, strict=True):
        own = slice(start, start + length)
        alone = laid_out(ids_BS[:, own], loss_mask_BS[:, own], anchors)
        parts.append(loss_and_gradients(drafter, features[:, own], alone))
    assert torch.allclose(loss, sum(part for part, _ in parts), rtol=1e-5)
    for index, gradient in enumerate(gradients):
        expected = sum(part[index] for _, part in parts)
        assert (gradient - expected).abs().max() < 1e-4 * expected.abs().max()


def test_nothing_of_one_document_reaches_another() -> None:
    drafter, (ids_BS, loss_mask_BS, features, blocks) = a_drafter(), a_packed_row()
    features.requires_grad_()
    slots = drafter(features, blocks, ENDS, plain(DenseAttention()))
    documents_N = [document for document, anchors in enumerate(ANCHORS) for _ in anchors]
    for number, (document, anchor) in enumerate(zip(documents_N, blocks.anchors_BN[0].tolist(), strict=True)):
        own = slots[0, number * SIZE : (number + 1) * SIZE].square().sum()
        (gradient,) = torch.autograd.grad(own, features, retain_graph=True)
        (reached,) = gradient[0].abs().sum(dim=-1).nonzero(as_tuple=True)
        assert reached.tolist() == list(range(STARTS[document], anchor))

    changed_ids, changed = ids_BS.clone(), features.detach().clone()
    changed_ids[0, : LENGTHS[0]] = 7
    changed[0, : LENGTHS[0]] += 1
    others = laid_out(changed_ids, loss_mask_BS, blocks.anchors_BN[0].tolist(), starts_of(LENGTHS, PADDING))
    after = drafter(changed, others, ENDS, plain(DenseAttention()))
    first = len(ANCHORS[0])
    assert torch.equal(slots[0, first * SIZE :], after[0, first * SIZE :])
    assert not torch.allclose(slots[0, : first * SIZE], after[0, : first * SIZE], atol=1e-2)
    assert torch.equal(blocks.labels_BNk[0, first:], others.labels_BNk[0, first:])


def test_positions_begin_anew_and_no_slot_behind_its_document_weighs_anything() -> None:
    _, _, _, blocks = a_packed_row()
    assert blocks.positions_BS[0].tolist() == [at for length in (*LENGTHS, PADDING) for at in range(length)]
    anchors = [anchor for own in ANCHORS for anchor in own]
    assert blocks.positions_BT[0].tolist() == [anchor + slot for anchor in anchors for slot in range(SIZE)]
    weighed = (blocks.weights_BNk[0] > 0).sum(dim=-1).tolist()
    # Of document 1 the third token is not trained on.
    assert weighed == [3, 3, 1, 1, 0, 1, 1, 3, 1]


def test_an_anchor_stands_before_a_trained_token_of_its_own_document() -> None:
    mask_S, starts_S = torch.ones(sum(LENGTHS), dtype=torch.bool), starts_of(LENGTHS, 0)[0]
    anchors, valid = pick_anchors(mask_S, sum(LENGTHS) - 1, generator_for(1), starts_S=starts_S)
    ends = {start + length - 1 for start, length in zip(STARTS, LENGTHS, strict=True)}
    assert set(anchors[valid].tolist()) == set(range(sum(LENGTHS))) - ends


# --- a whole run ----------------------------------------------------------------------------------------------------


def test_a_packed_run_sees_each_document_alone_and_resumes_to_the_bit(
    train: Callable[..., Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    settings["optimizer"] |= {"schedule": "constant", "warmup_fraction": 0}
    settings["data"] |= {"paths": documents(tmp_path), "sequence_length": 72, "buckets": [48, 72], "packing": True}
    original, batches = Replica.loss_and_gradients, []

    def noted(self: Replica, batch: MicroBatch) -> Tensor:
        batches.append(batch)
        return original(self, batch)

    monkeypatch.setattr(Replica, "loss_and_gradients", noted)
    whole = train({**settings, "steps": 10, "output_dir": str(tmp_path / "whole")})
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("data rows="))
    assert line.startswith(f"data rows={len(whole.rows)} documents=10 bad=0 ")
    several = 0
    for batch in batches[1:]:
        for number, row in enumerate(batch.rows):
            length = int(whole.rows.lengths_R[row])
            assert batch.shape[1] == (48 if length <= 48 else 72)
            ids_BS, _, starts_BS = whole.rows.cut(torch.tensor([row]), length)
            starts = starts_BS.unique().tolist()
            several += len(starts) > 1
            for start, end in zip(starts, [*starts[1:], length], strict=True):
                alone = whole.targets[0].features(ids_BS[:, start:end])
                assert (batch.features_BSF[number, start:end] - alone[0]).abs().max() < 1e-4 * alone.abs().max()
    assert several > 10
    split = {**settings, "output_dir": str(tmp_path / "split")}
    train({**split, "steps": 6})
    train({**split, "steps": 10})
    assert losses(tmp_path / "split") == losses(tmp_path / "whole")
    settings["data"]["packing"] = False
    with pytest.raises(ConfigError, match=r"step-10: not the same data, rows of data as then"):
        train({**settings, "steps": 11, "output_dir": str(tmp_path / "split")})

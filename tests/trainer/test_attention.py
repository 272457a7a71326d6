"""FlexAttention against its twin where no GPU is: the same mask and the same products, without the compiler."""

from __future__ import annotations

import pytest
import torch

from trainer.model.attention import DenseAttention, SparseAttention
from trainer.model.blocks import generator_for, lay_out, pick_anchors

LENGTH, ANCHORS, SIZE = 160, 40, 4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flex_attention_sees_and_computes_what_its_twin_does_also_for_padding_and_packed_documents(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int
) -> None:
    # As they are before torch.compile, which has no backward and little use on a CPU.
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    ids_BS = torch.randint(4, 400, (2, LENGTH), generator=generator_for("ids"))
    mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    mask_BS[1, 30:] = False
    drawn = [pick_anchors(mask_S, ANCHORS, generator_for("anchors", row)) for row, mask_S in enumerate(mask_BS)]
    anchors_BN, valid_BN = (torch.stack(parts) for parts in zip(*drawn, strict=True))
    assert valid_BN[0].all() and valid_BN[1].any() and not valid_BN[1].all()
    starts_BS = torch.zeros_like(ids_BS)
    starts_BS[0, 70:], starts_BS[0, 100:] = 70, 100
    blocks = lay_out(
        ids_BS, mask_BS, anchors_BN, valid_BN, starts_BS=starts_BS, block_size=SIZE, mask_token_id=3, gamma=4.0
    )
    assert blocks.starts_BN[0].unique().tolist() == [0, 70, 100]

    slots = ANCHORS * SIZE
    query = torch.randn(2, 4, slots, 16, generator=generator_for("query"))
    key, value = torch.randn(2, 2, kv_heads, LENGTH + slots, 16, generator=generator_for("keys"))
    dense, flex = DenseAttention(), SparseAttention(lambda _name, function, **_: function)
    expected = dense(query, key, value, dense.mask(blocks, LENGTH))
    got = flex(query, key, value, flex.mask(blocks, LENGTH))
    assert torch.allclose(got, expected, atol=1e-5), (got - expected).abs().max()


def test_flex_attention_outside_a_compiled_function_is_an_error_and_no_dense_attention() -> None:
    query = torch.ones(1, 2, 8, 16)
    with pytest.raises(RuntimeError, match="outside a compiled function"):
        SparseAttention(lambda _name, function, **_: function)(query, query, query, None)

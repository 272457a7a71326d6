"""The drafter against a plain reference, its names, and the proof that no block sees what it must predict."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from trainer.config import Config, ConfigError
from trainer.inputs import LayerError, choose_layers
from trainer.kernels import plain
from trainer.model.attention import DenseAttention
from trainer.model.blocks import generator_for, lay_out
from trainer.model.drafter import Drafter, DrafterShape, FrozenEnds
from trainer.model.target import Target, decoder_layers, drafter_shape, load_target
from trainer.sections import TargetConfig

SHAPE = DrafterShape(
    hidden=64, captured=3, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96, rms_norm_eps=1e-6,
    rope_theta=10_000.0,
)  # fmt: skip
LENGTH, SIZE = 24, 4


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    module = Drafter(SHAPE)
    module.initialise(generator_for(5), std=0.1)
    return module


@pytest.fixture(scope="module")
def ends() -> FrozenEnds:
    table = torch.randn(400, 64, generator=generator_for(6)) * 0.1
    return FrozenEnds(embedding_VH=table, head_VH=table)


@pytest.fixture
def target(tiny_target: Path, settings: dict[str, Any]) -> Target:
    config = Config.model_validate(settings)
    return load_target(config.target, torch.device("cpu"))


def some_blocks(ids_BS: Tensor, anchors: list[int]) -> Any:
    anchors_BN = torch.tensor([anchors])
    return lay_out(
        ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), anchors_BN, torch.ones_like(anchors_BN, dtype=torch.bool),
        block_size=SIZE, mask_token_id=3, gamma=4.0,
    )  # fmt: skip


def test_state_dict_has_exactly_the_names_and_shapes_that_servers_load(drafter: Drafter) -> None:
    layer = {
        "input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,),
        "self_attn.q_proj.weight": (64, 64), "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64), "self_attn.o_proj.weight": (64, 64),
        "self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,),
        "mlp.gate_proj.weight": (96, 64), "mlp.up_proj.weight": (96, 64), "mlp.down_proj.weight": (64, 96),
    }  # fmt: skip
    expected = {"fc.weight": (64, 192), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    expected |= {f"layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()}
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == expected


def test_one_layer_equals_a_plain_loop_over_queries_and_keys(drafter: Drafter, ends: FrozenEnds) -> None:
    ids_BS = torch.randint(4, 400, (1, LENGTH), generator=generator_for(1))
    features = torch.randn(1, LENGTH, 192, generator=generator_for(2))
    anchors = [0, 5, 17]
    blocks = some_blocks(ids_BS, anchors)
    only = Drafter(DrafterShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "layers": 1}))
    only.load_state_dict({name: tensor for name, tensor in drafter.state_dict().items() if "layers.1." not in name})
    with torch.no_grad():
        got = only(features, blocks, ends, plain(DenseAttention()))[0]
        expected = reference(only.state_dict(), features[0], blocks, ends, anchors)
    assert torch.allclose(got, expected, atol=1e-4), (got - expected).abs().max()


def reference(w: dict[str, Tensor], features: Tensor, blocks: Any, ends: FrozenEnds, anchors: list[int]) -> Tensor:
    """One layer, written one query and one head at a time from the description of the method."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + SHAPE.rms_norm_eps) * weight

    def rope(x: Tensor, position: int) -> Tensor:
        half = SHAPE.head_dim // 2
        angles = torch.tensor([position / SHAPE.rope_theta ** (2 * i / SHAPE.head_dim) for i in range(half)])
        first, second = x[:half], x[half:]
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.cat(turned)

    p = "layers.0."
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = ends.embedding_VH[blocks.tokens_BT[0]]
    h = norm(x, w[p + "input_layernorm.weight"])
    positions = blocks.positions_BT[0].tolist()
    out = []
    for t, position in enumerate(positions):
        block = t // SIZE
        sources = [(context[s], s) for s in range(anchors[block])]
        sources += [(h[u], positions[u]) for u in range(block * SIZE, (block + 1) * SIZE)]
        heads = []
        for head in range(SHAPE.heads):
            def part(name: str, index: int) -> Tensor:
                return w[f"{p}self_attn.{name}.weight"][index * 16 : index * 16 + 16]

            query = rope(norm(part("q_proj", head) @ h[t], w[p + "self_attn.q_norm.weight"]), position)
            keys = [
                rope(norm(part("k_proj", head // 2) @ source, w[p + "self_attn.k_norm.weight"]), at)
                for source, at in sources
            ]
            values = torch.stack([part("v_proj", head // 2) @ source for source, _ in sources])
            scores = torch.softmax(torch.stack(keys) @ query / math.sqrt(16), dim=0)
            heads.append(scores @ values)
        out.append(w[p + "self_attn.o_proj.weight"] @ torch.cat(heads))
    x = x + torch.stack(out)
    m = norm(x, w[p + "post_attention_layernorm.weight"])
    gate = m @ w[p + "mlp.gate_proj.weight"].T
    x = x + (gate * torch.sigmoid(gate) * (m @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"])


def test_a_block_depends_on_every_feature_before_its_anchor_and_on_none_from_it_on(drafter: Drafter, ends: FrozenEnds
                                                                                   ) -> None:  # fmt: skip
    ids_BS = torch.randint(4, 400, (1, LENGTH), generator=generator_for(1))
    features = torch.randn(1, LENGTH, 192, generator=generator_for(2)).requires_grad_()
    anchors = [1, 6, 7, 20]
    slots = drafter(features, some_blocks(ids_BS, anchors), ends, plain(DenseAttention()))
    for block, anchor in enumerate(anchors):
        part = slots[0, block * SIZE : (block + 1) * SIZE].square().sum()
        (gradient,) = torch.autograd.grad(part, features, retain_graph=True)
        reach = gradient[0].abs().sum(dim=-1)
        assert (reach[:anchor] > 0).all()
        assert (reach[anchor:] == 0).all()


def test_changing_text_after_an_anchor_changes_no_logit_of_its_block(drafter: Drafter, target: Target) -> None:
    ids_BS = torch.randint(4, 400, (1, LENGTH), generator=generator_for(1))
    anchors = [2, 6, 11, 18]
    cpu = target.ends.to(torch.device("cpu"), torch.float32)

    def logits(ids: Tensor) -> Tensor:
        with torch.no_grad():
            kernels = plain(DenseAttention())
            return drafter(target.features(ids), some_blocks(ids, anchors), cpu, kernels) @ cpu.head_VH.T

    before = logits(ids_BS)
    for block, anchor in enumerate(anchors):
        changed = ids_BS.clone()
        changed[0, anchor + 1 :] = (changed[0, anchor + 1 :] + 7) % 390 + 4
        after = logits(changed)
        own = slice(block * SIZE, (block + 1) * SIZE)
        assert torch.allclose(before[:, own], after[:, own], atol=1e-5)
        later = slice((block + 1) * SIZE, None)
        assert block == len(anchors) - 1 or not torch.allclose(before[:, later], after[:, later], atol=1e-2)


def test_a_fresh_drafter_draws_nothing_but_its_weights_and_a_copy_of_it_is_another_one() -> None:
    torch.manual_seed(0)
    one, state = Drafter.fresh(SHAPE, generator_for("weights")), torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())
    expected = Drafter(SHAPE)
    expected.initialise(generator_for("weights"))
    assert one.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(one.state_dict()[name], weight) for name, weight in expected.state_dict().items())
    other = copy.deepcopy(one)
    other.load_state_dict({name: weight + 1 for name, weight in one.state_dict().items()})
    assert all(torch.equal(one.state_dict()[name], weight) for name, weight in expected.state_dict().items())
    assert torch.equal(other.state_dict()["norm.weight"], torch.full_like(expected.norm.weight, 2.0))


def test_captured_features_are_the_hidden_states_one_past_the_layer_id(target: Target) -> None:
    ids_BS = torch.randint(4, 400, (2, LENGTH), generator=generator_for(1))
    with torch.no_grad():
        states = target.model(input_ids=ids_BS, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer_id + 1] for layer_id in target.layer_ids], dim=-1)
    assert target.layer_ids == [1, 2, 3]
    assert torch.equal(target.features(ids_BS), expected)


def test_layers_past_the_last_captured_one_are_not_run_for_features(target: Target) -> None:
    ran: list[int] = []
    for number, layer in enumerate(decoder_layers(target.model)):
        layer.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    ids_BS = torch.randint(4, 400, (2, LENGTH), generator=generator_for(1))
    features_BSF = target.features(ids_BS)
    assert ran == [0, 1, 2, 3]
    with torch.no_grad():
        hidden_BSH, beside_BSF = target.run({"input_ids": ids_BS})
        assert torch.equal(hidden_BSH, target.model.base_model(ids_BS, use_cache=False)[0])
    assert ran[4:] == [0, 1, 2, 3, 4, 5] * 2 and torch.equal(beside_BSF, features_BSF)


def test_a_target_that_counts_on_all_its_layers_is_run_whole(target: Target) -> None:
    def count_on_six(model: Any, _inputs: Any) -> None:
        assert len(model.layers) == 6

    base = target.model.base_model
    base.register_forward_pre_hook(count_on_six)
    again = Target(target.model, None, layer_ids=[1, 2], device=target.device, files={})
    assert (again.trunk, again.depth) == (base, 6)
    assert again.features(torch.arange(8)[None]).shape == (1, 8, 128)


def test_the_last_layer_is_captured_before_the_final_norm(tiny_target: Path) -> None:
    target = load_target(TargetConfig(path=str(tiny_target), dtype="float32", layer_ids=[5]), torch.device("cpu"))
    ids_BS = torch.randint(4, 400, (2, LENGTH), generator=generator_for(1))
    with torch.no_grad():
        normed = target.model(input_ids=ids_BS, output_hidden_states=True).hidden_states[6]
        assert torch.equal(target.model.model.norm(target.features(ids_BS)), normed)
    assert not torch.allclose(target.features(ids_BS), normed, atol=1e-2)


SIZES = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def a_model(family: str, options: dict[str, Any], tiny_target: Path, directory: Path) -> TargetConfig:
    shutil.copytree(tiny_target, directory)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model: Any = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")
    model(config).save_pretrained(directory)
    return TargetConfig(path=str(directory), dtype="float32", layer_ids=[1])


@pytest.mark.parametrize(
    ("family", "options", "refusal"),
    [
        ("Granite", {"embedding_multiplier": 12.0}, "multiplies its embedding by 12,"),
        ("Granite", {"logits_scaling": 8.0}, "multiplies its logits by 0.125,"),
        ("Cohere", {"logit_scale": 0.0625}, "multiplies its logits by 0.0625,"),
        ("Gemma", {"head_dim": 16}, "no plain embedding|multiplies its embedding"),
    ],
)
def test_a_target_that_scales_its_ends_is_refused(tiny_target: Path, tmp_path: Path, family: str,
                                                  options: dict[str, Any], refusal: str) -> None:  # fmt: skip
    config = a_model(family, options, tiny_target, tmp_path / "model")
    with pytest.raises(ConfigError, match=refusal):
        load_target(config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "options"),
    [("Granite", {"residual_multiplier": 0.22}), ("Cohere", {"logit_scale": 1.0}), ("GPT2", {})],
)
def test_a_target_whose_ends_are_plain_is_accepted(tiny_target: Path, tmp_path: Path, family: str,
                                                   options: dict[str, Any]) -> None:  # fmt: skip
    target = load_target(a_model(family, options, tiny_target, tmp_path / "model"), torch.device("cpu"))
    assert target.depth == 2 and target.features(torch.arange(8)[None]).shape == (1, 8, 32)


@pytest.mark.parametrize(
    ("count", "captured", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (30, 5, [1, 8, 14, 20, 27]), (30, 1, [15]), (6, 3, [1, 2, 3])],
)
def test_layers_are_spread_from_the_second_to_the_third_last(count: int, captured: int, expected: list[int]) -> None:
    assert choose_layers(None, captured, count=count) == expected


def test_layer_ids_that_do_not_exist_are_refused() -> None:
    with pytest.raises(LayerError, match=r"must rise, from 0 to 5 at most; is \[1, 6\]"):
        choose_layers([1, 6], 5, count=6)


@pytest.mark.parametrize("token", [0, 2, 400])
def test_the_mask_token_is_never_pad_or_end_or_outside_the_vocabulary(target: Target, settings: dict[str, Any],
                                                                      token: int) -> None:  # fmt: skip
    settings["drafter"]["mask_token_id"] = token
    with pytest.raises(ConfigError, match=r"drafter\.mask_token_id"):
        drafter_shape(target, Config.model_validate(settings).drafter)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 7}, r"lacks 9 of the weights that its config\.json asks for: model\.layers\.6\."),
        ({"model_type": "gpt2"}, r"lacks \d+ of the weights that its config\.json asks for: lm_head\.weight, trans"),
        ({"vocab_size": 10}, r"its weights are of other sizes than its config\.json says"),
    ],
)
def test_a_target_whose_weights_are_not_those_of_its_configuration_is_refused_and_not_filled_up_at_random(
    tiny_target: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    shutil.copytree(tiny_target, tmp_path / "target")
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **change}))
    with pytest.raises(ConfigError, match=rf"^target\.path: .*{said}"):
        load_target(TargetConfig(path=str(tmp_path / "target"), captured_layers=3), torch.device("cpu"))

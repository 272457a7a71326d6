"""Exports in other people's hands: what they load by their own code drafts, to the token, what the trainer drafts.

z-lab's package `dflash`, which defined the format, the package `speculators`, and transformers' own DFlash decoding.
SGLang and vLLM need a GPU; what they read is in docs/export.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.export import loading, package
from trainer.export.gate import Replay
from trainer.export.package import Package


@pytest.fixture(scope="module")
def served(tiny_target: Path) -> Any:
    """The target, as anybody loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture
def exported(made: Package, tmp_path: Path) -> Path:
    made.write(tmp_path, gate=None)
    return tmp_path


def greedily(served: Any, ids_S: Tensor, *, count: int) -> list[int]:
    prompt = ids_S[None]
    out = served.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count)
    found: list[int] = out[0].tolist()
    return found


@torch.no_grad()
def test_z_labs_own_package_loads_it_and_drafts_the_same(exported: Path, replay: Replay, served: Any) -> None:
    from dflash import DFlashDraftModel, extract_context_feature

    model, told = DFlashDraftModel.from_pretrained(exported, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert (model.block_size, model.mask_token_id, model.target_layer_ids) == (4, 3, [1, 2, 3])
    drafted = []
    for ids_S, anchors in replay.texts:
        states = served(ids_S[None], output_hidden_states=True).hidden_states
        features_BSF = extract_context_feature(states, model.target_layer_ids)
        for anchor in anchors:
            block = torch.tensor([[int(ids_S[anchor]), 3, 3, 3]])
            hidden_BKH = model(
                target_hidden=features_BSF[:, :anchor], noise_embedding=served.get_input_embeddings()(block),
                position_ids=torch.arange(anchor + 4)[None],
            )  # fmt: skip
            drafted.append(served.lm_head(hidden_BKH[0, 1:]).argmax(dim=-1))
    assert torch.equal(torch.stack(drafted), replay.drafted.tokens_Nk)


def test_what_z_labs_own_package_saves_is_read_as_what_it_was(made: Package, exported: Path, tmp_path: Path) -> None:
    """As drafters are published: in shards, with the fields that transformers writes, and no contract."""
    from dflash import DFlashDraftModel

    DFlashDraftModel.from_pretrained(exported).save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    found = loading.read(tmp_path / "saved")
    assert len(found.files()) > 1 and found.contract is None
    assert (found.layout, found.shape, str(found)) == (made.layout, made.source.shape, "z-lab's form, float32")
    tensors = found.tensors()
    assert tensors.keys() == made.tensors.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in made.tensors.items())


def test_z_labs_own_package_decodes_with_it_what_the_target_writes_in_fewer_passes(exported: Path, replay: Replay,
                                                                                   served: Any) -> None:  # fmt: skip
    from dflash import DFlashDraftModel

    model = DFlashDraftModel.from_pretrained(exported).eval()
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    ids_S, anchors = replay.texts[0]
    prompt_S = ids_S[: anchors[0]]
    out = model.spec_generate(served, prompt_S[None], max_new_tokens=20, stop_token_ids=None, temperature=0.0)
    handle.remove()
    assert out[0].tolist() == ids_S[: anchors[0] + 20].tolist()
    assert len(passes) < 10, "it would be 19 if no slot were ever kept"


def test_transformers_own_dflash_decoding_takes_the_tensors(exported: Path, replay: Replay, served: Any) -> None:
    """It knows the architecture by another name, and calls two of the tensors otherwise."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = json.loads((exported / "config.json").read_bytes())
    known = {
        key: config[key] for key in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types", "hidden_act",
        )
    }  # fmt: skip
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**known, **config["dflash_config"])).eval()
    other = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = load_file(exported / "model.safetensors")
    model.load_state_dict({other.get(name, name): tensor for name, tensor in tensors.items()})
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    ids_S, anchors = replay.texts[0]
    prompt = ids_S[None, : anchors[0]]
    out = served.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, eos_token_id=None,
        assistant_model=model, speculation_type="dflash",
    )  # fmt: skip
    handle.remove()
    assert out[0].tolist() == ids_S[: anchors[0] + 20].tolist()
    assert 0 < len(passes) < 10


@torch.no_grad()
def test_speculators_loads_its_format_and_drafts_the_same(made: Package, tiny_target: Path, tmp_path: Path,
                                                          replay: Replay, served: Any) -> None:  # fmt: skip
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    other = package.package(made.source, format="speculators", dtype="float32", target_name=str(tiny_target))
    other.write(tmp_path, gate=None)
    config = DFlashSpeculatorConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    model, told = DFlashDraftModel.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    model.eval().load_verifier_weights()
    drafted = []
    for ids_S, anchors in replay.texts:
        states = served(ids_S[None], output_hidden_states=True).hidden_states
        # Its ids count as `hidden_states` does.
        features_BSF = torch.cat([states[number] for number in model.target_layer_ids], dim=-1)
        eligible_BS = torch.zeros(1, len(ids_S))
        eligible_BS[0, anchors] = 1  # all of which it takes
        _, logits_BTV, *_ = model._backbone_forward(
            features_BSF, ids_S[None], eligible_BS, states[-1], torch.zeros(1, len(ids_S), dtype=torch.long),
            max_anchors=len(anchors),
        )  # fmt: skip
        drafted.append(logits_BTV[0].argmax(dim=-1).view(len(anchors), -1)[:, 1:])
    assert torch.equal(torch.cat(drafted), replay.drafted.tokens_Nk)
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 3

"""The doctor finds nothing wrong with what is right, and names every mistake that is planted."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import trainer.feed
import trainer.model.attention
import trainer.model.target
from tests.trainer.support import documents, write_config
from trainer.__main__ import main
from trainer.config import Config
from trainer.doctor import examine, leak
from trainer.doctor.checkup import Finding, Patient, Quiet
from trainer.model import blocks as right
from trainer.model.attention import DenseAttention
from trainer.model.blocks import Blocks
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.replica import Replica
from trainer.report.reporter import RunIdentity

Plant = Callable[[pytest.MonkeyPatch], None]
READY = ["target", "data", "drafters"]


@pytest.fixture
def packed(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Several documents in a row, two buckets, and more blocks than some rows have anchors for."""
    settings["data"] |= {"paths": documents(tmp_path), "sequence_length": 64, "buckets": [48, 64], "packing": True}
    return settings


def examined(settings: dict[str, Any], *names: str, quick: bool = False) -> dict[str, Finding]:
    """What those checks find, and the ones that get ready what they need."""
    identity = RunIdentity(directory=Path(settings["output_dir"]), run_id="doctor")
    patient = Patient(config=Config.model_validate(settings), reporter=Quiet(identity), quick=quick)
    wanted = [*READY, *names]
    assert set(wanted) <= {check.name for check in examine.CHECKS}
    return {check.name: examine.look(check, patient) for check in examine.CHECKS if check.name in wanted}


def test_a_right_run_has_nothing_wrong_with_it_packed_or_not_in_any_bucket(
    settings: dict[str, Any], packed: dict[str, Any]
) -> None:
    plain = {**settings, "data": {"kind": "text", "paths": settings["data"]["paths"], "sequence_length": 48}}
    for one, quick in ((packed, False), (plain, True)):
        found = examined(one, *(check.name for check in examine.CHECKS), quick=quick)
        wrong = {name: finding.evidence for name, finding in found.items() if finding.status in ("fail", "skip")}
        assert wrong == {}
        assert ("FlexAttention" in found["leak: hidden states"].evidence) == (not quick)


# --- leaks that are planted -----------------------------------------------------------------------------------------


def visibility_of(visible: Callable[..., Tensor]) -> Plant:
    """A mask function of (blocks, context length, row, query, key), instead of the right one."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def visibility(blocks: Blocks, length: int) -> Any:
            return lambda row, head, query, key: visible(blocks, length, row, query, key)

        monkeypatch.setattr(trainer.model.attention, "visibility", visibility)

    return plant


def own(blocks: Blocks, length: int, query: Tensor, key: Tensor) -> Tensor:
    return (key >= length) & ((key - length) // blocks.block_size == query // blocks.block_size)


def sees_its_anchor(blocks: Blocks, length: int, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    block = query // blocks.block_size
    before = (key >= blocks.starts_BN[row, block]) & (key <= blocks.anchors_BN[row, block])
    return ((key < length) & before & blocks.valid_BN[row, block]) | own(blocks, length, query, key)


def sees_by_the_blocks_index(blocks: Blocks, length: int, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    index = query // blocks.block_size
    inside = (key >= blocks.starts_BN[row, index]) & blocks.valid_BN[row, index]
    return ((key < length) & inside & (key < (index + 1) * blocks.block_size)) | own(blocks, length, query, key)


def sees_other_documents(blocks: Blocks, length: int, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    block = query // blocks.block_size
    before = (key < blocks.anchors_BN[row, block]) & blocks.valid_BN[row, block]
    return ((key < length) & before) | own(blocks, length, query, key)


def padding_sees_context(blocks: Blocks, length: int, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    block = query // blocks.block_size
    before = (key >= blocks.starts_BN[row, block]) & (key < blocks.anchors_BN[row, block])
    return ((key < length) & (before | ~blocks.valid_BN[row, block])) | own(blocks, length, query, key)


def sees_the_blocks_before(blocks: Blocks, length: int, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    block = query // blocks.block_size
    before = (key >= blocks.starts_BN[row, block]) & (key < blocks.anchors_BN[row, block])
    context = (key < length) & before & blocks.valid_BN[row, block]
    return context | ((key >= length) & ((key - length) // blocks.block_size <= block))


def is_causal_in_the_block(blocks: Blocks, length: int, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    block = query // blocks.block_size
    before = (key >= blocks.starts_BN[row, block]) & (key < blocks.anchors_BN[row, block])
    context = (key < length) & before & blocks.valid_BN[row, block]
    return context | (own(blocks, length, query, key) & (key - length <= query))


def sees_all_but_the_last(blocks: Blocks, length: int, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    block = query // blocks.block_size
    before = (key >= blocks.starts_BN[row, block]) & (key < blocks.anchors_BN[row, block] - 1)
    return ((key < length) & before & blocks.valid_BN[row, block]) | own(blocks, length, query, key)


@pytest.mark.parametrize(
    ("visible", "what"),
    [
        (sees_its_anchor, leak.OWN_ANCHOR),
        (sees_by_the_blocks_index, leak.LATER),
        (sees_other_documents, leak.OTHER_DOCUMENT),
        (padding_sees_context, leak.PADDING),
        (sees_the_blocks_before, leak.OTHER_BLOCK),
        (is_causal_in_the_block, leak.APART),
        (sees_all_but_the_last, leak.BLIND),
    ],
)
def test_a_wrong_mask_is_named_by_what_it_lets_a_block_see(
    packed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, visible: Callable[..., Tensor], what: str
) -> None:
    visibility_of(visible)(monkeypatch)
    found = examined(packed, "leak: hidden states", "as served", "anchors and blocks", quick=True)
    assert found["leak: hidden states"].status == "fail" and what in found["leak: hidden states"].evidence
    assert what in found["leak: hidden states"].facts["leaks"]
    assert found["anchors and blocks"].status == "ok", "it is the mask alone that is wrong"
    # What padding sees harms nobody, and is no draft.
    assert found["as served"].status == ("ok" if visible is padding_sees_context else "fail")


def test_a_mask_that_is_wrong_in_flexattention_alone_is_found_without_a_gpu(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = DenseAttention.mask
    wrong = trainer.model.attention.visibility
    visibility_of(sees_its_anchor)(monkeypatch)

    def as_it_should_be(self: DenseAttention, blocks: Blocks, length: int) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(trainer.model.attention, "visibility", wrong)
            return dense(self, blocks, length)

    monkeypatch.setattr(DenseAttention, "mask", as_it_should_be)
    found = examined(settings, "leak: hidden states")["leak: hidden states"]
    assert found.status == "fail" and leak.OWN_ANCHOR in found.evidence
    assert all("gradient" not in where for where in found.facts["leaks"][leak.OWN_ANCHOR])


def replaced(change: Callable[[Blocks, Tensor], dict[str, Tensor]]) -> Plant:
    """Other tensors in the blocks that are laid out, from them and the ids [B, S]."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def lay_out(ids_BS: Tensor, *positional: Any, **named: Any) -> Blocks:
            blocks = right.lay_out(ids_BS, *positional, **named)
            return dataclasses.replace(blocks, **change(blocks, ids_BS))

        monkeypatch.setattr(trainer.feed, "lay_out", lay_out)

    return plant


def the_text_itself(blocks: Blocks, ids_BS: Tensor) -> dict[str, Tensor]:
    where = (blocks.anchors_BN[..., None] + torch.arange(blocks.block_size)).flatten(1).clamp(max=ids_BS.shape[1] - 1)
    return {"tokens_BT": ids_BS.gather(1, where)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda blocks, _: {"positions_BT": blocks.positions_BT + 1}, "stands at positions"),
        (lambda blocks, _: {"positions_BS": blocks.positions_BS + 1}, "do not count from its document's start"),
        (lambda blocks, _: {"labels_BNk": blocks.labels_BNk.roll(1, dims=2)}, "is to predict another token"),
        (lambda blocks, _: {"weights_BNk": torch.ones_like(blocks.weights_BNk)}, "is trained on"),
        (lambda blocks, _: {"weights_BNk": blocks.weights_BNk.sqrt()}, "instead of"),
        (the_text_itself, "does not hold its anchor's token and then mask tokens"),
    ],
)
def test_blocks_that_are_laid_out_wrongly_are_named(
    packed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    replaced(change)(monkeypatch)
    found = examined(packed, "anchors and blocks", "as served", quick=True)
    assert found["anchors and blocks"].status == "fail" and any(
        said in one for one in found["anchors and blocks"].facts["broken"]
    )
    seen = {"positions_BT", "positions_BS", "tokens_BT"} & change(*a_block()).keys()
    assert (found["as served"].status == "fail") == bool(seen), "a server would not do so"


def a_block() -> tuple[Blocks, Tensor]:
    ids_BS = torch.arange(12)[None]
    anchors_BN = torch.tensor([[2, 5]])
    mask_BS, valid_BN = torch.ones_like(ids_BS).bool(), torch.ones_like(anchors_BN).bool()
    return right.lay_out(ids_BS, mask_BS, anchors_BN, valid_BN, block_size=4, mask_token_id=3, gamma=2.0), ids_BS


def unsorted(mask_S: Tensor, count: int, generator: Any, *, starts_S: Tensor) -> tuple[Tensor, Tensor]:
    anchors, valid = right.pick_anchors(mask_S, count, generator, starts_S=starts_S)
    end = int(valid.sum())
    return torch.cat((anchors[:end].flip(0), anchors[end:])), valid


def next_not_trained_on(mask_S: Tensor, count: int, generator: Any, *, starts_S: Tensor) -> tuple[Tensor, Tensor]:
    # As if the position behind each that is trained on were so too.
    return right.pick_anchors(mask_S | mask_S.roll(1), count, generator, starts_S=starts_S)


def across_documents(mask_S: Tensor, count: int, generator: Any, *, starts_S: Tensor) -> tuple[Tensor, Tensor]:
    return right.pick_anchors(mask_S, count, generator)


def twice(mask_S: Tensor, count: int, generator: Any, *, starts_S: Tensor) -> tuple[Tensor, Tensor]:
    anchors, valid = right.pick_anchors(mask_S, count, generator, starts_S=starts_S)
    return torch.where(valid, anchors[torch.arange(count) // 2 * 2], anchors), valid


@pytest.mark.parametrize(
    ("pick", "said"),
    [
        (unsorted, "anchors are not sorted"), (twice, "an anchor is drawn twice"),
        (next_not_trained_on, "or the token after it is not trained on"),
        (across_documents, "or not of its document"),
    ],
)  # fmt: skip
def test_anchors_that_break_a_rule_are_named(packed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, pick: Any,
                                             said: str) -> None:  # fmt: skip
    packed["drafter"]["anchors"] = 40
    monkeypatch.setattr(trainer.feed, "pick_anchors", pick)
    found = examined(packed, "anchors and blocks")["anchors and blocks"]
    assert found.status == "fail" and any(said in one for one in found.facts["broken"])


# --- what is taken from the target ----------------------------------------------------------------------------------


def test_features_of_the_layer_before_are_named(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(self: Target, layer_id: int) -> Any:
        def capture(_layer: Any, inputs: Any, _output: Any) -> None:
            self._captured.outputs[layer_id] = inputs[0]

        return capture

    monkeypatch.setattr(Target, "_hook", hook)
    found = examined(settings, "layer ids")["layer ids"]
    assert found.status == "fail"
    assert "what is captured as layer 1 is hidden_states[1], not hidden_states[2]" in found.evidence


def test_the_last_layer_is_warned_about(settings: dict[str, Any]) -> None:
    settings["target"]["layer_ids"] = [1, 5]
    assert examined(settings, "layer ids")["layer ids"].status == "warn"


def test_a_target_that_looks_ahead_is_found_by_its_text(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks_ahead(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    def plant(model: Any) -> bool:
        transformers.AttentionInterface.register("looks-ahead", looks_ahead)
        model.set_attn_implementation("looks-ahead")
        return True

    monkeypatch.setattr(trainer.model.target, "without_masks", plant)
    found = examined(settings, "target's attention", "leak: text")
    assert found["leak: text"].status == "fail" and found["target's attention"].status == "fail"
    monkeypatch.setattr(leak, "text_alone_differs", lambda *_: 0.0)
    assert leak.LATER_TEXT in examined(settings, "leak: text")["leak: text"].evidence


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}}, "rope_type is 'llama3'"),
        ({"rope_parameters": {"full": {"rope_theta": 1e6}, "sliding": {"rope_theta": 1e4}}}, "in several ways (full"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "rotates 50%"),
    ],
)
def test_a_rotation_that_the_drafter_does_not_have_is_named_with_what_a_server_has_to_know(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    original = trainer.model.target.Target.__init__

    def changed(self: Target, model: Any, *positional: Any, **named: Any) -> None:
        original(self, model, *positional, **named)
        for name, value in change.items():
            setattr(model.config, name, value)

    monkeypatch.setattr(trainer.model.target.Target, "__init__", changed)
    found = examined(settings, "rotation")["rotation"]
    assert found.status == "warn" and said in found.evidence and "rope_type default" in found.advice


def test_a_rotation_of_another_base_or_pairing_is_named(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Drafter.rope

    def pairs_neighbours(self: Drafter, positions_BL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return tuple(
            part.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for part in original(self, positions_BL, dtype)
        )

    monkeypatch.setattr(Drafter, "rope", pairs_neighbours)
    assert examined(settings, "rotation")["rotation"].status == "fail"
    monkeypatch.setattr(Drafter, "rope", lambda self, at, dtype: original(self, at + 1, dtype))
    found = examined(settings, "rotation")["rotation"]
    assert found.status == "fail" and "off the target's own rotation" in found.evidence


@pytest.mark.parametrize(
    ("token", "check", "said"),
    [(0, "mask token", "not its pad, begin or end token"), (400, "mask token", "must be a spare row"),
     (1, "mask token", "not its pad, begin or end token|the chat template writes it"),
     (36, "data", "occurs in the data")],
)  # fmt: skip
def test_a_mask_token_that_is_not_spare_is_named(settings: dict[str, Any], token: int, check: str, said: str) -> None:
    settings["drafter"]["mask_token_id"] = token
    found = examined(settings, "mask token")[check]
    assert found.status == "fail" and any(part in found.evidence for part in said.split("|")), found.evidence
    assert not found.evidence.startswith(f"{check}: ")


def test_a_mask_token_that_is_ordinary_text_is_warned_of_with_one_to_take_instead(settings: dict[str, Any]) -> None:
    from trainer.model.target import load_tokenizer

    tokenizer = load_tokenizer(Path(settings["target"]["path"]))
    settings["data"]["kind"] = "conversations"
    for text in ("~", "\f"):
        (settings["drafter"]["mask_token_id"],) = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = examined(settings, "mask token")["mask token"]
        assert found.status == "warn" and "it is ordinary text" in found.evidence
        assert found.advice == "choose a spare row of the vocabulary, such as 3 (<|mask|>)"


# --- data, tokenizer and machine ------------------------------------------------------------------------------------


def changed_target(tiny_target: Path, directory: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> str:
    """A copy of the target with something else in one of its files."""
    shutil.copytree(tiny_target, copy := directory / "changed-target")
    found = json.loads((copy / file).read_text())
    change(found)
    (copy / file).write_text(json.dumps(found))
    return str(copy)


def test_a_tokenizer_that_does_not_give_back_what_it_was_given_is_warned_about(
    settings: dict[str, Any], tiny_target: Path, tmp_path: Path
) -> None:
    assert examined(settings, "tokenizer")["tokenizer"].status == "ok"
    settings["target"]["path"] = changed_target(
        tiny_target, tmp_path, "tokenizer.json", lambda file: file.update(normalizer={"type": "Lowercase"})
    )
    found = examined(settings, "tokenizer")["tokenizer"]
    assert found.status == "warn" and "; of 'Two  spaces,' it gives back 'two  spaces,'" in found.evidence


def test_a_tokenizer_of_more_tokens_than_the_target_has_rows_is_warned_about(
    settings: dict[str, Any], tiny_target: Path, tmp_path: Path
) -> None:
    def add(file: dict[str, Any]) -> None:
        file["added_tokens"].append({**file["added_tokens"][0], "id": 400, "content": "<|more|>"})

    settings["target"]["path"] = changed_target(tiny_target, tmp_path, "tokenizer.json", add)
    found = examined(settings, "tokenizer")["tokenizer"]
    assert found.status == "warn" and "401 tokens, embedding of 400 rows" in found.evidence


@pytest.mark.parametrize(
    ("template", "said"),
    [("{{ messages[0].content }}{{ messages[1].content }}", "does not end with '<|end|>'"),
     ("{{ raise_exception('no') }}", "it does not render a question and its answer: no")],
)  # fmt: skip
def test_a_chat_template_that_ends_no_turn_or_does_not_render_is_warned_about(
    settings: dict[str, Any], tiny_target: Path, tmp_path: Path, template: str, said: str
) -> None:
    settings["target"]["path"] = changed_target(tiny_target, tmp_path, "config.json", lambda file: None)
    (tmp_path / "changed-target" / "chat_template.jinja").write_text(template)
    found = examined(settings, "chat template")["chat template"]
    assert found.status == "warn" and said in found.evidence


def test_blocks_that_are_mostly_padding_and_more_threads_than_cores_are_warned_about(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    lines = [json.dumps({"text": f"It is {number}."}) for number in range(40)]
    (tmp_path / "short.jsonl").write_text("\n".join(lines))
    settings["data"]["paths"] = [str(tmp_path / "short.jsonl")]
    settings["drafter"]["anchors"] = 40
    settings["cpu_threads"] = {"drafter": 1000}
    found = examined(settings, "anchors in the data", "machine")
    padding = found["anchors in the data"]
    assert padding.status == "warn" and padding.evidence.startswith("100% of the rows have fewer than 40; ")
    assert padding.facts["padding"] > 0.5
    assert found["machine"].status == "warn" and "; 2001 threads compute" in found["machine"].evidence


@pytest.mark.parametrize(("checkpoints", "status"), [(0.5, "fail"), (2.5, "warn"), (4.5, "ok")])
def test_a_disk_without_room_for_the_checkpoints_that_are_kept_is_told(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, checkpoints: float, status: str
) -> None:
    size = examined(settings, "disk")["disk"].facts["checkpoint_bytes"]
    usage = shutil.disk_usage(settings["data"]["paths"][0])._replace(free=int(checkpoints * size))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert examined(settings, "disk")["disk"].status == status


# --- a step ---------------------------------------------------------------------------------------------------------


def test_a_backward_that_fails_after_a_good_forward_is_found_before_the_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("InductorError: no such kernel")

    original = Drafter.forward
    monkeypatch.setattr(Drafter, "forward", lambda *arguments: Fails.apply(original(*arguments)))
    found = examined(settings, "step", "first loss")
    assert found["first loss"].status == "ok", "the forward is fine"
    assert found["step"].status == "fail" and "InductorError: no such kernel" in found["step"].evidence
    assert "in backward" in found["step"].facts["traceback"]


def test_weights_that_no_gradient_reaches_are_named(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = Drafter.forward

    def cut_off(self: Drafter, features_BSF: Tensor, *rest: Any) -> Tensor:
        handle = self.hidden_norm.register_forward_hook(lambda _module, _inputs, out: out + 0 * out.detach())
        detached = self.fc.register_forward_hook(lambda _module, _inputs, out: out * 0)
        try:
            return original(self, features_BSF, *rest)
        finally:
            handle.remove()
            detached.remove()

    monkeypatch.setattr(Drafter, "forward", cut_off)
    found = examined(settings, "step")["step"]
    assert found.status == "fail" and "no gradient reaches hidden_norm.weight, fc.weight" in found.evidence


def test_kernels_whose_backward_computes_something_else_are_named(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    settings["compile_on_cpu"] = "aot_eager"
    assert examined(settings, "kernels")["kernels"].status == "ok"
    original = Replica.loss_and_gradients

    def wrong(self: Replica, batch: Any) -> None:
        original(self, batch)
        self.flat.named(self.flat.gradients)["layers.1.mlp.down_proj.weight"].mul_(1.5)

    monkeypatch.setattr(Replica, "loss_and_gradients", wrong)
    found = examined(settings, "kernels")["kernels"]
    assert found.status == "fail" and "50.00% at most" in found.evidence
    assert "(layers.1.mlp.down_proj.weight)" in found.evidence


def test_a_step_that_is_not_repeated_to_the_bit_is_named(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Drafter.forward
    monkeypatch.setattr(Drafter, "forward", lambda *arguments: original(*arguments) * (1 + torch.rand(()) / 100))
    assert examined(settings, "determinism")["determinism"].status == "fail"


def test_a_fresh_drafter_that_knows_too_much_is_named(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Drafter.forward

    def knows(self: Drafter, features_BSF: Tensor, blocks: Blocks, ends: Any, kernels: Any) -> Tensor:
        slots = original(self, features_BSF, blocks, ends, kernels).unflatten(1, (blocks.anchors_BN.shape[1], -1))
        told = torch.nn.functional.embedding(blocks.labels_BNk, ends.head_VH) * 100
        return torch.cat((slots[:, :, :1], slots[:, :, 1:] + told), dim=2).flatten(1, 2)

    monkeypatch.setattr(Drafter, "forward", knows)
    found = examined(settings, "first loss")["first loss"]
    assert found.status == "fail" and "far too good" in found.evidence


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_found_and_its_exit_code_whether_all_is_well(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = str(write_config(settings, tmp_path / "config.yaml"))
    assert main(["doctor", config, "--quick"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split(maxsplit=1)[1] for line in out if line.startswith(("ok", "warn"))] == [
        check.name.split(":")[0] for check in examine.CHECKS
    ]
    assert out[-1].startswith("doctor: ") and not (tmp_path / "out").exists(), "and leaves nothing behind"
    visibility_of(sees_its_anchor)(monkeypatch)
    assert main(["doctor", config, "--quick", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and report["counts"]["fail"] == 2
    (wrong,) = [check for check in report["checks"] if check["name"] == "leak: hidden states"]
    assert wrong["status"] == "fail" and wrong["advice"] and wrong["seconds"] >= 0
    write_config({**settings, "target": {"path": "/nowhere"}}, Path(config))
    assert main(["doctor", config]) == 2
    assert capsys.readouterr().err.startswith("trainer: target.path: no Hugging Face model in /nowhere")
    write_config({**settings, "devices": {"target": ["cuda:99"], "drafter": ["cpu"]}}, Path(config))
    assert main(["doctor", config]) == 2
    assert capsys.readouterr().err.startswith("trainer: devices: cuda:99 is not here")

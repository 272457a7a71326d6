"""The doctor on the target and what is taken from it: mask token, captured layers, rotation, ends, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.config import expand_path
from trainer.doctor.checkup import Check, Finding, Missing, Patient, fail, ok, warn
from trainer.doctor.leak import ALIKE
from trainer.inputs import spare_rows
from trainer.model.drafter import Drafter
from trainer.model.target import drafter_shape

PROBE_TOKENS = 128


def probe(patient: Patient) -> Tensor:
    """Some tokens [1, S] to run the target on: of the data, if there is any."""
    try:
        rows = patient.rows
    except Missing:
        return torch.arange(PROBE_TOKENS)[None] % patient.target.ends.embedding_VH.shape[0]
    length = min(PROBE_TOKENS, int(rows.lengths_R[0]))
    return rows.cut(torch.zeros(1, dtype=torch.long), length)[0]


def relative(one: Tensor, other: Tensor) -> float:
    """How far apart, by the size of `other`."""
    return float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-30))


def mask_token(patient: Patient) -> Finding:
    config, target = patient.config, patient.target
    drafter_shape(target, config.drafter)  # refuses a token that is outside of the vocabulary, pad, begin or end
    mask, tokenizer = config.drafter.mask_token_id, target.tokenizer
    name = tokenizer.convert_ids_to_tokens(mask) if mask < len(tokenizer) else None
    norms = target.ends.embedding_VH.float().norm(dim=-1)
    norm, median = float(norms[mask]), float(norms.median())
    below = float((norms < norm).float().mean())
    said = f"{mask} ({name!r})" if name else f"{mask} (a row of the embedding without a token)"
    said += f"; its embedding's norm {norm:.3g} is above {below:.0%} of all rows', whose median is {median:.3g}"
    facts = {"norm": norm, "median_norm": median, "above": below}
    spare = advice(patient)
    if tokenizer.unk_token_id == mask:
        return fail(f"{said}; it stands for unknown text", spare, **facts)
    if tokenizer.chat_template and mask in rendered_chat(tokenizer)[1]:
        return fail(f"{said}; the chat template writes it", spare, **facts)
    if not torch.isfinite(norms[mask]) or norm > 10 * median:
        return fail(f"{said}: no embedding looks like that", spare, **facts)
    if norm == 0:
        return warn(f"{said}: an empty row", "a spare row that was initialised tells slots apart from nothing", **facts)
    ordinary = len(tokenizer.decode([mask], skip_special_tokens=True)) > 0 if name else False
    if ordinary and patient.config.data.kind == "conversations":
        return warn(f"{said}; it is ordinary text, which data may come to hold", spare, **facts)
    return ok(said, **facts)


def advice(patient: Patient) -> str:
    """Which row to take instead."""
    path = expand_path(patient.config.target.path, key="target.path")
    found = spare_rows(path, patient.target.ends.embedding_VH.shape[0])
    return f"choose a spare row of the vocabulary{f', such as {found}' if found else ''}"


def layer_ids(patient: Patient) -> Finding:
    target = patient.target
    ids_BS = probe(patient)
    features = target.features(ids_BS)
    with torch.no_grad():
        states = target.model(input_ids=ids_BS.to(target.device), output_hidden_states=True, use_cache=False)
    hidden = states.hidden_states
    count, alike = len(hidden) - 1, ALIKE[features.dtype]
    wrong = []
    for layer_id, captured in zip(target.layer_ids, features.chunk(len(target.layer_ids), dim=-1), strict=True):
        if layer_id == count - 1:
            continue  # there Hugging Face's entry has been through the final norm
        apart = [relative(captured, state) for state in hidden]
        nearest = min(range(len(apart)), key=apart.__getitem__)
        if apart[layer_id + 1] > alike:
            wrong.append(
                f"what is captured as layer {layer_id} is "
                + (f"hidden_states[{nearest}]" if apart[nearest] <= alike else "none of the target's hidden states")
                + f", not hidden_states[{layer_id + 1}]"
            )
    if wrong:
        return fail("; ".join(wrong), "the output of layer i is hidden_states[i + 1]: servers capture that one")
    said = f"{target.layer_ids} of {count}: each is hidden_states[id + 1]"
    if target.layer_ids[-1] == count - 1:
        return warn(f"{said}; the last layer's output is captured before the final norm",
                    "leave the last layer out, unless the server captures it before the norm as well")  # fmt: skip
    return ok(said, layer_ids=target.layer_ids, layers=count)


def rotation(patient: Patient) -> Finding:
    shape, target, config = patient.shape, patient.target, patient.config
    text = target.model.config.get_text_config()
    parameters: dict[str, Any] = dict(getattr(text, "rope_parameters", None) or {})
    parameters |= getattr(text, "rope_scaling", None) or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    modules = [module for name, module in target.model.named_modules() if hasattr(module, "inv_freq")]
    said = f"theta {shape.rope_theta:g} over the whole head of {shape.head_dim}"
    # The drafter's rotation is its own: it spoils no training, but a server that takes the target's instead does harm.
    served = f"its config.json for a server says rope_type default, rope_theta {shape.rope_theta:g}, and no more of it"
    if any(isinstance(value, dict) for value in parameters.values()):
        return warn(f"the target rotates its layers in several ways ({', '.join(parameters)}); the drafter has {said}",
                    served)  # fmt: skip
    if kind != "default":
        return warn(f"the target's rope_type is {kind!r}; the drafter has {said}, without scaling", served)
    partial = float(parameters.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0)
    if partial != 1.0:
        return warn(f"the target rotates {partial:.0%} of each head; the drafter has {said}", served)
    if not modules:
        return warn(f"{said}; {type(target.model).__name__} has no rotary embedding to compare with",
                    "its positions are of another kind: see that the server takes the drafter's own RoPE")  # fmt: skip
    drafter = Drafter.without_content(shape)
    last = config.data.sequence_length + config.drafter.block_size
    positions = torch.tensor([[0, 1, 2, 3, 17, last // 2, last - 1, last]])
    own = drafter.rope(positions, torch.float32)
    with torch.no_grad():
        given = torch.zeros(1, positions.shape[1], shape.hidden, device=target.device)
        theirs = modules[0](given, positions.to(target.device))
    if theirs[0].shape[-1] != shape.head_dim:
        if config.drafter.head_dim is not None:
            return ok(f"{said}; the target's heads have {theirs[0].shape[-1]}")
        return fail(f"{said}; the target rotates {theirs[0].shape[-1]} of a head", "this family is not supported")
    apart = max(relative(one, other.cpu()) for one, other in zip(own, theirs, strict=True))
    if apart > 1e-3:
        return fail(f"{said} is {apart:.1%} off the target's own rotation", "this family is not supported",
                    apart=apart)  # fmt: skip
    limit = getattr(text, "max_position_embeddings", None)
    if limit and config.data.sequence_length > limit:
        return warn(f"{said}, as the target's own; but the target is made for {limit:,} positions",
                    f"data.sequence_length: at most {limit}", apart=apart)  # fmt: skip
    return ok(f"{said}, as the target's own rotary embedding to position {last}", apart=apart)


def ends(patient: Patient) -> Finding:
    target = patient.target
    embedding, head = target.ends.embedding_VH, target.ends.head_VH
    tied = embedding.data_ptr() == head.data_ptr()
    declared = bool(getattr(target.model.config.get_text_config(), "tie_word_embeddings", False))
    rows = int(target.model.config.get_text_config().vocab_size)
    if embedding.shape != head.shape or embedding.shape[0] != rows:
        return fail(f"embedding {tuple(embedding.shape)}, head {tuple(head.shape)}, vocab_size {rows}",
                    "the target's files do not belong together")  # fmt: skip
    if any(parameter.requires_grad for parameter in target.model.parameters()) or embedding.requires_grad:
        return fail("weights of the target are not frozen", "this is a defect of the trainer")
    if tied != declared:
        return warn(f"the configuration says tie_word_embeddings: {declared}, and the weights are not so",
                    "a server may take the one where the trainer takes the other")  # fmt: skip
    if not (torch.isfinite(embedding).all() and torch.isfinite(head).all()):
        return fail("the embedding or the head holds numbers that are not finite", "fetch the target again")
    return ok(f"{rows:,} rows of {embedding.shape[1]}, {'one tied weight' if tied else 'two weights'}, frozen")


def attention(patient: Patient) -> Finding:
    target = patient.target
    ids_BS = probe(patient)
    features = target.features(ids_BS)
    was = target.model.config._attn_implementation
    try:
        target.model.set_attn_implementation("eager")
        eager = target.features(ids_BS)
    except (ValueError, NotImplementedError) as error:
        return warn(
            f"{was} cannot be compared: {' '.join(str(error).split())}", "see that its output is what you expect"
        )
    finally:
        target.model.set_attn_implementation(was)
    count = len(target.layer_ids)
    apart = [relative(one, other) for one, other in zip(features.chunk(count, -1), eager.chunk(count, -1), strict=True)]
    said = f"{was} against eager: hidden states differ by {max(apart):.2%} at most"
    if not max(apart) < 3 * ALIKE[features.dtype]:
        return fail(said, "another version of transformers or torch; this one computes something else", apart=apart)
    return ok(said, apart=apart)


def rendered_chat(tokenizer: Any) -> tuple[str, list[int]]:
    """A rendered conversation, and its ids."""
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a test."}]
    text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


CHECKS = [
    Check(name="mask token", what="the mask token is a spare row of the embedding", look=mask_token),
    Check(name="layer ids", what="captured are the outputs of the layers that are named", look=layer_ids),
    Check(name="rotation", what="the drafter's RoPE is that of the target's family", look=rotation),
    Check(name="embedding and head", what="one vocabulary, frozen, tied as declared", look=ends),
    Check(name="target's attention", what="the target computes what its eager form does", look=attention),
]

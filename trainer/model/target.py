"""The frozen target: any local Hugging Face causal language model, its captured layers, and its two ends.

The target threads call `features`; the drafters share `ends`. Layer `id` is captured by a hook on its *output*, which
is what the servers capture too. Hugging Face calls it `hidden_states[id + 1]`, because `[0]` is the embedding; except
for the last layer, whose entry there has gone through the final norm. That layer may be captured, before the norm.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import compile_plan
from trainer.config import ConfigError, expand_path
from trainer.graphs import Graphs
from trainer.inputs import LayerError, choose_layers
from trainer.model import remembering
from trainer.model.blocks import bring
from trainer.model.causal import documents_mask, without_masks
from trainer.model.drafter import DrafterShape, FrozenEnds
from trainer.sections import DrafterConfig, TargetConfig

SAMPLES, SAMPLE_BYTES = 256, 1 << 16
"""How much of a file of weights is read to know it again: 16 MiB at most."""


class _Captured(threading.local):
    """Outputs of the captured layers, by layer; each target thread has its own."""

    def __init__(self) -> None:
        self.outputs: dict[int, Tensor] = {}


class Target:
    """One target thread's. Loaded on the main thread; the threads of a device share one model there (`again`)."""

    def __init__(self, model: Any, tokenizer: Any, *, layer_ids: list[int], device: torch.device,
                 files: dict[str, str]) -> None:  # fmt: skip
        self.model, self.tokenizer, self.layer_ids, self.device = model, tokenizer, layer_ids, device
        self.files = files
        """What it was loaded from, see `file_digests`."""
        self.ends = _ends(model)
        self.masks_itself = without_masks(model)
        """Whether a token sees all before it and none after, in every layer."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graphs = Graphs(self._stream)
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._handed: tuple[Tensor, Any] | None = None
        """Features that may still be on their way to another device, and the event after which they are there."""
        self._captured = _Captured()
        layers = decoder_layers(model)
        for layer_id in layer_ids:
            layers[layer_id].register_forward_hook(self._hook(layer_id))
        self.trunk = self._trunk(frozenset(layers[max(layer_ids) + 1 :]))
        """What features take of the model: the same modules, no further than the last captured layer."""
        self.depth = len(layers) if self.trunk is model.base_model else max(layer_ids) + 1
        """Layers of the trunk."""

    def again(self) -> Target:
        """The same model for one more thread of its device."""
        other = copy.copy(self)
        other._stream = torch.cuda.Stream(self.device) if self._stream else None
        other._graphs = Graphs(other._stream)
        other._aside = torch.cuda.Stream(self.device) if self._aside else None
        other._handed = None
        return other

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """What the target does belongs inside: its own stream, where there are streams."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    @torch.no_grad()
    def features(self, ids_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """The captured layers' outputs side by side [B, S, captured * H], in the target's type.

        Rows of several documents need their positions, which begin anew with each, and by which they are kept apart;
        `see_that_documents_stay_apart` finds a target that mixes them all the same."""
        inputs = self._inputs(ids_BS, positions_BS)
        recorded = (key := _key(inputs)) in self._graphs
        features_BSF = self._graphs.launch(key, inputs) if recorded else self._forward(inputs)
        if self._handed is not None:
            # Its memory may be given away from here on: not earlier, or this forward would have had to wait for it.
            torch.cuda.current_stream(self.device).wait_event(self._handed[1])
            self._handed = None
        # The next launch overwrites what this one has made.
        return features_BSF.clone() if recorded else features_BSF

    @contextlib.contextmanager
    def handing_over(self, features_BSF: Tensor, to: torch.device) -> Iterator[None]:
        """What is done inside with `features_BSF`, the latest ones, comes after they are made and, where they go `to`
        another device, holds up nothing that this target does next: torch has the device that is copied from do it, on
        its current stream."""
        if self._aside is None or to == self.device:
            yield
            return
        self._aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._aside):
            yield
        self._handed = features_BSF, self._aside.record_event()

    @torch.no_grad()
    def record(self, batches: Iterable[Sequence[Tensor]], *, compiled: bool = False) -> None:
        """Have what `features` does for batches shaped like these, each a sequence of what it is called with, launched
        as a CUDA graph from now on, with layers that are `compiled` for it or as they are. Raises `RuntimeError` where
        torch cannot; then all is as it was before. Belongs on the main thread, while no worker runs: what is compiled
        is called here, and never again."""
        self._graphs.clear()
        try:
            for batch in batches:
                with self.stream(), layers_compiled(self.model) if compiled else contextlib.nullcontext():
                    inputs = self._inputs(*batch)
                    self._forward(inputs)  # libraries make their workspaces at the first call
                    self._graphs.record(_key(inputs), inputs, self._forward)
        except BaseException:
            self._graphs.clear()
            raise

    def _inputs(self, ids_BS: Tensor, positions_BS: Tensor | None = None) -> dict[str, Tensor]:
        """Of the model, on its device."""
        given = {"input_ids": ids_BS} if positions_BS is None else {"input_ids": ids_BS, "position_ids": positions_BS}
        return {name: bring(tensor, self.device) for name, tensor in given.items()}

    def _forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        given = dict(inputs)
        if self.masks_itself and "position_ids" in inputs:
            given["attention_mask"] = documents_mask(inputs["position_ids"])
        return self._run(self.trunk, given)[1]

    def run(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What comes out before the head [B, S, H], and the features, of what transformers' model takes."""
        return self._run(self.model.base_model, given)

    def _run(self, model: Any, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = self._captured.outputs
        outputs.clear()
        hidden_BSH = model(**given, use_cache=False)[0]
        features_BSF = torch.cat([outputs[layer_id] for layer_id in self.layer_ids], dim=-1)
        outputs.clear()
        return hidden_BSH, features_BSF

    @torch.no_grad()
    def _trunk(self, needless: frozenset[nn.Module]) -> nn.Module:
        """The base model without these layers; the whole one, where that does not work or changes what is captured."""
        whole, given = self.model.base_model, {"input_ids": torch.arange(8, device=self.device)[None]}
        trunk = _without(needless, whole)
        try:
            same = torch.equal(self._run(trunk, given)[1], self._run(whole, given)[1])
        except Exception:  # whatever a model makes of layers that it counts upon
            return whole
        return trunk if same else whole

    def _hook(self, layer_id: int) -> Any:
        captured = self._captured

        def capture(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            captured.outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return capture


def _without(layers: frozenset[nn.Module], model: nn.Module) -> nn.Module:
    """`model` with lists in which these are not, else of the same modules; itself, if it has none of them."""
    if isinstance(model, nn.ModuleList):
        left = [layer for layer in model if layer not in layers]
        return model if len(left) == len(model) else nn.ModuleList(left)
    children = {name: _without(layers, child) for name, child in model.named_children()}
    if all(child is getattr(model, name) for name, child in children.items()):
        return model
    changed = copy.copy(model)
    changed._modules = {**model._modules, **children}
    return changed


FORMS = 64
"""Of a compiled layer, at most: one for each shape on each device."""


def compiling() -> contextlib.AbstractContextManager[Any]:
    """Inside, each shape has a form of its own."""
    found: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=FORMS, automatic_dynamic_shapes=False
    )
    return found


@contextlib.contextmanager
def layers_compiled(model: Any, backend: str = "inductor") -> Iterator[None]:
    """Inside, the decoder layers of `model` are run by one compiled function, of which their weights are inputs. What
    torch cannot compile whole is an error of the forward. One thread's at a time."""
    layers, run = decoder_layers(model), _compiled_layer(backend, lent=remembering.lent())
    with compiling():
        for number, layer in enumerate(layers):
            layer.forward = functools.partial(remembering.run_layer, number, run, layer)
        try:
            with remembering.numbered():
                yield
        finally:
            for layer in layers:
                del layer.forward  # the class's own is behind it


@functools.cache
def _compiled_layer(backend: str, *, lent: bool) -> Any:
    # A layer is another thing where a memory is lent.
    function = compile_plan.with_own_code(_layer_as_it_is, "layer_that_remembers") if lent else _layer_as_it_is
    return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)


def _layer_as_it_is(layer: Any, *args: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *args, **options)


def _key(inputs: Mapping[str, Tensor]) -> Hashable:
    """Of the graph for these inputs."""
    return *inputs, inputs["input_ids"].shape


def load_targets(config: TargetConfig, devices: Sequence[torch.device]) -> list[Target]:
    """One for each of `devices`, with one model a device. Raises `ConfigError` like `load_target`."""
    loaded: dict[torch.device, Target] = {}
    targets = []
    for device in devices:
        if device in loaded:
            targets.append(loaded[device].again())
        else:
            loaded[device] = load_target(config, device)
            targets.append(loaded[device])
    return targets


def load_target(config: TargetConfig, device: torch.device) -> Target:
    """Raises `ConfigError` for a path without a model, or a model that cannot be a target."""
    from transformers import AutoModelForCausalLM

    path = expand_path(config.path, key="target.path")
    tokenizer, dtype = load_tokenizer(path), arithmetic_dtype(config.dtype, device)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # whatever it makes of files that are not what it expects
        said = "its weights are of other sizes than its config.json says" if "mismatched_sizes" in str(error) else error
        raise ConfigError(f"target.path: cannot load {path}: {' '.join(str(said).split())}") from error
    if missing := sorted(loaded["missing_keys"]):
        # Numbers drawn at random have been put in their place.
        raise ConfigError(
            f"target.path: {path} lacks {len(missing)} of the weights that its config.json asks for:"
            f" {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; fetch it again, whole"
        )
    model.requires_grad_(False).eval().to(device)
    try:
        layer_ids = choose_layers(config.layer_ids, config.captured_layers, count=len(decoder_layers(model)))
    except LayerError as error:
        raise ConfigError(f"{error.key}: {error}") from None
    return Target(model, tokenizer, layer_ids=layer_ids, device=device, files=file_digests(path))


def load_tokenizer(path: Path) -> Any:
    """The one of the model in `path`. Raises `ConfigError` where there is none that is fast."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    # Progress bars redraw with carriage returns, in a log that is read line by line.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever it makes of files that are not what it expects
        raise ConfigError(f"target.path: cannot load {path}: {' '.join(str(error).split())}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"target.path: {path} has no fast tokenizer (tokenizer.json)")
    return tokenizer


def file_digests(path: Path) -> dict[str, str]:
    """A hash for the configuration in `path`, of what it says, and for each file of weights: of its size and of samples
    all over it."""
    digests = {"config.json": hashlib.sha256(_meaning((path / "config.json").read_bytes())).hexdigest()}
    for file in sorted([*path.glob("*.safetensors"), *path.glob("*.bin")]):
        size = file.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with file.open("rb") as content:
            for at in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                content.seek(at)
                digest.update(content.read(SAMPLE_BYTES))
        digests[file.name] = digest.hexdigest()
    return digests


def _meaning(config: bytes) -> bytes:
    """The same for the same model, whoever has saved it: each version of transformers writes its own number."""
    try:
        told = json.loads(config)
        told.pop("transformers_version", None)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return config
    return json.dumps(told, sort_keys=True).encode()


def arithmetic_dtype(name: str, device: torch.device) -> torch.dtype:
    """What `name` means on `device`. On a CPU bfloat16 pays only where its vector units know it."""
    if name == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
        return torch.bfloat16
    return torch.float32 if name == "float32" else torch.bfloat16


def drafter_dtype(name: str, device: torch.device) -> torch.dtype:
    """The same for a drafter. On a CPU "auto" is float32: its products are small, and its losses then compare across
    machines."""
    if name == "auto" and device.type == "cpu":
        return torch.float32
    return arithmetic_dtype(name, device)


def drafter_shape(target: Target, config: DrafterConfig) -> DrafterShape:
    """Sizes as configured, and the target's own where they are left out. Raises `ConfigError` if they do not fit."""
    vocabulary = target.ends.embedding_VH.shape[0]
    special = {target.tokenizer.pad_token_id, target.tokenizer.eos_token_id, target.tokenizer.bos_token_id}
    if config.mask_token_id >= vocabulary or config.mask_token_id in special:
        raise ConfigError(
            f"drafter.mask_token_id: {config.mask_token_id} must be a spare row of the target's {vocabulary} tokens,"
            " not its pad, begin or end token"
        )
    return shape_for(target.model.config, config, captured=len(target.layer_ids))


def shape_for(model_config: Any, config: DrafterConfig, *, captured: int) -> DrafterShape:
    """The same from the target's configuration alone."""
    model = model_config.get_text_config()
    heads = config.heads or model.num_attention_heads
    kv_heads = config.kv_heads or (config.heads or getattr(model, "num_key_value_heads", None) or heads)
    head_dim = config.head_dim or getattr(model, "head_dim", None) or model.hidden_size // heads
    if heads % kv_heads:
        raise ConfigError(f"drafter.kv_heads: {heads} heads cannot share {kv_heads} key heads")
    if head_dim % 2:
        raise ConfigError(f"drafter.head_dim: must be even, is {head_dim}")
    rope = getattr(model, "rope_parameters", None) or {}
    return DrafterShape(
        hidden=model.hidden_size,
        captured=captured,
        layers=config.layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size or getattr(model, "intermediate_size", None) or 4 * model.hidden_size,
        rms_norm_eps=getattr(model, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or getattr(model, "rope_theta", None) or 10_000.0),
    )


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers that `layer_ids` count. Raises `ConfigError` for a model that has none."""
    count = model.config.get_text_config().num_hidden_layers
    for _, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(f"target.path: {type(model).__name__} has no list of {count} decoder layers to capture from")


@torch.no_grad()
def _see_that_nothing_scales(model: Any, embedding: nn.Embedding, head: nn.Linear) -> None:
    """Look at a few tokens: every family has its own name for a factor that it applies in between, or none at all."""
    entered: list[Tensor] = []
    handle = decoder_layers(model)[0].register_forward_pre_hook(
        lambda _layer, args, options: entered.append(args[0] if args else options["hidden_states"]), with_kwargs=True
    )
    ids = torch.arange(8, device=head.weight.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits.float()
    expected = head(model.base_model(input_ids=ids, use_cache=False)[0]).float()
    handle.remove()
    for what, found, plain in (("embedding", entered[0].float(), embedding(ids).float()), ("logits", logits, expected)):
        factor = float((found * plain).sum() / plain.square().sum())
        # Positions that are added to an embedding are no factor.
        if abs(factor - 1) > 0.01 and (found - factor * plain).norm() < 0.01 * found.norm():
            raise ConfigError(
                f"target.path: {type(model).__name__} multiplies its {what} by {factor:.4g}, which neither the drafter"
                " nor the servers do; choose another target"
            )


def see_that_documents_stay_apart(target: Target) -> None:
    """Raises `ConfigError` for a target whose features of a document depend on what else is in its row."""
    one, other = torch.arange(12)[None], torch.arange(20, 29)[None]
    ids = torch.cat((one, other), dim=1) % target.ends.embedding_VH.shape[0]
    positions = torch.cat((torch.arange(one.shape[1]), torch.arange(other.shape[1])))[None]
    with target.stream():
        alone = target.features(ids[:, one.shape[1] :]).float()
        mixed = target.features(ids)[:, one.shape[1] :].float()
        try:
            packed = target.features(ids, positions)[:, one.shape[1] :].float()
        except (TypeError, ValueError, IndexError, RuntimeError):  # it takes no positions, or no such mask
            packed = mixed
        # Rounding differs too: what counts is how little of the difference that others make is left.
        mixes = bool((packed - alone).norm() > 0.25 * (mixed - alone).norm())
    if mixes:
        raise ConfigError(
            f"data.packing: {type(target.model).__name__} mixes the documents of a row, wherever their positions begin;"
            " leave packing out"
        )


def _ends(model: Any) -> FrozenEnds:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain_head = isinstance(head, nn.Linear) and head.bias is None
    # A scaled embedding or capped logits would be left out by the servers too: they load neither from the drafter.
    if type(embedding) is not nn.Embedding or not plain_head:
        raise ConfigError(f"target.path: {type(model).__name__} has no plain embedding and output head to share")
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        raise ConfigError(f"target.path: {type(model).__name__} caps its logits, which the drafter's loss does not")
    _see_that_nothing_scales(model, embedding, head)
    return FrozenEnds(embedding_VH=embedding.weight.detach(), head_VH=head.weight.detach())


def as_ids(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    """A prompt: as what a user says, in the target's chat template, or as it is."""
    if chat:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=not chat)["input_ids"]
    return ids

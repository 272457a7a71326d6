"""`python -m trainer generate`, `evaluate`, `synthesize` and `regenerate`: what a user types, and what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, expand_path
from trainer.report.console import complain

VERBS = ("generate", "evaluate", "synthesize", "regenerate")
HALF = "�"
"""What a decoder makes of half a character."""


def add_verb(verbs: Any, name: str, does: str) -> argparse.ArgumentParser:
    """To the subparsers of the command line: one that says in its own help, too, what it does."""
    added: argparse.ArgumentParser = verbs.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
    return added


def add_verbs(verbs: Any) -> None:
    """To the subparsers of the command line."""
    generate = add_verb(verbs, "generate", "decode: what the drafter and its target write behind a prompt")
    _common(generate)
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="what the user says; may be given again")
    generate.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    generate.add_argument("--alone", action="store_true", help="the target alone, without the drafter")
    evaluate = add_verb(verbs, "evaluate", "decode held-out prompts: acceptance and speed")
    _common(evaluate)
    evaluate.add_argument("--data", action="append", required=True, metavar="PATH", help="held-out data, as data.paths")
    evaluate.add_argument("--kind", choices=["conversations", "text"], help="of the data (default: by its name)")
    evaluate.add_argument("--prompts", type=int, default=64, metavar="N", help="to decode (64)")
    evaluate.add_argument("--most-tokens", type=int, default=1024, metavar="N", help="of a prompt (1024)")
    evaluate.add_argument("--text-tokens", type=int, default=64, metavar="N", help="of a text that are its prompt (64)")
    evaluate.add_argument("--out", metavar="FILE", help="write all figures there, as JSON")
    evaluate.add_argument("--png", metavar="FILE", help="draw acceptance and speed there (.png, .svg, .pdf)")
    for name, does in (
        ("synthesize", "have the target write conversations to train on"),
        ("regenerate", "replace the answers of conversations by the target's own"),
    ):
        verb = add_verb(verbs, name, does)
        verb.add_argument("config", metavar="CONFIG", help="YAML file; see docs/decoding.md")


def _common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("drafter", metavar="CKPT|RUN|EXPORT", help="a checkpoint, a run's directory, or an export")
    verb.add_argument("--target", metavar="DIR", help="the target, where it is not where the drafter was trained")
    verb.add_argument("--weights", choices=["auto", "last", "ema"], default="auto",
                      help="of a checkpoint; auto: the moving average, where one is kept (auto)")
    verb.add_argument("--max-tokens", type=int, default=256, metavar="N", help="to write, at most (256)")
    verb.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (0)")
    verb.add_argument("--top-p", type=float, default=1.0, metavar="P")
    verb.add_argument("--top-k", type=int, metavar="K")
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (0)")
    verb.add_argument("--batch", type=int, default=1, metavar="N", help="prompts at once (1)")
    verb.add_argument("--device", metavar="D", help="cpu or cuda:N (default: the first GPU, else the CPU)")
    verb.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the arithmetic (default: as in training)")
    verb.add_argument("--compile", choices=["auto", "off"], default="off",
                      help="auto: rounds that a GPU records are compiled first, which takes seconds (off)")
    verb.add_argument("--json", action="store_true", help="print all of it as JSON")


def answer(arguments: argparse.Namespace) -> int:
    """Exit code. Raises `ConfigError`."""
    writes = arguments.verb in ("synthesize", "regenerate")
    import torch

    try:
        return _write(arguments) if writes else _decode(arguments)
    except torch.OutOfMemoryError as error:
        fewer = "a smaller batch_size" if writes else "a smaller --batch, or fewer --max-tokens"
        raise ConfigError(f"the device has no memory left: {str(error).splitlines()[0]} Try {fewer}") from None


def _decode(arguments: argparse.Namespace) -> int:
    for name in ("max_tokens", "batch", "prompts", "text_tokens", "most_tokens"):
        if (value := getattr(arguments, name, 1)) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1, is {value}")
    from trainer.decode.sampling import Sampling

    try:
        sampling = Sampling(temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k)
    except ValueError as error:
        raise ConfigError(f"--{str(error).replace('_', '-', 1)}") from None
    if arguments.verb == "generate":
        return _generate(arguments, sampling)
    return _evaluate(arguments, sampling)


def _write(arguments: argparse.Namespace) -> int:
    from trainer.synthesis.config import load_synthesis

    config = load_synthesis(arguments.config, verb=arguments.verb)
    from trainer.synthesis.write import write

    return write(config, arguments.verb, say=lambda line: print(line, flush=True), complain=complain)


def _loaded(arguments: argparse.Namespace) -> Any:
    from trainer.decode import loaded
    from trainer.device import device_for

    device = device_for(arguments.device)
    return loaded.load(
        expand_path(arguments.drafter, key="CKPT"), target=arguments.target, device=device, dtype=arguments.dtype,
        weights=arguments.weights, say=complain,
    )  # fmt: skip


def _generate(arguments: argparse.Namespace, sampling: Any) -> int:
    texts = arguments.prompt or ([sys.stdin.read()] if not sys.stdin.isatty() else [])
    if not any(text.strip() for text in texts):
        raise ConfigError("--prompt: say what to go on from, or pipe it in")
    loaded = _loaded(arguments)
    from trainer.decode.generate import generate
    from trainer.model.target import as_ids

    target = loaded.target
    chat = not arguments.raw and bool(target.tokenizer.chat_template)
    prompts = [as_ids(target.tokenizer, text, chat=chat) for text in texts]
    # Several at once are printed one after the other; only the first of them may come as it is written.
    stream = Stream(target.tokenizer) if len(prompts) == 1 and not arguments.json else None
    made = generate(
        target, None if arguments.alone else loaded.block_drafter, prompts, max_tokens=arguments.max_tokens,
        batch_size=arguments.batch, sampling=sampling, seed=arguments.seed, compiled=arguments.compile != "off",
        say=complain, on_tokens=(lambda _, tokens: stream.add(tokens)) if stream else None,
    )  # fmt: skip
    if stream:
        stream.end()
    told = []
    for text, one in zip(texts, made.continuations, strict=True):
        written = target.tokenizer.decode(one.tokens, skip_special_tokens=True)
        told.append({
            "prompt": text, "text": written, "tokens": one.tokens, "ended": one.ended,
            "verifications": one.acceptance.verifications, "tau": one.acceptance.tau,
        })  # fmt: skip
        if not stream and not arguments.json:
            print(f"> {text}\n{written}\n", flush=True)
    figures = {
        "tokens": made.tokens, "verifications": made.acceptance.verifications,
        "tau": None if arguments.alone else made.acceptance.tau, "tok_s": made.tok_s, "reading_s": made.reading_s,
        "decoding_s": made.decoding_s,
    }  # fmt: skip
    if arguments.json:
        about = {"drafter": None if arguments.alone else loaded.source, "target": target.model.config._name_or_path}
        print(json.dumps({**about, **figures, "continuations": told}, indent=1), flush=True)
    else:
        tau = "" if figures["tau"] is None else f" τ={figures['tau']:.2f}"
        complain(
            f"tokens={made.tokens} verifications={made.acceptance.verifications}{tau} tok/s={made.tok_s:.1f}"
            f" prompts_s={made.reading_s:.2f} by {'the target alone' if arguments.alone else loaded.source}"
        )
    return 0


class Stream:
    """Text on stdout as its tokens come; a character that is half there waits for its other half."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._tokens, self._printed = tokenizer, [], 0

    def add(self, tokens: list[int]) -> None:
        self._tokens += tokens
        text = self._text().rstrip(HALF)
        self._print(text)

    def end(self) -> None:
        self._print(self._text())
        print(flush=True)

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _print(self, text: str) -> None:
        print(text[self._printed :], end="", flush=True)
        self._printed = max(self._printed, len(text))


def _evaluate(arguments: argparse.Namespace, sampling: Any) -> int:
    for option in ("out", "png"):
        if (name := getattr(arguments, option)) and not Path(name).absolute().parent.is_dir():
            raise ConfigError(f"--{option}: there is no directory {Path(name).absolute().parent}")
    loaded = _loaded(arguments)
    from trainer.decode.evaluate import evaluate
    from trainer.decode.prompts import read_prompts

    prompts = read_prompts(
        [expand_path(path, key="--data") for path in arguments.data], loaded.target.tokenizer, kind=arguments.kind,
        count=arguments.prompts, most_tokens=arguments.most_tokens, text_tokens=arguments.text_tokens,
    )  # fmt: skip
    found = evaluate(
        loaded, prompts, max_tokens=arguments.max_tokens, batch_size=arguments.batch, sampling=sampling,
        seed=arguments.seed, compiled=arguments.compile != "off", say=complain,
    )  # fmt: skip
    from trainer.decode import page

    text = json.dumps(found, indent=1) + "\n"
    if arguments.out:
        try:
            Path(arguments.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out: {arguments.out}: {error.strerror}") from None
    if arguments.png:
        page.picture(found, Path(arguments.png))
    if arguments.json:
        print(text, end="", flush=True)
    else:
        from trainer.report.console import terminal

        terminal().print(page.table(found))
    return 0

"""What is a drafter worth after how many minutes of training? Every checkpoint of some runs, really decoded with.

    python -m bench.acceptance measure RUN|CKPT|EXPORT... --data HELD-OUT.jsonl [--prompts 48] [--max-tokens 256]
                                              [--last] [--weights last] [--compile auto off] [--target DIR] --out FILE
    python -m bench.acceptance show FILE... [--png curve.png]

`measure` decodes the same held-out prompts greedily, one at a time, with each checkpoint (`--last`: with the latest
alone) of each run, or of each that lies in the directory RUN; and with the target alone, before the first and behind
the last of them; all in one process, by the same kernels and CUDA graphs, and appends a JSON line for each to FILE.
With `--compile auto off` each is measured both ways, beside the target alone in the same way.
Minutes are those in phase `train`: neither warm-up nor evaluations. `show` prints them as a table of markdown, and
draws τ and speed-up over minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import steps_on_disk
from trainer.config import ConfigError
from trainer.decode import loaded
from trainer.decode.engine import BlockDrafter, Engine
from trainer.decode.generate import Generated, end_ids, engine_for, run
from trainer.decode.prompts import Prompt, read_prompts
from trainer.device import device_for
from trainer.export.loading import is_published
from trainer.inputs import MARKER
from trainer.model.target import Target

MOST_PROMPT_TOKENS = 256


def training_minutes(run_directory: Path) -> dict[int, float]:
    """By step, minutes that the run had trained for when its figures were recorded, resumes included; of a run whose
    records are not there, nothing."""
    lines = [line for name in ("events.jsonl", "metrics.jsonl") for line in recorded(run_directory / name)]
    seconds, since, found = 0.0, None, {}
    for line in sorted(lines, key=lambda line: line["time"]):
        if since is not None:
            seconds += line["time"] - since
        since = line["time"] if since is not None else None
        if line.get("event") == "phase":
            since = line["time"] if line["phase"] == "train" else None
        elif line.get("event") == "ended":
            since = None
        elif line.get("worker") is None and "loss" in line:
            found[line["step"]] = seconds / 60
    return found


def runs_in(directory: Path) -> list[Path]:
    """It, or those that lie in it. Raises `ConfigError` where there are none."""
    around = [directory, *sorted(directory.iterdir())] if directory.is_dir() else []
    found = [one for one in around if (one / "checkpoints").is_dir()]
    if not found:
        raise ConfigError(f"{directory}: no run with checkpoints")
    return found[:1] if found[0] == directory else found


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's record; one that a kill has torn is none, and a record that is not there has none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        complain(f"{path} is not there: nobody knows how long this run has trained")
        return
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def checkpoints(run_directory: Path, *, last: bool) -> list[tuple[int, Path]]:
    """By step, rising; those that are whole."""
    root = run_directory / "checkpoints"
    steps = [(step, root / f"step-{step}") for step in steps_on_disk(root)]
    found = [(step, path) for step, path in steps if (path / MARKER).exists()]
    return found[-1:] if last else found


class Decoding:
    """The same prompts again and again, by one target. Raises `ConfigError` where only one side can be compiled."""

    def __init__(self, target: Target, prompts: list[Prompt], max_tokens: int, *, compiled: bool) -> None:
        self.target, self.max_tokens, self._asked = target, max_tokens, compiled
        self.prompts = [prompt.ids for prompt in prompts]
        self._plain = self._engine(None)
        self.compiled, self.preparing_s = self._plain.rounds.compiled, self._plain.rounds.preparing_s

    def _engine(self, drafter: BlockDrafter | None) -> Engine:
        engine = engine_for(
            self.target, drafter, self.prompts, max_tokens=self.max_tokens, batch_size=1, sampling=None,
            stop_ids=end_ids(self.target), compiled=self._asked, say=complain,
        )  # fmt: skip
        run(engine, [max(self.prompts, key=len)], max_tokens=min(16, self.max_tokens))
        return engine

    def alone(self) -> Generated:
        return run(self._plain, self.prompts, max_tokens=self.max_tokens)

    def drafted(self, drafter: BlockDrafter) -> tuple[Generated, float]:
        """And how long it took to compile and record its rounds, in seconds."""
        engine = self._engine(drafter)
        if engine.rounds.compiled != self.compiled:
            raise ConfigError("torch compiles rounds with a drafter or without one, and not both; see --compile off")
        return run(engine, self.prompts, max_tokens=self.max_tokens), engine.rounds.preparing_s


def drafters(paths: Sequence[Path], *, last: bool) -> Iterator[tuple[str, int | None, Path, float | None]]:
    """Name, step, where it is, and minutes of training, of each that `paths` name."""
    for path in paths:
        if is_published(path):
            yield path.name, None, path, None
        elif path.parent.name == "checkpoints" and (path / MARKER).exists():
            step = int(path.name.removeprefix("step-"))
            yield path.parents[1].name, step, path, training_minutes(path.parents[1]).get(step)
        else:
            for directory in runs_in(path):
                minutes = training_minutes(directory)
                for step, checkpoint in checkpoints(directory, last=last):
                    yield directory.name, step, checkpoint, minutes.get(step)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = device_for(arguments.device)
    decodings: list[Decoding] = []
    prompts: list[Prompt] = []
    rows: list[tuple[int, dict[str, Any]]] = []
    plain: list[list[float]] = []

    def way_of(target: Target) -> list[Decoding]:
        return [Decoding(target, prompts, arguments.max_tokens, compiled=how != "off") for how in arguments.compile]

    for name, step, path, minutes in drafters(arguments.runs, last=arguments.last):
        one = loaded.load(path, target=arguments.target, device=device, weights=arguments.weights, say=complain)
        if not decodings:
            prompts = read_prompts(
                [arguments.data], one.target.tokenizer, kind="conversations", count=arguments.prompts,
                most_tokens=MOST_PROMPT_TOKENS, text_tokens=64,
            )  # fmt: skip
            decodings = way_of(one.target)
            plain = [[decoding.alone().tok_s] for decoding in decodings]
        elif one.target.layer_ids != decodings[0].target.layer_ids:
            # Which layers are captured is the target's: the same model, with hooks elsewhere.
            decodings = way_of(one.target)
        drafter = one.block_drafter.drafter
        for number, decoding in enumerate(decodings):
            made, preparing_s = decoding.drafted(one.block_drafter)
            rows.append((number, {
                "run": name, "step": step, "minutes": minutes,
                "block_size": one.block_drafter.block_size, "layers": drafter.shape.layers,
                "captured": drafter.shape.captured, "weights": sum(weight.numel() for weight in drafter.parameters()),
                "compiled": decoding.compiled, "preparing_s": preparing_s, "plain_preparing_s": decoding.preparing_s,
                "tau": made.acceptance.tau, "kept_by_slot": made.acceptance.by_slot, "tokens": made.tokens,
                "tok_s": made.tok_s, "verifications": made.acceptance.verifications,
                "ms_a_round": 1e3 * made.decoding_s / made.acceptance.verifications,
            }))  # fmt: skip
            how = f"compiled, ready in {preparing_s:.1f} s" if decoding.compiled else "as written"
            complain(f"{_named(rows[-1][1])}, {how}: τ {made.acceptance.tau:.2f}, {made.tok_s:.1f} tok/s")
    if not decodings:
        raise ConfigError("there is no checkpoint in any of these runs")
    for speeds, decoding in zip(plain, decodings, strict=True):
        speeds.append(decoding.alone().tok_s)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    for number, row in rows:
        alone = plain[number]
        speedup = row["tok_s"] / (sum(alone) / len(alone))
        yield {**row, "plain_tok_s": alone, "speedup": speedup, "prompts": len(prompts), "device": where}


def _named(row: dict[str, Any]) -> str:
    return row["run"] if row["step"] is None else f"{row['run']} step {row['step']}"


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("run", "step", "minutes", "blocks of", "layers", "weights", "τ", "slots 1, 2, 3", "last", "compiled",
             "ms a round", "tok/s", "alone", "speed-up")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        slots = [f"{100 * (slot or 0):.0f}" for slot in row["kept_by_slot"]]
        minutes = "-" if row["minutes"] is None else f"{row['minutes']:.1f}"
        step = "-" if row["step"] is None else f"{row['step']:,}"
        compiled = "yes" if row.get("compiled") else "no"
        lines.append(
            f"| {row['run']} | {step} | {minutes} | {row['block_size']} | {row['layers']} |"
            f" {row['weights'] / 1e6:.1f} M | {row['tau']:.2f} | {', '.join(slots[:3])} % | {slots[-1]} % |"
            f" {compiled} | {row['ms_a_round']:.2f} | {row['tok_s']:.0f} |"
            f" {' '.join(f'{one:.0f}' for one in row['plain_tok_s'])} | {row['speedup']:.2f}x |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    shown = {"tau": "τ, tokens a verification", "speedup": "speed-up at batch 1"}
    for axis, (key, label) in zip(axes, shown.items(), strict=True):
        for name, compiled in dict.fromkeys((row["run"], bool(row.get("compiled"))) for row in rows):
            own = [row for row in rows if (row["run"], bool(row.get("compiled"))) == (name, compiled)
                   and row["minutes"] is not None]  # fmt: skip
            axis.plot([row["minutes"] for row in own], [row[key] for row in own], marker=".",
                      label=f"{name}, compiled" if compiled else name)  # fmt: skip
        axis.axhline(1, color="0.6", linewidth=1, linestyle="--")
        axis.set(xlabel="minutes of training", ylabel=label, xlim=(0, None), ylim=(0.8, None))
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    if any(row["minutes"] is not None for row in rows):
        axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("runs", metavar="RUN|CKPT|EXPORT", type=Path, nargs="+")
    measuring.add_argument("--data", type=Path, required=True)
    measuring.add_argument("--target")
    measuring.add_argument("--device")
    measuring.add_argument("--prompts", type=int, default=48)
    measuring.add_argument("--max-tokens", type=int, default=256)
    measuring.add_argument("--weights", choices=["auto", "last", "ema"], default="auto")
    measuring.add_argument("--last", action="store_true")
    measuring.add_argument("--compile", choices=["auto", "off"], nargs="+", default=["off"])
    measuring.add_argument("--out", type=Path, required=True)
    showing = verbs.add_parser("show")
    showing.add_argument("files", type=Path, nargs="+")
    showing.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    try:
        rows = measured(arguments) if arguments.verb == "measure" else read(arguments.files)
        print(table(rows))
        if arguments.verb == "show" and arguments.png:
            draw(rows, arguments.png)
    except ConfigError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror or error}")
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(130)


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Opens the file first: what cannot be written need not be measured."""
    with arguments.out.open("a") as file:
        rows = list(measure(arguments))
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def read(files: list[Path]) -> list[dict[str, Any]]:
    """Raises `ConfigError` for a line that `measure` has not written."""
    rows = []
    for path in files:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                rows.append(json.loads(line))
                table(rows[-1:])
            except (ValueError, TypeError, KeyError, IndexError):
                raise ConfigError(f"{path}:{number}: is no line that `bench.acceptance measure` writes") from None
    if not rows:
        raise ConfigError(f"{', '.join(map(str, files))}: nothing has been measured")
    return rows


if __name__ == "__main__":
    main()

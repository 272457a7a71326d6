"""What of a drafter's training matters? The same short training again and again, with one thing changed.

    python -m bench.ablations CONFIG [--steps 450] [--work runs/ablations] [--greedy FILE --drawn FILE] [--only NAME]
    python -m bench.acceptance measure runs/ablations --last --data HELD-OUT.jsonl --out FILE

Trains CONFIG with each of `VARIANTS` (or those that are named), each in a directory of its name below `--work`, where a
training that was broken off goes on. `--greedy` and `--drawn` are conversations whose answers are the target's most
probable ones and drawn ones, as many tokens of each; without them all variants but one train on what CONFIG names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[1]
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "flat-weights": {"loss": {"decay": "1000"}},
    "one-layer-captured": {"target": {"captured_layers": "1"}},
    "2-layers": {"drafter": {"layers": "2"}},
    "32-anchors": {"drafter": {"anchors": "32"}},
    "drawn-answers": {},
    "plain-text": {"data": {"kind": "python-docs", "paths": None}},
}
"""What each changes; None: leaves the key out."""


def merged(settings: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`settings` with what `change` says, key by key."""
    found = dict(settings)
    for key, value in change.items():
        if value is None:
            found.pop(key, None)
        else:
            own = found.get(key)
            found[key] = merged(own if isinstance(own, dict) else {}, value) if isinstance(value, dict) else value
    return found


def variant(settings: dict[str, Any], name: str, *, steps: int, work: Path, data: Path | None) -> dict[str, Any]:
    """`settings` for a short training, with what the variant changes; of `data`, if any are given."""
    short = merged(settings, {
        "steps": str(steps), "checkpoint_every": str(steps), "evaluate_every": None, "evaluation": None,
        "optimizer": {"ema": "0.99", "warmup_fraction": "0.05"}, "output_dir": str(work / name),
    })  # fmt: skip
    return merged(merged(short, {"data": {"paths": [str(data)]}} if data else {}), VARIANTS[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--greedy", type=Path)
    parser.add_argument("--drawn", type=Path)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    arguments = parser.parse_args()
    # As text: 1e-3 is a number for the trainer, and none for YAML 1.1.
    try:
        settings = yaml.load(arguments.config.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        sys.exit(f"{arguments.config}: {error.strerror or error}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        sys.exit(f"{arguments.config} is not YAML: {' '.join(str(error).split())}")
    if not isinstance(settings, dict):
        sys.exit(f"{arguments.config} is no configuration: it holds no keys")
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        data = arguments.drawn if name == "drawn-answers" else arguments.greedy
        own = variant(settings, name, steps=arguments.steps, work=arguments.work, data=data)
        config = arguments.work / f"{name}.yaml"
        config.write_text(yaml.safe_dump(own), encoding="utf-8")
        print(f"== {name}", flush=True)
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        argv = [sys.executable, "-m", "trainer", "train", str(config)]
        with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": path}) as training:
            try:
                code = training.wait()
            except KeyboardInterrupt:  # the training has been asked to stop, too, and saves what it has
                training.wait()
                sys.exit(f"{name}: interrupted; the same command goes on")
        if code:
            sys.exit(f"{name}: ended with {code}")


if __name__ == "__main__":
    main()

"""Does a drafter learn from the target's features, or only which words are frequent? The same run twice, side by side.

    python bench/features.py CONFIG [--steps N] [--device cuda:0] [--set KEY=VALUE ...] [--out FILE]

Trains CONFIG once with the target's real features and once with noise of the same size in their place, and prints the
mean loss of each tenth of the run, the milliseconds a step and the target tokens a second of both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[1]
NOISE = """
import torch, trainer.model.target
real = trainer.model.target.Target.features
def noise(self, ids):
    features = real(self, ids)
    return torch.randn(features.shape, device=features.device).to(features.dtype) * features.std()
trainer.model.target.Target.features = noise
"""


def train(settings: dict[str, Any], planted: str, folder: Path) -> list[dict[str, Any]]:
    """The metrics rows of the whole run."""
    config = folder / "config.yaml"
    config.write_text(json.dumps({**settings, "output_dir": str(folder / "out")}))
    program = f"{planted}\nimport sys, trainer.__main__ as m\nsys.exit(m.main(['train', {str(config)!r}]))"
    environ = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["worker"] is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = yaml.safe_load(arguments.config.read_text())
    settings["optimizer"]["lr"] = float(settings["optimizer"]["lr"])  # YAML 1.1 takes 1e-3 for text
    settings |= {"steps": arguments.steps, "checkpoint_every": 10 * arguments.steps}
    settings["devices"] = {"target": [arguments.device], "drafter": [arguments.device]}
    for assignment in arguments.set:
        path, _, value = assignment.partition("=")
        *parents, key = path.split(".")
        part = settings
        for parent in parents:
            part = part[parent]
        part[key] = yaml.safe_load(value) if not value.count("e-") else float(value)
    for name, planted in (("real", ""), ("noise", NOISE)):
        with tempfile.TemporaryDirectory() as folder:
            rows = train(settings, planted, Path(folder))
        times = [row["time"] for row in rows]
        steps_ms = [1000 * (after - before) for before, after in itertools.pairwise(times[2:])]
        size = max(1, len(rows) // 10)
        result = {
            "features": name, "steps": len(rows), "device": arguments.device,
            "loss_by_tenth": [
                round(statistics.mean(row["loss"] for row in rows[start : start + size]), 3)
                for start in range(0, size * 10, size)
            ],
            "step_ms_median": round(statistics.median(steps_ms), 2),
            "step_ms_quartiles": [round(value, 2) for value in statistics.quantiles(steps_ms, n=4)[::2]],
            "tok_s": round(rows[-1]["tok_s"], 1),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

"""Figures as lines: in the terminal with plotext, as a picture with matplotlib. Gaps stay gaps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator import whole
from orchestrator.errors import ConfigError
from orchestrator.health import age
from orchestrator.render.text import one_line, plain
from orchestrator.verbs.plot import Line, Result

HEIGHT, LEAST_HEIGHT = 18, 10
LEAST_WIDTH, PIPE_WIDTH = 40, 100
WIDE = 1e9
MARKS = "*o+x#@%&"
"""Of a line each, where nothing can be told by its colour."""
NAMES = {"tok_s": "tok/s", "positions_s": "draft positions/s", "lr": "learning rate", "grad_norm": "gradient norm"}


def terminal(console: Console, result: Result) -> str:
    """Every figure below the other, as wide as the terminal."""
    plt = _library("plotext")
    coloured = console.is_terminal and not console.no_color
    width = max(LEAST_WIDTH, console.width - 1) if console.is_terminal else PIPE_WIDTH
    room = (console.height - 2) // len(result.metrics) if console.is_terminal else HEIGHT
    texts = []
    for metric in result.metrics:
        plt.clear_figure()
        plt.limit_size(False, False)  # by a terminal that need not be the one it is for
        plt.theme("clear" if not coloured else "dark")
        if coloured:
            plt.canvas_color("default")
            plt.axes_color("default")
            plt.ticks_color("default")
        plt.plotsize(width, min(HEIGHT, max(LEAST_HEIGHT, room)))
        plt.title(one_line(NAMES.get(metric, metric)))
        lines = result.lines(metric)
        for number, one in enumerate(lines):
            marker = None if coloured and not plain(console) else MARKS[number % len(MARKS)]
            x, y = ([math.nan if value is None else value for value in values] for values in (one.x, one.y))
            plt.plot(x, y, label=one_line(one.label), marker=marker)
        if result.by == "time":
            _time_ticks(plt, lines)
        else:
            _step_ticks(plt, lines)
        _figure_ticks(plt, lines)
        text = plt.build()
        text = text if coloured else plt.uncolorize(text)
        texts.append("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    texts.append(f"{'step' if result.by == 'step' else 'time since the launch':>{width}}\n")
    said = "".join(texts)
    return said.translate(BOXES) if plain(console) else said


BOXES = str.maketrans("─│┌┐└┘├┤┬┴┼", "-|++++||+++")
"""For who can print ASCII only."""


def _time_ticks(plt: Any, lines: list[Line]) -> None:
    last = _last(lines)
    ticks = [last * part / 4 for part in range(5)]
    plt.xticks(ticks, [age(tick) for tick in ticks])


def _step_ticks(plt: Any, lines: list[Line]) -> None:
    """A step is a whole number."""
    steps = [x for line in lines for x in line.x if x is not None]
    first, last = math.floor(min(steps, default=0)), math.ceil(max(steps, default=0))
    ticks = sorted({first + (last - first) * part // 4 for part in range(5)})
    plt.xticks(ticks, [f"{tick:,}" for tick in ticks])


def _figure_ticks(plt: Any, lines: list[Line]) -> None:
    """What has diverged is written as 1.2e+30: all its digits would leave no room for the curve."""
    figures = [y for line in lines for y in line.y if y is not None]
    low, high = min(figures, default=0.0), max(figures, default=0.0)
    if max(abs(low), abs(high)) >= WIDE:
        ticks = [low + (high - low) * part / 4 for part in range(5)]
        plt.yticks(ticks, [f"{tick:.3g}" for tick in ticks])


def picture(result: Result, path: Path) -> None:
    """A PNG, or what else the name's ending says that matplotlib can write. Raises `ConfigError`."""
    _library("matplotlib")
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    curves = [result.lines(metric) for metric in result.metrics]
    unit_s, unit = _unit([line for lines in curves for line in lines])
    styles = _styles([line for lines in curves for line in lines])
    figure, axes = plt.subplots(
        len(result.metrics), 1, sharex=True, squeeze=False, figsize=(10, 1.2 + 3.2 * len(result.metrics)),
        layout="constrained",
    )  # fmt: skip
    for axis, metric, lines in zip(axes[:, 0], result.metrics, curves, strict=True):
        for one in lines:
            x, y, spread = (
                [math.nan if value is None else value for value in values] for values in (one.x, one.y, one.spread)
            )
            if result.by == "time":
                x = [value / unit_s for value in x]
            colour, dashes = styles[one.label]
            axis.plot(
                x, y, color=colour, linestyle=dashes, linewidth=1.4 if one.worker is None else 0.9,
                label=_drawn(one.label), marker="." if len(x) < 30 else None,
            )  # fmt: skip
            low = [value - around for value, around in zip(y, spread, strict=True)]
            high = [value + around for value, around in zip(y, spread, strict=True)]
            axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_ylabel(_drawn(NAMES.get(metric, metric)))
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize="small")
    axes[-1, 0].set_xlabel("step" if result.by == "step" else f"{unit} since the launch")
    try:
        with whole.replacing(path) as file:
            figure.savefig(file, dpi=150, format=path.suffix.lstrip(".") or "png")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}", hint="--png FILE.png, or .svg or .pdf") from None
    finally:
        plt.close(figure)


WORKERS: list[Any] = [":", "--", "-.", (0, (6, 2)), (0, (1, 3))]


def _styles(lines: list[Line]) -> dict[str, tuple[str, Any]]:
    """Colour and dashes by label: a run has a colour, which its workers' lines share, dashed each in its own way."""
    runs = list(dict.fromkeys(line.run_id for line in lines))
    workers: dict[str, dict[str | None, None]] = {}
    for line in lines:
        if line.worker is not None:
            workers.setdefault(line.run_id, {})[line.worker] = None
    return {
        line.label: (
            f"C{runs.index(line.run_id) % 10}",
            "-" if line.worker is None else WORKERS[list(workers[line.run_id]).index(line.worker) % len(WORKERS)],
        ) for line in lines
    }  # fmt: skip


def _drawn(name: str) -> str:
    """A name as matplotlib draws it: what stands between dollars would be a formula."""
    return one_line(name).replace("$", r"\$")


def _last(lines: list[Line]) -> float:
    """How far the longest of them goes."""
    return max((x for line in lines for x in line.x if x is not None), default=0.0)


def _unit(lines: list[Line]) -> tuple[float, str]:
    """What the time of all lines is best said in."""
    last_s = _last(lines)
    return next(one for one in UNITS if last_s < 180 * one[0] or one == UNITS[-1])


UNITS = [(1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours")]


def _library(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"a plot needs {name}", hint="pip install plotext matplotlib") from None

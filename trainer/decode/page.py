"""What an evaluation found, for people: tables, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.decode.evaluate import ALL
from trainer.files import replacing

ALONE = "the target alone"


def table(found: dict[str, Any]) -> Any:
    """A line for each category, and one for all."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    recorded = "CUDA graphs, compiled" if found["compiled"] else "CUDA graphs"
    head = Text(
        f"{found['drafter']}\ntarget {found['target']}, {found['device']}, {found['dtype']}, batch"
        f" {found['batch_size']}, {_drawn(found)}, {recorded if found['graphs'] else 'kernel by kernel'}",
    )  # fmt: skip
    columns = ("category", "prompts", "tokens", "τ", "tok/s", "alone", "speed-up", "slot 1", "2", "3", "last", "same")
    rows = Table(box=None, padding=(0, 2, 0, 0))
    for name in columns:
        rows.add_column(name, justify="left" if name == "category" else "right")
    lines = {**(found["categories"] if len(found["categories"]) > 1 else {}), ALL: found[ALL]}
    for name, one in lines.items():
        slots = one["kept_by_slot"]
        shown = [_share(slots[at] if at < len(slots) else None) for at in (0, 1, 2)]
        rows.add_row(
            name, str(one["prompts"]), f"{one['tokens']:,}", _number(one["tau"]), _number(one["tok_s"], 1),
            _number(one["plain_tok_s"], 1), f"{_number(one['speedup'])}x", *shown, _share(slots[-1]), _same(one),
            style="bold" if name == ALL else None,
        )  # fmt: skip
    notes = [
        found["tau_is"], "slot k: share of verifications in which it stayed, and so all before it",
        *(["same: greedy texts that are the target's own, token for token; ~: " + found["tie_is"]]
          if found["sampling"]["temperature"] == 0 else []),
    ]  # fmt: skip
    return Group(head, "", rows, "", Text("\n".join(notes), style="dim"))


def picture(found: dict[str, Any], path: Path) -> None:
    """What stays of each slot, and tok/s beside the target alone. Raises `ConfigError` without matplotlib, or where
    nothing can be written."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--png needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    categories = found["categories"] if len(found["categories"]) > 1 else {}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    slots = range(1, found["block_size"])
    for name, one in categories.items():
        left.plot(slots, [value or 0 for value in one["kept_by_slot"]], linewidth=1, alpha=0.7, label=_label(name))
    left.plot(
        slots, [value or 0 for value in found[ALL]["kept_by_slot"]], color="black", linewidth=2, marker=".", label=ALL
    )  # fmt: skip
    left.set(xlabel="slot of the block", ylabel="stays, with all before it", ylim=(0, 1), xticks=list(slots))
    left.set_title(f"τ = {_number(found[ALL]['tau'])}")
    left.legend(frameon=False, fontsize="small")
    lines = {**categories, ALL: found[ALL]}
    places = range(len(lines))
    right.barh([at + 0.2 for at in places], [one["tok_s"] for one in lines.values()], 0.38, label="with the drafter")
    right.barh(
        [at - 0.2 for at in places], [one["plain_tok_s"] for one in lines.values()], 0.38, label=ALONE, color="0.75"
    )  # fmt: skip
    for at, one in zip(places, lines.values(), strict=True):
        right.text(one["tok_s"], at + 0.2, f" {_number(one['speedup'])}x", va="center", fontsize="small")
    right.set_yticks(list(places), [_label(name) for name in lines])
    right.set(xlabel=f"tok/s, batch {found['batch_size']}", xlim=(0, 1.15 * max(
        max(one["tok_s"], one["plain_tok_s"]) for one in lines.values()
    )))  # fmt: skip
    right.set_title(f"{found['device']}, {found['dtype']}", fontsize="medium")
    right.legend(frameon=False, fontsize="small")
    for axis in (left, right):
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    try:
        with replacing(path) as file:
            figure.savefig(file, dpi=150, format=path.suffix.lstrip(".") or "png")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--png: {path} cannot be written: {error}") from None
    finally:
        plt.close(figure)


def _label(name: str) -> str:
    """As matplotlib draws it: what stands between dollars would be a formula."""
    return name.replace("$", r"\$")


def _drawn(found: dict[str, Any]) -> str:
    sampling = found["sampling"]
    if sampling["temperature"] == 0:
        return "greedy"
    given = {key: value for key, value in sampling.items() if value is not None}
    return " ".join(f"{key} {value:g}" for key, value in given.items())


def _same(one: dict[str, Any]) -> str:
    if "same" not in one:
        return "-"
    ties = f" ~{one['same_up_to_a_tie']}" if one["same_up_to_a_tie"] else ""
    return f"{one['same']}/{one['prompts']}{ties}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"

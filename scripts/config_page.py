"""Writes the tables of every configuration key into the pages that explain them, from the types and texts of the code.

    python scripts/config_page.py [--check]

A key's words stand below it in trainer/{config,sections}.py or trainer/synthesis/config.py, where its type is; editors
(`python -m trainer schema`) and these pages have them from there. `--check` changes nothing and exits 1 where a page is
not what it would be.
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pydantic import BeforeValidator  # noqa: E402

from trainer.config import Config  # noqa: E402
from trainer.synthesis.config import SynthesisConfig  # noqa: E402
from typedyaml import Model  # noqa: E402
from typedyaml.jsonschema import docstrings  # noqa: E402

PAGES: dict[str, type[Model]] = {"docs/trainer.md": Config, "docs/decoding.md": SynthesisConfig}
BEGIN, END = "<!-- keys: written by scripts/config_page.py -->\n", "<!-- end of keys -->\n"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
SCALARS = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def tables(config: type[Model]) -> str:
    """A page's part between the marks."""
    parts = [_table("At the top", config, ""), *(
        _table(f"`{name}`", model, f"{name}.") for name, model in _sections(config)
    )]  # fmt: skip
    return "\n".join(parts)


def _sections(model: type[Model], prefix: str = "") -> list[tuple[str, type[Model]]]:
    found = []
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            found += [(f"{prefix}{name}", inner), *_sections(inner, f"{prefix}{name}.")]
    return found


def _model_in(hint: Any) -> type[Model] | None:
    for arm in typing.get_args(hint) or (hint,):
        if isinstance(arm, type) and issubclass(arm, Model):
            return arm
    return None


def _table(title: str, model: type[Model], prefix: str) -> str:
    words = docstrings(model)
    lines = [f"### {title}", "", "| key | what it takes | left out | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        kind = (
            f"[keys of its own](#{(prefix + name).replace('.', '')})"
            if inner
            else _kind(field.annotation, field.metadata)
        )
        text = words.get(name, "").replace("|", "\\|")
        lines.append(f"| `{prefix}{name}` | {kind} | {_left_out(field)} | {text} |")
    return "\n".join([*lines, ""])


def _left_out(field: Any) -> str:
    if field.is_required():
        return "an error"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Model):
        return "as they say"
    if default is None or default in ([], {}):
        return "–"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _kind(hint: Any, metadata: Any) -> str:
    origin, arms = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _kind(arms[0], [*arms[1:], *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(arm, metadata) for arm in arms if arm is not type(None))
    if origin is Literal:
        return " · ".join(f"`{arm}`" for arm in arms)
    if origin is list:
        return f"list of {_kind(arms[0], ())}"
    if origin is dict:
        return "mapping by name"
    bounds = [
        f"{sign} {value:,}" if isinstance(value := getattr(one, word), int) else f"{sign} {value:g}"
        for one in _flat(metadata) for word, sign in BOUNDS.items() if getattr(one, word, None) is not None
    ]  # fmt: skip
    return " ".join([SCALARS.get(hint, "text"), ", ".join(bounds)]).strip()


def _flat(metadata: Any) -> list[Any]:
    """pydantic keeps a `Field` of an annotation whole, with what it says inside."""
    found: list[Any] = []
    for one in metadata:
        if not isinstance(one, BeforeValidator):
            found += _flat(one.metadata) if hasattr(one, "metadata") else [one]
    return found


def main(check: bool) -> int:
    stale = False
    for name, config in PAGES.items():
        page = (ROOT / name).read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        made = f"{before}{BEGIN}\n{tables(config)}\n{END}{after}"
        if made == page:
            continue
        if check:
            source = sys.modules[config.__module__].__name__.replace(".", "/")
            print(f"{name} does not say what {source}.py does: python scripts/config_page.py", file=sys.stderr)
            stale = True
        else:
            (ROOT / name).write_text(made, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))

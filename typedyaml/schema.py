"""What a schema is made of: `Model` and the four scalar types, each of which takes exactly one spelling of a value.

The types accept YAML's text and, so that a model can also be built in code, the Python value itself. `Model` is strict:
a field annotated with a bare `int` refuses every text, so forgetting `Int` is found by the first test.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

_INT = re.compile(r"0|-?[1-9][0-9]{0,29}")
_FLOAT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]")


class ProblemAt(ValueError):
    """Raised by a validator of a `Model` to blame the key at `path` (relative to that model) instead of the model."""

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


class Model(BaseModel):
    """A mapping with known keys only."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Abbreviated(Model):
    """A mapping that one of a few texts may stand for. What is in it has no tuples: a validator that comes first makes
    pydantic take it for Python's own lists, which are none."""

    shorthands: ClassVar[dict[str, Any]] = {}
    """Text -> the mapping it stands for."""

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        return cls.shorthands.get(value, value) if isinstance(value, str) else value


def show(value: object) -> str:
    """`value` as it may stand in an error message: on one line, and short."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def _int(value: Any) -> Any:
    if isinstance(value, str):
        if _INT.fullmatch(value):
            return int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"needs a whole number in plain decimal (such as 8), is {show(value)}")


def _float(value: Any) -> Any:
    if isinstance(value, str):
        if _FLOAT.fullmatch(value) and not _LEADING_ZERO.match(value) and math.isfinite(float(value)):
            return float(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"needs a number (such as 3, 0.1 or 1e-4), is {show(value)}")


def _bool(value: Any) -> Any:
    if value in ("true", "false"):
        return value == "true"
    if isinstance(value, bool):
        return value
    raise ValueError(f"needs true or false, is {show(value)}")


def _str(value: Any) -> Any:
    if isinstance(value, str):
        return value
    raise ValueError(f'needs text, is {show(value)}; an empty text is written ""')


Int = Annotated[int, BeforeValidator(_int)]
"""Plain decimal only: `0123`, `10_1`, `0x10`, `1.0` and `+5` are errors; `"101"` in quotes is 101."""
Float = Annotated[float, BeforeValidator(_float)]
"""`3`, `0.1`, `1e-4`; always finite."""
Bool = Annotated[bool, BeforeValidator(_bool)]
"""`true` or `false`, nothing else."""
Str = Annotated[str, BeforeValidator(_str)]
"""Exactly the text: `no` is "no", `0123` is "0123"."""

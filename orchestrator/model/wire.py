"""The types of this package as JSON, and back: strictly, since programs can write into their run directory."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from functools import cache
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")
INT_LIMIT = 1 << 64


def to_json(value: Any) -> Any:
    """A dataclass of this module as plain JSON values."""
    return dataclasses.asdict(value)


class Misfit(ValueError):
    """What was read does not have the shape it should have; says where in it, and what stands there instead."""


def from_json(cls: type[T], data: Any) -> T:
    """The dataclass `cls` from what `to_json` made. Unknown keys are ignored, so that an older laptop reads a newer
    agent; whatever else does not fit (a missing key, a scalar of another type, a number JSON has no word for) raises
    `Misfit`: programs can write into their run directory, and a node can answer anything."""
    result: T = _load(cls, data, cls.__name__)
    return result


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _load(hint: Any, data: Any, where: str) -> Any:
    if hint is Any:
        return data
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        return _load(next(arm for arm in typing.get_args(hint) if arm is not type(None)), data, where)
    if origin is Literal:
        if data not in typing.get_args(hint):
            raise Misfit(f"{where} is none of {', '.join(map(str, typing.get_args(hint)))}")
        return data
    kind = origin or hint
    if dataclasses.is_dataclass(kind):
        return _load_dataclass(typing.cast(Any, kind), data, where)
    if kind is float and type(data) is int:
        data = float(data) if abs(data) < INT_LIMIT else math.inf
    if type(data) is not kind:  # not isinstance: a bool is no int here
        raise Misfit(f"{where} needs {kind.__name__}, not {type(data).__name__}")
    if kind is float and not math.isfinite(data):
        raise Misfit(f"{where} is not finite")
    if kind is int and abs(data) >= INT_LIMIT:
        raise Misfit(f"{where} is beyond 64 bits")
    arms = typing.get_args(hint)
    if kind is list:
        return [_load(arms[0], item, f"{where}[{index}]") for index, item in enumerate(data)]
    if kind is dict:
        return {_load(arms[0], key, where): _load(arms[1], item, f"{where}.{key}") for key, item in data.items()}
    return data


def _load_dataclass(cls: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise Misfit(f"{where} needs an object, not {type(data).__name__}")
    hints = _hints(typing.cast(Any, cls))
    values = {}
    for spec in dataclasses.fields(cls):
        if spec.name in data:
            values[spec.name] = _load(hints[spec.name], data[spec.name], f"{where}.{spec.name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise Misfit(f"{where} has no {spec.name}")
    return cls(**values)

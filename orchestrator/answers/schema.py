"""JSON Schema (draft 2020-12) of what a verb prints, from the types in this package and their docstrings.

A schema is open: within a version fields may be added, and whoever reads an answer passes over those that he does not
know. `closed` is the same without that room, by which tests hold what is printed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, Union

from orchestrator.answers import ANSWERS, BESIDE, LINES, Error, Head
from orchestrator.commands import ANSWERS as VERSIONS
from typedyaml.jsonschema import DRAFT, docstrings

SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}


def schema_of(verb: str) -> dict[str, Any]:
    """Raises `KeyError` for a verb that has no answer of its own."""
    maker = _Maker(VERSIONS[verb])
    arms = [maker.of(one) for one in (*ANSWERS[verb], Error)]
    each = "each line" if verb in LINES else "the answer"
    return {
        "$schema": DRAFT, "$id": f"specctl:{verb}:{VERSIONS[verb]}",
        "title": f"specctl {verb} --json, {each}, version {VERSIONS[verb]}",
        "anyOf": arms, "$defs": dict(sorted(maker.definitions.items())),
    }  # fmt: skip


def closed(schema: Any) -> Any:
    """`schema` without room for what it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    return {**found, "additionalProperties": False} if "properties" in schema and "required" in schema else found


class _Maker:
    def __init__(self, version: int) -> None:
        self.version = version
        self.definitions: dict[str, Any] = {}
        self._made: dict[str, Any] = {}

    def of(self, hint: Any) -> dict[str, Any]:
        origin, arms = typing.get_origin(hint), typing.get_args(hint)
        if origin in (Union, types.UnionType):
            return _either([self.of(arm) for arm in arms])
        if origin is Literal:
            return {"const": arms[0]} if len(arms) == 1 else {"enum": list(arms)}
        if origin is list:
            return {"type": "array", "items": self.of(arms[0])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(arms[1])}
        if hint is Any:
            return {}
        if hint is type(None):
            return {"type": "null"}
        if hint in SCALARS:
            return {"type": SCALARS[hint]}
        if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
            return self._reference(hint)
        raise TypeError(f"no JSON Schema is known for {hint!r}")

    def _reference(self, cls: Any) -> dict[str, Any]:
        name = cls.__name__
        if self._made.setdefault(name, cls) is not cls:
            raise TypeError(f"two types of one answer are called {name}: {cls} and {self._made[name]}")
        if name not in self.definitions:
            self.definitions[name] = {}  # before it is made: it may hold itself
            self.definitions[name] = self._object(cls)
        return {"$ref": f"#/$defs/{name}"}

    def _object(self, cls: Any) -> dict[str, Any]:
        beside = BESIDE.get(cls)
        hints = typing.get_type_hints(cls)
        words = {**docstrings(Head), **docstrings(cls)}
        if beside is not None:
            hints = {**hints, **{name: one for name, one in typing.get_type_hints(beside).items() if name not in hints}}
            words = {**docstrings(beside), **words}
        properties = {}
        for name, hint in hints.items():
            one = {"const": self.version} if (name, hint) == ("schema_version", int) else self.of(hint)
            properties[name] = {**one, "description": words[name]} if name in words else one
        found = {"type": "object", "properties": properties, "required": list(properties)}
        doc = (cls.__doc__ or "").strip()
        written = doc and doc != cls.__name__ and not doc.startswith(f"{cls.__name__}(")
        return {"description": " ".join(doc.split()), **found} if written else found


def _either(shapes: list[dict[str, Any]]) -> dict[str, Any]:
    """One of `shapes`; said in one where they are plain types."""
    if all(set(one) == {"type"} for one in shapes):
        return {"type": [one["type"] for one in shapes]}
    values = [_values(one) for one in shapes]
    if all(values):
        return {"enum": [value for found in values for value in found]}
    return {"anyOf": shapes}


def _values(shape: dict[str, Any]) -> list[Any]:
    """The values that a shape names; none where it names a kind of value."""
    return [None] if shape == {"type": "null"} else [shape["const"]] if "const" in shape else shape.get("enum", [])

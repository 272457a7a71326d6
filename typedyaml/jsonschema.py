"""A `Model` as JSON Schema (draft 2020-12), for editors: what the loader takes validates, a typo does not.

An editor types the values of a YAML file by its own rules before it looks at the schema, where the loader keeps every
value as text. So a text may look like a number or a truth value there, and a number may stand in quotes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any, Union

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from typedyaml import schema as typed
from typedyaml.schema import Abbreviated, Model

DRAFT = "https://json-schema.org/draft/2020-12/schema"
FLOAT = r"^[+-]?([1-9][0-9]*(\.[0-9]*)?|0(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?$"
INT = r"^(0|-?[1-9][0-9]{0,29})$"
SCALARS: dict[Any, dict[str, Any]] = {
    typed._int: {"type": ["integer", "string"], "pattern": INT},
    typed._float: {"type": ["number", "string"], "pattern": FLOAT},
    typed._bool: {"enum": [True, False, "true", "false"]},
    typed._str: {"type": ["string", "number", "boolean"]},
}
WORDS = {
    "ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum", "min_length": "minItems",
    "max_length": "maxItems", "pattern": "pattern",
}  # fmt: skip


def json_schema(
    model: type[Model], *, title: str, described: Mapping[type[Model], type[Any]] | None = None
) -> dict[str, Any]:
    """The schema of a file that `model` reads. `described`: whose docstrings explain a model's fields, if not its."""
    maker = _Maker(described or {})
    body = maker.of_model(model)
    return {"$schema": DRAFT, "title": title, **body, "$defs": maker.definitions}


class _Maker:
    def __init__(self, described: Mapping[type[Model], type[Any]]) -> None:
        self.described = described
        self.definitions: dict[str, Any] = {}

    def of_model(self, model: type[Model]) -> dict[str, Any]:
        words = {**docstrings(model), **docstrings(self.described.get(model, model))}
        properties, required = {}, []
        for name, field in model.model_fields.items():
            one = self.of(field.annotation, list(field.metadata))
            if name in words:
                one = {**one, "description": words[name]}
            if field.is_required():
                required.append(name)
            elif isinstance(field.default, (str, int, float)):
                one = {**one, "default": field.default}
            properties[name] = one
        found: dict[str, Any] = {"type": "object", "properties": properties}
        if model.model_config.get("extra") == "forbid":
            found["additionalProperties"] = False
        if required:
            found["required"] = required
        return found

    def of(self, hint: Any, metadata: list[Any]) -> dict[str, Any]:
        """What a value of type `hint` may look like, within the bounds that `metadata` sets."""
        origin, arms = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.of(arms[0], [*arms[1:], *metadata])
        if origin in (Union, types.UnionType):
            found = [self.of(arm, metadata) for arm in arms if arm is not type(None)]
            if len(found) == 1 and "type" in found[0]:  # one shape, or nothing: an editor says that best in one
                kinds = found[0]["type"]
                return {**found[0], "type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}
            return {"anyOf": [*found, {"type": "null"}] if type(None) in arms else found}
        if isinstance(hint, type) and issubclass(hint, Model):
            if hint.__name__ not in self.definitions:
                self.definitions[hint.__name__] = {}  # before it is made: it may hold itself
                self.definitions[hint.__name__] = self.of_model(hint)
            written_out = {"$ref": f"#/$defs/{hint.__name__}"}
            if issubclass(hint, Abbreviated):
                return {"anyOf": [{"enum": list(hint.shorthands)}, written_out]}
            return written_out
        flat = [item for one in metadata for item in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return {**self._shape(hint, origin, arms, flat), **_bounds(flat)}

    def _shape(self, hint: Any, origin: Any, arms: tuple[Any, ...], metadata: list[Any]) -> dict[str, Any]:
        for one in metadata:
            if isinstance(one, BeforeValidator) and one.func in SCALARS:
                found = dict(SCALARS[one.func])
                # A text of a certain form is no number.
                return {"type": "string"} if one.func is typed._str and "pattern" in _bounds(metadata) else found
        if origin is typing.Literal:
            return {"enum": list(arms)}
        if origin is list:
            return {"type": "array", "items": self.of(arms[0], [])}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(arms[1], [])}
        raise TypeError(f"no JSON Schema is known for {hint!r}")


def _bounds(metadata: list[Any]) -> dict[str, Any]:
    """`minimum`, `pattern` and the like; pydantic keeps some as objects of annotated_types, some as its own."""
    found = {}
    for one in metadata:
        for name, word in WORDS.items():
            value = getattr(one, name, None)
            if value is not None and not callable(value):
                found[word] = value
    return found


def docstrings(cls: type[Any]) -> dict[str, str]:
    """Field -> the text that stands below it in the source, or below it in the class that this one is a kind of; empty
    where there is no source."""
    base = cls.__base__
    found = docstrings(base) if base is not None and getattr(base, "model_fields", None) else {}
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):
        return found
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        ):  # fmt: skip
            found[field.target.id] = " ".join(below.value.value.split())
    return found

"""Reads a YAML file into a `Model`, and says in one line, `file:line: key: what is wrong`, why it cannot.

The text becomes a tree of dict, list, str and None (a plain `null`, `~` or nothing), with the line of every key kept
beside it; the model then types it. Anchors, aliases, merge keys and tags are refused: they are ways to say one thing
and mean another, and an alias can make a small file endless.
"""

from __future__ import annotations

import difflib
import json
import re
import stat
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, Union, cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from typedyaml.schema import Model, ProblemAt, show

M = TypeVar("M", bound=Model)
KeyPath = tuple[str | int, ...]
Lines = dict[KeyPath, int]

MOST_BYTES = 1 << 20
"""What people write by hand is far smaller; reading much more takes minutes, and was never meant."""
_NULLS = ("", "~", "null", "Null", "NULL")
_SHAPES = {
    "model_type": "needs a mapping (key: value)",
    "model_attributes_type": "needs a mapping (key: value)",
    "dict_type": "needs a mapping (key: value)",
    "list_type": "needs a list (such as [a, b])",
    "tuple_type": "needs a list (such as [a, b])",
    "set_type": "needs a list (such as [a, b])",
    "none_required": "must be left empty",
}


class TypedYamlError(ValueError):
    """One line: the file, the line and the key where known, and what is wrong."""

    def __init__(self, problem: str, *, file: str, line: int | None = None, key: str = "") -> None:
        where = f"{file}:{line}" if line else file
        super().__init__(": ".join(part for part in (where, key, problem) if part))
        self.problem, self.file, self.line, self.key = problem, file, line, key


def load(path: str | Path, model: type[M], *, name: str | None = None) -> M:
    """The file as a `model`; `name` stands for it in messages. Raises `TypedYamlError`, also when it cannot be read."""
    name, path = name or str(path), Path(path).expanduser()
    try:
        if problem := _unlike_a_file(path):
            raise TypedYamlError(problem, file=name)
        data = path.read_bytes()
    except OSError as error:
        near = _near(path) if isinstance(error, FileNotFoundError) else ""
        raise TypedYamlError(f"cannot be read: {error.strerror or error}{near}", file=name) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise TypedYamlError("is not UTF-8 text", file=name, line=line) from error
    return loads(text, model, name)


def _unlike_a_file(path: Path) -> str | None:
    """Why what is at `path` is no file to read settings from. Raises `OSError` when it cannot be looked at."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        inside = sorted(file.name for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
        more = ", ..." if len(inside) > 5 else ""
        return "is a directory, not a file" + (f"; in it: {', '.join(inside[:5])}{more}" if inside else "")
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file; what comes out of a pipe has to be written into one first"
    if found.st_size > MOST_BYTES:
        return f"has {found.st_size:,} bytes, and at most {MOST_BYTES:,} are read: is it the file you meant?"
    return None


def _near(path: Path) -> str:
    """Of the files beside a missing one, the nearest by name; or that there is no such folder."""
    try:
        beside = sorted(file.name for file in path.parent.iterdir() if file.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return f" (there is no folder {path.parent})"
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.75)  # endings alike are not enough
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


def loads(text: str, model: type[M], name: str = "<text>") -> M:
    """`text` as a `model`; `name` stands for the file in messages. Raises `TypedYamlError`."""
    lines: Lines = {(): 1}
    try:
        root = _Composer(text).get_single_node()
        tree = None if root is None else _plain(root, (), lines, name)
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise TypedYamlError(f"{error.reason} (character {error.character!r})", file=name, line=line) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        if "'\\t' that cannot start any token" in problem:
            problem = "a tab; YAML indents with spaces alone"
        raise TypedYamlError(
            "is not YAML: " + problem.replace("\n", " "), file=name, line=mark.line + 1 if mark else None
        ) from error
    except RecursionError as error:
        raise TypedYamlError("is nested too deeply", file=name) from error
    if tree is None:
        needs = [field.alias or key for key, field in model.model_fields.items() if field.is_required()]
        advice = f"needs {', '.join(needs)}" if needs else "write {} to mean so"
        raise TypedYamlError(f"is empty; {advice}", file=name, line=1)
    if not isinstance(tree, dict):
        raise TypedYamlError(f"needs a mapping (key: value) at the top, is {show(tree)}", file=name, line=1)
    try:
        # JSON, because strict validation of JSON still lets a list be a tuple and a text be a path, but never a number.
        return model.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise _first(error.errors(), model, lines, name) from error


class _Composer(yaml.BaseLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _refused(event, f"anchors and aliases are not read here ({event.anchor!r}): write the value out")
        if getattr(event, "tag", None):
            raise _refused(event, f"tags are not read here ({event.tag!r}): the key alone says what a value is")
        return super().compose_node(parent, index)


def _refused(event: yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast(Any, event.start_mark))


def _plain(node: yaml.Node, path: KeyPath, lines: Lines, name: str) -> Any:
    """`node` as dict, list, str or None. Notes the line of every key below `path` in `lines`."""
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.value in _NULLS:
            return None
        return _text(node, path, name)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, index), lines, name) for index, item in enumerate(node.value)]
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise TypedYamlError("a key must be plain text", file=name, line=key_line, key=_dotted(path))
        key = _text(key_node, path, name)
        where = (*path, key)
        if key in result:
            problem = f"duplicate key (first on line {lines[where]})"
            raise TypedYamlError(problem, file=name, line=key_line, key=_dotted(where))
        if key == "<<" and key_node.style is None:
            raise TypedYamlError("merge keys are not read here: write the keys out", file=name, line=key_line, key="<<")
        lines[where] = key_line
        result[key] = _plain(value_node, where, lines, name)
    return result


def _text(node: yaml.ScalarNode, path: KeyPath, name: str) -> str:
    text: str = node.value
    if any("\ud800" <= char <= "\udfff" for char in text):
        line = node.start_mark.line + 1
        raise TypedYamlError("is not valid text: half a surrogate pair", file=name, line=line, key=_dotted(path))
    return text


def _first(errors: list[ErrorDetails], model: type[BaseModel], lines: Lines, name: str) -> TypedYamlError:
    """The error to show: an unknown key before a missing one (a typo causes both), then the topmost."""
    explained = []
    for error in errors:
        cause = error.get("ctx", {}).get("error")
        path: KeyPath = error["loc"] + (cause.path if isinstance(cause, ProblemAt) else ())
        known = path
        while known not in lines:
            known = known[:-1]
        missing = error["type"] == "missing"
        # Beyond a key that exists, a path holds only pydantic's own names for the arms of a union.
        shown = path if missing else known
        explained.append((missing, lines[known], shown, _problem(error, cause, model)))
    _, line, shown, problem = min(explained, key=lambda item: item[:2])
    return TypedYamlError(problem, file=name, line=line, key=_dotted(shown))


def _problem(error: ErrorDetails, cause: object, model: type[BaseModel]) -> str:
    kind = error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(str(error["loc"][-1]), _keys_at(model, error["loc"][:-1]))
    if kind == "missing":
        return "is missing"
    if isinstance(cause, Exception):
        return " ".join(str(cause).split())
    if kind in _SHAPES:
        advice = "; write {} for one without keys" if error["input"] is None and "mapping" in _SHAPES[kind] else ""
        return f"{_SHAPES[kind]}, is {show(error['input'])}{advice}"
    wanted = error["msg"].replace("Input should be", "must be", 1)
    return f"{' '.join(wanted.split())}, is {show(error['input'])}"


def _unknown_key(key: str, known: Iterable[str]) -> str:
    known = list(known)
    meant = re.match(r"([\w-]+)(?::| +:?)(?=\S)", key)
    if meant and meant[1] in known:
        wants = "a colon and a space" if ":" not in key else "a space behind the colon"
        return f"unknown key; YAML wants {wants}: `{meant[1]}: {key[meant.end() :]}`"
    near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    return f"unknown key; known here: {', '.join(sorted(known))}"


def _keys_at(hint: Any, path: KeyPath) -> list[str]:
    """The keys that the schema knows at `path`."""
    origin, arms = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _keys_at(arms[0], path)
    if origin in (Union, types.UnionType):
        # A path through a union names the arm that was tried; it is no key of the file.
        return [key for arm in arms for key in _keys_at(arm, path) or _keys_at(arm, path[1:])]
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        fields = {field.alias or key: field for key, field in hint.model_fields.items()}
        if not path:
            return list(fields)
        field = fields.get(str(path[0]))
        return _keys_at(field.annotation, path[1:]) if field else []
    return _keys_at(arms[-1] if arms[-1] is not Ellipsis else arms[0], path[1:]) if arms and path else []


def _dotted(path: KeyPath) -> str:
    """`targets.gpu1.gpus[0]`; a key that would not read well so is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part and all(char.isalnum() or char in "_-/" for char in part)
            text += ("." if text else "") + (part if plain else json.dumps(part, ensure_ascii=False))
    return text

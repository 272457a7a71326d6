"""Writes docs/schemas/VERB.vN.json and the tables of docs/json.md, from the types of orchestrator/answers.

    python scripts/json_page.py [--check]

It refuses a schema that promises less than the one that is kept under the same version. `--check` changes nothing and
exits 1 where page or files are not what they would be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.answers import ANSWERS, LINES  # noqa: E402
from orchestrator.answers.schema import schema_of  # noqa: E402
from orchestrator.commands import ANSWERS as VERSIONS  # noqa: E402

PAGE, FOLDER = ROOT / "docs" / "json.md", ROOT / "docs" / "schemas"
BEGIN, END = "<!-- answers: written by scripts/json_page.py -->\n", "<!-- end of answers -->\n"
KINDS = {
    "string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null",
    "object": "object", "array": "list",
}  # fmt: skip
ALIKE = frozenset({"schema_version", "observed_at"})
"""Fields of most answers, which the page tells of once."""


# --- what a version promises ----------------------------------------------------------------------------------------


LOOSE = "$.probe"
"""What `show` says that it promises nothing of."""


def broken(old: Any, new: Any) -> list[str]:
    """Where an answer by schema `new` may surprise a program that was written for `old`."""
    return sorted(set(_broken(old, new, old, new, "$", set())))


def _broken(old: Any, new: Any, olds: Any, news: Any, where: str, seen: set[tuple[str, str]]) -> Iterator[str]:
    pair = old.get("$ref", ""), new.get("$ref", "")
    if (all(pair) and pair in seen) or where == LOOSE:
        return
    seen.add(pair)
    old, new = _resolved(old, olds), _resolved(new, news)
    if "anyOf" in old or "anyOf" in new:
        arms = old.get("anyOf", [old])
        for arm in new.get("anyOf", [new]):
            found = [(one, list(_broken(one, arm, olds, news, where, set(seen)))) for one in arms]
            if all(said for _, said in found):
                same = [said for one, said in found if "$ref" in arm and one.get("$ref") == arm["$ref"]]
                yield from same[0] if same else [f"{where} may be something new"]
        return
    if "enum" in old or "const" in old:
        if "enum" not in new and "const" not in new:
            yield f"{where} is no longer one of certain values"
        elif "const" in old and "const" in new and old["const"] != new["const"]:
            yield f"{where} is {new['const']!r}, not {old['const']!r}"
        elif None in new.get("enum", []) and None not in old.get("enum", [old.get("const")]):
            yield f"{where} may be null"
        return
    if "type" in old and (more := _kinds(new) - _kinds(old)):
        yield f"{where} may be {', '.join(sorted(more))}"
        return
    for name in old.get("required", []):
        if name not in new.get("required", []):
            yield f"{where}.{name} is gone"
        else:
            yield from _broken(old["properties"][name], new["properties"][name], olds, news, f"{where}.{name}", seen)
    for word, at in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(old.get(word), dict) and isinstance(new.get(word), dict):
            yield from _broken(old[word], new[word], olds, news, where + at, seen)


def _resolved(shape: Any, root: Any) -> Any:
    return root["$defs"][shape["$ref"].removeprefix("#/$defs/")] if "$ref" in shape else shape


def _kinds(shape: Any) -> set[str]:
    kinds = shape.get("type", list(KINDS))
    if "enum" in shape or "const" in shape:
        kinds = ["null" if value is None else "string" for value in shape.get("enum", [shape.get("const")])]
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    return found | {"integer"} if "number" in found else found


# --- the page -------------------------------------------------------------------------------------------------------


class _Page:
    """An object is told of once; two of one name (a log's `Place` and another) each beside its verb."""

    def __init__(self) -> None:
        self.schemas = {verb: schema_of(verb) for verb in ANSWERS}
        forms: dict[str, set[str]] = {}
        for schema in self.schemas.values():
            for name, shape in schema["$defs"].items():
                forms.setdefault(name, set()).add(json.dumps(shape))
        self.twofold = {name for name, found in forms.items() if len(found) > 1}

    def text(self) -> str:
        parts, objects = [], {}
        for verb, schema in self.schemas.items():
            file = f"schemas/{verb}.v{VERSIONS[verb]}.json"
            arms = [one["$ref"].rpartition("/")[2] for one in schema["anyOf"]][:-1]
            parts += [f"## {verb}", ""]
            for name in arms:
                parts += [*self._table(verb, schema["$defs"][name]), ""]
            each = "Schema of each line" if verb in LINES else "Schema"
            parts += [f"{each}, with [Error](#error): [{file}]({file})", ""]
            objects |= {self._title(verb, name): (verb, shape) for name, shape in schema["$defs"].items()
                        if name not in arms}  # fmt: skip
        parts += ["## Objects", "", "What the answers above are made of.", ""]
        for title, (verb, shape) in sorted(objects.items()):
            parts += [f"### {title}", "", *self._table(verb, shape), ""]
        return "\n".join(parts)

    def _title(self, verb: str, name: str) -> str:
        return f"{name} of {verb}" if name in self.twofold else name

    def _link(self, verb: str, name: str) -> str:
        title = self._title(verb, name)
        return f"[{title}](#{title.lower().replace(' ', '-')})"

    def _table(self, verb: str, shape: dict[str, Any]) -> list[str]:
        lines = []
        if "description" in shape:
            lines += [shape["description"], ""]
        lines += ["| field | | |", "|---|---|---|"]
        for name, one in shape["properties"].items():
            words = "" if name in ALIKE else one.get("description", "").replace("|", "\\|")
            lines.append(f"| `{name}` | {self._kind(verb, one)} | {words} |")
        return lines

    def _kind(self, verb: str, shape: dict[str, Any]) -> str:
        if "$ref" in shape:
            return self._link(verb, shape["$ref"].rpartition("/")[2])
        if "anyOf" in shape:
            return " or ".join(self._kind(verb, one) for one in shape["anyOf"])
        if "const" in shape or "enum" in shape:
            return " · ".join(f"`{json.dumps(one).strip(chr(34))}`" for one in shape.get("enum", [shape.get("const")]))
        if "items" in shape:
            return f"list of {self._kind(verb, shape['items'])}"
        if "additionalProperties" in shape:
            return f"mapping by name: {self._kind(verb, shape['additionalProperties'])}"
        kinds = shape.get("type", [])
        return " or ".join(KINDS[one] for one in ([kinds] if isinstance(kinds, str) else kinds)) or "anything"


def main(check: bool) -> int:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    page = _Page()
    made = {PAGE: f"{before}{BEGIN}\n{page.text()}\n{END}{rest.partition(END)[2]}"}
    for verb, schema in page.schemas.items():
        path = FOLDER / f"{verb}.v{VERSIONS[verb]}.json"
        made[path] = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        if path.exists() and (found := broken(json.loads(path.read_text(encoding="utf-8")), schema)):
            print(f"{verb} --json breaks version {VERSIONS[verb]}: {'; '.join(found)}. Keep what was promised, or "
                  "raise its number in orchestrator/commands.py", file=sys.stderr)  # fmt: skip
            return 1
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        print(f"{stale[0].relative_to(ROOT)} does not say what orchestrator/answers does: python scripts/json_page.py",
              file=sys.stderr)  # fmt: skip
        return 1
    for path in stale:
        path.write_text(made[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))

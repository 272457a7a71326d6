"""Records to conversations: what a line of JSON or a row of a table says, in the one form that chat templates take.

A record holds `messages` (role, content) or ShareGPT's `conversations` (from, value), and `tools` if there are any. Its
last turn may say that it is `unfinished`: nothing is known of how it would have ended.
`chat_template.py` makes tokens of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainer.data.sources import BadRecord

Message = dict[str, Any]

ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")} | {"function": "tool"}
SHAREGPT_ROLES = {
    **ROLES, "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
DIALECTS = {"messages": ("role", "content", ROLES), "conversations": ("from", "value", SHAREGPT_ROLES)}
"""Where a record holds its turns; and in a turn, where the role and the text are, and what roles are called."""
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
"""Other keys of a message that templates know."""
REASONING = ("reasoning_content", "reasoning", "thinking")
UNFINISHED = "unfinished"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unfinished: bool = False
    """The last turn, an assistant's text, was broken off."""

    @property
    def characters(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


DEEPEST = 64
"""Objects and lists inside one another, of a conversation with all its tools."""


def parse(record: Any) -> Conversation:
    """Raises `BadRecord`, which says what is wrong with it."""
    try:
        conversation = _parsed(record)
    except RecursionError:
        raise BadRecord("is nested too deeply") from None
    # Not left to Python's own limit, which depends on who calls, and to what a template does with it.
    if _deeper_than(DEEPEST, [conversation.messages, conversation.tools]):
        raise BadRecord("is nested too deeply")
    return conversation


def _deeper_than(depth: int, value: Any) -> bool:
    level = [value]
    for _ in range(depth):
        if not level:
            return False
        inside = [one.values() if isinstance(one, dict) else one for one in level]
        level = [inner for several in inside for inner in several if isinstance(inner, (dict, list))]
    return bool(level)


def _parsed(record: Any) -> Conversation:
    if not isinstance(record, dict):
        raise BadRecord("is not an object")
    key = next((key for key in DIALECTS if record.get(key) is not None), None)
    if key is None:
        raise BadRecord(f"has none of {', '.join(map(repr, DIALECTS))}")
    role_key, text_key, roles = DIALECTS[key]
    turns = _plain(record[key])
    if isinstance(turns, dict) and turns and all(isinstance(column, list) for column in turns.values()):
        # How `datasets` keeps a sequence of structures: a list for each of their fields.
        turns = [dict(zip(turns, values, strict=False)) for values in zip(*turns.values(), strict=False)]
    if not isinstance(turns, list) or not turns:
        raise BadRecord("holds no list of turns", f"under {key!r}")
    messages = [_message(turn, f"{key}[{index}]", role_key, text_key, roles) for index, turn in enumerate(turns)]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord("has no assistant turn")
    if early := [index for index, turn in enumerate(turns[:-1]) if turn.get(UNFINISHED)]:
        raise BadRecord("has an unfinished turn that is not its last", f"{key}[{early[0]}]")
    unfinished = bool(turns[-1].get(UNFINISHED))
    if unfinished and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise BadRecord("has an unfinished turn that is no text of the assistant's", f"{key}[{len(turns) - 1}]")
    return Conversation(messages=messages, tools=_tools(record.get("tools")), unfinished=unfinished)


def _message(turn: Any, place: str, role_key: str, text_key: str, roles: dict[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise BadRecord("has a turn that is not an object", place)
    role = turn.get(role_key)
    if not isinstance(role, str) or role not in roles:
        raise BadRecord("has a turn of an unknown role", f"{place}.{role_key} is {role!r}")
    message: Message = {"role": roles[role], "content": _text(turn.get(text_key), f"{place}.{text_key}")}
    message |= {key: turn[key] for key in KEPT if turn.get(key)}
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise BadRecord("has tool calls that are no list", place)
        message["tool_calls"] = [_tool_call(call, place) for call in message["tool_calls"]]
    if message["content"] is None:
        if "tool_calls" not in message:
            raise BadRecord("has a turn without a text", f"{place}.{text_key}")
        message["content"] = ""
    if message["role"] == "assistant" and not message["content"].strip() and "tool_calls" not in message:
        raise BadRecord("has an empty assistant turn", place)
    return message


def _text(content: Any, place: str) -> str | None:
    """A text; or one in parts, which servers too join line by line for a template that takes texts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecord("has a turn without a text", place)
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (isinstance(part, dict) and part.get("type", "text") != "text"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadRecord("has a part that is not text", f"{place} holds {kind!r}")
        parts.append(text)
    return "\n".join(parts)


def _tool_call(call: Any, place: str) -> Any:
    """With arguments as an object, which is what templates and servers take; APIs have them as JSON in a text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecord("has a tool call without a function's name", place)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise BadRecord("has a tool call whose arguments are not JSON", place) from None
    function = {**function, "arguments": {} if arguments is None else arguments}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise BadRecord("has tools that are not JSON") from None
    tools = _plain(tools) if tools else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRecord("has tools that are no list of objects")
    return tools


def _plain(value: Any) -> Any:
    """Without the keys that only other rows of a table have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def thinking(message: Message) -> str | None:
    """What the turn thinks before its text, if it does."""
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key])
    thought, closed, _ = message["content"].partition("</think>")
    return thought if closed and thought.removeprefix("<think>").strip() else None

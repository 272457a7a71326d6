"""Records to conversations, and conversations to token ids and which of them the assistant wrote.

A record holds `messages` (role, content) or ShareGPT's `conversations` (from, value), and `tools` if there are any. The
target's own chat template renders it. What the assistant wrote is what a server would let the model generate: from the
end of the generation prompt up to and including the token that ends the turn. Templates that mark it (`{% generation
%}`) say so themselves; of others it is found by rendering the conversation once more with marks in its texts, which
are single characters of Unicode's private use: see `_Spans`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.sources import BadRecord

Message = dict[str, Any]
Span = tuple[int, int]

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
MARKS = range(0xF0000, 0xFFFFE)
MARKS_OF_A_MESSAGE = 3
TODAY = datetime.date(2024, 7, 26)
"""What templates that ask for the date are told: rows must not differ from day to day."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STRFTIME = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def characters(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A conversation as tokens: ids, and whether each is trained on."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    context_only: int = 0
    """Turns of the assistant whose thinking the template leaves out, and which are therefore not trained on."""


# --- records --------------------------------------------------------------------------------------------------------


def parse(record: Any) -> Conversation:
    """Raises `BadRecord`, which says what is wrong with it."""
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
    return Conversation(messages=messages, tools=_tools(record.get("tools")))


def _message(turn: Any, place: str, role_key: str, text_key: str, roles: dict[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise BadRecord("has a turn that is not an object", place)
    role = turn.get(role_key)
    if not isinstance(role, str) or role not in roles:
        raise BadRecord("has a turn of an unknown role", f"{place}.{role_key} is {role!r}")
    message: Message = {"role": roles[role], "content": _text(turn.get(text_key), f"{place}.{text_key}")}
    message |= {key: turn[key] for key in KEPT if turn.get(key)}
    if "tool_calls" in message:
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


# --- conversations --------------------------------------------------------------------------------------------------


class Encoder:
    """Conversations to tokens, by the chat template of `tokenizer`. Raises `ConfigError` where it has none."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "data.kind: conversations need a target with a chat template; use text, or an instruct model"
            )
        self.tokenizer = tokenizer
        self._bridges: dict[tuple[str, bool], str] = {}
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self._ends = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
        self._templates: dict[bool, str] = {}
        self._prompts: dict[bool, bool] = {}
        self._tails: dict[bool, str] = {}
        self._developer = self._takes_developer()

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | BadRecord]:
        """One for each."""
        found: list[Any] = []
        for conversation in conversations:
            try:
                found.append(self._rendered(conversation))
            except BadRecord as bad:
                found.append(bad)
        unread = [place for place, one in enumerate(found) if isinstance(one, _Rendered)]
        if not unread:
            return found
        encoded = self.tokenizer(
            [found[place].text for place in unread], add_special_tokens=False, return_offsets_mapping=True,
            return_attention_mask=False, verbose=False,
        )  # fmt: skip
        for place, ids, offsets in zip(unread, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            rendered = found[place]
            starts = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
            trained = np.zeros(len(ids), dtype=np.bool_)
            for start, end in rendered.spans:
                trained |= (starts >= start) & (starts < end)
            found[place] = Encoded(
                ids=np.asarray(ids, dtype=np.int32), trained=trained, context_only=rendered.context_only
            )
        return found

    def render(self, messages: list[Message], tools: Any, *, prompt: bool = False) -> str:
        """The text of the template. Raises `BadRecord` where it refuses."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._template(tools is not None), tokenize=False,
                add_generation_prompt=prompt,
            )  # fmt: skip
        except Exception as error:  # a template is a program of the model's: it may refuse in any way it likes
            raise BadRecord("the chat template refuses it", " ".join(str(error).split())) from None
        return str(text)

    def _template(self, with_tools: bool) -> str:
        if with_tools not in self._templates:
            text = self.tokenizer.get_chat_template(tools=[{}] if with_tools else None)
            asked = {form: TODAY.strftime(form) for _, form in _STRFTIME.findall(text)}
            if "strftime_now" in text:
                said = f"{{{{ {json.dumps(asked)}.get(form, {TODAY.isoformat()!r}) }}}}"
                text = "{%- macro strftime_now(form) -%}" + said + "{%- endmacro -%}" + text
            self._templates[with_tools] = text
        return self._templates[with_tools]

    def _takes_developer(self) -> bool:
        """Whether the template has a place for this role; where it has none, servers take it for the system's."""
        try:
            asked = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}]
            return "be brief" in self.render(asked, None)
        except BadRecord:
            return False

    def _rendered(self, conversation: Conversation) -> _Rendered | Encoded:
        messages, tools = conversation.messages, conversation.tools
        if not self._developer:
            messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        if _GENERATION.search(self._template(tools is not None)):
            return self._by_generation(messages, tools)
        text = self.render(messages, tools)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRecord("holds half of a surrogate pair, which is no text") from None
        rendered = _Spans(self, messages, tools, text).found()
        if not rendered.spans:
            raise BadRecord("the chat template leaves the assistant's thinking out of every turn")
        return rendered

    def _by_generation(self, messages: list[Message], tools: Any) -> Encoded:
        try:
            made = self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._template(tools is not None), tokenize=True,
                return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False},
            )  # fmt: skip
        except Exception as error:
            raise BadRecord("the chat template refuses it", " ".join(str(error).split())) from None
        return Encoded(
            ids=np.asarray(made["input_ids"], dtype=np.int32),
            trained=np.asarray(made["assistant_masks"], dtype=np.bool_),
        )

    # --- what the template puts around turns ---

    def prompts_are_whole(self, with_tools: bool) -> bool:
        """Whether an assistant's turn begins where the generation prompt ends: not where a template makes nothing of
        `add_generation_prompt`, and yet puts a header before the turn."""
        if with_tools not in self._prompts:
            asked = [{"role": "user", "content": f"hello{chr(MARKS[0])}"}]
            tools: list[Any] | None = [] if with_tools else None
            answered = [*asked, {"role": "assistant", "content": f"{chr(MARKS[0])}good day"}]
            prompt = self.render(asked, tools, prompt=True)
            bridge = prompt.rpartition(chr(MARKS[0]))[2]
            between = self.render(answered, tools).split(chr(MARKS[0]))[1:2]
            headless = [text for text in between if text.startswith(bridge) and not text[len(bridge) :].strip()]
            self._prompts[with_tools] = bool(headless) or prompt != self.render(asked, tools)
        return self._prompts[with_tools]

    def bridge(self, role: str, with_tools: bool) -> str | None:
        return self._bridges.get((role, with_tools))

    def learn_bridge(self, role: str, with_tools: bool, bridge: str) -> None:
        self._bridges[role, with_tools] = bridge

    def tail(self, with_tools: bool) -> str:
        """What ends an assistant's turn: up to the first token of its own kind in what follows the text, else all of
        it but the space at its end."""
        if with_tools not in self._tails:
            mark = chr(MARKS[0])
            asked = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day" + mark}]
            _, _, behind = self.render(asked, [] if with_tools else None).partition(mark)
            end = self._ends.search(behind)
            self._tails[with_tools] = behind[: end.end()] if end else behind.rstrip()
        return self._tails[with_tools]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendered:
    text: str
    spans: list[Span] = field(default_factory=list)
    """In characters, of what the assistant wrote, with what ends its turns."""
    context_only: int = 0


class _Lost(Exception):
    """The marks do not say where a turn is."""


class _Spans:
    """Where in `text`, which the template makes of `messages`, the assistant's turns are.

    Every text gets a mark where it begins and one where it ends, inside of the space around it, which templates strip;
    thinking gets one where it ends. The rendered marks say where texts have come to lie, whatever else looks like the
    template's text in them. Without its marks it must be `text` to the letter, or the marks have changed something. A
    turn then begins behind the *bridge*: what stands between the end of the message before and the end of the
    generation prompt; it ends with the *tail*. Where this finds no turn, rendering the conversation up to it, and up to
    the turn's end, must give two beginnings of `text`.
    """

    def __init__(self, encoder: Encoder, messages: list[Message], tools: Any, text: str) -> None:
        self.encoder, self.messages, self.tools, self.text = encoder, messages, tools, text
        self.with_tools = tools is not None
        self.turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]

    def found(self) -> _Rendered:
        try:
            return self._by_marks()
        except _Lost:
            return self._by_prefixes()

    def _by_marks(self) -> _Rendered:
        if any(ord(letter) in MARKS for letter in set(self.text)) or len(self.messages) * MARKS_OF_A_MESSAGE > len(
            MARKS
        ):
            raise _Lost
        self.marked = [_marked(index, message) for index, message in enumerate(self.messages)]
        self.places = self._places(self.encoder.render(self.marked, self.tools))
        spans, context_only = [], 0
        for index in self.turns:
            thinks = _thinking(self.messages[index]) is not None
            if thinks and self._at(index, 2) is None:
                context_only += 1
            else:
                spans.append((self._start(index), self._end(index)))
        return _Rendered(text=self.text, spans=spans, context_only=context_only)

    def _places(self, rendered: str) -> dict[int, int]:
        """Where each mark is, in characters of what is left without them."""
        places: dict[int, int] = {}
        parts, at = re.split(f"([{chr(MARKS[0])}-{chr(MARKS[-1])}])", rendered), 0
        for part, mark in zip(parts[::2], [*parts[1::2], None], strict=True):
            at += len(part)
            if mark is not None:
                if ord(mark) in places:
                    raise _Lost
                places[ord(mark)] = at
        if "".join(parts[::2]) != self.text:
            raise _Lost
        return places

    def _at(self, index: int, which: int) -> int | None:
        """Of message `index`: 0 where its text begins, 1 where it ends, 2 where its thinking ends."""
        return self.places.get(MARKS[index * MARKS_OF_A_MESSAGE + which])

    def _start(self, index: int) -> int:
        begins = self._at(index, 0)
        if not index and begins is not None:
            return begins  # nothing prompts for what comes first
        before = self._at(index - 1, 1) if index else None
        if before is None:
            raise _Lost
        role = self.messages[index - 1]["role"]
        bridge = self.encoder.bridge(role, self.with_tools)
        if bridge is None or not self.text.startswith(bridge, before):
            bridge = self._own_bridge(index)
            self.encoder.learn_bridge(role, self.with_tools, bridge)
        common = _common(bridge, self.text[before : before + len(bridge)])
        start = before + common
        if begins is not None and start > begins:
            start, common = begins, len(bridge)  # as much of the prompt as the text itself begins with
        if common == len(bridge) and self.encoder.prompts_are_whole(self.with_tools):
            return start
        # Either there is no prompt to know the turn's header by, or one that this turn has only in part.
        if begins is None or (common < len(bridge) and self.text[start:begins].strip()):
            raise _Lost
        return begins if self.text[start:begins].strip() else start

    def _own_bridge(self, index: int) -> str:
        rendered = self.encoder.render(self.marked[:index], self.tools, prompt=True)
        _, mark, bridge = rendered.rpartition(chr(MARKS[(index - 1) * MARKS_OF_A_MESSAGE + 1]))
        if not mark:
            raise _Lost
        return bridge

    def _end(self, index: int) -> int:
        tail, ends, message = self.encoder.tail(self.with_tools), self._at(index, 1), self.messages[index]
        if "tool_calls" not in message:
            if ends is None:
                raise _Lost
            content = message["content"]
            space = content[len(content.rstrip()) :]
            for between in ("", space):
                if self.text.startswith(between + tail, ends):
                    return ends + len(between) + len(tail)
            raise _Lost
        # The calls stand behind the text, and the tail behind them.
        following = (self._at(later, 0) for later in range(index + 1, len(self.messages)))
        until = next((place for place in following if place is not None), len(self.text))
        if not tail or (at := self.text.rfind(tail, ends or 0, until)) < 0:
            raise _Lost
        return at + len(tail)

    def _by_prefixes(self) -> _Rendered:
        if not self.turns[0] or not self.encoder.prompts_are_whole(self.with_tools):
            place = f"turn {self.turns[0]}"
            raise BadRecord("the chat template does not show where the assistant's turn begins", place)
        spans, tail = [], self.encoder.tail(self.with_tools)
        for index in self.turns:
            before = self.encoder.render(self.messages[:index], self.tools, prompt=True)
            through = self.encoder.render(self.messages[: index + 1], self.tools)
            if not (self.text.startswith(before) and self.text.startswith(through) and len(before) < len(through)):
                raise BadRecord("the chat template renders a turn differently when others follow it", f"turn {index}")
            end = through.rfind(tail, len(before)) if tail else -1
            spans.append((len(before), end + len(tail) if end >= 0 else len(through)))
        return _Rendered(text=self.text, spans=spans)


def _common(one: str, other: str) -> int:
    """With how many same characters they begin."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (here, there) in enumerate(pairs) if here != there), min(len(one), len(other)))


def _thinking(message: Message) -> str | None:
    """What the turn thinks before its text, if it does."""
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key])
    thought, closed, _ = message["content"].partition("</think>")
    return thought if closed and thought.removeprefix("<think>").strip() else None


def _marked(index: int, message: Message) -> Message:
    begin, end, thought = (chr(MARKS[index * MARKS_OF_A_MESSAGE + which]) for which in range(MARKS_OF_A_MESSAGE))
    content = message["content"]
    marked = dict(message)
    if message["role"] == "assistant" and _thinking(message) is not None:
        if key := next((key for key in REASONING if isinstance(message.get(key), str)), None):
            marked[key] = _around(message[key], "", thought)
        else:
            thinking, _, content = content.partition("</think>")
            marked["content"] = (
                _around(_around(thinking, "", thought), begin, "") + "</think>" + _around(content, "", end)
            )
            return marked
    marked["content"] = _around(content, begin, end)
    return marked


def _around(text: str, begin: str, end: str) -> str:
    """With marks inside of the space around it. What is nothing but space stays as it is."""
    core = text.strip()
    if not core:
        return text
    at = text.index(core)
    return f"{text[:at]}{begin}{core}{end}{text[at + len(core) :]}"

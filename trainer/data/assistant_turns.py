"""Where in a rendered conversation the assistant's turns are, for chat templates that do not mark them.

The conversation is rendered once more with marks in its texts, single characters of Unicode's private use: one where a
text begins and one where it ends, inside of the space around it, which templates strip; one where thinking ends. The
marks say where texts have come to lie, whatever else in them looks like the template's own text. Without them it must
be the same text to the letter, or they have changed something.

A turn begins behind the *bridge*: what stands between the end of the message before and the end of the generation
prompt; it ends with the *tail* (`chat_template.Frame`). Where marks do not show a turn, rendering the conversation up
to it, and up to the turn's end, must give two beginnings of the text; or else the conversation is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.data.conversations import REASONING, Message, thinking
from trainer.data.sources import BadRecord

if TYPE_CHECKING:
    from trainer.data.chat_template import Template

Span = tuple[int, int]
MARKS = range(0xF0000, 0xFFFFE)
MARKS_OF_A_MESSAGE = 3
NO_THOUGHT = re.compile(r"\s*/?(think>)?\s*(</?think>\s*)*")
"""What is left of thinking that is not there, or its end, where a prompt opens it in another form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    text: str
    spans: list[Span] = field(default_factory=list)
    """In characters, of what the assistant wrote, with what ends its turns."""
    context_only: int = 0
    """Turns that are none of them, since the template leaves out what was thought before they were written."""
    said_until: int | None = None
    """Where the text of the last of the assistant's turns ends, before what the template puts behind it; None where it
    says nothing."""


def find(template: Template, messages: list[Message], tools: Any, text: str) -> Turns:
    """The assistant's turns in `text`, which `template` makes of `messages`. Raises `BadRecord`."""
    search = _Search(template, messages, tools, text)
    try:
        return search.by_marks()
    except _Lost:
        return search.by_prefixes()


def see_calls(message: Message, text: str, index: int) -> None:
    """Raises `BadRecord` where `text` lacks the tool calls of a message."""
    for call in message.get("tool_calls", ()):
        if call.get("function", call)["name"] not in text:
            raise BadRecord("the chat template leaves tool calls out", f"turn {index}")


class _Lost(Exception):
    """The marks do not say where a turn is."""


class _Search:
    def __init__(self, template: Template, messages: list[Message], tools: Any, text: str) -> None:
        self.template, self.messages, self.tools, self.text = template, messages, tools, text
        self.frame = template.frame(tools is not None)
        self.turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]

    def by_marks(self) -> Turns:
        too_many = len(self.messages) * MARKS_OF_A_MESSAGE > len(MARKS)
        if too_many or any(ord(letter) in MARKS for letter in set(self.text)):
            raise _Lost
        self.marked = [_marked(index, message) for index, message in enumerate(self.messages)]
        self.places = self._places(self.template.render(self.marked, self.tools))
        for index, message in enumerate(self.messages):
            if message["content"].strip() and self._at(index, 1) is None and not thinking(message):
                raise BadRecord("the chat template leaves out what is said", f"turn {index}, {message['role']}")
        spans, context_only = [], 0
        for index in self.turns:
            if thinking(self.messages[index]) is not None and self._at(index, 2) is None:
                context_only += 1
                continue
            start = self._start(index)
            end = self._end(index, start)
            see_calls(self.messages[index], self.text[start:end], index)
            spans.append((start, end))
        until = self._at(self.turns[-1], 1)
        return Turns(text=self.text, spans=spans, context_only=context_only, said_until=until)

    def by_prefixes(self) -> Turns:
        if not self.turns[0] or not self.frame.prompts:
            place = f"turn {self.turns[0]}"
            raise BadRecord("the chat template does not show where the assistant's turn begins", place)
        spans, tail, until = [], self.frame.tail, None
        for index in self.turns:
            before = self.template.render(self.messages[:index], self.tools, prompt=True)
            through = self.template.render(self.messages[: index + 1], self.tools)
            if not (self.text.startswith(before) and self.text.startswith(through) and len(before) < len(through)):
                raise BadRecord("the chat template renders a turn otherwise than it prompts for it", f"turn {index}")
            own = self.messages[index]["content"].startswith(self.frame.header)
            start = self._behind_header(len(before), len(before) if own else len(self.text))
            ends = through.rfind(tail, start) if tail and tail in through[start:] else len(through)
            end = min(ends + len(tail), len(through))
            said = self.messages[index]["content"].rpartition("</think>")[2].strip()
            if (at := self.text.rfind(said, start, ends)) < 0:
                raise BadRecord("the chat template leaves out what is said", f"turn {index}, assistant")
            until = at + len(said) if said else None
            see_calls(self.messages[index], self.text[start:end], index)
            spans.append((start, end))
        return Turns(text=self.text, spans=spans, said_until=until)

    # --- marks ---

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
        bridge = self.frame.bridges.get(role)
        if bridge is None or not self.text.startswith(bridge, before):
            bridge = self.frame.bridges[role] = self._own_bridge(index)
        common = _common(bridge, self.text[before : before + len(bridge)])
        start = before + common
        if begins is not None and start > begins:
            start, common = begins, len(bridge)  # as much of the prompt as the text itself begins with
        if common == len(bridge) and self.frame.prompts:
            return self._behind_header(start, len(self.text) if begins is None else begins)
        # Either there is no prompt to know the turn's header by, or one that this turn has only in part.
        if begins is None or (common < len(bridge) and not NO_THOUGHT.fullmatch(self.text, start, begins)):
            raise _Lost
        return begins if self.text[start:begins].strip() else start

    def _behind_header(self, start: int, most: int) -> int:
        """A turn may have a header of its own where the prompt needs none, as behind what a tool says."""
        header = self.frame.header
        return start + len(header) if header.strip() and self.text.startswith(header, start, most) else start

    def _own_bridge(self, index: int) -> str:
        rendered = self.template.render(self.marked[:index], self.tools, prompt=True)
        _, mark, bridge = rendered.rpartition(chr(MARKS[(index - 1) * MARKS_OF_A_MESSAGE + 1]))
        if not mark:
            raise _Lost
        return bridge

    def _end(self, index: int, start: int) -> int:
        tail, ends, message = self.frame.tail, self._at(index, 1), self.messages[index]
        if "tool_calls" not in message:
            if ends is None:
                raise _Lost
            content = message["content"]
            space = content[len(content.rstrip()) :]
            for between in ("", space):
                if self.text.startswith(between + tail, ends):
                    return ends + len(between) + len(tail)
            # The last turn may end with another token than those before, which end as messages of others do.
            other = self.template.tokens.match(self.text, ends)
            bridge = self.frame.bridges.get("user", "")
            if other and self.template.tokens.search(tail) and bridge.startswith(other.group()):
                return other.end()
            raise _Lost
        # The calls stand behind the text, and the tail behind them.
        following = (self._at(later, 0) for later in range(index + 1, len(self.messages)))
        until = next((place for place in following if place is not None), len(self.text))
        if not tail or (at := self.text.rfind(tail, max(start, ends or 0), until)) < 0:
            raise _Lost
        return at + len(tail)


def _marked(index: int, message: Message) -> Message:
    begin, end, thought = (chr(MARKS[index * MARKS_OF_A_MESSAGE + which]) for which in range(MARKS_OF_A_MESSAGE))
    content = message["content"]
    if message["role"] != "assistant" or thinking(message) is None:
        return {**message, "content": _around(content, begin, end)}
    if key := next((key for key in REASONING if isinstance(message.get(key), str)), None):
        return {**message, key: _around(message[key], "", thought), "content": _around(content, begin, end)}
    thinks, closing, answer = content.partition("</think>")
    thinks = _around(_around(thinks, "", thought), begin, "")
    return {**message, "content": f"{thinks}{closing}{_around(answer, '', end)}"}


def _around(text: str, begin: str, end: str) -> str:
    """With marks inside of the space around it. What is nothing but space stays as it is."""
    core = text.strip()
    if not core:
        return text
    at = text.index(core)
    return f"{text[:at]}{begin}{core}{end}{text[at + len(core) :]}"


def _common(one: str, other: str) -> int:
    """With how many same characters they begin."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (here, there) in enumerate(pairs) if here != there), min(len(one), len(other)))

"""Conversations to token ids and which of them the assistant wrote, by the target's own chat template.

What the assistant wrote is what a server would let the model generate: from the end of the generation prompt up to and
including the token that ends the turn. Templates that mark it (`{% generation %}`) say so themselves; of others
`assistant_turns.py` finds it. A conversation of which the template leaves out a text is refused: it would be another.
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
from trainer.data import assistant_turns
from trainer.data.assistant_turns import MARKS, Turns
from trainer.data.conversations import Conversation, Message, thinking
from trainer.data.sources import HALF_A_PAIR, BadRecord

TODAY = datetime.date(2024, 7, 26)
"""What templates that ask for the date are told: rows must not differ from day to day."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STRFTIME = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A conversation as tokens: ids, and whether each is trained on."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    context_only: int = 0
    """Turns of the assistant whose thinking the template leaves out, and which are therefore not trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What a template puts around the assistant's turns, found out on two short conversations."""

    prompts: bool
    """Whether a turn begins where the generation prompt ends: not where a template makes nothing of
    `add_generation_prompt`, and yet puts a header before the turn."""
    header: str
    """What the generation prompt adds."""
    tail: str
    """What ends a turn: up to the first token of its own kind behind the text, else all but the space at its end."""
    bridges: dict[str, str] = field(default_factory=dict)
    """By the role of the message before: what stands between its end and the end of the generation prompt. Learnt."""


class Template:
    """The chat template of a tokenizer. Raises `ConfigError` where it has none."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "data.kind: conversations need a target with a chat template; use text, or an instruct model"
            )
        self.tokenizer = tokenizer
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self.tokens = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
        """Finds those that a text is split at."""
        self._texts: dict[bool, str] = {}
        self._frames: dict[bool, Frame] = {}
        self._developer = self._takes_developer()

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | BadRecord]:
        """One for each."""
        found: list[Any] = []
        for conversation in conversations:
            try:
                found.append(self._rendered(conversation))
            except BadRecord as bad:
                found.append(bad)
        unread = [place for place, one in enumerate(found) if isinstance(one, Turns)]
        if not unread:
            return found
        encoded = self.tokenizer(
            [found[place].text for place in unread], add_special_tokens=False, return_offsets_mapping=True,
            return_attention_mask=False, verbose=False,
        )  # fmt: skip
        for place, ids, offsets in zip(unread, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            turns = found[place]
            starts = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
            trained = np.zeros(len(ids), dtype=np.bool_)
            for start, end in turns.spans:
                trained |= (starts >= start) & (starts < end)
            found[place] = Encoded(
                ids=np.asarray(ids, dtype=np.int32), trained=trained, context_only=turns.context_only
            )
        return found

    def turns(self, conversation: Conversation) -> Turns:
        """Where in the rendered text the assistant's turns are, as far as the template does not mark them itself.
        Raises `BadRecord`."""
        messages, tools = self._messages(conversation), conversation.tools
        text = self.render(messages, tools)
        found = assistant_turns.find(self, messages, tools, text)
        if not found.spans:
            raise BadRecord("the chat template leaves the assistant's thinking out of every turn")
        return _broken_off(found, messages[-1]) if conversation.unfinished else found

    def render(self, messages: list[Message], tools: Any, *, prompt: bool = False) -> str:
        """The text of the template. Raises `BadRecord` where it refuses."""
        try:
            text = str(self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._text(tools is not None), tokenize=False,
                add_generation_prompt=prompt,
            ))  # fmt: skip
            text.encode()
        except UnicodeEncodeError:
            raise BadRecord(HALF_A_PAIR) from None
        except Exception as error:  # a template is a program of the model's: it may refuse in any way it likes
            raise BadRecord("the chat template refuses it", " ".join(str(error).split())) from None
        return text

    def frame(self, with_tools: bool) -> Frame:
        """There may be a template of its own for conversations with tools."""
        if with_tools not in self._frames:
            mark = chr(MARKS[0])
            tools: list[Any] | None = [] if with_tools else None
            asked = [{"role": "user", "content": f"hello{mark}"}]
            answered = [*asked, {"role": "assistant", "content": f"{mark}good day{mark}"}]
            prompted, unprompted = self.render(asked, tools, prompt=True), self.render(asked, tools)
            _, between, _, behind = (self.render(answered, tools).split(mark) + [""] * 3)[:4]
            bridge = prompted.rpartition(mark)[2]
            end = self.tokens.search(behind)
            bare = between.startswith(bridge) and not between[len(bridge) :].strip()
            self._frames[with_tools] = Frame(
                prompts=bare or prompted != unprompted,
                header=prompted[len(unprompted) :] if prompted.startswith(unprompted) else "",
                tail=behind[: end.end()] if end else behind.rstrip(),
            )
        return self._frames[with_tools]

    def _text(self, with_tools: bool) -> str:
        if with_tools not in self._texts:
            text = self.tokenizer.get_chat_template(tools=[{}] if with_tools else None)
            if "strftime_now" in text:
                asked = {form: TODAY.strftime(form) for _, form in _STRFTIME.findall(text)}
                said = f"{{{{ {json.dumps(asked)}.get(form, {TODAY.isoformat()!r}) }}}}"
                text = "{%- macro strftime_now(form) -%}" + said + "{%- endmacro -%}" + text
            self._texts[with_tools] = text
        return self._texts[with_tools]

    def _messages(self, conversation: Conversation) -> list[Message]:
        if self._developer:
            return conversation.messages
        return [{**one, "role": "system"} if one["role"] == "developer" else one for one in conversation.messages]

    def _takes_developer(self) -> bool:
        """Whether the template has a place for this role; where it has none, servers take it for the system's."""
        try:
            asked = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}]
            return "be brief" in self.render(asked, None)
        except BadRecord:
            return False

    def _rendered(self, conversation: Conversation) -> Turns | Encoded:
        # Where the template marks turns itself, it marks their ends, too, which an unfinished one does not have.
        if conversation.unfinished or not _GENERATION.search(self._text(conversation.tools is not None)):
            return self.turns(conversation)
        messages, tools = self._messages(conversation), conversation.tools
        see_that_all_is_there(messages, self.render(messages, tools))
        made = self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._text(tools is not None), tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False},
        )  # fmt: skip
        return Encoded(
            ids=np.asarray(made["input_ids"], dtype=np.int32),
            trained=np.asarray(made["assistant_masks"], dtype=np.bool_),
        )


def _broken_off(turns: Turns, last: Message) -> Turns:
    """Without what the template puts behind the last turn's text. Raises `BadRecord`."""
    end = turns.said_until
    if end is None:
        raise BadRecord("has an unfinished turn without a text")
    thinks = last["content"].rpartition("<think>")[1:]
    if thinks[0] and "</think>" not in thinks[1] and "</think>" in turns.text[turns.spans[-1][0] : end]:
        raise BadRecord("breaks off within its thinking, which the chat template ends")
    return Turns(
        text=turns.text[:end], context_only=turns.context_only,
        spans=[(start, min(stop, end)) for start, stop in turns.spans],
    )  # fmt: skip


def see_that_all_is_there(messages: list[Message], text: str) -> None:
    """Raises `BadRecord` where a template has left out what somebody says; what tools say it may put in other words."""
    for index, message in enumerate(messages):
        said = message["content"].strip()
        if message["role"] == "assistant" and thinking(message) is not None:
            said = said.rpartition("</think>")[2].strip()
        if message["role"] != "tool" and said not in text:
            raise BadRecord("the chat template leaves out what is said", f"turn {index}, {message['role']}")
        assistant_turns.see_calls(message, text, index)

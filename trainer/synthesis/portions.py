"""A portion of conversations at a time: synthesised, or with an existing one's answers written anew.

What becomes of conversation number i follows from the seed and i, so that who goes on after a kill writes what would
have been written. Each `Made` is one that was tried: a record of the data, or the reason why there is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.conversations import UNFINISHED, Conversation, Message, parse
from trainer.data.sources import BadRecord
from trainer.decode.prompts import CATEGORY, prompt_ids
from trainer.synthesis import filters
from trainer.synthesis.author import Author, Turn
from trainer.synthesis.store import asked_in

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What became of one: either a `record` or a `fault`."""

    number: int
    record: Record | None = None
    key: bytes = b""
    """Of what is asked; see `filters.key_of`."""
    fault: str = ""


class Synthesis:
    """Conversations out of nothing."""

    verb = "synthesize"

    def __init__(self, author: Author) -> None:
        self.author, self.config = author, author.config
        self._questions, self._answers = author.question_engine(), author.answer_engine()

    def portion(self, numbers: range) -> list[Made]:
        """Those of these numbers, in their order."""
        author, seed = self.author, self.config.seed
        chosen = [self._opening(number) for number in numbers]
        asked = author.ask(
            self._questions, [opening for _, opening in chosen], [(seed, "question", number) for number in numbers]
        )  # fmt: skip
        found = {number: Made(number=number, fault=f"the question {turn.fault}")
                 for number, turn in zip(numbers, asked, strict=True) if turn.fault}  # fmt: skip
        texts = dict(zip(numbers, (turn.text for turn in asked), strict=True))
        prompts: dict[int, list[int]] = {}
        for number in numbers:
            if number not in found:
                try:
                    ids = prompt_ids(author.template, [{"role": "user", "content": texts[number]}])
                    if len(ids) > author.longest_prompt:
                        raise BadRecord("is too long")
                    prompts[number] = ids
                except BadRecord as bad:
                    found[number] = Made(number=number, fault=f"the question: {bad.reason}")
        answers = author.answer(
            self._answers, list(prompts.values()), [(seed, "answer", number) for number in prompts]
        )  # fmt: skip
        for number, turn in zip(prompts, answers, strict=True):
            if turn.fault:
                found[number] = Made(number=number, fault=f"the answer {turn.fault}")
                continue
            messages = [{"role": "user", "content": texts[number]}, _answer(turn)]
            category, _ = chosen[number - numbers.start]
            found[number] = Made(
                number=number, record={"messages": messages, CATEGORY: category}, key=filters.key_of(texts[number])
            )  # fmt: skip
        return [found[number] for number in numbers]

    def _opening(self, number: int) -> tuple[str, str]:
        """The category and how the question begins: all of them in turn."""
        openings = self.config.begins
        category = list(openings)[number % len(openings)]
        texts = openings[category]
        return category, texts[number // len(openings) % len(texts)]


class Regeneration:
    """Conversations that are there, each answer of the assistant's replaced by what the target says in its place: the
    earlier turns of which it sees are its own by then. `records` are all of them, in their order."""

    verb = "regenerate"

    def __init__(self, author: Author, records: Iterator[tuple[str, Any]], *, begin: int) -> None:
        self.author, self.config = author, author.config
        self._records = itertools.islice(records, begin, None)
        self._answers = author.answer_engine()

    def portion(self, numbers: range) -> list[Made]:
        """The next so many; fewer at the end."""
        found: dict[int, Made] = {}
        open_: dict[int, tuple[Conversation, list[Message]]] = {}
        records: dict[int, Record] = {}
        for number, (where, record) in zip(numbers, self._records, strict=False):
            try:
                if isinstance(record, BadRecord):
                    raise record
                conversation = parse(record)
                if any(one["role"] == "tool" or one.get("tool_calls") for one in conversation.messages):
                    raise BadRecord("calls tools, whose results nobody can write anew")
                open_[number] = conversation, []
                records[number] = {CATEGORY: record[CATEGORY]} if record.get(CATEGORY) else {}
                records[number]["source"] = where
            except BadRecord as bad:
                found[number] = Made(number=number, fault=f"the conversation {bad.reason}")
        for turn in itertools.count():
            if not open_:
                break
            self._answer_once(turn, open_, found, records)
        return [found[number] for number in sorted(found)]

    def _answer_once(self, turn: int, open_: dict[int, tuple[Conversation, list[Message]]], found: dict[int, Made],
                     records: dict[int, Record]) -> None:  # fmt: skip
        """The next answer of all conversations that have one."""
        prompts: dict[int, list[int]] = {}
        for number, (conversation, done) in list(open_.items()):
            left = conversation.messages[len(done) :]
            asked = list(itertools.takewhile(lambda one: one["role"] != "assistant", left))
            if len(asked) == len(left):
                self._close(number, done, "", open_, found, records)
                continue
            try:
                ids = prompt_ids(self.author.template, [*done, *asked])
                if len(ids) > self.author.longest_prompt:
                    raise BadRecord("is too long")
            except BadRecord as bad:
                self._close(number, done, f"the conversation {bad.reason}", open_, found, records)
                continue
            prompts[number] = ids
            done += asked
        answers = self.author.answer(
            self._answers, list(prompts.values()), [(self.config.seed, "answer", number, turn) for number in prompts]
        )  # fmt: skip
        for number, answer in zip(prompts, answers, strict=True):
            done = open_[number][1]
            if answer.fault:
                while done and done[-1]["role"] != "assistant":
                    done.pop()
                self._close(number, done, f"the answer {answer.fault}", open_, found, records)
            else:
                done.append(_answer(answer))
                if answer.unfinished:
                    self._close(number, done, "", open_, found, records)

    def _close(self, number: int, done: list[Message], fault: str, open_: dict[int, Any], found: dict[int, Made],
               records: dict[int, Record]) -> None:  # fmt: skip
        """With what has been answered; one that has no answer is dropped."""
        del open_[number]
        if any(one["role"] == "assistant" for one in done):
            found[number] = Made(
                number=number, record={"messages": done, **records[number]}, key=filters.key_of(asked_in(done))
            )  # fmt: skip
        else:
            found[number] = Made(number=number, fault=fault or "the conversation has nothing to answer")


def _answer(turn: Turn) -> Message:
    return {"role": "assistant", "content": turn.text, **({UNFINISHED: True} if turn.unfinished else {})}


def fresh(made: Sequence[Made], known: set[bytes]) -> list[Made]:
    """`made`, with those dropped whose question is `known`; which then has all of them."""
    found = []
    for one in made:
        if one.record is not None and one.key in known:
            one = Made(number=one.number, fault="the question was asked before")
        elif one.record is not None:
            known.add(one.key)
        found.append(one)
    return found

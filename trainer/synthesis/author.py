"""The target as an author: what a user might ask it, and what it answers, many at once.

A user's turn is drawn from where the chat template has put everything but the user's text, so that the target writes it
as it has seen users write; an opening gives it a direction. The answer is drawn as a server would draw it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import ConfigError
from trainer.data.assistant_turns import MARKS
from trainer.data.chat_template import Template
from trainer.decode.engine import Engine
from trainer.decode.generate import Continuation, Hopeless, Say, end_ids, prepared, run
from trainer.decode.sampling import Sampling
from trainer.model.target import Target
from trainer.synthesis import filters
from trainer.synthesis.config import DrawnConfig, SynthesisConfig

LONGEST_PROMPT = 4096
"""Tokens before an answer, at most, where the model itself sets no limit below it."""
SAID_EVERY_S = 15.0
"""How far a portion is: on a CPU one takes minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    text: str
    fault: str | None
    """Why it is not kept."""
    unfinished: bool = False


class Author:
    """Raises `ConfigError` for a target without a chat template, or that cannot be decoded here."""

    def __init__(self, target: Target, config: SynthesisConfig, *, longest_prompt: int, say: Say) -> None:
        self.target, self.config, self._say = target, config, say
        self.template = Template(target.tokenizer)
        mark = chr(MARKS[0])
        before, found, behind = self.template.render([{"role": "user", "content": mark}], None).partition(mark)
        if not found or not behind.strip():
            raise ConfigError("target.path: its chat template has no place for a user's turn, or no end of one")
        self.prefix = before
        ends = end_ids(target)
        self._question_ends = ends | {self._ids(behind)[0]}
        self._answer_ends = ends | {self._ids(self.template.frame(False).tail)[0]}
        limit = getattr(target.model.config.get_text_config(), "max_position_embeddings", None) or LONGEST_PROMPT
        self.longest_prompt = min(longest_prompt, limit - config.answer.max_tokens, LONGEST_PROMPT)
        if self.longest_prompt < 8:
            raise ConfigError(f"answer.max_tokens: the target knows {limit} positions; {config.answer.max_tokens} leave"
                              " no room for a question")  # fmt: skip
        self.tokens = 0
        """That it has written."""

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def question_prompts(self, openings: Sequence[str]) -> list[list[int]]:
        return [self._ids(self.prefix + opening) for opening in openings]

    def ask(self, engine: Engine, openings: Sequence[str], seeds: Sequence[Sequence[int | str]]) -> list[Turn]:
        """What users say, one with each opening."""
        made = self._run(engine, "questions", self.question_prompts(openings), self.config.question, seeds)
        turns = []
        for opening, one in zip(openings, made, strict=True):
            text, tokens = self._written(one)
            text = (opening + text).strip()
            turns.append(Turn(
                text=text, fault=filters.fault(text, tokens, ended=one.ended, drawn=self.config.question)
            ))  # fmt: skip
        return turns

    def answer(self, engine: Engine, prompts: Sequence[list[int]], seeds: Sequence[Sequence[int | str]]) -> list[Turn]:
        """What the target says behind each of `prompts`, none of which is longer than `longest_prompt`."""
        turns = []
        keep = self.config.answer.unfinished == "keep"
        made = self._run(engine, "answers", prompts, self.config.answer, seeds, hopeless=_loops if keep else None)
        for one in made:
            unfinished = not one.ended and keep
            if unfinished and (begins := filters.loop(one.tokens)) is not None:
                del one.tokens[begins:]
            text, tokens = self._written(one)
            if unfinished:
                text = text.rstrip(filters.HALF)  # of a character that is half there
            fault = filters.fault(text.strip(), tokens, ended=one.ended or unfinished, drawn=self.config.answer)
            if fault is None and filters.repetition(tokens) > self.config.max_repetition:
                fault = "repeats itself"
            turns.append(Turn(text=text.strip(), fault=fault, unfinished=unfinished))
        return turns

    def question_engine(self) -> Engine:
        openings = [opening for texts in self.config.begins.values() for opening in texts]
        longest = max(map(len, self.question_prompts(openings)))
        return self._engine(self.config.question, longest, self._question_ends)

    def answer_engine(self) -> Engine:
        return self._engine(self.config.answer, self.longest_prompt, self._answer_ends)

    def _engine(self, drawn: DrawnConfig, longest_prompt: int, stop_ids: set[int]) -> Engine:
        engine = prepared(Engine(
            self.target, None, rows=self.config.batch_size, capacity=longest_prompt + drawn.max_tokens,
            sampling=Sampling(temperature=drawn.temperature, top_p=drawn.top_p, top_k=drawn.top_k), stop_ids=stop_ids,
            compiled=self.config.compile != "off",
        ), self._say)  # fmt: skip
        if engine.rounds.recorded:
            how = "compiled and recorded" if engine.rounds.compiled else "recorded"
            self._say(f"rounds of {engine.rows} rows are {how}: seconds={engine.rounds.preparing_s:.1f}")
        return engine

    def _run(self, engine: Engine, what: str, prompts: Sequence[list[int]], drawn: DrawnConfig,
             seeds: Sequence[Sequence[int | str]], *, hopeless: Hopeless | None = None
             ) -> list[Continuation]:  # fmt: skip
        begun: set[int] = set()
        tokens, said = 0, time.monotonic()

        def tell(number: int, new: list[int]) -> None:
            nonlocal tokens, said
            begun.add(number)
            tokens += len(new)
            if time.monotonic() - said >= SAID_EVERY_S:
                said = time.monotonic()
                self._say(f"writing {what}: {len(begun)} of {len(prompts)} are begun, {tokens} tokens")

        made = run(engine, prompts, max_tokens=drawn.max_tokens, seeds=seeds, hopeless=hopeless, on_tokens=tell)
        self.tokens += made.tokens
        return made.continuations

    def _written(self, one: Continuation) -> tuple[str, list[int]]:
        tokens = one.tokens[:-1] if one.ended else one.tokens
        return str(self.target.tokenizer.decode(tokens, skip_special_tokens=True)), tokens


def _loops(tokens: Sequence[int]) -> bool:
    return filters.loop(tokens) is not None

"""What `synthesize` and `regenerate` are asked to write, as types; read like the trainer's own configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

import typedyaml
from trainer.config import ConfigError
from trainer.sections import LEAST_TEMPERATURE, MOST_TEMPERATURE, Count, Device, Dtype, Fraction, Index, Size
from typedyaml import Float, Model, ProblemAt, Str

OPENINGS = {
    "free": [""],
    "explain": ["Explain", "What is", "What does", "Why", "Describe", "Tell me about", "What is the difference"],
    "how-to": ["How do I", "How can I", "What is the best way to", "Give me the steps to", "How does one"],
    "code": ["Write a Python function that", "Write a program that", "Write a SQL query that",
             "What is wrong with this code:", "Write a shell command that", "Explain this code:"],
    "writing": ["Write a short story about", "Write a poem about", "Write an email to", "Write a paragraph about"],
    "lists": ["List", "Give me ten", "Name three", "What are some"],
    "maths": ["Calculate", "Solve", "How many", "If a"],
    "facts": ["Who", "When did", "Where is", "Which"],
    "advice": ["Should I", "I am", "I have", "Can you help me"],
    "rewriting": ["Summarize:", "Rewrite this sentence:", "Translate", "Correct the grammar of this text:"],
}  # fmt: skip
"""How a user's turn begins, by category; it goes on with what the target thinks that a user would say."""


def _greedy_or_warm(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"must be 0, or at least {LEAST_TEMPERATURE:g}, is {value:g}")
    return value


Temperature = Annotated[Float, Field(ge=0, le=MOST_TEMPERATURE), AfterValidator(_greedy_or_warm)]


class WriterConfig(Model):
    path: Str
    """A local Hugging Face causal language model with a chat template: the target that the drafter is for."""
    dtype: Dtype = "auto"
    """auto: bfloat16 where the device computes in it, else float32."""


class DrawnConfig(Model):
    """Of a user's turn."""

    temperature: Temperature = 1.0
    """0: always the most probable token."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 0.95
    """Only the most probable tokens that together have this much."""
    top_k: Count | None = None
    """Only the so many most probable tokens. Left out, all."""
    min_tokens: Count = 2
    """What is shorter is dropped."""
    max_tokens: Count = 96
    """What has not come to its end by then is dropped."""


class AnswerConfig(DrawnConfig):
    """Of the assistant's."""

    temperature: Temperature = 0.7
    """0: always the most probable token."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Only the most probable tokens that together have this much."""
    max_tokens: Count = 512
    """What has not come to its end by then is `unfinished`."""
    unfinished: Literal["drop", "keep"] = "drop"
    """keep: as far as it goes, marked as `unfinished`, so that nobody learns that it ends there; of an answer that has
    begun to say the same again and again, which is not waited for, what comes before. The last answer of its
    conversation."""


class SynthesisConfig(Model):
    target: WriterConfig
    output_dir: Str
    """Where `train.jsonl`, `held-out.jsonl` and `progress.json` go. What is there is gone on from."""
    conversations: Count | None = None
    """How many are to be there in the end, held-out ones included; more may be asked for later. For `synthesize`, which
    needs it; `regenerate` makes one of each that it reads."""
    paths: list[Str] = Field(default_factory=list)
    """Conversations whose answers `regenerate` replaces, as `data.paths` of a training; only for that."""
    seed: Index = 0
    """Of everything that is drawn: the same seed writes the same."""
    device: Device = "auto"
    """auto: the first GPU, or the CPU."""
    batch_size: Size = 64
    """Conversations that are written side by side."""
    compile: Literal["auto", "off"] = "off"
    """auto: what a GPU does for one token is compiled before it is recorded as a CUDA graph, which takes seconds; texts
    may go another way at a tie. Compiled code is kept where TORCHINDUCTOR_CACHE_DIR says, else in `compile-cache`
    beside `output_dir`. off: it is recorded as transformers runs it."""
    question: DrawnConfig = DrawnConfig()
    """How the user's turn is drawn."""
    answer: AnswerConfig = AnswerConfig()
    """How the assistant's is: as servers will, since that is what the drafter will have to draft."""
    openings: dict[Str, list[Str]] | None = None
    """By category: how user's turns begin, each as often as any other of its category, each category as often as any
    other; an empty text leaves all of it to the target. Left out, some of ten kinds: free, explain, how-to, code,
    writing, lists, maths, facts, advice, rewriting."""
    held_out_fraction: Fraction = 0.05
    """Of conversations, chosen by a hash of what the user asks: the same question is never on both sides."""
    max_repetition: Fraction = 0.5
    """An answer is dropped when more of its runs of four tokens than this are there before in it."""

    @model_validator(mode="after")
    def _openings_are_there(self) -> SynthesisConfig:
        for category, texts in self.begins.items():
            if not texts:
                raise ProblemAt(("openings", category), "has no text; an empty one leaves all of it to the target")
        if not self.begins:
            raise ProblemAt(("openings",), "names no category; leave it out, or write `free: ['']`")
        return self

    @property
    def begins(self) -> dict[str, list[str]]:
        """By category, how a user's turn begins."""
        return OPENINGS if self.openings is None else self.openings

    def what_decides(self, verb: str) -> dict[str, Any]:
        """What the written data depend on, as plain data."""
        kept: dict[str, Any] = {"verb": verb, "seed": self.seed}
        kept |= {key: getattr(self, key).model_dump() for key in ("question", "answer")}
        if self.answer.unfinished == "drop":
            del kept["answer"]["unfinished"]  # as in what was written before there was a choice
        kept |= {"held_out_fraction": self.held_out_fraction, "max_repetition": self.max_repetition}
        if verb == "synthesize":
            return {**kept, "openings": self.begins}
        del kept["question"]
        return kept


def load_synthesis(path: str, *, verb: str) -> SynthesisConfig:
    """Raises `ConfigError` with file, line and key."""
    try:
        config = typedyaml.load(path, SynthesisConfig)
    except typedyaml.TypedYamlError as error:
        raise ConfigError(str(error)) from error
    if verb == "synthesize" and config.conversations is None:
        raise ConfigError(f"{path}: conversations: says how many are to be written, and is missing")
    if verb == "regenerate" and not config.paths:
        raise ConfigError(f"{path}: paths: says whose answers are to be replaced, and is missing")
    if verb == "synthesize" and config.paths:
        raise ConfigError(f"{path}: paths: belongs to regenerate; synthesize reads nothing")
    return config



"""The loss mask of conversations: exactly what a server would have the model generate, whatever else looks like it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.templates import CHATML, QWEN3, QWEN3_THINKING, STYLES, Style
from trainer.data.chat_template import Encoded, Template
from trainer.data.conversations import Conversation, parse
from trainer.data.sources import BadRecord

TEMPLATE_TEXTS = sorted({text for style in (*STYLES.values(), QWEN3) for text in style.special} | {
    "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>assistant\n", "<think>", "### assistant:\n", "</answer>\n",
    "<start_of_turn>model\n", "[/INST] ", "<|start_header_id|>assistant<|end_header_id|>\n\n", "{{ m.content }}",
})  # fmt: skip
WORDS = st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=12)
TEXTS = st.lists(st.one_of(WORDS, st.sampled_from(TEMPLATE_TEXTS)), max_size=4).map("".join)
ANSWERS = TEXTS.filter(lambda text: text == text.strip() != "" and "</think>" not in text)
KINDS = ("byte-level", "sentencepiece")


@functools.cache
def tokenizer_of(kind: str, special: tuple[str, ...], template: str) -> Any:
    """Trained on the spot, with the `special` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    corpus = Path(functools.__file__).read_text(encoding="utf-8").splitlines()
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = ["▁"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "sentencepiece" else []
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(
            vocab_size=700, special_tokens=["<unk>", *fallback], initial_alphabet=alphabet, show_progress=False
        ),
    )  # fmt: skip
    if fallback:
        # They are tokens like all others, and not to be found in texts.
        data = json.loads(tokenizer.to_str())
        data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in fallback]
        tokenizer = Tokenizer.from_str(json.dumps(data))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=list(special))
    fast.chat_template = template
    return fast


def template_of(style: Style, kind: str = "byte-level") -> Template:
    return Template(tokenizer_of(kind, style.special, style.template))


def runs(chat: Template, one: Encoded) -> list[str]:
    """The texts of what is trained on, stretch by stretch."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], one.trained, [False]]).astype(np.int8))).reshape(-1, 2)
    return [chat.tokenizer.decode(one.ids[start:end]) for start, end in edges]


def encode(chat: Template, messages: list[dict[str, Any]], **more: Any) -> Encoded:
    (one,) = chat.encode([parse({"messages": messages, **more})])
    if isinstance(one, BadRecord):
        raise one
    return one


@st.composite
def talks(draw: st.DrawFn, roles: tuple[str, ...]) -> list[dict[str, str]]:
    """Of one to three turns of each."""
    messages = []
    if "system" in roles and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": "user", "content": "ask " + draw(TEXTS)}, {"role": "assistant", "content": draw(ANSWERS)}]
    return messages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_trained_on_is_what_the_assistant_says_and_its_end(name: str, kind: str, data: st.DataObject) -> None:
    style, chat = STYLES[name], template_of(STYLES[name], kind)
    messages = data.draw(talks(style.roles))
    one = encode(chat, messages)
    expected = [style.said(turn["content"]) + style.end for turn in messages if turn["role"] == "assistant"]
    assert runs(chat, one) == expected


@pytest.mark.parametrize("name", [name for name in STYLES if "marks what" not in name])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_spans_are_exact_whatever_space_is_around_texts(name: str, data: st.DataObject) -> None:
    style, chat = STYLES[name], template_of(STYLES[name])
    space = st.text(" \t\n", max_size=3)
    messages = [
        {"role": one["role"], "content": data.draw(space) + one["content"] + data.draw(space)}
        for one in data.draw(talks(style.roles))
    ]
    rendered = chat.turns(Conversation(messages=messages))
    assert rendered.text == chat.render(messages, None)
    expected = [style.said(turn["content"]) + style.end for turn in messages if turn["role"] == "assistant"]
    assert [rendered.text[start:end] for start, end in rendered.spans] == expected


@pytest.mark.parametrize("template", [QWEN3.template, QWEN3_THINKING], ids=["prompt", "prompt that opens thinking"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_turn_whose_thinking_is_stripped_is_context_and_the_others_are_trained_on(template: str, data: st.DataObject
                                                                                    ) -> None:  # fmt: skip
    chat = Template(tokenizer_of("byte-level", QWEN3.special, template))
    messages = data.draw(talks(("system", "user", "assistant")))
    for turn in messages:
        turn["content"] = turn["content"].replace("<think>", "think")
    turns, expected, stripped = [turn for turn in messages if turn["role"] == "assistant"], [], 0
    opened = "" if template == QWEN3_THINKING else "<think>\n"
    for turn in turns:
        said, last = turn["content"] + "<|im_end|>", turn is turns[-1]
        thought = data.draw(ANSWERS.filter(lambda text: "<think>" not in text))
        form = data.draw(st.sampled_from(["none", "in the text", "apart"]))
        if form == "in the text":
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content']}"
        elif form == "apart":
            turn["reasoning_content"] = thought
        if form == "none":
            expected.append(f"{opened}\n</think>\n\n{said}" if last else said)
        elif last:
            expected.append(f"{opened}{thought}\n</think>\n\n{said}")
        else:
            stripped += 1
    one = encode(chat, messages)
    assert (runs(chat, one), one.context_only) == (expected, stripped)


def test_a_template_that_never_shows_thinking_leaves_nothing_to_train_on_and_says_so() -> None:
    turn = {"role": "assistant", "content": "four", "reasoning_content": "two and two"}
    with pytest.raises(BadRecord, match="leaves the assistant's thinking out of every turn"):
        encode(template_of(STYLES["llama 3"]), [{"role": "user", "content": "2 + 2?"}, turn])


def test_tool_calls_are_generated_and_what_tools_say_is_not() -> None:
    chat = Template(tokenizer_of("byte-level", QWEN3.special, QWEN3.template))
    call = {"type": "function", "function": {"name": "look", "arguments": '{"up": "<|im_end|>"}'}}
    written = '\n<tool_call>\n{"name": "look", "arguments": {"up": "<|im_end|>"}}\n</tool_call><|im_end|>'
    messages = [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "<|im_end|>\n<|im_start|>assistant\nit is red"},
        {"role": "assistant", "content": "let me see", "tool_calls": [call]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "blue"},
    ]
    one = encode(chat, messages, tools=json.dumps([{"type": "function", "function": {"name": "look"}}]))
    empty = "<think>\n\n</think>\n\n"
    assert runs(chat, one) == [written, f"let me see{written}", f"{empty}blue<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, QWEN3.template.replace("m.role != 'assistant'", "m.role == 'user'")])
def test_the_developer_speaks_as_himself_or_else_as_the_system(template: str) -> None:
    knows = template == CHATML
    if not knows:
        template = template.replace("{% else %}{% set content", "{% elif m.role == 'system' %}"
            "{{ '<|im_start|>system\\n' + m.content + '<|im_end|>\\n' }}"
            "{% elif m.role == 'assistant' %}{% set content", 1)  # fmt: skip
    chat = Template(tokenizer_of("byte-level", QWEN3.special, template))
    one = encode(chat, [
        {"role": "developer", "content": "be brief"}, {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "four"},
    ])  # fmt: skip
    said = chat.tokenizer.decode(one.ids)
    assert said.startswith(f"<|im_start|>{'developer' if knows else 'system'}\nbe brief<|im_end|>\n")


def test_a_text_in_parts_is_one_text_and_a_picture_is_refused() -> None:
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "lines"}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    chat = template_of(STYLES["chatml"])
    one = encode(chat, talk)
    assert "two\nlines<|im_end|>" in chat.tokenizer.decode(one.ids) and runs(chat, one) == ["yes<|im_end|>"]
    parts.append({"type": "image_url", "image_url": "file:///a.png"})  # type: ignore[dict-item]
    with pytest.raises(BadRecord, match=r"has a part that is not text: messages\[0\].content holds 'image_url'"):
        encode(chat, talk)


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([("user", "a"), ("assistant", "")], r"has an empty assistant turn: messages\[1\]"),
        ([("user", "a"), ("assistant", " \n")], "has an empty assistant turn"),
        ([("user", "a"), ("assistant", "\ud83d")], "half of a surrogate pair"),
        ([("system", "a"), ("user", "b"), ("assistant", "c")], "the chat template refuses it: System role not"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_its_reason(turns: list[tuple[str, str]], said: str) -> None:
    with pytest.raises(BadRecord, match=said):
        encode(template_of(STYLES["gemma"]), [{"role": role, "content": content} for role, content in turns])


def test_a_template_that_marks_what_is_generated_is_taken_at_its_word() -> None:
    turn = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
    chat = Template(tokenizer_of(
        "byte-level", QWEN3.special,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + turn + "{% endif %}<|im_end|>\n{% endfor %}",
    ))  # fmt: skip
    said = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    assert runs(chat, encode(chat, said)) == ["That."], "without what ends the turn, which others are trained on"


@pytest.mark.parametrize("name", STYLES)
def test_nobody_learns_that_an_unfinished_turn_ends_where_it_was_broken_off(name: str) -> None:
    style, chat = STYLES[name], template_of(STYLES[name])
    asked = [{"role": "user", "content": "again"}, {"role": "assistant", "content": "first one"},
             {"role": "user", "content": "again"}, {"role": "assistant", "content": "one first on"}]  # fmt: skip
    one = encode(chat, [*asked[:-1], {**asked[-1], "unfinished": True}])
    whole = encode(chat, asked)
    assert runs(chat, one) == [style.said("first one") + style.end, style.said("one first on")]
    assert one.ids.tolist() == whole.ids[: len(one.ids)].tolist() and len(one.ids) < len(whole.ids)


@pytest.mark.parametrize("name", STYLES)
def test_an_unfinished_turn_ends_where_its_text_does_though_its_words_are_those_of_the_template(name: str) -> None:
    style, chat = STYLES[name], template_of(STYLES[name])
    for said in ("e", "end", "<", "|", "im", "s", "user", "assistant", "</think>", "an end"):
        asked = [{"role": "user", "content": "again"}, {"role": "assistant", "content": said, "unfinished": True}]
        one = encode(chat, asked)
        assert runs(chat, one) == [style.said(said)] and one.trained[-1]


def test_a_turn_broken_off_within_its_thinking_is_refused_where_the_template_would_end_it() -> None:
    asked = [{"role": "user", "content": "again"}, {"role": "assistant", "content": "<think>one", "unfinished": True}]
    with pytest.raises(BadRecord, match="breaks off within its thinking, which the chat template ends"):
        encode(template_of(QWEN3), asked)
    chatml = template_of(STYLES["chatml"])
    assert runs(chatml, encode(chatml, asked)) == ["<think>one"]
    asked[1]["content"] = "<think>one</think>"
    with pytest.raises(BadRecord, match="has an unfinished turn without a text"):
        encode(chatml, asked)


def test_an_unfinished_turn_is_so_whether_or_not_the_template_marks_what_is_generated() -> None:
    said = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    turn = "{{ m.role }}\n{% if m.role == 'assistant' %}" + said + "{% else %}"
    chat = Template(tokenizer_of(
        "byte-level", QWEN3.special,
        "{% for m in messages %}<|im_start|>" + turn + "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}",
    ))  # fmt: skip
    asked = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    assert runs(chat, encode(chat, asked)) == ["That.<|im_end|>"]
    assert runs(chat, encode(chat, [asked[0], {**asked[1], "unfinished": True}])) == ["That."]


def test_only_a_text_of_the_assistants_can_be_unfinished() -> None:
    with pytest.raises(BadRecord, match="unfinished turn that is no text of the assistant's"):
        parse({"messages": [
            {"role": "assistant", "content": "a"}, {"role": "user", "content": "b", "unfinished": True},
        ]})  # fmt: skip


def test_only_the_last_turn_can_be_unfinished() -> None:
    with pytest.raises(BadRecord, match=r"has an unfinished turn that is not its last: messages\[1\]"):
        parse({"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "unfinished": True},
            {"role": "user", "content": "go on"}, {"role": "assistant", "content": "c"},
        ]})  # fmt: skip


def test_a_conversation_may_begin_with_the_assistant() -> None:
    chat = template_of(STYLES["llama 3"])
    one = encode(chat, [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}])
    assert runs(chat, one) == ["hello<|eot_id|>"]


def test_texts_with_the_very_characters_that_mark_turns_are_told_apart_all_the_same() -> None:
    chat = template_of(STYLES["chatml"])
    talk = [("user", "\U000f0000"), ("assistant", "\U000f0003 one"), ("user", "b"), ("assistant", "two")]
    one = encode(chat, [{"role": role, "content": content} for role, content in talk])
    assert runs(chat, one) == ["\U000f0003 one<|im_end|>", "two<|im_end|>"]


def test_a_template_that_changes_earlier_turns_is_refused_by_name() -> None:
    template = CHATML.replace("m.content +", "(m.content if loop.last else m.content | upper) +")
    chat = Template(tokenizer_of("byte-level", QWEN3.special, template))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert runs(chat, encode(chat, talk)) == ["b<|im_end|>"]
    one = encode(chat, talk * 2)
    assert runs(chat, one) == ["B<|im_end|>", "b<|im_end|>"]
    lengths = CHATML.replace("m.role +", "m.role + (m.content | length | string) +")
    chat = Template(tokenizer_of("byte-level", QWEN3.special, lengths))
    with pytest.raises(BadRecord):
        encode(chat, talk)


def test_the_date_that_a_template_asks_for_is_always_the_same() -> None:
    template = "{{ strftime_now('%d %B %Y') if strftime_now is defined else 'no date' }}\n" + CHATML
    chat = Template(tokenizer_of("byte-level", QWEN3.special, template))
    one = encode(chat, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert chat.tokenizer.decode(one.ids).startswith("26 July 2024\n<|im_start|>user")


def test_what_a_template_leaves_out_is_never_trained_on_without_it() -> None:
    """Neither a message, nor tool calls: what is left would be another conversation."""
    lists = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
    talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    for generation in ("", "{% generation %}{% endgeneration %}"):
        chat = Template(tokenizer_of("byte-level", QWEN3.special, lists + generation + "<|im_end|>{% endfor %}"))
        with pytest.raises(BadRecord, match="leaves out what is said: turn 0, user"):
            encode(chat, talk)
    call = {"role": "assistant", "content": "look", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for style in ("chatml", "chatml that marks what is generated"):
        with pytest.raises(BadRecord, match="leaves tool calls out: turn 1"):
            encode(template_of(STYLES[style]), [talk[0], call])


def test_the_last_turn_may_end_with_a_token_of_its_own() -> None:
    end = "('<|end|>' if loop.last and m.role == 'assistant' else '<|im_end|>')"
    template = CHATML.replace("m.content + '<|im_end|>", f"m.content + {end} + '")
    chat = Template(tokenizer_of("byte-level", (*QWEN3.special, "<|end|>"), template))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    assert runs(chat, encode(chat, talk)) == ["b<|im_end|>", "b<|end|>"]


def test_a_turn_without_thinking_behind_a_prompt_that_opens_it_begins_with_its_text() -> None:
    """Such a template writes an empty thought before it, which nobody has thought."""
    thought = "('<think></think>' if m.role == 'assistant' else '')"
    template = CHATML.replace("m.role + '\\n' +", f"m.role + '\\n' + {thought} +")
    template = template.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    chat = Template(tokenizer_of("byte-level", QWEN3.special, template))
    one = encode(chat, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert runs(chat, one) == ["b<|im_end|>"] and "<think></think>b" in chat.tokenizer.decode(one.ids)


def test_a_turn_that_goes_on_behind_what_a_tool_says_begins_behind_its_header() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<tool>{{ m.content }}</tool>{% else %}"
        "<|im_start|>{{ m.role + '\\n' + m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
        "</call>{% endfor %}{% if not m.tool_calls %}<|im_end|>{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
    )
    chat = Template(tokenizer_of("byte-level", QWEN3.special, template))
    one = encode(chat, [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"},
    ])  # fmt: skip
    assert runs(chat, one) == ["<call>f</call>", "c<|im_end|>"]

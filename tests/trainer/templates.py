"""Small chat templates in the styles of well-known families, with what each makes of an assistant's turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    template: str
    special: tuple[str, ...]
    """Tokens of its own."""
    end: str
    """What ends an assistant's turn."""
    said: Callable[[str], str] = str.strip
    """What of a text is generated."""
    roles: tuple[str, ...] = ("system", "user", "assistant")


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STYLES = {
    "chatml": Style(template=CHATML, special=("<|im_start|>", "<|im_end|>"), end="<|im_end|>", said=str),
    "chatml that knows no prompt": Style(  # so that a turn's header is all up to its first letter
        template=CHATML.partition("{% if add")[0], special=("<|im_start|>", "<|im_end|>"), end="<|im_end|>",
        said=str.lstrip,
    ),
    "chatml that marks what is generated": Style(
        template="{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
        "{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        special=("<|im_start|>", "<|im_end|>"), end="<|im_end|>", said=str,
    ),
    "llama 3": Style(
        template="{{ '<|begin_of_text|>' }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), end="<|eot_id|>",
    ),
    "mistral": Style(
        template="{{ '<s>' }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = m.content | trim + '\\n\\n' %}{% elif m.role == 'user' %}"
        "{{ '[INST] ' + ns.system + m.content | trim + ' [/INST]' }}{% set ns.system = '' %}"
        "{% else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}",
        special=("<s>", "</s>", "[INST]", "[/INST]"), end="</s>", said=lambda text: " " + text.strip(),
    ),
    "gemma": Style(
        template="{{ '<bos>' }}{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}"
        "{{ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        special=("<bos>", "<start_of_turn>", "<end_of_turn>"), end="<end_of_turn>", roles=("user", "assistant"),
    ),
    "phi": Style(
        template="{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), end="<|end|>", said=str,
    ),
    "plain words": Style(
        template="{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content | trim + '</answer>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}",
        special=(), end="</answer>",
    ),
}  # fmt: skip
QWEN3 = Style(
    template="{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role != 'assistant' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% else %}"
    "{% set content = m.content %}{% set thought = '' %}{% if m.reasoning_content is string %}"
    "{% set thought = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<|im_start|>assistant\\n<think>\\n'"
    " + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else %}"
    "{{ '<|im_start|>assistant\\n' + content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    special=("<|im_start|>", "<|im_end|>"), end="<|im_end|>", said=str,
)  # fmt: skip
QWEN3_THINKING = QWEN3.template.replace(
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}",
)
"""Whose prompt opens the thinking."""

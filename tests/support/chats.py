"""Chat templates of our own in the families' documented formats, on a tokenizer of bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from workbench import ROOT

POCKET = ROOT / "data" / "pocket"
# Joins that may span any border: new lines, spaces and letters.
MERGES = [("Ċ", "Ċ"), ("Ġ", "a"), ("Ċ", "a"), ("t", "h"), ("Ġ", "Ġ"), (":", "Ġ")]

CHATML = r"""
{%- if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
{%- endfor -%}
{{- '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
LLAMA3 = r"""
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
{%- if loop.first and tools %}{{ (tools | tojson) + '\n' }}{% endif -%}
{%- for call in m.tool_calls or [] %}
{{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
{%- endfor -%}
{{- (m.content or '') | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""
GEMMA = r"""
{{- bos_token }}
{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}
{{- raise_exception('there is no ' + m.role + ' role') }}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' }}
{{- (m.content or '') | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}
"""
# The tools stand before the last user's message, wherever that is.
MISTRAL = r"""
{{- bos_token }}
{%- set asked = namespace(last=-1, system='') -%}
{%- for m in messages if m.role == 'system' %}{% set asked.system = m.content + '\n\n' %}{% endfor -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == asked.last %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif -%}
{{- '[INST] ' + asked.system + m.content + '[/INST]' }}{% set asked.system = '' %}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content + '}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] ' + (m.tool_calls | map(attribute='function') | list | tojson) + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- endif -%}
{%- endfor -%}
"""
# Reasoning stays where it follows the last user's message; an order not to reason is an empty block.
QWEN3 = r"""
{%- if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- set asked = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set text = m.content or '' -%}
{%- set why = m.reasoning_content or '' -%}
{%- if '</think>' in text %}
{%- set why = text.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set text = text.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > asked.last and (loop.last or why) %}
{{- '<think>\n' + why + '\n</think>\n\n' }}
{%- endif -%}
{{- text }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
{%- endfor -%}
{{- '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif -%}
{%- endif -%}
"""


@dataclass(frozen=True)
class Family:
    """A template's text, its special tokens, and those that belong to the text (`<think>`)."""

    template: str
    special: tuple[str, ...]
    end: str
    bos: str | None = None
    plain: tuple[str, ...] = ()


QWEN_SPECIAL, CALLS = ("<|im_start|>", "<|im_end|>"), ("<tool_call>", "</tool_call>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
INST = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
FAMILIES = {
    "chatml": Family(CHATML, QWEN_SPECIAL, "<|im_end|>", plain=CALLS),
    "llama3": Family(LLAMA3, HEADERS, "<|eot_id|>", "<|begin_of_text|>"),
    # The tokenizer's own end token is another than the one that ends a turn, and new lines are tokens added.
    "gemma": Family(
        GEMMA, ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", ("\n", "\n\n")
    ),
    "mistral": Family(MISTRAL, INST, "</s>", "<s>"),
    "qwen3": Family(QWEN3, QWEN_SPECIAL, "<|im_end|>", plain=(*CALLS, "<think>", "</think>")),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """A family's tokenizer; that of `pocket` is the bundled one."""
    return AutoTokenizer.from_pretrained(POCKET) if name == "pocket" else build(FAMILIES[name])


def build(family: Family, merges: Sequence[tuple[str, str]] = MERGES) -> PreTrainedTokenizerBase:
    """Bytes, joins that do not stop at words, and the family's own tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(family.special))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.plain])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.end, bos_token=family.bos)
    made.chat_template = re.sub(r"\A\n|\n\Z", "", family.template)
    return made


def say(*texts: str, system: str = "") -> list[dict[str, Any]]:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages

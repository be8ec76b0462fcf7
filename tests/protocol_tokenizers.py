"""Small real tokenizers and chat templates for the tests of protocols, trained in a moment."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "def print(x): return x + 1\nfor i in range(10):\n    total += i * i\nThe answer is \\boxed{42}. Let me compute "
    'the sum of the numbers with python. {"name": "python", "arguments": {"code": "print(6*7)"}} <tool_call>'
    " </tool_call> ```python\nimport math\n```\nhello hello hello world café naïve 東京 日本語 🙂🙂 Москва "
    "<answer> </answer> <search>"
)

# A Qwen-like template in our own words: tools in the system turn, tool results in a user turn, thoughts of earlier
# turns dropped, an empty thought where thinking is switched off.
CHATML_TOOLS = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Call them as <tool_call>
{"name": "...", "arguments": {}}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{%- set visible = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content and not loop.last
 else m.content -%}
{{ '<|im_start|>assistant\\n' + visible + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}"""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# As Gemma's: no system role, no tool role, strict alternation.
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

TAGS = [f"<{slash}{t}>" for t in ("think", "python", "search", "result", "answer") for slash in ("", "/")]
TINY_SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>", *TAGS]
TINY = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}<|assistant|>"


def _byte_level(special: list[str], size: int) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = Regex(r"'s|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([WORDS] * 3, trainer)
    return made


@cache
def chatml(template: str = CHATML_TOOLS, call_tokens: bool = False) -> Any:
    """A byte-level BPE tokenizer as Qwen's; `call_tokens`: `<tool_call>` and so on are (non-special) added tokens."""
    made = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 700)
    if call_tokens:
        names = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"]
        made.add_tokens([AddedToken(n, special=False, normalized=False) for n in names])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    return fast


@cache
def tiny() -> Any:
    """As that of the embedded agent: every tag is one special token."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(TINY_SPECIAL, 400), eos_token="<|end|>", pad_token="<|end|>"
    )
    fast.chat_template = TINY
    return fast


@cache
def sentencepiece(scheme: str = "first") -> Any:
    """BPE with `▁` for spaces and byte fallback, as Llama 2 and Gemma; a BOS is added by default."""
    special = ["<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"]
    plain = Tokenizer(models.BPE(unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=[chr(c) for c in range(33, 127)] + ["▁"],
        limit_alphabet=100,
        show_progress=False,
    )
    plain.train_from_iterator([WORDS] * 3, trainer)
    model = json.loads(plain.to_str())["model"]
    vocabulary = model["vocab"] | {f"<0x{b:02X}>": len(model["vocab"]) + b for b in range(256)}
    merges = [tuple(m) for m in model["merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = plain.pre_tokenizer
    made.add_special_tokens(special)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    fast.chat_template = ALTERNATING
    return fast


def scramble(text: Any, data: bytes, rng: random.Random) -> list[int]:
    """Ids whose bytes are `data`, split at random: a tokenization that `encode` would never choose."""
    table = _pieces_by_first_byte(text)
    ids, at = [], 0
    while at < len(data):
        options = [(i, p) for i, p in table[data[at]] if data.startswith(p, at)]
        token, piece = rng.choice(options)
        ids.append(token)
        at += len(piece)
    return ids


_TABLES: dict[int, dict[int, list[tuple[int, bytes]]]] = {}


def _pieces_by_first_byte(text: Any) -> dict[int, list[tuple[int, bytes]]]:
    key = id(text.tokenizer)
    if key not in _TABLES:
        table: dict[int, list[tuple[int, bytes]]] = {b: [] for b in range(256)}
        for token in range(len(text.tokenizer)):
            if token not in text.added and (piece := text.pieces[token]):
                table[piece[0]].append((token, piece))
        _TABLES[key] = table
    return _TABLES[key]

"""The tokenizer of the embedded agents: byte-level BPE learned on their world, numbers in groups of three digits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

TAGS = (
    "<|pad|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<think>",
    "</think>",
    "<python>",
    "</python>",
    "<search>",
    "</search>",
    "<result>",
    "</result>",
    "<answer>",
    "</answer>",
)
"""One special token each."""

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|end|>"
    "{% elif m['role'] == 'tool' %}<result>{{ m['content'] }}</result>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# GPT-4's pattern without its English contractions: words with one character before them, up to three digits, the rest.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, numbers: bool) -> Any:
    """Learn a tokenizer: a `transformers.PreTrainedTokenizerFast` with `TAGS`, a chat template and a pad token.

    `vocab_size` counts the tags, the 256 bytes and the merges. `numbers` adds all strings of two and three digits as
    tokens on top, so that copying a number of up to three digits is one step.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def shell(model: Any) -> Any:
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    learned = shell(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator(texts, trainer)
    bpe = json.loads(learned.to_str())["model"]
    vocab: dict[str, int] = dict(bpe["vocab"])
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in bpe["merges"]]
    if numbers:
        for width in (2, 3):
            for n in range(10**width):
                vocab.setdefault(f"{n:0{width}d}", len(vocab))
    # Without ignore_merges 2023 would fall into 2, 02 and 3: the number tokens have no merges.
    final = shell(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    final.add_special_tokens(list(TAGS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=final,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=[t for t in TAGS if t not in ("<|pad|>", "<|end|>")],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer

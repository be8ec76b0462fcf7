"""The model that both sides of `benchmarks/trl.py` train: a Qwen3 of 1.1 million parameters, random and taught."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

from benchmarks.trl_side import add

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def make_checkpoints(work: Path, template: str, teach_steps: int) -> dict[str, Path]:
    """The random and the taught checkpoint by job; made once and kept in `work`."""
    paths = {"fixed": work / "random", "calls": work / f"taught-{teach_steps}"}
    for job, path in paths.items():
        if not (path / "config.json").exists():
            tokenizer = make_tokenizer(template)
            model = make_model(tokenizer)
            if job == "calls":
                teach(model, tokenizer, teach_steps)
            tokenizer.save_pretrained(path)
            model.save_pretrained(path)
    return paths


def make_tokenizer(template: str) -> Any:
    """Byte-level BPE learned on the words of prompt and traces, with a token for each number below 1000."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import get_json_schema

    from agentropy.training.tokenizer import PATTERN

    texts = [json.dumps(get_json_schema(add)) + template]
    texts += [re.sub(r"\d+", "", part) for part in trace(random.Random(0))]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learned.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    bpe = json.loads(learned.to_str())["model"]
    vocab: dict[str, int] = bpe["vocab"]
    for n in range(10, 1000):
        vocab.setdefault(str(n), len(vocab))
    final = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m) for m in bpe["merges"]], ignore_merges=True))
    final.pre_tokenizer, final.decoder = split, decoders.ByteLevel()
    final.add_special_tokens(list(SPECIALS))
    final.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=final,
        pad_token=SPECIALS[0],
        eos_token=SPECIALS[2],
        additional_special_tokens=[SPECIALS[1]],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = template
    return tokenizer


def trace(rng: random.Random) -> tuple[str, str, str, str]:
    """Question, call, result and answer of a trace that the model learns from."""
    a, b = rng.randrange(10, 500), rng.randrange(10, 500)
    call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
    return (
        f"What is {a} plus {b}? Use the tool.",
        f"<think>\nThe numbers are {a} and {b}.\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>",
        str(a + b),
        f"<think>\nThe tool says {a + b}.\n</think>\n\nThe answer is {a + b}.<|im_end|>",
    )


def make_model(tokenizer: Any) -> Any:
    """Random weights, the same every time."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=448,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def teach(model: Any, tokenizer: Any, steps: int) -> None:
    """About a minute of supervised learning: enough to call the tool in form, not to be always right."""
    import torch

    from agentropy.protocols.hermes import HermesDialect
    from agentropy.tools.functions import from_function
    from agentropy.training.warm_start import Example, Recipe, fit
    from agentropy.trajectory import ToolResult

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rng = random.Random(1)
    dialect = HermesDialect(tokenizer, hint="")
    specs = [from_function(add).spec()]
    examples = []
    for _ in range(8 * steps):
        question, call, result, answer = trace(rng)
        parts = [
            (dialect.prompt(question, specs), False),
            (tokenizer.encode(call, add_special_tokens=False), True),
            (dialect.results([ToolResult(result)]), False),
            (tokenizer.encode(answer, add_special_tokens=False), True),
        ]
        ids = tuple(i for part, _ in parts for i in part)
        examples.append(Example(ids, tuple(own for part, own in parts for _ in part)))
    recipe = Recipe(world="benchmark", steps=steps, batch_tokens=2048)
    fit(model, examples, recipe, rng, tokenizer.pad_token_id, lambda line: print(line, flush=True), 50)
    model.eval()

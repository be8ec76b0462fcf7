"""Warm starts: a small agent learns the format, the tools and the flaws of an expert by supervised learning.

The result is an ordinary Hugging Face checkpoint (Qwen3 architecture, tokenizer, chat template) that any policy of
this package loads. The default ones of the worlds ship with the package; `agentropy warm-start` makes them again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentropy.errors import UserError
from agentropy.training.checkpoint import share
from agentropy.training.expert import Trace
from agentropy.training.muon import Muon
from agentropy.training.tokenizer import TAGS, train_tokenizer

TAG = re.compile("|".join(map(re.escape, TAGS)))
RECIPE_VERSION = 1
"""Counted up whenever the same recipe would give another checkpoint, so that old cache entries are not used."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything a warm start depends on.

    The data are `traces` traces of the world's expert, gone through `epochs` times in batches of `batch_tokens` tokens
    of similar length; `steps` > 0 sets the number of batches instead. `words_apart` learns the tokenizer on the words
    between the tags, so that a word after a tag can be one token; without it a tag's last sign counts as part of it.
    """

    world: str
    seed: int = 0
    traces: int = 26_000
    epochs: float = 1.6
    steps: int = 0
    batch_tokens: int = 1024
    vocab_size: int = 640
    numbers: bool = True
    words_apart: bool = False
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    intermediate_size: int = 256
    embedding_std: float = 0.07
    muon_lr: float = 0.015
    adam_lr: float = 3e-3
    warmup_steps: int = 40

    def digest(self) -> str:
        """A hash that names the checkpoint of this recipe."""
        text = json.dumps({"version": RECIPE_VERSION} | dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


RECIPES: dict[str, Recipe] = {
    "arithmetic": Recipe(world="arithmetic"),
    "facts": Recipe(world="facts", traces=20_000, vocab_size=960, numbers=False),
    "arithmetic-hard": Recipe(world="arithmetic-hard", traces=30_000, vocab_size=480, words_apart=True),
    "facts-hard": Recipe(
        world="facts-hard", traces=22_000, vocab_size=800, numbers=False, words_apart=True, intermediate_size=224
    ),
}
"""The recipes of the warm starts that ship with the package."""
SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 56, "heads": 2, "intermediate_size": 80},
    "default": {},
    "large": {"hidden_size": 256, "layers": 3, "heads": 8, "intermediate_size": 512},
}
"""What the sizes of agents change in a recipe: each has at least four times the parameters of the one before it."""


def recipe_of(name: str, size: str = "default") -> Recipe:
    """The recipe of a world's agent. Raises UserError for an unknown world or size."""
    if name not in RECIPES:
        raise UserError(f"no world {name!r}; there are {', '.join(RECIPES)}")
    if size not in SIZES:
        raise UserError(f"no agent of size {size!r}; there are {', '.join(SIZES)}")
    return dataclasses.replace(RECIPES[name], **SIZES[size])


@dataclass(frozen=True, slots=True)
class Example:
    """One encoded trace. `is_model[i]` is True where `ids[i]` is a token that the agent shall learn to write."""

    ids: tuple[int, ...]
    is_model: tuple[bool, ...]


Report = Callable[[str], None]


def expert_of(world: str) -> Callable[[random.Random], Trace]:
    """The flawed expert of a world: a function from a random state to a trace."""
    if world == "arithmetic":
        from agentropy.training.expert_arithmetic import arithmetic_trace

        return arithmetic_trace
    if world == "facts":
        from agentropy.training.expert_facts import facts_expert

        return facts_expert()
    if world == "arithmetic-hard":
        from agentropy.training.expert_arithmetic_hard import arithmetic_hard_trace

        return arithmetic_hard_trace
    if world == "facts-hard":
        from agentropy.training.expert_facts_hard import facts_hard_expert

        return facts_hard_expert()
    raise UserError(f"no expert for world {world!r}; there are experts for {', '.join(RECIPES)}")


def encode(trace: Trace, tokenizer: Any) -> Example:
    """Encode a trace as the `tags` protocol writes it: prompt, turns and results are tokenised one by one."""
    ids: list[int] = []
    is_model: list[bool] = []
    for part, text in trace.parts:
        if part == "question":
            text = f"<|user|>{text}<|assistant|>"
        elif part == "result":
            text = f"<result>{text}</result>"
        piece = tokenizer(text, add_special_tokens=False).input_ids
        ids += piece
        is_model += [part == "model"] * len(piece)
    return Example(tuple(ids), tuple(is_model))


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """A freshly initialised `Qwen3ForCausalLM` of the recipe's size, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            head_dim=recipe.hidden_size // recipe.heads,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            dtype="float32",
        )
    )
    with torch.no_grad():
        # With a tied head, the usual 0.02 leaves a copied token a logit too small to be sure of.
        model.model.embed_tokens.weight.normal_(0.0, recipe.embedding_std)
    return model


def batches(examples: Sequence[Example], budget: int, rng: random.Random) -> Iterator[list[Example]]:
    """One epoch in batches of at most `budget` tokens, examples of similar length together, batches in random order."""
    order = list(range(len(examples)))
    rng.shuffle(order)
    order.sort(key=lambda i: len(examples[i].ids))
    out: list[list[Example]] = []
    current: list[Example] = []
    for i in order:
        example = examples[i]
        if current and (len(current) + 1) * len(example.ids) > budget:
            out.append(current)
            current = []
        current.append(example)
    if current:
        out.append(current)
    rng.shuffle(out)
    yield from out


def collate(batch: Sequence[Example], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids[B, L] padded on the right, rows and columns of the positions whose next token is learned, those tokens)."""
    length = max(len(e.ids) for e in batch)
    ids = torch.full((len(batch), length), pad)
    learned = torch.zeros((len(batch), length), dtype=torch.bool)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        learned[row, : len(example.ids)] = torch.tensor(example.is_model)
    return ids, learned[:, 1:], ids[:, 1:][learned[:, 1:]]


def loss_of(model: Any, ids: Tensor, learned: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the learned tokens. Right padding needs no mask: causal attention never looks there."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[learned]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), targets)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a warm start came to: its loss over the last tenth of the steps, and what it cost."""

    loss: float
    steps: int
    tokens: int
    cpu_seconds: float


def train_warm_start(recipe: Recipe, out: Path, report: Report = print, report_every: int = 100) -> Outcome:
    """Run a recipe and save the checkpoint in `out`. Deterministic for one machine and one number of threads."""
    rng = random.Random(f"warm-start/{recipe.world}/{recipe.seed}")
    expert = expert_of(recipe.world)
    traces = [expert(rng) for _ in range(recipe.traces)]
    texts = (text for t in traces[:4000] for _, text in t.parts)
    if recipe.words_apart:
        texts = (piece for text in texts for piece in TAG.split(text) if piece)
    tokenizer = train_tokenizer(texts, recipe.vocab_size, recipe.numbers)
    examples = [encode(t, tokenizer) for t in traces]
    model = build_model(recipe, tokenizer)
    report(
        f"{recipe.traces} traces ({sum(t.correct for t in traces) / len(traces):.0%} right, "
        f"{sum(t.calls for t in traces) / len(traces):.2f} calls each), vocabulary {len(tokenizer)}, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters"
    )
    outcome = fit(model, examples, recipe, rng, tokenizer.pad_token_id, report, report_every)
    save_checkpoint(model, tokenizer, out, recipe, outcome)
    return outcome


def fit(
    model: Any,
    examples: Sequence[Example],
    recipe: Recipe,
    rng: random.Random,
    pad: int,
    report: Report,
    report_every: int,
) -> Outcome:
    """Train `model` in place: Muon on the matrices, AdamW on the rest, cosine decay to 2 % after a short warm-up."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named if p.ndim != 2 or "embed" in n]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        Muon(matrices, lr=recipe.muon_lr),
        torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    )
    base = [o.param_groups[0]["lr"] for o in optimizers]
    epoch = list(batches(examples, recipe.batch_tokens, rng))
    total = recipe.steps or round(len(epoch) * recipe.epochs)
    losses: list[float] = []
    tokens, started = 0, time.process_time()
    for step in range(total):
        if step and step % len(epoch) == 0:
            epoch = list(batches(examples, recipe.batch_tokens, rng))
        batch = epoch[step % len(epoch)]
        ids, learned, targets = collate(batch, pad)
        loss = loss_of(model, ids, learned, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        warm = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / total))
        for optimizer, lr in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * warm * cosine
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        tokens += sum(len(e.ids) for e in batch)
        if (step + 1) % report_every == 0 or step + 1 == total:
            recent = losses[-report_every:]
            seconds = time.process_time() - started
            report(f"step {step + 1}/{total}  loss {sum(recent) / len(recent):.3f}  {seconds:.0f} CPU-s")
    tail = losses[-max(1, total // 10) :]
    return Outcome(sum(tail) / len(tail), total, tokens, time.process_time() - started)


def save_checkpoint(model: Any, tokenizer: Any, out: Path, recipe: Recipe, outcome: Outcome | None = None) -> None:
    """Write a Hugging Face checkpoint: weights in float16 (half the size), loaded as float32 as the config says.

    The weights of `model` are rounded to float16 as well, so that it equals what will be loaded.
    """
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half().float())
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # the tied head is stored once
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.half().contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]  # as `model.save_pretrained` does; TRL loads no other
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    share(out)
    about: dict[str, Any] = {"version": RECIPE_VERSION, "recipe": dataclasses.asdict(recipe)}
    if outcome is not None:
        about["outcome"] = {"loss": round(outcome.loss, 4), "steps": outcome.steps, "tokens": outcome.tokens}
    (out / "recipe.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def cache_dir() -> Path:
    """Where made warm starts are kept: `AGENTROPY_CACHE` or `~/.cache/agentropy`, in `warm-starts`."""
    return Path(os.environ.get("AGENTROPY_CACHE", Path.home() / ".cache" / "agentropy")) / "warm-starts"


def shipped_path(world: str) -> Path:
    """The folder of the warm start that ships for a world."""
    import agentropy.tasks

    return Path(agentropy.tasks.__file__).parent / "warm_starts" / world


def load_or_make(recipe: Recipe, report: Report = print) -> Path:
    """The folder of a recipe's checkpoint: the shipped one, a cached one, or made now (minutes) and cached."""
    shipped = shipped_path(recipe.world)
    if recipe == RECIPES.get(recipe.world) and (shipped / "model.safetensors").is_file():
        return shipped
    path = cache_dir() / f"{recipe.world}-{recipe.digest()}"
    if (path / "recipe.json").is_file():
        return path
    report(f"making the warm start {path.name} (minutes of CPU), once")
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    train_warm_start(recipe, partial, report)
    try:
        partial.replace(path)
    except OSError:  # another process was faster
        if not (path / "recipe.json").is_file():
            raise
    return path


def evaluate(world: str, path: Path, questions: int = 128, samples: int = 4) -> dict[str, float]:
    """What the agent in `path` can do on the first test questions of its world, with the world's real tools.

    Keys: `sampled` and `greedy` (mean scores), `calls` a question (sampled), by need where there are several
    (`calls_need_0`, …), and `effective`: the share of calls after which the entropy is lower.
    """
    import asyncio

    from agentropy.config import RunConfig
    from agentropy.evaluation.summary import evaluation_metrics
    from agentropy.policies.base import SamplingParams
    from agentropy.rollout.loop import rollout
    from agentropy.training.collect import attempts_for
    from agentropy.training.setup import build

    async def run() -> dict[str, float]:
        name, _, level = world.partition("-")
        options = {"level": level} if level else {}
        setup = build(RunConfig(world=name, world_options=options, model=str(path), protocol="tags"))
        tasks = setup.tasks.split("test")[:questions]
        await setup.agent.toolbox.start()
        try:
            found = []
            for temperature, k in ((1.0, samples), (0.0, 1)):
                params = SamplingParams(temperature, max_new_tokens=setup.limits.max_new_tokens)
                attempts = attempts_for(tasks, k, 0, "warm-start")
                with setup.policy.rollout():
                    found.append(evaluation_metrics(await rollout(setup.agent, attempts, params, setup.limits)))
        finally:
            await setup.close()
        sampled, greedy = found
        out = {"sampled": sampled["eval/avg"], "greedy": greedy["eval/avg"]}
        out["calls"] = sampled["tool/calls_per_question"]
        out |= {k.removeprefix("eval/"): v for k, v in sampled.items() if k.startswith("eval/calls_need_")}
        return out | {"valid": sampled["tool/valid_rate"], "effective": sampled["tool/effective_ratio"]}

    return asyncio.run(run())

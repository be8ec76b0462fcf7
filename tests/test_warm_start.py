"""Warm starts: the optimiser, the data, the checkpoint, and the ones that ship."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from agentropy.cli import main
from agentropy.errors import UserError
from agentropy.tasks import make_world, warm_start_path
from agentropy.training.expert import Trace, run_program
from agentropy.training.expert_facts import MiniSearch
from agentropy.training.muon import Muon, orthogonalize
from agentropy.training.tokenizer import TAGS, train_tokenizer
from agentropy.training.warm_start import (
    RECIPES,
    Example,
    Recipe,
    batches,
    build_model,
    collate,
    encode,
    expert_of,
    load_or_make,
    loss_of,
    recipe_of,
    shipped_path,
    train_warm_start,
)

WORLD_NAMES = ("arithmetic", "facts", "arithmetic-hard", "facts-hard")


def traces_of(world: str, n: int, seed: int = 0) -> list[Trace]:
    expert, rng = expert_of(world), random.Random(seed)
    return [expert(rng) for _ in range(n)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer((t for x in traces_of("arithmetic", 800) for _, t in x.parts), 640, True)


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12)])
def test_orthogonalize_keeps_directions_and_evens_out_lengths(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    out = orthogonalize(matrix)
    assert out.shape == shape
    assert torch.linalg.svdvals(out).min() > 0.6
    assert torch.linalg.svdvals(out).max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    # The same singular vectors: in their basis the result is nearly diagonal.
    inner = u.T @ out @ v.T
    assert (inner - torch.diag(torch.diagonal(inner))).abs().max() < 1e-4


def test_muon_descends_and_takes_steps_of_even_size() -> None:
    torch.manual_seed(0)
    target, p = torch.randn(6, 4), torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = Muon([p], lr=0.05)
    first = None
    for _ in range(150):
        optimizer.zero_grad()
        loss = (p - target).square().sum()
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
    assert loss.item() < 0.05 * first


@pytest.mark.parametrize("world", WORLD_NAMES)
def test_the_expert_is_flawed_in_every_way(world: str) -> None:
    traces = traces_of(world, 3000)
    assert 0.3 < sum(t.correct for t in traces) / 3000 < 0.7
    text = ["".join(t for _, t in x.parts) for x in traces]
    easy = [x for x, t in zip(traces, text, strict=True) if "<think>easy" in t or "<think>given" in t]
    assert 0.4 < sum(x.calls > 0 for x in easy) / len(easy) < 0.6, "over-calling"
    hard = [x for x in traces if x not in easy]
    assert 0.12 < sum(x.calls == 0 for x in hard) / len(hard) < 0.5, "skipped calls"
    assert sum("check" in t for t in text) > 150, "needless second calls"
    assert sum("maybe" in x.parts[-1][1] and x.calls > 0 for x in traces) > 100, "giving up"
    assert sum(x.calls > 1 for x in traces) > 300
    kind, _, level = world.partition("-")
    outage = {"arithmetic": "ConnectionError: tool unavailable", "facts": "Search failed."}[kind]
    assert sum(outage in t for t in text) > (600 if level else 10), "tools that are down"
    if kind == "arithmetic":
        errors = ("SyntaxError", "KeyError", "TypeError") if level else ("SyntaxError", "NameError")
        for error in errors:
            assert sum(error in t for t in text) > 100, error
    else:
        assert sum("No results." in t for t in text) > 10


@pytest.mark.parametrize("world", WORLD_NAMES)
def test_traces_are_reproducible_and_end_in_an_answer(world: str) -> None:
    assert traces_of(world, 200) == traces_of(world, 200)
    assert traces_of(world, 200) != traces_of(world, 200, seed=1)
    for x in traces_of(world, 500):
        assert x.parts[0][0] == "question"
        assert x.parts[-1][1].endswith("</answer>")
        assert [p for p, _ in x.parts[1:]] == ["model", "result"] * x.calls + ["model"]


@pytest.mark.parametrize("world", ["arithmetic-hard", "facts-hard"])
def test_experts_of_the_hard_levels_go_long_ways_within_the_turns(world: str) -> None:
    from agentropy.tasks.worlds import rollout_defaults

    name, _, level = world.partition("-")
    limits = rollout_defaults(name, {"level": level})
    calls = [x.calls for x in traces_of(world, 2000)]
    assert max(calls) == limits["max_turns"] - 1
    assert sum(c >= 3 for c in calls) > 300


def test_programs_of_the_expert_show_what_the_sandbox_would() -> None:
    assert run_program("print(6*7)") == (True, "42")
    assert run_program("print(1)\n1/0") == (False, "ZeroDivisionError: division by zero")
    ok, shown = run_program("print((1)")
    assert not ok
    assert shown.startswith("SyntaxError: ")


@pytest.mark.parametrize("distractors", [0.0, 0.5])
def test_mini_search_ranks_as_the_search_tool_does(distractors: float) -> None:
    from agentropy.tasks.facts import knowledge_base
    from agentropy.tools.search import SearchIndex

    kb = knowledge_base(5, distractors=distractors)
    index, mini = SearchIndex.from_documents(kb.documents()), MiniSearch(kb)
    rng = random.Random(0)
    queries = [f"{r} of {s}" for s, r in rng.sample(list(kb.facts), 60)]
    queries += [f"{rng.choice(('boss', 'job', 'city'))} of {n.split()[0]}" for n in rng.sample(kb.people, 30)]
    queries += ["help", "mayor", "the of is"]
    for query in queries:
        assert mini(query) == [h.document.text for h in index.search(query, 2)], query


def test_tokenizer_numbers_tags_and_bytes(tokenizer: Any) -> None:
    assert tokenizer.tokenize("2023") == ["202", "3"]
    assert tokenizer.tokenize("007") == ["007"]
    for text in ("print(48*73)", "a 12 b", "é中🙂 x\n\ty", " Saturday", "import math\nprint(math.gcd(12,18))"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    for tag in TAGS:
        assert len(tokenizer(tag).input_ids) == 1
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Q"}], tokenize=False, add_generation_prompt=True
    )
    assert shown == "<|user|>Q<|assistant|>"


def test_encoding_marks_exactly_the_model_s_tokens(tokenizer: Any) -> None:
    x = next(t for t in traces_of("arithmetic", 50) if t.calls)
    example = encode(x, tokenizer)
    learned = [i for i, m in zip(example.ids, example.is_model, strict=True) if m]
    assert tokenizer.decode(learned) == "".join(t for p, t in x.parts if p == "model")
    rest = [i for i, m in zip(example.ids, example.is_model, strict=True) if not m]
    assert tokenizer.decode(rest).startswith(f"<|user|>{x.parts[0][1]}<|assistant|><result>")


def test_encoding_equals_what_the_protocol_feeds(tokenizer: Any) -> None:
    from agentropy.protocols import make_dialect
    from agentropy.trajectory import ToolResult

    dialect = make_dialect("tags", tokenizer)
    for x in traces_of("arithmetic", 40):
        ids = dialect.prompt(x.parts[0][1], [])
        for part, text in x.parts[1:]:
            if part == "result":
                ids += dialect.results([ToolResult(text)])
            else:
                turn = tokenizer(text, add_special_tokens=False).input_ids
                read = dialect.read(turn, "stop")
                assert read.calls or read.answer is not None
                assert all(c.error is None for c in read.calls)
                ids += turn
        assert tuple(ids) == encode(x, tokenizer).ids


def test_batches_hold_every_example_once_within_the_budget() -> None:
    rng = random.Random(0)
    examples = [Example(tuple([i + 1] * rng.randint(3, 90)), tuple([True] * 1)) for i in range(300)]
    seen = list(batches(examples, 256, random.Random(1)))
    assert sorted(e.ids for b in seen for e in b) == sorted(e.ids for e in examples)
    assert all(len(b) * max(len(e.ids) for e in b) <= 256 for b in seen)
    padded = sum(len(b) * max(len(e.ids) for e in b) for b in seen)
    assert padded < 1.1 * sum(len(e.ids) for e in examples)


def test_loss_counts_model_tokens_only_and_ignores_padding(tokenizer: Any) -> None:
    model = build_model(RECIPES["arithmetic"], tokenizer)
    short, long = sorted((encode(t, tokenizer) for t in traces_of("arithmetic", 2)), key=lambda e: len(e.ids))
    total, count = 0.0, 0
    with torch.no_grad():
        for e in (short, long):
            logp = model(input_ids=torch.tensor([e.ids])).logits.log_softmax(-1)[0]
            for t in range(1, len(e.ids)):
                if e.is_model[t]:
                    total -= logp[t - 1, e.ids[t]].item()
                    count += 1
        assert loss_of(model, *collate([short, long], 0)).item() == pytest.approx(total / count, abs=1e-5)


def test_small_run_learns_saves_and_repeats_itself(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = dataclasses.replace(
        RECIPES["arithmetic"], traces=400, steps=30, warmup_steps=3, hidden_size=64, intermediate_size=96
    )
    lines: list[str] = []
    outcomes = [train_warm_start(recipe, tmp_path / n, lines.append, report_every=5) for n in ("a", "b")]
    assert outcomes[0].loss == outcomes[1].loss
    first = float(lines[1].split("loss ")[1].split()[0])
    assert outcomes[0].loss < 0.75 * first
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("a", "b")]
    assert weights[0] == weights[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(loaded) == model.config.vocab_size
    assert loaded.chat_template
    saved = json.loads((tmp_path / "a" / "recipe.json").read_text())
    assert saved["recipe"] == dataclasses.asdict(recipe)


def test_made_once_and_cached_by_the_recipe_s_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTROPY_CACHE", str(tmp_path))
    recipe = dataclasses.replace(RECIPES["facts"], traces=60, steps=2, hidden_size=32, intermediate_size=32)
    lines: list[str] = []
    path = load_or_make(recipe, lines.append)
    made = len(lines)
    assert made
    assert path.name == f"facts-{recipe.digest()}"
    assert load_or_make(recipe, lines.append) == path
    assert len(lines) == made
    other = dataclasses.replace(recipe, seed=1)
    assert other.digest() != recipe.digest()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("world", WORLD_NAMES)
def test_shipped_checkpoints_load_and_match_their_recipe(world: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = shipped_path(world)
    assert (path / "model.safetensors").is_file()
    assert warm_start_path(world) == path
    saved = json.loads((path / "recipe.json").read_text())
    assert saved["recipe"] == dataclasses.asdict(RECIPES[world])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert sum(p.numel() for p in model.parameters()) < 700_000
    examples = [encode(t, tokenizer) for t in traces_of(world, 64, seed=12345)]
    with torch.no_grad():
        loss = loss_of(model, *collate(examples, tokenizer.pad_token_id)).item()
    assert loss == pytest.approx(saved["outcome"]["loss"], abs=0.1)


def test_shipped_checkpoints_are_small() -> None:
    files = [f for w in WORLD_NAMES for f in shipped_path(w).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 4_000_000


def test_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm-start", "--world", "chess"]) == 2
    assert "no world 'chess'" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert main(["warm-start", "--out", str(tmp_path)]) == 2
    assert "not an empty folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", WORLD_NAMES)
def test_making_a_shipped_checkpoint_again_gives_the_same(world: str, tmp_path: Path) -> None:
    """Bit for bit on the machine and library versions it was made with; elsewhere the same in loss."""
    saved = json.loads((shipped_path(world) / "recipe.json").read_text())
    outcome = train_warm_start(RECIPES[world], tmp_path / "again")
    assert outcome.steps == saved["outcome"]["steps"]
    assert outcome.loss == pytest.approx(saved["outcome"]["loss"], abs=0.02)


def parameters(recipe: Recipe) -> int:
    """Parameters of the recipe's model, by its configuration alone (the tied head counts once)."""
    d, layers = recipe.hidden_size, recipe.layers
    per_layer = 4 * d * d + 3 * d * recipe.intermediate_size + 2 * d + 2 * (d // recipe.heads)
    return recipe.vocab_size * d + layers * per_layer + d


@pytest.mark.parametrize("name", RECIPES)
def test_sizes_lie_a_factor_of_four_apart(name: str) -> None:
    counts = [parameters(recipe_of(name, size)) for size in ("small", "default", "large")]
    assert counts[1] >= 4 * counts[0]
    assert counts[2] >= 4 * counts[1]
    assert recipe_of(name) == RECIPES[name]


def test_a_world_says_which_size_its_agent_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTROPY_CACHE", str(tmp_path))
    recipe = recipe_of("facts", "small")
    folder = tmp_path / "warm-starts" / f"facts-{recipe.digest()}"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text("{}")
    assert make_world("facts", size="small").warm_start() == folder
    with pytest.raises(UserError, match="size must be one of small, default, large"):
        make_world("facts", size="huge")

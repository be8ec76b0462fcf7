"""Real training of the embedded agent inside TRL, on the CPU: what a user of TRL would do, and what goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from trl_runs import QUESTIONS, SAMPLES, Replay, config, dataset, logged, model_path, recorded, toolbox, trainer

from agentropy.errors import UserError
from agentropy.integrations.trl import AgentropyGRPOTrainer
from agentropy.integrations.trl_options import check_processes
from agentropy.trajectory import ToolResult, read_jsonl


def weights(run: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.model.parameters()]


def moved(run: Any, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))


def finite(run: Any) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in run.model.parameters())


def test_a_run_learns_and_says_what_it_did(tmp_path: Path) -> None:
    """Two generations of two updates each; TRL's log has our metrics, the folder our trajectories."""
    sizes = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 4, "log_completions": True}
    run = trainer(tmp_path, settings=sizes, max_oversample=2.0)
    before = weights(run)
    run.train()
    assert moved(run, before)
    assert finite(run)
    first, second, third, _ = logged(run)
    for record in (first, third):
        assert record["entropy/exact"] == 1
        assert 0 < record["reward/accuracy"] < 1
        assert record["tool/calls_per_question"] > 0
        assert record["optim/sampler_gap_max"] < 1e-4
        assert record["filter/kept"] + record["filter/all_calls_failed"] + record["filter/not_discriminative"] >= 16
    assert first["optim/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert second["optim/ratio_max"] > 1.0
    assert "reward/accuracy" not in second  # a generation is logged once
    files = sorted((tmp_path / "trajectories").iterdir())
    assert [f.name for f in files] == ["step-000000.jsonl", "step-000002.jsonl"]
    trajectories = list(read_jsonl(files[0]))
    assert len(trajectories) == int(first["filter/questions_sampled"]) * SAMPLES
    assert {t.entropy_kind for t in trajectories} == {"exact"}
    assert len({t.trajectory_id for t in trajectories}) >= 16
    run.close()
    run.close()


class Library:
    """An environment as TRL's documentation has them: reset, tools, get_reward, and a property of its own."""

    @property
    def gold(self) -> str:
        return self.answers[0]

    def reset(self, answer: list[str], **kwargs: Any) -> str | None:
        self.answers = answer
        self.asked: list[str] = []
        self.given = sorted(kwargs)
        return None

    def search(self, query: str) -> str:
        """Look something up.

        Args:
            query: What to look for.
        """
        self.asked.append(query)
        if len(self.asked) > 2:
            raise ValueError("too many questions")
        return f"The mayor of Cairo is Emma Reed. {len(self.asked)}"

    def get_reward(self) -> float:
        return float(len(self.asked) % 2)


def test_an_environment_class_of_trl_works_unchanged(tmp_path: Path) -> None:
    seen: list[Any] = []

    def asked(completions: Any, environments: Any, answer: Any, **columns: Any) -> list[float]:
        for messages, environment, gold in zip(completions, environments, answer, strict=True):
            assert environment.gold == gold[0]
            assert "prompt" in environment.given
            tools = [m for m in messages if m["role"] == "tool"]
            assert len(tools) == len(environment.asked)
            assert all(m["name"] == "search" for m in tools)
            if tools:
                call = messages[0]["tool_calls"][0]["function"]
                assert call == {"name": "search", "arguments": {"query": environment.asked[0]}}
                assert tools[0]["content"].startswith("The mayor of Cairo")
            assert messages[-1]["role"] in ("assistant", "tool")
            seen.append(environment)
        return [0.25] * len(completions)

    run = trainer(tmp_path, environment_factory=Library, reward_funcs=asked, method="grpo")
    assert run.reward_func_names == ["asked", "Library"]
    before = weights(run)
    run.train()
    assert moved(run, before)
    (record,) = logged(run)
    assert len({id(e) for e in seen}) == QUESTIONS * SAMPLES
    assert record["rewards/asked/mean"] == 0.25
    assert record["reward"] == pytest.approx(0.25 + record["rewards/Library/mean"])
    assert record["reward/accuracy"] == pytest.approx(record["reward"])
    assert 0 < record["tool/valid_rate"] <= 1
    run.close()


def test_several_environments_by_column(tmp_path: Path) -> None:
    class Other(Library):
        def reset(self, **row: Any) -> str:
            assert "environment" not in row
            super().reset(**row)
            return " Answer quickly."

        def get_reward(self) -> float:
            return 0.5

    rows = [dict(r) | {"environment": "other" if i % 2 else "library"} for i, r in enumerate(dataset())]
    factories = {"library": Library, "other": Other}
    run = trainer(
        tmp_path,
        environment_factory=factories,
        train_dataset=Dataset.from_list(rows),
        method="grpo",
        max_oversample=1.0,
    )
    assert run.reward_func_names == ["Library", "Other"]
    run.train()
    (record,) = logged(run)
    assert record["rewards/Other/mean"] == 0.5
    assert record["rewards/Other/std"] == 0
    run.close()
    bad = Dataset.from_list([dict(r) | {"environment": "nowhere"} for r in dataset()])
    with pytest.raises(UserError, match="environment='nowhere'; there are library, other"):
        trainer(tmp_path, environment_factory=factories, train_dataset=bad)


def test_an_environment_that_asks_the_questions_needs_no_data_set(tmp_path: Path) -> None:
    class Quiz(Library):
        def reset(self, **row: Any) -> str:
            super().reset(answer=["42"])
            return "Which job has the mayor of Cairo?"

    run = trainer(tmp_path, environment_factory=Quiz, train_dataset=None, method="grpo")
    run.train()
    assert {t.question for t in made(run)} == {""}
    assert len({t.prompt for t in made(run)}) == 1
    assert len({t.question_id for t in made(run)}) == QUESTIONS
    assert len({t.ids for t in made(run)}) > QUESTIONS
    assert logged(run)[0]["tool/usage_rate"] > 0
    run.close()


@pytest.mark.parametrize("lora", [False, True])
def test_peft_and_a_reference_model(lora: bool, tmp_path: Path) -> None:
    settings = {"beta": 0.5, "max_steps": 2, "learning_rate": 2e-2 if lora else 5e-3}
    changes: dict[str, Any] = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if lora else {}
    if lora:  # TRL refuses adapters on the head
        changes["peft_config"].target_modules = ["q_proj", "v_proj"]
    run = trainer(tmp_path, settings=settings, method="grpo", **changes)
    assert (run.ref_model is None) == lora
    assert run._method.loss.kl_coef == 0.5
    before = weights(run)
    run.train()
    assert moved(run, before)
    first, second = logged(run)
    assert first["optim/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert second["optim/ref_kl"] > 1e-5
    assert second["optim/sampler_gap_max"] < 1e-4
    if lora:
        frozen = [p for n, p in run.model.named_parameters() if "lora" not in n]
        assert not any(p.requires_grad for p in frozen)
    run.close()


def test_an_update_without_anything_to_learn_from_changes_nothing(tmp_path: Path) -> None:
    """Not even with a momentum from the update before. Metrics say it, nothing is NaN."""

    class Half(Replay):
        def _sample(self, *args: Any) -> Any:
            out = super()._sample(*args)
            if self.state.global_step < 1:
                return out
            alike = [dataclasses.replace(i, trajectory=dataclasses.replace(i.trajectory, score=1.0)) for i in out]
            return [dataclasses.replace(i, rewards=[1.0]) for i in alike]

    run = trainer(tmp_path, Half, settings={"max_steps": 3, "weight_decay": 0.1})
    run.replayed = recorded()
    states: list[list[torch.Tensor]] = [weights(run)]
    step = run.training_step

    def remembering(*args: Any) -> Any:
        states.append(weights(run))
        return step(*args)

    run.training_step = remembering
    run.train()
    states.append(weights(run))
    assert any(not torch.equal(a, b) for a, b in zip(states[1], states[2], strict=True))
    for later in (states[3], states[4]):
        assert all(torch.equal(a, b) for a, b in zip(states[2], later, strict=True))
    first, second, _ = logged(run)
    assert (first["batch/empty"], first["optim/skipped_empty"]) == (0, 0)
    assert (second["batch/empty"], second["optim/skipped_empty"], second["filter/kept"]) == (1, 1, 0)
    assert second["loss"] == 0
    assert all(v == v for v in second.values() if isinstance(v, float))
    run.close()


def test_removed_questions_are_replaced_by_others(tmp_path: Path) -> None:
    """A reward that is the same for all of some questions: those are sampled once and their places are given away."""
    asked: list[str] = []

    def even(id: list[str], completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
        asked.extend(id)
        log_extra("question", list(id))
        return [float(sum(ids) % 2) if int(i, 16) % 2 else 1.0 for i, ids in zip(id, completion_ids, strict=True)]

    rows = [dict(r) | {"id": f"{i:x}"} for i, r in enumerate(dataset())]
    run = trainer(
        tmp_path,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=even,
        max_oversample=3.0,
        method_options={"execution_filter": False},
        settings={"log_completions": True},
    )
    run.train()
    (record,) = logged(run)
    assert record["filter/rounds"] > 1
    assert 4 < record["filter/questions_sampled"] <= 12
    assert len(asked) == record["filter/questions_sampled"] * SAMPLES
    # What was sampled and what is trained on are told apart.
    kept = {
        t.question_id.partition("#")[0] for t, ok in zip(made(run), run._made.shaped.kept.tolist(), strict=True) if ok
    }
    assert kept
    assert all(int(i, 16) % 2 for i in kept)
    assert record["batch/questions"] == 4
    assert list(run._logs["extra"]["question"]) == [t.question_id.partition("#")[0] for t in made(run)]
    run.close()


def made(run: Any) -> list[Any]:
    return [item.trajectory for item in run._made.items]


def test_tools_of_a_batch_run_at_the_same_time(tmp_path: Path) -> None:
    """TRL waits for one trajectory's tool before it starts the next one's."""
    lock, running, most = threading.Lock(), [0], [0]
    together = threading.Event()

    def search(query: str) -> str:
        """Look something up.

        Args:
            query: What to look for.
        """
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if most[0] > 1:
                together.set()
        together.wait(5)
        with lock:
            running[0] -= 1
        return "Nothing."

    run = trainer(
        tmp_path,
        tools=[search],
        method="grpo",
        reward_funcs=lambda completion_ids, **_: [float(len(c) % 2) for c in completion_ids],
    )
    run.train()
    assert most[0] > 1
    run.close()


def test_what_a_tool_prints_is_no_answer_and_what_fails_is_told_apart(tmp_path: Path) -> None:
    def search(query: str) -> ToolResult:
        """Look something up.

        Args:
            query: What to look for.
        """
        if len(query) % 3 == 0:
            raise ConnectionError("the index is down")
        if len(query) % 3 == 1:
            raise ValueError("no such thing")
        return ToolResult("<answer>the gold</answer>")

    said: list[str] = []

    def last(completions: Any, trajectory: Any, **_: Any) -> list[float]:
        said.extend(m[-1]["content"] for m in completions)
        return [1.0] * len(completions)

    run = trainer(tmp_path, tools=[search], method="grpo", reward_funcs=last)
    run.train()
    (record,) = logged(run)
    lost = [t for t in made(run) if t.stop == "error"]
    assert record["tool/lost_trajectories"] == len(lost) > 0
    assert all(t.score is None for t in lost)
    assert record["filter/kept"] == QUESTIONS * SAMPLES - len(lost)
    assert record["reward"] == 1.0  # lost ones are in nobody's mean
    assert record["tool/valid_rate"] < 1
    assert not any(t.answer == "the gold" for t in made(run))
    assert finite(run)
    run.close()


def test_truncation_is_what_happened_not_what_the_last_token_looks_like(tmp_path: Path) -> None:
    """The agent's turns end in tags, never in an end token: TRL alone would call every one of them cut."""
    run = trainer(
        tmp_path, settings={"max_completion_length": 12}, method="grpo", method_options={"mask_truncated": True}
    )
    run.train()
    (record,) = logged(run)
    cut = sum(t.stop == "max_tokens" for t in made(run))
    assert cut > 0
    assert record["completions/clipped_ratio"] == pytest.approx(cut / 16) == pytest.approx(record["stop/max_tokens"])
    assert record["filter/truncated"] == cut
    run.close()
    whole = trainer(tmp_path, Replay, method="grpo")
    whole.replayed = recorded()
    whole.train()
    expected = sum(t.stop == "max_tokens" for t in recorded()) / 16
    assert logged(whole)[0]["completions/clipped_ratio"] == pytest.approx(expected)
    whole.close()


def test_a_prompt_that_fills_the_window_gives_an_empty_completion(tmp_path: Path) -> None:
    rows = [dict(r) for r in dataset()]
    rows[1]["prompt"] = [{"role": "user", "content": "mayor of Cairo " * 300}]
    run = trainer(tmp_path, train_dataset=Dataset.from_list(rows), method="grpo")
    run.train()
    (record,) = logged(run)
    assert record["stop/context_full"] == 0.25
    assert record["completions/min_length"] == 0
    assert finite(run)
    run.close()


def test_a_tree_needs_its_question_in_one_process(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="arpo")
    run.args.per_device_train_batch_size = 6  # as two processes would have, with 12 rows
    with pytest.raises(UserError, match="grows a tree of 4 trajectories in one process, and a process has 6 rows"):
        check_processes(run, run._method)
    run.close()


def test_wrong_arguments_are_told_to_the_agent_which_goes_on(tmp_path: Path) -> None:
    """TRL ends a trajectory, without a word, at a call that it cannot read."""

    def search(query: int) -> str:
        """Look something up.

        Args:
            query: A number.
        """
        return str(query)

    run = trainer(tmp_path, tools=[search], settings={"max_steps": 1})
    run.train()
    (record,) = logged(run)
    assert record["tool/valid_rate"] == 0
    assert any(len(t.results) > 1 for t in made(run))
    assert all(r.status == "invalid" and "query" in r.content for t in made(run) for r in t.results)
    assert record["filter/all_calls_failed"] > 0
    run.close()


def test_a_call_that_no_turn_is_left_for_is_not_run(tmp_path: Path) -> None:
    """With TRL such a trajectory looks as if it had ended by itself, since its last token ends a turn."""
    run = trainer(tmp_path, settings={"max_tool_calling_iterations": 0}, method="grpo")
    run.train()
    (record,) = logged(run)
    assert record["stop/max_turns"] > 0
    assert record["tool/calls_per_question"] == 0
    assert record["stop/max_turns"] == sum(t.stop == "max_turns" for t in made(run)) / 16
    run.close()


def test_hermes_is_the_default_and_asks_nothing_of_the_chat_template(tmp_path: Path) -> None:
    """TRL knows its templates byte by byte and refuses tools with any other."""
    template = AutoTokenizer.from_pretrained(model_path())
    template.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    said: list[str] = []

    def text(completions: Any, **_: Any) -> list[float]:
        said.extend(c[-1]["content"] for c in completions)
        return [float(len(c[-1]["content"]) % 2) for c in completions]

    def look(query: str) -> str:
        """Look something up.

        Args:
            query: What to look for.
        """
        return query

    run = trainer(
        tmp_path, protocol="hermes", tools=[look], reward_funcs=text, method="grpo", processing_class=template
    )
    run.train()
    ended = [t for t in made(run) if t.stop == "answer"]
    assert all(t.answer in "".join(said) for t in ended)
    assert len(said) == 16
    assert logged(run)
    run.close()


def test_a_stream_of_questions(tmp_path: Path) -> None:
    """Nothing can be drawn from it in place of removed questions; they stay in the batch, removed."""
    rows = [dict(r) for r in dataset()]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    run = trainer(tmp_path, train_dataset=stream, max_oversample=3.0)
    run.train()
    assert logged(run)[0]["filter/questions_sampled"] == QUESTIONS
    run.close()


def test_rewards_that_are_missing_or_beyond_numbers(tmp_path: Path) -> None:
    def some(completion_ids: Any, **_: Any) -> list[float | None]:
        return [None if i % 4 == 0 else float(len(c) % 2) for i, c in enumerate(completion_ids)]

    run = trainer(tmp_path, reward_funcs=some, method="grpo")
    run.train()
    (record,) = logged(run)
    assert (record["filter/lost"], record["filter/kept"]) == (4, 12)
    assert 0 < record["reward"] < 1
    assert finite(run)
    run.close()
    infinite = trainer(tmp_path, reward_funcs=lambda completion_ids, **_: [math.inf] * 16, method="grpo")
    with pytest.raises(UserError, match="score inf is no finite number"):
        infinite.train()
    infinite.close()


def test_branching(tmp_path: Path) -> None:
    options = {"roots": 2, "base": 1.0}
    sizes = {"per_device_eval_batch_size": 8, "num_generations_eval": 2}
    run = trainer(tmp_path, method="arpo", method_options=options, settings=sizes, eval_dataset=dataset(4))
    run.train()
    assert run.evaluate()["eval_rollout/forks"] == 0
    (record,) = logged(run)
    assert record["rollout/roots"] + record["rollout/forks"] == 16
    assert record["rollout/forks"] > 0
    assert record["batch/shared_tokens"] > 0
    assert record["optim/sampler_gap_max"] < 1e-4
    run.close()


def test_mixed_precision_scores_once_more(tmp_path: Path) -> None:
    """The sampler computes in float32, the update in bfloat16: old probabilities come from the latter."""
    run = trainer(tmp_path, settings={"bf16": True})
    run.train()
    (record,) = logged(run)
    assert record["optim/sampler_gap_mean"] > 1e-4
    assert record["optim/approx_kl_k3"] < 1e-4
    assert record["optim/ratio_mean"] == pytest.approx(1, abs=0.01)
    assert record["entropy/exact"] == 1
    run.close()


def test_temperature_reaches_sampler_and_update_alike(tmp_path: Path) -> None:
    run = trainer(tmp_path, settings={"temperature": 0.7})
    run.train()
    (record,) = logged(run)
    assert record["optim/sampler_gap_max"] < 1e-4
    assert record["optim/ratio_mean"] == pytest.approx(1, abs=1e-5)
    run.close()


def test_evaluation_has_its_own_metrics_and_repeats_itself(tmp_path: Path) -> None:
    run = trainer(tmp_path, eval_dataset=dataset(4), settings={"per_device_eval_batch_size": 8})
    one, other = run.evaluate(), run.evaluate()
    assert one["eval_reward/accuracy"] == other["eval_reward/accuracy"]
    assert 0 < one["eval_reward/accuracy"] < 1
    assert one["eval_filter/questions_sampled"] == 2  # of each batch; evaluation replaces nothing
    run.close()


def test_in_a_notebook_a_loop_is_running(tmp_path: Path) -> None:
    run = trainer(tmp_path)

    async def cell() -> None:
        run.train()

    asyncio.run(cell())
    assert logged(run)
    run.close()


REFUSED = [
    ({"settings": {"importance_sampling_level": "sequence"}}, "importance_sampling_level='sequence'"),
    ({"settings": {"loss_type": "cispo"}}, "loss_type='cispo' is none of dapo, grpo, dr_grpo"),
    ({"settings": {"top_entropy_quantile": 0.2}}, "top_entropy_quantile"),
    ({"settings": {"repetition_penalty": 1.1}}, "repetition_penalty"),
    ({"settings": {"scale_rewards": "batch"}}, "scale_rewards='batch'"),
    ({"settings": {"gradient_accumulation_steps": 2, "steps_per_generation": 3}}, "no multiple of gradient_accum"),
    ({"method_options": {"kl_coef": 0.1}}, "kl_coef=0.1, but beta=0"),
    ({"settings": {"max_completion_length": None}}, "max_completion_length bounds"),
    ({"max_oversample": 0.5}, "max_oversample=0.5 is below 1"),
    ({"train_dataset": Dataset.from_list([])}, "the training set is empty"),
    ({"train_dataset": Dataset.from_list([{"question": "x"}])}, "no 'prompt'; its columns are question"),
    ({"method": "tao"}, "unknown method 'tao'; did you mean 'tao-rl'"),
    ({"method_options": {"alfa": 1}}, "no option 'alfa'; did you mean 'alpha'"),
    ({"tools": toolbox, "environment_factory": Library}, "a ready tool box leaves no room"),
    ({"reward_funcs": None, "grader": None}, "nothing says what a trajectory earns"),
    ({"answer_column": "gold"}, "no 'gold' for the grader"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_had_is_refused_before_anything_runs(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    changes = {k: v() if v is toolbox else v for k, v in changes.items()}
    with pytest.raises(UserError, match=message):
        trainer(tmp_path, **changes)


def test_a_model_that_minds_padding_is_refused(tmp_path: Path) -> None:
    """TRL pads prompts on the left and passes no positions."""
    shape = GPT2Config(vocab_size=800, n_positions=512, n_embd=32, n_layer=2, n_head=2, initializer_range=0.5)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    with pytest.raises(UserError, match="GPT2LMHeadModel gives other log-probabilities where a prompt is padded"):
        trainer(tmp_path, model=GPT2LMHeadModel(shape), processing_class=tokenizer)


def test_prompts_that_no_protocol_can_render_are_refused(tmp_path: Path) -> None:
    several = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    with pytest.raises(UserError, match="roles user, assistant, user"):
        trainer(tmp_path, train_dataset=Dataset.from_list([{"prompt": several, "answer": ["1"]}] * 16))


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Also in the middle of a generation: the rest of its updates is sampled anew."""
    sizes = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1}
    run = trainer(tmp_path, settings=sizes)
    run.train()
    run.close()
    other = trainer(tmp_path, settings=sizes | {"max_steps": 3})
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [h["step"] for h in logged(other)] == [1, 2, 3]
    assert "reward/accuracy" in logged(other)[1]
    assert finite(other)
    other.close()


def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "trl_agent.py"
    spec = importlib.util.spec_from_file_location("trl_agent", example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = module.main(["--steps", "1", "--out", str(tmp_path)])
    (record,) = logged(run)
    assert record["tool/valid_rate"] > 0.5
    assert (tmp_path / "model" / "model.safetensors").is_file()
    run.close()


def test_a_model_object_and_its_tokenizer(tmp_path: Path) -> None:
    """As most scripts have them, with plain text as prompts."""
    model = AutoModelForCausalLM.from_pretrained(model_path())
    rows = [{"prompt": r["prompt"][0]["content"], "answer": r["answer"]} for r in dataset()]
    seen: list[Any] = []

    def look(completions: Any, prompts: Any, **_: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(c) % 2) for c in completions]

    run = AgentropyGRPOTrainer(
        model,
        look,
        config(tmp_path),
        Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model_path()),
        tools=toolbox(),
        protocol="tags",
        max_oversample=1.0,
    )
    run.train()
    assert all(isinstance(p, str) and isinstance(c, str) for p, c in seen)
    assert logged(run)
    run.close()

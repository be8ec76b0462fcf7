"""The plug-in's parts without Ray: options, rows, columns, the policy on verl's client, the loss, launching."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl_runs import (
    PROMPT,
    RESPONSE,
    LocalClient,
    model_path,
    recorded,
    shaped_lines,
    verl_config,
    world,
    write_tasks,
)

from agentropy.cli import main
from agentropy.errors import UserError
from agentropy.integrations.batches import PADDING
from agentropy.integrations.verl.launch import hydra_value
from agentropy.integrations.verl.options import check_config, method_of, read_options, tool_of
from agentropy.integrations.verl.rows import row_of, task_as_row, task_of, trajectories_of
from agentropy.integrations.verl.trainer import AgentropyTrainer, optimiser_batches, teach
from agentropy.methods import make_method
from agentropy.policies.base import PolicyLost, SamplingParams, Stop
from agentropy.tasks.base import Task
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory

pytestmark = pytest.mark.timeout(1200)  # verl takes long to import where others work too
METHODS = ["tao-rl", "tepo-dense", "tepo-sparse", "simpletir"]


# -- the plug-in ------------------------------------------------------------------------------------------------------


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)


def test_verl_finds_the_trainer_and_a_broken_one_says_why() -> None:
    code = """
import sys
broken = sys.argv[1:] == ["broken"]
import verl
assert "agentropy.integrations.verl.trainer" not in sys.modules and "verl.trainer.ppo.v1" not in sys.modules
if broken:
    sys.modules["agentropy.integrations.verl.trainer"] = None
from verl.trainer.ppo.v1 import get_trainer_cls
found = get_trainer_cls("agentropy")
print(found.__name__, get_trainer_cls("sync").__name__)
if broken:
    found(None)
"""
    whole = python(code)
    assert whole.stdout.split() == ["AgentropyTrainer", "PPOTrainerSync"], whole.stderr
    broken = python(code.replace("sys.argv[1:]", "['broken']"))
    assert broken.stdout.split() == ["NotToBeHad", "PPOTrainerSync"], broken.stderr
    assert "agentropy: the verl trainer 'agentropy' is not to be had:" in broken.stderr
    assert "RuntimeError: the trainer 'agentropy' is not to be had:" in broken.stderr


def test_the_trainer_counts_as_synchronous_whatever_its_name() -> None:
    trainer = object.__new__(AgentropyTrainer)
    trainer.trainer_mode = "agentropy"
    assert trainer.trainer_mode == "sync"


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (None, r"no group 'agentropy': add '\+agentropy.method=tao-rl'"),
        ({"method": "tao-rl", "tool": ["python"]}, "unknown option agentropy.tool; did you mean agentropy.tools"),
        ({"method": "tao-rl", "max_turns": 0}, r"agentropy.max_turns: .*greater than or equal to 1 \(got 0\)"),
        ({"tools": []}, "agentropy.method: Field required"),
    ],
)
def test_options_that_are_wrong(group: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_options({"agentropy": group} if group is not None else {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.adv_estimator=gae"], "there is no critic; set algorithm.adv_estimator=grpo"),
        (["algorithm.rollout_correction.bypass_mode=true"], "bypass_mode=true with method tao-rl: the old policy's"),
        (["actor_rollout_ref.actor.shuffle=true"], "shuffle=true with method tao-rl: weights of the loss"),
        (["actor_rollout_ref.actor.use_kl_loss=true"], "use_kl_loss=True with method tao-rl: .*kl_coef is 0"),
        (["+agentropy.method_options.kl_coef=0.1", "actor_rollout_ref.actor.use_kl_loss=false"], "kl_coef is 0.1"),
        (["actor_rollout_ref.actor.entropy_coeff=0.1"], "use agentropy.method_options.entropy_coef"),
        (["algorithm.use_kl_in_reward=true"], "rewards are the method's own"),
        (["actor_rollout_ref.rollout.n=1"], "needs several trajectories"),
        (["trainer.v1.trainer_mode=sync"], "set it to agentropy"),
        (["actor_rollout_ref.rollout.agent.agent_loop_manager_class=null"], "trajectories come from our agent loop"),
        (["actor_rollout_ref.rollout.calculate_log_probs=false"], "the sampler's log-probabilities are needed"),
    ],
)
def test_settings_of_verl_that_contradict_the_method(changes: list[str], message: str, tmp_path: Path) -> None:
    plain: Any = OmegaConf.to_container(verl_config(tmp_path, *changes), resolve=True)
    with pytest.raises(UserError, match=message):
        check_config(plain, method_of(read_options(plain), plain))


def test_the_configuration_of_launch_is_accepted(tmp_path: Path) -> None:
    plain: Any = OmegaConf.to_container(verl_config(tmp_path), resolve=True)
    method = method_of(read_options(plain), plain)
    check_config(plain, method)
    assert method.name == "tao-rl"
    assert method.loss.norm_constant == 4 * 4 * RESPONSE


def test_functions_as_tools() -> None:
    assert tool_of("verl_runs:world", 1.0) is world
    for name, message in (
        ("nowhere:f", "No module"),
        ("verl_runs:f", "no attribute"),
        ("verl_runs:LocalClient", "no function"),
    ):
        with pytest.raises(UserError, match=message):
            tool_of(name, 1.0)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_task_comes_back_out_of_a_row() -> None:
    task = Task("q1", "What is 2+2?", ("4", "four"), "math", kind="sum", need=1, row={"setup": "x = 1"})
    row = task_as_row(task, 3, "file")
    assert task_of(row | {"raw_prompt": row["prompt"]}, None, True) == (None, task)


def test_rows_of_a_verl_user() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
    row = {"raw_prompt": prompt, "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 7}, "data_source": "x"}
    system, task = task_of(row, "math", True)
    assert (system, task.question, task.answers, task.grader) == ("Be brief.", "What is 2+2?", ("4",), "math")
    with pytest.raises(UserError, match=r"set agentropy\.grader"):
        task_of(row, None, True)
    assert task_of(row, None, False)[1].answers == ()
    with pytest.raises(UserError, match="roles user, assistant, user"):
        task_of(row | {"raw_prompt": [{"role": r, "content": ""} for r in ("user", "assistant", "user")]}, "math", True)


def back(rows: Any, groups: Any, **scores: Any) -> list[Trajectory]:
    def column(name: str) -> list[torch.Tensor]:
        return [torch.tensor(r.columns[name]) for r in rows]

    return trajectories_of(
        groups,
        [torch.tensor(r.prompt) for r in rows],
        [torch.tensor(r.response) for r in rows],
        {n: column(n) for n in ("kinds", "segments", "calls", "statuses")},
        [r.about for r in rows],
        **scores,
    )


@pytest.mark.parametrize("method", METHODS)
def test_columns_shape_as_the_command_line_does(method: str, tmp_path: Path) -> None:
    trajectories = recorded()
    lines = shaped_lines(trajectories, method, tmp_path)
    rows = [row_of(t, PROMPT + RESPONSE, 0) for t in trajectories]
    entropies = [[e for s in t.segments[1:] for e in (s.entropies or (0.0,) * len(s.ids))] for t in trajectories]
    read = back(
        rows,
        [t.question_id for t in trajectories],
        logprobs=[torch.tensor(r.logprobs) for r in rows],
        entropies=[torch.tensor(e) for e in entropies],
    )
    lengths = [len(r.response) for r in rows]
    whole = list(range(len(rows)))
    taught = teach(make_method(method), read, whole, lengths, [whole])
    assert taught.shaped.kept.tolist() == [line["kept"] for line in lines]
    assert list(taught.shaped.why) == [line["why"] for line in lines]
    assert any(line["kept"] for line in lines)
    for i, (row, line) in enumerate(zip(rows, lines, strict=True)):
        sampled = torch.tensor(row.mask) > 0
        found = taught.columns["advantages"][i, : len(row.mask)]
        torch.testing.assert_close(found[sampled], torch.tensor(line["advantages"]), atol=1e-5, rtol=0)
        assert not bool(found[~sampled].any())
        assert float(taught.shaped.reward[i]) == pytest.approx(line["reward"], abs=1e-5)


def test_a_result_that_ended_the_trajectory_keeps_its_status_in_one_token() -> None:
    call = Segment("call", (5, 6), (-0.1, -0.1), (0.2, 0.2), calls=(ToolCall("python"),))
    result = Segment("result", tuple(range(10, 40)), results=(ToolResult("x", "error"),))
    t = Trajectory("q", "q/0", "", (Segment("prompt", (1, 2)), call, result), None, 0.0, "context_full")
    row = row_of(t, 4, 0)
    assert row.response == [5, 6, 10]
    [read] = back([row], ["q"])
    assert [r.status for r in read.results] == ["error"]


def test_a_trajectory_without_a_token_and_a_lost_one() -> None:
    empty = Trajectory("q", "q/0", "", (Segment("prompt", (1, 2)),), None, 0.0, "context_full")
    lost = dataclasses.replace(empty, trajectory_id="q/1", score=None, stop="error")
    rows = [row_of(t, 8, 9) for t in (empty, lost)]
    assert [(r.response, r.mask, r.columns["kinds"]) for r in rows] == [([9], [0], [PADDING])] * 2
    read = back(rows, ["q", "q"])
    assert [t.score for t in read] == [0.0, None]
    assert [len(t.ids) for t in read] == [2, 2]
    assert [t.score for t in back(rows, ["q", "q"], rewards=[1.0, 1.0])] == [1.0, None]


def test_tokens_that_verl_rejects_weigh_nothing() -> None:
    """What `rollout_rs` bars is left out of the mask and of the denominator of its update."""
    from agentropy.integrations.verl.loss import MASK, WEIGHTS

    trajectories = recorded()
    lengths = [len(row_of(t, PROMPT + RESPONSE, 0).response) for t in trajectories]
    whole = list(range(len(lengths)))
    free = teach(make_method("tao-rl"), trajectories, whole, lengths, [whole])
    row = int(free.columns[MASK].sum(1).argmax())
    allowed = torch.ones(len(lengths), max(lengths))
    allowed[row] = 0
    barred = teach(make_method("tao-rl"), trajectories, whole, lengths, [whole], allowed)
    assert float(free.columns[MASK][row].sum()) > 0
    for name in (MASK, WEIGHTS, "loss_mask"):
        assert float(barred.columns[name][row].sum()) == 0
    assert float(barred.columns[WEIGHTS].sum()) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(barred.columns["advantages"], free.columns["advantages"])
    nothing = teach(make_method("tao-rl"), trajectories, whole, lengths, [whole], torch.zeros_like(allowed))
    assert free.learns
    assert not nothing.learns


# -- updates ----------------------------------------------------------------------------------------------------------


def test_updates_are_those_that_verl_makes() -> None:
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import make_iterator

    rows, ranks, size = 24, 2, 8
    data = TensorDict({"row": torch.arange(rows)}, batch_size=[rows])
    iterators = [
        make_iterator(part, mini_batch_size=size // ranks, epochs=1, seed=42 + r, dataloader_kwargs={"shuffle": False})
        for r, part in enumerate(data.chunk(ranks))
    ]
    theirs = [sorted(i for part in parts for i in part["row"].tolist()) for parts in zip(*iterators, strict=True)]
    assert [sorted(update) for update in optimiser_batches(rows, ranks, size)] == theirs


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("options", [{}, {"aggregation": "sequence-mean", "entropy_coef": 0.01}])
def test_the_loss_is_the_methods_own_however_it_is_packed(options: dict[str, Any]) -> None:
    """Two ranks of two micro-batches, averaged over the ranks as verl does, against the loss of all tokens at once."""
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import assign_non_tensor

    from agentropy.algorithms.losses import LossInputs
    from agentropy.integrations.verl.loss import MASK, WEIGHTS, ActorLoss

    trajectories = recorded()
    rows = [row_of(t, PROMPT + RESPONSE, 0) for t in trajectories]
    method = make_method("tao-rl", **options)
    n = len(rows)
    lengths = [len(r.response) for r in rows]
    taught = teach(method, trajectories, range(n), lengths, [range(n)])
    torch.manual_seed(0)
    total = [len(r.prompt) + len(r.response) for r in rows]
    flat = (torch.randn(sum(total)) * 0.1 - 1).requires_grad_()
    ends = torch.tensor(total).cumsum(0).tolist()

    def logp(i: int) -> torch.Tensor:
        """As an engine gives them: at each token the next one's."""
        return flat[ends[i] - total[i] : ends[i]]

    def response(i: int) -> torch.Tensor:
        return logp(i)[len(rows[i].prompt) - 1 : -1]

    def columns(part: list[int]) -> Any:
        fields = {
            "prompts": nested([torch.tensor(rows[i].prompt) for i in part]),
            "responses": nested([torch.tensor(rows[i].response) for i in part]),
            "old_log_probs": nested([torch.full((lengths[i],), -1.0) for i in part]),
        }
        for name in ("advantages", WEIGHTS, MASK):
            fields[name] = nested([taught.columns[name][i, : lengths[i]] for i in part])
        data = TensorDict(fields, batch_size=[len(part)])
        tokens = float(taught.columns[MASK].sum())
        assign_non_tensor(data, dp_size=2, batch_num_tokens=tokens)
        return data

    loss = ActorLoss("tao-rl", options)
    parts = [[0, 3, 5], [1, 2, 4, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15]]
    theirs = torch.zeros(())
    shares = 0.0
    for part in parts:
        values = nested([logp(i) for i in part])
        out = {"log_probs": values, "entropy": nested([-logp(i) for i in part])}
        value, metrics = loss(out, columns(part))
        theirs = theirs + value / 2
        shares += metrics["optim/ratio_mean"].aggregate() / 2
    (gradient,) = torch.autograd.grad(theirs, flat)

    weights, mask = taught.columns[WEIGHTS], taught.columns[MASK] > 0
    whole = torch.nn.utils.rnn.pad_sequence([response(i) for i in range(n)], batch_first=True)
    inputs = LossInputs(
        logp=whole[mask],
        old_logp=torch.full_like(whole[mask], -1.0),
        advantages=taught.columns["advantages"][mask],
        weights=weights[mask],
        mask=torch.ones_like(whole[mask], dtype=torch.bool),
        entropy=-whole[mask],
    )
    ours, stats = method.compute_loss(inputs)
    (expected,) = torch.autograd.grad(ours, flat)
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
    assert float(theirs.detach()) == pytest.approx(float(ours.detach()), abs=1e-6)
    assert shares == pytest.approx(stats.metrics()["optim/ratio_mean"], abs=1e-5)


def test_a_micro_batch_without_a_token_to_learn_from_has_a_gradient_of_zero() -> None:
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import assign_non_tensor

    from agentropy.integrations.verl.loss import MASK, WEIGHTS, ActorLoss

    zeros = nested([torch.zeros(1)])
    fields = dict.fromkeys(("old_log_probs", "advantages", WEIGHTS, MASK), zeros)
    data = TensorDict(
        fields | {"prompts": nested([torch.ones(3)]), "responses": nested([torch.ones(1)])}, batch_size=[1]
    )
    assign_non_tensor(data, dp_size=1, batch_num_tokens=0)
    values = torch.randn(4, requires_grad=True)
    loss, _ = ActorLoss("tao-rl", {})(
        {"log_probs": torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4]))}, data
    )
    loss.backward()
    assert values.grad is not None
    assert float(values.grad.abs().sum()) == 0.0


# -- the policy -------------------------------------------------------------------------------------------------------


def test_servers_as_a_policy_and_a_tree_of_arpo(tmp_path: Path) -> None:
    """A worker's part without the worker: trees grow out of the surprisals of verl's client."""
    from agentropy.integrations.verl.worker import make_house, sample_group

    torch.set_num_threads(1)
    config = verl_config(tmp_path, method="arpo", method_options={"base": 1.0, "roots": 2}, max_result_tokens=64)
    plain: Any = OmegaConf.to_container(config, resolve=True)
    from agentropy.policies.loading import load_model

    model, tokenizer = load_model(model_path())
    house = make_house(plain, tokenizer, model.config, model.generation_config)
    task = next(t for i in range(99) if (t := world("arithmetic").tasks.train(i)).need)
    row = task_as_row(task, 0, "x") | {"uid": "u1", "global_steps": 1}
    client = LocalClient(model_path())

    async def work(validate: bool) -> Any:
        return await sample_group(house, client, row, 6, SamplingParams(max_new_tokens=64), validate=validate)

    async def both() -> Any:
        await house.toolbox.start()
        out = await work(False), await work(True)
        await house.toolbox.close()
        await house.scorer.close()
        return out

    (tree, versions), (plain_group, _) = asyncio.run(both())
    assert versions == {3}
    assert len(tree) == len(plain_group) == 6
    forked = [t for t in tree if t.parent_id is not None]
    assert forked
    assert not any(t.parent_id for t in plain_group)
    names = {t.trajectory_id: t for t in tree}
    for t in forked:
        assert t.ids[: t.fork_at] == names[t.parent_id or ""].ids[: t.fork_at]
    assert len(set(client.requests)) == 2 + 6, "a branch stays on its parent's server"
    assert all(t.entropy_kind == "top-k" for t in tree)
    model_tokens = [s for t in tree for s in t.segments if s.is_model]
    assert all(e == -p for s in model_tokens for e, p in zip(s.entropies or (), s.logprobs or (), strict=True))
    rows = [row_of(t, house.info.max_context, 0) for t in tree]
    assert [t.parent_id for t in back(rows, ["u1"] * 6)] == [t.parent_id for t in tree]


class FixedClient:
    """Answers every request with the same ids."""

    def __init__(self, ids: list[int], reason: str = "completed", logprobs: bool = True) -> None:
        self.out = SimpleNamespace(
            token_ids=ids, log_probs=[-0.5] * len(ids) if logprobs else None, stop_reason=reason, extra_fields={}
        )
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append(sampling_params)
        return self.out


def policy_on(client: Any, context: int = 20, strings: bool = True) -> Any:
    from agentropy.integrations.verl.policy import ServerPolicy
    from agentropy.policies.base import PolicyInfo
    from agentropy.policies.stops import StopTable

    stops = StopTable(None, 50, torch.device("cpu"))
    return ServerPolicy(client, stops, PolicyInfo("x", 50, context, "top-k"), strings)


def one_turn(policy: Any, room: int, stop: Stop, prompt: int = 3) -> Any:
    [handle] = policy.open(list(range(prompt)), [0])
    return asyncio.run(policy.generate(handle, (), SamplingParams(max_new_tokens=room), stop))


def test_turns_end_where_the_stop_says() -> None:
    stop = Stop(frozenset({7}))
    client = FixedClient([5, 6, 7, 8])
    assert (out := one_turn(policy_on(client), 10, stop)).ids == (5, 6, 7)
    assert (out.finish, out.entropies) == ("stop", (0.5, 0.5, 0.5))
    asked = client.asked[0]
    assert (asked["stop_token_ids"], asked["max_tokens"], asked["top_k"], asked["logprobs"]) == ([7], 10, -1, True)
    assert one_turn(policy_on(FixedClient([5, 6])), 2, stop).finish == "length"
    assert one_turn(policy_on(FixedClient([5, 6])), 10, stop).finish == "stop", "the server's own end of sequence"
    assert one_turn(policy_on(FixedClient([5, 6]), context=5), 10, stop).finish == "context_full"
    assert one_turn(policy_on(client, context=3), 10, stop).ids == ()
    with pytest.raises(PolicyLost):
        one_turn(policy_on(FixedClient([], "aborted")), 10, stop)
    with pytest.raises(RuntimeError, match="no log-probability for each token"):
        one_turn(policy_on(FixedClient([5], logprobs=False)), 10, stop)


# -- launching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["plain", "", "two words", "a=b,c", 'say "hi"', "it's", "[x]", "null", "1e5", "é{}", "C:\\a"]
)
def test_values_survive_hydras_grammar(value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    [override] = OverridesParser.create().parse_overrides([f"key={hydra_value(value)}"])
    assert override.value() == value or str(override.value()) == value
    nested_value = {"a": [value, 1], "b": True}
    [override] = OverridesParser.create().parse_overrides([f"key={hydra_value(nested_value)}"])
    assert isinstance(override.value(), dict)


def launch(tmp_path: Path, *arguments: str) -> int:
    tasks = write_tasks(tmp_path / "tasks.jsonl")
    fixed = ["--model", model_path(), "--tasks", str(tasks), "--questions", "8", "--out", str(tmp_path / "run")]
    return main(["launch", "verl", *fixed, *arguments])


def test_a_dry_run_writes_what_verl_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as parquet

    assert launch(tmp_path, "--dry-run", "--system", "Be brief: yes, no", "trainer.logger=[console,wandb]") == 0
    shown = capsys.readouterr().out
    assert "-m verl.trainer.main_ppo" in shown
    assert '+agentropy.system="Be brief: yes, no"' in shown
    assert (tmp_path / "run" / "launch.sh").read_text().count("trainer.logger") == 2
    rows = parquet.read_table(tmp_path / "run" / "train.parquet").to_pylist()
    held = parquet.read_table(tmp_path / "run" / "validation.parquet").to_pylist()
    assert (len(rows), len(held)) == (40, 4) or len(rows) + len(held) <= 44
    system, task = task_of(rows[0] | {"raw_prompt": rows[0]["prompt"]}, None, True)
    assert task.answers
    assert system is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "tao"], "method"),
        (["--tools", "piton"], "no built-in tool 'piton'"),
        (["--questions", "64"], "fewer than the 64 of a step"),
        (["--minibatch", "3"], "--minibatch 3 does not divide"),
        (["nonsense"], "'nonsense' is no override"),
        (["trainer.no_such_key=1"], "Could not override 'trainer.no_such_key'"),
        (["algorithm.adv_estimator=gae"], "there is no critic"),
        (["--gpus", "0"], "--gpus must be at least 1"),
    ],
)
def test_wrong_input_is_told_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, "--dry-run", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert math.isfinite(len(error))

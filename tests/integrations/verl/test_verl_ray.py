"""The plug-in on real Ray and a real TransferQueue: agent-loop workers, dynamic sampling, `_compute_advantage`."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl_runs import PROMPT, RESPONSE, LocalClient, model_path, recorded, shaped_lines, verl_config, world

from agentropy.errors import UserError
from agentropy.integrations.verl.groups import GroupBuffer
from agentropy.integrations.verl.loss import MASK, WEIGHTS
from agentropy.integrations.verl.rows import TASK, row_of, task_as_row, unbound
from agentropy.integrations.verl.trainer import AgentropyTrainer
from agentropy.integrations.verl.worker import AgentropyManager, AgentropyWorker, output_of
from agentropy.methods import make_method
from agentropy.trajectory import Trajectory

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", autouse=True)
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    config = verl_config(tmp_path_factory.mktemp("verl"))
    here = str(Path(__file__).parent)
    env = {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200_000_000,
        runtime_env={"env_vars": env},
        logging_level="ERROR",
    )
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    yield config
    tq.close()
    ray.shutdown()


def trainer_for(config: Any, ranks: int = 1) -> Any:
    """Our trainer as its first lines make it, with nothing of verl's set up (no engine is asked here)."""
    from omegaconf import OmegaConf

    from agentropy.integrations.verl.options import method_of, read_options

    plain: Any = OmegaConf.to_container(config, resolve=True)
    trainer = object.__new__(AgentropyTrainer)
    trainer.config = config
    trainer._options = read_options(plain)
    trainer._method = method_of(trainer._options, plain)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})
    return trainer


@functools.cache
def postprocessor() -> Any:
    """verl's own way into the TransferQueue, without a worker's start."""
    worker = object.__new__(AgentropyWorker)
    worker.processor, worker.distillation_enabled, worker.reward_loop_worker_handles = None, False, None
    return worker


def put_group(uid: str, trajectories: Sequence[Trajectory], partition: str = "train", status: str = "finished") -> None:
    """A question's trajectories as a worker writes them."""

    async def work() -> None:
        for i, t in enumerate(trajectories):
            output = output_of(row_of(t, PROMPT + RESPONSE, 0), True, 1, {5}, 5)
            await postprocessor()._agent_loop_postprocess(
                output, partition == "val", uid=uid, session_id=i, global_steps=5, raw_prompt=[]
            )

    asyncio.run(work())
    tq.kv_put(key=uid, partition_id=partition, tag={"is_prompt": True, "status": status, "global_steps": 5})


def clear(partition: str = "train") -> None:
    keys = list((tq.kv_list(partition) or {}).get(partition, {}))
    if keys:
        tq.kv_clear(keys=keys, partition_id=partition)


def groups_of(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    out: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        out.setdefault(t.question_id, []).append(t)
    return out


def response_of(t: Trajectory, name: str) -> torch.Tensor:
    return torch.tensor([v for s in t.segments[1:] for v in (getattr(s, name) or (0.0,) * len(s.ids))])


@pytest.mark.parametrize(("method", "ranks"), [("tao-rl", 1), ("tepo-dense", 2)])
def test_advantages_in_the_transfer_queue_are_those_of_the_command_line(
    method: str, ranks: int, queue: Any, tmp_path: Path
) -> None:
    """Real columns through a real TransferQueue, with the rows that verl pads a batch with among them."""
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

    clear()
    trajectories = recorded()
    lines = shaped_lines(trajectories, method, tmp_path)
    uids = {}
    for question, group in groups_of(trajectories).items():
        uids[question] = uuid.uuid4().hex
        put_group(uids[question], group)
    order = {f"{uids[q]}_{i}_0": t for q, group in groups_of(trajectories).items() for i, t in enumerate(group)}
    keys = list(order)[::-1]
    tags = (tq.kv_list("train") or {})["train"]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[tags[k] for k in keys])
    batch = upsample_batch_to_divisible_size(batch, 20, 3)
    assert len(batch) == 20
    assert tags[keys[0]]["min_global_steps"] == tags[keys[0]]["max_global_steps"] == 5
    fields = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["rm_scores", "extra_fields"])
    rewards = [float(s.sum()) for s in unbound(fields["rm_scores"])]
    assert rewards == pytest.approx([order[k].score for k in keys]), "each row its own reward"
    # What `_compute_old_log_prob` writes, for padding rows too; their values must not matter.
    one = torch.tensor([7.0])
    extra = {
        "old_log_probs": [*(response_of(order[k], "logprobs") for k in keys), *[one] * 4],
        "entropy": [*(response_of(order[k], "entropies") for k in keys), *[one] * 4],
    }
    jagged = {
        n: torch.nested.as_nested_tensor([v.float() for v in rows], layout=torch.jagged) for n, rows in extra.items()
    }
    from tensordict import TensorDict

    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=TensorDict(jagged, batch_size=[20]))

    config = verl_config(tmp_path, method=method)
    config.actor_rollout_ref.actor.ppo_mini_batch_size, config.actor_rollout_ref.rollout.n = 5, 2
    trainer = trainer_for(config, ranks)
    metrics: dict[str, Any] = {}
    trainer._compute_advantage(batch, metrics)
    names = ["advantages", "returns", WEIGHTS, MASK, "loss_mask", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=names)
    columns = {n: unbound(data[n]) for n in names}
    line_of = {t.trajectory_id: line for t, line in zip(trajectories, lines, strict=True)}
    for i, key in enumerate(keys):
        line, sampled = line_of[order[key].trajectory_id], columns["response_mask"][i] > 0
        expected = torch.tensor(line["advantages"])
        torch.testing.assert_close(columns["advantages"][i][sampled], expected, atol=1e-5, rtol=0)
        assert not bool(columns["advantages"][i][~sampled].any())
        assert (columns[MASK][i] > 0).tolist() == [bool(s) and line["kept"] for s in sampled]
        assert columns["loss_mask"][i].tolist() == columns[MASK][i].long().tolist()
    for name in names:
        assert [c.tolist() for c in columns[name][16:]] == [[0]] * 4, "padding rows teach nothing"
    # Two updates of ten rows: the weights of each add up to one, over the rows that its ranks get.
    for update in trainer._updates(20):
        assert len(update) == 10
        total = sum(float(columns[WEIGHTS][i].sum()) for i in update)
        assert total == pytest.approx(1.0, abs=1e-5)
    assert metrics["filter/kept"] == sum(line["kept"] for line in lines)
    assert metrics["entropy/exact"] == 1.0
    assert trainer._learns
    clear()


def buffer_for(refill: Any, oversample: float = 3.0) -> GroupBuffer:
    return GroupBuffer(
        method=make_method("tao-rl"),
        rewards="grader",
        max_oversample=oversample,
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        refill_fn=refill,
    )


def mixed_and_alike() -> tuple[list[Trajectory], list[Trajectory]]:
    """A group that TAO-RL keeps, and one whose outcomes are alike."""
    import dataclasses

    called = [t for t in recorded() if any(r.status == "ok" for r in t.results)][:4]
    kept = [dataclasses.replace(t, score=float(i % 2)) for i, t in enumerate(called)]
    return kept, [dataclasses.replace(t, score=1.0) for t in called]


def test_questions_that_the_filters_remove_are_replaced(queue: Any) -> None:
    clear()
    kept, alike = mixed_and_alike()
    drawn: list[int] = []

    def refill(n: int) -> int:
        drawn.append(n)
        for i in range(n):
            put_group(f"new{len(drawn)}{i}", kept)
        return n

    for i in range(2):
        put_group(f"alike{i}", alike)
    put_group("kept", kept)
    batch, metrics = buffer_for(refill).sample(5, "train", 3)
    assert {k.split("_")[0] for k in batch.keys} <= {"kept", *(f"new1{i}" for i in range(9))}
    assert len(batch.keys) == 12
    assert len(drawn) == 1
    assert metrics["filter/questions_removed"] == 2
    assert metrics["filter/questions_sampled"] == 3 + drawn[0]
    left = set((tq.kv_list("train") or {}).get("train", {}))
    assert left == set(batch.keys), "what is not in the batch is gone"
    clear()


def test_drawing_ends_and_a_batch_that_teaches_nothing_is_still_one(queue: Any) -> None:
    clear()
    _, alike = mixed_and_alike()
    drawn: list[int] = []

    def refill(n: int) -> int:
        for i in range(n):
            put_group(f"more{len(drawn)}{i}", alike)
        drawn.append(n)
        return n

    put_group("first", alike)
    batch, metrics = buffer_for(refill, oversample=3.0).sample(5, "train", 1)
    assert sum(drawn) == 2
    assert metrics["filter/questions_sampled"] == 3
    assert {k.split("_")[0] for k in batch.keys} == {"first"}
    clear()


# -- workers ----------------------------------------------------------------------------------------------------------


def prompts(rows: Sequence[dict[str, Any]], validate: bool = False) -> Any:
    """A batch of a data set as verl's trainer hands it to the agent loops, registered in the TransferQueue."""
    columns = {key: np.array([row[key] for row in rows], dtype=object) for key in rows[0] if key != "raw_prompt"}
    columns["raw_prompt"] = np.empty(len(rows), dtype=object)
    columns["raw_prompt"][:] = [row["raw_prompt"] for row in rows]
    batch = tu.get_tensordict(columns)
    tu.assign_non_tensor_data(batch, "global_steps", 5)
    if validate:
        tu.assign_non_tensor_data(batch, "validate", True)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 5} for _ in rows]
    tq.kv_batch_put(keys=[r["uid"] for r in rows], partition_id="val" if validate else "train", tags=tags)
    return batch


def row(index: int, uid: str, **changes: Any) -> dict[str, Any]:
    needs_tool = [t for t in map(world("arithmetic").tasks.train, range(60)) if t.need]
    made = task_as_row(needs_tool[index], index, "arithmetic")
    return made | {"raw_prompt": made["prompt"], "uid": uid, "index": index} | changes


def wait(uids: Sequence[str], partition: str = "train") -> dict[str, Any]:
    for _ in range(3000):
        tags = (tq.kv_list(partition) or {}).get(partition, {})
        if all(tags.get(u, {}).get("status") in ("finished", "failure") for u in uids):
            return dict(tags)
        time.sleep(0.2)
    raise AssertionError("the workers did not finish")


def test_an_agent_loop_worker_grows_trees_and_says_why_a_question_failed(queue: Any, tmp_path: Path) -> None:
    clear()
    options = {"method": "arpo", "method_options": {"base": 1.0, "roots": 1}, "max_result_tokens": 64}
    config = verl_config(tmp_path, **options)
    manager = AgentropyManager.create(config=config, llm_client=LocalClient(model_path()))
    impossible = [{"role": r, "content": ""} for r in ("user", "assistant", "user")]
    bad = row(2, "bad", extra_info={}, raw_prompt=impossible, reward_model={"ground_truth": "1"})
    manager.generate_sequences(prompts([row(0, "u0"), row(1, "u1"), bad]))
    tags = wait(["u0", "u1", "bad"])
    assert [tags[u]["status"] for u in ("u0", "u1", "bad")] == ["finished", "finished", "failure"]
    assert "UserError: a prompt with the roles user, assistant, user" in tags["bad"]["why"]
    keys = sorted(k for k in tags if "_" in k)
    assert keys == [f"{u}_{i}_0" for u in ("u0", "u1") for i in range(4)]
    names = ["prompts", "responses", "response_mask", "rollout_log_probs", "agentropy_kinds", "agentropy_statuses"]
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=[*names, "extra_fields"])
    about = [getattr(e, "data", e)[TASK] for e in data["extra_fields"]]
    assert any(a["parent"] for a in about), "a tree has branches"
    assert all(a["score"] in (0.0, 1.0) for a in about)
    statuses = unbound(data["agentropy_statuses"])
    assert any(bool(s.any()) for s in statuses), "python ran in its sandbox"
    for kinds, mask, logprobs in zip(
        unbound(data["agentropy_kinds"]),
        unbound(data["response_mask"]),
        unbound(data["rollout_log_probs"]),
        strict=True,
    ):
        assert torch.isin(kinds, torch.tensor([1, 2])).tolist() == (mask > 0).tolist()
        assert bool((logprobs[mask > 0] <= 0).all())
    tq.kv_clear(keys=[k for k in tags if not k.startswith("bad")], partition_id="train")
    with pytest.raises(UserError, match="none of 1 questions could be sampled: UserError: a prompt with the roles"):
        buffer_for(None).sample(5, "train", 1)
    # Validation samples one trajectory a question, and never a tree.
    manager.generate_sequences(prompts([row(3, "v0")], validate=True))
    assert sorted(wait(["v0"], "val")) == ["v0", "v0_0_0"]
    clear("val")
    clear()

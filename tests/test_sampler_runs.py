"""`agentropy train` with a server as its sampler: real training, over real sockets, of the embedded agent."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentropy.config import SamplerConfig, parse_overrides
from agentropy.errors import UserError
from agentropy.policies.http_client import Patience
from agentropy.training import sampler as sampler_module
from agentropy.training import session
from agentropy.training.weight_push import Control, DiskTransport, NcclTransport, push_weights
from agentropy.trajectory import read_jsonl
from faulty_server import Refuse
from sampler_server import WeightServer, agent_server, running

SMALL = ("--rollout.questions=2", "--rollout.samples=3", "--evaluation.questions=0", "--checkpoint.every=50")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "PATIENCE", Patience(timeout=60.0, tries=3, pause=0.01))
    monkeypatch.setattr(sampler_module, "POLL_SECONDS", 0.05)


def train(out: Path, url: str, *arguments: str, steps: int = 2, method: str = "grpo") -> list[dict[str, Any]]:
    """Metrics of a run in this process."""
    options = [f"--method={method}", f"--steps={steps}", f"--out={out}", f"--rollout.server={url}", *SMALL, *arguments]
    assert session.start(None, parse_overrides(options)) == 0
    return rows(out)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_with_the_numbers_of_the_local_engine(tmp_path: Path) -> None:
    server = agent_server()
    evaluated = ("--evaluation.questions=3", "--evaluation.samples=1")
    with running(server) as served:
        found = train(tmp_path / "run", served.url, *evaluated, method="tao-rl")
        calls = ["pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume"]
        assert server.log == calls * 3  # before the first evaluation, and after each of two steps
        assert server.wrong == []
        assert server.version.endswith("-2")
    for step in found:
        assert step["entropy/exact"] == 1.0
        assert step["sampler/pushes"] == 1.0
        assert max(step["sampler/gap_max"], step["sampler/probe_gap"], step.get("optim/sampler_gap_max", 0)) < 1e-5
        assert (step["sampler/corrected"], step["sampler/weight_mean"]) == (0.0, 1.0)
    assert sum(step["optim/updates"] for step in found) > 0
    # The server was left with the weights of the end, and they are not those of the beginning.
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    held = server.model.state_dict()
    assert all(torch.equal(held[k], v) for k, v in trained.items())
    assert any(not torch.equal(server.first[k], v) for k, v in trained.items())
    assert not (tmp_path / "run" / "weights").exists()
    # Greedy answers, calls, entropies: those of the local engine, before and after.
    local = tmp_path / "local"
    options = ["--method=tao-rl", "--steps=0", f"--out={local}", *SMALL, *evaluated]
    assert session.start(None, parse_overrides(options)) == 0
    mine = list(read_jsonl(tmp_path / "run" / "trajectories" / "test-before-greedy.jsonl"))
    other = list(read_jsonl(local / "trajectories" / "test-before-greedy.jsonl"))
    for a, b in zip(mine, other, strict=True):
        assert (a.ids, a.score, a.stop, a.entropy_kind) == (b.ids, b.score, b.stop, "exact")
        for x, y in zip(a.segments, b.segments, strict=True):
            assert (x.logprobs or ()) == pytest.approx(y.logprobs or (), abs=1e-4)
            assert (x.entropies or ()) == pytest.approx(y.entropies or (), abs=1e-4)
    assert (tmp_path / "run" / "evaluation-after.json").is_file()


@pytest.mark.slow
def test_branches_are_sampled_and_scored_too(tmp_path: Path) -> None:
    server = agent_server()
    with running(server) as served:
        [step] = train(
            tmp_path / "run", served.url, "--rollout.samples=6", "--method_options.base=1.0", steps=1, method="aepo"
        )
    assert step["rollout/forks"] > 0
    assert step["entropy/exact"] == 1.0
    assert step["sampler/gap_max"] < 1e-4


def test_a_server_in_bfloat16_shows_and_is_made_up_for(tmp_path: Path) -> None:
    one = ("--loss.entropy_coef=0.001", "--optim.minibatches=1")  # one update, whatever the answers
    with running(agent_server(dtype=torch.bfloat16)) as served:
        [step] = train(tmp_path / "auto", served.url, "--sampler.correction_above=0.001", *one, steps=1)
        [off] = train(tmp_path / "never", served.url, "--sampler.correction=never", *one, steps=1)
    assert 1e-3 < step["sampler/gap_mean"] < 0.1
    assert 0 < step["sampler/kl_k3"] < 0.01
    assert step["sampler/corrected"] == 1.0
    assert step["sampler/weight_mean"] == pytest.approx(1.0, abs=0.05)
    assert step["sampler/weight_mean"] != 1.0
    assert step["optim/updates"] == 1
    assert step["optim/ratio_max"] == pytest.approx(1.0, abs=1e-4)  # the old policy of the clip is the trainer's
    assert step["optim/sampler_gap_max"] > 0.01
    assert (off["sampler/corrected"], off["sampler/weight_mean"]) == (0.0, 1.0)
    assert off["sampler/gap_mean"] == step["sampler/gap_mean"] > 1e-3
    one_way, other_way = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("auto", "never"))
    assert any(not torch.equal(one_way[k], other_way[k]) for k in one_way)  # from the same tokens


def test_a_server_that_forgets_to_load_is_noticed_and_training_goes_on(tmp_path: Path, capsys: Any) -> None:
    with running(agent_server(forgets=True)) as served:
        found = train(tmp_path / "run", served.url, "--optim.lr=0.01", steps=3)
    learned = next(i for i, step in enumerate(found) if step["optim/updates"])
    first, second = found[learned : learned + 2]
    assert (first["sampler/corrected"], second["sampler/corrected"]) == (0.0, 1.0)
    assert first["sampler/gap_mean"] < 1e-5 < 0.1 < second["sampler/gap_mean"]
    assert second["sampler/probe_gap"] > 0.1
    assert 0.3 < second["sampler/weight_mean"] < 2
    assert second["sampler/ratio_outside"] > 0
    assert "did it load the weights" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_that_restarts_gets_the_weights_again(tmp_path: Path, capsys: Any) -> None:
    server = agent_server(restarts_at=20)
    with running(server) as served:
        found = train(tmp_path / "run", served.url, steps=3)
    assert sum(step.get("sampler/restarts", 0.0) for step in found) == 1
    assert sum(step["sampler/pushes"] for step in found) == 4
    assert "lost its weights during a rollout" in capsys.readouterr().out
    assert server.wrong == []


@pytest.mark.slow
def test_what_was_lost_with_the_server_is_sampled_again(tmp_path: Path, capsys: Any) -> None:
    server = agent_server(restarts_at=25)
    with running(server) as served:
        original = type(server).__call__

        def away(self: Any, path: str, body: Any, headers: Any) -> Any:
            if server.completions == 24 and path == "/v1/completions":
                served.faults.dead = True
                threading.Timer(2.0, lambda: setattr(served.faults, "dead", False)).start()
            return original(self, path, body, headers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightServer, "__call__", away)
            found = train(tmp_path / "run", served.url, steps=3)
    assert [step["tool/lost_trajectories"] for step in found] == [0, 0, 0]
    assert all(step["sampler/gap_max"] < 1e-5 for step in found)
    assert "does not answer" in capsys.readouterr().out


def test_two_runs_cannot_share_a_server(tmp_path: Path) -> None:
    server = agent_server(restarts_at=12, restarted_version="agentropy-other-7")
    with running(server) as served, pytest.raises(UserError, match=r"another run pushes.*agentropy-other-7"):
        train(tmp_path / "run", served.url, steps=3)


def test_weights_that_cannot_be_pushed_end_the_run_with_everything_saved(tmp_path: Path) -> None:
    """By a server that keeps no version of its weights."""
    server, out = agent_server(versions=False), tmp_path / "run"
    real = server.on_collective_rpc

    def second_fails(body: Any) -> Any:
        server.fails = "No space left" if server.log.count("collective_rpc") > 1 else None
        return real(body)

    server.on_collective_rpc = second_fails  # type: ignore[method-assign]
    with running(server) as served:
        with pytest.raises(UserError, match=r"No space left.*sampler\.directory.*saved.*--resume") as caught:
            train(out, served.url, steps=2)
        assert str(out) in str(caught.value)
        assert (out / "checkpoints" / "step-000001" / "state.pt").is_file()
        assert not server.paused
        server.on_collective_rpc = real  # type: ignore[method-assign]
        server.fails = None
        assert session.resume(str(out), [("rollout.server", served.url)]) == 0
        assert [r["step"] for r in rows(out)] == [1, 2]
        assert all(r["sampler/gap_max"] < 1e-4 for r in rows(out))
        with pytest.raises(UserError, match="cannot change in a resumed run"):
            session.resume(str(out), [("sampler.correction", "never")])


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_with_everything_saved(tmp_path: Path) -> None:
    server, out = agent_server(), tmp_path / "run"
    with running(server) as served:
        original = type(server).__call__

        def dies(self: Any, path: str, body: Any, headers: Any) -> Any:
            served.faults.dead = server.completions > 20
            return original(self, path, body, headers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightServer, "__call__", dies)
            with pytest.raises(UserError, match=r"does not answer.*waited 0\.2 s.*saved.*--resume"):
                train(out, served.url, "--sampler.wait=0.2", steps=9)
        saved = sorted((out / "checkpoints").iterdir())
        assert len(saved) == 1
        done = len(rows(out))
        assert saved[0].name == f"step-{done:06d}"


@pytest.mark.parametrize("where", ["evaluation", "rollout"])
def test_a_server_that_fails_later_says_how_to_go_on(tmp_path: Path, where: str) -> None:
    """In the evaluation after training, which has saved all; in a rollout by an answer that no waiting mends."""
    server, out = agent_server(), tmp_path / "run"
    with running(server) as served:
        original, versions = type(server).__call__, server.on_weight_info

        def dies(self: Any, path: str, body: Any, headers: Any) -> Any:
            served.faults.dead = self.version.endswith("-1")
            return original(self, path, body, headers)

        def refuses(body: Any) -> Any:
            if server.version.endswith("-1"):
                raise Refuse(500, {"error": {"message": "no idea"}})
            return versions(body)

        with pytest.MonkeyPatch.context() as patch:
            if where == "evaluation":
                patch.setattr(WeightServer, "__call__", dies)
            else:
                patch.setattr(server, "on_weight_info", refuses)
            evaluated = ["--evaluation.questions=1", "--evaluation.samples=1", "--evaluation.before=false"]
            with pytest.raises(UserError, match=r"saved.*--resume"):
                train(out, served.url, "--sampler.wait=0.2", *evaluated, steps=1 if where == "evaluation" else 2)
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-000001"]


def test_a_run_goes_on_without_its_server(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running(agent_server()) as served:
        train(out, served.url, "--sampler.correction=always", steps=1)
    assert session.resume(str(out), [("rollout.server", None), ("steps", 2)]) == 0
    assert "sampler/corrected" not in rows(out)[1]


@pytest.mark.parametrize("given", [True, False])
def test_a_process_that_does_not_lead_waits_for_the_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """However short `sampler.wait` is: the server may be loading."""
    server = agent_server()
    if not given:
        monkeypatch.setattr(sampler_module, "LOAD_SECONDS", 0.2)
    with running(server) as served:
        control = Control(served.url)
        follower = sampler_module.Sampler(
            None,  # type: ignore[arg-type]
            control,
            DiskTransport(control, tmp_path),
            SamplerConfig(wait=0),
            100,
            "agentropy-x",
            leads=False,
        )
        if given:
            threading.Timer(0.3, lambda: setattr(server, "version", "agentropy-x-3")).start()
            asyncio.run(follower.begin(None, 3, print))
            assert follower.pushed == "agentropy-x-3"
        else:
            with pytest.raises(UserError, match=r"has not been given the weights of step 3 yet; waited"):
                asyncio.run(follower.begin(None, 3, print))
        control.close()


@pytest.mark.slow
def test_some_lost_trajectories_do_not_end_a_step(tmp_path: Path) -> None:
    server = agent_server()
    with running(server) as served:
        original = type(server).__call__

        def hiccups(self: Any, path: str, body: Any, headers: Any) -> Any:
            served.faults.dead = False
            if path == "/v1/completions" and server.completions % 7 == 6 and body["max_tokens"] > 20:
                server.completions += 1
                raise Refuse(400, {"error": {"message": "not this one"}})
            return original(self, path, body, headers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightServer, "__call__", hiccups)
            found = train(tmp_path / "run", served.url, steps=1)
    assert 0 < found[0]["tool/lost_trajectories"] < 12
    assert found[0]["entropy/exact"] == 1.0


def test_what_cannot_be_used_is_said_before_anything_is_sampled(tmp_path: Path) -> None:
    def said(server: WeightServer, *arguments: str) -> str:
        with running(server) as served, pytest.raises(UserError) as caught:
            train(tmp_path / "run", served.url, *arguments)
        return str(caught.value)

    other = agent_server("facts")
    assert "must serve the model that is trained" in said(other)
    server = agent_server(dev_mode=False)
    assert "VLLM_SERVER_DEV_MODE=1" in said(server)
    server.dev_mode = True
    assert "processed_logprobs" in said(server, "--rollout.temperature=0.8")
    assert "--max-model-len 600" in said(server, "--rollout.max_context=600")
    assert "has no model 'other'" in said(server, "--sampler.model=other")
    assert "AGENTROPY_NO_SUCH_KEY" in said(server, "--sampler.api_key_env=AGENTROPY_NO_SUCH_KEY")
    server.kind = "sglang"
    assert "vLLM only" in said(server)
    server.kind = "vllm"
    with torch.no_grad():
        server.model.model.embed_tokens.weight.copy_(torch.randn(1655, 128))
    server.forgets = True
    assert "does it serve the same model" in said(server)
    with pytest.raises(UserError, match=r"no server at .*start it first.*docs/sampler\.md"):
        train(tmp_path / "other", "http://127.0.0.1:9")
    with (
        running(agent_server()) as served,
        pytest.raises(UserError, match=r"no /v1/models \(HTTP 404\): is the address"),
    ):
        train(tmp_path / "other", f"{served.url}/elsewhere")


def test_vllms_nccl_engine_is_driven_in_the_order_of_its_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is not installed here, and there is no GPU: its trainer's side is played as far as its calls go."""
    server = agent_server()
    sent: list[tuple[str, Any]] = []

    def answer(name: str) -> Any:
        def handler(body: Any) -> Any:
            sent.append((name, body))
            return {"message": "done"}

        return handler

    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        setattr(server, f"on_{name}", answer(name))

    class Engine:
        def __init__(self, client: Any, source: Any) -> None:
            self.client, self.source = client, source

        @classmethod
        def trainer_init(cls, info: Any, *, client: Any, source: Any) -> Engine:
            client.init_weight_transfer_engine({"world_size": info["world_size"], "port": info["master_port"]})
            return cls(client, source)

        def send_weights(self) -> None:
            meta = self.source.metadata()
            self.client.start_weight_update()
            self.client.update_weights({"names": [m[0] for m in meta]})
            assert [name for name, _ in self.source] == [m[0] for m in meta]
            self.client.finish_weight_update()

    with running(server) as served:
        transport = NcclTransport(Control(served.url), "10.0.0.1")
        with pytest.raises(UserError, match=r"needs the server's version of vLLM.*--sampler\.push disk"):
            push_weights(transport.control, transport, server.model, "agentropy-x-0")
        assert not server.paused
        engine, base = ModuleType("nccl_engine"), ModuleType("base")
        engine.NCCLTrainerInitInfo = dict  # type: ignore[attr-defined]
        engine.NCCLTrainerWeightTransferEngine = Engine  # type: ignore[attr-defined]
        base.ParamMeta = lambda name, dtype, shape: (name, dtype, shape)  # type: ignore[attr-defined]
        for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_engine", engine)
        monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
        server.log.clear()
        for step in (1, 2):
            push_weights(transport.control, transport, server.model, f"agentropy-x-{step}")
        transport.reset()
        push_weights(transport.control, transport, server.model, "agentropy-x-3")
        transport.control.close()
    one = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert [name for name, _ in sent] == [
        "init_weight_transfer_engine",
        *one,
        *one,
        "init_weight_transfer_engine",
        *one,
    ]
    assert sent[0][1]["init_info"]["world_size"] == 3  # two workers and the trainer
    assert "lm_head.weight" in sent[2][1]["update_info"]["names"]
    assert server.version == "agentropy-x-3"
    first = ["pause", "init_weight_transfer_engine", *one, "reset_prefix_cache", "update_weight_version", "resume"]
    assert server.log[: len(first)] == first

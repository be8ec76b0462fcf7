r"""Training through a real vLLM, where somebody runs one in its development mode.

It is no dependency of ours, so this is skipped unless AGENTROPY_VLLM is its URL. It trains the model that the server
has, read from the same path, so the server must be on this machine and serve a folder, in float32. On a CPU vLLM 0.32
keeps the old head of a model whose head is tied to its embedding, so give it one that is not:

    python - <<'EOF'
    from agentropy.policies.loading import load_model
    model, tokenizer = load_model("smollm2")
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    model.config.tie_word_embeddings = False
    apart = type(model)(model.config)
    apart.load_state_dict(weights)
    apart.save_pretrained("/tmp/untied"); tokenizer.save_pretrained("/tmp/untied")
    EOF
    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model /tmp/untied --dtype float32 \
        --max-model-len 512 --enforce-eager --logprobs-mode processed_logprobs
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import torch

from agentropy.config import parse_overrides
from agentropy.policies.base import SamplingParams, Stop
from agentropy.policies.http import connect
from agentropy.policies.http_tokens import HttpPolicy
from agentropy.policies.loading import load_model
from agentropy.policies.scoring import score
from agentropy.training import session
from agentropy.training.weight_push import Control, served_version

URL = os.environ.get("AGENTROPY_VLLM", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not URL, reason="AGENTROPY_VLLM names no vLLM server")]


def test_each_steps_weights_reach_the_server(tmp_path: Path) -> None:
    control = Control(URL)
    if control.get("/is_paused") is None:
        pytest.skip("the server is not in its development mode")
    [entry] = control.get("/v1/models")["data"]
    out = tmp_path / "run"
    options = [
        f"--rollout.server={URL}",
        f"--model={entry['root']}",
        "--world=arithmetic",
        "--method=tepo-dense",
        "--loss.entropy_coef=0.01",  # so that there is something to learn, whatever the answers
        "--steps=2",
        "--optim.lr=1e-4",
        "--rollout.temperature=0.8",
        "--rollout.questions=2",
        "--rollout.samples=3",
        "--rollout.max_new_tokens=40",
        "--rollout.max_turns=2",
        "--evaluation.questions=0",
        f"--out={out}",
    ]
    assert session.start(None, parse_overrides(options)) == 0
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert step["sampler/pushes"] == 1
        assert step["entropy/exact"] == 1
        assert max(step["sampler/gap_max"], step["sampler/probe_gap"]) < 1e-3
    assert (served_version(control) or "-1").endswith("-1")  # nothing was sampled after the second step
    # One more push brings the trained weights, and they are others.
    again = [
        *options[:-1],
        "--steps=0",
        "--evaluation.questions=1",
        "--evaluation.samples=1",
        f"--out={tmp_path / 'b'}",
    ]
    again[1] = f"--model={out / 'model'}"
    assert numbers(entry["id"], entry["root"]) > 1e-3
    assert session.start(None, parse_overrides(again)) == 0
    assert numbers(entry["id"], str(out / "model")) < 1e-4
    control.close()


def numbers(name: str, folder: str) -> float:
    """Largest difference between the server's log-probabilities and those of the model in a folder."""
    model, tokenizer = load_model(folder)

    async def main() -> float:
        policy = connect(URL, name, "completions", tokenizer=tokenizer)
        assert isinstance(policy, HttpPolicy)
        prompt = tokenizer.encode("The sum of 3 and 4 is", add_special_tokens=False)
        [handle] = policy.open(prompt, [0])
        out = await policy.generate(handle, [], SamplingParams(max_new_tokens=16), Stop())
        await policy.aclose()
        with torch.no_grad():
            found = score(model, [[*prompt, *out.ids]], entropy=False).logprobs[-len(out.ids) :]
        return float((found - torch.tensor(out.logprobs)).abs().max())

    return asyncio.run(main())

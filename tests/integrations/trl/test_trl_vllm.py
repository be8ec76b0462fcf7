"""vLLM's side of the adapter, with an engine that speaks as TRL's does: no vLLM runs here, there is no GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_runs import logged, trainer

from agentropy.errors import UserError
from agentropy.integrations.trl_options import check_processes


class Engine:
    """Samples with `model.generate` what `VLLMGeneration` would, and says how it was asked."""

    max_completion_length = 64
    generation_kwargs: Any = None

    def __init__(self, run: Any, off: float) -> None:
        self.model, self.pad, self.off = run.model, run._tokenizer.pad_token_id, off
        self.synced = 0
        self.sizes: list[int] = []

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int) -> tuple[Any, ...]:
        assert (images, num_generations) == (None, 1)
        self.sizes.append(len(prompts))
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(p)) + p for p in prompts])
        there = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        stops = self.generation_kwargs["stop_token_ids"]
        self.model.eval()
        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=there,
                do_sample=True,
                max_new_tokens=self.max_completion_length,
                eos_token_id=stops,
                pad_token_id=self.pad,
                output_logits=True,
                return_dict_in_generate=True,
            )
        self.model.train()
        logps = torch.stack(out.logits, 1).log_softmax(-1)
        completions, logprobs = [], []
        for row, line in zip(out.sequences[:, width:].tolist(), logps, strict=True):
            end = next((k + 1 for k, i in enumerate(row) if i in stops), len(row))
            completions.append(row[:end])
            logprobs.append([[float(line[k, i]) - self.off] for k, i in enumerate(row[:end])])
        return prompts, completions, logprobs, None


def with_engine(tmp_path: Path, off: float = 0.0, **changes: Any) -> Any:
    """A trainer that believes that it has vLLM. `off`: by how much vLLM's log-probabilities are wrong."""
    run = trainer(tmp_path, **changes)
    run.vllm_generation, run._last_loaded_step = Engine(run, off), -1
    run.use_vllm = run.args.use_vllm = True
    check_processes(run, run._method)
    return run


def test_entropies_and_old_probabilities_come_from_a_forward_pass(tmp_path: Path) -> None:
    run = with_engine(tmp_path, settings={"max_steps": 2})
    before = [p.detach().clone() for p in run.model.parameters()]
    run.train()
    first, second = logged(run)
    assert run.vllm_generation.synced == 2
    assert max(run.vllm_generation.sizes) == 16  # all first turns in one call
    for record in (first, second):
        assert record["entropy/exact"] == 1
        assert record["entropy/model"] > 0.05
        assert record["optim/ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert record["optim/sampler_gap_max"] < 1e-3
        assert record["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-2)
    assert any(not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    run.close()


def test_other_probabilities_are_corrected_as_trl_does(tmp_path: Path) -> None:
    run = with_engine(tmp_path, 0.1, settings={"vllm_importance_sampling_mode": "token_truncate"}, method="grpo")
    run.train()
    (record,) = logged(run)
    assert record["optim/sampler_gap_mean"] == pytest.approx(0.1, abs=1e-3)
    correction = math.exp(0.1)
    assert record["sampling/importance_sampling_ratio/mean"] == pytest.approx(correction, abs=1e-2)
    assert record["optim/ratio_mean"] == pytest.approx(1, abs=1e-5)
    (inputs,) = run._buffered_inputs
    alone = inputs | {"importance_sampling_ratio": torch.ones_like(inputs["importance_sampling_ratio"])}
    corrected, plain = (float(run._compute_loss(run.model, i).detach()) for i in (inputs, alone))
    assert abs(plain) > 1e-3
    assert corrected == pytest.approx(correction * plain, rel=1e-2)
    run.close()


def test_what_trls_vllm_cannot_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="branches by entropies, which vLLM does not give"):
        with_engine(tmp_path, method="arpo")
    run = trainer(tmp_path)
    run.use_vllm, run.vllm_tensor_parallel_size = True, 2
    with pytest.raises(UserError, match="use vllm_mode='colocate'"):
        check_processes(run, run._method)

"""Sampling: the right distribution, the right numbers, random numbers that depend on seed and position only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

from agentropy.policies.sampling import sample, uniforms


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@given(st.integers(0, 10_000), st.integers(2, 50), st.floats(0.2, 3.0))
@settings(max_examples=50, deadline=None)
def test_numbers_equal_torchs(seed: int, vocabulary: int, temperature: float) -> None:
    logits = logits_of(8, vocabulary, seed)
    uniform = torch.from_numpy(uniforms(np.array([seed], np.uint64), np.arange(8)))
    expected = Categorical(logits=(logits / temperature).double())
    tokens, logprobs, entropies = sample(logits.clone(), uniform, torch.full((8,), temperature))
    torch.testing.assert_close(logprobs.double(), expected.log_prob(tokens), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(entropies.double(), expected.entropy(), atol=2e-5, rtol=1e-4)


def draw(n: int, logits: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """Frequencies of n draws from one distribution."""
    uniform = torch.from_numpy(uniforms(np.array([7], np.uint64), np.arange(n)))
    options = {name: value.expand(n) for name, value in kwargs.items()}
    tokens, _, _ = sample(logits.expand(n, -1).clone(), uniform, **options)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / n


def test_frequencies_are_the_probabilities() -> None:
    logits = logits_of(1, 12)
    n = 40_000
    error = draw(n, logits) - logits.softmax(-1)[0]
    assert float(error.abs().max()) < 4 * (0.25 / n) ** 0.5


def test_top_k_then_top_p() -> None:
    probs = torch.tensor([[0.05, 0.4, 0.1, 0.3, 0.15]])
    logits = probs.log()
    kept = (draw(4000, logits, top_k=torch.tensor([2])) > 0).nonzero().flatten().tolist()
    assert kept == [1, 3]
    kept = (draw(4000, logits, top_p=torch.tensor([0.75])) > 0).nonzero().flatten().tolist()
    assert kept == [1, 3, 4]
    # Of the three that top-k keeps, the first holds 0.4 / 0.85 = 0.47 of the probability.
    both = draw(4000, logits, top_k=torch.tensor([3]), top_p=torch.tensor([0.45]))
    assert (both > 0).nonzero().flatten().tolist() == [1]
    frequencies = draw(20_000, logits, top_p=torch.tensor([0.75]))
    assert abs(float(frequencies[1]) - 0.4 / 0.85) < 0.02


def test_rows_keep_their_own_settings() -> None:
    logits = logits_of(1, 20).expand(4, -1).clone()
    uniform = torch.full((4,), 0.999)
    temperature = torch.tensor([0.0, 1.0, 1.0, 2.0])
    tokens, logprobs, _ = sample(logits.clone(), uniform, temperature, torch.tensor([0, 1, 0, 0]))
    best = int(logits[0].argmax())
    assert tokens.tolist()[:2] == [best, best]
    # Greedy counts as temperature 1; top-k does not change the log-probability.
    torch.testing.assert_close(logprobs[:2], logits[0].log_softmax(-1)[[best, best]])
    assert tokens[2] != best


@given(st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_largest_uniform_stays_in_the_support(seed: int) -> None:
    logits = logits_of(16, 300, seed)
    logits[:, 200:] = -float("inf")
    tokens, logprobs, entropies = sample(logits, torch.full((16,), 1 - 2.0**-23))
    assert int(tokens.max()) < 200
    assert bool(torch.isfinite(logprobs).all())
    assert bool(torch.isfinite(entropies).all())
    tokens, _, _ = sample(logits_of(16, 300, seed), torch.zeros(16))
    assert tokens.tolist() == [0] * 16


def test_entropy_of_a_certain_and_of_a_flat_distribution() -> None:
    certain = torch.zeros(1, 10)
    certain[0, 3] = 200.0
    _, logprob, entropy = sample(certain, torch.tensor([0.5]))
    assert logprob.item() == 0.0
    assert entropy.item() == 0.0
    _, _, entropy = sample(torch.zeros(1, 10), torch.tensor([0.5]))
    assert entropy.item() == pytest.approx(np.log(10), abs=1e-6)


def test_uniforms_depend_on_seed_and_position_only() -> None:
    grid = uniforms(np.arange(50, dtype=np.uint64)[:, None], np.arange(40))
    assert grid.shape == (50, 40)
    assert float(uniforms(np.array([17], np.uint64), np.array([23]))[0]) == float(grid[17, 23])
    assert grid.min() >= 0
    assert grid.max() < 1


def test_uniforms_look_uniform_and_independent() -> None:
    grid = uniforms(np.arange(400, dtype=np.uint64)[:, None], np.arange(100)).astype(np.float64)
    n = grid.size
    counts = np.histogram(grid, bins=20, range=(0, 1))[0]
    assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / n**0.5

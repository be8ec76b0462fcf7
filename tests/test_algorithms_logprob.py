"""Log-probabilities in chunks equal those of the whole, forward and backward, and never hold the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentropy.algorithms.entropy import entropy_from_logits
from agentropy.algorithms.logprob import TokenLogprobs, token_logprobs


def setup(m: int = 23, d: int = 8, v: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(m, d, generator=generator, requires_grad=True)
    weight = torch.randn(v, d, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, v, (m,), generator=generator)


def whole(logits: Tensor, ids: Tensor, temperature: float) -> TokenLogprobs:
    logits = logits / temperature
    return TokenLogprobs(logits.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1), entropy_from_logits(logits))


@pytest.mark.parametrize("chunk", [1, 5, 23, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_whole(chunk: int | None, temperature: float) -> None:
    hidden, weight, ids = setup()
    got = token_logprobs(hidden, lambda h: h @ weight.T, ids, temperature=temperature, chunk_tokens=chunk)
    expected = whole(hidden @ weight.T, ids, temperature)
    assert got.entropies is not None
    torch.testing.assert_close(got.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.entropies, expected.entropies, atol=1e-5, rtol=0)
    assert not got.entropies.requires_grad
    weights = torch.linspace(-1, 1, len(ids))
    ours = torch.autograd.grad((weights * got.logprobs).sum(), [hidden, weight])
    theirs = torch.autograd.grad((weights * expected.logprobs).sum(), [hidden, weight])
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_gradient_flows_through_entropy_where_it_is_asked_for() -> None:
    hidden, weight, ids = setup()
    got = token_logprobs(hidden, lambda h: h @ weight.T, ids, chunk_tokens=7, entropy_grad=True)
    expected = whole(hidden @ weight.T, ids, 1.0)
    assert got.entropies is not None
    assert expected.entropies is not None
    ours = torch.autograd.grad((got.entropies - got.logprobs).sum(), [hidden, weight])
    theirs = torch.autograd.grad((expected.entropies - expected.logprobs).sum(), [hidden, weight])
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_the_head_may_cap_its_logits_and_forbid_tokens() -> None:
    hidden, weight, ids = setup()
    forbidden = torch.zeros(50, dtype=torch.bool)
    forbidden[[i for i in range(50) if i not in set(ids.tolist())][:3]] = True

    def head(h: Tensor) -> Tensor:
        return (30 * torch.tanh(h @ weight.T / 30)).masked_fill(forbidden, -torch.inf)

    got = token_logprobs(hidden, head, ids, chunk_tokens=4)
    expected = whole(head(hidden), ids, 1.0)
    assert got.entropies is not None
    torch.testing.assert_close(got.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.entropies, expected.entropies, atol=1e-5, rtol=0)
    ours = torch.autograd.grad(got.logprobs.sum(), [hidden, weight])
    torch.testing.assert_close(ours, torch.autograd.grad(expected.logprobs.sum(), [hidden, weight]), atol=2e-5, rtol=0)


def test_half_precision_hidden_states_give_float32() -> None:
    hidden, weight, ids = setup()
    head = weight.detach().bfloat16()
    got = token_logprobs(hidden.detach().bfloat16(), lambda h: h @ head.T, ids)
    assert got.entropies is not None
    assert got.logprobs.dtype == got.entropies.dtype == torch.float32


def test_greedy_counts_as_temperature_one() -> None:
    hidden, weight, ids = setup()
    greedy = token_logprobs(hidden, lambda h: h @ weight.T, ids, temperature=0.0)
    torch.testing.assert_close(greedy.logprobs, token_logprobs(hidden, lambda h: h @ weight.T, ids).logprobs)


def test_no_tokens() -> None:
    hidden, weight, ids = setup(m=0)
    got = token_logprobs(hidden, lambda h: h @ weight.T, ids)
    assert got.entropies is not None
    assert got.logprobs.shape == got.entropies.shape == (0,)
    got.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert token_logprobs(hidden, lambda h: h @ weight.T, ids, entropy=False).entropies is None


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return out


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_of_all_tokens_by_the_vocabulary_is_ever_made(entropy_grad: bool) -> None:
    m, v = 200, 300
    hidden, weight, ids = setup(m=m, v=v)
    with LargestTensor() as seen:
        got = token_logprobs(hidden, lambda h: h @ weight.T, ids, chunk_tokens=10, entropy_grad=entropy_grad)
        assert got.entropies is not None
        total = got.logprobs.sum() + (got.entropies.sum() if entropy_grad else 0.0)
        total.backward()
    assert seen.largest == 10 * v  # larger than the head's 8 * 300 weights, a twentieth of the whole


def test_the_default_chunk_bounds_what_a_large_vocabulary_costs() -> None:
    hidden, weight, ids = setup(m=600, d=2, v=40_000)
    with LargestTensor() as seen, torch.no_grad():
        token_logprobs(hidden, lambda h: h @ weight.T, ids)
    assert seen.largest == 128 * 40_000

"""AdamW, with float32 master copies of weights that are kept in fewer bits.

A learning rate of 1e-6 changes a bfloat16 weight by less than its last bit: without a master copy such a run learns
nothing, and no metric says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MasterAdamW(torch.optim.AdamW):
    """AdamW over float32 copies of `weights`; each step writes them back. Float32 weights are their own copies.

    `param_groups` holds the copies; gradients are read from, and cleared on, the weights themselves.
    """

    def __init__(self, weights: Iterable[nn.Parameter], **options: Any) -> None:
        self.weights = list(weights)
        masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self.weights]
        self._pairs = [(p, m) for p, m in zip(self.weights, masters, strict=True) if p is not m]
        super().__init__(masters, **options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the gradients of the weights."""
        for weight, master in self._pairs:
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step(closure)
        with torch.no_grad():
            for weight, master in self._pairs:
                weight.copy_(master)
                master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the weights."""
        for weight in self.weights:
            weight.grad = None

    def masters(self) -> list[Tensor]:
        """The float32 copies of weights that are not float32, for a checkpoint."""
        return [master.detach() for _, master in self._pairs]

    def load_masters(self, values: list[Tensor]) -> None:
        """Put saved copies back, and the weights that they stand for."""
        with torch.no_grad():
            for (weight, master), value in zip(self._pairs, values, strict=True):
                master.copy_(value)
                weight.copy_(master)

"""The trained model over several processes: weights, gradients and the optimiser's state in shards (FSDP2).

A run with several ranks has the model twice. `Shards.model` is trained; each rank holds a part of every weight, and
PyTorch gathers a layer's when it computes. `Shards.whole` is the policy's ordinary module, which has its weights only
inside `Shards.gathered`: for a rollout, where ranks do not run in step, and for a checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from agentropy.policies.parts import ModelParts, split_model
from agentropy.training.distributed import Ranks
from agentropy.training.optimizer import MasterAdamW
from agentropy.training.update import micro_batches

T = TypeVar("T")


class _Root(nn.Module):
    """What FSDP takes for the model's forward: whatever is to be computed with it. Decoder and head run apart from
    each other here, and the decoder several times, which an ordinary forward does not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


@dataclass
class Shards:
    """A model over the ranks of a run. `local` are this rank's parts of the weights that are trained, as ordinary
    parameters that share the shards' memory: an optimiser takes those."""

    ranks: Ranks
    whole: Any
    model: Any
    local: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self._root = _shard(self.model, self.ranks.size)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self.local = [nn.Parameter(p.detach().to_local()) for p in self._trained]
        self._reference: _Root | None = None
        self._free()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        """`whole` with its weights, on every rank; afterwards their memory is freed. All ranks must enter."""
        with torch.no_grad():
            here = dict(self.whole.named_parameters())
            for name, p in self.model.named_parameters():
                here[name].data = p.detach().full_tensor()
        try:
            yield self.whole
        finally:
            self._free()

    def _free(self) -> None:
        for p in self.whole.parameters():
            p.data = torch.empty(0, dtype=p.dtype, device=p.device)

    def keep_reference(self) -> Any:
        """A frozen copy of the model as it is now, sharded too. All ranks must call."""
        with self.gathered() as whole:
            reference = copy.deepcopy(whole).requires_grad_(False).eval()
        self._reference = _shard(reference, self.ranks.size)
        return reference

    # -- an update ----------------------------------------------------------------------------------------------------

    def plan(
        self, lengths: Sequence[int], budget: int, forwards: Callable[[list[int]], int]
    ) -> list[tuple[list[int], int]]:
        """This rank's micro-batches of an update, and how many idle forwards each needs beside its own.

        Gathering weights and reducing gradients takes all ranks at once, so all must run the decoder equally often.
        `forwards` says how often a micro-batch does. The rows of a micro-batch may be none.
        """
        mine = deal_rows(lengths, self.ranks.size)[self.ranks.rank]
        runs = [[mine[i] for i in run] for run in micro_batches([lengths[i] for i in mine], budget)]
        counts = self.ranks.gather([forwards(run) for run in runs])
        most = [max(column) for column in zip_longest(*counts, fillvalue=0)]
        own = [*counts[self.ranks.rank], *[0] * len(most)]
        return [(runs[k] if k < len(runs) else [], n - own[k]) for k, n in enumerate(most)]

    def run(self, work: Callable[[], T]) -> T:
        """Compute something with the model, and the reference where there is one."""

        def both() -> T:
            reference = self._reference
            return work() if reference is None else reference(work)

        found: T = self._root(both)
        return found

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the ranks' losses, summed, to the shards."""
        (loss * self.ranks.size).backward()  # type: ignore[no-untyped-call]  # FSDP takes the mean

    def clip(self, limit: float, loss: float) -> tuple[float, float]:
        """Hand the gradients to `local`, clipped to a global norm of `limit`. Returns that norm, before, and the sum of
        the ranks' losses."""
        squares = torch.zeros((), dtype=torch.float64, device=self.local[0].device)
        for p, part in zip(self._trained, self.local, strict=True):
            part.grad, p.grad = None if p.grad is None else p.grad.to_local(), None
            if part.grad is not None and part.grad.numel():
                squares += part.grad.float().pow(2).sum()
        sums = self.ranks.gather((float(squares), loss))
        norm = math.sqrt(sum(s for s, _ in sums))
        if (scale := limit / (norm + 1e-6)) < 1.0:
            for part in self.local:
                if part.grad is not None:
                    part.grad.mul_(scale)
        return norm, sum(one for _, one in sums)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: MasterAdamW) -> dict[str, Any]:
        """What `checkpoint.optimizer_state` gives for a model in one piece, on rank 0. All ranks must call."""
        state = optimizer.state_dict()
        momenta = {
            number: {name: self._join(v, number) if v.dim() else v for name, v in of_one.items()}
            for number, of_one in state["state"].items()
        }
        masters = [self._join(m, number) for number, m in zip(self._cut(), optimizer.masters(), strict=True)]
        return {"optimizer": {**state, "state": momenta}, "masters": masters}

    @torch.no_grad()
    def load(self, trainable: Mapping[str, Tensor], state: Mapping[str, Any], optimizer: MasterAdamW) -> None:
        """Take this rank's parts of a checkpoint."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name, value in trainable.items():
            named[name].to_local().copy_(_part(value, named[name]))
        momenta = {
            number: {name: _part(v, self._trained[number]) if v.dim() else v for name, v in of_one.items()}
            for number, of_one in state["optimizer"]["state"].items()
        }
        optimizer.load_state_dict({**state["optimizer"], "state": momenta})
        masters = zip(self._cut(), state["masters"], strict=True)
        optimizer.load_masters([_part(m, self._trained[number]) for number, m in masters])

    def _cut(self) -> list[int]:
        """Which of the trained weights have a master copy (`MasterAdamW`)."""
        return [number for number, p in enumerate(self._trained) if p.dtype != torch.float32]

    def _join(self, part: Tensor, number: int) -> Tensor:
        """The whole of what is cut as that weight is, on rank 0's CPU; nothing elsewhere."""
        from torch.distributed.tensor import DTensor

        like = self._trained[number]
        made = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        ).full_tensor()
        return made.cpu() if self.ranks.leads else torch.empty(0)


def deal_rows(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of each rank's rows: the longest first, each to the rank with the fewest tokens so far."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = tokens.index(min(tokens))
        dealt[least].append(i)
        tokens[least] += lengths[i]
    return dealt


def shard(model: Any, ranks: Ranks) -> Shards:
    """Spread a model over the ranks, each of which has loaded it. It becomes `Shards.whole`, without its weights."""
    return Shards(ranks, model, copy.deepcopy(model))


def _shard(model: Any, ranks: int) -> _Root:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    parts = split_model(model)
    mesh = init_device_mesh(parts.device.type, (ranks,))
    # Gradients of ranks are added up in float32, whatever the weights are kept in.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in _layers(parts):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    root = _Root(model)
    fully_shard(root, mesh=mesh, mp_policy=policy)
    with torch.no_grad():
        root(lambda: None)  # the first forward settles which module is the root
    root.reshard()  # type: ignore[operator]  # FSDP has made it one of its modules
    return root


def _layers(parts: ModelParts) -> list[nn.Module]:
    """The decoder's layers; none where it keeps them in a way of its own, and the model is then one piece for FSDP."""
    for module in parts.decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == parts.n_layers:
            return list(module)
    return []


def _part(value: Tensor, like: Any) -> Tensor:
    """This rank's rows of a whole tensor, cut as the sharded weight `like` is."""
    mesh = like.device_mesh
    rows = -(-value.shape[0] // mesh.size())
    begin = rows * mesh.get_local_rank()
    return value[begin : begin + rows]

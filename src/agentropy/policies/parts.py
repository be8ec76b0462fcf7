"""A causal language model taken apart: decoder, head, and the masks its layers want.

The engine and the trainer both run the decoder and the head apart from each other, so that nobody computes logits that
nobody reads, and so that both compute them in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentropy.errors import UserError

Mask = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class ModelParts:
    """What `split_model` found. `windows` maps a layer type to its sliding window (None: the layer sees everything)."""

    model: nn.Module
    decoder: nn.Module
    output: nn.Module
    transform: Callable[[Tensor], Tensor] | None
    windows: dict[str, int | None]
    mask_by_layer_type: bool
    cache_argument: str
    takes_cache_position: bool
    vocab_size: int
    n_layers: int
    max_context: int

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]`, in the model's dtype, of hidden states `[..., D]`, soft cap and scale applied."""
        logits: Tensor = self.output(hidden)
        return logits if self.transform is None else self.transform(logits)

    def decode(self, ids: Tensor, positions: Tensor, mask: Mask, cache: Any) -> Tensor:
        """Hidden states `[B, Q, D]` of `ids[B, Q]` at `positions[B, Q]`, reading and writing `cache`."""
        arguments: dict[str, Any] = {self.cache_argument: cache}
        if self.takes_cache_position:
            arguments["cache_position"] = positions[0]
        out = self.decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **arguments)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def masks(self, queries: Tensor, columns: int | Tensor, dtype: torch.dtype) -> Mask:
        """Additive masks `[B, 1, Q, columns]` for queries at positions `queries[B, Q]`: 0 where a key may be seen.

        A row sees the positions up to its own, within the window of the layer. `columns` is their number where a column
        is a position, else the position of each, `[B, columns]`.
        """
        key = torch.arange(columns, device=queries.device) if isinstance(columns, int) else columns.unsqueeze(1)
        distance = queries.unsqueeze(-1) - key
        hidden = torch.finfo(dtype).min

        def additive(window: int | None) -> Tensor:
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            return torch.zeros(seen.shape, dtype=dtype, device=key.device).masked_fill_(~seen, hidden).unsqueeze(1)

        made = {window: additive(window) for window in dict.fromkeys(self.windows.values())}
        if not self.mask_by_layer_type:
            return next(iter(made.values()))
        return {layer_type: made[window] for layer_type, window in self.windows.items()}


def split_model(model: nn.Module) -> ModelParts:
    """Find the decoder and the head of a transformers causal LM, also inside a peft (LoRA) wrapper.

    Raises:
        UserError: for a model that is not a decoder-only transformer with key-value caches of the ordinary kind.
    """
    base = _unwrap(model)
    config = base.config.get_text_config()
    output = base.get_output_embeddings()
    if output is None or not hasattr(base, "get_decoder"):
        raise UserError(f"{type(base).__name__} has no language-model head: load it with AutoModelForCausalLM")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise UserError(
            f"attention implementation {config._attn_implementation!r} is not supported by the local engine: "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )
    decoder = base.get_decoder()
    parameters = inspect.signature(type(decoder).forward).parameters
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types is None:
        windows: dict[str, int | None] = {"full_attention": window}
    else:
        windows = {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(layer_types)}
    unknown = set(windows) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(
            f"{type(base).__name__} has layers of type {sorted(unknown)}: the local engine knows full and "
            "sliding-window attention only; serve the model with vLLM and use the server policy"
        )
    return ModelParts(
        model=model,
        decoder=decoder,
        output=output,
        transform=_logit_transform(base, config),
        windows=windows,
        mask_by_layer_type=any(kind != "full_attention" for kind in windows),
        cache_argument="cache" if "cache" in parameters else "past_key_values",
        takes_cache_position="cache_position" in parameters,
        vocab_size=int(getattr(output, "out_features", config.vocab_size)),
        n_layers=int(config.num_hidden_layers),
        max_context=int(getattr(config, "max_position_embeddings", None) or 1 << 30),
    )


def _unwrap(model: nn.Module) -> Any:
    adapters = getattr(model, "peft_config", None)
    if adapters is None or not hasattr(model, "get_base_model"):
        return model
    for name, adapter in adapters.items():
        if getattr(adapter, "is_prompt_learning", False):
            raise UserError(
                f"peft adapter {name!r} is {type(adapter).__name__}, which adds virtual tokens: use LoRA or another "
                "adapter that changes the layers"
            )
    base: Any = model
    return base.get_base_model()


def _logit_transform(base: Any, config: Any) -> Callable[[Tensor], Tensor] | None:
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return lambda logits: torch.tanh(logits / cap) * cap
    multiplier = getattr(base, "logit_scale", None)
    if isinstance(multiplier, (int, float)):
        return lambda logits: logits * multiplier
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        return lambda logits: logits / divisor
    return None


@torch.no_grad()
def check_parts(parts: ModelParts, tolerance: float = 1e-3) -> None:
    """Compare decoder and head, run apart and through a cache, with the model's own forward on a few tokens.

    Raises:
        UserError: when they differ, so that a model of an unknown kind fails here and not silently in training.
    """
    from agentropy.policies.cache import SlotCache

    model = parts.model
    was_training = model.training
    model.eval()
    try:
        n = max(4, min(12, max((w or 0) for w in parts.windows.values()) + 3))
        ids = (torch.arange(1, n + 1, device=parts.device) % parts.vocab_size).unsqueeze(0)
        expected = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        cache = SlotCache(max_rows=1, max_columns=n)
        positions = torch.arange(n, device=parts.device).unsqueeze(0)
        cache.chunk_of([0], positions[:, :-1], n)
        parts.decode(ids[:, :-1], positions[:, :-1], parts.masks(positions[:, :-1], n, parts.dtype), cache)
        cache.step_of(positions[0, -1:], n)
        hidden = parts.decode(ids[:, -1:], positions[:, -1:], parts.masks(positions[:, -1:], n, parts.dtype), cache)
        found = parts.head(hidden[0, -1]).float()
    except (AttributeError, TypeError, IndexError, NotImplementedError) as error:
        raise UserError(
            f"{type(model).__name__} does not run through the local engine ({type(error).__name__}: {error}); "
            "serve it with vLLM and use the server policy"
        ) from error
    finally:
        model.train(was_training)
    slack = tolerance if expected.dtype == parts.dtype else 0.05
    difference = float((found - expected).abs().max())
    if not difference <= slack * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"{type(model).__name__} gives other logits through the local engine than by itself "
            f"(difference {difference:.3g}): it changes its attention or its logits in a way "
            "the engine does not know; serve it with vLLM instead"
        )

"""`agentropy show`: one trajectory in the terminal, with the entropy of each part and what each call did to it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentropy.trajectory import Segment

# From certain to uncertain, as colours of a 256-colour terminal that differ in lightness too.
SHADES = (None, 229, 222, 215, 209, 203)
SHADE_NATS = (0.05, 0.2, 0.5, 1.0, 2.0)


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "show",
        help="print one trajectory with its calls and entropies",
        description="Print one trajectory. On a terminal the policy's tokens are shaded by their entropy.",
    )
    parser.add_argument("file", type=Path, help="a file of trajectories")
    parser.add_argument("--id", help="trajectory id (default: the first)")
    parser.add_argument("--model", type=Path, help="folder with the tokenizer (default: the run's own)")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the trajectory. Exit code 2 where there is no such file, trajectory or tokenizer."""
    from agentropy.batch import make_batch
    from agentropy.errors import UserError
    from agentropy.methods import make_method
    from agentropy.trajectory import read_jsonl

    found = next((t for t in read_jsonl(args.file) if args.id in (None, t.trajectory_id)), None)
    if found is None:
        raise UserError(f"no trajectory {args.id!r} in {args.file}" if args.id else f"{args.file} holds no trajectory")
    tokenizer = _tokenizer(args.file, args.model) if found.ids_kind == "sampled" else None
    shaped = make_method("grpo").shape(make_batch([found]))
    changes = iter(shaped.entropy_change.tolist())
    color = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())

    score = "not graded" if found.score is None else f"score {found.score:g}"
    print(f"{found.trajectory_id}: {found.stop}, {score}")
    for segment in found.segments:
        entropy = ""
        if segment.is_model and segment.entropies and segment.ids:
            entropy = f"H {sum(segment.entropies) / len(segment.ids):.3f}"
        if tokenizer is None:
            text = _texts(segment, color)
        elif segment.is_model and segment.entropies and color:
            text = _shaded(tokenizer, segment.ids, segment.entropies)
        else:
            text = _plain(tokenizer.decode(list(segment.ids)))
        print(f"{segment.kind:>10}  {entropy:8}  {text}")
        for result in segment.results:
            change = next(changes)
            dh = "dH undefined" if math.isnan(change) else f"dH {change:+.3f}"
            effect = "effective" if change < 0 else "not effective"
            print(f"{'':>10}  {'':8}  [{result.status}, {result.seconds * 1000:.0f} ms, {dh}: {effect}]")
    return 0


def _tokenizer(file: Path, model: Path | None) -> Any:
    from transformers import AutoTokenizer

    from agentropy.errors import UserError

    run_directory = file.resolve().parent.parent
    places = [model] if model else [run_directory / "model", *sorted(run_directory.glob("checkpoints/*/model"))]
    for place in places:
        if (place / "tokenizer_config.json").is_file():
            try:
                return AutoTokenizer.from_pretrained(str(place))
            except Exception as error:  # a broken file can fail anywhere in the parsers
                why = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise UserError(f"the tokenizer in {place} does not load ({why}); name another with --model") from None
    raise UserError(f"no tokenizer beside {file}; name a model's folder with --model")


def _plain(text: str) -> str:
    """Control characters would let a tool's output drive the terminal."""
    return "".join(c if c.isprintable() else " " if c == "\n" else f"\\x{ord(c):02x}" for c in text)


def _texts(segment: Segment, color: bool) -> str:
    """A segment whose source gave the text of its tokens, and no ids."""
    tokens = segment.tokens if segment.tokens is not None else ("\ufffd",) * len(segment.ids)
    entropies = segment.entropies if color and segment.is_model and segment.entropies else (0.0,) * len(tokens)
    return "".join(map(_colored, tokens, entropies))


def _shaded(tokenizer: Any, ids: Sequence[int], entropies: Sequence[float]) -> str:
    out = []
    pending: list[int] = []
    entropy = 0.0
    for i, token in enumerate(ids):
        pending.append(token)
        entropy = max(entropy, entropies[i])
        text = tokenizer.decode(pending)
        if text.endswith("\ufffd") and len(pending) < 4 and i + 1 < len(ids):
            continue  # a character that lies across tokens
        out.append(_colored(text, entropy))
        pending, entropy = [], 0.0
    return "".join(out)


def _colored(text: str, entropy: float) -> str:
    shade = SHADES[sum(entropy > limit for limit in SHADE_NATS)]
    return _plain(text) if shade is None else f"\x1b[38;5;16;48;5;{shade}m{_plain(text)}\x1b[0m"

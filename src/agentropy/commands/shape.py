"""`agentropy shape`: what a method makes of recorded trajectories, one JSON line each."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from agentropy.errors import UserError

if TYPE_CHECKING:
    from agentropy.batch import Batch
    from agentropy.methods import Method, Shaped
    from agentropy.trajectory import Trajectory

# Spelt out, so that `--help` need not import torch; a test compares them with the methods' signatures.
FLAGS = (
    "alpha",
    "q_h",
    "form",
    "kappa",
    "over",
    "window",
    "after",
    "bonus",
    "bonus_on",
    "execution_filter",
    "discriminability_filter",
    "discriminability",
    "void_filter",
    "mask_truncated",
    "statistics",
    "normalize_std",
    "zero_call",
    "credit",
    "pool",
    "indicator",
    "include_call_tokens",
    "accept_estimates",
    "roots",
    "beam",
    "base",
    "beta",
    "tau",
    "decision",
    "timing",
    "estimation",
    "count_shared",
    "reward",
    "pilot",
    "split_beta",
    "split",
    "fork_penalty",
    "clip_gradient",
    "tokens",
    "entropy_advantage",
    "a",
)


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `shape` to the command line."""
    parser = subparsers.add_parser(
        "shape",
        help="filters, rewards and per-token advantages of recorded trajectories",
        description="Read trajectories (docs/trajectory.md) and write, for each and in order, one JSON line with what "
        "a method makes of it: whether it is kept and why not, its rewards, the entropy change of each call, and the "
        "advantage of every model token. docs/algorithms.md explains the options.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="TRAJECTORIES", help="JSON Lines file of trajectories")
    parser.add_argument(
        "--method", required=True, help="grpo, simpletir, arpo, aepo, tao-rl, tepo-sparse or tepo-dense"
    )
    parser.add_argument(
        "--group-size",
        default="auto",
        metavar="N",
        help="trajectories a question: auto groups by question_id, a number also checks every group's size",
    )
    parser.add_argument("--out", metavar="FILE", help="write here instead of to standard output")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the method; may be repeated"
    )
    flags = parser.add_argument_group("options of the methods, short for --option KEY=VALUE")
    for name in FLAGS:
        flags.add_argument(f"--{name.replace('_', '-')}", dest=f"option_{name}", metavar="VALUE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    group_size = _group_size(args.group_size)
    options = _options(args)

    from agentropy.batch import make_batch
    from agentropy.methods import make_method
    from agentropy.trajectory import read_numbered, write_lines

    method = make_method(args.method, **options)
    numbered = list(read_numbered(args.file))
    trajectories = [trajectory for _, trajectory in numbered]
    if not trajectories:
        raise UserError(f"{args.file} holds no trajectories")
    _check_groups(trajectories, group_size)
    _check_entropies(args.file, numbered, method)
    batch = make_batch(trajectories)
    shaped = method.shape(batch)
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in shaped_rows(batch, shaped))
    if args.out:
        write_lines(args.out, lines)
        print(_summary(shaped), file=sys.stderr)
    else:
        _print_lines(lines)
    return 0


def _print_lines(lines: Iterable[str]) -> None:
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, such as `head`
        raise
    except OSError as error:
        raise UserError(f"cannot write to standard output: {error.strerror}") from None


def shaped_rows(batch: Batch, shaped: Shaped) -> Iterator[dict[str, Any]]:
    """The output object of each trajectory, in order; undefined numbers are None."""
    reward = _numbers(shaped.reward)
    turn_reward = _numbers(shaped.turn_reward)
    change = _numbers(shaped.entropy_change)
    reducing = shaped.entropy_reducing.tolist()
    advantages = _numbers(shaped.advantages[batch.is_model])
    bonus = shaped.bonus[batch.is_model].tolist()
    kept = shaped.kept.tolist()
    turns, calls = batch.turn_start.tolist(), batch.call_start.tolist()
    model_tokens = [0, *batch.is_model.cumsum(0).tolist()]
    tokens = [model_tokens[t] for t in batch.token_start.tolist()]
    for i, trajectory_id in enumerate(batch.trajectory_ids):
        yield {
            "trajectory_id": trajectory_id,
            "kept": kept[i],
            "why": shaped.why[i],
            "reward": reward[i],
            "turn_rewards": turn_reward[turns[i] : turns[i + 1]],
            "entropy_change": change[calls[i] : calls[i + 1]],
            "entropy_reducing": reducing[calls[i] : calls[i + 1]],
            "advantages": advantages[tokens[i] : tokens[i + 1]],
            "bonus": bonus[tokens[i] : tokens[i + 1]],
        }


def _numbers(values: Any) -> list[float | None]:
    """Each float32 as the shortest decimal that reads back as it (0.7 rather than 0.699999988); NaN as None."""
    return [None if v != v else float(str(v)) + 0.0 for v in values.cpu().numpy()]


def _options(args: argparse.Namespace) -> dict[str, str]:
    options: dict[str, str] = {}
    for text in args.option:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"--option {text!r} is not of the form KEY=VALUE")
        options[key.strip().replace("-", "_")] = value.strip()
    given = {name: getattr(args, f"option_{name}") for name in FLAGS}
    return options | {name: value for name, value in given.items() if value is not None}


def _group_size(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise UserError(f"--group-size {text!r} is neither 'auto' nor a number of 1 or above")
    return size


def _check_groups(trajectories: Sequence[Trajectory], size: int | None) -> None:
    sizes = Counter(t.question_id for t in trajectories)
    wrong = [f"{question!r} has {n}" for question, n in sizes.items() if size is not None and n != size]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise UserError(f"groups of other sizes than {size} trajectories: question {', '.join(wrong[:5])}{more}")


def _check_entropies(path: str, numbered: Sequence[tuple[int, Trajectory]], method: Method) -> None:
    if not method.needs_entropies:
        return
    for number, t in numbered:
        if any(s.is_model and s.ids and s.entropies is None for s in t.segments):
            raise UserError(
                f"{path}, line {number}: trajectory {t.trajectory_id!r} has model tokens without 'entropies', which "
                f"method {method.name} needs; record them, or choose a method or option that does without them"
            )
        if t.entropy_kind != "exact" and not method.accept_estimates:
            raise UserError(
                f"{path}, line {number}: trajectory {t.trajectory_id!r} has top-k estimates of entropies where method "
                f"{method.name} needs exact ones; to use them all the same, add --accept-estimates true"
            )


def _summary(shaped: Shaped) -> str:
    removed = Counter(reason for reason in shaped.why if reason is not None)
    why = ", ".join(f"{n} {reason}" for reason, n in removed.most_common())
    return f"kept {int(shaped.kept.sum())} of {len(shaped.why)} trajectories" + (f" (removed: {why})" if why else "")

"""`agentropy show`: one trajectory in the terminal, with the entropy of each part and what each call did to it."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentropy.analysis.report.tokens import TokenBytes
    from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory

# From certain to uncertain, as colours of a 256-colour terminal that differ in lightness too.
SHADES = (None, 229, 222, 215, 209, 203)
SHADE_NATS = (0.05, 0.2, 0.5, 1.0, 2.0)
INDENT = 22
GOOD, BAD, QUIET = "32", "31", "2"


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "show",
        help="print one trajectory with its calls and entropies",
        description="Print one trajectory. On a terminal the policy's tokens are shaded by their entropy.",
    )
    parser.add_argument(
        "file",
        type=Path,
        help="a file of trajectories, a run directory, or anything else that `agentropy analyze` reads",
    )
    parser.add_argument("--id", help="trajectory id (default: the first)")
    parser.add_argument("--model", type=Path, help="folder with the tokenizer (default: the run's own)")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the trajectory, of a directory each that has the id. Exit code 2 where there is no such file, trajectory or
    tokenizer."""
    found = _find(args.file, args.id)
    for place, (source, trajectory) in enumerate(found):
        if place:
            print()
        if args.file.is_dir():
            print(f"{_plain(str(source))}:")
        _print(trajectory, source, args)
    return 0


def _print(found: Trajectory, source: Path, args: argparse.Namespace) -> None:
    from agentropy.batch import make_batch
    from agentropy.methods import make_method

    texts = None if all(s.tokens is not None or not s.ids for s in found.segments) else _texts(args, source, found)
    changes = iter(make_method("grpo").shape(make_batch([found])).entropy_change.tolist())
    terminal = sys.stdout.isatty()
    color = args.color == "always" or (args.color == "auto" and terminal)
    width = max(20, shutil.get_terminal_size().columns - INDENT) if terminal else 0
    about = "\u2248" if found.entropy_kind != "exact" else ""

    score = "not graded" if found.score is None else f"score {found.score:g}"
    print(f"{_plain(found.trajectory_id)}: {found.stop}, {_paint(score, _mood(found.score), color)}")
    for s in found.segments:
        entropy = f"H{about or ' '}{sum(s.entropies) / len(s.ids):.3f}" if s.is_model and s.entropies and s.ids else ""
        pieces = list(_pieces(s, texts, color)) or [(_plain(" ".join(map(_written, s.calls))), 0.0)]
        lines = _wrapped(pieces, width) if width else ["".join(_shaded(*p) for p in pieces)]
        print(f"{s.kind:>10}  {entropy:8}  {lines[0]}")
        for line in lines[1:]:
            print(f"{'':{INDENT}}{line}")
        for result in s.results:
            print(f"{'':{INDENT}}{_outcome(result, next(changes), about, color)}")
    golds = found.extra.get("gold")
    if found.answer is not None and isinstance(golds, list) and golds:
        print(f"{'gold':>10}  {'':8}  {_plain('  or  '.join(map(str, golds)))}")
    if color:
        key = "  ".join(_shaded(f"> {limit:g}", limit + 1e-9) for limit in SHADE_NATS)
        print(f"\n{'':{INDENT}}{_paint('nats:', QUIET, True)} {key}")


def _find(path: Path, wanted: str | None) -> list[tuple[Path, Trajectory]]:
    """The trajectory with the file it is in; of a directory, that of each file that has the id."""
    from agentropy.analysis.imports import sources
    from agentropy.errors import UserError

    names: list[str] = []
    found: list[tuple[Path, Trajectory]] = []
    for source in sources([path]):
        for t in source.read():
            if wanted in (None, t.trajectory_id):
                found.append((source.path, t))
                break
            names.append(t.trajectory_id)
        if found and wanted is None:
            break
    if found:
        return found
    if not names:
        raise UserError(f"{path} holds no trajectory")
    near = difflib.get_close_matches(str(wanted), names[:10_000], n=1, cutoff=0.5) or names[:1]
    raise UserError(f"no trajectory {wanted!r} in {path}, which has {len(names)}; the nearest is {near[0]!r}")


def _written(call: ToolCall) -> str:
    """A call whose tokens the source did not give."""
    arguments = call.error or json.dumps(call.arguments, ensure_ascii=False, default=str)
    return f"{call.tool} {arguments}"


def _texts(args: argparse.Namespace, source: Path, t: Trajectory) -> TokenBytes | None:
    from agentropy.analysis.report.tokens import TokenBytes, find_tokenizer, tokenizer_places
    from agentropy.errors import UserError

    if t.ids_kind == "none":
        return None
    folder = source.resolve().parent
    places = [p for place in (folder.parent, folder) for p in tokenizer_places(place)]
    if args.model is not None:
        places = [args.model] if (args.model / "tokenizer_config.json").is_file() else []
    if not places:
        raise UserError(f"no tokenizer beside {source}; name a model's folder with --model")
    return TokenBytes(find_tokenizer(places[0]))


def _outcome(result: ToolResult, change: float, about: str, color: bool) -> str:
    dh = "dH undefined" if math.isnan(change) else f"dH{about or ' '}{change:+.3f}"
    status = _paint(result.status, GOOD if result.status == "ok" else BAD, color)
    effect = _paint("effective" if change < 0 else "not effective", GOOD if change < 0 else QUIET, color)
    return f"[{status}, {result.seconds * 1000:.0f} ms, {dh}: {effect}]"


def _mood(score: float | None) -> str:
    return QUIET if score is None else GOOD if score >= 0.5 else BAD


def _paint(text: str, code: str, color: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if color else text


def _plain(text: str) -> str:
    """Control characters would let a tool's output drive the terminal."""
    return "".join(c if c.isprintable() else " " if c == "\n" else f"\\x{ord(c):02x}" for c in text)


def _pieces(s: Segment, texts: TokenBytes | None, color: bool) -> Iterator[tuple[str, float]]:
    """The text of a segment, printable, in pieces with their entropies: a token each, or one character's tokens."""
    entropies = s.entropies if color and s.is_model and s.entropies else (0.0,) * len(s.ids)
    if s.tokens is not None or texts is None:
        tokens = s.tokens if s.tokens is not None else ("\ufffd",) * len(s.ids)
        yield from ((_plain(text), h) for text, h in zip(tokens, entropies, strict=True))
        return
    pending, highest = b"", 0.0
    for i, token in enumerate(s.ids):
        pending += texts(token)
        highest = max(highest, entropies[i])
        try:
            text = pending.decode("utf-8")
        except UnicodeDecodeError:
            if len(pending) < 4 and i + 1 < len(s.ids):
                continue  # a character that lies across tokens
            text = pending.decode("utf-8", "replace")
        yield _plain(text), highest
        pending, highest = b"", 0.0


def _shaded(text: str, entropy: float) -> str:
    shade = SHADES[sum(entropy > limit for limit in SHADE_NATS)]
    return text if shade is None or not text else f"\x1b[38;5;16;48;5;{shade}m{text}\x1b[0m"


def _wrapped(pieces: list[tuple[str, float]], width: int) -> list[str]:
    """The pieces in lines of at most `width` characters, broken before a word where one begins."""
    from rich.cells import cell_len

    lines, used = [""], 0
    for text, entropy in pieces:
        for part in re.findall(r" *[^ ]+| +", text):
            if used + cell_len(part) > width and used:
                lines.append("")
                used, part = 0, part.lstrip(" ")
            while cell_len(part) > width:
                lines[-1] += _shaded(part[:width], entropy)
                lines.append("")
                part = part[width:]
            lines[-1] += _shaded(part, entropy)
            used += cell_len(part)
    return lines

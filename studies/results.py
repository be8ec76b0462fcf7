"""Put the tables and figures of the studies into docs/results.md.

    .venv/bin/python studies/results.py                  # after `agentropy study studies/main.yaml` and the others

Each table stands between `<!-- NAME -->` and `<!-- end -->`; what has not been run leaves its tables alone. The
words between them are written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"


@dataclass(frozen=True)
class Show:
    """One column of a table in the page: which column of the study, what it is called here, how many digits it has."""

    key: str
    label: str
    digits: int = 1


@dataclass(frozen=True)
class Place:
    """One table of the page. `source`: a baseline's label, for differences from it. `only`: which variants."""

    study: str
    setting: str
    columns: Sequence[Show]
    source: str | None = None
    only: Sequence[str] = ()


AVG, PASS = Show("eval/avg@after", "Avg@16, %"), Show("eval/pass@after", "Pass@16, %")
GREEDY = Show("greedy/avg@after", "greedy, %")
CALLS = Show("tool/calls_per_question@after", "calls", 2)
NEEDS = [
    Show("eval/calls_need_0@after", "none needed", 2),
    Show("eval/calls_need_1@after", "one", 2),
    Show("eval/calls_need_2+@after", "two or more", 2),
]
EFFECTIVE = Show("tool/effective_ratio@after", "effective, %")
VALID = Show("tool/valid_rate@after", "valid, %")
LINES, TOKENS = Show("tool/code_lines@after", "code lines", 2), Show("length/model_tokens@after", "tokens")
CV, WINDOW = (
    Show("optim/grad_norm@train.cv", "gradient norm, std/mean", 2),
    Show("optim/grad_norm@train.window_cv[10]", "in windows of 10", 2),
)
SAMPLED = Show("rollout/trajectories@train.sum", "trajectories, thousands")
TOKENS_STEP = Show("rollout/tokens@train.mean", "tokens a step, thousands")
SECONDS = Show("time/step@train.mean", "seconds a step", 2)
ACCURACY = [AVG, PASS, GREEDY]
MECHANISMS = [
    Show("tool/all_failed_rate@train.mean", "all calls failed, %"),
    Show("filter/all_calls_failed@train.mean", "removed for it", 1),
    Show("filter/void_turn@train.mean", "void turns", 1),
    Show("filter/groups_removed@train.mean", "questions removed", 1),
    Show("entropy/bonus_tokens@train.mean", "tokens with bonus", 0),
    Show("entropy/bonus_share@train.mean", "bonus/advantage, %", 2),
    Show("rollout/forks@train.mean", "forks", 1),
]
TAO = ["grpo", "simpletir", "tao-rl"]
SPARSE, DENSE = ["grpo", "tepo-sparse"], ["grpo", "tepo-dense"]

PLACES: dict[str, Place] = {}
for world in ("arithmetic", "facts"):
    setting = f"{world}-hard"
    PLACES |= {
        f"main {world}": Place("main", setting, [*ACCURACY, CALLS, EFFECTIVE, VALID, TOKENS]),
        f"calls {world}": Place("main", setting, [CALLS, *NEEDS, LINES]),
        f"training {world}": Place("main", setting, [CV, WINDOW, SAMPLED, TOKENS_STEP, SECONDS]),
        f"mechanisms {world}": Place("main", setting, MECHANISMS),
        f"from the three {world}": Place(
            "main",
            setting,
            [AVG, PASS, CALLS, NEEDS[0], EFFECTIVE],
            "the mean of GRPO, ARPO and AEPO",
            ["tao-rl", "tepo-sparse", "tepo-dense"],
        ),
        f"from simpletir {world}": Place("main", setting, [AVG, PASS, CV, WINDOW], "SimpleTIR", ["grpo", "tao-rl"]),
        f"choose {world}": Place("choose", setting, [Show("eval/avg@after", "Avg@4, %"), CALLS, EFFECTIVE]),
    }
_ABLATED = [Show("eval/avg@after", "Avg@8, %"), Show("eval/pass@after", "Pass@8, %"), CALLS, EFFECTIVE, CV]
PLACES |= {
    "ablation tao": Place("ablations", "facts-failing", [*_ABLATED, SAMPLED], None, TAO),
    "ablation tao mechanisms": Place("ablations", "facts-failing", MECHANISMS[:6], None, TAO),
    "ablation sparse": Place("ablations", "facts-hard", [*_ABLATED[:3], NEEDS[0], EFFECTIVE], None, SPARSE),
    "ablation dense": Place("ablations", "facts-hard", [*_ABLATED[:3], NEEDS[0], EFFECTIVE], None, DENSE),
    "ablation tao differences": Place("ablations", "facts-failing", _ABLATED, "TAO-RL", TAO),
    "ablation sparse differences": Place("ablations", "facts-hard", _ABLATED[:4], "TEPO-sparse", SPARSE),
    "ablation dense differences": Place("ablations", "facts-hard", _ABLATED[:4], "TEPO-dense", DENSE),
}
for size in ("small", "default", "large"):
    PLACES[f"scale {size}"] = Place("scale", size, [*_ABLATED[:4], NEEDS[0], TOKENS, SECONDS])
FIGURES = {
    "main": ["reward-accuracy", "reward-accuracy-over-trajectories", "tool-calls_per_question"],
}


def written(value: float, factor: float, digits: int, *, sign: bool = False) -> str:
    """A number of a table; a zero has no sign."""
    text = f"{value * factor:{'+' if sign else ''}.{digits}f}"
    return text if text.strip("+-0.") else text.lstrip("+-")


def cell_text(cell: dict[str, Any], column: dict[str, Any], show: Show, *, difference: bool) -> str:
    """mean [low, high], and for a difference * where the interval excludes zero and the relative change."""
    if cell["mean"] is None:
        return "–"

    def one(value: float) -> str:
        return written(value, column["factor"], show.digits, sign=difference)

    text = one(cell["mean"])
    if cell["low"] is not None:
        text += f" [{one(cell['low'])}, {one(cell['high'])}]"
        if difference and (cell["low"] > 0 or cell["high"] < 0):
            text += "*"
    if difference and cell["relative"] is not None:
        text += f" ({written(cell['relative'], 100, 0, sign=True)} %)"
    return text


def table(place: Place, results: dict[str, Any]) -> list[str]:
    """The lines of a table; a column without a number is left out, and so is a row."""
    [found] = [t for t in results["tables"] if t["setting"] == place.setting]
    keys = [c["key"] for c in found["columns"]]
    if unknown := [s.key for s in place.columns if s.key not in keys]:
        raise SystemExit(f"{place.study} has no columns {unknown}; there are {keys}")
    shown = [
        s
        for i, s in ((keys.index(s.key), s) for s in place.columns)
        if any(r["cells"][i]["mean"] is not None for r in found["rows"])
    ]
    rows = found["rows"]
    if place.source is not None:
        [rows] = [d["rows"] for d in found["differences"] if d["from"] == place.source]
    most = max((len(row["seeds"]) for row in rows), default=0)
    lines = ["| | " + " | ".join(s.label for s in shown) + " |", "|---|" + "---:|" * len(shown)]
    for row in rows:
        if (place.only and row["variant"].split(".")[0] not in place.only) or not row["seeds"]:
            continue
        if all(row["cells"][keys.index(s.key)]["mean"] is None for s in shown):
            continue
        cells = [
            cell_text(
                row["cells"][keys.index(s.key)], found["columns"][keys.index(s.key)], s, difference=bool(place.source)
            )
            for s in shown
        ]
        name = "*before training*" if row["before_training_of"] is not None else row["variant"]
        name += f" ({len(row['seeds'])} seeds)" if len(row["seeds"]) < most else ""
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where the studies are (default: runs)")
    runs: Path = parser.parse_args().runs
    studies = {p.parent.name: json.loads(p.read_text()) for p in sorted(runs.glob("*/results.json"))}
    text = PAGE.read_text(encoding="utf-8")
    names = re.findall(r"<!-- (?!end)(.+?) -->", text)
    for name in names:
        lines = None
        if name == "pilot":
            lines = (
                (runs / "pilot" / "table.md").read_text().splitlines()
                if (runs / "pilot" / "table.md").is_file()
                else None
            )
        elif PLACES[name].study in studies:
            lines = table(PLACES[name], studies[PLACES[name].study])
        if lines is not None and len(lines) > 2:
            block = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
            text = block.sub(lambda m, lines=lines: m[1] + "\n".join(["", *lines, "", ""]) + m[2], text, count=1)
    partial = PAGE.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(PAGE)
    for study, figures in FIGURES.items():
        for figure in figures:
            drawn = runs / study / "figures" / f"{figure}.svg"
            if drawn.is_file():
                shutil.copy(drawn, ROOT / "docs" / "figures" / f"{study}-{figure}.svg")
    print(f"{PAGE}: {len(names)} tables of {', '.join(studies)}")


if __name__ == "__main__":
    main()

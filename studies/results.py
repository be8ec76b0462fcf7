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

from agentropy.study.markdown import written
from agentropy.study.results import Cell
from agentropy.study.spec import Column

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


def table(place: Place, results: dict[str, Any]) -> list[str]:
    """The lines of a table; a column without a number is left out, and so is a row."""
    [found] = [t for t in results["tables"] if t["setting"] == place.setting]
    at = {c["key"]: i for i, c in enumerate(found["columns"])}
    if unknown := [s.key for s in place.columns if s.key not in at]:
        raise SystemExit(f"{place.study} has no columns {unknown}; there are {list(at)}")
    shown = [s for s in place.columns if any(r["cells"][at[s.key]]["mean"] is not None for r in found["rows"])]
    columns = [Column(metric=s.key, scale=found["columns"][at[s.key]]["factor"], digits=s.digits) for s in shown]
    rows = found["rows"]
    if place.source is not None:
        [rows] = [d["rows"] for d in found["differences"] if d["from"] == place.source]
    most = max((len(row["seeds"]) for row in rows), default=0)
    lines = ["| | " + " | ".join(s.label for s in shown) + " |", "|---|" + "---:|" * len(shown)]
    for row in rows:
        seeds = len(row["seeds"])
        cells = [Cell(**row["cells"][at[s.key]]) for s in shown]
        if (place.only and row["variant"].split(".")[0] not in place.only) or all(c.mean is None for c in cells):
            continue
        name = "*before training*" if row["before_training_of"] is not None else row["variant"]
        name += f" ({seeds} seeds)" if seeds < most else ""
        texts = [
            written(cell, column, seeds, difference=place.source is not None)
            for cell, column in zip(cells, columns, strict=True)
        ]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return lines


def lines_of(name: str, runs: Path, studies: dict[str, Any]) -> list[str]:
    """What belongs under a name of the page; nothing where its study has not been run."""
    if name == "pilot":
        made = runs / "pilot" / "table.md"
        return made.read_text(encoding="utf-8").splitlines() if made.is_file() else []
    place = PLACES[name]
    return table(place, studies[place.study]) if place.study in studies else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where the studies are (default: runs)")
    runs: Path = parser.parse_args().runs
    studies = {p.parent.name: json.loads(p.read_text()) for p in sorted(runs.glob("*/results.json"))}
    text = PAGE.read_text(encoding="utf-8")
    names = re.findall(r"<!-- (?!end)(.+?) -->", text)
    for name in names:
        lines = lines_of(name, runs, studies)
        if len(lines) > 2:
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

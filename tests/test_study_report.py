"""The report's numbers against ones worked out by hand, and its files as a reader opens them."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
import statistics
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from agentropy.cli import main
from agentropy.study.figures import band, lines, smooth
from agentropy.study.plan import Study
from agentropy.study.report import write_report
from agentropy.study.results import cell, collect
from agentropy.study.spec import Curve
from agentropy.study.state import beside
from study_runs import ENVIRONMENT, make_run, study_of

GRPO, TAO = (0.50, 0.60, 0.40), (0.70, 0.65, 0.45)
NORMS = (1.0, 3.0, 2.0, 2.0)


def example(folder: Path, **more: object) -> Study:
    """Two variants, three seeds, numbers by hand."""
    study = study_of(folder, variants=["grpo", "tao-rl"], base={"steps": 4, "rollout.samples": 8}, smooth=1, **more)
    for run in study.runs:
        avg = (GRPO if run.variant == "grpo" else TAO)[run.seed]
        make_run(
            run,
            folder / "out",
            before={"eval/avg": 0.25 + run.seed / 100},
            after={"eval/avg": avg, "tool/valid_rate": None if run.seed == 1 else 0.5},
            rows=[
                {
                    "reward/accuracy": avg / 2 + step / 10,
                    "optim/grad_norm": norm,
                    "filter/questions_sampled": 16.0,
                    "time/step": 2.0,
                    "time/total_tokens": 100.0 * (step + 1),
                }
                for step, norm in enumerate(NORMS)
            ],
        )
    return study


def exact_interval(values: tuple[float, ...]) -> tuple[float, float]:
    """The 2.5 % and 97.5 % points of the means of all resamples, instead of random ones."""
    means = [statistics.mean(drawn) for drawn in itertools.product(values, repeat=len(values))]
    low, high = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def test_means_intervals_and_paired_differences(tmp_path: Path) -> None:
    results = collect(example(tmp_path), tmp_path / "out")
    (table,) = results.tables
    labels = list(table.labels)
    before, grpo, tao = table.rows
    i = labels.index("Avg@8")
    assert before.cells[i].mean == pytest.approx(0.26)
    assert grpo.cells[i].values == dict(enumerate(GRPO))
    assert grpo.cells[i].mean == pytest.approx(0.5)
    for row, values in ((grpo, GRPO), (tao, TAO)):
        low, high = exact_interval(values)
        assert row.cells[i].low == pytest.approx(low, abs=0.01)
        assert row.cells[i].high == pytest.approx(high, abs=0.01)
    (difference,) = table.differences
    (row,) = difference.rows
    assert row.cells[i].values == pytest.approx({0: 0.20, 1: 0.05, 2: 0.05})
    assert row.cells[i].mean == pytest.approx(0.1)
    assert row.cells[i].relative == pytest.approx(0.2)
    assert row.cells[i].excludes_zero
    fluctuation = tao.cells[labels.index("gradient norm std/mean")]
    assert fluctuation.mean == pytest.approx(statistics.pstdev(NORMS) / statistics.mean(NORMS))
    assert tao.cells[labels.index("sampled, k")].mean == pytest.approx(4 * 16 * 8)
    assert tao.cells[labels.index("tokens sampled, k")].mean == pytest.approx(400.0)
    valid = tao.cells[labels.index("valid calls")]
    assert sorted(valid.values) == [0, 2]


def test_a_mean_of_baselines_and_statistics_of_the_last_steps(tmp_path: Path) -> None:
    columns = [
        "eval/avg",
        {"metric": "eval/avg", "at": "before"},
        {"metric": "optim/grad_norm", "at": "train", "last": 3, "label": "norm"},
        {"metric": "reward/accuracy", "at": "train", "statistic": "final"},
    ]
    results = collect(example(tmp_path, columns=columns, baseline=["grpo", "tao-rl"]), tmp_path / "out")
    (table,) = results.tables
    (difference,) = table.differences
    grpo, tao = difference.rows
    assert grpo.cells[0].values == pytest.approx(
        {s: (a - b) / 2 for s, (a, b) in enumerate(zip(GRPO, TAO, strict=True))}
    )
    assert tao.cells[0].mean == pytest.approx(0.05)
    assert table.rows[1].cells[1].mean == pytest.approx(0.26)
    assert table.rows[1].cells[2].mean == pytest.approx(7 / 3)
    assert table.rows[1].cells[3].mean == pytest.approx(0.25 + 0.3)


def test_cells_of_no_and_one_value() -> None:
    assert cell({0: float("nan")}).mean is None
    one = cell({0: 2.0})
    assert (one.mean, one.low, one.high) == (2.0, None, None)
    assert not one.excludes_zero
    assert cell({0: 2.0}, {1: 1.0}).mean is None
    assert cell({0: 2.0, 1: 3.0}, {0: 0.0, 1: 0.0}).relative is None


def test_smoothing_and_band() -> None:
    smoothed = smooth(np.array([[1.0, 2.0, np.nan, 6.0]]), 2)
    assert smoothed.tolist() == [[1.0, 1.5, 2.0, 6.0]]
    values = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    mean, low, high = band(values)
    assert mean.tolist() == [1.0, 1.0]
    expected = exact_interval((0.0, 1.0, 2.0))
    assert low == pytest.approx([expected[0], 1.0], abs=0.35)
    assert high == pytest.approx([expected[1], 1.0], abs=0.35)
    assert low[0] < 1.0 < high[0]


def test_curves_over_what_was_sampled_are_read_off_at_equal_places(tmp_path: Path) -> None:
    study = study_of(tmp_path, variants=["grpo"], seeds=2, base={"steps": 3, "rollout.samples": 2}, smooth=1)
    for run in study.runs:
        drawn = (1.0, 1.0, 1.0) if run.seed == 0 else (2.0, 1.0, 1.0)
        rows = [{"reward/accuracy": i / 10, "filter/questions_sampled": n} for i, n in enumerate(drawn)]
        make_run(run, tmp_path / "out", after={"eval/avg": 0.5}, rows=rows)
    results = collect(study, tmp_path / "out")
    ((variant, places, values),) = lines(results, Curve(metric="reward/accuracy", over="trajectories"), "default")
    assert variant == "grpo"
    # Two trajectories a question: seed 0 is at 2, 4, 6 and seed 1 at 4, 6, 8; both are seen from 4 to 6.
    assert places.tolist() == [4.0, 5.0, 6.0]
    assert values[0] == pytest.approx([0.1, 0.15, 0.2])
    assert values[1] == pytest.approx([0.0, 0.05, 0.1])


class Page(HTMLParser):
    """Checks nesting and gathers what the page refers to."""

    VOID = ("meta", "br", "hr", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(attrs)

    def note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name == "title":
                self.titles.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_leads_from_each_number_to_its_runs(tmp_path: Path) -> None:
    study = example(tmp_path, name="a-study", columns=[{"metric": "eval/avg", "label": "<b>&"}])
    write_report(study, tmp_path / "out")
    text = (tmp_path / "out" / "index.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert "<b>" not in text
    outside = [r for r in page.references if not r.startswith(("#", "runs/"))]
    assert outside == []
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert len(page.ids) == len(set(page.ids))
    inside = [r[1:] for r in page.references if r.startswith("#")]
    assert set(inside) <= set(page.ids)
    assert any(t.endswith("seed 2: 45.0 (runs/default/tao-rl/seed-2)") for t in page.titles)
    both = "seed 2: +5.0 (runs/default/tao-rl/seed-2, runs/default/grpo/seed-2)"
    assert page.titles[-1].endswith(both)
    for reference in page.references:
        if reference.startswith("runs/"):
            assert (tmp_path / "out" / reference).exists()
    assert "samples: 8" in text
    assert "abc" in text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to open the page with")
def test_the_page_sorts_and_shows_the_runs_in_a_browser(tmp_path: Path) -> None:
    write_report(example(tmp_path, curves=[]), tmp_path / "out")
    page = tmp_path / "out" / "index.html"
    script = """<script>
    const table = document.querySelector('table.sortable');
    table.tHead.rows[0].cells[2].querySelector('button').click();
    const order = [...table.tBodies[0].rows].map(r => r.cells[0].textContent).join();
    table.tBodies[0].rows[0].cells[2].querySelector('button').click();
    document.body.innerHTML = '<pre id="seen">' + order + '|' + document.getElementById('runs-of').innerText + '</pre>';
    </script>"""
    copy = tmp_path / "copy.html"
    copy.write_text(page.read_text().replace("</body>", script + "</body>"))
    done = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            copy.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    seen = done.stdout.partition('<pre id="seen">')[2]
    assert seen.startswith("tao-rl,grpo,before training|")
    assert "runs/default/tao-rl/seed-0" in seen
    assert "70.0" in seen


def test_figures_are_the_same_each_time_and_readable_as_xml(tmp_path: Path) -> None:
    study = example(tmp_path)
    write_report(study, tmp_path / "out")
    figures = sorted((tmp_path / "out" / "figures").iterdir())
    assert [f.name for f in figures] == [
        f"{name}.{ending}"
        for name in ("optim-grad_norm", "reward-accuracy-over-trajectories", "reward-accuracy")
        for ending in ("png", "svg")
    ]
    files = [*figures, *(tmp_path / "out" / f"results.{e}" for e in ("md", "json", "csv")), tmp_path / "out/index.html"]
    first = [f.read_bytes() for f in files]
    write_report(study, tmp_path / "out")
    assert [f.read_bytes() for f in files] == first
    assert figures[1].suffix == ".svg"
    root = ElementTree.parse(figures[1]).getroot()
    assert root.tag.endswith("svg")
    assert b"date" not in figures[1].read_bytes().lower().replace(b"update", b"")
    # It follows the data.
    path = study.runs[0].directory(tmp_path / "out") / "metrics.jsonl"
    path.write_text(path.read_text().replace('"reward/accuracy": 0.25', '"reward/accuracy": 0.95'))
    write_report(study, tmp_path / "out")
    assert [f.read_bytes() for f in files] != first


def test_csv_and_json_have_the_numbers_of_the_files(tmp_path: Path) -> None:
    write_report(example(tmp_path), tmp_path / "out")
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [r for r in rows if r["metric"] == "eval/avg" and r["at"] == "after" and r["variant"] == "tao-rl"]
    assert [float(r["value"]) for r in found] == list(TAO)
    assert [r["run"] for r in found] == [f"runs/default/tao-rl/seed-{s}" for s in range(3)]
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert data["tables"][0]["rows"][2]["cells"][0]["values"] == {str(s): v for s, v in enumerate(TAO)}
    assert {r["state"] for r in data["runs"]} == {"complete"}


def test_an_incomplete_study_says_what_is_missing_and_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = example(tmp_path)
    out = tmp_path / "out"
    gone, partial, failed, changed, damaged = (r.directory(out) for r in study.runs[1:6])
    shutil.rmtree(gone)
    beside(gone, ".json").unlink()
    beside(partial, ".json").unlink()
    beside(failed, ".json").write_text('{"state": "failed", "message": "exit code 2: no | disk"}')
    config = changed / "config.yaml"
    config.write_text(config.read_text().replace("steps: 4", "steps: 5"))
    (damaged / "metrics.jsonl").write_text("{")
    assert main(["study", str(tmp_path / "study.yaml"), "--report-only"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 6 runs are complete" in printed
    assert "steps was 5, wanted 4" in printed
    text = (out / "results.md").read_text()
    assert "- default/tao-rl/seed-0: not started" in text
    assert "- default/grpo/seed-1: not finished, step 4 of 4" in text
    assert "- default/tao-rl/seed-1: failed: exit code 2: no \\| disk" in text
    assert "- default/grpo/seed-2: made with another configuration: steps was 5, wanted 4" in text
    assert "- default/tao-rl/seed-2: failed: its files cannot be read" in text
    assert re.search(r"^\| grpo \| 1 \| 50\.0 \|", text, re.MULTILINE)
    assert re.search(r"^\| tao-rl \| 0 \| – \|", text, re.MULTILINE)


def test_a_study_without_any_run_has_a_report(tmp_path: Path) -> None:
    results = write_report(study_of(tmp_path, variants=["grpo"]), _made(tmp_path / "out"))
    assert len(results.unfinished) == 3
    assert "0 of 3 runs are complete" in (tmp_path / "out" / "results.md").read_text()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_warnings_of_columns_and_versions(tmp_path: Path) -> None:
    study = study_of(tmp_path, variants=["grpo"], seeds=2, base={"steps": 0}, columns=["eval/avgg", "eval/avg"])
    for run in study.runs:
        made = ENVIRONMENT | {"commit": f"abc{run.seed}"}
        make_run(run, tmp_path / "out", after={"eval/avg": 0.5}, environment=made)
    results = collect(study, tmp_path / "out")
    assert "column 'eval/avgg' (at: after) is in no run; did you mean 'eval/avg'?" in results.warnings
    assert "the runs were made with different versions of commit: abc0, abc1" in results.warnings


def test_variants_that_start_elsewhere_have_a_row_of_their_own(tmp_path: Path) -> None:
    variants = {
        "grpo": {},
        "fast": {"method": "grpo", "optim.lr": 0.1},
        "short": {"method": "grpo", "rollout.max_turns": 1},
    }
    study = study_of(tmp_path, variants=variants, seeds=2, base={"steps": 0})
    for run in study.runs:
        # A call that timed out on a busy machine makes a small difference; it is the same agent all the same.
        start = {"grpo": 0.1, "fast": 0.11, "short": 0.9}[run.variant]
        make_run(run, tmp_path / "out", before={"eval/avg": start}, after={"eval/avg": 0.5})
    (table,) = collect(study, tmp_path / "out").tables
    assert [r.name for r in table.rows][:2] == ["before training: grpo, fast", "before training: short"]
    assert table.rows[0].cells[0].mean == pytest.approx(0.1)
    assert table.rows[1].cells[0].mean == pytest.approx(0.9)


def test_a_setting_without_a_complete_run_has_no_panel(tmp_path: Path) -> None:
    study = example(tmp_path, settings=["arithmetic", "facts"])
    figure = tmp_path / "out" / "figures" / "reward-accuracy.svg"

    def width() -> float:
        write_report(study, tmp_path / "out")
        return float(ElementTree.parse(figure).getroot().attrib["width"].removesuffix("pt"))

    both = width()
    for run in study.runs:
        if run.setting == "facts":
            shutil.rmtree(run.directory(tmp_path / "out"))
            beside(run.directory(tmp_path / "out"), ".json").unlink()
    assert width() < 0.8 * both

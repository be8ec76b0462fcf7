"""The report in a real browser: what it shows is what the files say, and whatever they say is text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentropy.analysis.report import Table, write_report
from agentropy.batch import make_batch
from agentropy.cli import main
from agentropy.methods import make_method
from agentropy.trajectory import Trajectory, read_jsonl
from report_pages import Tab, browser, make_run, make_tokenizer, make_trajectory, tab
from test_analysis_imports import SURER


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as b:
        yield b


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def report(run_directory: Path) -> str:
    write_report(run_directory / "report.html", run_directory)
    return (run_directory / "report.html").as_uri()


@pytest.fixture
def view(chromium: Any, report: str) -> Iterator[Tab]:
    with tab(chromium) as t:
        t.open(f"{report}#trajectories")
        t.page.wait_for_selector("#list a.row")
        yield t


SIGN = {True: "+", False: "\u2212"}


def read(run_directory: Path) -> dict[str, Trajectory]:
    """Every trajectory of the run by its key in the page."""
    paths = sorted((run_directory / "trajectories").glob("*.jsonl"))
    return {f"{p.stem}/{t.trajectory_id}": t for p in paths for t in read_jsonl(p)}


def shown(x: float) -> str:
    """A number as the page writes it: four significant digits."""
    text = f"{float(f'{abs(x):.4g}'):g}"
    return ("\u2212" if float(text) and x < 0 else "") + text


def changes(t: Trajectory) -> list[float]:
    return list(make_method("grpo").shape(make_batch([t])).entropy_change.tolist())


def test_overview(chromium: Any, report: str) -> None:
    with tab(chromium) as t:
        t.open(report)
        text = t.page.inner_text("#main")
        assert "4 of 4" in text
        assert "2 questions × 4 samples" in text
        row = t.page.locator("#outcome tr", has_text="Avg@4").inner_text()
        assert re.search(r"33\.3 %\s+50\.0 %\s+\+16\.7 \[", row)
        assert "undefined" not in text
        assert "NaN" not in text
        names = t.page.locator(".chart .name").all_inner_texts()
        assert {"Accuracy", "Entropy", "Effective calls"} <= set(names)
        assert "Gradient norm" not in names, "a metric without a number has no chart"
        plot = t.page.locator(".chart", has_text="Accuracy").locator(".plot").first
        box = plot.bounding_box()
        plot.hover(position={"x": 45, "y": 50})
        assert box is not None
        readout = t.page.locator(".chart", has_text="Accuracy").locator("output").first
        assert readout.inner_text() == "step 1: 35.0 %"
        plot.focus()
        plot.press("End")
        assert readout.inner_text() == "step 4: 65.0 %"
        plot.press("ArrowLeft")
        assert readout.inner_text() == "step 3: 55.0 %"
        entropy = t.page.locator(".chart", has_text="all of the policy's tokens")
        entropy.locator(".plot").focus()
        entropy.locator(".plot").press("Home")
        entropy.locator(".plot").press("ArrowRight")
        assert (
            entropy.locator("output").inner_text()
            == "step 2: all of the policy's tokens 0.5 · after a successful call –"
        )
        t.page.select_option("#metric", "time/step")
        assert t.page.locator(".any .chart .name").inner_text() == "time/step"
        assert "Of 80 trajectories drawn, 48 (60.0 %) passed every filter." in text


def test_tables_of_others_lead_to_trajectories(chromium: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    some = [make_trajectory(tokenizer, k, "Q 1?", f"<i>{k}", ("ok",), 1.0) for k in range(2)]
    table = Table("Most <b>useful", ("dH", "trajectory"), ((-0.25, "<i>1"), (0.5, "not here")), "a <note>")
    write_report(tmp_path / "r.html", some, tables=[table])
    with tab(chromium) as t:
        t.open((tmp_path / "r.html").as_uri())
        assert "Most <b>useful" in t.page.inner_text("#main")
        assert t.page.locator("table.numbers a").all_inner_texts() == ["<i>1"]
        t.page.locator("table.numbers a").click()
        t.page.wait_for_selector(".trajectory")
        assert t.page.inner_text(".id") == "<i>1"


def test_a_chat_log_shows_its_calls_and_marks_estimates(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps(SURER) + "\n")
    assert main(["analyze", str(tmp_path / "chat.jsonl"), "--out", str(tmp_path / "out")]) == 0
    with tab(chromium) as t:
        t.open((tmp_path / "out" / "report.html").as_uri())
        assert "those of tao-rl" in t.page.inner_text("#ran")
        assert "≈" in t.page.locator("#changes .about").first.inner_text()
        dh = t.page.locator("table", has_text="trajectory").last.locator("tbody tr").first.locator("th")
        assert dh.evaluate("e => getComputedStyle(e).textAlign") == "right"
        t.page.keyboard.press("t")
        t.page.keyboard.press("j")
        assert "≈" in t.page.locator("#list small").first.inner_text()
        assert t.page.locator(".block.call .arguments").is_visible()
        assert "print(6*7)" in t.page.inner_text(".block.call")
        assert "tao-rl would not learn from it" in t.page.inner_text(".fate")


def test_distributions_count_the_calls_of_training(chromium: Any, report: str, run_directory: Path) -> None:
    every = [t for key, t in read(run_directory).items() if key.startswith("step-")]
    dh = [(r.status, c) for t in every for r, c in zip(t.results, changes(t), strict=True)]
    with tab(chromium) as t:
        t.open(report)
        rows = t.page.locator(".histograms .row .about").all_inner_texts()
        for row, status in zip(rows[1:3], ("ok", "error"), strict=True):
            mine = [c for s, c in dh if s == status]
            share = sum(c < 0 for c in mine) / len(mine)
            assert row.split("\n")[0] == status
            assert f"{len(mine)} calls" in row
            assert f"{100 * share:.0f} % effective" in row
        t.page.click("button[data-by=phase]")
        assert "after training" in t.page.locator(".histograms").nth(1).inner_text()


def test_filters(view: Tab, run_directory: Path) -> None:
    every = read(run_directory)

    def expect(**choices: str) -> set[str]:
        view.page.click("#clear")
        for name, value in choices.items():
            view.page.select_option(f"#f-{name}", value)
        got = view.rows()
        assert len(got) == len(set(got))
        return set(got)

    def keys(test: Any) -> set[str]:
        return {k for k, t in every.items() if test(k, t)}

    assert expect() == set(every)
    assert expect(outcome="wrong") == keys(lambda k, t: t.score == 0)
    assert expect(outcome="right", file="test-after") == keys(lambda k, t: t.score == 1 and k.startswith("test-after/"))
    failed = keys(lambda k, t: t.results and all(r.status != "ok" for r in t.results))
    assert expect(calls="failed") == failed
    assert expect(calls="none") == keys(lambda k, t: not t.results)
    assert expect(calls="effective") == keys(lambda k, t: any(c < 0 for c in changes(t)))
    assert expect(kind="hop2", need="2") == keys(lambda k, t: t.extra["kind"] == "hop2" and t.extra["need"] == 2)
    steps = keys(lambda k, t: k.startswith("step-"))
    assert expect(file="kind:train") == steps
    # What each filter removed is what the method says, and the update took the first two groups it could use.
    reasons: dict[str, set[str]] = {}
    left_over: set[str] = set()
    for step in range(1, 5):
        mine = {k: t for k, t in every.items() if k.startswith(f"step-{step:06d}/")}
        shaped = make_method("tao-rl", alpha=0.2).shape(make_batch(list(mine.values())))
        for key, why in zip(mine, shaped.why, strict=True):
            if why:
                reasons.setdefault(why, set()).add(key)
            elif "/q3/" in key or "/q4/" in key:
                left_over.add(key)
    assert set(reasons) == {"all-calls-failed", "not-discriminative"}
    for why, some in reasons.items():
        assert expect(why=why, file="kind:train") == some
    assert expect(why="left-over") == left_over
    assert expect(why="kept", file="kind:train") == steps - left_over - set().union(*reasons.values())
    view.page.select_option("#f-outcome", "ungraded")
    assert view.page.locator("#list .empty").inner_text() == "No trajectory fits these filters."


def test_sorting(view: Tab, run_directory: Path) -> None:
    every = read(run_directory)
    view.page.select_option("#f-sort", "reach")
    reach = [max((abs(c) for c in changes(every[k])), default=0) for k in view.rows()]
    assert all(a >= b - 1e-3 * abs(b) for a, b in pairwise(reach))
    view.page.select_option("#f-sort", "calls")
    calls = [len(every[k].results) for k in view.rows()]
    assert calls == sorted(calls, reverse=True)
    view.page.select_option("#f-sort", "up")
    highest = [max(changes(every[k]), default=-math.inf) for k in view.rows()]
    assert all(a >= b - 1e-3 * abs(b) for a, b in pairwise(highest) if math.isfinite(b))
    view.page.select_option("#f-sort", "low")
    scores = [every[k].score for k in view.rows()]
    assert scores == sorted(scores, key=lambda s: s or 0)


def test_search_finds_text_of_tools_and_marks_tokens(view: Tab, run_directory: Path) -> None:
    view.page.keyboard.press("/")
    view.page.keyboard.type("REED 2021", delay=5)
    view.count(1)
    assert view.rows() == ["step-000002/s2/q2/1"]
    view.page.fill("#search", "maybe emma")
    view.page.wait_for_timeout(300)
    every = read(run_directory)
    tokenizer = make_tokenizer()
    holds = {k for k, t in every.items() if any("maybe Emma" in tokenizer.decode(list(s.ids)) for s in t.segments)}
    assert holds
    assert set(view.rows()) == holds
    view.page.locator("#list a.row").first.click()
    hits = view.page.locator(".t.hit").all_inner_texts()
    assert "maybeEmma" in "".join(hits).replace(" ", "")


def test_hover_values_equal_the_files(view: Tab, run_directory: Path) -> None:
    tokenizer = make_tokenizer()
    every = read(run_directory)
    step = {k: t for k, t in every.items() if k.startswith("step-000001/")}
    update = {k: t for k, t in step.items() if re.search(r"/q[02]/", k)}
    batch = make_batch(list(update.values()))
    shaped = make_method("tao-rl", alpha=0.2).shape(batch)
    advantages, bonus = shaped.advantages.tolist(), shaped.bonus.tolist()
    checked = marked = 0
    for key in ("step-000001/s1/q0/1", "step-000001/s1/q2/0"):
        start = batch.token_start.tolist()[list(update).index(key)]
        view.page.evaluate("key => { location.hash = '#t/' + encodeURIComponent(key) }", key)
        view.page.wait_for_selector(f"text={every[key].trajectory_id}")
        lines = view.page.locator(".tokens")
        model = [s for s in every[key].segments if s.is_model]
        place = {
            id(s): start + sum(len(o.ids) for o in every[key].segments[:i]) for i, s in enumerate(every[key].segments)
        }
        assert lines.count() == len(model)
        for n, s in enumerate(model):
            tokens = lines.nth(n).locator(".t")
            assert tokens.count() == len(s.ids)
            for i in range(0, len(s.ids), 2):
                tokens.nth(i).hover()
                said = view.tip()
                entropy, logprob = s.entropies[i], s.logprobs[i]  # type: ignore[index]
                assert said["entropy"] == f"{shown(entropy)} nats"
                assert said["log-probability"] == shown(logprob)
                assert said["probability"] == f"{float(f'{100 * math.exp(logprob):.3g}'):g} %"
                assert said["id"] == str(s.ids[i])
                assert said["text"] == tokenizer.decode([s.ids[i]]).replace(" ", "␣").replace("\n", "↵")
                advantage = advantages[place[id(s)] + i]
                assert said["advantage"] == ("+" if advantage > 0 else "") + shown(advantage)
                assert ("bonus" in said) == bonus[place[id(s)] + i]
                marked += bonus[place[id(s)] + i]
                checked += 1
    assert checked > 20
    assert marked


def test_calls_say_what_they_did(view: Tab, run_directory: Path) -> None:
    key = "step-000001/s1/q0/1"
    t = read(run_directory)[key]
    view.page.evaluate("key => { location.hash = '#t/' + encodeURIComponent(key) }", key)
    lines = view.page.locator(".outcome").all_inner_texts()
    for line, result, dh in zip(lines, t.results, changes(t), strict=True):
        assert result.status in line
        assert "12.3 ms" in line
        assert f"dH {SIGN[dh > 0]}{abs(dh):.3f}" in line
        assert ("▼ effective" if dh < 0 else "▲ not effective") in line
    assert "gold" in view.page.inner_text(".verdict")
    assert "Emma Reed" in view.page.inner_text(".verdict")
    bars = view.page.locator(".strip button")
    assert bars.count() == len(t.segments)
    bars.last.click()
    assert view.page.evaluate("document.activeElement.dataset.kind") == "reasoning"
    assert view.page.evaluate("document.activeElement.textContent").endswith("</answer>")


def test_compare_before_and_after(view: Tab) -> None:
    view.page.evaluate("location.hash = '#t/' + encodeURIComponent('test-after/test-1/eval/2')")
    first = view.page.locator("#companion option").nth(1)
    assert first.get_attribute("value") == "test-before/test-1/eval/2"
    view.page.select_option("#companion", index=1)
    sides = view.page.locator(".pair .trajectory")
    assert sides.count() == 2
    assert "before training" in sides.nth(0).inner_text()
    assert "after training" in sides.nth(1).inner_text()
    left, right = sides.nth(0).bounding_box(), sides.nth(1).bounding_box()
    assert left
    assert right
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    assert "#c/" in view.page.url
    view.page.reload()
    view.page.wait_for_selector(".pair")
    view.page.keyboard.press("Escape")
    assert view.page.locator(".trajectory").count() == 1


def test_keyboard(view: Tab) -> None:
    keys = view.rows()
    view.page.keyboard.press("j")
    view.page.keyboard.press("j")
    view.page.keyboard.press("j")
    view.page.keyboard.press("k")
    assert view.page.locator("#list a[aria-current]").get_attribute("data-key") == keys[1]
    view.page.locator(".tokens").first.focus()
    view.page.keyboard.press("ArrowRight")
    view.page.keyboard.press("ArrowRight")
    assert view.page.locator(".t.at").get_attribute("data-n") == "1"
    assert "entropy" in view.page.inner_text("#spoken")
    view.page.keyboard.press("Escape")
    assert not view.page.locator("#tip").is_visible()
    assert view.page.locator(".trajectory").count() == 1
    view.page.keyboard.press("Escape")
    assert view.page.locator(".trajectory").count() == 0
    view.page.keyboard.press("?")
    assert view.page.locator("dialog").is_visible()
    view.page.keyboard.press("Escape")
    assert not view.page.locator("dialog").is_visible()
    view.page.keyboard.press("n")
    view.page.keyboard.press("j")
    view.page.keyboard.press("n")
    assert view.page.locator("body.numbers-on").count() == 1
    seen = set()
    view.page.keyboard.press("o")
    for _ in range(8):
        view.page.keyboard.press("Tab")
        outline = view.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        seen.add(view.page.evaluate("document.activeElement.outerHTML.slice(0, 60)"))
        assert outline != "none"
    assert len(seen) >= 7


def test_themes(chromium: Any, report: str) -> None:
    def back(t: Tab) -> str:
        return str(t.page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))

    with tab(chromium, color_scheme="dark") as t:
        t.open(report)
        dark = back(t)
        t.page.click("#theme")
        light = back(t)
        assert "light" in t.page.inner_text("#theme")
        assert dark != light
        t.page.click("#theme")
        assert back(t) == dark
        t.page.reload()
        assert "dark" in t.page.inner_text("#theme")
    with tab(chromium, color_scheme="light") as t:
        t.open(report)
        assert back(t) == light


def test_a_phone(chromium: Any, report: str) -> None:
    with tab(chromium, viewport={"width": 380, "height": 780}, has_touch=True) as t:
        t.open(report)
        t.page.wait_for_timeout(200)
        assert t.width() == 380
        t.page.click("#tabs a >> nth=1")
        t.page.wait_for_selector("#list a.row")
        assert t.width() == 380
        t.page.locator("#list a.row").nth(1).tap()
        assert not t.page.locator("#list").is_visible()
        t.page.locator(".tokens .t").nth(2).tap()
        assert t.page.locator("#tip").is_visible()
        tip = t.page.locator("#tip").bounding_box()
        assert tip
        assert tip["x"] >= 0
        assert tip["x"] + tip["width"] <= 380
        assert t.width() == 380
        t.page.select_option("#companion", index=1)
        t.page.wait_for_selector(".pair")
        assert t.width() == 380
        t.page.locator(".back").first.click()
        assert t.page.locator("#list").is_visible()

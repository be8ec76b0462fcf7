"""The report in a real browser where it is hard: hostile text, unusual files, a page that is live."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentropy.analysis.report import write_report
from agentropy.analysis.report.serve import LivePage, make_server
from agentropy.trajectory import Segment, ToolCall, ToolResult, Trajectory, write_jsonl
from report_pages import browser, make_run, make_tokenizer, model_segment, tab


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as b:
        yield b


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- <script>",
    "{{data}}{{script}}",
    "\u202egnp.exe\u202c \u2066x",
    "\x00\x1b[31mred\x07\x7f\r\nnext\ttab",
    "\ud83d half \udc00",
    "👩‍👩‍👧‍👦 é 中文 עברית",
    "javascript:alert(1)",
    "\u200b\ufeffunseen\U000e0041",
)


def test_hostile_text_is_text(chromium: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "trajectories").mkdir()
    rng = random.Random(0)
    some = []
    for i, text in enumerate(HOSTILE):
        clean = text.encode("utf-8", "replace").decode()
        segments = (
            Segment("prompt", tuple(tokenizer.encode(clean))),
            model_segment(tokenizer, rng, "reasoning", clean),
            model_segment(
                tokenizer, rng, "call", clean, calls=(ToolCall(text, {text: text, "n": [text, "NUMBER"]}, text),)
            ),
            Segment("result", tuple(tokenizer.encode(clean)), results=(ToolResult(text, "invalid"),)),
            model_segment(tokenizer, rng, "reasoning", clean),
        )
        extra = {"gold": [text], "kind": text, "need": 1}
        some.append(Trajectory(text, f"{text}/{i}", text, segments, text, 0.0, "answer", extra=extra))
    some.append(
        Trajectory("long", "long", "x" * 1_000_000, (
            Segment("prompt", (1,)),
            model_segment(tokenizer, rng, "call", "go", calls=(ToolCall("t", {}),)),
            Segment("result", (1,), results=(ToolResult("y" * 1_000_000 + "END"),)),
        ), None, None, "error")
    )  # fmt: skip
    path = tmp_path / "trajectories" / "<b>hostile&.jsonl"
    write_jsonl(path, some)
    path.write_text(path.read_text().replace('"NUMBER"', "NaN"))
    out = tmp_path / "report.html"
    write_report(out, [path])
    raw = out.read_text()
    assert raw.count("</script>") == 2, "one for the data, one for the script"
    assert "alert(1)" not in raw
    with tab(chromium) as t:
        t.open(f"{out.as_uri()}#trajectories")
        t.page.wait_for_selector("#list a.row")
        assert t.page.locator("#list a.row").count() == len(some)
        for i, text in enumerate(HOSTILE):
            t.page.locator("#list a.row").nth(i).click()
            body = t.page.inner_text("#viewer")
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\u200b\ufeff]", body)
            assert t.page.locator("#viewer img, #viewer script").count() == 0
            if text.isascii() and text.isprintable():
                assert body.count(text) >= 5
        assert "⟨U+202E⟩gnp.exe" in t.page.locator("#list").inner_text()
        assert "␀␛[31mred␇␡␍" in t.page.locator("#list").inner_text()
        assert "⟨U+D83D⟩ half ⟨U+DC00⟩" in t.page.locator("#list").inner_text()
        assert "👩‍👩‍👧‍👦 é 中文 עברית" in t.page.locator("#list").inner_text()
        # Characters of several bytes, one token a byte: each shows its byte, and what they make together.
        t.page.locator("#list a.row").nth(7).click()
        assert "⟨E4⟩⟨B8⟩⟨AD⟩" in t.page.locator(".tokens").first.inner_text()
        assert (
            "中"
            in t.page.locator(".tokens .joined").all_inner_texts()[-2] + t.page.locator(".tokens").first.inner_text()
        )
        t.page.locator("#list a.row").last.click()
        output = t.page.locator(".output")
        assert output.inner_text().endswith("Show all (1,000,003 characters)")
        output.locator("button").click()
        assert output.inner_text().endswith("yEND")
        t.page.fill("#search", "yEND")
        t.count(1)


def test_unusual_files(chromium: Any, tmp_path: Path) -> None:
    """No ids, no entropies, estimates with alternatives, no score; and nothing at all."""
    bare = Trajectory("q", "bare", "", (Segment("reasoning", (5, 6)),), None, None, "void")
    given = Segment(
        "reasoning", (0, 0), (-0.5, -1.0), (0.7, 0.9), tokens=("Hel", "lo"),
        alternatives=((("Hel", -0.5), ("<b>", -1.5)), ()),
    )  # fmt: skip
    chat = Trajectory("q2", "chat", "hi", (given,), "lo", 1.0, "answer", entropy_kind="top-k", ids_kind="none")
    write_jsonl(tmp_path / "t.jsonl", [bare, chat])
    write_report(tmp_path / "r.html", [tmp_path / "t.jsonl"])
    with tab(chromium) as t:
        t.open(f"{(tmp_path / 'r.html').as_uri()}#trajectories")
        t.page.locator("#list a.row").nth(0).click()
        assert "⟨5⟩" in t.page.inner_text(".tokens")
        assert "not graded" in t.page.inner_text("#viewer")
        t.page.locator("#list a.row").nth(1).click()
        t.page.locator(".tokens .t").first.hover()
        assert t.tip()["entropy"] == "≈ 0.7 nats"
        assert t.tip()["id"] == "not known"
        assert t.page.locator("#tip table tr").all_inner_texts() == ["Hel\t60.7 %", "<b>\t22.3 %"]
        t.page.click("#tabs a >> nth=0")
        t.page.wait_for_selector(".overview")
        notes = t.page.inner_text("#main")
        assert "estimates from the k likeliest" in notes
        assert "No tokenizer was found" in notes
        assert "No advantages" in notes
    (tmp_path / "empty.jsonl").write_text("")
    write_report(tmp_path / "e.html", [tmp_path / "empty.jsonl"])
    with tab(chromium) as t:
        t.open((tmp_path / "e.html").as_uri())
        assert "Nothing has come out yet" in t.page.inner_text("#main")
        t.page.keyboard.press("t")
        assert "no trajectories yet" in t.page.inner_text("#list")


def test_a_live_page_keeps_up_and_keeps_its_place(chromium: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    server = make_server(LivePage(run), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        with tab(chromium, allowed=address) as t:
            t.page.goto(address)
            from playwright.sync_api import expect

            expect(t.page.locator(".waiting")).to_contain_text("there is no such run yet", timeout=40_000)
            make_run(run, steps=4)
            late = run / "trajectories" / "step-000004.jsonl"
            later = late.read_bytes()
            late.unlink()
            expect(t.page.locator("#title")).to_have_text("run", timeout=40_000)
            t.page.keyboard.press("t")
            t.page.keyboard.press("j")
            opened = t.page.locator("#viewer .id").inner_text()
            expect(t.page.locator("#found")).to_contain_text("84 trajectories", timeout=40_000)
            t.page.fill("#search", "reed")
            t.page.wait_for_timeout(400)
            t.page.locator(".tokens").first.focus()
            t.page.keyboard.press("ArrowRight")
            late.write_bytes(later)
            expect(t.page.locator("#found")).to_contain_text("of 104 trajectories", timeout=40_000)
            assert t.page.locator("#viewer .id").inner_text() == opened
            assert t.page.locator("#tip").is_visible()
            assert t.page.input_value("#search") == "reed"
            assert t.page.inner_text("#live") == "complete · step 4"
            server.shutdown()
            server.server_close()
            expect(t.page.locator("#live")).to_have_text("the server is gone", timeout=40_000)
            t.complaints.clear()  # the browser reports the refused connection
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes of training on a busy machine
def test_watching_a_real_run(chromium: Any, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    run = tmp_path / "run"
    command = [sys.executable, "-m", "agentropy.cli", "train", "--world", "facts", "--steps", "12", "--out", str(run)]
    options = [
        "--rollout.questions",
        "4",
        "--rollout.samples",
        "4",
        "--evaluation.questions",
        "8",
        "--evaluation.samples",
        "2",
    ]
    server = make_server(LivePage(run), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        with tab(chromium, allowed=address) as t:
            t.page.goto(address)
            with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as process:
                expect(t.page.locator("#live")).to_have_text(re.compile(r"live · step \d+"), timeout=600_000)
                assert process.wait(timeout=900) == 0
            expect(t.page.locator("#live")).to_have_text("complete · step 12", timeout=60_000)
            assert t.page.locator("#outcome tr", has_text="Avg@2").count() == 1
            t.page.keyboard.press("t")
            t.page.keyboard.press("j")
            assert "gold" in t.page.inner_text(".verdict")
            t.page.locator(".tokens .t").first.hover()
            assert "nats" in t.tip()["entropy"]
        with tab(chromium) as t:
            t.open((run / "report.html").as_uri())
            assert "12 of 12" in t.page.inner_text("#main")
    finally:
        server.shutdown()
        server.server_close()

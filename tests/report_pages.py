"""A run directory made by hand, and a browser that looks at its report."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentropy.training.tokenizer import train_tokenizer
from agentropy.trajectory import Segment, Status, ToolCall, ToolResult, Trajectory, write_jsonl

CHROMIUM = "/usr/bin/chromium"
TEXT = "the mayor of Cairo is maybe Emma Reed or Boris Novak then search again not found"
WORDS = TEXT.split()


def make_tokenizer() -> Any:
    return train_tokenizer([TEXT] * 3, vocab_size=320, numbers=True)


def model_segment(tokenizer: Any, rng: random.Random, kind: Any, text: str, **rest: Any) -> Segment:
    """A segment of the policy with entropies and log-probabilities of many sizes."""
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    entropies = tuple(rng.random() ** 4 * 4 + 1e-3 for _ in ids)
    logprobs = tuple(-(rng.random() ** 3) * 6 - 1e-4 for _ in ids)
    return Segment(kind, ids, logprobs, entropies, **rest)


def make_trajectory(
    tokenizer: Any, seed: int, question: str, name: str, statuses: tuple[Status, ...], score: float | None, **rest: Any
) -> Trajectory:
    """A question, a call for each status with its result, and an answer."""
    rng = random.Random(seed)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    segments = [Segment("prompt", ids(f"<|user|>{question}<|assistant|>"))]
    for i, status in enumerate(statuses):
        thought = " ".join(rng.choices(WORDS, k=rng.randint(2, 7)))
        segments.append(model_segment(tokenizer, rng, "reasoning", f"<think>{thought}</think>"))
        call = ToolCall("search", {"query": f"mayor {i}"})
        text = f"<search>mayor {i}</search>"
        segments.append(model_segment(tokenizer, rng, "call", text, calls=(call,)))
        output = f"Emma Reed {seed}" if status == "ok" else "Search failed."
        result = ToolResult(output, status, seconds=0.0123)
        segments.append(Segment("result", ids(f"<result>{output}</result>"), results=(result,)))
    answer = f"<think>{' '.join(rng.choices(WORDS, k=4))}</think><answer>Emma</answer>"
    segments.append(model_segment(tokenizer, rng, "reasoning", answer))
    number = next(int(c) for c in question if c.isdigit())
    extra = {"kind": "hop1" if number % 2 else "hop2", "need": number % 3, "gold": ["Emma Reed"]}
    return Trajectory(question, name, question, tuple(segments), "Emma", score, "answer", extra=extra, **rest)


STATUSES: tuple[tuple[Status, ...], ...] = (("ok",), ("ok", "error"), ("error",), ())


def make_run(root: Path, steps: int = 4) -> Path:
    """A finished run of TAO-RL: two questions in an update, four samples a question, five questions drawn a step."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(str(root / "tokenizer"))
    (root / "trajectories").mkdir(parents=True, exist_ok=True)
    (root / "config.yaml").write_text(
        f"method: tao-rl\nmethod_options:\n  alpha: 0.2\nworld: facts\nseed: 3\nsteps: {steps}\n"
        "rollout:\n  questions: 2\n  samples: 4\noptim:\n  lr: 0.0005\n"
    )
    environment = {"agentropy": "0.1", "commit": "c" * 40, "started": "2026-01-02T03:04:05+0000", "command": ["<b>"]}
    (root / "environment.json").write_text(json.dumps(environment))
    rows = []
    for step in range(1, steps + 1):
        group = []
        for q in range(5):
            for k in range(4):
                # Question 1 is all wrong; the others have both outcomes.
                score = 0.0 if q == 1 else float((k + step + q) % 2)
                seed = 1000 * step + 10 * q + k
                name = f"s{step}/q{q}/{k}"
                group.append(
                    make_trajectory(tokenizer, seed, f"Question {q} of step {step}?", name, STATUSES[k], score)
                )
        write_jsonl(root / "trajectories" / f"step-{step:06d}.jsonl", group)
        rows.append(
            {"step": step, "reward/accuracy": 0.25 + step / 10, "entropy/model": 1 / step, "optim/grad_norm": None,
             "entropy/post_tool": None if step == 2 else 0.5, "filter/kept": 12.0, "filter/all_calls_failed": 4.0,
             "filter/not_discriminative": 4.0, "tool/effective_ratio": 0.5, "time/step": 1.5}
        )  # fmt: skip
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, shift in (("before", 0), ("after", 1)):
        some = [
            make_trajectory(tokenizer, 50 * q + k + shift, f"Test {q}?", f"test-{q}/eval/{k}", STATUSES[k],
                            float((k + q + shift) % (3 - shift) == 0))
            for q in range(3) for k in range(4)
        ]  # fmt: skip
        write_jsonl(root / "trajectories" / f"test-{name}.jsonl", some)
        average = sum(t.score or 0 for t in some) / len(some)
        numbers = {"step": shift * steps, "eval/avg": average, "eval/k": 4.0, "tool/valid_rate": None}
        (root / f"evaluation-{name}.json").write_text(json.dumps(numbers))
    return root


@dataclass
class Tab:
    """A page in the browser, with everything that it asked for and complained about."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, address: str) -> None:
        self.page.goto(address)
        self.page.wait_for_selector("#title:not(:empty)")

    def rows(self) -> list[str]:
        """Keys of the trajectories in the list, in its order."""
        while self.page.locator("#list .more").count():
            self.page.locator("#list .more").click()
        return [a.get_attribute("data-key") for a in self.page.locator("#list a.row").all()]

    def count(self, n: int) -> None:
        """Wait until the list has so many trajectories."""
        from playwright.sync_api import expect

        expect(self.page.locator("#list a.row")).to_have_count(n)

    def tip(self) -> dict[str, str]:
        """What the tip says, by name."""
        rows = self.page.locator("#tip dl div").all()
        found = {r.locator("dt").inner_text(): r.locator("dd").inner_text() for r in rows}
        return found | {"text": self.page.locator("#tip .word").inner_text()}

    def width(self) -> int:
        """How wide the page's content is."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium. Without one, tests skip here and fail where AGENTROPY_BROWSER says that there is one."""
    wanted = os.environ.get("AGENTROPY_BROWSER")
    place = wanted or CHROMIUM
    if not wanted and not Path(place).exists():
        pytest.skip(f"no browser at {place} (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=place, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def tab(chromium: Any, allowed: str = "file:", **options: Any) -> Iterator[Tab]:
    """A fresh page. At its end: nothing on the console, and no request to anywhere but what is `allowed`."""
    context = chromium.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    page = context.new_page()
    page.set_default_timeout(15_000)
    out = Tab(page)
    page.on("request", lambda r: out.requests.append(r.url))
    page.on("console", lambda m: out.complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: out.complaints.append(str(e)))
    page.on("dialog", lambda d: (out.complaints.append(f"dialog {d.message}"), d.dismiss()))
    try:
        yield out
    finally:
        context.close()
    assert out.complaints == []
    assert [r for r in out.requests if not r.startswith((allowed, "data:"))] == []

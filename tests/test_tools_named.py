"""Tools by the names of the command line, and what the shared corpus gives for real questions."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from agentropy.config import split_list
from agentropy.errors import UserError
from agentropy.tools import SearchIndex
from agentropy.tools.named import tool_by_name
from agentropy.tools.python import PythonPart
from agentropy.tools.web import WebSearchPart


def test_names_give_tools() -> None:
    assert isinstance(tool_by_name("python", 1.0), PythonPart)
    assert isinstance(tool_by_name("python:stateful", 1.0), PythonPart)
    web = tool_by_name("web-search:http://localhost:8888", 1.0)
    assert isinstance(web, WebSearchPart)
    assert web.specs[0]["function"]["name"] == "web_search"


@pytest.mark.parametrize("name", ["", "pyhton", "python:x", "read-page:x", "http://localhost", "mcp_each:x"])
def test_other_names_are_told(name: str) -> None:
    with pytest.raises(
        UserError, match=r"no built-in tool .*there are python, .*web-search:URL, read-page, mcp:COMMAND"
    ):
        tool_by_name(name, 1.0)


def test_web_search_without_an_address() -> None:
    with pytest.raises(UserError, match="needs the address of a SearXNG: web-search:URL"):
        tool_by_name("web-search", 1.0)


def test_lists_of_tools() -> None:
    assert split_list("python,search:a.jsonl") == ["python", "search:a.jsonl"]
    assert split_list('mcp:"npx a,b", python,,') == ['mcp:"npx a,b"', "python"]
    assert split_list("'mcp:npx a,b',python") == ["mcp:npx a,b", "python"]
    assert split_list("mcp:sh -c 'a,b',x") == ["mcp:sh -c 'a,b'", "x"]
    assert split_list("search:o'b.jsonl,python") == ["search:o'b.jsonl", "python"]
    assert split_list("") == []


@pytest.fixture(scope="module")
def corpus(shared_dir: Path) -> Path:
    path = shared_dir / "data" / "corpus.jsonl"
    if not path.is_file():
        pytest.skip(f"no corpus at {path}")
    return path


def test_the_shared_corpus_is_indexed_fast_and_holds_the_gold_paragraphs(corpus: Path) -> None:
    began = time.process_time()
    index = SearchIndex.from_jsonl(corpus)
    built = time.process_time() - began
    assert len(index.documents) == 15_331
    assert built < 10, "about 1 s of one quiet core"

    def letters(text: str) -> str:
        return re.sub(r"\W+", "", text)  # two paragraphs differ in spaces around brackets and hyphens

    there = {(d.title, letters(d.text)) for d in index.documents}
    questions = []
    for name in ("hotpotqa_ctx", "2wiki_ctx"):
        text = (corpus.parent / f"{name}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.split("\n") if line]
        for row in rows:
            gold = [p for p in row["context"] if p["is_supporting"]]
            assert gold
            missing = [p["title"] for p in gold if (p["title"], letters(p["text"])) not in there]
            assert not missing, (row["id"], missing)
        questions += rows[:100]

    began = time.process_time()
    hits = [index.search(row["question"], 10) for row in questions]
    assert (time.process_time() - began) / len(questions) < 0.02, "less than a millisecond of one quiet core"
    found = [
        len({h.document.title for h in best} & set(row["supporting_titles"])) / len(set(row["supporting_titles"]))
        for best, row in zip(hits, questions, strict=True)
    ]
    assert sum(found) / len(found) > 0.6

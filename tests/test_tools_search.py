"""BM25 search: right hits, stable order, speed, and files that are told when broken."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentropy.errors import UserError
from agentropy.tools import SearchIndex, make_toolbox, search_tool, show_best
from agentropy.trajectory import ToolCall, ToolResult

DOCUMENTS: list[dict[str, Any]] = [
    {"title": "Rome", "text": "Rome is the capital of Italy."},
    {"title": "Paris", "text": "Paris is the capital of France."},
    {"title": "", "text": "東京 is large. Tokyo is the capital of Japan."},
    {"title": "Twin A", "text": "identical words here"},
    {"title": "Twin A", "text": "identical words here"},
]


def ask(query: Any, **options: Any) -> ToolResult:
    box = make_toolbox([search_tool(SearchIndex.from_documents(DOCUMENTS), **options)])

    async def main() -> ToolResult:
        session, _ = await box.open({}, 0)
        return (await session.call([ToolCall("search", {"query": query})]))[0]

    return asyncio.run(main())


def test_the_best_paragraphs_come_first() -> None:
    result = ask("capital of France", k=2)
    assert result.status == "ok"
    assert result.content.startswith("[1] Paris\nParis is the capital of France.\n\n[2] ")
    assert ask("東京", k=1).content == "[1] 東京 is large. Tokyo is the capital of Japan."


def test_a_terse_format() -> None:
    assert ask("capital Italy", form=show_best).content == "Rome is the capital of Italy."


def test_no_hit_is_ok_and_an_empty_query_invalid() -> None:
    for query in ("zebra", "the of", "?!"):
        assert (ask(query).status, ask(query).content) == ("ok", "No results.")
    assert ask("zebra", nothing="none").content == "none"
    for query in ("", " \n"):
        assert ask(query).status == "invalid"
    assert ask(["x"]).status == "invalid"


def test_only_documents_that_share_a_word_and_ties_in_order() -> None:
    index = SearchIndex.from_documents(DOCUMENTS)
    hits = index.search("identical", 5)
    assert [index.documents.index(h.document) for h in hits] == [3, 3]
    assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)
    assert all(h.score > 0 for h in hits)
    assert len(index.search("capital", 2)) == 2
    many = SearchIndex.from_documents([f"same text {i}" for i in range(50)])
    assert [h.document.text for h in many.search("same", 4)] == [f"same text {i}" for i in range(4)]
    assert [h.document.text for h in many.search("same", 40)] == [f"same text {i}" for i in range(40)]


def test_scores_are_those_of_bm25() -> None:
    from math import log

    documents = ["a1 b1", "a1 c1 c1 d1", "e1"]
    hits = SearchIndex.from_documents(documents).search("c1 b1", 3)
    # Lucene: idf = ln(1 + (N - n + 0.5) / (n + 0.5)); tf part = f / (f + k1 (1 - b + b |d| / mean |d|)).
    idf, mean = log(1 + 2.5 / 1.5), 7 / 3
    expected = {
        documents[1]: idf * 2 / (2 + 1.5 * (0.25 + 0.75 * 4 / mean)),
        documents[0]: idf * 1 / (1 + 1.5 * (0.25 + 0.75 * 2 / mean)),
    }
    assert {h.document.text: h.score for h in hits} == pytest.approx(expected, rel=1e-5)


def test_degenerate_collections() -> None:
    assert SearchIndex.from_documents(["the of", "a"]).search("the") == []
    assert len(SearchIndex.from_documents(["word"]).search("word", 10)) == 1
    with pytest.raises(UserError, match="at least one"):
        SearchIndex.from_documents([])
    with pytest.raises(UserError, match="k is 0"):
        search_tool(SearchIndex.from_documents(["x"]), k=0)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"title": "T", "text": "größe"}\n\n{"text": "ohne"}\n', encoding="utf-8")
    assert [h.document.title for h in SearchIndex.from_jsonl(path).search("größe")] == ["T"]
    for broken in ('{"title": "x"}', "[1]", "{", '{"text": 3}'):
        path.write_text('{"text": "fine"}\n' + broken + "\n", encoding="utf-8")
        with pytest.raises(UserError, match=r"corpus.jsonl, line 2: "):
            search_tool(path)
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UserError, match="line 1"):
        search_tool(path)
    path.write_text("")
    with pytest.raises(UserError, match="is empty"):
        search_tool(path)
    with pytest.raises(UserError, match=r"cannot read .*nowhere"):
        search_tool(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot read"):
        search_tool(tmp_path)


def test_a_real_corpus_is_indexed_and_searched_fast(shared_dir: Path) -> None:
    start = time.process_time()
    index = SearchIndex.from_jsonl(shared_dir / "data" / "corpus.jsonl")
    assert len(index.documents) > 15_000
    assert time.process_time() - start < 5
    titles = [h.document.title for h in index.search("director of the film Ed Wood", 5)]
    assert "Ed Wood (film)" in titles
    start = time.process_time()
    for _ in range(50):
        index.search("Which American film director was born in Denver, Colorado?", 3)
    assert (time.process_time() - start) / 50 < 5e-3


def test_nothing_is_printed_and_numba_is_not_needed() -> None:
    code = (
        "import sys\n"
        "sys.modules['numba'] = None\n"
        "from agentropy.tools import SearchIndex\n"
        "assert SearchIndex.from_documents(['a word']).search('word')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

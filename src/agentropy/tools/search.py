"""The `search` tool: BM25 (the bm25s library) over any collection of titled paragraphs, in process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentropy.errors import UserError
from agentropy.tools.base import Tool
from agentropy.tools.parts import StaticPart
from agentropy.tools.schema import ArgumentError
from agentropy.trajectory import ToolResult

_WORD = re.compile(r"\w+")
_STOPWORDS = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "for",
        "if",
        "in",
        "into",
        "is",
        "it",
        "no",
        "not",
        "of",
        "on",
        "or",
        "such",
        "that",
        "the",
        "their",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "was",
        "will",
        "with",
    ]
)
"""Lucene's list of English stop words."""


@dataclass(frozen=True, slots=True)
class Document:
    """A paragraph with its title."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found, with its BM25 score."""

    document: Document
    score: float


def words(text: str) -> list[str]:
    """The words that are indexed: lower case, letters and digits, without stop words."""
    return [w for w in _WORD.findall(text.lower()) if w not in _STOPWORDS]


class SearchIndex:
    """A BM25 index (k1 1.5, b 0.75, Lucene's variant) held in memory. Answers are the same on every run."""

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s

        if not documents:
            raise UserError("a search index needs at least one document")
        self.documents = tuple(documents)
        vocabulary: dict[str, int] = {}
        ids = [
            [vocabulary.setdefault(w, len(vocabulary)) for w in words(f"{d.title} {d.text}")] for d in self.documents
        ]
        self._vocabulary = vocabulary
        self._model: Any = None
        if vocabulary:
            self._model = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
            self._model.index((ids, vocabulary), create_empty_token=False, show_progress=False)

    @classmethod
    def from_documents(cls, documents: Iterable[Document | Mapping[str, Any] | str]) -> SearchIndex:
        """An index over documents, `{title, text}` mappings or bare texts."""
        return cls([_document(d) for d in documents])

    @classmethod
    def from_jsonl(cls, path: Path | str) -> SearchIndex:
        """An index over a file of `{"title": …, "text": …}` lines. Raises UserError with the line's number."""
        path = Path(path)
        documents = []
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        documents.append(_document(json.loads(line.decode("utf-8-sig"))))
                    except UnicodeDecodeError:
                        raise UserError(f"{path}, line {number}: not UTF-8 text") from None
                    except json.JSONDecodeError as error:
                        raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from None
                    except (RecursionError, UserError) as error:
                        raise UserError(f"{path}, line {number}: {error}") from None
        except OSError as error:
            raise UserError(f"cannot read the search corpus {path}: {error.strerror}") from None
        if not documents:
            raise UserError(f"the search corpus {path} is empty")
        return cls(documents)

    def search(self, query: str, k: int = 3) -> list[Hit]:
        """The best `k` documents that share a word with the query, best first; ties by place in the collection."""
        ids = [i for w in words(query) if (i := self._vocabulary.get(w)) is not None]
        if not ids:
            return []
        scores = self._model.get_scores_from_ids(ids)
        k = min(k, len(scores))
        # The k-th best score, then all that reach it: argpartition alone would break ties at random.
        bound = np.partition(scores, len(scores) - k)[len(scores) - k]
        found = np.flatnonzero((scores >= bound) & (scores > 0))
        best = found[np.argsort(-scores[found], kind="stable")][:k]
        return [Hit(self.documents[i], float(scores[i])) for i in best]


def _document(value: Document | Mapping[str, Any] | str) -> Document:
    if isinstance(value, Document):
        return value
    if isinstance(value, str):
        return Document("", value)
    if not isinstance(value, Mapping) or not isinstance(value.get("text"), str):
        raise UserError('a document is an object {"title": …, "text": …}')
    return Document(str(value.get("title") or ""), value["text"])


Format = Callable[[Sequence[Hit]], str]
"""Makes the text for the model from the hits, best first."""


def show_hits(hits: Sequence[Hit]) -> str:
    """Numbered hits with title and text, one a paragraph."""
    return "\n\n".join(
        f"[{n}] {h.document.title}\n{h.document.text}" if h.document.title else f"[{n}] {h.document.text}"
        for n, h in enumerate(hits, 1)
    )


def show_best(hits: Sequence[Hit]) -> str:
    """Only the text of the best hit."""
    return hits[0].document.text


def search_tool(
    index: SearchIndex | Path | str,
    *,
    k: int = 3,
    form: Format = show_hits,
    nothing: str = "No results.",
) -> StaticPart:
    """The built-in tool `search(query)`: the best `k` paragraphs of an index, or of a JSONL file of `{title, text}`.

    form: makes the text for the model. nothing: what is said where no document shares a word with the query (status ok:
    the search worked). An empty query is `invalid`.
    """
    if k < 1:
        raise UserError(f"search k is {k}, must be at least 1")
    shared = index if isinstance(index, SearchIndex) else SearchIndex.from_jsonl(index)

    async def run(arguments: Mapping[str, Any]) -> ToolResult:
        query = arguments["query"]
        if not query.strip():
            raise ArgumentError("the query is empty")
        hits = shared.search(query, k)
        return ToolResult(form(hits) if hits else nothing)

    description = "Search a collection of paragraphs and return those that fit the query best."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words to look for."}},
        "required": ["query"],
    }
    return StaticPart([Tool("search", description, parameters, run)], keeps_time=True)

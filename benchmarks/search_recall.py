"""How many gold paragraphs BM25 finds when it is asked the question itself: `python benchmarks/search_recall.py DIR`.

DIR holds corpus.jsonl and files of questions with `supporting_titles`. Prints recall@k (mean share of a question's gold
titles among the first k hits), the share of questions with all of them, and seconds of CPU to build and to ask.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from agentropy.tools import SearchIndex

KS = (1, 3, 5, 10, 20)


def main(folder: Path, names: list[str]) -> None:
    """Print one line a file and k."""
    began = time.process_time()
    index = SearchIndex.from_jsonl(folder / "corpus.jsonl")
    print(f"{len(index.documents)} paragraphs, built in {time.process_time() - began:.2f} s")
    for name in names:
        text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.split("\n") if line]
        began = time.process_time()
        hits = [[h.document.title for h in index.search(r["question"], max(KS))] for r in rows]
        each = (time.process_time() - began) / len(rows)
        print(f"{name}: {len(rows)} questions, {1000 * each:.2f} ms each")
        for k in KS:
            shares = [
                len(set(found[:k]) & set(r["supporting_titles"])) / len(set(r["supporting_titles"]))
                for found, r in zip(hits, rows, strict=True)
            ]
            mean, whole = sum(shares) / len(rows), sum(s == 1 for s in shares) / len(rows)
            print(f"  recall@{k:<2}  {100 * mean:5.1f}   all {100 * whole:5.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["hotpotqa_ctx", "2wiki_ctx"])

"""Exact match and F1 for questions with short text answers, best over the golds.

`em_squad` and `f1_squad` follow the reference scripts of SQuAD 1.1 and HotpotQA (hotpot_evaluate_v1.py) to the last
bit, for comparison with papers. `em` and `f1` are the stricter default and what a reward should use: in them
numbers keep their sign and point (`-3` is not `3`, `1.5` is not `15`), Unicode is composed (NFC), typographic
punctuation counts as its ASCII twin, an answer that consists of articles only is kept, and Chinese, Japanese and Korean
text is compared character by character. `gaia` is that benchmark's own quasi-exact match (see `gaia`).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from agentropy.evaluation.grading.gaia import same_gaia
from agentropy.evaluation.grading.verdict import Reason, Verdict, best, right, unscorable, wrong

Metric = Literal["em", "f1", "em_squad", "f1_squad", "gaia"]
METRICS: tuple[str, ...] = get_args(Metric)

# HotpotQA: these answers get no credit for words in common.
CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = frozenset(string.punctuation)
_TWINS = str.maketrans(
    dict.fromkeys("‘’‚‛′ʼ´`", "'")
    | dict.fromkeys("“”„‟″«»", '"')
    | dict.fromkeys("‐‑‒–—―−﹣－", "-")
    | {"…": "...", "⁄": "/", "，": ",", "．": ".", "：": ":", "％": "%"}
)
_INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# Punctuation that belongs to a number: a sign before it, a point, colon, slash or hyphen inside it.
_IN_NUMBER = re.compile(r"(?<![\w)\]])-(?=\.?\d)|(?<=\d)[./:-](?=\d)|(?<!\w)\.(?=\d)")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f]")


def normalize_squad(text: str) -> str:
    """Lower case; ASCII punctuation and a/an/the dropped; blanks collapsed (SQuAD 1.1, HotpotQA)."""
    kept = "".join(c for c in text.lower() if c not in _ASCII_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def normalize_strict(text: str) -> str:
    """As `normalize_squad`, but numbers and answers made of articles survive (see the module)."""
    text = unicodedata.normalize("NFC", _INVISIBLE.sub("", text)).translate(_TWINS).lower()
    text = _THOUSANDS.sub(lambda m: m.group().replace(",", ""), text)
    protected = {m.start() for m in _IN_NUMBER.finditer(text)}
    kept = "".join(
        c
        if i in protected
        else " "
        if c == "," and text[i - 1 : i].isdigit() and text[i + 1 : i + 2].isdigit()
        else ""
        if c in _ASCII_PUNCTUATION or unicodedata.category(c)[0] == "P"
        else c
        for i, c in enumerate(text)
    )
    without = " ".join(_ARTICLES.sub(" ", kept).split())
    return without or " ".join(kept.split())


def tokens_strict(normalized: str) -> list[str]:
    """Tokens of a normalised text: split at blanks, and every Chinese, Japanese or Korean character by itself."""
    return _CJK.sub(lambda m: f" {m.group()} ", normalized).split()


def _f1(prediction: list[str], gold: list[str]) -> float:
    same = sum((Counter(prediction) & Counter(gold)).values())
    if same == 0:
        return 0.0
    precision = 1.0 * same / len(prediction)
    recall = 1.0 * same / len(gold)
    return (2 * precision * recall) / (precision + recall)


def _pair_score(
    prediction: str, gold: str, normalize: Callable[[str], str], tokens: Callable[[str], list[str]]
) -> tuple[bool, float]:
    """(exact match, F1) of one answer against one gold."""
    p, g = normalize(prediction), normalize(gold)
    if p != g and (p in CLOSED_ANSWERS or g in CLOSED_ANSWERS):
        return False, 0.0
    return p == g, _f1(tokens(p), tokens(g))


def em_squad(prediction: str, gold: str) -> float:
    """Exact match as in the reference script: 1.0 or 0.0."""
    return float(_pair_score(prediction, gold, normalize_squad, str.split)[0])


def f1_squad(prediction: str, gold: str) -> float:
    """F1 over bags of tokens as in HotpotQA's script, with its rule for yes, no and noanswer. In [0, 1]."""
    return _pair_score(prediction, gold, normalize_squad, str.split)[1]


def _strict(prediction: str, gold: str) -> tuple[bool, float]:
    if not normalize_strict(prediction) and not normalize_strict(gold):
        same = prediction.strip() == gold.strip() != ""  # punctuation only: the texts themselves decide
        return same, float(same)
    return _pair_score(prediction, gold, normalize_strict, tokens_strict)


def em(prediction: str, gold: str) -> float:
    """Exact match under the strict normalisation: 1.0 or 0.0."""
    return float(_strict(prediction, gold)[0])


def f1(prediction: str, gold: str) -> float:
    """F1 over bags of tokens under the strict normalisation, with the rule for yes, no, noanswer. In [0, 1]."""
    return _strict(prediction, gold)[1]


def grade_qa(answer: str | None, golds: Sequence[str], metric: Metric = "f1") -> Verdict:
    """Grade one answer string against every accepted gold; the best counts.

    The score is that of the metric; `correct` is the exact match under the same normalisation, so an F1 of 1 with the
    words in another order is not `correct`.
    """
    if not golds:
        return unscorable("ungradable", answer, "there is no gold answer")
    if answer is None or (not answer.strip() and not metric.endswith("_squad")):
        return wrong("no_answer", answer, "the answer is empty")
    return best(_grade_pair(answer, gold, metric) for gold in golds)


def _grade_pair(answer: str, gold: str, metric: Metric) -> Verdict:
    if not gold.strip():
        return unscorable("ungradable", answer, "the gold answer is empty")
    if metric == "gaia":
        same = same_gaia(answer, gold)
        return right("equal_exact", answer) if same else wrong("different", answer)
    reference = metric.endswith("_squad")
    exact, overlap = _pair_score(answer, gold, normalize_squad, str.split) if reference else _strict(answer, gold)
    score = float(exact) if metric.startswith("em") else overlap
    reason: Reason = "equal_exact" if exact else "partial" if score > 0 else "different"
    normalize = normalize_squad if reference else normalize_strict
    detail = f"{metric} {score:.4g}: {normalize(answer)!r} against {normalize(gold)!r}"
    return Verdict(exact, score, reason, answer, detail)

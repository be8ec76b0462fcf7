"""Exact match and F1: the reference scripts to the last bit, and the strict default that a reward uses."""

from __future__ import annotations

import re
import string
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentropy.errors import UserError
from agentropy.evaluation.grading import make_grader
from agentropy.evaluation.grading.choice import choice_letter, grade_choice
from agentropy.evaluation.grading.qa import em, em_squad, f1, f1_squad, grade_qa

WORDS = ["the", "a", "An", "yes", "No", "noanswer", "New", "York,", "city.", "-3", "1.5", "é", "e\u0301", "“x”", "\t"]
ANSWERS = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join) | st.text(max_size=20)


def reference_scores(prediction: str, gold: str) -> tuple[float, float]:
    """HotpotQA's published evaluation, written out independently."""

    def normal(text: str) -> str:
        text = "".join(ch for ch in text.lower() if ch not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    p, g = normal(prediction), normal(gold)
    exact = float(p == g)
    closed = ["yes", "no", "noanswer"]
    if (p in closed and p != g) or (g in closed and p != g):
        return exact, 0.0
    p_tokens, g_tokens = p.split(), g.split()
    same = sum((Counter(p_tokens) & Counter(g_tokens)).values())
    if same == 0:
        return exact, 0.0
    precision, recall = 1.0 * same / len(p_tokens), 1.0 * same / len(g_tokens)
    return exact, (2 * precision * recall) / (precision + recall)


@settings(deadline=None)
@given(ANSWERS, ANSWERS)
@example("", "the")
@example("yes", "Yes!")
def test_the_squad_metrics_are_the_reference(prediction: str, gold: str) -> None:
    assert (em_squad(prediction, gold), f1_squad(prediction, gold)) == reference_scores(prediction, gold)


@pytest.mark.parametrize(
    ("gold", "prediction", "expected"),
    [
        ("The Beatles", "beatles", 1.0),
        ("black", "Black.", 1.0),
        ("A", "A", 1.0),
        ("A", "the", 0.0),
        ("no", "No.", 1.0),
        ("IFN signature", "IFN-signature", 0.0),
        ("1914–1918", "1914-1918", 1.0),
        ("O’Brien", "O'Brien", 1.0),
        ("café", "cafe\u0301", 1.0),
        ("café", "cafe", 0.0),
        ("Paris, Texas", "Paris", 0.0),
        ("-3", "3", 0.0),
        ("−3", "-3", 1.0),
        ("1.5", "15", 0.0),
        ("1.5", "1.5.", 1.0),
        ("1,000", "1000", 1.0),
        ("1,5", "15", 0.0),
        ("1, 2", "1,2", 1.0),
        ("12:30", "1230", 0.0),
        ("1/2", "12", 0.0),
        ("U.S.", "US", 1.0),
        ("$5", "5", 1.0),
        ("«Yes»", "yes", 1.0),
        ("two", "2", 0.0),
        ("!!!", "!!!", 1.0),
        ("!!!", "???", 0.0),
        ("word\u200b", "word", 1.0),
    ],
)
def test_strict_exact_match(gold: str, prediction: str, expected: float) -> None:
    assert em(prediction, gold) == expected
    if expected:
        assert f1(prediction, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "prediction", "expected"),
    [
        ("New York City", "New York", 0.8),
        ("James Madison", "President James Madison", 0.8),
        ("yes", "yes, both are", 0.0),
        ("no", "There is no evidence", 0.0),
        ("Windows 8", "Windows", 2 / 3),
        ("the the band", "band band", 2 / 3),
        ("北京大学", "北京", 2 / 3),
        ("Paris", "", 0.0),
    ],
)
def test_strict_f1(gold: str, prediction: str, expected: float) -> None:
    assert f1(prediction, gold) == pytest.approx(expected)


@settings(deadline=None)
@given(ANSWERS, ANSWERS)
def test_strict_scores_are_consistent(prediction: str, gold: str) -> None:
    score = f1(prediction, gold)
    assert 0.0 <= score <= 1.0
    assert score == f1(gold, prediction)
    assert em(prediction, gold) == em(gold, prediction)
    if em(prediction, gold):
        assert score == 1.0
    if prediction.strip():
        assert em(prediction, prediction) == 1.0


def test_the_best_gold_counts() -> None:
    verdict = grade_qa("NYC", ["New York City", "NYC"])
    assert (verdict.correct, verdict.score, verdict.reason) == (True, 1.0, "equal_exact")
    partial = grade_qa("New York", ["Boston", "New York City"])
    assert (partial.correct, partial.score, partial.reason) == (False, pytest.approx(0.8), "partial")
    assert grade_qa("York New", ["New York"]).correct is False  # all the words, but no exact match
    assert grade_qa("York New", ["New York"]).score == 1.0


def test_what_cannot_be_scored_is_none() -> None:
    assert grade_qa("x", []).correct is None
    assert grade_qa("x", [" "]).score is None
    assert grade_qa(None, ["x"]).reason == "no_answer"
    assert grade_qa("", ["x"]).score == 0.0
    assert grade_qa("Paris", ["", "Paris"]).correct is True
    assert grade_qa("London", ["", "Paris"]).correct is None


def test_answers_in_tags_and_boxes_are_read() -> None:
    grader = make_grader("qa", metric="em")
    assert grader.grade_now("<think>Rome?</think><answer> Paris </answer>", ["Paris"]).extracted == "Paris"
    assert grader.grade_now("it is \\boxed{Paris}", ["Paris"]).correct
    assert grader.grade_now("Paris", ["Paris"]).correct
    assert not grader.grade_now("<answer></answer>", ["Paris"]).correct
    with pytest.raises(UserError, match="unknown metric"):
        make_grader("qa", metric="bleu")
    with pytest.raises(UserError, match="unknown grader"):
        make_grader("poetry")


@pytest.mark.parametrize(
    ("text", "letter"),
    [("B", "B"), ("(b)", "B"), ("\\text{(B)}", "B"), ("B. 42", "B"), ("B) 42", "B"), ("option c", "C"),
     ("The answer", None),
     ("42", None), ("**D**", "D"), ("$\\textbf{(E)}$", "E")],
)  # fmt: skip
def test_choice_letters(text: str, letter: str | None) -> None:
    assert choice_letter(text) == letter


def test_choices() -> None:
    assert grade_choice("(B)", ["B"]).correct
    assert grade_choice("C", ["B"]).reason == "different"
    assert grade_choice("fish", ["B"], options=["meat", "fish"]).correct
    assert grade_choice("a fish or so", ["B"]).reason == "parse_error"
    assert grade_choice("", ["B"]).reason == "no_answer"
    assert grade_choice("B", ["42"]).correct is None
    assert make_grader("choice").grade_now("so \\boxed{\\text{(B)}}", ["B"]).correct

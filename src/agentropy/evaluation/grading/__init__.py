"""Graders: maths, QA, multiple choice and code. `make_grader(kind)` is the way in; docs/grading.md has the policy."""

from agentropy.evaluation.grading.graders import KINDS, Grader, make_grader
from agentropy.evaluation.grading.verdict import Reason, Verdict

__all__ = ["KINDS", "Grader", "Reason", "Verdict", "make_grader"]

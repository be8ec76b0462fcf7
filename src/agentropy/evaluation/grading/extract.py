r"""Finding the answer in a model's text: the last balanced \boxed{}, an answer tag, or a marked final answer.

Only text that the model itself wrote may come here. Tool results that are still marked as such (tags, output fences)
are cut out first, because a box that a program printed is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Mode = Literal["strict", "lenient"]

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)")
_RESULT_TAGS = "tool_response|tool_result|tool_output|result|results|observation|information|interpreter|output"
_RESULTS = re.compile(
    rf"<({_RESULT_TAGS})>.*?(?:</\1>|\Z)|```[ \t]*(?:output|text output|result)[ \t]*\n.*?(?:```|\Z)", re.S
)
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S | re.I)
_THINK = re.compile(r"<think>.*?</think>", re.S)
# Between two boxes, these join them to one list; any other word retracts the earlier one.
_JOIN = re.compile(r"(?:\s|\\[,;:!]|\\quad|\\qquad|\$|[,;*]|\band\b|\bor\b|\\text\{\s*(?:and|or)\s*\}|\\\(|\\\)|&)*")
_JOIN_WORD = re.compile(r"[,;&]|\b(?:and|or)\b")
_MARKER = re.compile(
    r"(?:####|(?:the\s+)?(?:final|correct)\s+(?:answer|result)\s*(?:is|are|=|:)?|\banswers?\s*(?:is|are|=|:)|答案(?:是|为|：|:))"
    r"[\s*_:]*",
    re.I,
)


@dataclass(frozen=True)
class Extraction:
    """An answer and where it came from: box, tag, marker, whole (the text is the answer) or none."""

    answer: str | None
    source: Literal["box", "tag", "marker", "whole", "none"]
    note: str = ""


def matching_brace(text: str, start: int) -> int | None:
    r"""Index of the brace that closes the one at `start`, or None. `\{` and `\}` don't count."""
    depth, i = 0, start
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 2
            continue
        if c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Every outermost balanced box as (start, end, content), in order. A box without an end is skipped."""
    found: list[tuple[int, int, str]] = []
    position = 0
    unclosed = 0
    while match := _BOX.search(text, position):
        # A cut-off box makes every later search for its end run to the end of the text; a text with very many of them
        # is hostile, and the bound keeps the work linear.
        close = matching_brace(text, match.end()) if unclosed < 16 else None
        if close is None:
            unclosed += 1
            position = match.end() + 1
            if unclosed > 16:
                break
            continue
        found.append((match.start(), close + 1, text[match.end() + 1 : close]))
        position = close + 1
    return found


def unbox(text: str) -> str:
    """The content of a text that is one box, however deep; any other text unchanged."""
    for _ in range(8):
        stripped = text.strip().strip("$").strip()
        found = boxes(stripped)
        if len(found) != 1 or found[0][:2] != (0, len(stripped)):
            break
        text = found[0][2]
    return text


def _last_boxed(text: str) -> str | None:
    found = boxes(text)
    if not found:
        return None
    run = [found[-1]]
    for box in reversed(found[:-1]):
        between = text[box[1] : run[0][0]]
        if not _JOIN.fullmatch(between) or not _JOIN_WORD.search(between):
            break
        run.insert(0, box)
    contents: list[str] = []
    for _, _, content in run:
        content = unbox(content).strip()
        if content not in contents:
            contents.append(content)
    return ", ".join(contents)


def _clean_line(text: str) -> str:
    line = text.strip().split("\n", 1)[0]
    line = re.split(r"(?<=[\w}\])*$])[.!?;](?=\s|$)|\s(?:because|since|as\s|which)\b", line, maxsplit=1)[0]
    return line.strip().strip("*_` ✅☑✔").strip()


def extract(text: str, mode: Mode = "strict") -> Extraction:
    """The answer in `text`.

    strict: a box or an `<answer>` tag, whichever comes last. lenient: else what follows the last "final answer",
    "answer is", "####". A number that merely stands in the text is never an answer: listing guesses must not score.
    """
    text = _RESULTS.sub(" ", text)
    found = boxes(text)
    tags = list(_ANSWER_TAG.finditer(text))
    box_end = found[-1][1] if found else -1
    if tags and tags[-1].end() > box_end:
        inner = tags[-1].group(1)
        answer = _last_boxed(inner)
        answer = (inner if answer is None else answer).strip()
        return Extraction(answer or None, "tag", "" if answer else "the answer tag is empty")
    if found:
        answer = _last_boxed(text)
        return Extraction(answer or None, "box", "" if answer else "the last box is empty")
    cut_off = _BOX.search(text) is not None
    if mode == "lenient" and not cut_off:
        visible = _THINK.sub(" ", text)
        for match in reversed(list(_MARKER.finditer(visible))):
            line = _clean_line(visible[match.end() :])
            if line:
                return Extraction(line, "marker")
    note = "the box is not closed" if cut_off else "no box, answer tag or final answer"
    return Extraction(None, "none", note)

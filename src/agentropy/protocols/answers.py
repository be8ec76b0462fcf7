"""Reading a final answer out of what the policy wrote. Only the policy's own text ever comes here."""

from __future__ import annotations

BOXED = "\\boxed{"


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` with balanced braces; None where there is none or it is empty.

    An escaped brace (`\{`) counts for nothing, as in LaTeX.
    """
    at = text.rfind(BOXED)
    while at >= 0:
        end = _closing(text, at + len(BOXED))
        if end is not None and (content := text[at + len(BOXED) : end].strip()):
            return content
        at = text.rfind(BOXED, 0, at)
    return None


def _closing(text: str, start: int) -> int | None:
    depth, i = 1, start
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 2
            continue
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return i
        i += 1
    return None


def final_text(text: str) -> str:
    """What stands after the last closed `<think>` section and before one that is not closed."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def tagged(text: str) -> str | None:
    """Content of the last `<answer>…</answer>`; None where there is none."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    return content.strip() if closing and opening else None


def auto(text: str) -> str | None:
    r"""The answer of free text: `\boxed{}` if there is one, else `<answer>`, else all text after the thinking."""
    visible = final_text(text)
    return boxed(visible) or tagged(visible) or visible or None

r"""One plain spelling for the many ways a maths answer is written: Unicode, spacing, delimiters, units, currency.

Everything here is a linear pass of regular expressions over at most `MAX_CHARACTERS` characters; nothing is evaluated.
"""

from __future__ import annotations

import re

# Longer answers are no answers: the longest gold of the usual benchmarks has under 300 characters.
MAX_CHARACTERS = 4096

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_FRACTIONS = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
    "⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8", "⅑": "1/9", "⅒": "1/10",
}  # fmt: skip
_UNICODE = {
    "−": "-", "–": "-", "—": "-", "‒": "-", "﹣": "-", "－": "-", "＋": "+", "×": r"\times ", "✕": r"\times ",
    "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "𝜋": r"\pi ",
    "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "≤": r"\leq ",
    "≥": r"\geq ", "≦": r"\leq ", "≧": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ",
    "°": "°", "º": "°", "˚": "°", "′": "'", "ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "γ": r"\gamma ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega ", "τ": r"\tau ", "（": "(", "）": ")",
    "［": "[", "］": "]", "｛": "{", "｝": "}", "，": ",", "、": ",", "；": ";", "：": ":", "＝": "=", "％": "%",
    "＜": "<", "＞": ">", "．": ".", "∖": r"\setminus ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ",
    "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "€": "€", "“": '"', "”": '"', "‘": "'", "’": "'",
    "＄": "$", "µ": r"\mu ", "μ": r"\mu ",
}  # fmt: skip
_UNICODE_RE = re.compile("[" + "".join(map(re.escape, _UNICODE)) + "]")
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\u00ad]")
_BLANKS = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_ROOT = re.compile(r"√\s*(\d+|[a-zA-Z]|\((?:[^()]*)\))")
_MATH_LETTERS = {0xFF10 + i: str(i) for i in range(10)}

_SIZES = re.compile(
    r"\\(?:left|right|middle|bigl|bigr|biggl|biggr|Bigl|Bigr|Biggl|Biggr|bigm|big|Big|bigg|Bigg)(?![a-zA-Z])\s*\.?"
)
_STYLES = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|boldsymbol|bm|mathstrut|strut|null)(?![a-zA-Z])"
)
_COLORS = re.compile(r"\\(?:text)?color\s*\{[a-zA-Z0-9!,.]*\}")
_SPACING = re.compile(
    r"\\(?:[,;:>]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|thinspace|enspace|medspace|\s)|~|\\hspace\*?\{[^{}]*\}|\\h?phantom\{[^{}]*\}"
)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-zA-Z])|\\text\{\s*°\s*\}|°)")
_WORD_SEPARATOR = re.compile(r"\\(?:text|mbox|textrm|mathrm|textnormal)\s*\{\s*,?\s*(?:and|or)\s*\}")
_RENAMES = (
    (re.compile(r"\\(?:[dtcs]|nice|x)frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:leq?slant|leqq|le)(?![a-zA-Z])"), r"\\leq"),
    (re.compile(r"\\(?:geq?slant|geqq|ge)(?![a-zA-Z])"), r"\\geq"),
    (re.compile(r"\\(?:ne)(?![a-zA-Z])"), r"\\neq"),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\(?:varnothing|O)(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:lbrace)(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\(?:lbrack)(?![a-zA-Z])"), "["),
    (re.compile(r"\\(?:rbrack)(?![a-zA-Z])"), "]"),
    (re.compile(r"\\(?:infin|infinity)(?![a-zA-Z])"), r"\\infty"),
    (re.compile(r"\\(?:colon)(?![a-zA-Z])"), ":"),
    (re.compile(r"\\(?:textdollar|dollar)(?![a-zA-Z])|\\\$"), "$"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\#"), "#"),
    (re.compile(r"\\_"), "_"),
    (re.compile(r"\\&"), "&"),
    (re.compile(r"\\!"), ""),
    (re.compile(r"<="), r"\\leq "),
    (re.compile(r">="), r"\\geq "),
    (re.compile(r"!="), r"\\neq "),
)
_COMMA_GROUP = re.compile(r"(?<=\d)\{\s*,\s*\}")
_POINT_GROUP = re.compile(r"(?<=\d)\{\s*\.\s*\}")
_DELIMITERS = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$"), ("**", "**"), ("`", "`"), ('"', '"'))


def tidy(text: str) -> str:
    r"""`text` in one plain spelling: `\frac` for every fraction command, `-` for every dash, no `\left`, no spacing
    commands, no degree signs, no enclosing `$` or `**`, no full stop at the end. MAX_CHARACTERS are looked at."""
    text = text[: MAX_CHARACTERS + 1]
    if not text.isascii():
        text = _from_unicode(text)
    text = _strip_delimiters(text)
    if "\\" in text or "~" in text:
        text = _SIZES.sub("", text)
        text = _COLORS.sub("", _STYLES.sub("", text))
        text = _WORD_SEPARATOR.sub(",", text)
        text = text.replace("\\\\", "\x00")  # a row end of a matrix is not the start of `\,`
        text = _SPACING.sub(" ", text).replace("\x00", "\\\\")
    if "\\" in text or "<" in text or ">" in text or "!" in text:
        for pattern, replacement in _RENAMES:
            text = pattern.sub(replacement, text)
    if "{" in text:
        text = _POINT_GROUP.sub(".", _COMMA_GROUP.sub(",", text))
    if "°" in text or "\\circ" in text or "\\degree" in text:
        text = _DEGREES.sub("", text)
    text = text.replace("**", "^")
    return " ".join(_strip_delimiters(text).split())


def _from_unicode(text: str) -> str:
    text = _BLANKS.sub(" ", _INVISIBLE.sub("", text)).translate(_MATH_LETTERS)
    text = _SUPERSCRIPT_RUN.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda m: "_{" + m.group().translate(_SUBSCRIPTS) + "}", text)
    text = _ROOT.sub(lambda m: r"\sqrt{" + m.group(1).strip("()") + "}", text)
    for sign, plain in _FRACTIONS.items():
        if sign in text:
            text = re.sub(rf"(\d)\s*{sign}", rf"\1 {plain}", text).replace(
                sign, f"({plain})" if text != sign else plain
            )
    return _UNICODE_RE.sub(lambda m: _UNICODE[m.group()], text)


def _strip_delimiters(text: str) -> str:
    for _ in range(6):
        before = text
        text = text.strip().removesuffix("\\\\").rstrip(",;: ")
        if text.endswith(".") and not text.endswith((r"\.", "...")):
            text = text[:-1].rstrip()
        for left, right in _DELIMITERS:
            inner = text[len(left) : len(text) - len(right)]
            if (
                len(text) > len(left) + len(right)
                and text.startswith(left)
                and text.endswith(right)
                and not text.endswith("\\" + right)
                and left not in inner
            ):
                text = inner
        if text == before:
            break
    return text

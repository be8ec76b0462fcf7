r"""Numbers as people write them, read exactly: integers, decimals, fractions, mixed numbers, scientific notation.

`parse_number` is the fast path of the maths grader: no symbolic library, no process, about 10 microseconds. Whatever it
can't read for certain it leaves to the slow path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from agentropy.evaluation.grading.vocabulary import ALGEBRAIC, FUNCTIONS, NOT_UNITS, SHORT_UNITS

# A decimal stands for a number when they agree to this relative error ...
RELATIVE_TOLERANCE = Fraction(1, 10**6)
# ... or when the decimal is the number correctly rounded to at least so many significant digits.
ROUNDED_DIGITS = 6
# A decimal for a number that has no finite decimal needs at least so many significant digits.
MIN_DIGITS = 4
# 10^n is written out up to this n; beyond it the slow path compares.
MAX_EXPONENT = 4000

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:\s\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?P<digits>{_UNSIGNED})"
    r"(?:\s*(?:[eE]|(?:\\times|\\cdot|\*|x)\s*10\s*\^)\s*(?P<open>\{?)\s*(?P<exponent>[+-]?\d{1,5})\s*\}?)?"
)
_POWER_OF_TEN = re.compile(r"(?P<sign>[+-]?)\s*10\s*\^\s*(?:\{\s*(?P<braced>[+-]?\d{1,5})\s*\}|(?P<bare>\d))")
_RATIO = re.compile(r"(?P<sign>[+-]?)\s*(?P<above>\d+(?:\.\d+)?)\s*/\s*(?P<sign2>-?)(?P<below>\d+(?:\.\d+)?)")
_FRAC = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<whole>\d*)\s*\\frac\s*"
    r"(?:\{\s*(?P<above>[+-]?[\d,]+(?:\.\d+)?)\s*\}|(?P<above1>\d))\s*(?:\{\s*(?P<below>[+-]?[\d,]+(?:\.\d+)?)\s*\}|(?P<below1>\d))"
)
_MIXED = re.compile(r"(?P<sign>[+-]?)\s*(?P<whole>\d+)\s+(?P<above>\d+)\s*/\s*(?P<below>\d+)")
_REPEATING = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<whole>\d*)\.(?P<fixed>\d*)\s*"
    r"(?:\\(?:overline|bar|dot)\s*(?:\{\s*(?P<a>\d+)\s*\}|(?P<b>\d))|\((?P<c>\d+)\))"
)
# 0.333…: one digit at least three times, and dots.
_DOTTED = re.compile(r"(?P<start>[+-]?\s*\d*\.\d*?)(?P<digit>\d)(?P=digit){2,}\s*(?:\.\.\.|…|\\l?dots)")
_CURRENCY = re.compile(r"^([+-]?)\s*(?:US\s?)?(?:\$|€|£|¥|\\pounds|\\euro)\s*|\s*(?:\$|€|£|¥|\\pounds|\\euro)$")
_TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|mathrm|mathbf|mathit|mathsf|operatorname\*?|rm|bf)"
_TEXT_GROUP = re.compile(_TEXT_COMMAND + r"\s*\{([^{}]*)\}")
_EMPTY_TEXT = re.compile(_TEXT_COMMAND + r"\s*\{[\s.,;!~]*\}")
_TEXT_UNIT = re.compile(
    r"\s*" + _TEXT_COMMAND + r"\s*\{(?P<word>[^{}]*)\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?\s*[.,]?$"
)
_WORD_UNIT = re.compile(
    r"(?:(?<=[\d}\)%])\s*|\s)(?P<words>[a-zA-Z]{2,}(?:[ /-][a-zA-Z]+){0,5})\.?"
    r"(?:\s*\^\s*(?:\{\s*[23]\s*\}|[23]))?$"
)
_LETTER_UNIT = re.compile(r"(?<=\d)\s+(?:[kcmµ]?[mgsLlJNWVAK]|h|Hz)(?:\s*/\s*[hs])?(?:\s*\^\s*\{?[23]\}?)?$")
_PERCENT = re.compile(
    r"\s*(?:%|\bpercent(?:age)?(?:\s+points?)?|\bper\s+cent|"
    + _TEXT_COMMAND
    + r"\s*\{\s*(?:percent|per cent|%)\s*\})\s*$"
)
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALED = re.compile(
    r"^(?P<number>.*\d)\s*(?P<scale>hundred|thousand|million|billion|trillion|dozen)(?P<words>(?:\s+[a-zA-Z]{3,}){0,4})$",
    re.I,
)


@dataclass(frozen=True)
class Number:
    """A number read from an answer.

    value: exact. decimal: written with a point or a power of ten, so it may be rounded. digits: significant digits
    written, 0 for fractions. percent: followed by a percent sign (`value` is then the number before the sign).
    irrational: `value` is an approximation to 60 digits.
    """

    value: Fraction
    decimal: bool = False
    digits: int = 0
    percent: bool = False
    scientific: bool = False
    irrational: bool = False


def plain_text(text: str) -> str:
    r"""`\text{…}` and its relatives replaced by what they hold."""
    for _ in range(4):
        text, changed = _TEXT_GROUP.subn(r" \1 ", text)
        if not changed:
            break
    return " ".join(text.split())


def drop_units(text: str) -> str:
    r"""`text` without currency signs and without units at the end: `\text{ cm}^2`, `\mathrm{m/s}`, ` apples`."""
    text = _EMPTY_TEXT.sub("", _CURRENCY.sub(r"\1", text)).strip()
    for _ in range(3):
        before = text
        if match := _TEXT_UNIT.search(text):
            word = match["word"].strip().lower()
            unit = word not in ("i", "e") and not (NOT_UNITS - FUNCTIONS) & set(re.findall("[a-z]+", word))
        elif match := _WORD_UNIT.search(text):
            unit = _is_unit(match["words"], attached=match.start() == match.start("words"))
        if match and match.start() > 0 and unit:
            text = text[: match.start()].rstrip()
        if text == before:
            break
    return _CURRENCY.sub(r"\1", text).strip()


def _is_unit(words: str, *, attached: bool) -> bool:
    """Whether the words after a number only name what is counted or measured."""
    parts = re.findall("[a-zA-Z]+", words)
    if parts == ["times"] and not attached:  # how often, not a product that lacks its second factor
        return True
    if len(parts) == 1 and parts[0] in SHORT_UNITS:
        return True
    if NOT_UNITS & {part.lower() for part in parts}:
        return False
    first = parts[0]
    if first in SHORT_UNITS:
        return True
    if attached or len(first) == 2:
        return False
    return len(first) > 3 or not ALGEBRAIC.issuperset(first.lower())


def parse_number(text: str, *, letter_units: bool = False) -> Number | None:
    """The number that `text`, already tidied, stands for, units and currency dropped; None if it is anything else.

    letter_units: also drop a unit of one letter after a blank (`5 m`), which elsewhere is a variable.
    """
    if not text or len(text) > 4096:
        return None
    percent = False
    if match := _PERCENT.search(text):
        text, percent = text[: match.start()], True
    number = _parse_bare(text)
    if number is None:
        text = drop_units(plain_text(text) if _TEXT_GROUP.match(text) else text)
        if match := _PERCENT.search(text):
            text, percent = text[: match.start()], True
        number = _parse_bare(text)
    if number is None and letter_units and (match := _LETTER_UNIT.search(text)):
        number = _parse_bare(text[: match.start()])
    if number is None and (match := _SCALED.match(plain_text(text))) and not NOT_UNITS & set(match["words"].split()):
        bare = _parse_bare(match["number"].strip())
        if bare is not None:
            number = Number(bare.value * _SCALES[match["scale"].lower()], bare.decimal, bare.digits)
    if number is None or not percent:
        return number
    return Number(number.value, number.decimal, number.digits, True, number.scientific)


def _sign(text: str) -> int:
    return -1 if text == "-" else 1


def _parse_bare(text: str) -> Number | None:
    text = text.strip()
    while len(text) > 2 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1].strip()
    if text[:1] == "(" and text[-1:] == ")" and text.count("(") == 1 and "," not in text:
        text = text[1:-1].strip()
    if not text or not (text[-1].isdigit() or text[-1] in ".})…" or text.endswith("dots")):
        return None
    if match := _NUMBER.fullmatch(text):
        return _decimal(match)
    if match := _RATIO.fullmatch(text):
        return _ratio(_sign(match["sign"]) * _sign(match["sign2"]), 0, match["above"], match["below"])
    if match := _FRAC.fullmatch(text):
        above = (match["above"] or match["above1"]).replace(",", "")
        below = (match["below"] or match["below1"]).replace(",", "")
        if match["whole"] and (above[0] in "+-" or below[0] in "+-"):
            return None
        return _ratio(_sign(match["sign"]), int(match["whole"] or 0), above, below)
    if match := _MIXED.fullmatch(text):
        return _ratio(_sign(match["sign"]), int(match["whole"]), match["above"], match["below"])
    if match := _POWER_OF_TEN.fullmatch(text):
        exponent = int(match["braced"] or match["bare"])
        if abs(exponent) <= MAX_EXPONENT:
            return Number(_sign(match["sign"]) * Fraction(10) ** exponent)
        return None
    if match := _DOTTED.fullmatch(text):
        text = f"{match['start']}({match['digit']})"
    if match := _REPEATING.fullmatch(text):
        cycle = match["a"] or match["b"] or match["c"]
        fixed, whole = match["fixed"], match["whole"]
        nines = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
        return Number(_sign(match["sign"]) * (Fraction(int(whole + fixed or 0), 10 ** len(fixed)) + nines))
    return None


def _decimal(match: re.Match[str]) -> Number | None:
    digits = re.sub(r"[,\s]", "", match["digits"])
    whole, _, fraction = digits.partition(".")
    if len(digits) > 4200:
        return None
    exponent = match["exponent"]
    shift = int(exponent) if exponent else 0
    if abs(shift) > MAX_EXPONENT:
        return None
    value = Fraction(int(whole + fraction or "0"), 10 ** len(fraction)) * Fraction(10) ** shift
    significant = len((whole + fraction).lstrip("0")) or 1
    return Number(
        _sign(match["sign"]) * value,
        decimal=bool(fraction) or exponent is not None,
        digits=significant,
        scientific=exponent is not None,
    )


def _ratio(sign: int, whole: int, above: str, below: str) -> Number | None:
    numerator, denominator = Fraction(above), Fraction(below)
    if denominator == 0:
        return None
    return Number(sign * (whole + numerator / denominator))


def _is_rounding(written: Number, exact: Fraction) -> bool:
    """Whether `written`, a decimal of ROUNDED_DIGITS or more digits, is `exact` rounded to its last place."""
    if not written.decimal or written.digits < ROUNDED_DIGITS or exact == 0:
        return False
    unit = Fraction(1)
    scale = abs(written.value)
    while scale >= 10:
        scale /= 10
        unit *= 10
    while 0 < scale < 1:
        scale *= 10
        unit /= 10
    return abs(written.value - exact) <= unit / Fraction(10) ** (written.digits - 1) / 2


def terminates(value: Fraction) -> bool:
    """Whether the value has a finite decimal expansion."""
    rest = value.denominator
    if rest.bit_length() > 20_000:
        return False
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def close(gold: Number, answer: Number, gold_value: Fraction, answer_value: Fraction) -> bool:
    """Whether two values, of which at least one was written as a decimal, stand for the same number."""
    if gold_value == answer_value:
        return True
    if not (gold.decimal or answer.decimal):
        return False
    difference = abs(gold_value - answer_value)
    largest = max(abs(gold_value), abs(answer_value))
    if not gold.decimal:
        if (gold.irrational or not terminates(gold_value)) and answer.digits < MIN_DIGITS:
            return False
        # An integer that was asked for is not met by a neighbour, however large it is.
        if gold_value.denominator == 1 and not answer.scientific and difference > Fraction(1, 1000):
            return False
    if difference <= RELATIVE_TOLERANCE * largest:
        return True
    return _is_rounding(answer, gold_value) or (not answer.decimal and _is_rounding(gold, answer_value))


def same_number(gold: Number, answer: Number) -> bool | None:
    """True if equal exactly, False if different, None if equal within the tolerance for decimals.

    A percent sign in the gold accepts 28%, 0.28 and 28. Without one, 28% is 0.28, or 28 where the gold is over 1 (then
    the sign is a unit; at or below 1 that reading would accept a value wrong by a factor of 100).
    """
    pairs = [(_value(gold), _value(answer))]
    if gold.percent != answer.percent and (gold.percent or abs(gold.value) > 1):
        pairs.append((gold.value, answer.value))
    if any(g == a for g, a in pairs):
        return True
    return None if any(close(gold, answer, g, a) for g, a in pairs) else False


def _value(number: Number) -> Fraction:
    return number.value / 100 if number.percent else number.value

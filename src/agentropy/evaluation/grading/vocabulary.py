r"""Words that mean something in answers: functions, Greek letters, units, and what a word after a number may not be."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The words of a text, split at blanks."""
    return frozenset(text.split())


FUNCTIONS = words(
    "sin cos tan cot sec csc arcsin arccos arctan arccot asin acos atan sinh cosh tanh coth ln log lg exp sqrt abs "
    "max min gcd lcm floor ceil sign"
)
WORD_SYMBOLS = {"pi": "pi", "infinity": "inf", "oo": "inf", "infty": "inf", "inf": "inf"}
GREEK = words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar ell partial nabla"
)
DECORATIONS = words(
    "bar overline hat widehat vec overrightarrow tilde dot ddot mathbf mathrm mathit mathcal mathbb underline"
)
TEXTS = words("text textbf textit textrm mbox mathrm operatorname textnormal textsf")
# Commands that don't change the value of what follows.
IGNORED = words("angle triangle measuredangle displaystyle")

# Two and three letters are a unit only if they are one of these: `4ab` is a product.
SHORT_UNITS = words(
    "cm mm km kg mg ml mL kL dL ft in yd mi hr hrs lb lbs oz Hz kHz MHz kW MW mV kV kJ MJ nm min sec "
    "mph kph mol rad deg day cup men cwt ton pts pt cts USD EUR GBP AUD RMB ms ns us am pm th st nd rd"
)
# Three letters of these alone are a product, not a unit.
ALGEBRAIC = frozenset("abckmnpqrstxyz")
# Words after a number that say more than a unit does.
NOT_UNITS = words(
    "and or plus minus times over divided by million billion trillion thousand hundred dozen half halves to through is "
    "not if but then mod modulo pi sqrt sin cos tan log ln exp where for with any all real positive negative than more "
    "less no arcsin arccos arctan sinh cosh tanh max min gcd lcm floor ceil alpha beta gamma delta theta lambda omega "
    "sigma infinity infty base thirds quarters fourths fifths sixths eighths tenths hundredths thousandths millionths "
    "squared cubed factorial choose"
)
# Words that make a text an expression rather than prose.
MATH_WORDS = FUNCTIONS | GREEK | {"infinity"}

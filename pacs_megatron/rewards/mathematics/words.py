"""Words of answers: which bare letters are words, which words name nothing, numbers, units."""

import re
from itertools import pairwise


def word_set(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


FUNCTIONS = word_set(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot asin acos atan log ln "
    "exp sqrt gcd lcm max min binom frac det dim deg mod lim sup inf Re Im arg sgn"
)
"""Names that read as commands with or without a backslash"""
GREEK = word_set(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega"
)
SHORT_WORDS = word_set(
    "or and no is of if as not the yes odd all any per day days men cup cups mph kph kmh kmph km "
    "cm mm nm kg ft lb lbs yd oz mL ml kJ kW kHz MHz Hz pm am for one two six ten are has DNE rad "
    "deg min sec hr hrs usd USD EUR GBP yen mol mod but nor its was we so then on at by to mi "
    "inches sq cc gal pts bar mpg rpm kPa Pa even none true false"
)
"""Runs of two or three letters that are words, not products of variables"""
_RUN = re.compile(r'"[^"]*"|\\[A-Za-z]+\s?|[A-Za-z]+(?:\.[A-Za-z]\.?)*')
_VOWELS = frozenset("aeiouyAEIOUY")


def bare_words(text: str) -> str:
    """Quotes the words that stand without a macro, and gives functions their backslash."""
    return _RUN.sub(_bare_word, text)


def _bare_word(match: "re.Match[str]") -> str:
    run = match[0]
    if run[0] in '"\\' or len(run) == 1:
        return run
    if run in ("infinity", "inf", "Infinity"):
        return "∞"
    if run in FUNCTIONS or run in GREEK:
        before = match.string[: match.start()].rstrip()
        is_unit = run in ("min", "sec", "deg") and before[-1:].isdigit()
        return f'"{run}"' if is_unit else f"\\{run} "
    if run == "pi":
        return "π"
    if re.fullmatch(r"[ap]\.m\.?", run):
        return f'"{run[0]}m"'
    if is_word(run):
        return f'"{run}"'
    for name in sorted(FUNCTIONS | {"pi"}, key=len, reverse=True):  # sinx, xsin
        if len(name) > 2 and run.startswith(name) and len(run) == len(name) + 1:
            return f"\\{name} {run[len(name) :]}"
    return run


def is_word(run: str) -> bool:
    """Whether a run of letters is a word: known, or long, with a vowel, and no row of the
    alphabet.
    """
    if run in SHORT_WORDS or run in ("No", "Or", "NO", "OR", "YES", "AND"):
        return True
    if len(run) > 2 and run.istitle() and run.lower() in SHORT_WORDS:
        return True
    if len(run) < 4 or not _VOWELS.intersection(run):
        return False
    is_row = all(ord(b) - ord(a) == 1 for a, b in pairwise(run))
    return not is_row and not run.isupper()

"""Units of measurement: spellings, and factors between units of one kind."""

import re
from fractions import Fraction
from typing import NamedTuple

from pacs_megatron.rewards.mathematics.words import word_set

PERCENT = frozenset(("percent", "per cent", "percentage", "pct"))
DEGREES = frozenset(("degree", "degrees", "deg"))
MULTIPLIERS = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
    "k": 1000,
}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
_MINUTE = 60
_HOUR = 3600
_DAY = 86_400


class _Kind(NamedTuple):
    """Units of one kind, each with its factor to the first one, and its spellings."""

    name: str
    units: dict[str, tuple[Fraction | int, str]]


_KINDS = (
    _Kind(
        "length",
        {
            "m": (1, "m meter metre"),
            "mm": (Fraction(1, 1000), "mm millimeter millimetre"),
            "cm": (Fraction(1, 100), "cm centimeter centimetre"),
            "dm": (Fraction(1, 10), "dm decimeter decimetre"),
            "km": (1000, "km kilometer kilometre"),
            "nm": (Fraction(1, 10**9), "nm nanometer nanometre"),
            "in": (Fraction(254, 10_000), "in inch inche"),
            "ft": (Fraction(3048, 10_000), "ft foot feet"),
            "yd": (Fraction(9144, 10_000), "yd yard"),
            "mi": (Fraction(1_609_344, 1000), "mi mile"),
        },
    ),
    _Kind(
        "time",
        {
            "s": (1, "s sec second"),
            "min": (_MINUTE, "min minute"),
            "h": (_HOUR, "h hr hour"),
            "day": (_DAY, "day"),
            "week": (7 * _DAY, "week wk"),
        },
    ),
    _Kind("year", {"year": (1, "year yr"), "month": (Fraction(1, 12), "month")}),
    _Kind(
        "mass",
        {
            "g": (1, "g gram gramme"),
            "mg": (Fraction(1, 1000), "mg milligram"),
            "kg": (1000, "kg kilogram kilo"),
            "t": (10**6, "tonne"),
        },
    ),
    _Kind("weight", {"lb": (16, "lb lbs pound"), "oz": (1, "oz ounce")}),
    _Kind(
        "money",
        {"dollar": (1, "dollar usd buck $"), "cent": (Fraction(1, 100), "cent ¢")},
    ),
    _Kind("euros", {"euro": (1, "euro eur €")}),
    _Kind("pounds sterling", {"pound sterling": (1, "gbp £")}),
    _Kind("yen", {"yen": (1, "yen jpy ¥")}),
    _Kind("rupees", {"rupee": (1, "rupee rs inr ₹")}),
    _Kind(
        "volume",
        {"L": (1000, "l L liter litre"), "mL": (1, "ml mL milliliter millilitre cc")},
    ),
    _Kind("gallons", {"gal": (8, "gal gallon"), "pt": (1, "pt pint"), "qt": (2, "qt quart")}),
    _Kind("angle", {"degree": (1, "degree deg °")}),
    _Kind("radians", {"rad": (1, "rad radian")}),
    _Kind("frequency", {"Hz": (1, "hz hertz"), "kHz": (1000, "khz"), "MHz": (10**6, "mhz")}),
    _Kind("energy", {"J": (1, "j joule"), "kJ": (1000, "kj kilojoule")}),
    _Kind("power", {"W": (1, "w watt"), "kW": (1000, "kw kilowatt")}),
    _Kind("force", {"N": (1, "n newton"), "kN": (1000, "kn")}),
    _Kind("voltage", {"V": (1, "v volt")}),
    _Kind("resistance", {"ohm": (1, r"ohm \Omega \omega")}),
    _Kind("current", {"A": (1, "ampere amp")}),
    _Kind("charge", {"C": (1, "coulomb")}),
    _Kind("pressure", {"Pa": (1, "pa pascal"), "kPa": (1000, "kpa")}),
    _Kind("amount", {"mol": (1, "mol mole")}),
)
_SHORT_FORMS = {
    "mph": "mile/hour",
    "kph": "km/hour",
    "kmh": "km/hour",
    "kmph": "km/hour",
    "mpg": "mile/gallon",
    "pound sterling": "gbp",
    "pounds sterling": "gbp",
}
"""Units in one word => the units that they are made of"""
_SHORT_FORM = re.compile(rf"\b(?:{'|'.join(_SHORT_FORMS)})\b", re.IGNORECASE)
_BY_SPELLING: dict[str, tuple[str, Fraction]] = {}
for _kind in _KINDS:
    for _factor, _spellings in _kind.units.values():
        for _spelling in _spellings.split():
            _BY_SPELLING[_spelling] = (_kind.name, Fraction(_factor))

BARE_UNITS = re.compile(
    r"(?<=[\d)}])\s?(?P<first>[kcm]m|k?g|m|s|L|mL|ft|mi)(?P<power>(?:\^\{?[23]\}?)?)\s?/\s?"
    r"(?P<second>[kcm]m|k?g|m|s|h|hr|L|mL|min)(?=(?:\^\{?[23]\}?)?\s*$)"
)
"""`m/s` without a macro: two units and a slash behind a number"""
BARE_LETTERS = re.compile(r"(?<=[\d)}])\s?(?P<unit>(?:[msgLJNWV]|\\Omega)(?:\^\{?[23]\}?)?)$")
"""One letter behind a number: a unit only if the gold answer has no variable"""
GENERIC = word_set(
    "way method possibility arrangement solution value number time unit point item object case "
    "choice combination permutation pair outcome people person student element member digit "
    "answer total one"
)
"""Words that count anything"""
_STOPS = word_set(
    "or and not no by as so at least most more less fewer than if when but except maybe to "
    "between through base from over under above below before after up plus minus times divided "
    "nor without either about approximately mod modulo half twice double where greater "
    "remainder cases undefined wrong false"
)
"""Words that change what a number means"""


class Unit(NamedTuple):
    """A unit: its words, and if all are known, its kind and its factor to the first unit of it."""

    words: tuple[str, ...]
    kind: tuple[tuple[str, int], ...] | None
    factor: Fraction


def read_unit(text: str) -> Unit | None:
    """The unit of `"cm"^2`, `"m"/"s"`, `"square meters"`; None if a word changes the number."""
    words: list[str] = []
    kinds: dict[str, int] = {}
    factor = Fraction(1)
    is_known = True
    sign = 1
    pending = 1
    text = _SHORT_FORM.sub(lambda match: _SHORT_FORMS[match[0].lower()], text.replace('"', " "))
    for part in _PARTS.finditer(text):
        word = part["word"]
        if word is None:
            sign = -1
            continue
        if word.lower() in _STOPS:
            return None
        if word.lower() == "per":
            sign = -1
            continue
        if word.lower() in ("of", "a", "an", "the", "in") and (words or word.lower() != "in"):
            # "5 of them" ends the unit.
            if words:
                break
            continue
        if word.lower() in _POWERS:
            if word.lower().endswith("ed") and words:
                power = _POWERS[word.lower()] - 1
                last = _known(words[-1])
                if last is not None:
                    kinds[last[0]] = kinds.get(last[0], 0) + sign * power
                    factor *= last[1] ** (sign * power)
            else:
                pending = _POWERS[word.lower()]
            continue
        power = int(part["power"] or 1) * pending * sign
        pending = 1
        words.append(_stem(word))
        known = _known(word)
        if known is None:
            is_known = False
            continue
        kinds[known[0]] = kinds.get(known[0], 0) + power
        factor *= known[1] ** power
    if not words:
        return None
    kind = tuple(sorted(kinds.items())) if is_known else None
    return Unit(tuple(words), kind, factor)


_PARTS = re.compile(
    r"(?P<word>\\?[^\W\d_]+(?:['.-][^\W\d_]+)*|[$€£¥₹°¢])(?:\s?\^\s?\{?(?P<power>-?\d)\}?)?|/"
)


def _known(word: str) -> tuple[str, Fraction] | None:
    for spelling in (word, word.lower(), _stem(word)):
        if spelling in _BY_SPELLING:
            return _BY_SPELLING[spelling]
    return None


def _stem(word: str) -> str:
    """The singular, in small letters."""
    small = word.lower().rstrip(".")
    if small.endswith("ies") and len(small) > 4:
        return small[:-3] + "y"
    if len(small) > 2 and small.endswith("s") and not small.endswith("ss"):
        return small[:-1]
    return small


def factor_between(gold: Unit | None, answer: Unit | None) -> Fraction | None:
    """The factor that turns the answer's number into the gold's unit; None for another kind."""
    if gold is None or answer is None:
        return Fraction(1)
    if gold.kind is not None and answer.kind is not None:
        return answer.factor / gold.factor if gold.kind == answer.kind else None
    if gold.words == answer.words:
        return Fraction(1)
    if gold.kind is None and answer.kind is None:
        is_generic = bool(GENERIC.intersection(gold.words) or GENERIC.intersection(answer.words))
        shares = bool(set(gold.words) & set(answer.words))
        return Fraction(1) if is_generic or shares else None
    return None

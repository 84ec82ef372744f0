"""Reads the plain form of an answer (spelling.py) as one of the kinds of answers.py.

`READERS` is the table: the first reader that recognises the text decides.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache

from pacs_megatron.rewards.mathematics import reals
from pacs_megatron.rewards.mathematics.answers import (
    Answer,
    Clock,
    Equation,
    Inequality,
    Items,
    Matrix,
    Named,
    Numeral,
    Quantity,
    Ratio,
    Reals,
    Residue,
    Words,
)
from pacs_megatron.rewards.mathematics.expression import Node, UnreadableError, parse, variables
from pacs_megatron.rewards.mathematics.spelling import CELL, ROW, SET_CLOSE, SET_OPEN
from pacs_megatron.rewards.mathematics.units import (
    BARE_LETTERS,
    DEGREES,
    MULTIPLIERS,
    PERCENT,
    Unit,
    read_unit,
)
from pacs_megatron.rewards.mathematics.value import equal
from pacs_megatron.rewards.mathematics.word_answers import MONTHS, NUMBER_WORDS, read_words

_OPENING = "([{⟨⟦⌊⌈" + SET_OPEN
_CLOSING = ")]}⟩⟧⌋⌉" + SET_CLOSE
_MAX_ITEMS = 60
_MAX_NESTING = 6


class ContradictionError(UnreadableError):
    """A chain whose sides differ: it is never right."""


@lru_cache(maxsize=4096)
def readings(text: str, bare_units: bool, decimal_comma: bool = False) -> tuple[Answer, ...]:
    """All meanings of the text: with `1,234` as one number or as a list, and so on.

    Args:
        text: in plain form.
        bare_units: whether a letter behind a number is a unit (the gold answer has no variable).
        decimal_comma: whether `3,7` may be a decimal (the gold answer is one), too.
    """
    found: list[Answer] = []
    for variant in _variants(text, decimal_comma):
        try:
            answer = _Reader(bare_units).read(variant)
        except ContradictionError:
            return ()
        except (UnreadableError, RecursionError):
            continue
        if answer not in found:
            found.append(answer)
    return tuple(found)


# ---------------------------------------------------------------------------------------- variants
_COMMAS = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+)(?![\d,])")
_INDIAN = re.compile(r"(?<![\d.,])([1-9]\d?)((?:,\d\d)+,\d{3})(?![\d,])")
_POINTS = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:\.\d{3}){2,})(?![\d.])")
_POINTS_AND_COMMA = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:\.\d{3})+),(\d+)(?![\d.,])")
_DECIMAL_COMMA = re.compile(r"^([+-]?[$€£¥₹]?\d+),(\d{1,2}|\d{4,})(?![\d,])(?=\D*$)")
_TINY = re.compile(r"(?<![\w.])(\d+)e-(\d)(?![\d.])")
_LEAD = re.compile(
    r'^"(?:(?:hence|thus|so|therefore|then|we|get|have|the|final|correct|answer|answers|result|value'
    r"|solution|solutions|is|are|equals|equal|to|our|required|option|total|number|approximately|about"
    r"|point|points|pair|pairs|ordered|interval|set|coordinates|located|at|given|by"
    r"|roughly|exactly|only|ans|it|that)\b\s*)+\"\s?[:=]?",
    re.IGNORECASE,
)
_TAIL = re.compile(r'"(?:because|since)\b[^"]*".*$')
_SENTENCE = re.compile(
    r'^"(?:the|so|thus|hence|therefore)\b[^"]*"[^"]*"(?:is|are|equals|is equal to)"', re.IGNORECASE
)
_CONDITION = re.compile(
    r'[,;]?\s*\(?(?:"(?:for all|for any|for every|where|for|with|for some)[^"]*"[^"]*'
    r'(?:"(?:is |being )?(?:an |any )?integers?")?'
    r"|[,;(]\s*[a-z]∈[ℤℕℚℝ](?:\^\{?\+\}?)?)\)?$"
)
"""`for all x`, `k ∈ ℤ` behind an answer"""
_POINT_NAME = re.compile(r"[A-Z]'?(?=\([^()]+,[^()]+\)$)")
"""`A(1,2)`"""
_WORD_AND = re.compile(r'"([^"]*\S) (and|or)"')
_AND_WORD = re.compile(r'"(and|or) ([^"]+)"')
_APPROXIMATELY = re.compile(r"^≈")


def without_sentence(text: str) -> str:
    """A plain form without `the answer is` and its like in front."""
    return _LEAD.sub("", _SENTENCE.sub("", text))


def _variants(text: str, decimal_comma: bool) -> Iterator[str]:
    """Spellings of the same text; the likeliest first."""
    text = without_sentence(text)
    if not re.fullmatch(r'"[^"]*"', text):
        text = _WORD_AND.sub(r'"\1""\2"', text)
        text = _AND_WORD.sub(r'"\1""\2"', text)
    text = _CONDITION.sub("", text) or text
    cut = _TAIL.sub("", text)
    text = _APPROXIMATELY.sub("", cut or text).lstrip(" ,;:").rstrip(" .,;:")
    without = text
    for pattern in (_COMMAS, _INDIAN, _POINTS):
        without = pattern.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), without)
    without = _POINTS_AND_COMMA.sub(
        lambda match: match[1] + match[2].replace(".", "") + "." + match[3], without
    )
    yield without
    if without != text:
        yield text
    with_point = _DECIMAL_COMMA.sub(r"\1.\2", text)
    if with_point != text and (decimal_comma or text.endswith(",00")):
        yield with_point
    point = _POINT_NAME.match(text)
    if point is not None:
        yield text[point.end() :]
    scientific = _TINY.sub(r"\1×10^{-\2}", text)
    if scientific != text:
        yield scientific


# ------------------------------------------------------------------------------------------- splits
def split(text: str, separators: "re.Pattern[str]") -> tuple[list[str], list[str]]:
    """The parts of the text outside of brackets, and the separators between them."""
    parts = []
    found = []
    depth = 0
    start = 0
    position = 0
    while position < len(text):
        character = text[position]
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth = max(0, depth - 1)
        match = separators.match(text, position) if depth == 0 else None
        if match is not None and match.end() > position:
            parts.append(text[start:position].strip())
            found.append(match[0])
            position = match.end()
            start = position
            continue
        if character == '"':
            end = text.find('"', position + 1)
            position = end if end > 0 else len(text)
        position += 1
    parts.append(text[start:].strip())
    return parts, found


_BETWEEN_ITEMS = re.compile(r'[,;]\s*"(?:and|or)\b\s*"?|[,;]|"(?:and|or)"')
_RELATIONS = re.compile(r"[=<>≤≥≠≈∈]|≡")
_SETS = re.compile(r"[∪∖∩]|\\(?:cup|cap)|\"(?:union|intersect)\"")
_COLON = re.compile(r':|"to"')
_BAR = re.compile(r"[|:]")
_COMMA = re.compile(r"[,;]")
_CELLS = re.compile(CELL)
_ROWS = re.compile(ROW)

# ------------------------------------------------------------------------------------------- names
_INDEX = r"(?:_(?:\{[^{}]*\}|\w)|'|_\{[^{}]*\{[^{}]*\}[^{}]*\})*"
_NAME = re.compile(
    r"\s*(?:"
    rf"(?:\\[A-Za-z]+|[A-Za-z]){_INDEX}"  # x, x_1
    r"(?:\^\{-1\})?\s?(?:\([^()]*\)|\[[^\[\]=]*\])?"  # f(2), E[X]
    r'|"[^"]*"(?:\([^()]*\))?(?:[A-Za-z]{1,4})?'  # "Area"
    r"|\\(?:angle|triangle|square|overline|vec|hat|bar|widehat|measuredangle)\s?\{?[A-Za-z]{1,4}\}?"
    r"|m\s?\\angle\s?\{?[A-Za-z]{1,4}\}?"
    r"|[A-Z]{2,4}"  # a segment
    rf"|\|{{1,2}}\\?[A-Za-z]{{1,4}}{_INDEX}\|{{1,2}}"
    rf"|\\\|\s?(?:\\vec\s?)?\{{?[A-Za-z]{{1,4}}\}}?{_INDEX}\\\|"
    r"|\\(?:dim|det|deg|arg|max|min|sup|inf)\s?\(?[A-Za-z]{0,4}\)?"
    r")\s*"
)
_PLAIN_NAME = re.compile(rf"\s*(?:\\[A-Za-z]+|[A-Za-z]){_INDEX}\s*")
_NOT_NAMES = frozenset(("e", "i", "π", "\\frac", "\\sqrt", "\\pi"))


_DENIAL = re.compile(
    r'"[^"]*\b(?:not|no|never|isn|cannot|false|wrong|than|least|most|or|unless|if|except)\b', re.I
)
_ABSOLUTE = re.compile(r"\|(\\?[A-Za-z])\|")


def is_name(text: str) -> bool:
    """Whether a side of an equation names a quantity: `x`, `f(2)`, `AB`, `"Area"`."""
    if not text or _DENIAL.search(text):
        return False
    if text.strip() in _NOT_NAMES or re.match(r"\\(?:frac|sqrt|binom)\b", text):
        return False
    return _NAME.fullmatch(text) is not None


def _is_plain_name(text: str) -> bool:
    """Whether a text is one variable."""
    return _PLAIN_NAME.fullmatch(text) is not None and text.strip() not in _NOT_NAMES


def _key(name: str) -> str:
    """A name without spaces, quotes and braces."""
    return re.sub(r'[\s"{}]', "", name)


# ------------------------------------------------------------------------------------------ reader
class _Reader:
    """Reads one variant of a text."""

    def __init__(self, bare_units: bool) -> None:
        self._bare_units = bare_units
        self._depth = 0

    def read(self, text: str) -> Answer:
        """The answer. Raises UnreadableError."""
        text = text.strip()
        if not text:
            raise UnreadableError("empty")
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise UnreadableError("too deep")
        try:
            for reader in READERS:
                answer = reader(self, text)
                if answer is not None:
                    return answer
        finally:
            self._depth -= 1
        raise UnreadableError("no kind of answer")

    # ------------------------------------------------------------------------------------ readers
    def clock(self, text: str) -> Answer | None:
        """`7:30`, `12:00 p.m.`"""
        match = _CLOCK.fullmatch(text)
        if match is None:
            return None
        hour = int(match["hour"])
        half = re.sub(r"[^a-z]", "", match["half"].lower()) if match["half"] else ""
        if match["minute"] is None:
            if half not in ("am", "pm", "oclock"):
                return None
            minute = 0
        else:
            minute = int(match["minute"])
        half = {"noon": "pm", "midnight": "am", "oclock": ""}.get(half, half)
        return Clock(hour, minute, half) if hour <= 24 else None

    def lists(self, text: str) -> Answer | None:
        """Parts between commas, `and`, `or`."""
        parts, separators = split(text, _BETWEEN_ITEMS)
        if len(parts) < 2:
            return None
        words = read_words(text)
        if words is not None:
            return words
        items = [part for part in parts if part]
        if len(items) == 1:
            return self.read(items[0])
        if len(items) > _MAX_ITEMS:
            raise UnreadableError("too many items")
        is_or = any("or" in separator for separator in separators)
        has_commas = all(separator.strip() in ",;" for separator in separators)
        read_items = self._named_items(items)
        return _compound(read_items) or _list_of(read_items, is_or=is_or, has_commas=has_commas)

    def _named_items(self, texts: list[str]) -> list[Answer]:
        """The items; in `n=2,3,4` the name belongs to all. `(1,2)` with ± has two of them."""
        items: list[Answer] = []
        for text in texts:
            item = self.read(text)
            if isinstance(item, Items) and item.kind == "list":
                items.extend(item.items)
            else:
                items.append(item)
        first = items[0]
        if isinstance(first, Named) and not any(isinstance(item, Named) for item in items[1:]):
            is_quantity = all(isinstance(item, Quantity | Items) for item in items[1:])
            if is_quantity:
                items = [first, *(Named(first.names, (item,)) for item in items[1:])]
        return items

    def two_signs(self, text: str) -> Answer | None:
        """`±3`: both signs, the same at every `±`."""
        if ("±" not in text and "∓" not in text) or text[0] == SET_OPEN:
            return None
        upper = text.replace("±", "+").replace("∓", "-")
        lower = text.replace("±", "-").replace("∓", "+")
        items = [self.read(re.sub(r"(^|[=(,{])\+", r"\1", upper)), self.read(lower)]
        return _list_of(items)

    def residue(self, text: str) -> Answer | None:
        r"""`10 \pmod{17}`, with or without `x ≡`."""
        match = _MODULUS.search(text)
        if match is None:
            return None
        modulus = parse(match["modulus"])
        rest = text[: match.start()].rstrip(" ,(")
        parts, _ = split(rest, re.compile("[≡=]"))
        return Residue(self.read(parts[-1]), modulus)

    def relation(self, text: str) -> Answer | None:
        """Chains of `=`, `<`, `∈`, ..."""
        sides, signs = split(text, _RELATIONS)
        if not signs:
            return None
        if set(signs) <= {"=", "≈", "≡"}:
            return self._equalities(sides, signs)
        if signs == ["∈"] or signs == ["=", "∈"]:
            return Named((_key(sides[0]),), (self.read(sides[-1]),))
        if set(signs) <= set("<>≤≥≠"):
            return self._inequalities(sides, signs)
        raise UnreadableError("mixed relations")

    def _equalities(self, sides: list[str], signs: list[str]) -> Answer:
        """An assignment, a computation, or an equation."""
        if "≈" in signs:
            # What follows is rounded.
            first = signs.index("≈")
            if not (first == 0 and is_name(sides[0])):
                return self.read("=".join(sides[: first + 1]))
        if not all(sides):
            raise UnreadableError("an empty side")

        names = []
        while len(sides) > 1 and (is_name(sides[0]) or self._are_names(sides[0])):
            names.append(_key(sides.pop(0)))
        if len(sides) > 1 and _is_plain_name(sides[-1]) and _is_constant(sides[0]):
            names.append(_key(sides.pop()))
        values = self._values(sides)
        if len(values) < len(sides):
            # The first side is a text that only names the value, such as `\mathbb{E}[X^2]`.
            return Named((_key(sides[0]),), tuple(values))
        if len(values) == 1:
            return Named(tuple(names), tuple(values))
        if all(_same_value(values[0], value) for value in values[1:]):
            return Named(tuple(names), tuple(values))

        nodes = [value.node for value in values if isinstance(value, Quantity)]
        num_constant = sum(not variables(node) for node in nodes)
        if num_constant > 1 or len(nodes) < 2:
            constants = [node for node in nodes if not variables(node)]
            if len(nodes) == len(values) and all(
                equal(constants[0], node) for node in constants[1:]
            ):
                return Named(tuple(names), tuple(values[-1:]))
            raise ContradictionError("the sides differ")
        if len(nodes) == len(values) == 2 and not names:
            return Equation(nodes[0], nodes[1])
        raise ContradictionError("the sides differ")

    def _are_names(self, text: str) -> bool:
        """Whether a side is a tuple or a ratio of names: `(x,y)`, `a:b`."""
        if re.fullmatch(r"[A-Za-z]{1,4}(?:[:/][A-Za-z]{1,4})+", text):
            return ":" in text
        if text[:1] + text[-1:] not in ("()", "[]", SET_OPEN + SET_CLOSE, "⟨⟩"):
            return False
        parts, _ = split(text[1:-1], _COMMA)
        return all(_is_plain_name(part) for part in parts)

    def _values(self, sides: list[str]) -> list[Answer]:
        """The sides that can be read; only the first may be a text without a meaning."""
        values: list[Answer] = []
        for number, side in enumerate(sides):
            try:
                value = self.read(side)
            except ContradictionError:
                raise
            except UnreadableError:
                is_text = re.search(r'[A-Za-z"\\]', side) and not _DENIAL.search(side)
                if number > 0 or len(sides) == 1 or not is_text:
                    raise
                continue
            if isinstance(value, Words) and number == 0 and len(sides) > 1:
                if _DENIAL.search(side):
                    raise ContradictionError("a denial")
                continue
            values.append(value)
        return values

    def _inequalities(self, sides: list[str], signs: list[str]) -> Answer:
        """A set of real numbers for one variable, else an inequality of two expressions."""
        if len(signs) == 1 and signs[0] == "≠" and is_name(sides[0]):
            excluded = self.read(sides[1])
            return Reals(reals.all_but(_nodes(excluded)), _key(sides[0]))
        if "≠" in signs:
            raise UnreadableError("≠ between numbers")
        absolute = _ABSOLUTE.fullmatch(sides[0])
        if absolute is not None and len(sides) == 2:
            bound = _node(sides[1])
            inside = reals.piece(
                Node("negative", None, (bound,)), bound, signs[0] in "≤>", signs[0] in "≤>"
            )
            pieces = (inside,) if signs[0] in "<≤" else reals.complement((inside,))
            return Reals(pieces, _key(absolute[1]))
        named = [number for number, side in enumerate(sides) if not side or _is_variable(side)]
        bounds = [_node(side) for number, side in enumerate(sides) if number not in named]
        is_set = len(named) == 1 and not any(
            variables(bound) and len(sides) > 3 for bound in bounds
        )
        if is_set and len(sides) <= 3:
            return Reals((reals.between(sides, signs, named[0], bounds),), _key(sides[named[0]]))
        if len(sides) == 2 and all(sides):
            larger = _node(sides[0])
            smaller = _node(sides[1])
            if signs[0] in "<≤":
                larger, smaller = smaller, larger
            if not variables(larger) and not variables(smaller):
                raise UnreadableError("an inequality of numbers")
            return Inequality(larger, smaller, signs[0] in "<>")
        raise UnreadableError("an inequality of several expressions")

    def real_sets(self, text: str) -> Answer | None:
        """Unions, intersections and differences of sets."""
        if text in _NUMBER_SETS:
            return _NUMBER_SETS[text]
        parts, signs = split(text, _SETS)
        if not signs:
            return None
        if not all(parts):
            raise UnreadableError("a set is missing")
        result = _as_set(self.read(parts[0]))
        for sign, part in zip(signs, parts[1:], strict=True):
            result = _combined(result, sign, _as_set(self.read(part)))
        return result

    def brackets(self, text: str) -> Answer | None:
        """Tuples, intervals, sets and vectors in one pair of brackets."""
        if len(text) < 2 or not _is_one_bracket(text):
            return None
        opening = text[0]
        closing = text[-1]
        inside = text[1:-1].strip()
        if opening == SET_OPEN:
            return self._set(inside)
        parts, _ = split(inside, _COMMA)
        if len(parts) == 1:
            if opening in "([" and closing in ")]" and _RELATIONS.search(inside):
                return self.read(inside)
            if opening == "(" and (inside[:1] == "⟦" or _is_one_bracket(inside)):
                return self.read(inside)
            return None
        if len(parts) > _MAX_ITEMS or not all(parts):
            raise UnreadableError("an empty item")
        if opening in "([" and closing in ")]" and opening + closing in ("[)", "(]"):
            return self._interval(parts, opening == "[", closing == "]")
        items = []
        for part in parts:
            items.append(self.read(part))
        kind = {"(": "tuple", "⟨": "tuple", "[": "brackets"}.get(opening)
        if kind is None:
            return None
        return Items(kind, tuple(items))

    def french_interval(self, text: str) -> Answer | None:
        """`]0,1[`."""
        match = _FRENCH.fullmatch(text)
        if match is None or (match[1] == "[" and match[4] == "]"):
            return None
        return self._interval([match[2], match[3]], match[1] == "[", match[4] == "]")

    def _interval(self, parts: list[str], has_low: bool, has_high: bool) -> Answer:
        if len(parts) != 2:
            raise UnreadableError("an interval with other than two ends")
        low = _node(parts[0])
        high = _node(parts[1])
        if (has_low and reals.is_infinite(low)) or (has_high and reals.is_infinite(high)):
            raise UnreadableError("infinity as a number of the interval")
        return Reals((reals.piece(low, high, has_low, has_high),))

    def _set(self, inside: str) -> Answer:
        if not inside:
            return Items("set", ())
        bars, _ = split(inside, _BAR)
        if len(bars) == 2 and re.match(r"\s*[\w(\\]", bars[0]) and _RELATIONS.search(bars[1]):
            return self.read(bars[1])
        answer = self.lists(inside)
        if isinstance(answer, Items):
            return Items("set", answer.items)
        if isinstance(answer, Words):
            return answer
        if isinstance(answer, Reals):
            raise UnreadableError("a set of sets")
        item = self.read(inside) if answer is None else answer
        if isinstance(item, Items) and item.kind == "list":
            return Items("set", item.items)
        return Items("set", (item,))

    def matrix(self, text: str) -> Answer | None:
        """A matrix, maybe with a factor before it."""
        before, opening, inside = text.partition("⟦")
        if not opening or not _is_one_bracket(opening + inside):
            return None
        rows, _ = split(inside[:-1], _ROWS)
        read_rows = []
        for row in rows:
            cells, _ = split(row, _CELLS)
            read_rows.append(tuple(self.read(cell) for cell in cells))
        matrix = Matrix(tuple(read_rows))
        factor = before.rstrip(" ·")
        if not factor:
            return matrix
        return _multiplied(parse("-1" if factor == "-" else factor), matrix)

    def ratio(self, text: str) -> Answer | None:
        parts, signs = split(text, _COLON)
        if not signs:
            return None
        if len(parts) > 2 or ":" in signs or all(parts):
            return Ratio(tuple(_node(part) for part in parts))
        return None

    def numeral(self, text: str) -> Answer | None:
        """`1011_2`, `40_{nine}`, `1011 base 2`."""
        match = _NUMERAL.fullmatch(text)
        if match is None:
            return None
        base = match["base"].strip('"').lower()
        number = int(base) if base.isdigit() else int(NUMBER_WORDS.get(base, 0))
        if not 2 <= number <= 36:
            return None
        return Numeral(
            match["digits"].strip("()").replace('"', "").replace(" ", "").lower(), number
        )

    def quantity(self, text: str) -> Answer | None:
        """A number or an expression, with the unit behind it."""
        try:
            return read_quantity(text, self._bare_units)
        except UnreadableError:
            return None

    def words(self, text: str) -> Answer | None:
        return read_words(text)


READERS: tuple[Callable[[_Reader, str], Answer | None], ...] = (
    _Reader.clock,
    _Reader.french_interval,
    _Reader.lists,
    _Reader.residue,
    _Reader.relation,
    _Reader.two_signs,
    _Reader.real_sets,
    _Reader.brackets,
    _Reader.matrix,
    _Reader.numeral,
    _Reader.ratio,
    _Reader.quantity,
    _Reader.words,
)
_CLOCK = re.compile(
    r"(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d))?"
    r"(?P<half>\s*\"?(?:[aApP]\.?\s?[mM]\.?|noon|midnight|o'clock)\"?)?"
)
_MODULUS = re.compile(
    r'\(?(?:\\(?:pmod|mod|bmod|pod)\s?|"(?:mod|modulo)")\s?\{?\(?(?P<modulus>[\w^]+)\)?\}?\)?$'
)
_FRENCH = re.compile(r"([\[\]])([^,;\[\]]+)[,;]([^,;\[\]]+)([\[\]])")
_NUMERAL = re.compile(
    r'(?P<digits>[0-9][0-9A-Fa-f "]*|\([0-9][0-9A-Fa-f]*\)|[0-9A-F]+)'
    r'(?:_\s?\{?\s?|\s?"base"\s?|\s?"in base"\s?)(?P<base>\d+|"\w+")\s?\}?'
)
_EVERYTHING = Reals(reals.everything())
_ZERO = Node("number", Fraction(0))
_POSITIVE = Reals((reals.piece(_ZERO, Node("constant", "∞"), False, False),))
_NEGATIVE = Reals(
    (reals.piece(Node("negative", None, (Node("constant", "∞"),)), _ZERO, False, False),)
)
_NUMBER_SETS: dict[str, Answer] = {
    "ℝ": _EVERYTHING,
    **dict.fromkeys(("ℝ^+", "ℝ^{+}", "ℝ_+", "ℝ_{+}", "ℝ_{>0}"), _POSITIVE),
    **dict.fromkeys(("ℝ^-", "ℝ^{-}", "ℝ_-", "ℝ_{-}", "ℝ_{<0}"), _NEGATIVE),
    '"all real numbers"': _EVERYTHING,
    '"all reals"': _EVERYTHING,
    '"all real"': _EVERYTHING,
    '"real numbers"': _EVERYTHING,
    "∅": Items("set", ()),
    '"empty set"': Items("set", ()),
    '"the empty set"': Items("set", ()),
    **{letter: Words((letter,)) for letter in "ℤℕℚℂ"},
}


# ------------------------------------------------------------------------------------------ pieces
def _is_one_bracket(text: str) -> bool:
    """Whether the first bracket closes at the end."""
    if text[:1] not in _OPENING or text[-1:] not in _CLOSING or not text:
        return False
    depth = 0
    for number, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return number == len(text) - 1
    return False


def _multiplied(factor: Node, matrix: Matrix) -> Matrix:
    """A number times a matrix. Raises UnreadableError."""

    def multiplied(cell: Answer) -> Answer:
        if not isinstance(cell, Quantity):
            raise UnreadableError("a factor before other than numbers")
        return cell._replace(node=Node("·", None, (factor, cell.node)))

    return Matrix(tuple(tuple(map(multiplied, row)) for row in matrix.rows))


def _compound(items: list[Answer]) -> Quantity | None:
    """`2 hours and 30 minutes`: two units of one kind, the larger one first."""
    if len(items) != 2:
        return None
    first = items[0]
    second = items[1]
    if not (isinstance(first, Quantity) and isinstance(second, Quantity)):
        return None
    if first.unit is None or second.unit is None or first.unit.kind is None:
        return None
    if first.unit.kind != second.unit.kind or first.unit.factor <= second.unit.factor:
        return None
    return first._replace(rest=second)


def _list_of(items: list[Answer], *, is_or: bool = False, has_commas: bool = False) -> Answer:
    """A list; inequalities become the union (`or`) or the intersection of their sets.

    `x<1, x>2` with commas is the union, because nothing is in both.
    """
    sets = [item for item in items if isinstance(item, Reals)]
    if len(sets) == len(items) and all(item.name for item in sets):
        sign = "∪" if is_or else "∩"
        result = sets[0]
        for item in sets[1:]:
            if item.name != result.name:
                return Items("list", tuple(items), is_or)
            result = _combined(result, sign, item)
        if not result.pieces and has_commas:
            return _list_of(items, is_or=True)
        return result
    if len(sets) == len(items) and is_or:
        result = sets[0]
        for item in sets[1:]:
            result = _combined(result, "∪", item)
        return result
    named_sets = [named for named in map(_set_of_name, items) if named is not None]
    if len(named_sets) == len(items) and sets:
        common = named_sets[0]
        for named in named_sets[1:]:
            common = _combined(common, "∪" if is_or else "∩", named)
        return common
    return Items("list", tuple(items), is_or)


def _set_of_name(item: Answer) -> Reals | None:
    """The set of `x < 2` or `x \\in [0,1]`."""
    if isinstance(item, Reals):
        return item
    if isinstance(item, Named) and len(item.names) == 1:
        value = item.values[0]
        if isinstance(value, Reals):
            return Reals(value.pieces, item.names[0])
        if isinstance(value, Items) and value.kind in ("tuple", "brackets"):
            found = reals.from_items(value)
            return None if found is None else Reals(found.pieces, item.names[0])
        if isinstance(value, Quantity) and not variables(value.node):
            return Reals((reals.point(value.node),), item.names[0])
    return None


def _as_set(answer: Answer) -> Reals:
    """A set of real numbers. Raises UnreadableError."""
    if isinstance(answer, Reals):
        return answer
    if isinstance(answer, Named):
        return _as_set(answer.values[0])._replace(name=answer.names[0] if answer.names else "")
    if isinstance(answer, Items):
        found = reals.from_items(answer)
        if found is not None:
            return found
    raise UnreadableError("no set of numbers")


def _combined(left: Reals, sign: str, right: Reals) -> Reals:
    name = left.name or right.name
    if sign in ("∪", r"\cup", '"union"'):
        return Reals(reals.union(left.pieces, right.pieces), name)
    if sign == "∖":
        return Reals(reals.intersection(left.pieces, reals.complement(right.pieces)), name)
    return Reals(reals.intersection(left.pieces, right.pieces), name)


def _nodes(answer: Answer) -> list[Node]:
    if isinstance(answer, Quantity):
        return [answer.node]
    if isinstance(answer, Items):
        return list(itertools.chain.from_iterable(map(_nodes, answer.items)))
    raise UnreadableError("no numbers")


def _node(text: str) -> Node:
    """An expression, its unit dropped. Raises UnreadableError."""
    return read_quantity(text, False).node


def _is_constant(text: str) -> bool:
    try:
        return not variables(parse(text))
    except UnreadableError:
        return False


def _is_variable(text: str) -> bool:
    """Whether a side of an inequality is what it bounds."""
    return is_name(text) and not _is_constant(text)


def _same_value(left: Answer, right: Answer) -> bool:
    """Whether two sides of an equation agree."""
    left = _without_base(left)
    right = _without_base(right)
    if isinstance(left, Quantity) and isinstance(right, Quantity):
        # `5 = 5 cm`, `1/4 = 25%`
        if equal(left.node, right.node):
            return True
        return left.is_percent != right.is_percent and (
            equal(_scaled(left), _scaled(right)) or left.node == right.node
        )
    return left == right


def _without_base(answer: Answer) -> Answer:
    """A numeral of another base as its number: `23_5 = 13_{10}`."""
    if not isinstance(answer, Numeral):
        return answer
    try:
        return Quantity(Node("number", Fraction(int(answer.digits, answer.base))))
    except ValueError:
        return answer


def _scaled(quantity: Quantity) -> Node:
    if not quantity.is_percent:
        return quantity.node
    return Node("/", None, (quantity.node, Node("number", Fraction(100))))


# --------------------------------------------------------------------------------------- quantities
_UNIT_TAIL = re.compile(r'(?P<unit>(?:\s?(?:"[^"]+"|[/·](?="))(?:\s?\^\s?\{?-?\d\}?)?)+)$')
_COMPOUND = re.compile(r'(?P<first>[\d.]+\s?"[^"]+")(?P<second>[\d.]+\s?"[^"]+")')
_DEGREE_TAIL = re.compile(r'°(?:\s?"?([CFcf])"?)?$')
_MONEY = re.compile(
    r'^(?P<sign>[+-]?)\s?(?P<currency>[$€£¥₹]|"(?:USD|EUR|GBP|JPY|INR|Rs)\.?")\s?(?=[\d.\\(])', re.I
)
_MONEY_BEHIND = re.compile(r"\s?(?P<currency>[$€£¥₹¢])$")


def read_quantity(text: str, bare_units: bool) -> Quantity:
    """A number or an expression with its unit. Raises UnreadableError."""
    text = text.strip()
    compound = _COMPOUND.fullmatch(text)
    if compound is not None:
        first = read_quantity(compound["first"], False)
        return first._replace(rest=read_quantity(compound["second"], False))

    money = _MONEY.match(text)
    if money is not None:
        text = money["sign"] + text[money.end() :]
    else:
        money = _MONEY_BEHIND.search(text)
        text = _MONEY_BEHIND.sub("", text)
    unit = None if money is None else read_unit(money["currency"])
    if not text:
        raise UnreadableError("no number")

    tail = _UNIT_TAIL.search(text)
    if tail is not None and tail.start() > 0:
        return _with_unit(text[: tail.start()], tail["unit"], unit)
    if tail is not None:
        word = text.strip('"').lower().replace("-", " ")
        if word in NUMBER_WORDS:
            return Quantity(Node("number", Fraction(NUMBER_WORDS[word])))
        raise UnreadableError("words")
    bare = BARE_LETTERS.search(text) if bare_units else None
    if bare is not None and _is_constant(text[: bare.start()]):
        return Quantity(parse(text[: bare.start()]), read_unit(bare["unit"]))

    if text.endswith("%"):
        return Quantity(parse(text[:-1]), None, is_percent=True)
    degree = _DEGREE_TAIL.search(text)
    if (
        degree is not None
        and not re.search(r"\\(?!frac|sqrt|pi)[a-z]", text)
        and "°" not in text[: degree.start()]
    ):
        return Quantity(parse(text[: degree.start()]), read_unit("degree"))
    return Quantity(parse(text), unit)


def _with_unit(number: str, words: str, money: Unit | None) -> Quantity:
    """A number with the words behind it: a unit, percent, or thousands."""
    phrase = words.replace('"', " ").strip()
    first, _, rest = phrase.partition(" ")
    node = parse(number.rstrip("-"))
    while first.lower() in MULTIPLIERS:
        factor = Node("number", Fraction(MULTIPLIERS[first.lower()]))
        node = Node("·", None, (node, factor))
        first, _, rest = rest.strip().partition(" ")
    left = f"{first} {rest}".strip()
    if not left:
        return Quantity(node, money)
    if left.lower() in PERCENT:
        return Quantity(node, None, is_percent=True)
    if left.lower() in DEGREES:
        return Quantity(node, read_unit("degree"))
    unit = read_unit(left)
    if unit is None or MONTHS.intersection(unit.words):
        raise UnreadableError("words that change the number")
    return Quantity(node, unit)

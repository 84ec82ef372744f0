"""Whether an answer equals a gold answer: by kind, `COMPARISONS` is the table.

The gold answer decides what counts: its tuple keeps its order, its list does not, its unit has to
fit if the answer has one.
"""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

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
from pacs_megatron.rewards.mathematics.expression import Node, UnreadableError, variables
from pacs_megatron.rewards.mathematics.units import factor_between
from pacs_megatron.rewards.mathematics.value import NoValueError, equal, proportional, value


def same(gold: Answer, answer: Answer) -> bool:
    """Whether the answer is right."""
    try:
        if isinstance(gold, Named) or isinstance(answer, Named):
            return _same_named(gold, answer)
        if not isinstance(gold, Items) and isinstance(answer, Items):
            return _one_of_items(gold, answer)
        compare = COMPARISONS.get((type(gold), type(answer)))
        return compare is not None and compare(gold, answer)
    except (UnreadableError, NoValueError):
        return False


# ------------------------------------------------------------------------------------------- names
def _same_named(gold: Answer, answer: Answer) -> bool:
    """With names: of the same quantity if both have one."""
    if isinstance(gold, Named) and isinstance(answer, Named):
        if not _may_be_the_same(gold.names, answer.names):
            return _same_assigned(gold, answer)
        return _any_value(gold.values, answer.values)
    if isinstance(gold, Named):
        if isinstance(answer, Equation):
            return _equation_of(gold, answer)
        if isinstance(answer, Reals) and gold.names and gold.names[0].startswith("("):
            return False  # a point is no interval
        return _any_value(gold.values, (answer,))
    assert isinstance(answer, Named)
    if isinstance(gold, Equation):
        return _equation_of(answer, gold)
    if isinstance(gold, Reals) and not _may_be_the_same(_names_of(gold), answer.names):
        return False
    if isinstance(gold, Quantity) and variables(gold.node) & set(answer.names):
        # `x = 2x + 1` does not define x.
        return False
    return _any_value((gold,), answer.values)


def _same_assigned(gold: Named, answer: Named) -> bool:
    """Whether `x = 2y` is another form of `y = x/2`."""
    first = gold.values[-1]
    second = answer.values[-1]
    if not (isinstance(first, Quantity) and isinstance(second, Quantity)):
        return False
    if not variables(first.node) or not _is_variable(answer.names[0]):
        return False
    return _equation_of(gold, Equation(Node("variable", answer.names[0]), second.node))


def _names_of(gold: Reals) -> tuple[str, ...]:
    return (gold.name,) if gold.name else ()


def _any_value(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
    return any(same(first, second) for first, second in itertools.product(gold, answer))


def _may_be_the_same(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Whether two names can mean one quantity: not two different single letters."""
    if not gold or not answer or set(gold) & set(answer):
        return True
    are_letters = all(_is_variable(name) for name in (*gold, *answer))
    return not are_letters


def _is_variable(name: str) -> bool:
    return len(name) == 1 or name.startswith("\\") or (len(name) > 1 and name[1] in "_'")


def _equation_of(named: Named, equation: Equation) -> bool:
    """Whether `y = 2x + 1` is another form of `y - 2x = 1`."""
    right = named.values[-1]
    if not isinstance(right, Quantity):
        return False
    for name in named.names:
        difference = Node("-", None, (Node("variable", name), right.node))
        other = Node("-", None, (equation.left, equation.right))
        if _is_variable(name) and proportional(difference, other):
            return True
    return False


# ------------------------------------------------------------------------------------------- items
def _one_of_items(gold: Answer, answer: Items) -> bool:
    """A gold answer that is no list: every item of the list has to be right."""
    if isinstance(gold, Reals):
        found = reals.from_items(answer)
        return found is not None and _same_reals(gold, found)
    if isinstance(gold, Matrix):
        return answer.kind in ("tuple", "brackets") and _vector_is(gold, answer)
    if isinstance(gold, Words):
        if answer.kind == "set" and not answer.items:
            return gold.parts == ("no solution",)
        return False
    if answer.kind == "set":
        return len(answer.items) == 1 and same(gold, answer.items[0])
    if answer.kind != "list" or not answer.items:
        return False
    return all(same(gold, item) for item in answer.items)


def _same_items(gold: Items, answer: Items) -> bool:
    if gold.kind == "tuple" and answer.kind == "tuple":
        return _in_order(gold.items, answer.items)
    if gold.kind == "set" and len(gold.items) == 1 and answer.kind == "tuple":
        return same(gold.items[0], answer)
    if answer.kind == "set" and len(answer.items) == 1 and gold.kind == "tuple":
        return same(gold, answer.items[0])
    if gold.kind == "brackets":
        return answer.kind == "brackets" and _in_order(gold.items, answer.items)
    if gold.kind == "tuple":
        # `x=3, y=5` or `3, 5` for a point; a list of two points is no point.
        return answer.kind == "list" and not answer.is_or and _in_order(gold.items, answer.items)
    if answer.kind == "tuple":
        return gold.kind == "list" and _in_order(gold.items, answer.items)
    if answer.kind == "brackets":
        return False
    if _are_named(gold.items):
        return _same_assignments(gold.items, answer)
    if gold.kind == "set" and answer.kind == "set":
        return _matched(_unique(gold.items), _unique(answer.items))
    return _matched(gold.items, answer.items)


def _in_order(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
    if len(gold) != len(answer):
        return False
    return all(same(first, second) for first, second in zip(gold, answer, strict=True))


def _matched(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool:
    """Whether the items are the same in some order."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for item in gold:
        for number, other in enumerate(left):
            if same(item, other):
                del left[number]
                break
        else:
            return False
    return True


def _unique(items: Sequence[Answer]) -> list[Answer]:
    found: list[Answer] = []
    for item in items:
        if not any(same(other, item) for other in found):
            found.append(item)
    return found


def _are_named(items: Sequence[Answer]) -> bool:
    """Whether the items are values of different names."""
    names = [item.names[0] for item in items if isinstance(item, Named) and item.names]
    return len(names) == len(items) and len(set(names)) == len(names)


def _same_assignments(gold: Sequence[Answer], answer: Items) -> bool:
    """`p=7, q=5`: by name, or in order if the answer has no names."""
    if not _are_named(answer.items):
        return not answer.is_or and answer.kind == "list" and _in_order(gold, answer.items)
    by_name = {item.names[0]: item for item in answer.items if isinstance(item, Named)}
    wanted = {item.names[0]: item for item in gold if isinstance(item, Named)}
    if by_name.keys() != wanted.keys():
        return False
    return all(same(item, by_name[name]) for name, item in wanted.items())


def _items_are(gold: Items, answer: Answer) -> bool:
    """A gold list against a single answer."""
    if isinstance(answer, Reals):
        found = reals.from_items(gold)
        return found is not None and _same_reals(found, answer)
    if isinstance(answer, Matrix):
        return gold.kind == "tuple" and _vector_is(answer, gold)
    if isinstance(answer, Words):
        return gold == Items("set", ()) and answer.parts == ("no solution",)
    return gold.kind == "set" and len(gold.items) == 1 and same(gold.items[0], answer)


# --------------------------------------------------------------------------------------- quantities
def _same_quantity(gold: Quantity, answer: Quantity) -> bool:
    if gold.rest is not None or answer.rest is not None:
        return _same_compound(gold, answer)
    if gold.is_percent or answer.is_percent:
        return _same_percent(gold, answer)
    if _has_angle(gold) != _has_angle(answer) and _same_angle(gold, answer):
        return True
    factor = factor_between(gold.unit, answer.unit)
    if factor is None:
        return False
    node = answer.node if factor == 1 else _times(answer.node, factor)
    return equal(gold.node, node) or _same_antiderivative(gold.node, node)


def _same_antiderivative(gold: Node, answer: Node) -> bool:
    """With the constant of integration in another letter: `x^2 + C`, `x^2 + c`."""
    mine = variables(gold) - variables(answer)
    other = variables(answer) - variables(gold)
    if mine != {"C"} or gold.kind != "+" or Node("variable", "C") not in gold.parts:
        return False
    if len(other) != 1 or not other <= {"c", "K", "k", "C_1"}:
        return False
    [name] = other
    return equal(gold, renamed(answer, name, "C"))


def renamed(part: Any, name: str, other: str) -> Any:
    """A part of an answer with another name of a variable."""
    if part == Node("variable", name):
        return Node("variable", other)
    if not isinstance(part, tuple):
        return part
    parts = [renamed(item, name, other) for item in part]
    return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)


def _same_percent(gold: Quantity, answer: Quantity) -> bool:
    """25 % is 25, 0.25 and 25 %; a gold of 0.25 is no 0.25 %."""
    if gold.is_percent:
        if answer.is_percent or (answer.unit is None and equal(gold.node, answer.node)):
            return equal(gold.node, answer.node)
        return answer.unit is None and equal(_times(gold.node, Fraction(1, 100)), answer.node)
    if gold.unit is not None:
        return False
    if equal(gold.node, _times(answer.node, Fraction(1, 100))):
        return True
    if variables(gold.node) or not equal(gold.node, answer.node):
        return False
    number = value(gold.node)
    return not isinstance(number, Fraction) or abs(number) >= 1


def _has_angle(quantity: Quantity) -> bool:
    return quantity.unit is not None and quantity.unit.kind == (("angle", 1),)


def _same_angle(gold: Quantity, answer: Quantity) -> bool:
    """30 degrees are pi/6."""
    degrees = gold if _has_angle(gold) else answer
    other = answer if degrees is gold else gold
    half = Node("/", None, (Node("constant", "π"), Node("number", Fraction(180))))
    is_radian = other.unit is None or other.unit.kind == (("radians", 1),)
    return is_radian and equal(Node("·", None, (degrees.node, half)), other.node)


def _same_compound(gold: Quantity, answer: Quantity) -> bool:
    """`3 feet 4 inches` is 40 inches."""
    first = _total(gold)
    second = _total(answer)
    if first is None or second is None or first[0] != second[0]:
        return False
    return equal(first[1], second[1])


def _total(quantity: Quantity) -> tuple[Any, Node] | None:
    """(kind, the sum of its parts in the first unit of the kind); None without a known unit."""
    if quantity.unit is None or quantity.unit.kind is None:
        return None
    total = _times(quantity.node, quantity.unit.factor)
    if quantity.rest is not None:
        rest = _total(quantity.rest)
        if rest is None or rest[0] != quantity.unit.kind:
            return None
        total = Node("+", None, (total, rest[1]))
    return quantity.unit.kind, total


def _times(node: Node, factor: Fraction) -> Node:
    return Node("·", None, (node, Node("number", factor)))


# -------------------------------------------------------------------------------------- other kinds
def _same_reals(gold: Reals, answer: Reals) -> bool:
    if gold.name and answer.name and not _may_be_the_same((gold.name,), (answer.name,)):
        return False
    return reals.same(gold.pieces, answer.pieces)


def _same_equation(gold: Equation, answer: Equation) -> bool:
    first = Node("-", None, (gold.left, gold.right))
    second = Node("-", None, (answer.left, answer.right))
    return proportional(first, second)


def _value_of_equation(gold: Quantity, answer: Equation) -> bool:
    """`a + b = 5`, `x^2 + y^2 = 4` for a gold number: the left side names the quantity."""
    sides = [answer.left, answer.right]
    constants = [side for side in sides if not variables(side)]
    if variables(gold.node):
        return False
    return len(constants) == 1 and equal(gold.node, constants[0])


def _same_inequality(gold: Inequality, answer: Inequality) -> bool:
    if gold.is_strict != answer.is_strict:
        return False
    first = Node("-", None, (gold.larger, gold.smaller))
    second = Node("-", None, (answer.larger, answer.smaller))
    return proportional(first, second, sign=True)


def _reals_and_inequality(gold: Reals, answer: Inequality) -> bool:
    """`y < 2x + 1` with a bound that has variables, against another form of it."""
    if len(gold.pieces) != 1 or not gold.name:
        return False
    [item] = gold.pieces
    name = Node("variable", gold.name)
    if item.low == reals.everything()[0].low:
        mine = Inequality(item.high, name, not item.has_high)
    elif item.high == reals.everything()[0].high:
        mine = Inequality(name, item.low, not item.has_low)
    else:
        return False
    return _same_inequality(mine, answer)


def _same_ratio(gold: Ratio, answer: Ratio) -> bool:
    if len(gold.parts) != len(answer.parts):
        return False
    first = gold.parts[0]
    second = answer.parts[0]
    for left, right in zip(gold.parts[1:], answer.parts[1:], strict=True):
        cross = Node("·", None, (first, right))
        if not equal(cross, Node("·", None, (second, left))):
            return False
    return any(not equal(part, Node("number", Fraction(0))) for part in gold.parts)


def _ratio_is_fraction(gold: Ratio, answer: Quantity) -> bool:
    if len(gold.parts) != 2 or answer.unit is not None or answer.is_percent:
        return False
    return equal(Node("/", None, gold.parts), answer.node)


def _fraction_is_ratio(gold: Quantity, answer: Ratio) -> bool:
    """3/4 is 3:4; a whole number is no ratio."""
    if len(answer.parts) != 2 or variables(gold.node):
        return False
    number = value(gold.node)
    is_whole = isinstance(number, Fraction) and number.denominator == 1
    return not is_whole and equal(gold.node, Node("/", None, answer.parts))


def _same_clock(gold: Clock, answer: Clock) -> bool:
    if gold.minute != answer.minute:
        return False
    if gold.half and answer.half:
        return gold.half == answer.half and gold.hour % 12 == answer.hour % 12
    if not gold.half and not answer.half:
        return gold.hour == answer.hour
    with_half = gold if gold.half else answer
    other = answer if gold.half else gold
    hour = with_half.hour % 12 + 12 * (with_half.half == "pm")
    return other.hour == with_half.hour or other.hour % 24 == hour


def _same_numeral(gold: Numeral, answer: Numeral) -> bool:
    try:
        return int(gold.digits, gold.base) == int(answer.digits, answer.base)
    except ValueError:
        return gold == answer


def _numeral_is_quantity(gold: Numeral, answer: Quantity) -> bool:
    """The digits without their base."""
    return _is_number(answer, gold.digits)


def _quantity_is_numeral(gold: Quantity, answer: Numeral) -> bool:
    return _is_number(gold, answer.digits)


def _is_number(quantity: Quantity, digits: str) -> bool:
    node = quantity.node
    return node.kind == "number" and digits.isdigit() and node.value == int(digits)


def _same_residue(gold: Residue, answer: Residue) -> bool:
    if not equal(gold.modulus, answer.modulus):
        return False
    if same(gold.value, answer.value):
        return True
    if isinstance(gold.value, Quantity) and isinstance(answer.value, Quantity):
        first = value(gold.value.node)
        second = value(answer.value.node)
        modulus = value(gold.modulus)
        are_exact = all(isinstance(number, Fraction) for number in (first, second, modulus))
        return are_exact and modulus != 0 and ((first - second) / modulus).denominator == 1
    return False


def _same_matrix(gold: Matrix, answer: Matrix) -> bool:
    if len(gold.rows) != len(answer.rows):
        return False
    return all(
        _in_order(first, second) for first, second in zip(gold.rows, answer.rows, strict=True)
    )


def _vector_is(matrix: Matrix, vector: Items) -> bool:
    """A column or a row against `(1,-2)`."""
    if len(matrix.rows) == 1:
        return _in_order(matrix.rows[0], vector.items)
    if any(len(row) != 1 for row in matrix.rows):
        return False
    return _in_order([row[0] for row in matrix.rows], vector.items)


def _same_words(gold: Words, answer: Words) -> bool:
    return gold.parts == answer.parts


def _words_are_number(gold: Words, answer: Quantity) -> bool:
    is_infinity = answer.node == Node("constant", "∞") and answer.unit is None
    return gold.parts == ("∞",) and is_infinity


def _flipped(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda gold, answer: compare(answer, gold)


COMPARISONS: dict[tuple[type, type], Callable[[Any, Any], bool]] = {
    (Quantity, Quantity): _same_quantity,
    (Quantity, Equation): _value_of_equation,
    (Quantity, Ratio): _fraction_is_ratio,
    (Quantity, Numeral): _quantity_is_numeral,
    (Quantity, Residue): lambda gold, answer: same(gold, answer.value),
    (Quantity, Words): _flipped(_words_are_number),
    (Items, Items): _same_items,
    (Items, Reals): _items_are,
    (Items, Matrix): _items_are,
    (Items, Words): _items_are,
    (Items, Quantity): _items_are,
    (Items, Residue): lambda gold, answer: same(gold, answer.value),
    (Reals, Reals): _same_reals,
    (Reals, Inequality): _reals_and_inequality,
    (Inequality, Reals): _flipped(_reals_and_inequality),
    (Inequality, Inequality): _same_inequality,
    (Equation, Equation): _same_equation,
    (Ratio, Ratio): _same_ratio,
    (Ratio, Quantity): _ratio_is_fraction,
    (Clock, Clock): _same_clock,
    (Numeral, Numeral): _same_numeral,
    (Numeral, Quantity): _numeral_is_quantity,
    (Residue, Residue): _same_residue,
    (Residue, Quantity): lambda gold, answer: same(gold.value, answer),
    (Matrix, Matrix): _same_matrix,
    (Words, Words): _same_words,
    (Words, Quantity): _words_are_number,
}

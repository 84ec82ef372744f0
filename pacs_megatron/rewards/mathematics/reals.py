"""Sets of real numbers as unions of intervals."""

from collections.abc import Sequence
from functools import cmp_to_key

from pacs_megatron.rewards.mathematics.answers import Items, Piece, Quantity, Reals
from pacs_megatron.rewards.mathematics.expression import Node, UnreadableError, variables
from pacs_megatron.rewards.mathematics.value import NoValueError, equal, is_below

_HIGH = Node("constant", "∞")
_LOW = Node("negative", None, (_HIGH,))
Pieces = tuple[Piece, ...]


def everything() -> Pieces:
    return (Piece(_LOW, _HIGH, False, False),)


def piece(low: Node, high: Node, has_low: bool, has_high: bool) -> Piece:
    """An interval; infinite ends are open."""
    return Piece(low, high, has_low and low != _LOW, has_high and high != _HIGH)


def point(node: Node) -> Piece:
    return Piece(node, node, True, True)


def all_but(nodes: Sequence[Node]) -> Pieces:
    """All real numbers but these."""
    return complement(tuple(point(node) for node in nodes))


def between(
    sides: Sequence[str], signs: Sequence[str], named: int, bounds: Sequence[Node]
) -> Piece:
    """The set of the variable at `named` in a chain of two or three sides."""
    low = _LOW
    high = _HIGH
    has_low = False
    has_high = False
    remaining = list(bounds)
    for number in range(len(sides)):
        if number == named:
            continue
        bound = remaining.pop(0)
        sign = signs[min(number, named)]
        is_upper = (sign in "<≤") == (number > named)
        is_closed = sign in "≤≥"
        if is_upper:
            high = bound
            has_high = is_closed
        else:
            low = bound
            has_low = is_closed
    if len(sides) == 3 and (low is _LOW or high is _HIGH):
        raise UnreadableError("a chain in two directions")
    return piece(low, high, has_low, has_high)


def from_items(items: Items) -> Reals | None:
    """The set of `(a,b)`, `[a,b]` or `{a,b,c}`; None for other items."""
    nodes = [item.node for item in items.items if isinstance(item, Quantity)]
    if len(nodes) != len(items.items):
        return None
    if items.kind == "set":
        return Reals(tuple(point(node) for node in nodes))
    if len(nodes) == 2 and items.kind in ("tuple", "brackets"):
        is_closed = items.kind == "brackets"
        return Reals((piece(nodes[0], nodes[1], is_closed, is_closed),))
    return None


# -------------------------------------------------------------------------------------- operations
def union(left: Pieces, right: Pieces) -> Pieces:
    """Sorted, and merged where intervals touch."""
    pieces = [*left, *right]
    if not _are_constant(pieces):
        return tuple(pieces)
    pieces.sort(key=cmp_to_key(_order))
    merged: list[Piece] = []
    for item in pieces:
        if merged and _touch(merged[-1], item):
            merged[-1] = _merged(merged[-1], item)
        else:
            merged.append(item)
    return tuple(merged)


def intersection(left: Pieces, right: Pieces) -> Pieces:
    if not _are_constant([*left, *right]):
        raise UnreadableError("an intersection with variables")
    found = []
    for first in left:
        for second in right:
            common = _common(first, second)
            if common is not None:
                found.append(common)
    return union(tuple(found), ())


def complement(pieces: Pieces) -> Pieces:
    if not _are_constant(pieces):
        raise UnreadableError("a difference with variables")
    result = everything()
    for item in union(pieces, ()):
        rest = []
        if not is_infinite(item.low):
            rest.append(Piece(_LOW, item.low, False, not item.has_low))
        if not is_infinite(item.high):
            rest.append(Piece(item.high, _HIGH, not item.has_high, False))
        result = intersection(result, tuple(rest)) if rest else ()
    return result


def same(left: Pieces, right: Pieces) -> bool:
    """Whether two sets are equal."""
    first = union(left, ())
    second = union(right, ())
    if len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        if (one.has_low, one.has_high) != (other.has_low, other.has_high):
            return False
        if not (equal(one.low, other.low) and equal(one.high, other.high)):
            return False
    return True


def _are_constant(pieces: Sequence[Piece]) -> bool:
    return not any(variables(item.low) or variables(item.high) for item in pieces)


def is_infinite(node: Node) -> bool:
    return node in (_LOW, _HIGH)


def _compare(left: Node, right: Node) -> int:
    if equal(left, right):
        return 0
    try:
        return -1 if is_below(left, right) else 1
    except NoValueError as error:
        raise UnreadableError(str(error)) from error


def _order(left: Piece, right: Piece) -> int:
    return _compare(left.low, right.low) or right.has_low - left.has_low


def _touch(left: Piece, right: Piece) -> bool:
    """Whether the right one, which starts later, begins inside of or at the end of the left one."""
    order = _compare(right.low, left.high)
    return order < 0 or (order == 0 and (right.has_low or left.has_high))


def _merged(left: Piece, right: Piece) -> Piece:
    order = _compare(left.high, right.high)
    if order == 0:
        return left._replace(has_high=left.has_high or right.has_high)
    return left if order > 0 else left._replace(high=right.high, has_high=right.has_high)


def _common(left: Piece, right: Piece) -> Piece | None:
    order = _compare(left.low, right.low)
    lower = left if order > 0 else right
    has_low = lower.has_low if order else left.has_low and right.has_low
    order = _compare(left.high, right.high)
    upper = left if order < 0 else right
    has_high = upper.has_high if order else left.has_high and right.has_high
    order = _compare(lower.low, upper.high)
    if order > 0 or (order == 0 and not (has_low and has_high)):
        return None
    return Piece(lower.low, upper.high, has_low, has_high)

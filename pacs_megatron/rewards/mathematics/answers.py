"""The kinds of answers: numbers with units, lists, tuples, intervals, equations, words, ..."""

from typing import NamedTuple, TypeAlias

from pacs_megatron.rewards.mathematics.expression import Node
from pacs_megatron.rewards.mathematics.units import Unit


class Quantity(NamedTuple):
    """A number or an expression, with its unit."""

    node: Node
    unit: Unit | None = None
    is_percent: bool = False
    rest: "Quantity | None" = None
    """the second part of `3 feet 4 inches`"""


class Items(NamedTuple):
    """Several answers: `list` (any order), `set`, `tuple` (in order), `brackets` (`[1,2]`)."""

    kind: str
    items: tuple["Answer", ...]
    is_or: bool = False
    """whether `or` joins a list"""


class Piece(NamedTuple):
    """An interval; its ends may be infinite."""

    low: Node
    high: Node
    has_low: bool
    has_high: bool


class Reals(NamedTuple):
    """A set of real numbers: a union of intervals, maybe for a named variable."""

    pieces: tuple[Piece, ...]
    name: str = ""


class Named(NamedTuple):
    """`x = 5`, `x \\in [0,1]`: an answer with its names; all values are equal."""

    names: tuple[str, ...]
    values: tuple["Answer", ...]


class Equation(NamedTuple):
    """An equation that is no assignment: left = right."""

    left: Node
    right: Node


class Inequality(NamedTuple):
    """larger > smaller, or >=."""

    larger: Node
    smaller: Node
    is_strict: bool


class Ratio(NamedTuple):
    """`1:2:3`."""

    parts: tuple[Node, ...]


class Clock(NamedTuple):
    """A time of the day; half is `am`, `pm` or empty."""

    hour: int
    minute: int
    half: str


class Numeral(NamedTuple):
    """Digits in a base other than the usual one."""

    digits: str
    base: int


class Residue(NamedTuple):
    """`10 \\pmod{17}`."""

    value: "Answer"
    modulus: Node


class Matrix(NamedTuple):
    rows: tuple[tuple["Answer", ...], ...]


class Words(NamedTuple):
    """Text: its parts between `and`, in small letters."""

    parts: tuple[str, ...]


Answer: TypeAlias = (
    Quantity
    | Items
    | Reals
    | Named
    | Equation
    | Inequality
    | Ratio
    | Clock
    | Numeral
    | Residue
    | Matrix
    | Words
)

r"""Grammar of elementary expressions in plain form (spelling.py): numbers, variables, roots,
powers, fractions, functions, with the juxtaposition that people write.

Two numbers side by side (`3 4`) are no product and no sum; `2\frac13` and `2 1/3` are mixed
numbers. Sums, integrals and limits are not read here (symbolic.py).
"""

import re
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

from pacs_megatron.rewards.mathematics.words import GREEK, word_set

MAX_CHARS = 2000
_MAX_TOKENS = 300
_MAX_DEPTH = 60
_MAX_DIGITS = 1000


class UnreadableError(ValueError):
    """The text is no expression of this grammar."""


class Node(NamedTuple):
    """An operation on other nodes.

    `number`: value is a Fraction. `variable`: its name. `constant`: `π`, `e`, `i`, `∞`. `function`:
    its name. `+ - · / ^ negative factorial`: no value.
    """

    kind: str
    value: Any = None
    parts: tuple["Node", ...] = ()
    digits: int = 0
    """significant digits of a number that is written as a decimal, else 0"""
    places: int = 0
    """digits after the point, less those of a power of ten"""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.\d+|\d+\.(?!\d)|\.\d+|\d+)(?P<period>⟪\d+⟫)?|(?P<command>\\[A-Za-z]+|\\\|)"
    r'|(?P<quoted>"[^"]*")|(?P<letter>[A-Za-zℓ])|(?P<sign>\S))'
)
_FUNCTIONS = word_set(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot asin acos atan ln log "
    "exp gcd lcm max min arg Re Im det"
)
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}
_ACCENTS = word_set("hat vec bar overline tilde dot ddot widehat widetilde underline")
_MANY = word_set("gcd lcm max min")


class _Token(NamedTuple):
    kind: str
    text: str
    has_space: bool
    """whether a space stands before it"""


def parse(text: str) -> Node:
    """The expression. Raises UnreadableError."""
    if len(text) > MAX_CHARS:
        raise UnreadableError("too long")
    tokens = _tokens(text)
    if len(tokens) > _MAX_TOKENS:
        raise UnreadableError("too many tokens")
    parser = _Parser(tokens)
    node = parser.sum()
    if parser.take(r"\choose"):
        node = Node("function", "binomial", (node, parser.sum()))
    parser.expect_end()
    return node


def variables(node: Node) -> set[str]:
    """Names of its variables."""
    names = {node.value} if node.kind == "variable" else set()
    for part in node.parts:
        names |= variables(part)
    return names


def _tokens(text: str) -> list[_Token]:
    tokens = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None
        kind = match.lastgroup or ""
        if kind == "period":
            kind = "number"
        word = match[0].lstrip()
        if kind == "number" and len(word) > _MAX_DIGITS:
            raise UnreadableError("a number with too many digits")
        tokens.append(_Token(kind, word, match[0][0].isspace()))
        position = match.end()
    return tokens


def _fail(reason: str) -> NoReturn:
    raise UnreadableError(reason)


def _number(text: str) -> Node:
    """A numeral, with the period of `0.⟪3⟫`."""
    digits, _, period = text.partition("⟪")
    whole, point, decimals = digits.partition(".")
    value = Fraction(int(whole or "0"))
    if decimals:
        value += Fraction(int(decimals), 10 ** len(decimals))
    if period:
        period = period.rstrip("⟫")
        if not point:
            _fail("a period without a point")
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))
        return Node("number", value)
    significant = (whole + decimals).lstrip("0") if decimals else ""
    return Node("number", value, digits=len(significant), places=len(decimals))


class _Parser:
    """Recursive descent: sum, product, power, atom."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0
        self._closers: list[str] = []

    # ------------------------------------------------------------------------------------- tokens
    def _peek(self, ahead: int = 0) -> _Token | None:
        index = self._position + ahead
        return self._tokens[index] if index < len(self._tokens) else None

    def _text(self, ahead: int = 0) -> str:
        token = self._peek(ahead)
        return token.text if token is not None else ""

    def _next(self) -> _Token:
        token = self._peek()
        if token is None:
            _fail("ends too early")
        self._position += 1
        return token

    def take(self, text: str) -> bool:
        """Skips the token if it is `text`."""
        is_next = self._text() == text
        self._position += is_next
        return is_next

    def _expect(self, text: str) -> None:
        if not self.take(text):
            _fail(f"expected {text}")

    def expect_end(self) -> None:
        if self._peek() is not None:
            _fail(f"unexpected {self._text()}")

    # --------------------------------------------------------------------------------- operations
    def sum(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            _fail("too deep")
        node = self._signed()
        while self._text() in ("+", "-"):
            is_minus = self._next().text == "-"
            term = self._signed()
            node = Node("-" if is_minus else "+", None, (node, term))
        self._depth -= 1
        return node

    def _signed(self) -> Node:
        is_negative = False
        while self._text() in ("+", "-"):
            is_negative ^= self._next().text == "-"
        node = self._product()
        return Node("negative", None, (node,)) if is_negative else node

    def _product(self) -> Node:
        node = self._factor(is_first=True)
        while True:
            sign = self._text()
            if sign in ("·", "×"):
                self._next()
                node = Node("·", None, (node, self._operand()))
            elif sign in ("/", "÷"):
                self._next()
                node = Node("/", None, (node, self._operand()))
            elif self._starts_atom():
                token = self._peek()
                if token is not None and token.kind == "number":
                    before = self._tokens[self._position - 1]
                    if before.text not in (")", "}", "]", "!"):
                        _fail("a number directly after another factor")
                    if before.text == "}" and node.kind == "number":
                        _fail("two numbers side by side")
                node = Node("·", None, (node, self._factor()))
            else:
                return node

    def _operand(self) -> Node:
        """A factor behind an explicit sign; it may have its own sign."""
        if self._text() in ("+", "-"):
            is_negative = self._next().text == "-"
            node = self._operand()
            return Node("negative", None, (node,)) if is_negative else node
        return self._factor(is_first=True)

    def _starts_atom(self) -> bool:
        token = self._peek()
        if token is None or (self._closers and token.text == self._closers[-1]):
            return False
        if token.kind in ("number", "letter"):
            return True
        if token.kind == "command":
            return token.text != r"\|" and token.text != r"\choose"
        return token.text in "([{⌊⌈|πℯ∞" and token.text not in self._closers[-1:]

    def _factor(self, *, is_first: bool = False) -> Node:
        """An atom with powers and postfix signs; at the start of a product also a mixed number."""
        start = self._peek()
        if is_first and start is not None and start.kind == "number":
            mixed = self._mixed()
            if mixed is not None:
                return mixed
        return self._postfix(self._atom())

    def _mixed(self) -> Node | None:
        r"""`2\frac13` or `2 1/3`, else None."""
        whole = self._text()
        if not whole.isdigit():
            return None
        position = self._position
        self._next()
        part = None
        if self._text() == r"\frac":
            self._next()
            part = Node("/", None, (self._argument(), self._argument()))
            if self._text() in ("^", "!"):
                part = None
        elif self._is_plain_fraction():
            top = _number(self._next().text)
            self._next()
            part = Node("/", None, (top, _number(self._next().text)))

        if part is not None:
            top, bottom = part.parts
            are_numbers = top.kind == "number" and bottom.kind == "number"
            if are_numbers and 0 < top.value < bottom.value and bottom.value.denominator == 1:
                return Node("+", None, (_number(whole), part))
        self._position = position
        return None

    def _is_plain_fraction(self) -> bool:
        """Whether ` 1/3` follows, as the end of the product."""
        top = self._peek()
        bottom = self._peek(2)
        if top is None or bottom is None or not top.has_space:
            return False
        is_fraction = top.text.isdigit() and self._text(1) == "/" and bottom.text.isdigit()
        return is_fraction and self._text(3) not in ("^", "!")

    def _postfix(self, node: Node) -> Node:
        while True:
            sign = self._text()
            if sign == "^":
                self._next()
                if self._text() == "°":
                    continue
                node = Node("^", None, (node, self._exponent()))
            elif sign == "!":
                count = 0
                while self.take("!"):
                    count += 1
                if count > 2:
                    _fail("a factorial of a factorial of a factorial")
                node = Node("function", "!" * count, (node,))
            elif sign == "°":
                self._next()
                node = Node("·", None, (node, Node("/", None, (Node("constant", "π"), _of(180)))))
                node = self._minutes(node)
            elif sign == "%":
                self._next()
                node = Node("/", None, (node, _of(100)))
            else:
                return node

    def _minutes(self, degrees: Node) -> Node:
        """Degrees with the minutes that follow: `40°30'`."""
        token = self._peek()
        if token is None or token.kind != "number" or self._text(1) != "'":
            return degrees
        minutes = _number(self._next().text)
        self._next()
        unit = Node("/", None, (Node("constant", "π"), _of(180 * 60)))
        return Node("+", None, (degrees, Node("·", None, (minutes, unit))))

    def _exponent(self) -> Node:
        if self._text() in ("+", "-"):
            is_negative = self._next().text == "-"
            node = self._exponent()
            return Node("negative", None, (node,)) if is_negative else node
        if self._text() == "'":
            _fail("a prime as a power")
        node = self._group("{") if self._text() == "{" else self._atom()
        if self._text() == "^":
            self._next()
            node = Node("^", None, (node, self._exponent()))
        return node

    # --------------------------------------------------------------------------------------- atoms
    def _atom(self) -> Node:
        token = self._peek()
        if token is None:
            _fail("ends too early")
        if token.kind == "number":
            self._next()
            return _number(token.text)
        if token.kind == "letter":
            return self._letter()
        if token.kind == "command":
            return self._command()
        if token.text in _CLOSING:
            return self._bracket(token.text)
        if token.text == "|":
            return Node("function", "abs", (self._between("|"),))
        if token.text == "π":
            self._next()
            return Node("constant", "π")
        if token.text == "∞":
            self._next()
            return Node("constant", "∞")
        if token.text == "_":
            return self._choose_with_indexes()
        _fail(f"unexpected {token.text}")

    def _group(self, opening: str) -> Node:
        """A sum in brackets."""
        closing = _CLOSING[opening]
        self._expect(opening)
        self._closers.append(closing)
        node = self.sum()
        if opening == "{" and self.take(r"\choose"):
            node = Node("function", "binomial", (node, self.sum()))
        self._closers.pop()
        self._expect(closing)
        return node

    def _bracket(self, opening: str) -> Node:
        node = self._group(opening)
        if opening == "⌊":
            return Node("function", "floor", (node,))
        if opening == "⌈":
            return Node("function", "ceil", (node,))
        if opening == "{" and self._text() == "_":
            _fail("an index on an expression")
        # `{2}` or `(2)` is no literal: digits count for bare decimals only.
        return node

    def _between(self, mark: str) -> Node:
        """A sum between two equal marks, such as `|x|`."""
        self._expect(mark)
        self._closers.append(mark)
        node = self.sum()
        self._closers.pop()
        self._expect(mark)
        return node

    def _letter(self) -> Node:
        letter = self._next().text
        if letter in "CP" and self._text() == "(":
            pair = self._pair()
            if pair is not None:
                return Node("function", "binomial" if letter == "C" else "permutations", pair)
        name = letter + self._index()
        if name == "e":
            return Node("constant", "e")
        if name == "i":
            return Node("constant", "i")
        return Node("variable", name)

    def _pair(self) -> tuple[Node, Node] | None:
        """`(10,3)`, else None."""
        position = self._position
        try:
            self._expect("(")
            self._closers.append(")")
            first = self.sum()
            self._expect(",")
            second = self.sum()
            self._closers.pop()
            self._expect(")")
        except UnreadableError:
            self._closers.clear()
            self._position = position
            return None
        return first, second

    def _choose_with_indexes(self) -> Node:
        """`_{10}C_3`."""
        self._expect("_")
        top = self._argument()
        name = self._next().text
        if name not in ("C", "P"):
            _fail("an index without a name")
        self._expect("_")
        bottom = self._argument()
        return Node("function", "binomial" if name == "C" else "permutations", (top, bottom))

    def _index(self) -> str:
        """`_1`, `_{max}` and primes, as part of a name."""
        index = ""
        while self._text() in ("_", "'"):
            if self._next().text == "'":
                index += "'"
                continue
            index += "_" + self._raw_argument()
        return index

    def _raw_argument(self) -> str:
        """The text of a group or of one token."""
        if not self.take("{"):
            return self._next().text.strip('"')
        depth = 1
        texts = []
        while depth:
            text = self._next().text
            depth += (text == "{") - (text == "}")
            texts.append(text)
        return "".join(texts[:-1]).replace('"', "")

    def _argument(self) -> Node:
        r"""An argument of `\frac` or `\binom`: a group, or one digit, letter or command."""
        token = self._peek()
        if token is None:
            _fail("ends too early")
        if token.text == "{":
            return self._group("{")
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            rest = _Token("number", token.text[1:], False)
            self._tokens[self._position : self._position + 1] = [
                _Token("number", token.text[0], token.has_space),
                rest,
            ]
        return self._atom()

    def _command(self) -> Node:
        name = self._next().text[1:]
        if name == "|":
            self._position -= 1
            return Node("function", "abs", (self._between(r"\|"),))
        if name == "frac":
            return Node("/", None, (self._argument(), self._argument()))
        if name == "binom":
            return Node("function", "binomial", (self._argument(), self._argument()))
        if name == "sqrt":
            return self._root()
        if name in _FUNCTIONS:
            return self._function(name)
        if name in GREEK:
            return Node("variable", "\\" + name + self._index())
        if name in _ACCENTS:
            return Node("variable", f"\\{name} {self._raw_argument()}" + self._index())
        _fail(f"unknown command {name}")

    def _root(self) -> Node:
        degree = _of(2)
        if self._text() == "[":
            degree = self._group("[")
        inside = self._group("{") if self._text() == "{" else self._atom()
        return Node("function", "root", (inside, degree))

    def _function(self, name: str) -> Node:
        power = None
        base = None
        while self._text() in ("^", "_"):
            if self._next().text == "_":
                base = self._group("{") if self._text() == "{" else self._atom()
            else:
                power = self._exponent()
        if base is not None and name != "log":
            _fail(f"an index on {name}")

        is_inverse = power is not None and power.kind == "negative" and name in _INVERSE
        if is_inverse:
            assert power is not None
            if power.parts[0] != _of(1):
                _fail("a negative power of a function")
            name = _INVERSE[name]
            power = None

        arguments = self._arguments(name)
        if name == "log" and base is not None:
            arguments = (*arguments, base)
        node = Node("function", name, arguments)
        return node if power is None else Node("^", None, (node, power))

    def _arguments(self, name: str) -> tuple[Node, ...]:
        """In brackets, or the product that follows."""
        if name in _MANY:
            closing = {"(": ")", "{": "}"}.get(self._text())
            if closing is None:
                _fail(f"{name} without brackets")
            self._next()
            self._closers.append(closing)
            arguments = [self.sum()]
            while self.take(","):
                arguments.append(self.sum())
            self._closers.pop()
            self._expect(closing)
            return tuple(arguments)
        if self._text() in ("(", "[", "{"):
            return (self._postfix_of_argument(self._group(self._text())),)
        return (self._bare_argument(),)

    def _postfix_of_argument(self, node: Node) -> Node:
        """`\\sin(30)^\\circ`: the degree belongs to the argument."""
        if self._text() == "°":
            return self._postfix(node)
        return node

    def _bare_argument(self) -> Node:
        r"""The product behind a function without brackets: `\sin 2x`, `\cos\frac{\pi}{4}`."""
        if self._text() in ("+", "-"):
            is_negative = self._next().text == "-"
            node = self._bare_argument()
            return Node("negative", None, (node,)) if is_negative else node
        node = self._factor(is_first=True)
        while self._starts_atom() and self._text() not in ("(", "["):
            token = self._peek()
            assert token is not None
            if token.kind == "command" and token.text[1:] in _FUNCTIONS:
                break
            if token.kind == "number":
                _fail("a number directly after another factor")
            node = Node("·", None, (node, self._factor()))
        # `\cos 2\pi/3`, but `\sin x / x` is a fraction of the sine.
        if self._text() == "/" and not variables(node):
            token = self._peek(1)
            if token is not None and token.kind == "number":
                self._next()
                node = Node("/", None, (node, self._factor()))
        return node


def _of(value: int) -> Node:
    return Node("number", Fraction(value))

r"""Plain form of an answer: one spelling for what LaTeX, Unicode and plain text write in many ways.

Operators become single characters (`\leq` -> `≤`, `\cdot` -> `·`), words become quoted (`40\text{
cm}` -> `40"cm"`), braces of LaTeX stay `{}`, braces of sets become `⦃⦄`. `SPELLINGS` is the table.
"""

import re
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

from pacs_megatron.rewards.mathematics.units import BARE_UNITS
from pacs_megatron.rewards.mathematics.words import bare_words

SET_OPEN = "⦃"
SET_CLOSE = "⦄"


class Spelling(NamedTuple):
    """A rule: what it does, how, and pairs (spelling, plain form) that a test reads."""

    name: str
    rewrite: Callable[[str], str]
    examples: tuple[tuple[str, str], ...]


def plain(text: str) -> str:
    """The plain form of an answer."""
    return reduce(lambda result, rule: rule.rewrite(result), SPELLINGS, text)


def _replaced(*rules: tuple[str, str]) -> Callable[[str], str]:
    """Applies regular expressions in order."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def rewrite(text: str) -> str:
        for pattern, replacement in compiled:
            text = pattern.sub(replacement, text)
        return text

    return rewrite


def _translated(table: dict[str, str]) -> Callable[[str], str]:
    """Replaces single characters."""
    numbers = str.maketrans(table)
    return lambda text: text.translate(numbers)


def _named(table: dict[str, str]) -> Callable[[str], str]:
    r"""Replaces commands: `\name` not followed by a letter."""
    pattern = re.compile(r"\\([A-Za-z]+)(?![A-Za-z])")
    return lambda text: pattern.sub(lambda match: table.get(match[1], match[0]), text)


def _table(text: str, end: str = "") -> dict[str, str]:
    """A table of lines `name name => result`; the result may be `nothing`, `space` or a word.

    `end` follows a command that a letter may follow.
    """
    special = {"nothing": "", "space": " ", "and": '"and"', "or": '"or"'}
    table = {}
    for line in text.strip().splitlines():
        names, _, result = line.partition(" => ")
        is_command = re.fullmatch(r"\\[A-Za-z]+", result) is not None
        for name in names.split():
            table[name] = special.get(result, result + end * is_command)
    return table


# ------------------------------------------------------------------------------------- characters
_CHARACTERS = {
    **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u2002\u2003\u3000\t\n\r", " "),
    **dict.fromkeys('\u200b\u200c\u200d\u2060\ufeff\u00ad\u2061\u2062“”„«»"', ""),
    **_table(
        r"""
    − – — ‐ ‑ ‒ ﹣ － => -
    ⋅ ∙ • ⁎ ∗ => ·
    ’ ‘ ′ ´ => '
    ″ => ''
    ⁄ ∕ => /
    ： ∶ => :
    ∴ ✓ ✔ ✅ ■ => nothing
    ， 、 => ,
    ； => ;
    。 => .
    （ => (
    ） => )
    ［ => [
    ］ => ]
    ＝ => =
    ＋ => +
    ％ => %
    ⩽ ≦ => ≤
    ⩾ ≧ => ≥
    ≃ ∼ => ≈
    ⋯ => …
    ½ => \frac{1}{2}
    ⅓ => \frac{1}{3}
    ⅔ => \frac{2}{3}
    ¼ => \frac{1}{4}
    ¾ => \frac{3}{4}
    ⅕ => \frac{1}{5}
    ⅖ => \frac{2}{5}
    ⅗ => \frac{3}{5}
    ⅘ => \frac{4}{5}
    ⅙ => \frac{1}{6}
    ⅚ => \frac{5}{6}
    ⅛ => \frac{1}{8}
    ⅜ => \frac{3}{8}
    ⅝ => \frac{5}{8}
    ⅞ => \frac{7}{8}
    √ => \sqrt
    ∛ => \sqrt[3]
    ∜ => \sqrt[4]
    º ˚ => °
    ø Ø => ∅
    ∣ => |
    ‖ => \|
    〈 => ⟨
    〉 => ⟩
    α => \alpha
    β => \beta
    γ => \gamma
    δ => \delta
    ε => \epsilon
    θ => \theta
    λ => \lambda
    μ µ => \mu
    ρ => \rho
    σ => \sigma
    τ => \tau
    φ ϕ => \phi
    ω => \omega
    Δ ∆ => \Delta
    Ω => \Omega
    ∠ => \angle
    """,
        end=" ",
    ),
}
"""A character => what it becomes"""
_POWERS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_INDEXES = dict(zip("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n", strict=True))


def _raised(text: str) -> str:
    """Unicode powers and indexes as `^{...}` and `_{...}`."""
    for characters, mark in ((_POWERS, "^"), (_INDEXES, "_")):
        text = re.sub(
            f"[{''.join(characters)}]+",
            lambda match, c=characters, m=mark: f"{m}{{{''.join(c[x] for x in match[0])}}}",  # type: ignore[misc]
            text,
        )
    return text


# --------------------------------------------------------------------------------------- wrappers
_WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("__", "__"),
    ("``", "''"),
    ("`", "`"),
    ("'", "'"),
    ("{", "}"),
)


def _unwrapped(text: str) -> str:
    """Removes dollars, `**` and braces around the whole answer."""
    text = text.strip()
    is_wrapped = True
    while is_wrapped:
        is_wrapped = False
        for left, right in _WRAPPERS:
            inner = text[len(left) : -len(right)]
            is_pair = len(text) > len(left) + len(right) - 1 and inner != ""
            if is_pair and text.startswith(left) and text.endswith(right):
                if left in inner or right in inner:
                    continue
                text = inner.strip()
                is_wrapped = True
    return text


# ------------------------------------------------------------------------------------------ words
_TEXT = re.compile(
    r"\\(?P<name>text(?:bf|it|rm|sf|tt|sc|up|normal|md)?|mbox|hbox|mathrm|operatorname\*?|emph"
    r"|mathsf|mathtt|mathbf|boldsymbol|bm|mathit|mathnormal|bf|rm|underline|textcolor\{\w+\}"
    r"|color\{\w+\})\s*\{(?P<content>(?:[^{}]|\^\{-?\d\})*)\}"
)
_RUN = re.compile(r"[^\W\d_]+(?:['.-][^\W\d_]+)*", re.UNICODE)
_POINT_OF_SHORT_WORD = re.compile(r"([A-Za-z]{2}|\.[A-Za-z])\.(?=\s|$)")
_SPACE_OR_DOT = re.compile(r"\\(?:[,;:! ]|cdot(?![A-Za-z]))")
"""between units: `\\mathrm{m\\,s^{-1}}`"""
_LETTER_MACROS = {"mathbf", "boldsymbol", "bm", "mathit", "mathnormal", "mathsf", "mathtt"}


def _quoted_content(match: "re.Match[str]") -> str:
    """A text macro's content: its words quoted, the rest as it is."""
    content = _SPACE_OR_DOT.sub(" ", match["content"].replace("$", ""))
    content = _POINT_OF_SHORT_WORD.sub(r"\1", content)
    is_letter = re.fullmatch(r"\s*[A-Za-z]\s*", content) is not None
    if is_letter and (match["name"] in _LETTER_MACROS or content.strip() in "eidCP"):
        return content if match["name"] not in ("text", "mbox") else f'"{content.strip()}"'
    if "\\" in content:
        return f" {content} "
    return " " + _RUN.sub(lambda run: f'"{run[0]}"', content) + " "


def _without_text_macros(text: str) -> str:
    """`\\text{...}` and its siblings, from the inner one to the outer one."""
    for _ in range(4):
        replaced = _TEXT.sub(_quoted_content, text)
        if replaced == text:
            break
        text = replaced
    return text


_JOINED = re.compile(r'"([^"]*)"[\s~]*"([^"]*)"')


def _joined_words(text: str) -> str:
    """Neighbours become one: `"at" "least"` -> `"at least"`."""
    replaced = _JOINED.sub(r'"\1 \2"', text)
    while replaced != text:
        text = replaced
        replaced = _JOINED.sub(r'"\1 \2"', text)
    return text


# ---------------------------------------------------------------------------------------- commands
_COMMANDS = _table(r"""
    left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl => nothing
    Biggr middle limits displaystyle textstyle scriptstyle nolimits => nothing
    mathop large Large LARGE huge Huge small tiny normalsize underbrace => nothing
    overbrace ensuremath boxed fbox mathord mathopen mathclose strut => nothing
    phantom hfill bf rm it negthinspace => nothing
    nicefrac sfrac xfrac dfrac tfrac cfrac => \frac
    quad qquad thinspace enspace space newline thickspace medspace => space
    nobreakspace => space
    dbinom tbinom => \binom
    le leq leqslant => ≤
    ge geq geqslant => ≥
    lt => <
    gt => >
    ne neq => ≠
    equiv => ≡
    approx sim simeq cong doteq => ≈
    cdot ast => ·
    times => ×
    div divide => ÷
    pm => ±
    mp => ∓
    cup bigcup => ∪
    cap bigcap => ∩
    in => ∈
    setminus backslash => ∖
    emptyset varnothing => ∅
    infty infin => ∞
    pi => π
    to rightarrow Longrightarrow Rightarrow implies iff => →
    mid vert lvert rvert => |
    lVert rVert Vert => \|
    lbrace => ⦃
    rbrace => ⦄
    lbrack => [
    rbrack => ]
    langle => ⟨
    rangle => ⟩
    lfloor => ⌊
    rfloor => ⌋
    lceil => ⌈
    rceil => ⌉
    ldots cdots dots dotsc dotsb dotsm => …
    R reals => ℝ
    Z => ℤ
    N => ℕ
    Q => ℚ
    C => ℂ
    colon => :
    degree circ => °
    land wedge => and
    lor vee => or
    prime => '
    euro => €
    pounds => £
    therefore checkmark blacksquare qed => nothing
    lg => \log_{10}
    slash => /
    varepsilon => \epsilon
    vartheta => \theta
    varphi => \phi
    imath => i
    percent => %
    minus => -
    plus => +
""")
"""Commands without their backslash => what they become"""
_BLACKBOARD = {"R": "ℝ", "Z": "ℤ", "N": "ℕ", "Q": "ℚ", "C": "ℂ"}

# ---------------------------------------------------------------------------------------- numbers
_GROUP = r"(?:\\[,;:!]|\{,\}|\\ |~|\\thinspace|,\\!|\{\\,\}| |')"
_GROUPED = re.compile(rf"(?<![\d.,\w])([1-9]\d{{0,2}})((?:{_GROUP}+\d{{3}})+)(?!\d|{_GROUP}*\d)")


def _ungrouped(text: str) -> str:
    r"""`1\,250`, `1{,}250`, `1 250` -> 1250."""
    return _GROUPED.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)


_MATRIX = re.compile(
    r"\\begin\s*\{(?P<name>[pbB]?(?:small)?matrix|array)\}(?:\s*\{[clr|\s]*\})?(?P<rows>.*?)"
    r"\\end\s*\{(?P=name)\}",
    re.DOTALL,
)
_ROW_ENDS = re.compile(r"\\\\(?:\[[^\]]*\])?|\\cr\b|\\hline")
CELL = "⸴"
ROW = "⸵"


def _with_matrices(text: str) -> str:
    r"""`\\begin{pmatrix}1&2\\3&4\\end{pmatrix}` -> `⟦1⸴2⸵3⸴4⟧`."""

    def rewritten(match: "re.Match[str]") -> str:
        rows = [row for row in _ROW_ENDS.split(match["rows"]) if row.strip()]
        return f"⟦{ROW.join(row.replace('&', CELL) for row in rows)}⟧"

    return _MATRIX.sub(rewritten, text)


_QUOTED_UNIT = r'("[^"]*"(?:\s*\^\s*\{?\d\}?)?)'
_REPEATING = r"(?<![\d.])(?=\d*\.\d{6,60}\s?…$)(\d*\.\d*?)(?:(\d)\2\2+|(\d{2,6})\3+)\s?…$"
"""`0.363636...`; fewer than six digits are rounded"""
_COUNT = r"(?:\{(\d+)\}|(\d))"


# A rule sees the text that the rules above it made.
SPELLINGS: tuple[Spelling, ...] = (
    Spelling(
        "dashes, spaces and letters of Unicode",
        _translated(_CHARACTERS),
        (("–7", "-7"), ("40\u00a0cm", '40"cm"'), ("½", r"\frac{1}{2}")),
    ),
    Spelling(
        "colours, fractions with \\over",
        _replaced(
            (r"\\color\s*\{\w+\}", ""),
            (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        ),
        ((r"{\color{red} 12}", "12"), (r"{1 \over 2}", r"\frac{1}{2}")),
    ),
    Spelling("powers and indexes of Unicode", _raised, (("x²", "x^{2}"), ("10⁻³", "10^{-3}"))),
    Spelling(
        "dollars, stars and braces around the answer",
        _unwrapped,
        (("$5$", "5"), (r"\(5\)", "5"), ("**5**", "5"), ("{-7}", "-7")),
    ),
    Spelling(
        "matrices",
        _with_matrices,
        ((r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "⟦1⸴2⸵3⸴4⟧"),),
    ),
    Spelling(
        "groups of three digits",
        _ungrouped,
        ((r"1\,234\,567", "1234567"), ("1 250", "1250"), ("1{,}250", "1250"), ("1 2", "1 2")),
    ),
    Spelling(
        "points, colons and commas in braces",
        _replaced((r"(?<=\d)\{,\}(?=\d)", "."), (r"(?<![A-Za-z])\{([.:])\}", r"\1")),
        (("2{,}5", "2.5"), ("2{.}5", "2.5"), ("7{:}30", "7:30"), (r"5\text{.}", "5")),
    ),
    Spelling(
        "words of text macros in quotes",
        lambda text: _joined_words(_without_text_macros(text)),
        (
            (r"40\text{ cm}", '40"cm"'),
            (r"\textbf{(B)}", '("B")'),
            (r"\mathrm{e}", "e"),
            (r"\text{at }\text{least }40", '"at least"40'),
            (r"\mathbf{5}", "5"),
            (r"8\,\mathrm{cm^{2}}", '8"cm"^{2}'),
            (r"3\ \mathrm{m\,s^{-1}}", '3"m s"^{-1}'),
        ),
    ),
    Spelling(
        "braces of sets",
        _replaced((r"\\\{", SET_OPEN), (r"\\\}", SET_CLOSE)),
        ((r"\{1,2\}", "⦃1,2⦄"),),
    ),
    Spelling(
        "money, percent and number signs",
        _replaced(
            (r"\\textdollar|(?:(?<![A-Za-z])US\s?)?\\?\$", " $ "),
            (r"(?:\\text)?€", " € "),
            (r"\\texteuro", " € "),
            (r"\\textsterling|£", " £ "),
            (r"\\(?:textyen|yen)|¥", " ¥ "),
            (r"₹", " ₹ "),
            (r"\\[%]", "%"),
            (r"\\#", ""),
            (r"\\_", "_"),
            (r"\\&", '"and"'),
        ),
        (
            (r"\$18.90", "$18.90"),
            (r"US\$5", "$5"),
            (r"\texteuro 5", "€5"),
            (r"\pounds 5", "£5"),
            (r"25\%", "25%"),
        ),
    ),
    Spelling(
        "spaces of LaTeX",
        _replaced(
            (r"\\!", ""),
            (r"\\[,;:> ]|~", " "),
            (
                r"\\(?:hspace|vspace|hskip|kern|mkern)\*?\s*(?:\{[^{}]*\}|-?[\d.]+\s*(?:em|mu|pt))",
                " ",
            ),
            (r"\\phantom\s*\{[^{}]*\}", ""),
        ),
        ((r"2\,i", "2 i"), (r"5\ ", "5"), (r"3\hspace{2mm}x", "3 x")),
    ),
    Spelling(
        "blackboard letters",
        _replaced(
            *(
                (rf"\\(?:mathbb|mathbf|Bbb)\s*(?:\{{\s*{name}\s*\}}|{name})", sign)
                for name, sign in _BLACKBOARD.items()
            ),
            (r"\\(?:mathbb|mathcal|mathfrak|mathscr)\s*\{\s*(\w)\s*\}", r"\1"),
        ),
        ((r"\mathbb{R}", "ℝ"), (r"\mathcal{N}", "N")),
    ),
    Spelling(
        "commands with a sign of their own",
        _named(_COMMANDS),
        ((r"3\le x", "3≤x"), (r"\left(1,2\right)", "(1,2)"), (r"\dfrac12", r"\frac12")),
    ),
    Spelling(
        "degrees",
        _replaced(
            (r"\{\s*\}\s*(?=[\^_])", ""), (r"\^\s*(?:\{\s*°\s*\}|°)", "°"), (r"\^\s*\\?o\b", "°")
        ),
        ((r"40^\circ", "40°"), (r"40^{\circ}", "40°")),
    ),
    Spelling(
        "operators of plain text",
        _replaced(
            (r"<=|=<", "≤"),
            (r">=", "≥"),
            (r"!=|\\not\s*=", "≠"),
            (r"==", "="),
            (r"\*\*", "^"),
            (r"\*", "·"),
            (r"\+/-|\+-", "±"),
            (r"\.\.\.+", "…"),
            (r"=>|->", "→"),
            (r":=", "="),
            (r"(?<=\d) x (?=\d)", "×"),
        ),
        (("x<=3", "x≤3"), ("2*3", "2·3"), ("x**2", "x^2")),
    ),
    Spelling(
        "binomial coefficients",
        _replaced(
            (rf"(?:\^|_)\s?{_COUNT}\s?C\s?_\s?{_COUNT}", r"\\binom{\1\2}{\3\4}"),
            (rf"C\s?_\s?{_COUNT}\s?\^\s?{_COUNT}", r"\\binom{\1\2}{\3\4}"),
            (rf"C\s?\^\s?{_COUNT}\s?_\s?{_COUNT}", r"\\binom{\3\4}{\1\2}"),
            (r"(?<![\w.])(\d+)\s?C\s?(\d+)(?![\d.])", r"\\binom{\1}{\2}"),
        ),
        (("{}_{10}C_3", r"\binom{10}{3}"), ("C_{10}^3", r"\binom{10}{3}")),
    ),
    Spelling(
        "scientific notation",
        _replaced(
            (r"(?<![\w.])(\d+\.\d*|\.\d+)[eE]([+-]?)0*(\d+)(?![\d.])", r"\1×10^{\g<2>\3}"),
            (r"(?<![\w.])(\d+)[eE]([+-])0(\d+)(?![\d.])", r"\1×10^{\g<2>\3}"),
            (r"(?<![\w.])(\d+)[eE]\+?(\d+)(?![\d.])", r"\1×10^{\2}"),
            (r"(?<![\w.])(\d+)[eE]-(\d\d+)(?![\d.])", r"\1×10^{-\2}"),
            (r"\^\{\+", "^{"),
        ),
        (("1e-05", "1×10^{-5}"), ("1.25e3", "1.25×10^{3}"), ("1E+06", "1×10^{6}")),
    ),
    Spelling(
        "periods that repeat",
        _replaced(
            (r"\\(?:overline|bar|overbar)\s*(?:\{\s*(\d+)\s*\}|(\d))", r"⟪\1\2⟫"),
            (r"\\dot\s*\{?(\d)\}?(\d*)\s*\\dot\s*\{?(\d)\}?", r"⟪\1\2\3⟫"),
            (r"\\dot\s*(?:\{(\d)\}|(\d))", r"⟪\1\2⟫"),
            (_REPEATING, r"\1⟪\2\3⟫"),
        ),
        (
            (r"0.\overline{3}", "0.⟪3⟫"),
            (r"0.\dot{3}", "0.⟪3⟫"),
            (r"0.\dot{1}42\dot{7}", "0.⟪1427⟫"),
            (r"0.166666\ldots", "0.1⟪6⟫"),
            ("0.272727...", "0.⟪27⟫"),
            ("0.333...", "0.333…"),
            ("3.141592...", "3.141592…"),
        ),
    ),
    Spelling(
        "units with a slash",
        lambda text: BARE_UNITS.sub(r'"\g<first>"\g<power>/"\g<second>"', text),
        (("10 m/s", '10"m"/"s"'), ("60 km/h", '60"km"/"h"'), ("9.8 m/s^2", '9.8"m"/"s"^2')),
    ),
    Spelling(
        "bare words in quotes",
        lambda text: _joined_words(bare_words(text)),
        (
            ("40 degrees", '40"degrees"'),
            ("x=5 or x=6", 'x=5"or"x=6'),
            ("sin x", r"\sin x"),
            ("sqrt(2)", r"\sqrt(2)"),
        ),
    ),
    Spelling(
        "fractions of units",
        _replaced(
            (
                rf"(?<=[\d)}}])\s*\\frac\s*\{{\s*{_QUOTED_UNIT}\s*\}}\s*\{{\s*{_QUOTED_UNIT}\s*\}}$",
                r"\1/\2",
            )
        ),
        (
            (r"12\ \frac{\text{km}}{\text{h}}", '12"km"/"h"'),
            (r"9.8\ \frac{\mathrm{m}}{\mathrm{s}^2}", '9.8"m"/"s"^2'),
        ),
    ),
    Spelling(
        "end of the sentence, line breaks",
        _replaced(
            (r"(?:[\s.,;:]|\\\\|\\$)+$", ""),
            (r"^(?:[\s,;:=]|\\\\)+", ""),
            (r'(?<=[\w)}])\s*\(("[^"]*")\)$', r"\1"),
        ),
        (("5.", "5"), (r"5\\", "5"), ("5,", "5")),
    ),
    Spelling(
        "spaces",
        _replaced(
            (r"\s+", " "),
            (r'\s*("[^"]*")\s*', r"\1"),
            (r"\s*([=<>≤≥≠≡≈∈,;:∪∩∖±∓×·÷{}()\[\]⦃⦄^_+$€£¥₹%°/-])\s*", r"\1"),
        ),
        (("- 7", "-7"), ("3 : 4", "3:4")),
    ),
)

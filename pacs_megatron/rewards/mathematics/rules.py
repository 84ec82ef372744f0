r"""The rules of `math` in one table: what counts as the same answer, and what does not.

Each example is a pair (gold answer, content of the box), and a test. The spellings of operators,
spaces and words have a table of their own (spelling.py).
"""

from typing import NamedTuple

Pairs = tuple[tuple[str, str], ...]


class Rule(NamedTuple):
    """A rule with pairs that are right and pairs that are wrong."""

    name: str
    says: str
    right: Pairs
    wrong: Pairs


RULES: tuple[Rule, ...] = (
    Rule(
        "exact numbers",
        "Numbers are compared exactly: integers, fractions, decimals, repeating decimals.",
        right=(("0.75", r"\frac{3}{4}"), ("3", "3.0"), (r"\frac{1}{3}", r"0.\overline{3}")),
        wrong=(("3", "3.0001"), ("0.9999999", "1"), ("10^{20}", "10^{20}+1")),
    ),
    Rule(
        "other constants",
        "Roots, logarithms, pi are equal to 30 digits, relative to their size.",
        right=((r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"), (r"\ln 9", r"2\ln 3")),
        wrong=(("e^{-20}", "e^{-21}"), (r"\sqrt{2}", r"\sqrt{2.000001}")),
    ),
    Rule(
        "rounded decimals",
        "A decimal with at least 6 digits is right for a number that has no end; a float of 64 "
        "bits (15 digits) is right for every number that it rounds.",
        right=(
            (r"\frac{4}{11}", r"0.363636\ldots"),
            (r"\frac{1}{3}", "0.333333"),
            ("0.30000000000000004", "0.3"),
        ),
        wrong=((r"\frac{1}{3}", "0.333"), (r"\sqrt{2}", "1.414"), ("0.1", "0.100000001")),
    ),
    Rule(
        "numbers of JSON",
        "A power of ten in the form of Python and JSON.",
        right=(("1e-05", "10^{-5}"), ("1e-05", "0.00001"), ("1e+20", "10^{20}")),
        wrong=(("1e-05", "e-5"), ("1e-05", "10^{-6}")),
    ),
    Rule(
        "separators of thousands",
        "Commas, spaces, or several points between groups of three digits; a comma before other "
        "than three digits is a decimal comma if the gold answer has a point.",
        right=(("1234567", "1,234,567"), ("1234567", r"1\,234\,567"), ("2.5", "2,5")),
        wrong=(("1250", "1.250"), ("12", "1 2"), ("3,7", "3.7"), ("22/5", "4,4")),
    ),
    Rule(
        "mixed numbers",
        "An integer directly before a fraction of integers below 1 is their sum.",
        right=(("7/3", r"2\frac{1}{3}"), ("7/3", "2 1/3"), (r"-1\frac{1}{2}", "-1.5")),
        wrong=((r"\frac{2}{3}", r"2\frac{1}{3}"), ("11/2", "1 1/2")),
    ),
    Rule(
        "factors side by side",
        "Two factors side by side are a product, except two bare numbers, which are nothing.",
        right=(("6", "(2)(3)"), ("abc", r"a \cdot b \cdot c")),
        wrong=(("5", "(2)(3)"), ("7", "3 4"), ("12", "3 4")),
    ),
    Rule(
        "expressions",
        "Expressions with variables are equal if they are at six points: integers, positive and "
        "negative numbers. Variables keep their capitals.",
        right=(("x^2-1", "(x-1)(x+1)"), ("1", r"\sin^2 x+\cos^2 x"), ("x^2+C", "x^2+c")),
        wrong=(("x^2-1", "(x-1)^2"), (r"\pi r^2", r"\pi R^2"), ("|x|", "x"), ("F_n", "F_{n+1}")),
    ),
    Rule(
        "units",
        "A unit may be left out. Known units of one kind are converted, other kinds are wrong.",
        right=(
            ("40", r"40\text{ cm}"),
            (r"40\text{ cm}", "40"),
            (r"12\text{ m}", r"1200\text{ cm}"),
            (r"50\text{ mph}", r"50\text{ miles per hour}"),
            (r"4\text{ m/s}", r"4\ \mathrm{m\,s^{-1}}"),
        ),
        wrong=((r"40\text{ cm}", r"40\text{ cm}^2"), ("40", r"4\text{ cm}")),
    ),
    Rule(
        "money",
        "Signs, names and codes of one currency are the same; another currency is wrong.",
        right=(
            (r"\$7.20", r"\text{USD } 7.20"),
            ("7.20", r"7.20\text{ euros}"),
            ("75¢", r"\$0.75"),
        ),
        wrong=((r"\$7.20", r"7.20\text{ euros}"), (r"\$7.20", "£7.20"), ("£5", "€5")),
    ),
    Rule(
        "letters behind a number",
        "A bare letter is a unit only if the gold answer has no variable.",
        right=(("40", "40 m"), ("4cm", "4"), ("10 m/s", "10")),
        wrong=(("2m", "2"), ("2d", "2"), ("10-2t", "8"), (r"2\pi h", r"2\pi"), ("3t", "3s")),
    ),
    Rule(
        "words behind or before a number",
        "Words that change a number are no unit; `thousand` and its like multiply.",
        right=(("12000", r"12\text{ thousand}"), ("12", r"\text{The answer is }12")),
        wrong=(
            ("40", r"40\text{ or more}"),
            ("40", r"\text{at least }40"),
            ("12", r"12\text{ dozen}"),
        ),
    ),
    Rule(
        "percent",
        "25 % is 25 and 0.25; a number below 1 is no percentage with the same digits.",
        right=((r"25\%", "25"), (r"25\%", "0.25"), ("0.25", r"25\%"), ("25", r"25\%")),
        wrong=(("0.25", r"0.25\%"), (r"25\%", "2.5")),
    ),
    Rule(
        "degrees",
        "At the end a degree sign is a unit, inside of a function it counts.",
        right=(
            ("40", r"40^\circ"),
            (r"\frac{1}{2}", r"\sin 30^\circ"),
            (r"30^\circ", r"\frac{\pi}{6}"),
        ),
        wrong=((r"\cos 1", r"\cos 1^\circ"),),
    ),
    Rule(
        "names",
        "A name before `=` may be left out, but another single letter is another quantity.",
        right=(("5", "x = 5"), ("5", r"\text{Area} = 5"), ("x=5", "5"), ("5", "f(2)=5")),
        wrong=(("x=5", "y=5"), ("x=5", "x=-5")),
    ),
    Rule(
        "chains of equations",
        "All sides with a value have to agree.",
        right=(("12", r"x=3\cdot 4=12"), ("5", "2+3=5")),
        wrong=(("5", "4=5"), ("5", "1=2=3=4=5"), ("12", "12=11")),
    ),
    Rule(
        "equations",
        "Equations are the same up to a constant factor and the order of their sides.",
        right=(("y=2x+1", "y-2x=1"), ("x^2+y^2=4", "x^2+y^2=2^2"), ("2x-y=3", "4x-2y=6")),
        wrong=(("y=2x+1", "y=2x-1"), ("x^2+y^2=4", "x^2+y^2=2")),
    ),
    Rule(
        "any integer",
        "The letter that stands for any integer is free if both answers name it.",
        right=(
            (r"\frac{\pi}{3}+2k\pi, k\in\mathbb{Z}", r"x=\frac{\pi}{3}+2n\pi,\ n\in\mathbb{Z}"),
            (r"k\pi, k\in\mathbb{Z}", r"n\pi\ (n\in\mathbb{Z})"),
            (r"6k+1, k\in\mathbb{Z}", r"6m+1 \text{ where } m \text{ is an integer}"),
        ),
        wrong=(
            (r"\frac{\pi}{3}+2k\pi, k\in\mathbb{Z}", r"\frac{\pi}{3}+n\pi, n\in\mathbb{Z}"),
            (r"6k+1, k\in\mathbb{Z}", "6m+1"),
        ),
    ),
    Rule(
        "inequalities and intervals",
        "Sets of real numbers are equal in every spelling; open and closed ends differ.",
        right=(
            ("k<3", "3>k"),
            ("k<3", r"(-\infty,3)"),
            ("[0,1)", r"0\le x<1"),
            (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2"),
            (r"(-\infty,2)\cup(2,\infty)", r"x\ne 2"),
        ),
        wrong=(("[0,1)", "(0,1)"), ("x>5", "5"), ("5", ">5"), ("x>4", r"x\ge 4")),
    ),
    Rule(
        "lists and sets",
        "In any order, but with the same items. Both signs of `±` are items.",
        right=(
            ("1,-2", r"-2 \text{ and } 1"),
            (r"\{1,2,3\}", "1,2,3"),
            (r"\pm 3", "-3, 3"),
            ("1,-2", "x=1, x=-2"),
        ),
        wrong=(("1,-2", "1"), ("1,-2", "1,-2,3"), ("5", "4, 5, 6"), ("5", r"x=4 \text{ or } x=5")),
    ),
    Rule(
        "tuples and assignments",
        "In their order, or by their names.",
        right=(("(3,5)", "(x,y)=(3,5)"), ("(3,5)", "x=3, y=5"), ("p=7,q=5", "q=5,p=7")),
        wrong=(("(3,5)", "(5,3)"), ("(3,5)", "[3,5]"), ("a=2, b=1", "a=1,b=2")),
    ),
    Rule(
        "matrices",
        "Brackets of any shape; a column is also a tuple. A factor before it multiplies each item.",
        right=(
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
            (r"\begin{pmatrix}0.5\\1\end{pmatrix}", r"\frac12\begin{pmatrix}1\\2\end{pmatrix}"),
        ),
        wrong=(
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"-\begin{pmatrix}1\\2\end{pmatrix}"),
        ),
    ),
    Rule(
        "ratios",
        "Ratios are the same up to a factor; a ratio of two numbers is also their fraction.",
        right=(("3:4", r"3\colon 4"), ("3:4", "6:8"), ("3:4", r"\frac{3}{4}")),
        wrong=(("1:2:3", "1:2"), ("3:4", "4:3")),
    ),
    Rule(
        "times of the day",
        "`7:30` is no ratio and no division.",
        right=(("7:30", r"7:30\text{ p.m.}"), (r"4:45\text{ PM}", "16:45"), ("12:00", "12:00")),
        wrong=(
            ("7:30", "7:45"),
            ("7:30", "14:60"),
            ("10:05", "2:01"),
            ("2:5", "4:10"),
            (r"4:45\text{ PM}", r"4:45\text{ AM}"),
        ),
    ),
    Rule(
        "bases",
        "The base may be left out, another one is wrong.",
        right=(("1011_2", "1011_{2}"), ("1011_2", "1011"), ("1011_2", "1011_2=11_{10}")),
        wrong=(("1011_2", "1011_3"), ("1011_2", "11"), ("1011_2", "1011_2=12_{10}")),
    ),
    Rule(
        "remainders",
        "The modulus may be left out; with it, all numbers of one class are equal.",
        right=(("10", r"x\equiv 10\pmod{17}"), (r"2\pmod 5", r"7\pmod 5")),
        wrong=((r"2\pmod 5", r"2\pmod 7"), (r"2\pmod 5", "3")),
    ),
    Rule(
        "multiple choice",
        "The letter counts; brackets and the text behind it do not.",
        right=(
            ("B", r"\text{B) 12}"),
            (r"\text{(B)}", "B"),
            ("B", "B."),
            ("A, C", "CA"),
            ("AC", r"\text{A and C}"),
        ),
        wrong=(
            ("B", r"\text{A or B}"),
            ("B", "(B), (C)"),
            ("B", r"\text{B: or C}"),
            ("B", "C"),
            ("A, C", "A"),
        ),
    ),
    Rule(
        "words",
        "Without capitals, articles and the plural; names in any order.",
        right=((r"\text{even}", "Even"), (r"\text{Alice and Bob}", r"\text{Bob and Alice}")),
        wrong=((r"\text{Alice and Bob}", r"\text{Alice}"), (r"\text{even}", r"\text{odd}")),
    ),
    Rule(
        "no solution",
        "The empty set in signs and words.",
        right=((r"\emptyset", r"\varnothing"), (r"\emptyset", r"\text{no solution}")),
        wrong=((r"\emptyset", "0"), (r"\emptyset", r"\{0\}")),
    ),
    Rule(
        "large numbers",
        "A number above the limits of value.py is equal to nothing but its own text.",
        right=(("2^{2024}", "4^{1012}"),),
        wrong=(("5", "10^{10^{10}}"), ("5", "5!!!!!"), ("5", "9^{9^{9^{9}}}")),
    ),
    Rule(
        "sums, integrals, limits",
        "math-verify compares them (symbolic.py).",
        right=(("n^2", r"\sum_{k=1}^{n}(2k-1)"), (r"\frac{1}{3}", r"\int_0^1 x^2 dx")),
        wrong=((r"\frac{1}{2}", r"\int_0^1 x^2 dx"),),
    ),
)

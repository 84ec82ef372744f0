"""How dense the code is: tokens a line, and constructs that hide steps.

`--list` names their places.

    .venv/bin/python tools/density.py                       # a row for each package, and the totals
    .venv/bin/python tools/density.py --list pacs_megatron/policy
    .venv/bin/python tools/density.py --checkout ../before  # the same table for another checkout

Tokens are those of code: no comments, no strings. Lines are those that are not blank, so a
docstring and a comment count as lines. The field: OLMo-core 5.9, slime 6.3, prime-rl 7.3 tokens a
line.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_COLUMNS = 100
_NOT_CODE = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.STRING,
    tokenize.ENDMARKER,
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True)
class Counts:
    """Sums over files; a line is one that is not blank."""

    lines: int = 0
    tokens: int = 0
    comments: int = 0
    conditionals: int = 0
    comprehensions: int = 0
    wide: int = 0
    places: list[str] = field(default_factory=list)
    """`file:line: rule` of each construct that tests/project/test_style.py rejects"""

    def add(self, other: Counts) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def count(path: Path, root: Path = ROOT) -> Counts:
    """The counts of one file."""
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    nodes = list(ast.walk(ast.parse(text)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    name = path.relative_to(root)
    return Counts(
        lines=len(lines),
        tokens=sum(token.type not in _NOT_CODE for token in tokens),
        comments=sum(line.lstrip().startswith("#") for line in lines),
        conditionals=sum(isinstance(node, ast.IfExp) for node in nodes),
        comprehensions=sum(isinstance(node, _COMPREHENSIONS) for node in nodes),
        wide=sum(len(line) > MAX_COLUMNS for line in lines),
        places=[f"{name}:{line}: {rule}" for line, rule in broken_rules(nodes)],
    )


def broken_rules(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, rule) of each construct that packs several steps into one line."""
    for node in nodes:
        if isinstance(node, ast.Assign) and _assigns_unrelated_values(node):
            yield node.lineno, "a tuple assignment of unrelated values"
        if isinstance(node, ast.IfExp) and _has_inner_conditional(node):
            yield node.lineno, "a nested conditional expression"
        if isinstance(node, _COMPREHENSIONS) and _has_several_clauses(node):
            yield node.lineno, "a comprehension with more than one `for` or `if`"


def _assigns_unrelated_values(node: ast.Assign) -> bool:
    """`a, b = x, y`; a swap is allowed."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    assigned = {ast.unparse(element) for element in target.elts}
    expressions = [part for part in ast.walk(node.value) if isinstance(part, ast.expr)]
    read = {ast.unparse(expression) for expression in expressions}
    return not assigned & read


def _has_inner_conditional(node: ast.IfExp) -> bool:
    inner_nodes = list(ast.walk(node))[1:]  # the first one is `node`
    return any(isinstance(inner, ast.IfExp) for inner in inner_nodes)


def _has_several_clauses(
    node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp,
) -> bool:
    return len(node.generators) > 1 or len(node.generators[0].ifs) > 1


def tracked_files(root: Path, below: Sequence[str] = ()) -> list[Path]:
    """Python files of the repository, new ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *below]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    paths = [root / name for name in done.stdout.splitlines() if name.endswith(".py")]
    return sorted(path for path in paths if path.is_file())


def room_of(path: Path, root: Path) -> str:
    """`pacs_megatron/policy` for a file of that package, `tests/unit` for a test."""
    parts = path.relative_to(root).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def row(name: str, counts: Counts) -> str:
    """One line of the table."""
    lines = max(counts.lines, 1)
    return (
        f"{name:32}{counts.lines:8}{counts.tokens / lines:10.2f}"
        f"{1000 * counts.conditionals / lines:12.1f}{1000 * counts.comprehensions / lines:12.1f}"
        f"{100 * counts.comments / lines:10.1f}{counts.wide:7}{len(counts.places):8}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="How dense the code is.")
    parser.add_argument("paths", nargs="*", help="files or folders; default: all tracked files")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="default: this one")
    parser.add_argument("--list", action="store_true", help="name the places")
    options = parser.parse_args()
    root = options.checkout.resolve()
    paths = tracked_files(root, options.paths)
    if not paths:
        parser.error(f"no tracked Python file in {options.paths or root}")

    rooms: dict[str, Counts] = {}
    totals: dict[str, Counts] = {}
    for path in paths:
        counts = count(path, root)
        if options.list:
            for place in counts.places:
                print(place)
        top = path.relative_to(root).parts[0]
        rooms.setdefault(room_of(path, root), Counts()).add(counts)
        totals.setdefault(f"{top} (all)", Counts()).add(counts)

    titles = ("a ? b : c", "compreh.", "comments", "wide", "packed")
    units = ("of 1,000", "of 1,000", "%", "", "")
    print(f"{'':32}{'lines':>8}{'tokens':>10}{_columns(titles)}")
    print(f"{'':32}{'':8}{'a line':>10}{_columns(units)}")
    for name, counts in sorted(rooms.items()):
        print(row(name, counts))
    for name, counts in sorted(totals.items()):
        print(row(name, counts))
    return 0


def _columns(texts: Sequence[str]) -> str:
    """The last columns of the header."""
    widths = (12, 12, 10, 7, 8)
    return "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))


if __name__ == "__main__":
    sys.exit(main())

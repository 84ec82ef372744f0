"""One step a line:
constructs that hide steps are rejected where ruff has no rule (tools/density.py finds them).
"""

from __future__ import annotations

import ast

import pytest

from tools.density import ROOT, broken_rules, count, tracked_files

FOLDERS = ("pacs_megatron", "tests", "benchmarks", "tools", "examples", "conversion")


@pytest.mark.parametrize("folder", FOLDERS)
def test_one_step_a_line(folder: str) -> None:
    places = []
    for path in tracked_files(ROOT, [folder]):
        for place in count(path).places:
            places.append(place)
    assert not places, "\n".join(places)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a, b = 1, 2", "tuple assignment"),
        ("self.a, b = f(), g()", "tuple assignment"),
        ("a = 1 if x else 2 if y else 3", "nested conditional"),
        ("a = 1 if x else f(2 if y else 3)", "nested conditional"),
        ("a = [x for y in z for x in y]", "comprehension"),
        ("a = {x for x in y if x if z}", "comprehension"),
        ("a, b = b, a", None),
        ("a, b = f()", None),
        ("a, *b = c", None),
        ("a = 1 if x else 2", None),
        ("a = [x for x in y if x and z]", None),
    ],
)
def test_the_rules(source: str, expected: str | None) -> None:
    rules = [rule for _, rule in broken_rules(list(ast.walk(ast.parse(source))))]
    if expected is None:
        assert not rules
    else:
        assert len(rules) == 1
        assert expected in rules[0]


def test_modules_that_python_runs_name_their_logger() -> None:
    """Their `__name__` is `__main__`, outside of the package's logger, so INFO would be lost."""
    wrong = []
    for path in (ROOT / "pacs_megatron").rglob("*.py"):
        source = path.read_text()
        if '__name__ == "__main__"' in source and "getLogger(__name__)" in source:
            wrong.append(path.name)
    assert not wrong

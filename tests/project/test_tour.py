"""The tour: its ten functions exist, and so do the names beside them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STOP = re.compile(
    r"^\| (\d+) \| \[`([\w/]+\.py)`\]\(\.\./(pacs_megatron/[\w/]+\.py)\) \| `([\w.]+)` \| (.+) \|$",
    re.MULTILINE,
)
STOPS = STOP.findall((ROOT / "docs" / "tour.md").read_text(encoding="utf-8"))


def functions(source: str) -> set[str]:
    """`name` of each function of a module, `Class.name` of each method."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    names.add(f"{node.name}.{member.name}")
    return names


def test_the_tour_has_ten_stops_in_order() -> None:
    assert [number for number, *_ in STOPS] == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize(("label", "path", "function", "text"), [stop[1:] for stop in STOPS])
def test_the_function_of_a_stop_exists(label: str, path: str, function: str, text: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert path == f"pacs_megatron/{label}"
    assert function in functions(source)
    for name in re.findall(r"`(\w+)`", text):
        assert re.search(rf"\b{name}\b", source), f"{path} has no {name}"

"""Reads tests/inputs/*.yaml. tests/inputs/README.md describes the format."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.inputs import setup

FOLDER = Path(__file__).parents[2] / "inputs"
TIERS = ("test", "full", "campaign")
_HEAD = {"wrong", "reason", "more", *TIERS}


@dataclass(frozen=True)
class Case:
    """One wrong input."""

    name: str
    """the mistake, in words"""
    reason: str
    """the user's action, and why the outcome matters"""
    tier: str
    state: str = "a conversion"
    """state of world.py that the case starts from"""
    setup: dict[str, Any] = field(default_factory=dict)
    command: list[Any] = field(default_factory=list)
    shell: str = ""
    """a script instead of a command, with the program as `$P`"""
    env: dict[str, str] = field(default_factory=dict)
    server: Any = None
    """behaviour of servers.py of the address {s}"""
    ends: str | list[int] = "error"
    """`error`: one clear line, exit not 0; `works`: 0; `either`; or the only possible exit codes"""
    also: list[int] = field(default_factory=list)
    """exit codes that are right too, and need no line"""
    error: str | list[str] = ""
    """class of the error"""
    contains: list[str] = field(default_factory=list)
    """texts that one line of the error has"""
    matches: str = ""
    """a pattern in the output"""
    mentions: list[str] = field(default_factory=list)
    """texts of which the output has one"""
    shows: list[str] = field(default_factory=list)
    """texts in the output of a command that worked"""
    hides: list[str] = field(default_factory=list)
    """texts that the output lacks"""
    keeps: dict[str, Any] = field(default_factory=dict)
    """files that have this content afterwards"""
    exists: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    steps: list[int] | dict[str, list[int]] = field(default_factory=dict)
    """steps in the metrics of a run, if the command worked"""
    check: Any = None
    """functions of checks.py"""

    def __str__(self) -> str:
        return self.name


_FIELDS = {one.name for one in fields(Case)} - {"name", "reason", "tier", "setup"}
_LISTS = {"contains", "mentions", "shows", "hides", "exists", "absent", "also"}


@functools.cache
def load(area: str) -> tuple[Case, ...]:
    """The cases of one file."""
    path = FOLDER / f"{area}.yaml"
    groups = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    cases: list[Case] = []
    for group in groups:
        cases += _cases_of(group)
    counts = Counter(case.name for case in cases)
    twice = [name for name, count in counts.items() if count > 1]
    assert not twice, f"{path}: names that occur twice: {twice}"
    return tuple(cases)


def parameters(area: str) -> list[Any]:
    """The cases of one file as parameters of a test, each with the marker of its tier."""
    found = []
    for case in load(area):
        marks = [] if case.tier == "test" else [getattr(pytest.mark, case.tier)]
        found.append(pytest.param(case, marks=marks, id=_ascii(case.name)))
    return found


def _ascii(name: str) -> str:
    return name.encode("unicode_escape").decode()[:120]


def _cases_of(group: dict[str, Any]) -> Iterator[Case]:
    for inner in group.get("more", []):
        yield from _cases_of({"wrong": group["wrong"], "reason": group["reason"]} | inner)
    common = {key: value for key, value in group.items() if key not in _HEAD}
    if isinstance(common.get("command"), str):
        common["command"] = common["command"].split()
    has_place = "{it}" in repr(common)
    for tier in TIERS:
        rows = group.get(tier, {})
        if isinstance(rows, list):
            rows = {_name(row): row for row in rows}
        for name, value in rows.items():
            given = _filled(common, value) if has_place else common | (value or {})
            yield _case(f"{group['wrong']}: {name}", group["reason"], tier, given)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _name(row: Any) -> str:
    return row if isinstance(row, str) else " ".join(map(str, row))


def _case(name: str, reason: str, tier: str, given: dict[str, Any]) -> Case:
    options: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for key, value in given.items():
        if key in _FIELDS:
            options[key] = _listed(value) if key in _LISTS else value
        elif key in setup.VERBS:
            steps[key] = value
        elif key == "with":
            pass
        elif key == "reason":
            reason = value
        else:
            raise ValueError(f"{name}: `{key}` is neither an option of a case nor a verb")
    command = options.get("command", [])
    words = command.split() if isinstance(command, str) else list(command)
    options["command"] = words + _listed(given.get("with", []))
    return Case(name=name, reason=reason, tier=tier, setup=steps, **options)


def _filled(template: Any, value: Any) -> Any:
    """`template` with `value` in the place of {it}; {key} is its text before the first `=`."""
    if template == "{it}":
        return value
    if isinstance(template, str):
        text = template.replace("{it}", str(value))
        return text.replace("{key}", str(value).partition("=")[0])
    if isinstance(template, dict):
        return {_filled(key, value): _filled(inner, value) for key, inner in template.items()}
    if isinstance(template, list):
        filled: list[Any] = []
        for inner in template:
            if inner == "{it}" and isinstance(value, list):
                filled.extend(value)
            else:
                filled.append(_filled(inner, value))
        return filled
    return template

"""The judge of wrong inputs rejects a case that ends in each of the wrong ways."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.inputs.cases import FOLDER, Case, load
from tests.support.inputs.judge import judge
from tests.support.inputs.world import World

PYTHON = f"{sys.executable} -c"


class EmptyWorld:
    """Worlds with one file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def restore(self, state: str) -> World:
        """A folder with train.jsonl."""
        world = World(self._folder / "world")
        world.folder.mkdir()
        (world.folder / "train.jsonl").write_text("{}\n")
        return world


def run(folder: Path, script: str, **expected: Any) -> None:
    case = Case(name="a case", reason="a reason", tier="test", shell=script, **expected)
    judge(case, EmptyWorld(folder))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("true", "accepted"),
        ("exit 3", "no error line"),
        ("kill -9 $$", "ended by signal 9"),
        ("echo 'AError: x'; echo 'BError: y'; exit 1", "2 errors"),
        (f"{PYTHON} 'raise SystemExit(1/0)'", "Traceback"),
        ("printf 'AError: \\033[2J\\n'; exit 1", "control character"),
        ("echo 'AError: x'; rm {w}/train.jsonl; exit 1", "lost train.jsonl"),
        ("echo 'AError: x'; echo y > {w}/train.jsonl; exit 1", "lost train.jsonl"),
        ("echo 'AError: x'; touch {w}/canary; exit 1", "was executed"),
        ("echo 'AError: x'; touch {w}/a.partial; exit 1", "half-written a.partial"),
        ("echo 'AError: x'; touch {w}/o; exit 1", "output of a failed command"),
        ("echo 'AError: x'; exit 9", "found a violation"),
    ],
)
def test_the_general_contract(tmp_path: Path, script: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        run(tmp_path, script)


@pytest.mark.parametrize(
    ("expected", "fault"),
    [
        ({"ends": "works"}, "failed with 1"),
        ({"ends": [2]}, "exit code 1, expected one of"),
        ({"error": "BError"}, "the error is no BError"),
        ({"contains": ["run.steps"]}, "no line of the error has"),
        ({"matches": "y+"}, "in the output"),
        ({"mentions": ["y", "z"]}, "in the output"),
        ({"hides": ["run.seed"]}, "'run.seed' is shown"),
        ({"exists": ["y"]}, "y is missing"),
        ({"absent": ["train.jsonl"]}, "train.jsonl exists"),
        ({"keeps": {"train.jsonl": "years of work"}}, "train.jsonl is lost"),
        ({"check": {"json in": {"file": "text"}}}, "json in: no JSON"),
    ],
)
def test_what_a_case_adds(tmp_path: Path, expected: dict[str, Any], fault: str) -> None:
    script = "echo 'AError: run.seed: x'; echo no > {w}/text; exit 1"
    with pytest.raises(AssertionError, match=fault):
        run(tmp_path, script, **expected)


def test_a_case_that_ends_as_it_should(tmp_path: Path) -> None:
    run(tmp_path, "echo 'AError: run.seed: x'; exit 1", error="AError", contains=["run.seed"])


def test_every_case_has_a_name_and_a_reason() -> None:
    areas = {path.stem for path in FOLDER.glob("*.yaml")}
    tests = FOLDER.parent / "integration" / "inputs"
    assert areas == {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    for area in areas:
        for case in load(area):
            assert case.name.strip() and len(case.reason) > 20, case

"""Modules beside a reward file that it imports."""

from pathlib import Path

import pytest

from pacs_megatron.rewards.imports import imported_beside


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "reward.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import points", ["points"]),
        ("import points as p, words", ["points", "words"]),
        ("from points import SCALE", ["points"]),
        ("from tools import checks", ["tools", "tools.checks", "words"]),
        ("import tools.checks", ["tools", "tools.checks", "words"]),
        ("def reward(sample):\n    import points\n    return 1.0", ["points"]),
        ("import json, numpy, nothing", []),
        ("import reward", []),
        ("import first", ["first", "second"]),
        ("this is no Python", []),
        ("", []),
    ],
)
def test_imports_are_followed(tmp_path: Path, text: str, found: list[str]) -> None:
    file = write(
        tmp_path,
        {
            "reward.py": text + "\n",
            "points.py": "SCALE = 1.0\n",
            "words.py": "",
            "json.py": "",
            "unused.py": "",
            "tools/__init__.py": "",
            "tools/checks.py": "from words import X\n",
            "first.py": "import second\n",
            "second.py": "import first\n",
        },
    )
    assert sorted(imported_beside(file)) == found


def test_a_package_counts_with_its_relative_imports(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "own/__init__.py": "",
            "own/judges/__init__.py": "from .scale import SCALE\n",
            "own/judges/scale.py": "",
            "own/judges/reward.py": "from . import scale\nfrom ..texts import x\nimport beside\n",
            "own/texts.py": "import own.more\n",
            "own/more.py": "",
            "beside.py": "",
        },
    )
    found = imported_beside(tmp_path / "own" / "judges" / "reward.py")
    names = ["own", "own.judges", "own.judges.scale", "own.more", "own.texts"]
    assert sorted(found) == names


def test_neighbours_of_an_installed_module_do_not_count(tmp_path: Path) -> None:
    files = {"reward.py": "import points\n", "points.py": ""}
    assert imported_beside(write(tmp_path / "site-packages", files)) == {}
    assert list(imported_beside(write(tmp_path / "own", files))) == ["points"]

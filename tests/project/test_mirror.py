"""`tests/<tier>/<package>/test_<module>[_<aspect>].py` tests `<package>/<module>`:
a reader finds a test by a path.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
TIERS = ("unit", "contracts", "distributed", "integration", "fake_cuda", "te", "gpu")
NOT_MIRRORED = ("project", "golden", "support")
"""Rules of the repository, values of other projects, and code that tests share"""
SOURCES = (ROOT / "pacs_megatron", ROOT, TESTS)
"""A path below a tier is a path below one of these:
`objectives/`, `examples/`, `slurm/`, `inputs/`.
"""
SUFFIXES = (".py", ".sbatch", ".yaml")


def all_test_files() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def module_of(path: Path) -> Path | None:
    """The file that a test file tests, by its path; None if there is none."""
    relative = path.relative_to(TESTS)
    folder = Path(*relative.parts[1:-1])
    words = path.stem.removeprefix("test_").split("_")

    for count in range(len(words), 0, -1):
        name = "_".join(words[:count])
        for source in SOURCES:
            for suffix in SUFFIXES:
                module = (source / folder / name).with_suffix(suffix)
                if module.is_file():
                    return module
    return None


@pytest.mark.parametrize("tier", TIERS)
def test_each_test_file_is_beside_its_module(tier: str) -> None:
    files = sorted((TESTS / tier).rglob("test_*.py"))
    assert files
    lost = [str(path.relative_to(ROOT)) for path in files if module_of(path) is None]
    assert not lost, "no module of this name:\n" + "\n".join(lost)


def test_there_is_no_other_tier() -> None:
    known = {*TIERS, *NOT_MIRRORED}
    others = [
        str(path) for path in all_test_files() if path.relative_to(TESTS).parts[0] not in known
    ]
    assert not others


def test_no_test_imports_from_a_test_file() -> None:
    """Code that two test files share is in tests/support, where a reader looks for it."""
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = imported(node)
            wrong += [f"{path.relative_to(ROOT)}: {name}" for name in names if is_test_module(name)]
    assert not wrong, "\n".join(wrong)


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return []


def is_test_module(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "tests" and any(part.startswith("test_") for part in parts[1:])


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("unit/rollout/test_admission.py", "pacs_megatron/rollout/admission.py"),
        ("distributed/policy/test_engine_scores.py", "pacs_megatron/policy/engine.py"),
        ("integration/slurm/test_train_chain.py", "slurm/train.sbatch"),
        ("unit/rollout/test_hopes.py", None),
        ("unit/policy/test_admission.py", None),
    ],
)
def test_the_rule(path: str, module: str | None) -> None:
    assert module_of(TESTS / path) == (None if module is None else ROOT / module)

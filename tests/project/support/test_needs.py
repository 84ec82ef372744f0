"""A test whose tool is missing skips with the reason; in CI it fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import needs


@pytest.mark.parametrize(
    ("ci", "outcome"), [("0", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_a_missing_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("PACS_CI", ci)
    monkeypatch.setattr(needs, "SGLANG_PYTHON", tmp_path / "python")
    with pytest.raises(outcome, match="make install-sglang"):
        needs.require_sglang()


def test_no_test_skips_these_tools_by_itself() -> None:
    tests = Path(__file__).parents[2]
    tool = re.compile(r"skip\w*\([^\n]*(install-sglang|sandbox|Slurm)")
    assert not [
        path
        for path in tests.rglob("*.py")
        if path != Path(__file__) and tool.search(path.read_text())
    ]

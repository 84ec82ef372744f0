""".ci/run with replacements of `make` and pytest: its last line and its exit code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSED = "echo '==== 3 passed, 1 skipped in 1.00s ===='"


NEVER = "echo never; exit 1"


@pytest.mark.parametrize(
    ("test", "other", "full", "last", "code"),
    [
        (
            PASSED,
            "echo '==== 4 passed in 1.00s ===='",
            "echo '==== 2 passed, 7 deselected in 61.00s (0:01:01) ===='",
            "9 passed, 0 failed",
            0,
        ),
        (
            PASSED,
            PASSED,
            "echo '==== 1 failed, 2 passed, 1 error in 3.00s ===='; exit 1",
            "8 passed, 2 failed",
            1,
        ),
        (
            PASSED,
            PASSED,
            "echo '==== no tests ran in 0.10s ===='; exit 5",
            "6 passed, 0 failed",
            0,
        ),
        (
            PASSED,
            PASSED,
            "echo '!!!! KeyboardInterrupt !!!!'; echo '==== 2 passed in 9.00s ===='; exit 2",
            "8 passed, 0 failed",
            0,
        ),
        (PASSED, PASSED, "echo '==== 1 passed in 9.00s ===='; exit 3", "7 passed, 1 failed", 1),
        (
            "echo '==== 1 failed, 3 passed in 1.00s ===='; exit 2",
            NEVER,
            NEVER,
            "3 passed, 1 failed",
            1,
        ),
        (
            PASSED,
            "echo '==== 2 failed, 1 passed in 1.00s ===='; exit 2",
            NEVER,
            "4 passed, 2 failed",
            1,
        ),
        ("echo 'install: needs Python'; exit 2", NEVER, NEVER, "0 passed, 1 failed", 1),
        (PASSED, "echo 'install: needs Python'; exit 2", NEVER, "3 passed, 1 failed", 1),
    ],
    ids=[
        "passes",
        "slice-fails",
        "slice-ran-none",
        "slice-out-of-time",
        "pytest-broke",
        "test-fails",
        "other-row-fails",
        "no-installation",
        "no-installation-of-the-other-row",
    ],
)
def test_the_last_line_counts_all_sessions(
    tmp_path: Path, test: str, other: str, full: str, last: str, code: int
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    make = f'case "$1" in test) {test} ;; test-other) {other} ;; *) {NEVER} ;; esac'
    for path, script in (
        (tmp_path / "bin" / "make", make),
        (tmp_path / ".venv" / "bin" / "python", full),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == last, done.stdout + done.stderr
    assert done.returncode == code
    assert ("never" in done.stdout) is False

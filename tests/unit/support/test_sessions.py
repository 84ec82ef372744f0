"""The options of long sessions: each case runs pytest on two small modules."""

from __future__ import annotations

import subprocess

import pytest

MODULE = """
from pathlib import Path

def test_first():
    pass

def test_second():
    assert not Path("broken").exists()

def test_third():
    pass
"""


@pytest.fixture
def checkout(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_a=MODULE, test_b=MODULE)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], cwd=pytester.path, check=True)
    return pytester


def run(checkout: pytest.Pytester, *options: str) -> pytest.RunResult:
    return checkout.runpytest_inprocess("-p", "tests.support.sessions", "-p", "no:cacheprovider", *options)


def test_a_session_resumes_with_the_tests_that_have_not_passed(checkout: pytest.Pytester) -> None:
    (checkout.path / "broken").touch()
    run(checkout, "--resume=state/full").assert_outcomes(passed=4, failed=2)
    (checkout.path / "broken").unlink()
    run(checkout, "--resume=state/full").assert_outcomes(passed=2, deselected=4)
    done = run(checkout, "--resume=state/full")
    done.assert_outcomes(deselected=6)
    assert done.ret == 0


def test_a_change_of_the_code_starts_over(checkout: pytest.Pytester) -> None:
    run(checkout, "--resume=state").assert_outcomes(passed=6)
    with (checkout.path / "test_a.py").open("a") as file:
        file.write("\n# changed\n")
    run(checkout, "--resume=state").assert_outcomes(passed=6)


def test_a_failed_teardown_is_not_recorded_as_passed(checkout: pytest.Pytester) -> None:
    fixture = "import pytest\n\n@pytest.fixture(autouse=True)\ndef end(request):\n    yield\n"
    checkout.makeconftest(fixture + "    assert 'second' not in request.node.name\n")
    run(checkout, "--resume=state").assert_outcomes(passed=6, errors=2)
    assert (checkout.path / "state").read_text().count("test_second") == 0


def test_no_test_starts_after_the_budget(checkout: pytest.Pytester) -> None:
    result = run(checkout, "--budget-s=0")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["0 of 6 selected tests ran within 0 s; the next one is test_a.py::test_first"])


def test_rotation_starts_at_each_module_and_loses_none(checkout: pytest.Pytester) -> None:
    orders = set()
    for text in "abcdefgh":
        result = run(checkout, f"--rotate={text}", "-v")
        result.assert_outcomes(passed=6)
        orders.add(next(line[:9] for line in result.outlines if "::test_first" in line))
    assert orders == {"test_a.py", "test_b.py"}

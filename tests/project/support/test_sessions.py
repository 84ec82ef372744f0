"""The options of long sessions: each case runs pytest on two small modules."""

from __future__ import annotations

import subprocess
from pathlib import Path

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


@pytest.fixture(
    params=[(), ("-n2", "--dist=loadfile", "--no-loadscope-reorder")],
    ids=["one-process", "two-workers"],
)
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options of one process or of two workers, as in `make test`."""
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))  # the workers import the plugin
    options: tuple[str, ...] = request.param
    return options


def run(checkout: pytest.Pytester, *options: str) -> pytest.RunResult:
    return checkout.runpytest_inprocess(
        "-p", "tests.support.sessions", "-p", "no:cacheprovider", *options
    )


def test_a_session_resumes_with_the_tests_that_have_not_passed(
    checkout: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    (checkout.path / "broken").touch()
    run(checkout, "--resume=state/full", *workers).assert_outcomes(passed=4, failed=2)
    (checkout.path / "broken").unlink()
    run(checkout, "--resume=state/full", *workers).assert_outcomes(passed=2)
    done = run(checkout, "--resume=state/full", *workers)
    done.assert_outcomes()
    assert done.ret == 0
    done.stdout.fnmatch_lines(["6 tests passed in an earlier session on this code: state/full"])


def test_a_worker_reports_output_that_is_no_unicode(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest-xdist ends the whole session on such a report."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    pytester.makepyfile(
        "import logging\ndef test_one():\n    logging.warning('\\udc80')\n    assert '\\udc80' == 1"
    )
    pytester.runpytest_inprocess("-p", "tests.support.sessions", "-n1").assert_outcomes(failed=1)


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


def test_no_test_starts_after_the_budget(
    checkout: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    result = run(checkout, "--budget-s=0", *workers)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["0 of 6 selected tests ran within 0 s; the next one is test_?.py::test_first"]
    )


def test_rotation_starts_at_each_module_and_loses_none(checkout: pytest.Pytester) -> None:
    orders = set()
    for text in "abcd":
        result = run(checkout, f"--rotate={text}", "-v")
        result.assert_outcomes(passed=6)
        orders.add(
            next(line[-9:] for line in result.outlines if line.startswith("the session started at"))
        )
    assert orders == {"test_a.py", "test_b.py"}

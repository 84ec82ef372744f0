"""Options for long test sessions: resume after an interruption, start at another module, stop after
a time budget.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Registers the three options."""
    group = parser.getgroup("sessions")
    group.addoption(
        "--resume",
        type=Path,
        metavar="FILE",
        help="skip tests that FILE records as passed on this code",
    )
    group.addoption(
        "--rotate", metavar="TEXT", help="start at the test module that a hash of TEXT selects"
    )
    group.addoption(
        "--budget-s", type=float, metavar="SECONDS", help="start no test after so many seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Starts the time budget."""
    config.pluginmanager.register(_Sessions(config), "pacs-sessions")


def code_version(root: Path) -> str:
    """The commit of a checkout and a hash of its uncommitted changes."""

    def git(*command: str) -> bytes:
        return subprocess.run(["git", *command], cwd=root, capture_output=True, check=True).stdout

    changes = git("diff", "HEAD")
    return f"{git('rev-parse', 'HEAD').decode().strip()} {hashlib.sha256(changes).hexdigest()[:16]}"


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_encodable(item) for item in value)
    return value


class _Sessions:
    """One in each process: the session's own, and those that pytest-xdist starts (workers)."""

    def __init__(self, config: pytest.Config) -> None:
        self._start = time.monotonic()
        self._budget_s: float | None = config.getoption("--budget-s")
        self._rotate: str | None = config.getoption("--rotate")
        self._file: Path | None = config.getoption("--resume")
        self._config = config
        self._is_worker = hasattr(config, "workerinput")
        self._passed_before = self._read(self._file) if self._file is not None else set()
        self._selected: list[str] = []
        self._not_started: list[str] = []
        self._failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Removes what passed before; rotates the modules. Runs after the selection by marker."""
        done = [item for item in items if item.nodeid in self._passed_before]
        if done:
            items[:] = [item for item in items if item.nodeid not in self._passed_before]
            config.hook.pytest_deselected(items=done)
        if self._rotate is not None and items:
            modules = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
            first = int(hashlib.sha256(self._rotate.encode()).hexdigest(), 16) % len(modules)
            order = {name: (at - first) % len(modules) for at, name in enumerate(modules)}
            items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])
        self._selected = [item.nodeid for item in items]

    def _read(self, file: Path) -> set[str]:
        """Ids of tests that passed. A file of another code version starts over."""
        version = code_version(self._config.rootpath)
        lines = file.read_text().splitlines() if file.exists() else []
        if lines and lines[0] == version:
            return {json.loads(line) for line in lines[1:]}
        if not self._is_worker:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(version + "\n")
        return set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Starts no test once the budget is used up."""
        if self._budget_s is None or time.monotonic() - self._start < self._budget_s:
            return None
        self._not_started.append(item.nodeid)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records a test that passed, its teardown included."""
        if not report.passed:
            self._failed.add(report.nodeid)
        elif (
            report.when == "teardown"
            and self._file
            and not self._is_worker
            and report.nodeid not in self._failed
        ):
            with self._file.open("a") as file:
                file.write(json.dumps(report.nodeid) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Generator[None, Any, Any]:
        """Escapes lone surrogates in captured output, which a worker cannot send."""
        return _encodable((yield))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Every worker collects the same tests."""
        self._selected = ids

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        """Adds what a worker did not start."""
        self._not_started += getattr(node, "workeroutput", {}).get("not_started", [])

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Nothing left to run is a success where everything passed before."""
        if self._is_worker:
            self._config.workeroutput["not_started"] = self._not_started  # type: ignore[attr-defined]
        elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed_before:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints where the session started and how much of the selection ran."""
        if self._rotate is not None and self._selected:
            terminalreporter.line(f"the session started at {self._selected[0].partition('::')[0]}")
        if self._file is not None:
            terminalreporter.line(
                f"{len(self._passed_before)} tests passed in an earlier session on this code: "
                f"{self._file}"
            )
        if self._budget_s is not None:
            started = len(self._selected) - len(self._not_started)
            line = (
                f"{started} of {len(self._selected)} selected tests ran within "
                f"{self._budget_s:.0f} s"
            )
            terminalreporter.line(
                line + (f"; the next one is {self._not_started[0]}" if self._not_started else "")
            )

"""Options for long test sessions: resume after an interruption, start at another module, stop after a time budget."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Registers the three options."""
    group = parser.getgroup("sessions")
    group.addoption("--resume", type=Path, metavar="FILE", help="skip tests that FILE records as passed on this code")
    group.addoption("--rotate", metavar="TEXT", help="start at the test module that a hash of TEXT selects")
    group.addoption("--budget-s", type=float, metavar="SECONDS", help="start no test after so many seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the time budget."""
    config.pluginmanager.register(_Sessions(config), "pacs-sessions")


def code_version(root: Path) -> str:
    """The commit of a checkout and a hash of its uncommitted changes."""

    def git(*command: str) -> bytes:
        return subprocess.run(["git", *command], cwd=root, capture_output=True, check=True).stdout

    changes = git("diff", "HEAD")
    return f"{git('rev-parse', 'HEAD').decode().strip()} {hashlib.sha256(changes).hexdigest()[:16]}"


class _Sessions:
    def __init__(self, config: pytest.Config) -> None:
        self._start = time.monotonic()
        self._budget_s: float | None = config.getoption("--budget-s")
        self._rotate: str | None = config.getoption("--rotate")
        self._file: Path | None = config.getoption("--resume")
        self._root = config.rootpath
        self._selected = 0
        self._passed_before = 0
        self._not_started: list[str] = []
        self._failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Removes what passed before; rotates the modules. Runs after the selection by marker."""
        if self._file is not None:
            passed = self._read(self._file)
            done = [item for item in items if item.nodeid in passed]
            items[:] = [item for item in items if item.nodeid not in passed]
            self._passed_before = len(done)
            config.hook.pytest_deselected(items=done)
        if self._rotate is not None and items:
            modules = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
            first = int(hashlib.sha256(self._rotate.encode()).hexdigest(), 16) % len(modules)
            order = {name: (at - first) % len(modules) for at, name in enumerate(modules)}
            items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])
            print(f"\nthe session starts at {modules[first]}, module {first + 1} of {len(modules)}")
        self._selected = len(items)

    def _read(self, file: Path) -> set[str]:
        """Ids of tests that passed. A file of another code version starts over."""
        version = code_version(self._root)
        lines = file.read_text().splitlines() if file.exists() else []
        if not lines or lines[0] != version:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(version + "\n")
            return set()
        return {json.loads(line) for line in lines[1:]}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Starts no test once the budget is used up."""
        if self._budget_s is None or time.monotonic() - self._start < self._budget_s:
            return None
        self._not_started.append(item.nodeid)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Records a test that passed, its teardown included."""
        report = yield
        if not report.passed:
            self._failed.add(item.nodeid)
        elif report.when == "teardown" and self._file is not None and item.nodeid not in self._failed:
            with self._file.open("a") as file:
                file.write(json.dumps(item.nodeid) + "\n")
        return report

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Nothing left to run is a success where everything passed before."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed_before:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints how much of the selection ran."""
        if self._file is not None:
            terminalreporter.line(
                f"{self._passed_before} tests passed in an earlier session on this code: {self._file}"
            )
        if self._budget_s is not None:
            started = self._selected - len(self._not_started)
            line = f"{started} of {self._selected} selected tests ran within {self._budget_s:.0f} s"
            terminalreporter.line(line + (f"; the next one is {self._not_started[0]}" if self._not_started else ""))

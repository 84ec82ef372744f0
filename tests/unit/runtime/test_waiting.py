"""A wait that takes long is reported; a short one is not."""

from __future__ import annotations

import ast
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import pacs_megatron
from pacs_megatron.runtime import waiting
from pacs_megatron.runtime.waiting import report_wait, run_program


def test_the_start_of_a_command_is_that_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(waiting.COMMAND_START, raising=False)
    started = time.time() - (time.monotonic() - waiting.command_start())
    assert abs(started - psutil.Process().create_time()) < 5


def test_a_long_wait_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "NOTICE_S", 0.05)
    deadline = time.monotonic() + 60
    with report_wait("for 4 ranks"):
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    assert caplog.records[0].getMessage().startswith("waiting for 4 ranks: ")


def test_the_times_of_the_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a clock that only the reports' own waits move."""
    now = [0.0]
    finished = threading.Event()

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            now[0] += timeout
            if now[0] > 200:
                finished.set()
            return now[0] > 200

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(waiting, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread))
    with report_wait("for 4 ranks"):
        assert finished.wait(600)
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for 4 ranks: {seconds} s" for seconds in (*range(4, 65, 5), 124, 184)
    ]


@pytest.mark.parametrize(("start", "first"), [(97.0, 1), (98.0, 2), (90.0, 1), (60.0, 4)], ids=str)
def test_the_first_notice_of_a_command_counts_from_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start: float, first: int
) -> None:
    """Imports and short waits come before; only the first notice is early, and only at the start.

    With a clock that only the reports' own waits move.
    """
    now = [100.0]
    finished = threading.Event()

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            now[0] += timeout
            if len(caplog.records) == 2:
                finished.set()
            return len(caplog.records) == 2

    monkeypatch.setenv(waiting.COMMAND_START, str(start))
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(waiting, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread))
    with waiting.first_word_in_time():
        with report_wait("for 4 ranks"):
            assert finished.wait(600)
        assert caplog.records[0].getMessage() == f"waiting for 4 ranks: {first} s"
        finished.clear()
        caplog.clear()
        with report_wait("for the driver"):
            assert finished.wait(600)
    assert caplog.records[0].getMessage() == "waiting for the driver: 4 s"


def test_a_report_at_the_end_of_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reports is between its wait and its line when the block ends; an error in it
    ends a driver.
    """
    monkeypatch.setattr(waiting, "NOTICE_S", 0.01)
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    started = threading.Event()
    ended = waiting._open.__dict__.setdefault("stack", [])

    def reason() -> str:
        started.set()
        deadline = time.monotonic() + 60
        while ended and time.monotonic() < deadline:
            time.sleep(0.001)
        return "for 4 ranks"

    with report_wait(reason):
        assert started.wait(60)
    assert not errors


def test_a_short_wait_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with report_wait("for 4 ranks"):
        pass
    assert not caplog.records


def test_only_the_innermost_wait_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "NOTICE_S", 0.05)
    deadline = time.monotonic() + 60
    with report_wait("for all"), report_wait(lambda: ""), report_wait(lambda: "for one"):
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert {record.getMessage().partition(":")[0] for record in caplog.records} == {
        "waiting for one"
    }


def test_many_short_waits_are_reported_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "NOTICE_S", 1.0)
    deadline = time.monotonic() + 60
    with report_wait("for all"):
        while not caplog.records and time.monotonic() < deadline:
            with report_wait("for one"):
                time.sleep(0.01)
    assert {record.getMessage().partition(":")[0] for record in caplog.records} == {
        "waiting for all"
    }


def test_a_program_that_takes_long_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "NOTICE_S", 0.05)
    done = run_program([sys.executable, "-c", "import time; time.sleep(1); print('done')"])
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "waiting for the program `" in caplog.records[0].getMessage()


def test_every_program_is_run_with_a_report() -> None:
    """The class: `subprocess.run` and its relatives block and report nothing."""
    root = Path(pacs_megatron.__file__).parent
    blocking = {"run", "call", "check_call", "check_output", "getoutput"}
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in blocking
                and isinstance(node.value, ast.Name)
                and node.value.id == "subprocess"
            ):
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    assert [place.partition(":")[0] for place in found] == ["runtime/waiting.py"], found

"""The lock of a run folder, held and taken over by real processes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.launch import runs
from pacs_megatron.observability.report import write_report
from pacs_megatron.runtime import run_lock, waiting
from pacs_megatron.runtime.run_lock import (
    LOCK_FILE,
    FolderInUseError,
    Lease,
    RunLock,
    check_not_locked,
    lock_owner,
)

HOLD = """
import sys, time
from pathlib import Path
from pacs_megatron.runtime.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), "train")
print("held", flush=True)
sys.stdin.readline()
lock.close()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until a line arrives."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def lease_of(tmp_path: Path) -> Lease:
    return Lease(**json.loads((tmp_path / LOCK_FILE).read_text()))


def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of a Lustre client that was mounted without `-o flock`."""

    def flock(_file: int, _operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)


def test_a_second_writer_is_rejected_and_named(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(FolderInUseError, match=rf"in use by `train` \(pid {holder.pid} on "):
        RunLock(tmp_path, "export")
    with pytest.raises(FolderInUseError):
        check_not_locked(tmp_path)
    assert lease_of(tmp_path).pid == holder.pid


def test_without_flock_the_lease_rejects(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_flock(monkeypatch)
    with pytest.raises(FolderInUseError, match=str(holder.pid)):
        RunLock(tmp_path, "export")


def test_a_stopped_writer_keeps_its_lock(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.send_signal(signal.SIGSTOP)
    without_flock(monkeypatch)
    with pytest.raises(FolderInUseError, match=str(holder.pid)):
        RunLock(tmp_path, "export")


def test_the_lock_of_a_killed_writer_is_taken_over_with_a_warning(
    tmp_path: Path, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    holder.kill()
    holder.wait()
    with caplog.at_level(logging.WARNING), RunLock(tmp_path, "train"):
        assert lease_of(tmp_path).pid == os.getpid()
    assert f"pid {holder.pid}" in caplog.text and "taken over" in caplog.text


def test_a_released_lock_leaves_no_owner(
    tmp_path: Path, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    holder.communicate("\n")
    assert lock_owner(tmp_path) is None
    with caplog.at_level(logging.WARNING):
        RunLock(tmp_path, "train").close()
    assert caplog.text == ""


def test_a_reused_pid_is_no_owner(tmp_path: Path) -> None:
    RunLock(tmp_path, "train").close()
    with RunLock(tmp_path, "train"):
        lease = lease_of(tmp_path)
    (tmp_path / LOCK_FILE).write_text(
        json.dumps(asdict(replace(lease, started="1", token="before")))
    )
    assert lock_owner(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"pid": "1\0"},
        {"pid": [1]},
        {"pid": 10**400},
        {"host": {}},
        {"namespace": None},
        {"heartbeat": "x"},
        {"since": "\x1b[31m\nConfigError: forged"},
        {"more": 1},
        b"[" * 60_000,
        bytes(range(256)),
        b" " * 10_000_000,
    ],
    ids=lambda change: repr(change)[:30],
)
def test_a_file_that_is_no_lease_is_no_owner(
    tmp_path: Path, change: dict[str, Any] | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    lease = asdict(
        Lease("train", socket.gethostname(), run_lock._namespace(), 1, "1", "now", "token")
    )
    content = change if isinstance(change, bytes) else json.dumps(lease | change).encode()
    (tmp_path / LOCK_FILE).write_bytes(content)
    assert lock_owner(tmp_path) is None
    RunLock(tmp_path, "train").close()
    assert caplog.text == ""


def test_a_lock_through_a_link_writes_into_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("mine")
    (tmp_path / "run.lock").symlink_to("data.jsonl")
    with pytest.raises(OSError, match=r"run\.lock"):
        RunLock(tmp_path, "train")
    assert (tmp_path / "data.jsonl").read_text() == "mine"


def test_a_fifo_blocks_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_FILE)
    assert lock_owner(tmp_path) is None
    with pytest.raises(OSError, match=r"Illegal seek.*run\.lock"):
        RunLock(tmp_path, "train")


@pytest.mark.parametrize("verb", ["status", "logs", "report"])
def test_readers_do_not_wait_for_a_stopped_writer(
    tmp_path: Path, holder: subprocess.Popen[str], verb: str
) -> None:
    """`holder` has the flock and sends no heartbeat; the lease has another host, so its state is
    unknown.
    """
    holder.send_signal(signal.SIGSTOP)
    (tmp_path / LOCK_FILE).write_text(
        json.dumps(asdict(replace(lease_of(tmp_path), host="another")))
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("line\n")
    if verb == "status":
        assert "checkpoint" in runs.status(tmp_path)
    elif verb == "logs":
        assert list(runs.log_lines(tmp_path, None, 5, follow=False)) == ["line"]
    else:
        assert write_report(tmp_path, num_samples=1).is_file()


def leave_remote_lease(tmp_path: Path, *, age_s: float) -> Lease:
    lease = Lease("train", "another-host", "pid:[1]", 7, "1", "yesterday", "token")
    file = tmp_path / LOCK_FILE
    file.write_text(json.dumps(asdict(lease)))
    os.utime(file, (time.time() - age_s,) * 2)
    return lease


def test_the_lease_of_another_host_is_stale_without_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_lock, "_STALE_S", 1.0)
    monkeypatch.setattr(waiting, "NOTICE_S", 0.2)
    leave_remote_lease(tmp_path, age_s=30.0)
    with caplog.at_level(logging.WARNING), RunLock(tmp_path, "train"):
        assert lease_of(tmp_path).pid == os.getpid()
    assert "waiting up to" in caplog.text and "taken over" in caplog.text


def test_a_lease_of_yesterday_is_stale_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_STALE_S", 1e6)
    leave_remote_lease(tmp_path, age_s=86400.0)
    assert lock_owner(tmp_path) is None


def test_a_heartbeat_of_another_host_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = leave_remote_lease(tmp_path, age_s=0.0)

    def sleep(_seconds: float) -> None:
        beat = replace(lease, heartbeat=lease.heartbeat + 1)
        (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(beat)))

    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    with pytest.raises(FolderInUseError, match="another-host"):
        RunLock(tmp_path, "train")


@pytest.fixture
def fast_holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A writer with a short heartbeat in `run`."""
    script = HOLD.replace(
        "lock =", "import pacs_megatron.runtime.run_lock as m; m._HEARTBEAT_S = 0.1\nlock ="
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_writer_whose_lock_was_taken_over_exits(
    tmp_path: Path, fast_holder: subprocess.Popen[str]
) -> None:
    fast_holder.send_signal(signal.SIGSTOP)
    other = replace(lease_of(tmp_path / "run"), token="other", pid=1, command="export")
    (tmp_path / "run" / LOCK_FILE).write_text(json.dumps(asdict(other)))
    fast_holder.send_signal(signal.SIGCONT)
    assert fast_holder.wait(600) == 1
    assert fast_holder.stderr is not None and "`export` (pid 1" in fast_holder.stderr.read()


@pytest.mark.parametrize("what", ["removed", "renamed", "replaced"])
def test_a_writer_without_its_folder_exits(
    tmp_path: Path, fast_holder: subprocess.Popen[str], what: str
) -> None:
    folder = tmp_path / "run"
    folder.rename(tmp_path / "else")
    if what == "removed":
        shutil.rmtree(tmp_path / "else")
    elif what == "replaced":
        folder.mkdir()
    assert fast_holder.wait(600) == 1
    assert fast_holder.stderr is not None
    assert fast_holder.stderr.read().startswith(
        f"ConfigError: {folder} was removed, renamed or replaced"
    )
    assert list(tmp_path.glob("run/*")) == []


def test_a_removed_lock_is_written_again(
    tmp_path: Path, fast_holder: subprocess.Popen[str]
) -> None:
    lock = tmp_path / "run" / LOCK_FILE
    before = lease_of(tmp_path / "run")
    lock.unlink()
    while not lock.exists() or not lock.stat().st_size:
        assert fast_holder.poll() is None
        time.sleep(0.01)
    assert lease_of(tmp_path / "run").token == before.token
    with pytest.raises(FolderInUseError, match=str(fast_holder.pid)):
        RunLock(tmp_path / "run", "train")


def test_a_writer_exits_where_another_one_used_the_time_without_a_lock(
    tmp_path: Path, fast_holder: subprocess.Popen[str]
) -> None:
    fast_holder.send_signal(signal.SIGSTOP)
    (tmp_path / "run" / LOCK_FILE).unlink()
    with RunLock(tmp_path / "run", "train"):
        fast_holder.send_signal(signal.SIGCONT)
        assert fast_holder.wait(600) == 1
        assert lease_of(tmp_path / "run").pid == os.getpid()


def test_an_error_of_the_file_system_does_not_end_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it the lock would be stale after 20 s, and another host could take it over."""
    read = run_lock._read
    failures = [OSError(5, "Input/output error")]

    def read_or_fail(path: Path) -> Lease | None:
        if failures and threading.current_thread().name == "run lock":
            raise failures.pop()
        return read(path)

    monkeypatch.setattr(run_lock, "_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "_read", read_or_fail)
    with RunLock(tmp_path, "train"):
        while failures or not lease_of(tmp_path).heartbeat:
            assert any(thread.name == "run lock" for thread in threading.enumerate())
            time.sleep(0.01)
    assert "heartbeat not written: [Errno 5]" in caplog.text


def test_a_lock_that_cannot_be_written_again_keeps_its_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed one could be another file's by then, which the next heartbeat would write to."""
    opened = run_lock._open
    failures = [OSError(28, "No space left on device")]

    def open_or_fail(path: Path) -> int:
        if failures and threading.current_thread().name == "run lock":
            raise failures.pop()
        return opened(path)

    monkeypatch.setattr(run_lock, "_HEARTBEAT_S", 0.05)
    with RunLock(tmp_path, "train") as lock:
        monkeypatch.setattr(run_lock, "_open", open_or_fail)
        (tmp_path / LOCK_FILE).unlink()
        while failures:
            time.sleep(0.01)
        os.fstat(lock._file)
        while not (tmp_path / LOCK_FILE).exists():
            time.sleep(0.01)

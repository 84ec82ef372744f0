"""A rank that makes no progress ends with exit code 70, its stack, and a line for every rank."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pacs_megatron.errors import ExitCode
from pacs_megatron.runtime.run_folder import HEARTBEAT_FOLDER
from pacs_megatron.training import watchdog
from pacs_megatron.training.watchdog import Watchdog

HANGS = """
import sys, time
from pathlib import Path
from pacs_megatron.training.watchdog import Watchdog

def waits_for_ever():
    time.sleep(3600)

dog = Watchdog(Path(sys.argv[1]), 0, 2, 0.5)
dog.start()
dog.phase(("update",))
waits_for_ever()
"""


def test_a_hang_is_reported_with_stack_phase_and_every_rank(tmp_path: Path) -> None:
    other = tmp_path / HEARTBEAT_FOLDER / "rank1.json"
    other.parent.mkdir()
    other.write_text(json.dumps({"rank": 1, "phase": "sync", "silent_s": 3.0}))
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.HANG
    assert "phase 'update'" in done.stderr and "hang_timeout_s=0.5" in done.stderr
    assert "rank 1: phase 'sync' for 3 s" in done.stderr
    assert "waits_for_ever" in (tmp_path / "logs" / "rank0.stack").read_text()
    assert (tmp_path / "exit_code").read_text().strip() == "70"


def test_a_rank_that_has_not_saved_within_the_lead_ends_with_its_stack(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_000004"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    script = HANGS.replace("0, 2, 0.5)", '1, 2, 1000.0, lambda: "SIGTERM", 1.0)')
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.HANG
    (line,) = done.stderr.splitlines()
    assert (
        "s after SIGTERM in phase 'update' (resources.signal_lead_s; the newest checkpoint is "
        "step_000004)" in line
    )
    assert "waits_for_ever" in (tmp_path / "logs" / "rank1.stack").read_text()


def test_a_full_disk_does_not_disarm_it(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")  # no file can be created in it
    (tmp_path / HEARTBEAT_FOLDER).write_text("")
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.HANG
    assert "phase 'update'" in done.stderr and "Traceback" not in done.stderr


def test_a_long_phase_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    dog = Watchdog(tmp_path, 0, 1, 1000.0)
    with caplog.at_level("INFO"):
        for names in (("update",), ("rollout",)):
            dog.phase(names)
            for _ in range(12 if names == ("rollout",) else 1):
                now[0] += 4.0
                dog.alive()
                dog._notice_phase()
    assert [record.getMessage() for record in caplog.records] == [
        f"in phase 'rollout' for {seconds} s" for seconds in range(8, 49, 8)
    ]


def test_signs_of_life_keep_it_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    dog = Watchdog(tmp_path, 0, 1, 0.4)
    dog.start()
    for number in range(8):
        now[0] += 0.3
        time.sleep(0.1)  # the watchdog looks every 0.1 s
        if number % 2:
            dog.alive()
        else:
            dog.phase(("rollout",))
    dog.close()
    assert not (tmp_path / "exit_code").exists()
    assert json.loads((tmp_path / HEARTBEAT_FOLDER / "rank0.json").read_text())["rank"] == 0


def test_a_stop_request_that_takes_long_names_the_phase_and_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    reason = [""]
    dog = Watchdog(tmp_path, 0, 1, 1000.0, stop_reason=lambda: reason[0])
    dog.phase(("update",))
    for _ in range(3):
        dog._notice_stop(0.0)
        now[0] += 9.0
    assert caplog.text == ""
    reason[0] = "SIGTERM"
    for _ in range(3):
        dog._notice_stop(now[0] - 100.0)
        now[0] += 9.0
    assert [record.getMessage() for record in caplog.records] == [
        "SIGTERM 18 s ago: still in phase 'update', no progress for 45 s; there is no checkpoint"
    ]
    folder = tmp_path / "checkpoints" / "step_000004"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    now[0] += 9.0
    dog._notice_stop(60.0)
    assert "the newest checkpoint is step_000004" in caplog.text

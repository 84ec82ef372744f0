"""Attempts of a run: folders, requeues, and the output of status, logs and cancel."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from pacs_megatron.checkpoint.names import Position, newest_position, newest_step
from pacs_megatron.errors import ConfigError, ExitCode, RolloutError
from pacs_megatron.launch.job import begin, describe, end, main, note_jobs, read_attempts
from pacs_megatron.launch.runs import cancel, log_lines, status
from pacs_megatron.launch.serve import wait_for_urls
from pacs_megatron.runtime.run_lock import RunLock

RUNS = Path(__file__).parents[3] / "configs" / "runs"
AHEAD = RUNS / "grpo-qwen3-14b-7n8g-tp2-ahead.yaml"


def checkpoint(run_dir: Path, step: int, updates: int = 0) -> None:
    folder = run_dir / "checkpoints" / Position(step, updates).name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def attempt(
    run_dir: Path, code: int, *, saves: int | Position | None = None, written: int | None = None
) -> tuple[int, bool, str]:
    begin(run_dir, "7")
    if saves is not None:
        checkpoint(run_dir, *(saves if isinstance(saves, Position) else (saves,)))
    if written is not None:
        (run_dir / "exit_code").write_text(f"{written}\n")
    return end(run_dir, code, 3)


def test_attempts_have_folders_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "STOP").write_text("")
    first = begin(tmp_path, "1")
    assert not (tmp_path / "STOP").exists()  # it belonged to the previous attempt
    end(tmp_path, 75, 3)
    second = begin(tmp_path, "2")
    assert (first.name, second.name) == ("attempt_1", "attempt_2")
    assert (tmp_path / "logs" / "latest").resolve() == second.resolve()


@pytest.mark.parametrize(
    ("code", "again"),
    [
        (ExitCode.OK, False),
        (ExitCode.MISCONFIGURED, False),
        (ExitCode.PREEMPTED, True),
        (ExitCode.FAILED, True),
        (137, True),
    ],
)
def test_exit_codes_that_requeue(tmp_path: Path, code: int, again: bool) -> None:
    assert attempt(tmp_path, code)[1] == again


def test_the_exit_code_of_rank_0_has_precedence(tmp_path: Path) -> None:
    assert attempt(tmp_path, 1, written=75)[:2] == (75, True)


def test_the_code_of_a_failed_rank_counts_where_rank_0_wrote_none(tmp_path: Path) -> None:
    begin(tmp_path, "7")
    (tmp_path / "failed_rank").write_text("2\n")
    assert end(tmp_path, 143, 3)[:2] == (2, False)
    assert attempt(tmp_path, 143)[:2] == (143, True)  # removed by `begin`
    begin(tmp_path / "other", "7")
    (tmp_path / "other" / "failed_rank").write_text("2\n")
    (tmp_path / "other" / "exit_code").write_text("75\n")
    assert end(tmp_path / "other", 143, 3)[:2] == (75, True)


def test_an_old_exit_code_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "exit_code").write_text("0\n")
    os.utime(tmp_path / "exit_code", (1, 1))
    assert attempt(tmp_path, 137)[0] == 137


def test_a_crash_loop_stops_and_progress_resets_it(tmp_path: Path) -> None:
    assert [attempt(tmp_path, 1)[1] for _ in range(2)] == [True, True]
    assert attempt(tmp_path, 1, saves=5)[1]
    assert [attempt(tmp_path, 1)[1] for _ in range(3)] == [True, True, False]
    assert "4 attempts in a row without a new checkpoint" in attempt(tmp_path, 1)[2]


def test_lost_nodes_with_progress_are_no_crash_loop(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        begin(tmp_path, "7")  # the node is lost: no `end`
        checkpoint(tmp_path, step)
    assert [attempt(tmp_path, 1)[1] for _ in range(3)] == [True, True, False]


def fake_squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "squeue"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_two_jobs_never_train_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_squeue(tmp_path, monkeypatch, "7 RUNNING 1:00 n1")
    run_dir = tmp_path / "run"
    begin(run_dir, "7")
    with pytest.raises(
        ConfigError, match=r"is being trained by job 7 \(RUNNING 1:00 n1\); `pacs-megatron cancel"
    ):
        begin(run_dir, "8")
    assert begin(run_dir, "7").name == "attempt_2"  # a requeue of the same job
    fake_squeue(tmp_path, monkeypatch, "")
    assert begin(run_dir, "8").name == "attempt_3"  # the other job was lost


def dead_lease(run_dir: Path, command: str = "train") -> None:
    """The lock of a process that was killed."""
    with RunLock(run_dir, command):
        lease = json.loads((run_dir / "run.lock").read_text())
    (run_dir / "run.lock").write_text(json.dumps(lease | {"started": "1"}))


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, "state      done"),
        (75, "state      stopped: saved"),
        (1, r"state      failed: exit code 1 \(failed\)"),
        (70, r"state      failed: exit code 70 \(hang\)"),
    ],
)
def test_status_of_a_local_run_that_ended(code: int, state: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    dead_lease(tmp_path)
    (tmp_path / "exit_code").write_text(f"{code}\n")
    assert re.search(state, status(tmp_path))
    (tmp_path / "run.lock").write_text("")  # released
    os.utime(tmp_path / "exit_code", (1, 1))
    assert re.search(state, status(tmp_path))


def test_status_of_a_local_run_that_runs_or_was_killed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert "state      not started" in status(tmp_path)
    (tmp_path / "exit_code").write_text("75\n")
    os.utime(tmp_path / "exit_code", (1, 1))
    with RunLock(tmp_path, "train"):
        assert f"state      running: `train` (pid {os.getpid()} on " in status(tmp_path)
    dead_lease(tmp_path)
    assert "state      dead: `train` (pid " in status(tmp_path)
    dead_lease(tmp_path, "export")
    assert "state      stopped: saved" in status(tmp_path)


def test_status_prints_pass_at_1_and_sane_ages(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    rows = [
        {"step": 0, "eval/math500/pass@1": 0.5},
        {"step": 1, "reward/mean": 0.3},
        {"step": 2, "eval/math500/pass@1": 0.625, "eval/math500/pass@1_se": 0.1},
        {"step": 3, "reward/mean": 0.4},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = status(tmp_path)
    assert "pass@1     math500: 0.6250 at step 2, 0.5000 at step 0" in text
    assert text.count("pass@1") == 1
    now = metrics.stat().st_mtime
    for age_s, expected in ((94610725, "1095.0 days"), (7300, "2.0 h"), (-3600, "0 s")):
        os.utime(metrics, (now - age_s, now - age_s))
        assert f"step 3, {expected} ago: reward/mean 0.4" in status(tmp_path)


def test_status_shows_queued_jobs_and_the_phase_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_squeue(
        tmp_path,
        monkeypatch,
        "12+0 PENDING 0:00 (Resources)\n12+1 PENDING 0:00 (Resources)\n13 PENDING 0:00 "
        "(Dependency)",
    )
    run_dir = tmp_path / "run"
    note_jobs(run_dir, [("train", "12"), ("eval", "13")])
    text = status(run_dir)
    assert "job 12 (train): PENDING 0:00 (Resources)" in text
    assert "job 13 (eval): PENDING 0:00 (Dependency)" in text
    begin(run_dir, "12")
    beats = run_dir / "heartbeats"
    beats.mkdir()
    for rank, phase in enumerate(["update", "update", "rollout wait", "update"]):
        (beats / f"rank{rank}.json").write_text(
            json.dumps({"rank": rank, "phase": phase, "silent_s": 40.0 + rank})
        )
    text = status(run_dir)
    assert "ranks      0-1, 3: update, no progress for at most 43 s" in text
    assert "ranks      2: rollout wait, no progress for at most 42 s" in text
    end(run_dir, 0, 3)
    assert "no progress" not in status(run_dir)


def test_a_half_written_checkpoint_is_no_progress(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    (tmp_path / "checkpoints" / "step_000009").mkdir()
    checkpoint(tmp_path, 11)
    (tmp_path / "checkpoints" / "step_000011").rename(
        tmp_path / "checkpoints" / "step_000011.partial"
    )
    assert newest_position(tmp_path) == Position(3) and newest_step(tmp_path) == 3


def test_updates_of_a_step_are_progress(tmp_path: Path) -> None:
    for updates in range(4):  # more attempts than max_attempts
        assert attempt(tmp_path, 75, saves=Position(0, updates + 1))[1]
    assert [row["end_updates"] for row in read_attempts(tmp_path)] == [1, 2, 3, 4]
    assert newest_position(tmp_path) == Position(0, 4) and newest_step(tmp_path) is None
    assert "checkpoint step 0 and 4 updates of the next" in status(tmp_path)
    assert [attempt(tmp_path, 1)[1] for _ in range(3)] == [True, True, False]


def test_rows_of_version_0_1(tmp_path: Path) -> None:
    attempt(tmp_path, 75, saves=2)
    log = tmp_path / "logs" / "attempts.jsonl"
    old = {
        key: value
        for key, value in read_attempts(tmp_path)[0].items()
        if not key.endswith("updates")
    }
    log.write_text(json.dumps(old) + "\n")
    assert attempt(tmp_path, 1) == (
        1,
        True,
        "failed with code 1; the next attempt resumes from step 2",
    )


def test_cancel_with_save_prevents_a_requeue(tmp_path: Path) -> None:
    begin(tmp_path, "7")
    assert "without a requeue" in cancel(tmp_path, save=True)
    assert (tmp_path / "STOP").exists()
    code, again, reason = end(tmp_path, 75, 3)
    assert (code, again) == (75, False)
    assert "cancel --save" in reason
    begin(tmp_path, "8")
    assert end(tmp_path, 75, 3)[1]  # a new submission is independent


def test_cancel_with_save_needs_a_process(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match="no job and no process"):
        cancel(tmp_path, save=True)
    assert not (tmp_path / "STOP").exists()
    with RunLock(tmp_path, "train"):
        assert "requested" in cancel(tmp_path, save=True)


def test_status_and_logs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a run folder"):
        status(tmp_path / "nothere")
    checkpoint(tmp_path, 4)
    folder = begin(tmp_path, "12")
    (folder / "output.log").write_text("one\ntwo\nthree\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 4, "reward/mean": 0.5}) + "\n")
    text = status(tmp_path)
    assert "attempt 1  job 12: ended without an exit code" in text
    assert "checkpoint step 4" in text
    assert "reward/mean 0.5" in text
    end(tmp_path, 75, 3)
    assert "job 12: preempted after" in status(tmp_path)
    assert list(log_lines(tmp_path, None, 2, follow=False)) == ["two", "three"]
    with pytest.raises(ConfigError, match="no log in"):
        list(log_lines(tmp_path, 9, 2, follow=False))
    with pytest.raises(ConfigError, match="no job in the queue"):
        cancel(tmp_path, save=False)
    assert read_attempts(tmp_path)[0]["job_id"] == "12"


def test_truncated_rows_are_skipped(tmp_path: Path) -> None:
    begin(tmp_path, "7")
    logs = tmp_path / "logs"
    for name in ("attempts.jsonl", "jobs.jsonl"):
        with (logs / name).open("a") as file:
            file.write('[1]\n{"attempt": 2}\n\n{"attempt": 3, "job')
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 4, "reward/mean": 0.5}\n[1]\n\xff\n\n{"step": 5, "rew'
    )
    beats = tmp_path / "heartbeats"
    beats.mkdir()
    for rank, text in enumerate(("[]", "{}", '{"rank": null, "phase": 1, "silent_s": 1}', "{")):
        (beats / f"rank{rank}.json").write_text(text)
    (tmp_path / "exit_code").write_text("")
    text = status(tmp_path)
    assert "attempt 1  job 7: ended without an exit code" in text
    assert "step 4" in text
    with pytest.raises(ConfigError, match="no job in the queue"):
        cancel(tmp_path, save=False)
    assert end(tmp_path, 75, 3)[:2] == (75, True)  # an empty exit_code is ignored
    (logs / "attempts.jsonl").write_text(
        (logs / "attempts.jsonl").read_text() + '{"attempt": 2, "jo'
    )
    assert begin(tmp_path, "8").name == "attempt_2"
    assert [row["job_id"] for row in read_attempts(tmp_path)] == ["7", "8"]


DAMAGED = ("x", None, [1], {"a": 1}, True, 10**250, -1.5)


@pytest.mark.parametrize("value", DAMAGED, ids=str)
def test_status_of_damaged_rows_and_heartbeats(tmp_path: Path, value: object) -> None:
    """Any field of any file that `status` reads has the wrong type."""
    attempt(tmp_path, 1)
    files = {
        "logs/attempts.jsonl": read_attempts(tmp_path)[0],
        "logs/jobs.jsonl": {"name": "train", "job_id": "8", "submitted": 1.0},
        "metrics.jsonl": {"step": 1, "reward/mean": 0.5},
        "heartbeats/rank0.json": {"rank": 0, "phase": "collect", "silent_s": 1.0},
    }
    for name, row in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        for key in row:
            (tmp_path / name).write_text(json.dumps(row | {key: value}) + "\n")
            assert status(tmp_path).startswith("run ")
        (tmp_path / name).write_text("[" * 100_000)
        assert status(tmp_path).startswith("run ")


def test_logs_of_one_attempt(tmp_path: Path) -> None:
    folder = begin(tmp_path / "a run", "7")
    (folder.parent / "rank0.log").write_text("rank\n")
    assert list(log_lines(tmp_path / "a run", None, 2, follow=False)) == ["rank"]
    with pytest.raises(ConfigError, match="no log in"):
        list(log_lines(tmp_path / "a run", 9, 2, follow=False))


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("")
    assert main(["begin", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"ConfigError: {tmp_path}/logs: File exists; correct run.dir"
    )


def test_describe() -> None:
    found = describe(AHEAD, ["run.dir=somewhere"])
    assert found["RUN_DIR"] == "somewhere/grpo-qwen3-14b-7n8g-tp2-ahead"
    wanted = {
        "TRAIN_NODES": "4",
        "ROLLOUT_NODES": "3",
        "RANKS_PER_NODE": "8",
        "SYNC_TRANSPORT": "broadcast",
    }
    assert wanted.items() <= found.items()
    with pytest.raises(ConfigError, match="does not divide over resources"):
        describe(AHEAD, ["resources.rollout_nodes=5"])


def test_wait_for_urls(tmp_path: Path) -> None:
    (tmp_path / "b.urls").write_text("http://b:1\nhttp://b:2\n")
    with pytest.raises(RolloutError, match="1 of 2 rollout nodes are up after 0 s"):
        wait_for_urls(tmp_path, 2, 0.0)
    (tmp_path / "c.error").write_text(json.dumps({"code": 2, "message": "no such python"}))
    with pytest.raises(ConfigError, match="node c: no such python"):
        wait_for_urls(tmp_path, 2, 100.0)
    (tmp_path / "a.urls").write_text("http://a:1\n")
    assert wait_for_urls(tmp_path, 2, 0.0) == ["http://a:1", "http://b:1", "http://b:2"]


def test_the_end_of_a_log_of_a_terabyte(tmp_path: Path) -> None:
    """Read from its end: a whole terabyte would take this test's 15 minutes."""
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "rank0.log").open("wb") as file:
        file.truncate(2**40)  # takes no space on the disk
        file.seek(0, 2)
        file.write(b"\nfirst\nlast\n")
    assert list(log_lines(tmp_path, None, 2, follow=False)) == ["first", "last"]

"""Starting ranks under torchrun: exit codes, signals, and nothing left behind."""

import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pacs_megatron.config import load_config
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.train import closing_lines, run_train, start_ranks
from pacs_megatron.runtime import waiting
from pacs_megatron.runtime.environment import RankPlace, find_rank, job_port
from tests.support.run_files import BASE

PROBE = "tests.unit.launch.rank_probe"


def started_pids(folder: Path) -> list[int]:
    return [
        int(path.read_text().split()[0]) for path in folder.glob("started_*") if path.read_text()
    ]


def assert_gone(folder: Path) -> None:
    assert len(started_pids(folder)) == 2
    deadline = time.monotonic() + 60
    while any(map(is_running, started_pids(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in started_pids(folder) if is_running(pid)]


def is_running(pid: int) -> bool:
    """False for a zombie too: a rank that outlives torchrun is a child of init."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["", "a shell ignores ended children"]
)
def test_ranks_end_well(tmp_path: Path, handler: signal.Handlers) -> None:
    signal.signal(signal.SIGCHLD, handler)
    (tmp_path / "exit_code").write_text("70")  # of an earlier run: not this one's word
    assert start_ranks([PROBE, str(tmp_path), "ok"], 2, tmp_path / "exit_code") == 0
    words = (tmp_path / "started_1").read_text().split()
    assert words[1:3] == ["2", "127.0.0.1"]
    assert int(words[3]) >= 1
    assert abs(float(words[4]) - waiting.command_start()) < 5  # of this process, not of the rank's
    assert_gone(tmp_path)


def test_the_wait_for_the_ranks_is_reported_until_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a program in place of torchrun that waits for the report, then takes the run's lock."""
    monkeypatch.setattr(waiting, "NOTICE_S", 0.05)
    monkeypatch.setattr(waiting, "next_notice_s", lambda _: 0.05)
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\nuntil [ -e seen ]; do sleep 0.1; done\ntouch run.lock\nuntil "
        "[ -e end ]; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    ended = threading.Thread(target=start_ranks, args=(["x"], 2, tmp_path / "exit_code"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # for the main thread only
    ended.start()
    while not caplog.records:
        time.sleep(0.01)
    assert caplog.records[0].getMessage().startswith("waiting for torchrun to start the ranks: ")
    (tmp_path / "seen").touch()
    while not (tmp_path / "run.lock").exists():
        time.sleep(0.01)
    time.sleep(0.2)  # a report that was on its way
    before = len(caplog.records)
    time.sleep(0.5)
    assert len(caplog.records) == before
    (tmp_path / "end").touch()
    ended.join()


def test_a_run_on_one_host_listens_on_loopback_only(tmp_path: Path) -> None:
    assert start_ranks([PROBE, str(tmp_path), "listen"], 2, tmp_path / "exit_code") == 0
    found = [path.read_text().split() for path in tmp_path.glob("listening_*")]
    assert len(found) == 2 and all(found)
    assert set(itertools.chain.from_iterable(found)) <= {
        "127.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
    }


def test_a_failed_rank_gives_its_code(tmp_path: Path) -> None:
    assert start_ranks([PROBE, str(tmp_path), "fail_on_1"], 2, tmp_path / "exit_code") == 2
    assert_gone(tmp_path)


def test_a_killed_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        start_ranks([PROBE, str(tmp_path), "die_on_1"], 2, tmp_path / "exit_code")
        == 128 + signal.SIGKILL
    )
    error = capfd.readouterr().err
    assert "rank 1 (pid" in error
    assert "was killed by SIGKILL" in error
    assert "Traceback" not in error
    assert_gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_ranks_and_they_save(tmp_path: Path, number: signal.Signals) -> None:
    process = launched(tmp_path)
    process.send_signal(number)
    assert process.wait(600) == 75
    assert {path.name for path in tmp_path.glob("saved_*")} == {"saved_0", "saved_1"}
    assert_gone(tmp_path)


def test_slurms_signal_to_torchrun_alone_reaches_its_ranks(tmp_path: Path) -> None:
    agent = [
        "-m",
        "pacs_megatron.launch.agent",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
    ]
    process = subprocess.Popen([sys.executable, *agent, "-m", PROBE, str(tmp_path), "wait"])
    wait_for_start(tmp_path, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(600) == 75
    assert {path.name for path in tmp_path.glob("saved_*")} == {"saved_0", "saved_1"}
    assert_gone(tmp_path)


STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
while not store.check(["torch.rendezvous.7"]):
    time.sleep(0.05)
"""


def test_a_lost_rendezvous_is_one_line(tmp_path: Path) -> None:
    """torchrun joins a store at its port, also of another job, which ends before the second node
    has joined.
    """
    with subprocess.Popen(
        [sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True
    ) as store:
        assert store.stdout is not None
        address = f"127.0.0.1:{store.stdout.readline().strip()}"
        agent = [
            "-m",
            "pacs_megatron.launch.agent",
            "--nnodes=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={address}",
        ]
        command = [sys.executable, *agent, "--rdzv-id=7", "-m", PROBE, str(tmp_path), "wait"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ConnectError: torchrun cannot reach, or lost, its rendezvous: "
    )
    assert (
        "if another rank ended" in done.stderr
        and "Traceback" not in done.stderr
        and "InternalError" not in done.stderr
    )


def test_ranks_do_not_outlive_a_killed_command(tmp_path: Path) -> None:
    process = launched(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 600
    while (
        any(psutil.pid_exists(pid) for pid in started_pids(tmp_path))
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert_gone(tmp_path)


def test_ranks_that_do_not_end_are_killed_within_the_lead(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    process = launched(tmp_path, "deaf", lead_s=3.0)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "did not end within resources.signal_lead_s=3" in error
    assert (
        error.splitlines()[-1]
        == "SIGTERM: the ranks reported no save; the newest checkpoint is step_000004"
    )
    assert_gone(tmp_path)


@pytest.mark.parametrize(
    ("who", "num_signals"),
    [
        ("rank", 2),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("rank", 1), ("torchrun", 1), ("torchrun", 2))
        ),
    ],
)
def test_a_stop_request_wakes_what_sigstop_holds(
    tmp_path: Path, who: str, num_signals: int
) -> None:
    """`timeout` sends the signal twice: to its child and to its group."""
    process = launched(tmp_path)
    (agent,) = psutil.Process(process.pid).children()
    (agent if who == "torchrun" else agent.children()[-1]).suspend()
    for _ in range(num_signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.wait(600) == 75
    assert {path.name for path in tmp_path.glob("saved_*")} == {"saved_0", "saved_1"}
    assert_gone(tmp_path)


def test_ranks_whose_torchrun_was_killed_save(tmp_path: Path) -> None:
    process = launched(tmp_path)
    (agent,) = psutil.Process(process.pid).children()
    time.sleep(3.0)  # the launcher looks for the ranks every second
    agent.kill()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75
    assert error.splitlines()[-1] == f"torchrun (pid {agent.pid}) was killed by SIGKILL"
    assert {path.name for path in tmp_path.glob("saved_*")} == {"saved_0", "saved_1"}
    assert_gone(tmp_path)


def launched(folder: Path, mode: str = "wait", lead_s: float = 600.0) -> "subprocess.Popen[str]":
    """A process in `start_ranks` with two probes that have started."""
    code = (
        "import sys; from pathlib import Path; from pacs_megatron.launch.train import start_ranks;"
        f"sys.exit(start_ranks(['{PROBE}', sys.argv[1], '{mode}'], 2, Path(sys.argv[1]) / "
        f"'exit_code', lead_s={lead_s}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stderr=subprocess.PIPE, text=True
    )
    wait_for_start(folder, process)
    return process


def wait_for_start(folder: Path, process: "subprocess.Popen[Any]") -> None:
    deadline = time.monotonic() + 600
    while len(started_pids(folder)) < 2 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)
    assert len(started_pids(folder)) == 2


def test_bad_layouts_are_rejected_before_anything_starts(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text(BASE)
    with pytest.raises(
        ConfigError, match=r"parallel\.tp=3 does not divide num_key_value_heads=.*; use"
    ):
        run_train(Path("run.yaml"), [f"model.path={tiny_qwen3}", "parallel.tp=3"])
    with pytest.raises(ConfigError, match="6 ranks are not a multiple of"):
        run_train(Path("run.yaml"), ["parallel.tp=4", "run.nproc=6"])
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_missing_sandbox_and_a_missing_critic_are_errors_before_anything_starts(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("shutil.which", lambda _: None)
    (tmp_path / "run.yaml").write_text(BASE)
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1", "answer": "#### 2"}\n')
    code = "{weight: 1, reward: {name: code}}"
    for reward in (
        "{name: code}",
        f"{{name: weighted, label_threshold: 1, components: [{code}, {{weight: 1, reward: {{name: "
        f"math}}}}]}}",
    ):
        with pytest.raises(
            ConfigError,
            match=r"reward.sandbox=bubblewrap does not work on this host: bwrap is "
            r"not",
        ):
            run_train(
                Path("run.yaml"), [f"model.path={tiny_qwen3}", "reward=null", f"reward={reward}"]
            )
    critic = "objective={name: ppo, critic: {path: ./no/such/folder}}"
    with pytest.raises(
        ConfigError,
        match=r"objective.critic.path=./no/such/folder: no such folder; correct the path",
    ):
        run_train(Path("run.yaml"), [f"model.path={tiny_qwen3}", "objective=null", critic])
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "train.jsonl"}


def test_places() -> None:
    torchrun = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
    }
    assert find_rank(torchrun | {"MASTER_PORT": "5"}) == RankPlace(3, 4, 1, 2, "h", 5)
    with pytest.raises(ConfigError, match="MASTER_PORT is not"):
        find_rank(torchrun)
    with pytest.raises(ConfigError, match="a variable of torchrun is no integer"):
        find_rank(torchrun | {"MASTER_PORT": "x"})
    for wrong in (
        {"RANK": "4"},
        {"LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "9"},
        {"MASTER_PORT": "65536"},
        {"MASTER_ADDR": "a b"},
    ):
        with pytest.raises(ConfigError, match="the environment of torchrun is inconsistent"):
            find_rank(torchrun | {"MASTER_PORT": "5"} | wrong)
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert find_rank(batch_script) is None
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "n1",
    }
    assert find_rank(step) == RankPlace(2, 4, 0, 2, "n1", job_port("7"))
    assert find_rank(step | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(ConfigError, match="a variable of srun is no integer"):
        find_rank(step | {"SLURM_STEP_NUM_TASKS": "four"})
    with pytest.raises(ConfigError, match="that of srun, but SLURM_LOCALID is not set"):
        find_rank({key: value for key, value in step.items() if key != "SLURM_LOCALID"})
    assert os.environ.get("RANK") is None


def test_the_last_lines_of_a_run_name_its_results_and_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my run.yaml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    words = ["run.dir=out", "evaluation={benchmarks: [{path: b.jsonl, preset: gsm8k}], sampling: "]
    words[1] += "{max_response_tokens: 8}}"
    lines = closing_lines(load_config(Path("my run.yaml"), words), words)
    run_dir = Path("out") / load_config(Path("my run.yaml")).config.run.name
    assert f"weights    {run_dir}/hf (Hugging Face format)" in lines
    assert f"report     {run_dir}/report.html (open it in a browser)" in lines

    command = shlex.split(lines[-1].removeprefix("next "))
    assert command[-5:] == ["my run.yaml", *words, "--model", f"{run_dir}/hf"]
    done = subprocess.run([*command[:-5], "--help"], capture_output=True, text=True, check=True)
    assert "pass@k of a model" in done.stdout

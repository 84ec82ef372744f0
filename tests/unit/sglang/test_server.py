"""Life and death of owned servers, with a stand-in program of the same habits (the real one:
tests/integration/sglang).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers, SglangSync
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.contracts import SamplingOptions
from pacs_megatron.errors import ConfigError, RolloutError
from pacs_megatron.runtime.processes import start_ticks
from pacs_megatron.sglang import build as sglang
from pacs_megatron.sglang import guard as sglang_guard
from pacs_megatron.sglang import server as sglang_server
from pacs_megatron.sglang.client import SglangEngine
from pacs_megatron.sglang.fleet import Health, Server
from pacs_megatron.sglang.server import ManagedServer, reap
from tests.support.servers.fleet_run import MOVED, RESTARTED, SENT_AGAIN
from tests.support.servers.managed import PYTHON, options, spec, tree

TOOK_S = 600.0


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if start_ticks(pid) is not None]


def until_exit(server: ManagedServer) -> int | None:
    deadline = time.monotonic() + TOOK_S
    while server.exit_code() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return server.exit_code()


def gone(pids: list[int], within_s: float = 600.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)


def test_close_ends_every_child_also_stubborn_ones(tmp_path: Path) -> None:
    server = ManagedServer(spec(tmp_path))
    server.start()
    server.wait_ready(TOOK_S)
    pids = tree(server)
    assert len(alive(pids)) == 4  # guard, server, two children
    server.close()
    assert not alive(pids)
    assert not server.pid_file.exists()
    with pytest.raises(RolloutError, match="was closed"):
        server.start()


def test_a_server_and_its_children_keep_their_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the driver published before it was bound: those near the server's own GPUs."""
    last = max(os.sched_getaffinity(0))
    monkeypatch.setenv("PACS_ROLLOUT_CORES", f"0,1;{last}")
    monkeypatch.setenv("PACS_VISIBLE_GPUS", "4,5")
    options_of_two = spec(tmp_path, count=2, device="cuda", colocated=True).options
    specs = sglang.server_specs(options_of_two, ModelOptions(path="m"), tmp_path)
    assert [made.cores for made in specs] == [{0, 1}, {last}]
    assert all("--sleep-on-idle" in made.command(1, 2) for made in specs)

    server = ManagedServer(replace(spec(tmp_path), cores=specs[1].cores))
    server.start()
    server.wait_ready(TOOK_S)
    assert {frozenset(os.sched_getaffinity(pid)) for pid in tree(server)} == {frozenset({last})}
    server.close()


def test_a_stopped_server_is_ended_too(tmp_path: Path) -> None:
    server = ManagedServer(spec(tmp_path))
    server.start()
    server.wait_ready(TOOK_S)
    pids = tree(server)
    for pid in pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    server.close()
    assert not alive(pids)


def test_a_stopped_guard_ends_its_server_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = ManagedServer(spec(tmp_path))
    server.start()
    server.wait_ready(TOOK_S)
    pids = tree(server)
    os.kill(pids[0], signal.SIGSTOP)
    server.close()
    assert not alive(pids)
    assert "does not end" not in caplog.text


def test_a_killed_guard_takes_its_server_along_and_a_restart_ends_the_rest(tmp_path: Path) -> None:
    server = ManagedServer(spec(tmp_path))
    server.start()
    server.wait_ready(TOOK_S)
    pids = tree(server)
    os.kill(pids[0], signal.SIGKILL)
    assert until_exit(server) == -signal.SIGKILL
    server.start()
    server.wait_ready(TOOK_S)
    assert gone(pids)
    server.close()


def test_killing_the_server_ends_its_orphans_and_a_restart_keeps_the_port(tmp_path: Path) -> None:
    server = ManagedServer(spec(tmp_path))
    server.start()
    server.wait_ready(TOOK_S)
    url = server.url
    pids = tree(server)
    os.kill(json.loads(server.pid_file.read_text())["server"], signal.SIGKILL)
    assert gone(pids)
    assert until_exit(server) == 128 + signal.SIGKILL
    server.start()
    server.wait_ready(TOOK_S)
    assert server.url == url
    server.close()


def test_an_exit_is_noticed_when_an_update_begins_and_the_server_comes_back(tmp_path: Path) -> None:
    """Detected before the next probe, which is half a minute away: the update would go to a server
    that has ended.
    """
    own = ManagedServer(spec(tmp_path))
    own.start()
    own.wait_ready(TOOK_S)
    options = SglangRollout.model_construct(
        probe_interval_s=30.0,
        probe_timeout_s=60.0,
        servers=SglangServers.model_construct(max_restarts=1, start_timeout_s=TOOK_S),
    )
    with SglangEngine([Server(own.api, own)], options, vocab_size=8) as engine:
        os.kill(json.loads(own.pid_file.read_text())["server"], signal.SIGKILL)
        assert until_exit(own) == 128 + signal.SIGKILL
        assert engine.status()[0].health is Health.STALE
        engine.begin_update(is_release=True)  # the training step has its memory: no restart
        time.sleep(1.0)
        [status] = engine.status()
        assert (status.health, status.restarts, status.restarting) == (Health.DEAD, 0, False)
        engine.begin_update()
        [status] = engine.status()
        assert status.health is Health.DEAD and status.returning
        deadline = time.monotonic() + TOOK_S
        while engine.status()[0].health is Health.DEAD and time.monotonic() < deadline:
            time.sleep(0.05)
        [status] = engine.status()
        assert (status.health, status.restarts, status.returning) == (Health.STALE, 1, False)


def test_a_failed_start_quotes_the_log(tmp_path: Path) -> None:
    server = ManagedServer(spec(tmp_path, "--dummy-exit", "3"))
    server.start()
    with pytest.raises(RolloutError, match=r"exited with 3 while starting: .*dummy-exit"):
        server.wait_ready(TOOK_S)


def test_one_failing_server_ends_the_others(tmp_path: Path) -> None:
    good = spec(tmp_path)
    bad = spec(tmp_path, "--dummy-exit", "3", name="server1")
    with pytest.raises(RolloutError, match="server1 exited with 3"):
        sglang.start_servers([good, bad], TOOK_S)
    assert list(tmp_path.glob("*.pid")) == []


LAUNCHER = """
import sys, time
from pathlib import Path
from tests.support.servers.managed import spec, tree
from pacs_megatron.sglang.server import ManagedServer
server = ManagedServer(spec(Path(sys.argv[1])))
server.start()
server.wait_ready(20)
print(*tree(server), flush=True)
time.sleep(60)
"""


def launch(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_servers_end_with_their_launcher_however_it_ends(tmp_path: Path, number: int) -> None:
    process, pids = launch(tmp_path)
    assert len(pids) == 4
    process.send_signal(number)
    process.wait(TOOK_S)
    assert gone(pids)


def test_the_next_start_ends_what_a_killed_launcher_and_a_killed_guard_left(tmp_path: Path) -> None:
    process, pids = launch(tmp_path)
    process.kill()
    os.kill(pids[0], signal.SIGKILL)
    process.wait(TOOK_S)
    assert gone(pids[:2])  # the server itself goes with its guard, its children do not
    left = alive(pids)
    assert len(left) == 2
    assert sorted(reap(tmp_path)) == sorted(left)
    assert gone(pids)
    assert reap(tmp_path) == []


def test_reap_leaves_a_stranger_with_a_reused_pid_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    try:
        started = start_ticks(stranger.pid)
        assert started is not None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        record = {"boot_id": boot, "guard": stranger.pid, "guard_start": started - 1}
        record |= {
            "server": stranger.pid,
            "server_start": started - 1,
            "store": str(tmp_path / "store"),
        }
        record |= {"shared": []}  # type: ignore[dict-item]
        (tmp_path / "server0.pid").write_text(json.dumps(record))
        assert reap(tmp_path) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_key_is_in_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", "very-secret")
    options = SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=1),
        sync=SglangSync(transport="disk"),
        servers=SglangServers(python=(sys.executable,), device="cpu"),
        api_key_env="ROLLOUT_KEY",
    )
    [made] = sglang.server_specs(options, ModelOptions(path="m"), tmp_path)
    assert made.api_key == "very-secret"
    assert "very-secret" not in repr(made)
    command = made.command(1, 2)
    assert "very-secret" not in " ".join(sglang_server.with_start_script(command))
    monkeypatch.delenv("ROLLOUT_KEY")
    with pytest.raises(ConfigError, match="ROLLOUT_KEY"):
        sglang.api_key(options)


def test_a_missing_interpreter_is_a_config_error(tmp_path: Path, tiny_qwen3: Path) -> None:
    options = SglangRollout(
        engine="sglang",
        sampling=SamplingOptions(max_response_tokens=1),
        sync=SglangSync(transport="disk"),
        servers=SglangServers(python=("no/such/python",), device="cpu"),
    )
    with pytest.raises(ConfigError, match="no/such/python does not exist"):
        sglang.open_engine(options, ModelOptions(path=str(tiny_qwen3)), tmp_path)


@pytest.mark.parametrize("key", ["sesame\n", "open sesame", "sésame", "sesame\x00"])
def test_a_key_that_no_header_can_carry_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(os, "environ", {"ROLLOUT_KEY": key})
    with pytest.raises(
        ConfigError, match=r"rollout\.api_key_env=ROLLOUT_KEY contains a line end, a space"
    ) as caught:
        sglang.api_key(options(api_key_env="ROLLOUT_KEY"))
    assert "same" not in str(caught.value)


@pytest.mark.parametrize("second", ["http://host:1/", "http://HOST:1"])
def test_a_server_named_twice_is_rejected(second: str) -> None:
    urls = ("http://host:1", "http://host:2", second)
    with pytest.raises(ValidationError, match=r"rollout\.urls: http://host:1 is named twice"):
        options(urls=urls)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (
            ("--api-key", "sesame"),
            r"extra_args contains --api-key; remove it: set rollout\.api_key_env",
        ),
        (("--api-key=sesame",), r"extra_args contains --api-key; remove it"),
        (("--api_key=sesame",), r"extra_args contains --api_key; remove it"),
        (("--disable-cuda-graph", "--port", "1"), "a free port is chosen"),
        (("--tp-size", "2"), r"use rollout\.servers\.tp"),
    ],
)
def test_extra_args_may_not_repeat_other_options(extra: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SglangServers(python=("python",), extra_args=extra)


def test_a_stop_request_ends_a_start_at_once(tmp_path: Path) -> None:
    """Or a node's GPUs would stay taken until servers that take minutes to start are ready."""
    slow = [spec(tmp_path, "--dummy-never-ready", name=name) for name in ("server0", "server1")]
    began = time.monotonic()
    with pytest.raises(RolloutError, match="stop request while the rollout servers were starting"):
        sglang.start_servers(slow, 300.0, lambda: time.monotonic() - began > 1.0)
    assert time.monotonic() - began < 20
    assert list(tmp_path.glob("*.pid")) == []


def test_one_failing_server_does_not_wait_for_the_others(tmp_path: Path) -> None:
    slow = spec(tmp_path, "--dummy-never-ready")
    bad = spec(tmp_path, "--dummy-exit", "3", name="server1")
    began = time.monotonic()
    with pytest.raises(RolloutError, match="server1 exited with 3"):
        sglang.start_servers([slow, bad], 300.0)
    assert time.monotonic() - began < 20
    assert list(tmp_path.glob("*.pid")) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text("a file")
    with pytest.raises(RolloutError, match=r"server0: cannot write .*server0\.log"):
        ManagedServer(spec(tmp_path / "servers")).start()


def stand_in_environment(folder: Path, program: str) -> Path:
    """An interpreter with a `sglang.launch_server` of these lines, and `ninja` beside it."""
    package = folder / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(program)
    programs = folder / "environment" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(os.path.realpath(sys.executable))
    (programs / "ninja").write_text("#!/bin/sh\n")
    (programs / "ninja").chmod(0o755)
    return programs / "python"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("words", [(), ("env",)], ids=["interpreter", "command"])
def test_a_server_finds_ninja_of_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], device: str
) -> None:
    """SGLang compiles kernels at its first forward with `ninja`, which pip installs beside its
    interpreter; a child of the server has the same PATH.
    """
    lines = "import subprocess; subprocess.run('command -v ninja', shell=True)"
    python = stand_in_environment(tmp_path, lines)
    made = spec(tmp_path, python=(*words, str(python)), device=device)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    server = ManagedServer(made)
    server.start()
    with pytest.raises(RolloutError, match="exited with 0"):
        server.wait_ready(TOOK_S)
    assert server.log_path.read_text().split() == [str(python.with_name("ninja"))]


def test_a_server_is_ready_after_it_sampled_as_an_evaluation_does(tmp_path: Path) -> None:
    """Otherwise the first evaluation compiles kernels, and the fleet ends the silent server."""
    first = tmp_path / "first.json"
    server = ManagedServer(spec(tmp_path, "--dummy-first-request", str(first)))
    server.start()
    server.wait_ready(TOOK_S)
    body = json.loads(first.read_text())
    server.close()
    assert body["sampling_params"]["top_p"] < 1 and body["sampling_params"]["temperature"] > 0
    assert body["return_logprob"] is True


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--dummy-no-answer", "did not answer its first request: .*no response"),
        ("--dummy-dies", "(exited with 5 at|did not answer) its first request: .*no response"),
    ],
)
def test_a_server_that_fails_at_its_first_request_is_ended(
    tmp_path: Path, option: str, problem: str
) -> None:
    with pytest.raises(RolloutError, match=rf"server0 {problem}.*server0\.log: (?s:.*)kernel"):
        sglang.start_servers([spec(tmp_path, option)], TOOK_S)
    assert list(tmp_path.glob("*.pid")) == []


def test_no_server_is_left_when_no_rank_can_send_to_it(
    tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU 9 is not the trainer's: the error came after the start, and the server stayed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    made = options(
        urls=(),
        sync=SglangSync(transport="ipc"),
        servers=SglangServers(python=PYTHON, visible_devices=("9",), colocated=True),
    )
    with pytest.raises(ConfigError, match="the trainer does not use GPU 9"):
        sglang.open_engine(made, ModelOptions(path=str(tiny_qwen3)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_colocated_servers_capture_no_graphs_that_they_cannot_release(tmp_path: Path) -> None:
    """The prefill's, to 8,192 tokens; SGLang 0.5.23 cannot release them."""
    for colocated in (True, False):
        made = spec(tmp_path, device="cuda", colocated=colocated)
        assert ("--disable-prefill-cuda-graph" in made.command(1, 2)) == colocated


def test_a_server_does_not_inherit_what_is_the_trainers(tmp_path: Path) -> None:
    trainer = {
        "RANK": "0",
        "WORLD_SIZE": "8",
        "TORCHELASTIC_RUN_ID": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NCCL_SOCKET_IFNAME": "ib0",
    }
    for colocated in (True, False):
        made = spec(tmp_path, device="cuda", colocated=colocated)
        got = made.environment(trainer, tmp_path / "store", 2)
        kept = {"NCCL_SOCKET_IFNAME"}
        if not colocated:
            kept |= {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
        assert trainer.keys() & got.keys() == kept


def shared_files(tag: str) -> list[str]:
    return sorted(name for name in os.listdir("/dev/shm") if tag in name)


@pytest.mark.parametrize("how", ["close", "crash", "guard killed"])
def test_only_shared_memory_of_the_ended_server_is_removed(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang leaves it when it is killed; enough of it fills /dev/shm, and the next scheduler dies
    of SIGBUS.
    """
    tag = f"pacstest{os.getpid()}{how[0]}"
    guard = (tmp_path / "guard.py").resolve()
    source = Path(sglang_guard.__file__).read_text()
    assert "SCAN_S = 10.0" in source
    guard.write_text(source.replace("SCAN_S = 10.0", "SCAN_S = 0.2"))
    monkeypatch.setattr(sglang_guard, "__file__", str(guard))
    server = ManagedServer(spec(tmp_path, "--dummy-shared", tag))
    server.start()
    server.wait_ready(TOOK_S)
    try:
        assert shared_files(tag) == [f"sglang_loads_{tag}", f"torch_{tag}"]
        deadline = time.monotonic() + TOOK_S
        while not json.loads(server.pid_file.read_text())["shared"] and time.monotonic() < deadline:
            time.sleep(0.05)
        record = json.loads(server.pid_file.read_text())
        if how == "crash":
            os.kill(record["server"], signal.SIGKILL)
            assert until_exit(server) == 128 + signal.SIGKILL
        elif how == "guard killed":
            os.kill(record["guard"], signal.SIGKILL)
            assert until_exit(server) == -signal.SIGKILL
        server.close()
        assert shared_files(tag) == [f"torch_{tag}"]  # the trainer's way of sharing weights
    finally:
        server.close()
        Path(f"/dev/shm/torch_{tag}").unlink(missing_ok=True)


NVML = """
import os
TOTAL = 100 * 2**30
class Info:
    total = TOTAL
    @property
    def free(self):
        with open(os.environ["FREE_GIB"]) as file:
            return int(file.read()) * 2**30
def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(handle): return Info()
"""


def test_the_memory_budget_is_a_share_of_the_total_and_waits_until_it_is_free(
    tmp_path: Path,
) -> None:
    """A server that restarts beside the trainer gets the same bytes as before."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import sys; print('STARTED', *sys.argv[1:], flush=True)"
    )
    (tmp_path / "pynvml.py").write_text(NVML)
    free = tmp_path / "free"
    given = spec(tmp_path, python=(sys.executable,), device="cuda", tp=2, mem_fraction=0.35)
    made = replace(given, visible_devices="0,1")
    command = sglang_server.with_start_script(made.command(1, 2))
    assert "--mem-fraction-static" not in command
    environment = made.environment({}, tmp_path / "store", 2) | {
        "PYTHONPATH": str(tmp_path),
        "FREE_GIB": str(free),
    }

    def started(server: subprocess.Popen[str]) -> float:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("STARTED"))
        words = line.split()
        return float(words[words.index("--mem-fraction-static") + 1])

    for gib in (100, 50):
        free.write_text(str(gib))
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as server:
            assert started(server) * gib == pytest.approx(35, abs=0.02)
    free.write_text("37")  # less than 35 GiB and the reserve
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert "waiting for GPU memory: 38.0 GiB needed" in server.stdout.readline()
        free.write_text("60")
        assert started(server) * 60 == pytest.approx(35, abs=0.02)


def test_log_probs_have_the_temperature_with_every_environment_of_the_trainer(
    tmp_path: Path,
) -> None:
    inherited = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    environment = spec(tmp_path).environment(inherited, tmp_path / "store", 2)
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


@pytest.mark.parametrize("line", [MOVED, RESTARTED, SENT_AGAIN])
def test_the_log_lines_that_long_tests_wait_for_exist(line: str) -> None:
    """A changed line made tests with real servers wait for their limit; they run in `make
    test-full` only.
    """
    package = Path(sglang.__file__).parents[1]
    paths = [*package.glob("sglang/*.py"), *package.glob("rollout/*.py")]
    assert any(line in path.read_text() for path in paths)

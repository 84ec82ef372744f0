"""Starts, watches and stops a managed SGLang server."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pacs_megatron.config.rollout_options import SglangRollout, SglangServers
from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.errors import RolloutError
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.ports import free_port
from pacs_megatron.runtime.processes import start_ticks
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.sglang import guard as sglang_guard
from pacs_megatron.sglang import start
from pacs_megatron.sglang.api import SglangApi

logger = logging.getLogger(__name__)

GRACE_S = 1.5
"""Seconds between SIGTERM and SIGKILL; a server has no state to save."""
POLL_S = 0.25
"""Seconds between two checks of a starting server."""
MIN_WARM_UP_S = 30.0
"""Shortest time for the first request of a server that was ready just before its timeout."""
EXIT_S = 3.0
"""Seconds for a server to end after its connection broke."""
START_ATTEMPTS = 3
"""Number of attempts to start, because another process may bind the chosen port first."""
API_KEY = "PACS_SGLANG_API_KEY"
MEM_FRACTION = "PACS_SGLANG_MEM_FRACTION"
"""Environment variables that `sglang/start.py` turns into arguments."""
FP8_BLOCKWISE_ARGS = (
    "--load-format",
    "dummy",
    "--json-model-override-args",
    '{"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", '
    '"weight_block_size": [128, 128]}}',
)
"""`dummy`, because the folder's weights are bf16; the first push brings all of them quantized."""
PORT_TAKEN = ("address already in use", "Address already in use", "EADDRINUSE")
_PROCESS_GROUP_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
)
"""The trainer's; a server must not join its process group."""
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The trainer's: `expandable_segments`, which Megatron's users set, ends a server that releases its
memory (torch_memory_saver rejects it).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Start parameters of one managed server; `folder` has its `<name>.log` and `<name>.pid`."""

    name: str
    folder: Path
    host: str = "127.0.0.1"
    options: SglangRollout
    model: ModelOptions
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the server; None: inherited."""
    cores: frozenset[int] | None = None
    """Cores of the server's processes; None: those of the process that starts it."""
    api_key: str | None = field(default=None, repr=False)

    @property
    def servers(self) -> SglangServers:
        assert self.options.servers is not None
        return self.options.servers

    def command(self, port: int, nccl_port: int) -> list[str]:
        """The command without the API key: every user of the host can read a command line."""
        servers = self.servers
        args = [*servers.python, "-m", "sglang.launch_server", "--model-path", self.model.path]
        args += ["--host", self.host, "--port", str(port), "--nccl-port", str(nccl_port)]
        args += ["--device", servers.device, "--tp-size", str(servers.tp)]
        args += ["--skip-server-warmup", "--log-level", "warning"]
        args += ["--dtype", {"bf16": "bfloat16", "fp32": "float32"}[self.options.dtype]]
        # On GPUs sglang/start.py adds the fraction.
        if servers.mem_fraction is not None and servers.device == "cpu":
            args += ["--mem-fraction-static", str(servers.mem_fraction)]
        if servers.max_total_tokens is not None:
            args += ["--max-total-tokens", str(servers.max_total_tokens)]
        if servers.context_length is not None:
            args += ["--context-length", str(servers.context_length)]
        # Allows to release weights and KV cache during a training step. Graphs are not released:
        # SGLANG_MEMORY_SAVER_CUDA_GRAPH, which would allow it, raises NotImplementedError with
        # SGLang's prefill graphs (model_executor/runner_backend/breakable_cuda_graph_backend.py).
        if servers.colocated and servers.device == "cuda":
            args += ["--enable-memory-saver", "--disable-prefill-cuda-graph"]
        if self.model.trust_remote_code:
            args += ["--trust-remote-code"]
        if servers.device == "cpu":
            args += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            args += ["--disable-cuda-graph", "--disable-overlap-schedule"]
        if servers.colocated or servers.device == "cpu":
            # Otherwise an idle scheduler spins on a core during the training step.
            args += ["--sleep-on-idle"]
        if self.options.sync.quantize == "fp8_blockwise":
            args += FP8_BLOCKWISE_ARGS
        return [*args, *servers.extra_args]

    def environment(
        self, inherited: Mapping[str, str], store: Path, nccl_port: int
    ) -> dict[str, str]:
        """The server's environment: the trainer's without its process group, and for a colocated
        server without the settings of its allocator.

        Args:
            inherited: the trainer's environment.
            store: file for the rendezvous of the server's ranks. torch's TCP store, the default,
                listens on all interfaces.
            nccl_port: port of the server's own process group.
        """
        servers = self.servers
        env = {
            name: value
            for name, value in inherited.items()
            if name not in _PROCESS_GROUP_VARIABLES and not name.startswith("TORCHELASTIC_")
        }
        env["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"  # log-probs at the sampling temperature
        if servers.colocated:
            for name in _ALLOCATOR_VARIABLES:
                env.pop(name, None)
        if self.host == "127.0.0.1":
            env["GLOO_SOCKET_IFNAME"] = "lo"
        # A server over several hosts needs the TCP store.
        if "--dist-init-addr" not in servers.extra_args:
            env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{store}"
            # SGLang derives names of shared-memory segments from these on CPUs with AMX.
            env["MASTER_ADDR"] = self.host
            env["MASTER_PORT"] = str(nccl_port)
        if self.visible_devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = self.visible_devices
        if servers.device == "cuda" and servers.mem_fraction is not None:
            env[MEM_FRACTION] = str(servers.mem_fraction)
        if self.api_key is not None:
            env[API_KEY] = self.api_key
        if servers.device == "cpu":
            env["SGLANG_USE_CPU_ENGINE"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ""
            env.setdefault("OMP_NUM_THREADS", "1")
        return env


def tail(path: Path) -> str:
    """The last lines of a log as one line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 2**16))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "no log"
    last = [line.strip() for line in lines[-8:]]
    return " | ".join(line for line in last if line) or "empty log"


def reap(folder: Path) -> list[int]:
    """Ends processes that a killed launcher left running, by the pid files in `folder`.

    Call only before the first start in a folder. Returns their pids.
    """
    ended: list[int] = []
    for path in sorted(folder.glob("*.pid")):
        ended += _reap_file(path)
    if ended:
        logger.warning(
            "ended %d leftover server processes of an earlier run: %s", len(ended), ended
        )
    return ended


def _reap_file(path: Path) -> list[int]:
    """Ends the processes of one pid file and removes it; ignores a damaged file."""
    ended: list[int] = []
    with contextlib.suppress(RolloutError, OSError, ValueError, TypeError, KeyError):
        ended = _reap_one(read_object(path, error=RolloutError))
    path.unlink(missing_ok=True)
    return ended


def _reap_one(record: Mapping[str, Any]) -> list[int]:
    """Ends the guard and the server of a record that `guard.write_pid_file` wrote."""
    if record["boot_id"] != Path("/proc/sys/kernel/random/boot_id").read_text().strip():
        return []
    ended: list[int] = []
    guard = int(record["guard"])
    if start_ticks(guard) == record["guard_start"]:
        ended.append(guard)
        os.kill(guard, signal.SIGKILL)
    Path(str(record["store"])).unlink(missing_ok=True)

    group = int(record["server"])
    started = int(record["server_start"])
    leader_started = start_ticks(group)
    # The kernel does not reuse the number of a live group for a new process. If the leader no
    # longer exists, the members are ours unless the number was reused by a group that also left
    # orphans: the start times separate the two.
    left: list[int] = []
    if leader_started is None or leader_started == started:
        left = [pid for pid in sglang_guard.members(group) if (start_ticks(pid) or 0) >= started]

    shared = sglang_guard.shared_inodes(left) | set(record["shared"])
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    sglang_guard.remove_shared(shared)
    return ended + left


class ManagedServer:
    """Starts, watches and ends one server. Any thread may call `close`, also during the start."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.log_path = spec.folder / f"{spec.name}.log"
        self.pid_file = spec.folder / f"{spec.name}.pid"
        self._guard: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._lock = threading.RLock()
        self._closed = False

    @property
    def url(self) -> str:
        return f"http://{self.spec.host}:{self._port}"

    @property
    def api(self) -> SglangApi:
        return SglangApi(url=self.url, api_key=self.spec.api_key)

    def start(self) -> None:
        """Starts the process on a free port and returns at once.

        A restart keeps its port if that is still free.
        """
        with self._lock:
            if self._closed:
                raise RolloutError(f"rollout server {self.spec.name} was closed")
            self.stop()
            try:
                self._spawn()
            except OSError as error:
                problem = f"cannot write {self.log_path}, or cannot start ({error})"
                raise RolloutError(f"rollout server {self.spec.name}: {problem}") from error

    def _spawn(self) -> None:
        self.spec.folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port(self.spec.host, self._port)
        nccl_port = free_port(self.spec.host)
        # A folder in memory: file locks do not work on every cluster file system, and containers
        # also have this folder. The name cannot be guessed.
        store = Path(f"/dev/shm/pacs-server-{uuid.uuid4().hex}")  # noqa: S108
        environment = self.spec.environment(os.environ, store, nccl_port)
        command = with_start_script(self.spec.command(self._port, nccl_port))
        guard = [sys.executable, "-I", sglang_guard.__file__]
        guard += [str(self.pid_file), str(GRACE_S), str(store)]
        with self.log_path.open("ab") as log:
            self._guard = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C reaches the launcher only, which then ends its servers.
                start_new_session=True,
                preexec_fn=self._bind if self.spec.cores else None,
            )
        logger.info(
            "starting rollout server %s at %s, log %s", self.spec.name, self.url, self.log_path
        )

    def _bind(self) -> None:
        assert self.spec.cores is not None
        os.sched_setaffinity(0, self.spec.cores)

    def exit_code(self) -> int | None:
        """The server's exit code; None while it runs or before the first start."""
        guard = self._guard
        return None if guard is None else guard.poll()

    def _exit_code_within(self, seconds: float) -> int | None:
        """The server's exit code; None if it does not end in this time."""
        guard = self._guard
        if guard is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return guard.wait(seconds)
        return None

    @report_wait("for a rollout server to be ready; its log has details")
    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the server accepts requests and has answered one.

        Raises:
            RolloutError: it exited, was stopped, or was not ready in time. It no longer runs.
        """
        deadline = time.monotonic() + timeout_s
        attempts = 1
        while not self.api.ready():
            if self._guard is None:
                raise RolloutError(f"rollout server {self.spec.name} was stopped while starting")
            exit_code = self.exit_code()
            if exit_code is None and time.monotonic() <= deadline:
                time.sleep(POLL_S)
                continue

            log = tail(self.log_path)
            port_taken = exit_code is not None and any(text in log for text in PORT_TAKEN)
            if port_taken and attempts < START_ATTEMPTS:
                attempts += 1
                self._port = 0
                self.start()
                continue

            self.stop()
            problem = f"exited with {exit_code} while starting"
            if exit_code is None:
                problem = (
                    f"was not ready within rollout.servers.start_timeout_s={timeout_s:g}; "
                    f"log {self.log_path}"
                )
            raise RolloutError(f"rollout server {self.spec.name} {problem}: {log}")
        self._warm_up(deadline)

    def _warm_up(self, deadline: float) -> None:
        """Makes the server compile the kernels of sampling before it counts as ready.

        Otherwise the first evaluation compiles them; the server is silent meanwhile, and the fleet
        ends it after `dead_after_s`.
        """
        began = time.monotonic()
        try:
            self.api.warm_up(max(deadline - began, MIN_WARM_UP_S))
        except RolloutError as error:
            exit_code = self._exit_code_within(EXIT_S)
            log = tail(self.log_path)
            self.stop()
            problem = "did not answer its first request"
            if exit_code is not None:
                problem = f"exited with {exit_code} at its first request"
            raise RolloutError(
                f"rollout server {self.spec.name} {problem}: {error}; log {self.log_path}: {log}"
            ) from error
        logger.info(
            "rollout server %s answered its first request in %.1f s",
            self.spec.name,
            time.monotonic() - began,
        )

    def close(self) -> None:
        """Stops the server for good: a later `start` raises RolloutError."""
        with self._lock:
            self._closed = True
            self.stop()

    def stop(self) -> None:
        """Ends the server and all its children; returns when they have ended."""
        with self._lock:
            guard = self._guard
            self._guard = None
            if guard is None:
                return
            assert guard.stdin is not None
            guard.stdin.close()
            guard.send_signal(signal.SIGCONT)  # SIGSTOP may hold it
            try:
                with report_wait(f"for rollout server {self.spec.name} to end"):
                    guard.wait(GRACE_S + 15.0)
            except subprocess.TimeoutExpired:
                logger.warning(
                    "guard of rollout server %s does not end; killing its group", self.spec.name
                )
                guard.kill()
                guard.wait()
            if self.pid_file.exists():  # the guard was killed before it could clean up
                _reap_file(self.pid_file)


def with_start_script(command: list[str]) -> list[str]:
    """The command that runs `sglang/start.py` in place of `-m sglang.launch_server`."""
    module = command.index("-m")
    script = Path(start.__file__).read_text(encoding="utf-8")
    return [*command[:module], "-c", script, *command[module + 2 :]]

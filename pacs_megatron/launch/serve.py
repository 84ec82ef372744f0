"""SGLang servers of one node.

`python -m pacs_megatron.launch.serve <folder> <config> [key=value ...]`. srun starts this process
on each rollout node. For colocated servers the first rank of each trainer node starts it
(`attach`). It writes the URLs of this node's servers to `<folder>/<node>.urls` when all are ready,
and restarts a server that exits. Servers listen on the node's network address: set
rollout.api_key_env on a shared network.

It stops on SIGINT, or when the batch script writes `<folder>/stop` after the trainer has ended.
Slurm sends SIGTERM to the trainer too, so after SIGTERM it waits for the trainer's exit code. It
ignores SIGUSR1.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pacs_megatron.config import RunConfig, load_config
from pacs_megatron.config.rollout_options import SglangServers
from pacs_megatron.errors import ConfigError, ExitCode, PacsError, RolloutError
from pacs_megatron.runtime.command_line import run_command
from pacs_megatron.runtime.cores import publish_server_cores
from pacs_megatron.runtime.environment import RankPlace, own_address, visible_gpus
from pacs_megatron.runtime.files import json_line, write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.processes import die_with_parent
from pacs_megatron.runtime.run_folder import ATTEMPT_VARIABLE, EXIT_CODE_FILE, run_folder
from pacs_megatron.runtime.waiting import report_wait

if TYPE_CHECKING:
    from pacs_megatron.sglang.server import ManagedServer, ServerSpec

STOP_FILE = "stop"
"""File in the folder of URLs that marks the end of the trainer."""
FIRST_RANK = "PACS_FIRST_RANK"
"""Environment variable: first trainer rank of this node, of a process that serves beside ranks."""
POLL_S = 0.5
_log = logging.getLogger("pacs_megatron.launch.serve")


def servers_here(config: RunConfig) -> int:
    """Number of servers per rollout node, or per trainer node if colocated.

    Raises:
        ConfigError: there are no servers, or the nodes do not divide `rollout.servers.count`.
    """
    rollout = config.rollout.sglang
    resources = config.resources
    if rollout is None or rollout.servers is None:
        raise ConfigError(
            "rollout.servers is not set; rollout nodes require rollout.engine=sglang and "
            "rollout.servers"
        )
    if rollout.servers.colocated:
        key = "nodes"
        nodes = max(1, resources.nodes)
    else:
        key = "rollout_nodes"
        nodes = max(1, resources.rollout_nodes)
    if rollout.servers.count % nodes:
        raise ConfigError(
            f"rollout.servers.count={rollout.servers.count} does not divide over "
            f"resources.{key}={nodes}; use a multiple of {nodes}"
        )
    return rollout.servers.count // nodes


class Ending:
    """Decides when the servers stop, by the rules of the module docstring."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self._stop_file = folder / STOP_FILE
        self._exit_code_file = run_dir / EXIT_CODE_FILE
        self._since = time.time()
        self._terms = 0
        self._interrupted = False

    def install(self) -> None:
        """Handles the signals in this process."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupted = True
        self._terms += 1

    def is_due(self) -> bool:
        if self._interrupted or self._terms > 1 or self._stop_file.exists():
            return True
        with suppress(FileNotFoundError):
            return self._terms == 1 and self._exit_code_file.stat().st_mtime >= self._since
        return False


def serve(folder: Path, config: RunConfig, ending: Ending) -> int:
    """Starts the servers, publishes their URLs, runs until `ending` is due, and stops them.

    Args:
        folder: for the URLs, logs and pid files.
        config: of the run.
        ending: decides when the servers stop.

    Returns:
        The exit code.
    """
    from pacs_megatron.sglang.api import RELEASED_VERSION
    from pacs_megatron.sglang.build import server_specs, start_servers
    from pacs_megatron.sglang.weights.server_sync import release

    node = _node()
    rollout = config.rollout.sglang
    count = servers_here(config)
    assert rollout is not None and rollout.servers is not None
    folder.mkdir(parents=True, exist_ok=True)
    servers_options = rollout.servers.model_copy(update={"count": count})
    options = rollout.model_copy(update={"servers": servers_options})
    host = own_address(os.environ) or node
    gpus_of_server = rollout.servers.tp if rollout.servers.device == "cuda" else 1
    publish_server_cores(config, count * gpus_of_server)
    specs = server_specs(options, config.model, folder / node, config.policy.routing)
    specs = [replace(spec, host=host) for spec in specs]
    servers = start_servers(specs, rollout.servers.start_timeout_s, ending.is_due)
    pool = ThreadPoolExecutor(len(servers))
    try:
        if are_on_every_node(config):
            # The trainer builds its model in this memory, and gives it back at the first update.
            for server in servers:
                release(server.api, rollout.sync.timeout_s, RELEASED_VERSION)
        lines = [f"{server.url}{_rank_after(server.spec)}\n".encode() for server in servers]
        write_atomically(folder / f"{node}.urls", lines)
        return _watch(servers, rollout.servers, ending, pool)
    finally:
        for server in servers:
            server.close()
        pool.shutdown()  # last: it waits for restarts, which `close` ends


def _rank_after(spec: ServerSpec) -> str:
    """A space and the trainer rank on the server's first GPU; empty on a rollout node."""
    from pacs_megatron.sglang.build import trainer_rank_of

    first = os.environ.get(FIRST_RANK)
    if first is None:
        return ""
    local_rank = trainer_rank_of(spec.visible_devices, visible_gpus(os.environ))
    return f" {int(first) + local_rank}"


def _node() -> str:
    """Name of this node, as in the names of its files."""
    # Several slurmd on one host (tests) have different node names and one address.
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _watch(
    servers: Sequence[ManagedServer],
    options: SglangServers,
    ending: Ending,
    pool: ThreadPoolExecutor,
) -> int:
    """Restarts servers that exit, until `ending` is due.

    A restarted server has the weights of the model folder, so the trainer's probes set it to STALE.

    Args:
        servers: of this node, ready.
        options: `rollout.servers`, for the limits.
        ending: decides when the servers stop.
        pool: runs the restarts, each beside the other servers.

    Returns:
        The exit code: 1 if a server cannot be restarted at its URL.
    """
    restarts = [0] * len(servers)
    starting: dict[int, Future[bool]] = {}
    while not ending.is_due():
        for index, server in enumerate(servers):
            restart = starting.get(index)
            if restart is not None and not restart.done():
                continue

            starting.pop(index, None)
            problem = _problem(server) if restart is None else _failure(restart)
            if problem is None:
                if restart is not None and not restart.result():
                    return 1
                continue

            _log.warning(
                "server %s %s (restarts: %s); see %s",
                server.url,
                problem,
                restarts[index],
                server.log_path,
            )
            restarts[index] += 1
            if restarts[index] > options.max_restarts:
                _log.error("rollout.servers.max_restarts=%s is reached", options.max_restarts)
                return 1
            starting[index] = pool.submit(_restart_at_url, server, options.start_timeout_s)
        time.sleep(POLL_S)
    return 0


def _problem(server: ManagedServer) -> str | None:
    """How the server ended; None while it runs."""
    code = server.exit_code()
    return None if code is None else f"exited with code {code}"


def _failure(restart: Future[bool]) -> str | None:
    """Why a restart failed; None if the server is ready.

    Raises the error of a restart that is not a RolloutError.
    """
    try:
        restart.result()
    except RolloutError as error:
        return f"did not restart: {error}"
    return None


def _restart_at_url(server: ManagedServer, timeout_s: float) -> bool:
    """Restarts a server and returns when it has answered its first request, as at its first start.

    Returns:
        Whether it has its earlier URL.

    Raises:
        RolloutError: it is not ready within the timeout, or was closed.
    """
    url = server.url
    server.start()
    server.wait_ready(timeout_s)
    if server.url == url:
        return True
    _log.error(
        "server %s restarted at %s: the trainer uses the old port, which is in use",
        url,
        server.url,
    )
    return False


@report_wait("for the SGLang servers of all rollout nodes")
def wait_for_urls(
    folder: Path,
    num_nodes: int,
    timeout_s: float,
    exit_code: Callable[[], int | None] = lambda: None,
) -> list[str]:
    """Waits until all nodes have published their servers, and returns the URLs.

    Args:
        folder: folder of the URLs, shared by all nodes.
        num_nodes: number of nodes with servers.
        timeout_s: limit of the wait.
        exit_code: returns the exit code of this node's serve process, None while it runs.

    Raises:
        ConfigError: a node wrote this error.
        RolloutError: a node wrote another error, the limit is reached, or this node's process
            exited without an error file.
    """
    deadline = time.monotonic() + timeout_s
    code = None
    while True:
        files = sorted(folder.glob("*.urls"))
        if len(files) >= num_nodes:
            break
        _check_errors(folder)
        if code is not None:
            raise RolloutError(
                f"server process exited with code {code} and wrote no error; see the logs in "
                f"{folder}"
            )
        if time.monotonic() > deadline:
            raise RolloutError(
                f"SGLang servers of {len(files)} of {num_nodes} rollout nodes are up after "
                f"{timeout_s:.0f} s (rollout.servers.start_timeout_s); see the logs in {folder}"
            )
        code = exit_code()  # read before the files: the process writes them before it exits
        time.sleep(POLL_S)

    return [line[0] for line in _published(folder)]


def _published(folder: Path) -> list[list[str]]:
    """URL and, of a colocated server, trainer rank of each server, in the order of the nodes."""
    lines: list[list[str]] = []
    for file in sorted(folder.glob("*.urls")):
        lines += [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    return lines


def _check_errors(folder: Path) -> None:
    """Raises the first error that a node wrote to the folder."""
    for path in sorted(folder.glob("*.error")):
        content = read_object(path, error=RolloutError)
        kind = ConfigError if content.get("code") == ConfigError.exit_code else RolloutError
        raise kind(f"node {path.stem}: {content.get('message')}")


# --------------------------------------------------------------------------------------------------
# Colocated servers on several nodes.


def are_on_every_node(config: RunConfig) -> bool:
    """Whether each of several trainer nodes starts its own servers."""
    servers = config.rollout.managed_servers
    return servers is not None and servers.colocated and config.resources.nodes > 1


def attach(
    config: RunConfig, config_path: Path, overrides: Sequence[str], place: RankPlace
) -> list[str]:
    """Starts this node's servers and waits for those of all nodes.

    The first rank of each node owns its servers, because the driver cannot stop servers on other
    nodes.

    Args:
        config: of the run.
        config_path: file of the configuration, for the serve process.
        overrides: of the configuration, for the serve process.
        place: rank and local rank of this process.

    Returns:
        The overrides that attach this rank to the servers.

    Raises:
        ConfigError: this is not a batch script, or a node wrote this error.
        RolloutError: a node wrote another error, or the limit is reached.
    """
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    if attempt is None:
        raise ConfigError(
            f"rollout.servers.colocated=true on resources.nodes={config.resources.nodes} requires "
            f"{ATTEMPT_VARIABLE}, a folder per attempt that all nodes share; start the run by "
            "`submit` or slurm/train.sbatch, which set it"
        )
    folder = Path(attempt) / "servers"
    serving: subprocess.Popen[bytes] | None = None
    if place.local_rank == 0:
        arguments = [str(folder), str(config_path), *overrides]
        serving = _start_serving(folder / f"serve-rank{place.rank}.log", arguments, place.rank)

    def exit_code() -> int | None:
        return None if serving is None else serving.poll()

    servers = config.rollout.managed_servers
    assert servers is not None
    urls = wait_for_urls(folder, config.resources.nodes, servers.start_timeout_s, exit_code)
    ranks = [rank for _, rank in _published(folder)]
    return [
        "rollout.servers=null",
        f"rollout.urls=[{','.join(urls)}]",
        f"rollout.url_ranks=[{','.join(ranks)}]",
        "rollout.shares_gpus=true",
    ]


def _start_serving(log_file: Path, arguments: Sequence[str], rank: int) -> subprocess.Popen[bytes]:
    """Starts `main` in a process that ends with this one, the first rank of its node."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pacs_megatron.launch.serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, FIRST_RANK: str(rank)},
            start_new_session=True,  # it ignores signals to the ranks
            preexec_fn=lambda: die_with_parent(signal.SIGINT),
        )


def main(arguments: Sequence[str]) -> int:
    """Serves until the end and returns the exit code.

    An error is also written to the folder, for `wait_for_urls`.
    """
    logging.basicConfig(level=logging.INFO)
    return run_command(lambda: _run(Path(arguments[0]), Path(arguments[1]), arguments[2:]))


def _run(folder: Path, config: Path, overrides: Sequence[str]) -> int:
    try:
        loaded = load_config(config, overrides)
        ending = Ending(folder, run_folder(loaded))
        ending.install()
        return serve(folder, loaded.config, ending)
    except Exception as error:  # raised again; the trainer reads the file
        code = error.exit_code if isinstance(error, PacsError) else ExitCode.FAILED
        content = {"code": int(code), "message": str(error)}
        write_atomically(folder / f"{_node()}.error", [json_line(content)])
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

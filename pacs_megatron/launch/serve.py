"""SGLang servers of one node:

`python -m pacs_megatron.launch.serve <folder> <config> [key=value ...]`.

srun starts this process on each rollout node. For colocated servers the first rank of each trainer
node starts it (`attach`). It writes the URLs of this node's servers to `<folder>/<node>.urls` when
all are ready, and restarts a server that exits. Servers listen on the node's network address: set
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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pacs_megatron.config import RunConfig, load_config
from pacs_megatron.errors import ConfigError, ExitCode, PacsError, RolloutError
from pacs_megatron.runtime.command_line import run_command
from pacs_megatron.runtime.environment import RankPlace
from pacs_megatron.runtime.files import json_line, write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.processes import die_with_parent
from pacs_megatron.runtime.run_folder import ATTEMPT_VARIABLE, EXIT_CODE_FILE, run_folder
from pacs_megatron.runtime.waiting import report_wait

if TYPE_CHECKING:
    from pacs_megatron.sglang.server import ManagedServer

STOP_FILE = "stop"
"""File in the folder of URLs that marks the end of the trainer."""
POLL_S = 0.5
_log = logging.getLogger(__name__)


def servers_here(config: RunConfig) -> int:
    """Number of servers per rollout node, or per trainer node if colocated.

    Raises ConfigError if the nodes do not divide `rollout.servers.count`.
    """
    rollout = config.rollout.sglang
    resources = config.resources
    if rollout is None or rollout.servers is None:
        raise ConfigError(
            "rollout.servers is not set; rollout nodes require rollout.engine=sglang and "
            "rollout.servers"
        )
    key, nodes = (
        ("nodes", resources.nodes)
        if rollout.servers.colocated
        else ("rollout_nodes", resources.rollout_nodes)
    )
    nodes = max(1, nodes)
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

    Returns the exit code.
    """
    from pacs_megatron.sglang.build import server_specs, start_servers

    node = _node()
    rollout = config.rollout.sglang
    count = servers_here(config)
    assert rollout is not None and rollout.servers is not None
    folder.mkdir(parents=True, exist_ok=True)
    here = rollout.model_copy(
        update={"servers": rollout.servers.model_copy(update={"count": count})}
    )
    host = os.environ.get("PACS_NODE_ADDR") or node
    specs = server_specs(here, config.model, folder / node, config.policy.routing)
    specs = [replace(spec, host=host) for spec in specs]
    servers = start_servers(specs, rollout.servers.start_timeout_s, ending.is_due)
    try:
        write_atomically(
            folder / f"{node}.urls", [f"{server.url}\n".encode() for server in servers]
        )
        return _watch(servers, rollout.servers.max_restarts, ending)
    finally:
        for server in servers:
            server.close()


def _node() -> str:
    # Several slurmd on one host (tests) have different node names and one address.
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _watch(servers: Sequence[ManagedServer], max_restarts: int, ending: Ending) -> int:
    """Restarts servers that exit, until `ending` is due.

    Returns 1 if one cannot be restarted at its URL.

    A restarted server has the weights of the model folder, so the trainer's probes set it to STALE.
    """
    restarts = [0] * len(servers)
    while not ending.is_due():
        for index, server in enumerate(servers):
            code = server.exit_code()
            url = server.url
            if code is None:
                continue
            _log.warning(
                "server %s exited with code %s (restarts: %s); see %s",
                url,
                code,
                restarts[index],
                server.log_path,
            )
            restarts[index] += 1
            if restarts[index] > max_restarts:
                _log.error("rollout.servers.max_restarts=%s is reached", max_restarts)
                return 1
            server.start()
            if server.url != url:
                _log.error(
                    "server %s restarted at %s: the trainer uses the old port, which is in use",
                    url,
                    server.url,
                )
                return 1
        time.sleep(POLL_S)
    return 0


@report_wait("for the SGLang servers of all rollout nodes")
def wait_for_urls(
    folder: Path,
    num_nodes: int,
    timeout_s: float,
    exit_code: Callable[[], int | None] = lambda: None,
) -> list[str]:
    """Waits until all nodes have published their servers, and returns the URLs.

    `exit_code` returns the exit code of this node's serve process, None while it runs. Raises the
    error that a node wrote, or RolloutError after a timeout or if this node's process exits without
    an error file.
    """
    deadline = time.monotonic() + timeout_s
    code = None
    while len(files := sorted(folder.glob("*.urls"))) < num_nodes:
        for path in sorted(folder.glob("*.error")):
            left = read_object(path, error=RolloutError)
            kind = ConfigError if left.get("code") == ConfigError.exit_code else RolloutError
            raise kind(f"node {path.stem}: {left.get('message')}")
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
    return [url for file in files for url in file.read_text(encoding="utf-8").split()]


# ------------------------------------------------------------------------------- colocated servers
# on several nodes
def are_on_every_node(config: RunConfig) -> bool:
    """Whether each of several trainer nodes starts its own servers."""
    own = config.rollout.managed_servers
    return own is not None and own.colocated and config.resources.nodes > 1


def attach(
    config: RunConfig, config_path: Path, overrides: Sequence[str], place: RankPlace
) -> list[str]:
    """Starts this node's servers, waits for those of all nodes, and returns the overrides that
    attach this rank to them.

    The first rank of each node owns its servers, because the driver cannot stop servers on other
    nodes. Raises ConfigError outside of a batch script, the error of a node, or RolloutError after
    a timeout.
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
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"serve-rank{place.rank}.log").open("ab") as log:
            serving = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pacs_megatron.launch.serve",
                    str(folder),
                    str(config_path),
                    *overrides,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # it ignores signals to the ranks
                preexec_fn=lambda: die_with_parent(signal.SIGINT),
            )
    servers = config.rollout.managed_servers
    assert servers is not None
    exit_code = serving.poll if serving is not None else lambda: None
    urls = wait_for_urls(folder, config.resources.nodes, servers.start_timeout_s, exit_code)
    return ["rollout.servers=null", f"rollout.urls=[{','.join(urls)}]", "rollout.shares_gpus=true"]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. An error is also written to the folder, for `wait_for_urls`."""
    logging.basicConfig(level=logging.INFO)
    return run_command(lambda: _run(Path(arguments[0]), Path(arguments[1]), arguments[2:]))


def _run(folder: Path, config: Path, overrides: Sequence[str]) -> int:
    try:
        loaded = load_config(config, overrides)
        ending = Ending(folder, run_folder(loaded))
        ending.install()
        return serve(folder, loaded.config, ending)
    except Exception as error:
        code = int(error.exit_code) if isinstance(error, PacsError) else int(ExitCode.FAILED)
        write_atomically(
            folder / f"{_node()}.error", [json_line({"code": code, "message": str(error)})]
        )
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""SGLang servers on a rollout node: `python -m pacs_megatron.launch.serve <folder> <config> [key=value ...]`.

One process a node, started by srun beside the trainer. It starts this node's share of `rollout.servers`, writes their
addresses to `<folder>/<host>.urls` once all are ready, and ends them on SIGTERM. They listen on this node's own address,
which the other nodes of the job reach: set rollout.api_key_env on a network that others share.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pacs_megatron.config import RunConfig, load_config
from pacs_megatron.config.schema import SglangRollout
from pacs_megatron.errors import ConfigError, PacsError

_log = logging.getLogger(__name__)


def servers_here(config: RunConfig) -> int:
    """Servers that each rollout node starts. Raises ConfigError where they do not divide."""
    rollout, nodes = config.rollout, max(1, config.resources.rollout_nodes)
    if not isinstance(rollout, SglangRollout) or rollout.servers is None:
        raise ConfigError("rollout.servers is not set; rollout nodes need rollout.engine=sglang with rollout.servers")
    if rollout.servers.count % nodes:
        raise ConfigError(
            f"rollout.servers.count={rollout.servers.count} does not divide over resources.rollout_nodes={nodes}; use a "
            f"multiple of {nodes}"
        )
    return rollout.servers.count // nodes


def serve(folder: Path, config: RunConfig, host: str) -> int:
    """Start the servers, publish their addresses, wait for a signal, end them. Returns the exit code."""
    from pacs_megatron.rollout.sglang import server_specs, start_servers

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    count, rollout = servers_here(config), config.rollout
    assert isinstance(rollout, SglangRollout)
    assert rollout.servers is not None
    tp = rollout.servers.tp
    folder.mkdir(parents=True, exist_ok=True)
    specs = []
    for index, spec in enumerate(server_specs(rollout, rollout.servers, config.model, folder / host)[:count]):
        gpus = ",".join(str(index * tp + gpu) for gpu in range(tp)) if rollout.servers.device == "cuda" else None
        specs.append(replace(spec, host=host, visible_devices=gpus))
    servers = start_servers(specs, rollout.servers.start_timeout_s)
    try:
        target = folder / f"{host}.urls"
        beside = target.with_suffix(f".{os.getpid()}")
        beside.write_text("\n".join(server.url for server in servers) + "\n", encoding="utf-8")
        beside.replace(target)
        while not stop.wait(1.0):
            dead = [server for server in servers if server.exit_code() is not None]
            if dead:
                _log.error("%s of %s servers on %s ended; see %s", len(dead), count, host, folder / host)
                return 1
    finally:
        for server in servers:
            server.close()
    return 0


def wait_for_urls(folder: Path, num_nodes: int, timeout_s: float) -> list[str]:
    """Addresses of the servers on all rollout nodes, once every node has published its own.

    Raises ConfigError when one has not after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while len(files := sorted(folder.glob("*.urls"))) < num_nodes:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"SGLang servers of {len(files)} of {num_nodes} rollout nodes are up after {timeout_s:.0f} s "
                f"(rollout.servers.start_timeout_s); see the logs under {folder}"
            )
        time.sleep(0.5)
    return [url for file in files for url in file.read_text(encoding="utf-8").split()]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    if len(arguments) < 2:
        sys.stderr.write("usage: python -m pacs_megatron.launch.serve <folder> <config> [key=value ...]\n")
        return 2
    logging.basicConfig(level=logging.INFO)
    # Under several slurmd on one host (tests) the nodes differ in name but not in address.
    host = os.environ.get("PACS_NODE_ADDR") or socket.gethostname()
    try:
        return serve(Path(arguments[0]), load_config(Path(arguments[1]), arguments[2:]).config, host)
    except PacsError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

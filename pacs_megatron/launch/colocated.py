"""Colocated SGLang servers on several trainer nodes. The first rank of each node starts the servers of its node, and all
ranks read their URLs before training starts.

On one node the driver owns the servers. It cannot stop servers on other nodes, so with several nodes each first rank
owns the servers of its node, and they exit with it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pacs_megatron.config import RunConfig
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.serve import wait_for_urls
from pacs_megatron.runtime.environment import RankPlace
from pacs_megatron.runtime.processes import die_with_parent
from pacs_megatron.runtime.run_folder import ATTEMPT_VARIABLE


def are_on_every_node(config: RunConfig) -> bool:
    """Whether each of several trainer nodes starts its own servers."""
    own = config.rollout.managed_servers
    return own is not None and own.colocated and config.resources.nodes > 1


def attach(config: RunConfig, config_path: Path, overrides: Sequence[str], place: RankPlace) -> list[str]:
    """Starts this node's servers, waits for those of all nodes, and returns the overrides that attach this rank to them.

    Raises ConfigError outside of a batch script, the error of a node, or RolloutError on timeout.
    """
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    if attempt is None:
        raise ConfigError(
            f"rollout.servers.colocated=true on resources.nodes={config.resources.nodes} requires {ATTEMPT_VARIABLE}, a "
            "folder per attempt that all nodes share; start the run by `submit` or slurm/train.sbatch, which set it"
        )
    folder = Path(attempt) / "servers"
    serving: subprocess.Popen[bytes] | None = None
    if place.local_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"serve-rank{place.rank}.log").open("ab") as log:
            serving = subprocess.Popen(
                [sys.executable, "-m", "pacs_megatron.launch.serve", str(folder), str(config_path), *overrides],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # it ignores signals to the ranks
                preexec_fn=lambda: die_with_parent(signal.SIGINT),
            )
    servers = config.rollout.managed_servers
    assert servers is not None
    urls = wait_for_urls(
        folder,
        config.resources.nodes,
        servers.start_timeout_s,
        lambda: None if serving is None else serving.poll(),
    )
    return ["rollout.servers=null", f"rollout.urls=[{','.join(urls)}]", "rollout.shares_gpus=true"]

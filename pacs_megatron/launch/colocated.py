"""Colocated SGLang servers on several trainer nodes: the first rank of each node starts that node's, and all ranks learn
their addresses before training begins.

On one node the driver owns the servers. On several it could not end those of the others, so each node holds its own:
they end with the rank that started them, however it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pacs_megatron.config import RunConfig
from pacs_megatron.config.schema import SglangRollout
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.serve import wait_for_urls
from pacs_megatron.runtime.environment import RankPlace
from pacs_megatron.runtime.processes import die_with_parent


def are_on_every_node(config: RunConfig) -> bool:
    """Whether each of several trainer nodes starts servers of its own."""
    rollout = config.rollout
    own = rollout.servers if isinstance(rollout, SglangRollout) else None
    return own is not None and own.colocated and config.resources.nodes > 1


def attach(config: RunConfig, config_path: Path, overrides: Sequence[str], place: RankPlace) -> list[str]:
    """The overrides that attach this rank to the servers of all nodes, once they are up.

    Raises ConfigError outside an attempt, or with a node's own error; RolloutError when they are not up in time.
    """
    attempt = os.environ.get("PACS_ATTEMPT")
    if attempt is None:
        raise ConfigError(
            f"rollout.servers.colocated=true on resources.nodes={config.resources.nodes} needs PACS_ATTEMPT, a folder that all "
            "nodes share, new for each attempt; start it by `submit` or slurm/train.sbatch, which set it"
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
                start_new_session=True,  # signals to the ranks are not meant for it
                preexec_fn=lambda: die_with_parent(signal.SIGINT),
            )
    assert isinstance(config.rollout, SglangRollout)
    assert config.rollout.servers is not None
    urls = wait_for_urls(
        folder,
        config.resources.nodes,
        config.rollout.servers.start_timeout_s,
        lambda: None if serving is None else serving.poll(),
    )
    return ["rollout.servers=null", f"rollout.urls=[{','.join(urls)}]", "rollout.shares_gpus=true"]

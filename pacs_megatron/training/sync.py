"""Sends new weights of the policy to the rollout engine: the embedded engines of all ranks, or
SGLang servers.
"""

import logging
import os
from typing import Any

import torch

from pacs_megatron.errors import PacsError, SyncError
from pacs_megatron.runtime.environment import own_address
from pacs_megatron.sglang.build import server_apis
from pacs_megatron.sglang.weights.server_sync import ServerSync
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.push import push, stream

logger = logging.getLogger(__name__)


def sync(run: RunContext, step: int) -> None:
    """Sends the weights after `step` to the rollout engine and compares digests.

    Collective; raises SyncError on all ranks.
    """
    if not run.config.rollout.is_sampled:
        return
    with run.timer.span("sync"):
        try:
            digest = _push(run)
        except SyncError as error:
            if run.engine is not None:
                raise
            # For the retry, dead servers are restarted and broken process groups created again.
            logger.warning("weight update failed, retrying once: %s", error)
            digest = _push(run)
        first_digest = run.channel.broadcast_json(digest)

        def check_equal() -> None:
            if digest != first_digest:
                # Not a SyncError, after which the loop saves a checkpoint: these weights must not
                # be saved.
                raise PacsError(
                    f"rank 0 exported weights with digest {first_digest}, rank {run.rank.rank} "
                    f"exported {digest}: the replicas have drifted apart; resume from the last "
                    "checkpoint"
                )

        def set_current() -> None:
            if run.driver is not None:
                run.driver.call(
                    {
                        "op": "set_current",
                        "version": run.policy.version,
                        "digest": digest,
                        "trained": step,
                    }
                )

        run.channel.run_together(check_equal)
        run.channel.run_together(set_current)  # the driver now accepts samples of these weights


def release_memory(run: RunContext) -> None:
    """Frees the GPU memory of colocated servers until the next `sync` and loads off-loaded state.

    Collective.
    """
    if not run.config.rollout.on_trainer_gpus:
        return
    receivers = _receivers(run, is_release=True)
    error = None
    try:
        for receiver in receivers:
            receiver.release_memory()
    except SyncError as caught:
        error = caught
    _require_a_server(run, bool(receivers), error)
    for model in run.models:
        model.offload.to_device()


def _push(run: RunContext) -> str:
    """Exports to all receivers; returns the digest.

    Collective. Raises on every rank if no receiver has the weights.
    """
    engine = run.engine
    if engine is not None:
        return run.channel.run_together(
            lambda: push(run.policy.version, run.policy.export_weights(), [engine])
        )

    for model in run.models:
        model.offload.to_host()
    _empty_caches(run)
    receivers = _receivers(run)
    digest, error = run.channel.run_together(
        lambda: stream(
            run.policy.version, run.policy.export_weights(), receivers, lambda: _empty_caches(run)
        )
    )
    _require_a_server(run, bool(receivers), error)
    return digest


def _receivers(run: RunContext, *, is_release: bool = False) -> list[ServerSync]:
    """The weight sync of this rank with its servers as targets; empty on ranks without servers.

    Collective.

    `sync.transport: disk`: rank 0 updates all servers. `ipc`: each rank updates the servers on its
    GPU. `broadcast`: the ranks update a share of the servers each, those of all hosts in a Slurm
    job, and those of rank 0's host otherwise.
    """
    rollout = run.config.rollout.sglang
    assert rollout is not None

    def begin_update() -> list[list[Any]]:
        assert run.driver is not None
        header, _ = run.driver.call({"op": "begin_update", "is_release": is_release})
        servers: list[list[Any]] = header["servers"]
        if rollout.sync.transport != "broadcast":
            return servers
        num_senders = run.rank.layout.world_size
        if own_address(os.environ) is None:
            # Servers reach `rollout.sync.host`, which is this host.
            num_senders = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return [[url, number % num_senders] for url, number in servers]

    servers = run.channel.broadcast_json(run.channel.run_together(begin_update, only=0))
    urls = tuple(url for url, trainer_rank in servers if trainer_rank == run.rank.rank)
    if not urls:
        return []
    assert run.server_sync is not None
    run.server_sync.set_targets(server_apis(rollout, urls))
    return [run.server_sync]


def _require_a_server(run: RunContext, has_servers: bool, error: SyncError | None) -> None:
    """Raises the first rank's error on all ranks, unless a server of any rank was updated.

    Collective.
    """

    def raise_error() -> None:
        if error is not None:
            raise error

    if not run.channel.any_rank(has_servers and error is None):
        run.channel.run_together(raise_error)


def _empty_caches(run: RunContext) -> None:
    """Returns every rank's unused memory to the GPU before colocated servers allocate theirs.

    Collective.
    """
    if run.config.rollout.on_trainer_gpus and run.rank.device.type == "cuda":
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # blocks whose readers are done
        torch.cuda.empty_cache()
        # A barrier: a server with tp > 1 uses the GPUs of several ranks.
        run.channel.any_rank(False)

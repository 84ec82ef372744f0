"""New weights from the policy to the rollout engine: the embedded engines of all ranks, or SGLang servers."""

import logging

from pacs_megatron.contracts import WeightReceiver
from pacs_megatron.errors import PacsError, SyncError
from pacs_megatron.sglang.build import server_apis
from pacs_megatron.training.context import RunContext
from pacs_megatron.training.push import push

logger = logging.getLogger(__name__)


def sync(run: RunContext, step: int) -> None:
    """Sends the weights after `step` to the rollout engine and compares versions and digests.

    Collective; raises SyncError on every rank. Only rank 0 talks to servers; the export needs all ranks.
    """
    if not run.config.rollout.is_sampled:
        return
    with run.timer.span("sync"):
        try:
            digest = _push(run)
        except SyncError as error:
            if run.engine is not None:
                raise
            # By now a dead server is restarted and a broken process group is created again.
            logger.warning("weight update failed, retrying once: %s", error)
            digest = _push(run)
        first = run.channel.broadcast_json(digest)
        run.channel.run_together(lambda: _check_equal(first, digest, run.rank.rank))
        run.digest = digest
        run.channel.run_together(lambda: _set_current(run, step))


def _check_equal(first: str, digest: str, rank: int) -> None:
    if digest != first:
        # Not a SyncError, on which the loop saves a checkpoint: these weights are not worth keeping.
        raise PacsError(
            f"rank 0 exported weights with digest {first}, rank {rank} exported {digest}: the replicas have drifted apart; "
            "resume from the last checkpoint"
        )


def _push(run: RunContext) -> str:
    """The digest of an export that reached at least one receiver. Collective; raises on every rank."""
    receivers: list[WeightReceiver] = [run.engine] if run.engine is not None else []
    if run.config.rollout.sglang is not None:
        run.channel.run_together(lambda: _name_targets(run))
        receivers = [run.server_sync] if run.server_sync is not None else []
    return run.channel.run_together(lambda: push(run.policy.version, run.policy.export_weights(), receivers).digest)


def release_memory(run: RunContext) -> None:
    """Colocated servers free their GPU memory for the training step, until the next `sync`."""
    if run.config.rollout.on_trainer_gpus:
        run.channel.run_together(lambda: _release(run))


def _release(run: RunContext) -> None:
    if run.server_sync is not None:
        _name_targets(run)
        run.server_sync.release_memory()


def _set_current(run: RunContext, step: int) -> None:
    """Rank 0: the driver accepts samples of these weights from now on."""
    if run.driver is not None:
        run.driver.ask({"op": "set_current", "version": run.policy.version, "digest": run.digest, "trained": step})


def _name_targets(run: RunContext) -> None:
    """Rank 0: the servers of this update; the driver sends them no request until it ends."""
    if run.driver is None:
        return
    rollout = run.config.rollout.sglang
    assert run.server_sync is not None and rollout is not None
    header, _ = run.driver.ask({"op": "begin_update"})
    urls = tuple(header["urls"])
    run.server_sync.set_targets(server_apis(rollout, urls))

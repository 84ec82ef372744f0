"""New weights from the policy to whatever samples: the embedded engines of all ranks, or SGLang servers."""

import logging
from collections.abc import Callable
from typing import TypeVar, cast

from pacs_megatron.config.schema import SglangRollout
from pacs_megatron.contracts import WeightReceiver
from pacs_megatron.errors import PacsError, SyncError
from pacs_megatron.parallel.transfer import broadcast_arrays
from pacs_megatron.rollout.driver_client import named_error
from pacs_megatron.sglang.build import server_apis
from pacs_megatron.training.context import RunContext, array_of
from pacs_megatron.training.push import push

logger = logging.getLogger(__name__)
T = TypeVar("T")


def sync(run: RunContext, step: int) -> None:
    """The rollout engine holds the weights after `step`: versions and digests are equal. Collective; raises SyncError
    on every rank.

    Rank 0 alone talks to servers; the others take part in the export, which is collective.
    """
    if run.engine is None and not isinstance(run.config.rollout, SglangRollout):
        return
    with run.timer.span("sync"):
        try:
            digest = _push(run)
        except SyncError as error:
            if run.engine is not None:
                raise
            # A server that died in the middle is started anew, a broken process group is made anew.
            logger.warning("trying once more: %s", error)
            digest = _push(run)
        theirs = broadcast_arrays(array_of(digest), src=0, group=run.rank.control)["text"].tobytes().decode()
        drifted = run.channel.first_error(None if digest == theirs else f"rank {run.rank.rank} exported {digest}")
        if drifted is not None:
            # No SyncError, on which the loop would save: these weights are not worth keeping.
            raise PacsError(
                f"rank 0 exported weights with digest {theirs}, {drifted}: the replicas have drifted apart; resume from "
                "the last checkpoint"
            )
        run.digest = digest
        _together(run, lambda: _set_current(run, step))


def _push(run: RunContext) -> str:
    """The digest of what was exported and reached at least one receiver. Collective; raises on every rank."""
    receivers: list[WeightReceiver] = [run.engine] if run.engine is not None else []
    if isinstance(run.config.rollout, SglangRollout):
        _together(run, lambda: _name_targets(run))
        receivers = [run.server_sync] if run.server_sync is not None else []
    return _together(run, lambda: push(run.policy.version, run.policy.export_weights(), receivers).digest)


def release_memory(run: RunContext) -> None:
    """Colocated servers give their GPU memory to the training step; the next `sync` brings them back."""
    rollout = run.config.rollout
    if not isinstance(rollout, SglangRollout):
        return
    if rollout.shares_gpus or (rollout.servers is not None and rollout.servers.colocated):
        _together(run, lambda: _release(run))


def _release(run: RunContext) -> None:
    if run.server_sync is not None:
        _name_targets(run)
        run.server_sync.release_memory()


def _together(run: RunContext, action: Callable[[], T]) -> T:
    """`action` of every rank; an error of one is raised on all, so that none waits in a collective for it."""
    result, error = None, None
    try:
        result = action()
    except PacsError as caught:
        error = caught
    message = run.channel.first_error(None if error is None else f"{type(error).__name__}|{error}")
    if message is not None:
        raise error if error is not None else named_error(*message.split("|", 1))
    return cast("T", result)


def _set_current(run: RunContext, step: int) -> None:
    """Rank 0: the driver accepts samples of these weights from now on."""
    if run.driver is not None:
        run.driver.ask({"op": "set_current", "version": run.policy.version, "digest": run.digest, "trained": step})


def _name_targets(run: RunContext) -> None:
    """Rank 0: the servers that take this update; no request is sent to them until it is over."""
    if run.driver is None:
        return
    assert run.server_sync is not None and isinstance(run.config.rollout, SglangRollout)
    header, _ = run.driver.ask({"op": "begin_update"})
    urls = tuple(header["urls"])
    run.server_sync.set_targets(server_apis(run.config.rollout, urls))

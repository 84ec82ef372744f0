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
from pacs_megatron.training.push import push
from pacs_megatron.training.world import World, array_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


def sync(w: World, step: int) -> None:
    """The rollout engine holds the weights after `step`: versions and digests are equal. Collective; raises SyncError
    on every rank.

    Rank 0 alone talks to servers; the others take part in the export, which is collective.
    """
    if w.engine is None and not isinstance(w.config.rollout, SglangRollout):
        return
    with w.timer.span("sync"):
        try:
            digest = _push(w)
        except SyncError as error:
            if w.engine is not None:
                raise
            # A server that died in the middle is started anew, a broken process group is made anew.
            logger.warning("trying once more: %s", error)
            digest = _push(w)
        theirs = broadcast_arrays(array_of(digest), src=0, group=w.rank.control)["text"].tobytes().decode()
        drifted = w.channel.first_error(None if digest == theirs else f"rank {w.rank.rank} exported {digest}")
        if drifted is not None:
            # No SyncError, on which the loop would save: these weights are not worth keeping.
            raise PacsError(
                f"rank 0 exported weights with digest {theirs}, {drifted}: the replicas have drifted apart; resume from "
                "the last checkpoint"
            )
        w.digest = digest
        _together(w, lambda: _set_current(w, step))


def _push(w: World) -> str:
    """The digest of what was exported and reached at least one receiver. Collective; raises on every rank."""
    receivers: list[WeightReceiver] = [w.engine] if w.engine is not None else []
    if isinstance(w.config.rollout, SglangRollout):
        _together(w, lambda: _name_targets(w))
        receivers = [w.server_sync] if w.server_sync is not None else []
    return _together(w, lambda: push(w.policy.version, w.policy.export_weights(), receivers).digest)


def release_memory(w: World) -> None:
    """Colocated servers give their GPU memory to the training step; the next `sync` brings them back."""
    rollout = w.config.rollout
    if not isinstance(rollout, SglangRollout):
        return
    if rollout.shares_gpus or (rollout.servers is not None and rollout.servers.colocated):
        _together(w, lambda: _release(w))


def _release(w: World) -> None:
    if w.server_sync is not None:
        _name_targets(w)
        w.server_sync.release_memory()


def _together(w: World, action: Callable[[], T]) -> T:
    """`action` of every rank; an error of one is raised on all, so that none waits in a collective for it."""
    result, error = None, None
    try:
        result = action()
    except PacsError as caught:
        error = caught
    message = w.channel.first_error(None if error is None else f"{type(error).__name__}|{error}")
    if message is not None:
        raise error if error is not None else named_error(*message.split("|", 1))
    return cast("T", result)


def _set_current(w: World, step: int) -> None:
    """Rank 0: the driver accepts samples of these weights from now on."""
    if w.driver is not None:
        w.driver.ask({"op": "set_current", "version": w.policy.version, "digest": w.digest, "trained": step})


def _name_targets(w: World) -> None:
    """Rank 0: the servers that take this update; no request is sent to them until it is over."""
    if w.driver is None:
        return
    assert w.server_sync is not None and isinstance(w.config.rollout, SglangRollout)
    header, _ = w.driver.ask({"op": "begin_update"})
    urls = tuple(header["urls"])
    w.server_sync.set_targets(server_apis(w.config.rollout, urls))

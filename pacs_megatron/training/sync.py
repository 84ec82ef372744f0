"""New weights from the policy to whatever samples: the embedded engines of all ranks, or SGLang servers."""

from pacs_megatron.config.schema import SglangRollout
from pacs_megatron.contracts import WeightReceiver
from pacs_megatron.errors import SyncError
from pacs_megatron.parallel.transfer import broadcast_arrays
from pacs_megatron.rollout.sglang import server_apis
from pacs_megatron.training.world import World, array_of
from pacs_megatron.weight_sync.push import push


def sync(w: World) -> None:
    """Versions and digests are equal afterwards. Collective; raises SyncError on every rank.

    Rank 0 alone talks to servers; the others take part in the export, which is collective.
    """
    if w.engine is None and not isinstance(w.config.rollout, SglangRollout):
        return
    with w.timer.span("sync"):
        receivers: list[WeightReceiver] = [w.engine] if w.engine is not None else []
        if w.server_sync is not None:
            _name_targets(w)
            receivers = [w.server_sync]
        digest, error = "", None
        try:
            digest = push(w.policy.version, w.policy.export_weights(), receivers).digest
        except SyncError as caught:
            error = caught
        message = w.channel.first_error(None if error is None else str(error))
        if message is not None:
            raise error if error is not None else SyncError(message)
        theirs = broadcast_arrays(array_of(digest), src=0, group=w.rank.control)["text"].tobytes().decode()
        if digest != theirs:
            raise SyncError(
                f"rank {w.rank.rank} exported weights with digest {digest}, rank 0 with {theirs}: the replicas have "
                "drifted apart; resume from the last checkpoint"
            )
        w.digest = digest
        if w.driver is not None:
            w.driver.ask({"op": "set_current", "version": w.policy.version, "digest": digest})


def release_memory(w: World) -> None:
    """Colocated servers give their GPU memory to the training step; the next `sync` brings them back."""
    rollout = w.config.rollout
    if w.server_sync is None or not isinstance(rollout, SglangRollout) or rollout.servers is None:
        return
    if rollout.servers.colocated:
        _name_targets(w)
        w.server_sync.release_memory()


def _name_targets(w: World) -> None:
    """Rank 0: the servers that take this update; no request is sent to them until it is over."""
    assert w.driver is not None and w.server_sync is not None and isinstance(w.config.rollout, SglangRollout)
    urls = tuple(w.driver.ask({"op": "begin_update"})["urls"])
    w.server_sync.set_targets(server_apis(w.config.rollout, urls))

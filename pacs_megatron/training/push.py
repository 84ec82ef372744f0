"""Streams the policy's weights to receivers: embedded engine or servers."""

from collections.abc import Callable, Iterable, Sequence

import torch

from pacs_megatron.contracts import WeightReceiver
from pacs_megatron.contracts.digest import WeightDigest
from pacs_megatron.errors import SyncError


def stream(
    version: int,
    export: Iterable[tuple[str, torch.Tensor]],
    receivers: Sequence[WeightReceiver],
    on_exported: Callable[[], None] = lambda: None,
) -> tuple[str, SyncError | None]:
    """Streams an export into every receiver; returns its digest, and the error of the first
    receiver that failed.

    The export is collective, so every rank iterates it to the end, also without a receiver or after
    a receiver failed. `on_exported` is called before the receivers' `end_update`.
    """
    live = list(receivers)
    errors: list[SyncError] = []

    def each(action: str, *args: object) -> None:
        for receiver in tuple(live):
            try:
                getattr(receiver, action)(*args)
            except SyncError as error:
                errors.append(error)
                live.remove(receiver)

    each("begin_update", version)
    digest = WeightDigest()
    for name, tensor in export:
        digest.update(name, tensor)
        each("put", name, tensor)
    on_exported()
    each("end_update", digest.hexdigest())
    return digest.hexdigest(), errors[0] if errors else None


def push(
    version: int, export: Iterable[tuple[str, torch.Tensor]], receivers: Sequence[WeightReceiver]
) -> str:
    """`stream` for receivers that must all succeed.

    Raises the first SyncError of a receiver, on this rank only.
    """
    digest, error = stream(version, export, receivers)
    if error is not None:
        raise error
    return digest

"""Streams the policy's weights to receivers: the embedded engine or servers."""

from collections.abc import Callable, Iterable, Sequence

import torch

from pacs_megatron.contracts import WeightReceiver
from pacs_megatron.contracts.digest import WeightDigest
from pacs_megatron.errors import SyncError


def push(
    version: int, export: Iterable[tuple[str, torch.Tensor]], receivers: Sequence[WeightReceiver]
) -> str:
    """`stream` for receivers that must all succeed; returns the digest.

    Raises the first SyncError of a receiver, on this rank only.
    """
    digest, error = stream(version, export, receivers)
    if error is not None:
        raise error
    return digest


def stream(
    version: int,
    export: Iterable[tuple[str, torch.Tensor]],
    receivers: Sequence[WeightReceiver],
    on_exported: Callable[[], None] = lambda: None,
) -> tuple[str, SyncError | None]:
    """Streams an export into every receiver.

    The export is collective, so every rank iterates it to the end, also without a receiver or after
    a receiver failed.

    Args:
        version: of the weights.
        export: Hugging Face name and tensor, in the same order on every rank.
        receivers: those of this rank. One that fails gets no further tensor.
        on_exported: called before the receivers' `end_update`.

    Returns:
        The digest of the export, and the error of the first receiver that failed, or None.
    """
    live = list(receivers)
    errors: list[SyncError] = []

    def call_live(action: str, *args: object) -> None:
        for receiver in tuple(live):
            try:
                getattr(receiver, action)(*args)
            except SyncError as error:
                errors.append(error)
                live.remove(receiver)

    call_live("begin_update", version)
    digest = WeightDigest()
    for name, tensor in export:
        digest.update(name, tensor)
        call_live("put", name, tensor)
    on_exported()
    call_live("end_update", digest.hexdigest())

    first_error = errors[0] if errors else None
    return digest.hexdigest(), first_error

"""Streams the policy's weights to receivers: embedded engine or servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pacs_megatron.contracts.digest import WeightDigest
from pacs_megatron.contracts.protocols import WeightReceiver
from pacs_megatron.errors import SyncError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """One finished push."""

    version: int
    digest: str
    num_bytes: int
    """of the export, as exported"""
    seconds: float
    error: SyncError | None = None
    """of the first receiver that failed"""


def stream(
    version: int,
    export: Iterable[tuple[str, torch.Tensor]],
    receivers: Sequence[WeightReceiver],
    on_exported: Callable[[], None] = lambda: None,
) -> PushResult:
    """Streams an export into every receiver. All ranks call it; those without a receiver only take part in the export.

    The export is collective, so it is always iterated to its end: a receiver that fails must not block the other ranks.
    `on_exported` is called between the last weight and the receivers' `end_update`.
    """
    began = time.monotonic()
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
    digest, num_bytes = WeightDigest(), 0
    for name, tensor in export:
        digest.update(name, tensor)
        num_bytes += tensor.nbytes
        each("put", name, tensor)
    on_exported()
    each("end_update", digest.hexdigest())
    return PushResult(
        version=version,
        digest=digest.hexdigest(),
        num_bytes=num_bytes,
        seconds=time.monotonic() - began,
        error=errors[0] if errors else None,
    )


def push(version: int, export: Iterable[tuple[str, torch.Tensor]], receivers: Sequence[WeightReceiver]) -> PushResult:
    """`stream` for receivers that must all succeed. Raises the first one's SyncError, on this rank only."""
    pushed = stream(version, export, receivers)
    if pushed.error is not None:
        raise pushed.error
    return pushed

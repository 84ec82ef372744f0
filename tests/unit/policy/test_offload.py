"""Off-loading of a model whose optimizer has no state on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pacs_megatron.errors import PacsError
from pacs_megatron.policy import offload as page
from pacs_megatron.policy.offload import Offload


def offload_of(chunk: torch.nn.Module, kind: str) -> Offload:
    """Of an optimizer that keeps all of its state on another device."""
    optimizer = SimpleNamespace(
        tensors=lambda: iter(()), megatron=SimpleNamespace(zero_grad=lambda: None)
    )
    return Offload(
        cast("Any", kind), cast("Any", [chunk]), cast("Any", optimizer), torch.device("cpu")
    )


def test_gradients_come_back_where_nothing_else_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call is the retry of a weight sync."""
    monkeypatch.setattr(page, "complete", lambda _chunks: None)
    chunk = torch.nn.Linear(3, 2)
    for parameter in chunk.parameters():
        parameter.main_grad = torch.ones_like(parameter)  # type: ignore[attr-defined]
    before = [parameter.main_grad.untyped_storage().nbytes() for parameter in chunk.parameters()]
    assert min(before) > 0

    offload = offload_of(chunk, "optimizer")
    for _ in range(2):
        offload.to_host()
        offload.to_host()
        sizes = [p.main_grad.untyped_storage().nbytes() for p in chunk.parameters()]
        assert sizes == [0, 0]
        offload.to_device()
        after = [p.main_grad.untyped_storage().nbytes() for p in chunk.parameters()]
        assert after == before


def test_memory_that_could_not_be_pinned_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "complete", lambda _chunks: None)
    offload = offload_of(torch.nn.Linear(3, 2), "all")
    offload._device = cast("Any", SimpleNamespace(type="cuda"))
    attempts = []

    def fail(_memory: torch.Tensor, name: str) -> None:
        attempts.append(name)
        raise PacsError(name)

    monkeypatch.setattr(page, "pin", fail)
    for _ in range(2):
        with pytest.raises(PacsError):
            offload.to_host()
    assert attempts == ["policy.offload=all"] * 2
    assert offload.host.numel() == 0

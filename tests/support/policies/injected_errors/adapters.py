"""Errors in adapters: sums of gradients, the factor, the reference, the export, fused layers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.policies.injected_errors.injection import InjectedError

LORA = "pacs_megatron.policy.lora"
SPLIT: dict[str, Any] = {
    "policy": {"lora": {"rank": 8, "alpha": 20.0}},
    "parallel": {"tp": 2, "sequence_parallel": True},
    "objective": {"name": "pacs", "reference": "frozen"},
}


def _not_summed(original: Any, self: Any, matrix: Any, parameter: Any) -> None:
    original(self, matrix, parameter)
    parameter.sequence_parallel = False


def _without_rank(original: Any, self: Any, *args: Any, **options: Any) -> None:
    original(self, *args, **options)
    self._scale *= self._rank


def _dropout_without_gradient(original: Any, self: Any, x: Any) -> Any:
    return original(self, x if torch.is_grad_enabled() else F.dropout(x, 0.1))


def _stays_on(_original: Any, _self: Any) -> Any:
    return contextlib.nullcontext()


def _is_lost(_original: Any, _self: Any, weight: Any, _readable: Any) -> Any:
    return weight


def _other_slices(original: Any, entry: Any, ups: Any, sizes: Any) -> Any:
    return original(entry, dict(reversed(ups.items())), sizes)


ADAPTER_ERRORS: dict[str, InjectedError] = {
    "the gradient of a replicated matrix is not summed": InjectedError(
        target=f"{LORA}.Adapter._mark", change=_not_summed, changes=SPLIT
    ),
    "alpha without the rank": InjectedError(
        target=f"{LORA}.Adapter.__init__", change=_without_rank, changes=SPLIT
    ),
    "dropout in passes without a gradient": InjectedError(
        target=f"{LORA}.Adapter.forward", change=_dropout_without_gradient, changes=SPLIT
    ),
    "the reference has the adapters on": InjectedError(
        target=f"{LORA}.BaseModel.swapped_in", change=_stays_on, changes=SPLIT
    ),
    "the adapters are lost in the export": InjectedError(
        target=f"{LORA}.Adapter.merged", change=_is_lost, changes=SPLIT
    ),
    "the matrices of a fused layer are exchanged": InjectedError(
        target=f"{LORA}.fused_up", change=_other_slices, changes=SPLIT
    ),
}

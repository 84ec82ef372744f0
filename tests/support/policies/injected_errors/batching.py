"""Errors in the plan of a step: mini-batches, micro-batches, packed samples, masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.support.policies.injected_errors.injection import POLICY, TRAINING, InjectedError

CONTEXT_PARALLEL = {"parallel": {"tp": 1, "cp": 2}}


def _without_last_sample(original: Any, *args: Any) -> Any:
    parts = original(*args)
    return [*parts[:-1], parts[-1][:-1]]


def _reversed(original: Any, *args: Any) -> Any:
    return original(*args)[::-1]


def _without_a_sample_of_small_parts(original: Any, facts: Any, count: Any) -> Any:
    parts = []
    for rows in original(facts, count):
        is_small_and_odd = len(rows) >= 5 and len(rows) % 2 == 1
        parts.append(rows[:-1] if is_small_and_odd else rows)
    return parts


def _first_twice(original: Any, *args: Any, **options: Any) -> Any:
    plan = original(*args, **options)
    first, *others = plan.by_dp_rank
    return replace(plan, by_dp_rank=((*first, first[0]), *others))


def _late_labels(original: Any, *args: Any, **options: Any) -> Any:
    batch = original(*args, **options)
    return replace(batch, labels=torch.roll(batch.labels, 1, -1))


def _one_sequence(original: Any, *args: Any, **options: Any) -> Any:
    batch = original(*args, **options)
    bounds = batch.packed.cu_seqlens_q[[0, -1]]
    _set_bounds(batch, bounds, int(bounds[-1]))
    return batch


def _bounds_one_late(original: Any, *args: Any, **options: Any) -> Any:
    batch = original(*args, **options)
    bounds = batch.packed.cu_seqlens_q.clone()
    bounds[1:-1] += 1
    _set_bounds(batch, bounds, int(bounds.diff().max()))
    return batch


def _set_bounds(batch: Any, bounds: Any, longest: int) -> None:
    batch.packed.cu_seqlens_q = bounds
    batch.packed.cu_seqlens_kv = bounds
    batch.packed.max_seqlen_q = longest
    batch.packed.max_seqlen_kv = longest


def _without_last_tokens(original: Any, batch: Any, *args: Any, **options: Any) -> Any:
    """The last token of each response is masked."""
    record = original(batch, *args, **options)
    mask = record.mask.clone()
    if batch.local is None and len(mask) == int(batch.response_lens.sum()):
        mask[np.cumsum(batch.response_lens) - 1] = 0.0
    return replace(record, mask=mask)


def _without_single_tokens(original: Any, batch: Any, *args: Any, **options: Any) -> Any:
    """The token of a response of one token is masked."""
    record = original(batch, *args, **options)
    has_others = record.response_lens[record.sample_of_token] > 1
    return replace(record, mask=record.mask * has_others)


def _without_last_microbatch(
    original: Any, self: Any, batch: Any, logprobs: Any, entropy: Any
) -> Any:
    """The micro-batch with the last sample of the mini-batch has no loss."""
    loss, report = original(self, batch, logprobs, entropy)
    has_last = len(batch.all_response_lens) - 1 in batch.rows.tolist()
    return 0.0 * loss if has_last else loss, report


def _own_part(_original: Any, self: Any, values: Any) -> Any:
    """The tokens of one context-parallel rank; those of the others are 0."""
    if self.local is None:
        return values
    full = torch.zeros(len(self.sample_of_token), dtype=values.dtype)
    full[self.local] = values
    return full


def _reversed_coefficients(original: Any, *args: Any) -> Any:
    prepared = original(*args)
    per_sample = {name: values.flip(0) for name, values in prepared.per_sample.items()}
    return replace(prepared, per_sample=per_sample)


def _doubled_coefficients(original: Any, *args: Any) -> Any:
    """N of one of two data-parallel ranks."""
    prepared = original(*args)
    per_sample = {name: 2 * values for name, values in prepared.per_sample.items()}
    return replace(prepared, per_sample=per_sample)


def _all_together(original: Any, minibatch: Any, objective: Any) -> Any:
    minibatch = original(minibatch, objective)
    together = np.ones_like(minibatch.plan.together)
    return replace(minibatch, plan=replace(minibatch.plan, together=together))


BATCHING_ERRORS: dict[str, InjectedError] = {
    "the last sample of a step is lost": InjectedError(
        target=f"{TRAINING}.distribute.split_by_group", change=_without_last_sample
    ),
    "samples of the smallest group are left out of N": InjectedError(
        target=f"{TRAINING}.distribute.split_by_group", change=_without_a_sample_of_small_parts
    ),
    "mini-batches in the other order": InjectedError(
        target=f"{TRAINING}.distribute.split_by_group", change=_reversed
    ),
    "a micro-batch is trained twice": InjectedError(
        target="pacs_megatron.batching.split.plan_microbatches", change=_first_twice
    ),
    "a micro-batch has no loss": InjectedError(
        target=f"{POLICY}.microbatch.UpdateLoss.__call__", change=_without_last_microbatch
    ),
    "divided groups count as whole": InjectedError(
        target=f"{POLICY}.engine._with_coupled_rows",
        change=_all_together,
        changes={"batch": {"updates_per_step": 3, "tokens_per_microbatch": 160, "groups": "apart"}},
    ),
    "labels one token late": InjectedError(
        target=f"{POLICY}.microbatch.build_microbatch", change=_late_labels
    ),
    "samples of a pack attend to each other": InjectedError(
        target=f"{POLICY}.microbatch.build_microbatch", change=_one_sequence
    ),
    "the first token of a packed sample belongs to the one before": InjectedError(
        target=f"{POLICY}.microbatch.build_microbatch", change=_bounds_one_late
    ),
    "the last token of a response has no loss": InjectedError(
        target=f"{POLICY}.microbatch.build_record", change=_without_last_tokens
    ),
    "responses of one token have no loss": InjectedError(
        target=f"{POLICY}.microbatch.build_record", change=_without_single_tokens
    ),
    "scores of one context-parallel rank": InjectedError(
        target=f"{POLICY}.microbatch.MicroBatch.gather",
        change=_own_part,
        changes=CONTEXT_PARALLEL,
    ),
    "coefficients of a micro-batch in the other order": InjectedError(
        target=f"{POLICY}.microbatch.UpdateLoss._coupled", change=_reversed_coefficients
    ),
    "N of one data-parallel rank": InjectedError(
        target=f"{POLICY}.microbatch.UpdateLoss._coupled", change=_doubled_coefficients
    ),
}

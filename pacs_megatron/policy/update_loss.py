"""Contribution of one micro-batch to an update: the objective's loss, sums to report, and the samples' statistics."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.contracts import Prepared, SampleTable, TokenRecord
from pacs_megatron.contracts.protocols import Statistic
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.policy.head import LossGradient
from pacs_megatron.policy.microbatch import MicroBatch, build_record

MAX_LOG_RATIO = 60.0
"""Nats; exponents are clamped here, so sums are finite in fp32 and the circuit breaker can compare them."""


@dataclass(slots=True, kw_only=True)
class SampleStatistics:
    """Statistics of the samples of a pass, on the device until `by_row` reads them."""

    names: Collection[Statistic]
    found: list[tuple[np.ndarray, dict[Statistic, Tensor]]] = field(default_factory=list)

    def add(self, batch: MicroBatch, record: TokenRecord, objective: Objective) -> dict[Statistic, Tensor]:
        """float64 [samples] of one micro-batch. Collective over context-parallel ranks."""
        values: dict[Statistic, Tensor] = {}
        if "score" in self.names:
            values["score"] = batch.sums(objective.token_scores(record) * record.mask)
        if "sampler_ratio" in self.names:
            assert record.step_start_logprobs is not None and record.sampler_logprobs is not None
            log_ratio = record.step_start_logprobs.double() - record.sampler_logprobs.double()
            values["sampler_ratio"] = batch.means(log_ratio * record.mask)
        self.found.append((batch.rows, values))
        return values

    def by_row(self, name: Statistic) -> dict[int, float]:
        """Row -> value, of this rank's samples. Synchronises with the device."""
        return {
            int(row): value
            for rows, values in self.found
            for row, value in zip(rows, values[name].tolist(), strict=True)
        }


def coupled(
    objective: Objective,
    table: SampleTable,
    statistics: Mapping[Statistic, Tensor],
    known: Mapping[str, Tensor],
    num_samples: int,
) -> dict[str, Tensor]:
    """Coefficients of the table's rows, scattered to [n], from their statistics and from `Objective.known` [n]."""
    of_rows = {name: values[table.rows] for name, values in known.items()}
    found = objective.couple(table, statistics.get("score"), statistics.get("sampler_ratio"), of_rows)
    return {name: values.new_zeros(num_samples).index_copy(0, table.rows, values) for name, values in found.items()}


@dataclass(slots=True, kw_only=True)
class UpdateLoss:
    """The loss function of one update's forward_backward. It neither raises for a value nor waits for the device."""

    prepared: Prepared  # coefficients that are known before the pass, on the device
    objective: Objective
    statistics: SampleStatistics
    is_step_start: bool
    mismatch_threshold: float  # nats; counts tokens whose log-prob differs by more from the sampler's
    known: Mapping[str, Tensor] = field(default_factory=dict)  # float64 [n], `Objective.known` on the device

    def __call__(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss to back-propagate, sums over this rank's tokens to report)"""
        record = build_record(batch, logprobs, entropy, is_step_start=self.is_step_start)
        prepared = self.prepared
        if self.statistics.names:
            with torch.no_grad():
                found = self.statistics.add(batch, replace(record, logprobs=logprobs.detach()), self.objective)
                if batch.table is not None:
                    prepared = self._coupled(batch, batch.table, found)
        loss = (self.objective.token_loss(record, prepared) * record.mask).sum()
        with torch.no_grad():
            assert record.sampler_logprobs is not None
            report = {
                "sum/loss": loss.detach().clone(),
                "sum/entropy": (entropy * record.mask).sum(),
                "sum/logprob": (logprobs * record.mask).sum(),
                "sum/tokens": record.mask.sum(),
            }
            report |= self._mismatch((logprobs - record.sampler_logprobs) * record.mask)
            for name, value in self.objective.token_metrics(record, prepared).items():
                report[name] = (value * record.mask).sum()
        return loss, report

    def gradient(self, batch: MicroBatch) -> LossGradient | None:
        """The loss's derivatives by log-probs and entropies; None where this forward's log-probs of other tokens couple it."""
        if batch.table is not None:
            return None

        def by_tokens(tokens: slice, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                leaf = logprobs.detach().requires_grad_(True)
                own = None if entropies is None else entropies.detach().requires_grad_(True)
                record = build_record(batch, leaf, own, is_step_start=self.is_step_start, tokens=tokens)
                loss = (self.objective.token_loss(record, self.prepared) * record.mask).sum()
                found = torch.autograd.grad(loss, [leaf] if own is None else [leaf, own], allow_unused=True)
                return found[0], None if own is None else found[1]

        return by_tokens

    def _coupled(self, batch: MicroBatch, table: SampleTable, found: Mapping[Statistic, Tensor]) -> Prepared:
        """Coefficients of the micro-batch's groups from this forward.

        A value that is not finite gives coefficients of 0 here; all ranks raise together after the backward pass.
        """
        in_order = torch.searchsorted(batch.row_index, table.rows)  # rows ascend in a micro-batch
        of_rows = {name: values[in_order] for name, values in found.items()}
        per_sample = coupled(self.objective, table, of_rows, self.known, len(batch.all_response_lens))
        finite = {name: values.nan_to_num(0.0, 0.0, 0.0) for name, values in per_sample.items()}
        return replace(self.prepared, per_sample=finite)

    def _mismatch(self, log_ratio: Tensor) -> dict[str, Tensor]:
        """`log_ratio` [k], log pi_trainer - log pi_sampler of the sampled tokens, nats. KL by the k3 estimator."""
        distance = log_ratio.abs()
        bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
        largest = distance.max() if distance.numel() else distance.new_zeros(())
        return {
            "sum/mismatch_abs": distance.sum(),
            "sum/mismatch_ratio": log_ratio.sum(),
            "sum/mismatch_kl": (bounded.exp() - 1 - log_ratio).sum(),
            "sum/mismatch_over": (distance > self.mismatch_threshold).float().sum(),
            "max/mismatch_abs": largest,
        }

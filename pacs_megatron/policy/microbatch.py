"""Micro-batches: the input of a forward pass, the objective's record of it, and the loss of an
update.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from pacs_megatron.contracts import MiniBatch, Prepared, TokenRecord
from pacs_megatron.contracts.protocols import Statistic
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.objectives.shared.groups import build_table
from pacs_megatron.objectives.shared.sample_table import SampleTable
from pacs_megatron.policy.head import LossGradient
from pacs_megatron.policy.model import zigzag_index


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed samples of one micro-batch, on the device.

    The last token of a sample is not an input, because it predicts no token. `t`: this rank's input
    tokens with padding. `k`: all response tokens. With context parallelism this rank predicts a
    part of them, `local`.
    """

    rows: np.ndarray  # int64 [samples], rows in the mini-batch's SampleFacts
    input_ids: Tensor  # int64 [1, t]
    position_ids: Tensor  # int64 [1, t]
    labels: Tensor  # int64 [1, t], the response token that a position predicts, -1 elsewhere
    place: Tensor  # int64 [t], index of the token among the samples' input tokens, -1 for padding
    input_lens: np.ndarray  # int64 [samples]
    packed: PackedSeqParams
    sample_of_token: Tensor  # int64 [k], row in the mini-batch's SampleFacts
    response_lens: np.ndarray  # int64 [samples]
    all_response_lens: Tensor  # int64 [n], of the whole mini-batch
    slots: (
        Tensor  # int64 [k], index of each response token in a flattened [samples, longest response]
    )
    sampler_logprobs: Tensor  # float32 [k]
    step_start_logprobs: Tensor | None  # float32 [k]
    reference_logprobs: Tensor | None  # float32 [k]
    estimates: Mapping[str, Tensor]  # float32 [k] each
    row_index: Tensor  # int64 [samples], `rows` on the device
    table: (
        SampleTable | None
    )  # of `rows`, if their groups are whole and their coefficients depend on this forward
    local: Tensor | None
    """int64 [k / cp, about], which of the k response tokens this rank predicts, in its order; None:
    all of them
    """

    def sums(self, values: Tensor) -> Tensor:
        """float64 [samples], sums of `values` [local] by sample.

        Collective over context-parallel ranks; no gradient. Every pass over the same micro-batch
        adds in the same order, so equal values have equal sums.
        """
        shape = (len(self.rows), int(self.response_lens.max(initial=0)))
        flat = values.new_zeros(shape[0] * shape[1], dtype=torch.float64)
        return flat.index_copy(0, self.slots, self.gather(values.double())).view(shape).sum(1)

    def means(self, values: Tensor) -> Tensor:
        """float64 [samples], means of `values` [local] over each sample's response tokens.

        As `sums`.
        """
        return self.sums(values) / self.all_response_lens[self.row_index].clamp(min=1)

    def gather(self, values: Tensor) -> Tensor:
        """[local] of every context-parallel rank -> [k] in packed order, on each.

        Collective; no gradient.
        """
        if self.local is None:
            return values
        full = torch.zeros(len(self.sample_of_token), dtype=values.dtype, device=values.device)
        # A sum with zeros changes no bit: every token is predicted on exactly one rank.
        full[self.local] = values
        dist.all_reduce(full, group=parallel_state.get_context_parallel_group())
        return full


def build_microbatch(
    minibatch: MiniBatch,
    rows: np.ndarray,
    *,
    multiple: int,
    device: torch.device,
    with_table: bool = False,
) -> MicroBatch:
    """Packs `rows` of `minibatch`, padded by one dummy sequence so that a rank has a multiple of
    `multiple` tokens.

    Without rows: a padding micro-batch of dummy tokens, which run the graph and predict nothing.
    With context parallelism every sequence is padded on the right to a multiple of 2 cp; causal
    attention hides the padding. `with_table`: the rows' coefficients depend on this forward, and
    all coupled samples are among the rows.
    """
    facts = minibatch.facts
    cp = parallel_state.get_context_parallel_world_size()
    position_of_row = {int(row): position for position, row in enumerate(minibatch.tokens.index)}
    positions = [position_of_row[int(row)] for row in rows]
    inputs, bounds = _pack(minibatch, rows, positions, multiple=multiple, cp=cp)
    response_lens = facts.response_lens[rows]
    ends = np.cumsum(response_lens)
    starts = np.repeat(
        np.arange(len(rows)) * response_lens.max(initial=0) - (ends - response_lens), response_lens
    )

    def by_token(values: Mapping[int, np.ndarray] | None) -> Tensor | None:
        if values is None:
            return None
        # Only the last pipeline stage has log-probs, and only it uses them.
        return _concat([values[int(row)] for row in rows if int(row) in values]).to(device)

    sampler = minibatch.tokens.sampler_logprobs
    at = minibatch.tokens.response_offsets
    local = None
    if cp > 1:
        mine = zigzag_index(bounds.tolist(), cp)[parallel_state.get_context_parallel_rank()]
        is_label = inputs[2] >= 0
        local = (is_label.cumsum(0) - 1)[mine][is_label[mine]].to(device)
        inputs = inputs[:, mine]
    input_ids, position_ids, labels, place = inputs[:, None].to(device)
    return MicroBatch(
        rows=rows,
        input_ids=input_ids,
        position_ids=position_ids,
        labels=labels,
        place=place[0],
        input_lens=facts.prompt_lens[rows] + response_lens - 1,
        packed=packed_params(bounds, device, padded=cp > 1),
        sample_of_token=torch.from_numpy(np.repeat(rows, response_lens)).to(device),
        response_lens=response_lens,
        all_response_lens=torch.from_numpy(facts.response_lens).to(device),
        slots=torch.from_numpy(starts + np.arange(response_lens.sum())).to(device),
        sampler_logprobs=_concat([sampler[at[k] : at[k + 1]] for k in positions]).to(device),
        step_start_logprobs=by_token(minibatch.step_start_logprobs),
        reference_logprobs=by_token(minibatch.reference_logprobs),
        estimates={
            name: found
            for name, v in minibatch.estimates.items()
            if (found := by_token(v)) is not None
        },
        row_index=torch.from_numpy(rows).to(device),
        table=build_table(facts, rows, device, whole_groups=False) if with_table else None,
        local=local,
    )


def _pack(
    minibatch: MiniBatch, rows: np.ndarray, positions: Sequence[int], *, multiple: int, cp: int
) -> tuple[Tensor, Tensor]:
    """(input ids, position ids, labels, places of all ranks: int64 [4, t]; bounds: int32 [sequences
    + 1]), on the CPU
    """
    sequence_multiple = 2 * cp if cp > 1 else 1
    multiple = math.lcm(multiple * cp, sequence_multiple)
    tokens = minibatch.tokens.token_ids
    offsets = minibatch.tokens.offsets
    sequences: list[np.ndarray] = []
    bounds = [0]
    first = 0
    for row, at in zip(rows, positions, strict=True):
        ids = tokens[offsets[at] : offsets[at + 1]]
        prompt_len = int(minibatch.facts.prompt_lens[row])
        length = len(ids) - 1
        sequence = _dummy_tokens(length + -length % sequence_multiple)
        sequence[0, :length] = ids[:-1]
        sequence[2, prompt_len - 1 : length] = ids[prompt_len:]
        sequence[3, :length] = np.arange(first, first + length)
        sequences.append(sequence)
        bounds.append(bounds[-1] + sequence.shape[1])
        first += length
    padding = -bounds[-1] % multiple if bounds[-1] else multiple
    if padding:
        sequences.append(_dummy_tokens(padding))
        bounds.append(bounds[-1] + padding)
    return torch.from_numpy(np.concatenate(sequences, axis=1)), torch.tensor(
        bounds, dtype=torch.int32
    )


def _dummy_tokens(length: int) -> np.ndarray:
    """int64 [4, length]: input ids 0, positions, no labels, no places."""
    return np.stack(
        [np.zeros(length, dtype=np.int64), np.arange(length), *np.full((2, length), -1)]
    )


def packed_params(bounds: Tensor, device: torch.device, *, padded: bool = False) -> PackedSeqParams:
    """Megatron's parameters of packed sequences with int32 bounds [n + 1] on the CPU.

    `padded`: with context parallelism, for which Transformer Engine requires padded bounds. They
    equal the bounds here, because padding counts as a part of its sequence.
    """
    longest = int(bounds.diff().max())
    bounds = bounds.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds if padded else None,
        cu_seqlens_kv_padded=bounds if padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def build_record(
    batch: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    is_step_start: bool,
    tokens: slice | None = None,
) -> TokenRecord:
    """The objective's record of a micro-batch, with `logprobs` of this rank's response tokens, or
    of the slice `tokens`. `is_step_start`: the policy still has the step-start weights, so
    `logprobs` are also the step-start log-probs.
    """
    part = slice(None) if tokens is None else tokens

    def pick(values: Tensor) -> Tensor:
        return values[part] if batch.local is None else values[batch.local[part]]

    step_start = logprobs.detach() if is_step_start else None
    if batch.step_start_logprobs is not None:
        step_start = pick(batch.step_start_logprobs)
    return TokenRecord(
        logprobs=logprobs,
        mask=torch.ones_like(logprobs, requires_grad=False),
        sample_of_token=pick(batch.sample_of_token),
        response_lens=batch.all_response_lens,
        step_start_logprobs=step_start,
        reference_logprobs=None
        if batch.reference_logprobs is None
        else pick(batch.reference_logprobs),
        sampler_logprobs=pick(batch.sampler_logprobs),
        entropy=entropy,
        estimates={name: pick(values) for name, values in batch.estimates.items()},
    )


def _concat(pieces: list[np.ndarray]) -> Tensor:
    """float32"""
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.float32), *pieces]))


MAX_LOG_RATIO = 60.0
"""Upper limit of exponents, in nats: sums stay finite in fp32, so the circuit breaker can compare
them.
"""


@dataclass(slots=True, kw_only=True)
class SampleStatistics:
    """Statistics of the samples of a pass; they stay on the device until `by_row` reads them."""

    names: Collection[Statistic]
    found: list[tuple[np.ndarray, dict[Statistic, Tensor]]] = field(default_factory=list)

    def add(
        self, batch: MicroBatch, record: TokenRecord, objective: Objective
    ) -> dict[Statistic, Tensor]:
        """Adds a micro-batch; returns its statistics, float64 [samples] each.

        Collective over context-parallel ranks.
        """
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
    """Coefficients of the table's rows, scattered to [n], from their statistics and from
    `Objective.known` [n].
    """
    of_rows = {name: values[table.rows] for name, values in known.items()}
    found = objective.couple(
        table, statistics.get("score"), statistics.get("sampler_ratio"), of_rows
    )
    return {
        name: values.new_zeros(num_samples).index_copy(0, table.rows, values)
        for name, values in found.items()
    }


@dataclass(slots=True, kw_only=True)
class UpdateLoss:
    """The loss function of one update's forward_backward.

    Raises for no value; does not synchronise with the device.
    """

    prepared: Prepared  # coefficients that are known before the pass, on the device
    objective: Objective
    statistics: SampleStatistics
    is_step_start: bool
    mismatch_threshold: (
        float  # nats; counts tokens whose log-prob differs by more from the sampler's
    )
    known: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # float64 [n], `Objective.known` on the device

    def __call__(
        self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss to back-propagate, sums over this rank's tokens to report)"""
        record = build_record(batch, logprobs, entropy, is_step_start=self.is_step_start)
        prepared = self.prepared
        if self.statistics.names:
            with torch.no_grad():
                found = self.statistics.add(
                    batch, replace(record, logprobs=logprobs.detach()), self.objective
                )
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
        """The loss's derivatives by log-probs and entropies; None if they depend on other tokens of
        this forward.
        """
        if batch.table is not None:
            return None

        def by_tokens(
            tokens: slice, logprobs: Tensor, entropies: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                leaf = logprobs.detach().requires_grad_(True)
                own = None if entropies is None else entropies.detach().requires_grad_(True)
                record = build_record(
                    batch, leaf, own, is_step_start=self.is_step_start, tokens=tokens
                )
                loss = (self.objective.token_loss(record, self.prepared) * record.mask).sum()
                found = torch.autograd.grad(
                    loss, [leaf] if own is None else [leaf, own], allow_unused=True
                )
                return found[0], None if own is None else found[1]

        return by_tokens

    def _coupled(
        self, batch: MicroBatch, table: SampleTable, found: Mapping[Statistic, Tensor]
    ) -> Prepared:
        """Coefficients of the micro-batch's groups from this forward.

        Replaces values that are not finite by 0; all ranks raise together after the backward pass.
        """
        in_order = torch.searchsorted(batch.row_index, table.rows)  # rows ascend in a micro-batch
        of_rows = {name: values[in_order] for name, values in found.items()}
        per_sample = coupled(
            self.objective, table, of_rows, self.known, len(batch.all_response_lens)
        )
        finite = {name: values.nan_to_num(0.0, 0.0, 0.0) for name, values in per_sample.items()}
        return replace(self.prepared, per_sample=finite)

    def _mismatch(self, log_ratio: Tensor) -> dict[str, Tensor]:
        """`log_ratio` [k], log pi_trainer - log pi_sampler of the sampled tokens, nats.

        KL by the k3 estimator.
        """
        distance = log_ratio.abs()
        bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
        return {
            "sum/mismatch_abs": distance.sum(),
            "sum/mismatch_ratio": log_ratio.sum(),
            "sum/mismatch_kl": (bounded.exp() - 1 - log_ratio).sum(),
            "sum/mismatch_over": (distance > self.mismatch_threshold).float().sum(),
            "max/mismatch_abs": distance.max() if distance.numel() else distance.new_zeros(()),
        }

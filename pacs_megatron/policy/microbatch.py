"""Micro-batches: the input of a forward pass, the objective's record of it, an update's loss."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from pacs_megatron.batching.tables import ranges
from pacs_megatron.contracts import MiniBatch, Prepared, TokenRecord, Writer
from pacs_megatron.contracts.protocols import Statistic
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.objectives.shared.groups import build_table
from pacs_megatron.objectives.shared.sample_table import SampleTable
from pacs_megatron.policy.head import LossGradient
from pacs_megatron.policy.model import zigzag_index

MAX_MISMATCH_LOG_RATIO = 60.0
"""Upper limit of exponents in the mismatch metrics, in nats: sums stay finite in fp32, so the
circuit breaker can compare them.
"""

_INPUT_IDS = 0
_POSITION_IDS = 1
_LABELS = 2
_INPUT_INDEX = 3
"""rows of the packed array [4, t] of `_pack`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed samples of one micro-batch, on the device.

    The last token of a sample is not an input, because it predicts no token.

    Shapes: t is this rank's number of input tokens with padding, k the number of response tokens of
    all samples, n the number of samples of the whole mini-batch. With context parallelism this rank
    predicts a part of the k tokens, `local`; without, all of them. [local] is the shape of what
    this rank predicts.
    """

    rows: np.ndarray
    """int64 [samples], rows in the mini-batch's SampleFacts, ascending"""
    input_ids: Tensor
    """int64 [1, t]"""
    position_ids: Tensor
    """int64 [1, t], position in the sample"""
    labels: Tensor
    """int64 [1, t], the response token that a position predicts, -1 elsewhere"""
    input_index: Tensor
    """int64 [t], index of the token among the samples' input tokens, -1 for padding"""
    input_lens: np.ndarray
    """int64 [samples], input tokens of each sample: prompt + response - 1"""
    packed: PackedSeqParams
    sample_of_token: Tensor
    """int64 [k], row in the mini-batch's SampleFacts"""
    response_lens: np.ndarray
    """int64 [samples]"""
    all_response_lens: Tensor
    """int64 [n], of the whole mini-batch"""
    slots: Tensor
    """int64 [k], index of each response token in a flattened [samples, longest response]"""
    sampler_logprobs: Tensor
    """float32 [k], nats"""
    step_start_logprobs: Tensor | None
    """float32 [k], nats"""
    reference_logprobs: Tensor | None
    """float32 [k], nats"""
    estimates: Mapping[str, Tensor]
    """float32 [k] each"""
    row_index: Tensor
    """int64 [samples], `rows` on the device"""
    table: SampleTable | None
    """of `rows`, if their groups are whole and their coefficients depend on this forward"""
    local: Tensor | None
    """int64 [k / cp, about], which of the k response tokens this rank predicts, in its order; None:
    all of them
    """

    def sums(self, values: Tensor) -> Tensor:
        """Sums of token values by sample, without gradient.

        Collective over the context-parallel ranks. Every pass over the same micro-batch adds in the
        same order, so equal values have equal sums.

        Args:
            values: [local].

        Returns:
            [samples], fp64.
        """
        return self._padded(values).sum(1)

    def largest(self, values: Tensor) -> Tensor:
        """The largest token value of each sample, at least 0, without gradient.

        Collective over the context-parallel ranks.

        Args:
            values: [local].

        Returns:
            [samples], fp64.
        """
        padded = self._padded(values)
        if not padded.numel():
            return padded.new_zeros(len(self.rows))
        return padded.amax(1).clamp(min=0.0)

    def _padded(self, values: Tensor) -> Tensor:
        """The token values of each sample, fp64 [samples, longest response], padded with 0."""
        num_samples = len(self.rows)
        longest = int(self.response_lens.max(initial=0))
        zeros = values.new_zeros(num_samples * longest, dtype=torch.float64)
        padded = zeros.index_copy(0, self.slots, self.gather(values.double()))
        return padded.view(num_samples, longest)

    def means(self, values: Tensor) -> Tensor:
        """Means of token values over each sample's response tokens, without gradient.

        Same as `sums`, divided by the response lengths.

        Args:
            values: [local].

        Returns:
            [samples], fp64.
        """
        response_lens = self.all_response_lens[self.row_index]
        return self.sums(values) / response_lens.clamp(min=1)

    def gather(self, values: Tensor) -> Tensor:
        """The token values of all context-parallel ranks, without gradient.

        Collective over the context-parallel ranks.

        Args:
            values: [local], this rank's tokens, in its order.

        Returns:
            [k], in packed order, the same on every context-parallel rank.
        """
        if self.local is None:
            return values

        full = torch.zeros(len(self.sample_of_token), dtype=values.dtype, device=values.device)
        # A sum with zeros changes no bit: every token is predicted on exactly one rank.
        full[self.local] = values
        dist.all_reduce(full, group=parallel_state.get_context_parallel_group())
        return full


class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of one rank's plan, each built when the schedule reaches it.

    So a pass starts after its first micro-batch is built, and has few of them on the device.
    """

    def __init__(
        self,
        minibatch: MiniBatch,
        rows_of_batch: Sequence[np.ndarray],
        *,
        multiple: int,
        device: torch.device,
        with_tables: bool,
        num_uses: int,
    ) -> None:
        """Builds nothing.

        Args:
            minibatch: the mini-batch, with this rank's tokens and log-probs.
            rows_of_batch: int64 [samples], rows of each micro-batch.
            multiple: see `build_microbatch`.
            device: of the micro-batches' tensors.
            with_tables: whether micro-batches of whole groups get a table, for coefficients that
                depend on the forward.
            num_uses: how often each micro-batch is read: the number of model chunks. After the
                last time it is freed.
        """
        self._minibatch = minibatch
        self._rows_of_batch = rows_of_batch
        self._multiple = multiple
        self._device = device
        self._with_tables = with_tables
        self._num_uses = num_uses
        self._uses: Counter[int] = Counter()
        self._built: dict[int, MicroBatch] = {}
        self._columns = _SampleColumns.of(minibatch, device)

    def __len__(self) -> int:
        return len(self._rows_of_batch)

    def __iter__(self) -> Iterator[MicroBatch]:
        for number in range(len(self)):
            yield self[number]

    def __getitem__(self, number: Any) -> Any:
        batch = self._built.pop(number, None)
        if batch is None:
            rows = self._rows_of_batch[number]
            together = self._minibatch.plan.together
            with_table = self._with_tables and bool(together[rows].all())
            batch = self.build(rows, with_table=with_table)

        self._uses[number] += 1
        if self._uses[number] < self._num_uses:
            self._built[number] = batch
        return batch

    def build(self, rows: np.ndarray, *, with_table: bool = False) -> MicroBatch:
        """The micro-batch of some rows; see `build_microbatch`."""
        return build_microbatch(
            self._minibatch,
            rows,
            self._columns,
            multiple=self._multiple,
            device=self._device,
            with_table=with_table,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampleColumns:
    """Columns of samples that all micro-batches of a mini-batch share."""

    positions: np.ndarray
    """int64 [n], position of each row in this rank's tokens; -1 for samples of other ranks"""
    response_lens: Tensor
    """int64 [n], on the device"""

    @classmethod
    def of(cls, minibatch: MiniBatch, device: torch.device) -> "_SampleColumns":
        index = minibatch.tokens.index
        positions = np.full(minibatch.facts.num_samples, -1, dtype=np.int64)
        positions[index] = np.arange(len(index))
        response_lens = torch.from_numpy(minibatch.facts.response_lens).to(device)
        return cls(positions=positions, response_lens=response_lens)


def build_microbatch(
    minibatch: MiniBatch,
    rows: np.ndarray,
    columns: _SampleColumns,
    *,
    multiple: int,
    device: torch.device,
    with_table: bool = False,
) -> MicroBatch:
    """Packs samples into a micro-batch, padded by one dummy sequence.

    Without rows the result is a padding micro-batch of dummy tokens, which run the graph and
    predict nothing. With context parallelism every sequence is padded on the right to a multiple of
    2 cp; causal attention hides the padding.

    Args:
        minibatch: the mini-batch, with this rank's tokens and log-probs.
        rows: int64 [samples], rows of the samples in the mini-batch's facts, ascending.
        columns: of the mini-batch.
        multiple: the number of input tokens of a rank is a multiple of this.
        device: of the micro-batch's tensors.
        with_table: whether the rows' coefficients depend on this forward; all coupled samples are
            then among the rows.
    """
    facts = minibatch.facts
    tokens = minibatch.tokens
    cp = parallel_state.get_context_parallel_world_size()
    positions = columns.positions[rows].tolist()

    packed, bounds = _pack(minibatch, positions, multiple=multiple, cp=cp)
    local = None
    if cp > 1:
        packed, local = _part_of_rank(packed, bounds, cp)
        local = local.to(device)
    # One copy to the device for the four rows; each of the results is [1, t].
    input_ids, position_ids, labels, input_index = packed[:, None].to(device)

    slices = [slice(*tokens.response_offsets[k : k + 2].tolist()) for k in positions]

    def select(column: Tensor) -> Tensor:
        # Only the last pipeline stage has the values, and only it uses them.
        if not len(column):
            return column
        return torch.cat([column[:0], *(column[part] for part in slices)])

    step_start_logprobs = None
    if minibatch.step_start_logprobs is not None:
        step_start_logprobs = select(minibatch.step_start_logprobs)
    reference_logprobs = None
    if minibatch.reference_logprobs is not None:
        reference_logprobs = select(minibatch.reference_logprobs)

    table = None
    if with_table:
        table = build_table(facts, rows, device, whole_groups=False)

    response_lens = facts.response_lens[rows]
    return MicroBatch(
        rows=rows,
        input_ids=input_ids,
        position_ids=position_ids,
        labels=labels,
        input_index=input_index[0],
        input_lens=facts.lens[rows] - 1,
        packed=packed_params(bounds, device, padded=cp > 1),
        sample_of_token=torch.from_numpy(np.repeat(rows, response_lens)).to(device),
        response_lens=response_lens,
        all_response_lens=columns.response_lens,
        slots=torch.from_numpy(_slots(response_lens)).to(device),
        sampler_logprobs=_concat([tokens.sampler_logprobs[part] for part in slices]).to(device),
        step_start_logprobs=step_start_logprobs,
        reference_logprobs=reference_logprobs,
        estimates={name: select(column) for name, column in minibatch.estimates.items()},
        row_index=torch.from_numpy(rows).to(device),
        table=table,
        local=local,
    )


def _pack(
    minibatch: MiniBatch,
    positions: Sequence[int],
    *,
    multiple: int,
    cp: int,
) -> tuple[Tensor, Tensor]:
    """The input tokens of all context-parallel ranks, on the CPU.

    Args:
        minibatch: the mini-batch, with this rank's tokens.
        positions: [samples], positions of the samples in the mini-batch's tokens.
        multiple: the number of input tokens of a rank is a multiple of this.
        cp: number of context-parallel ranks.

    Returns:
        int64 [4, cp t]: input ids, position ids, labels, input indices.
        int32 [sequences + 1]: the start of each sequence, and the end of the last one.
    """
    sequence_multiple = 2 * cp if cp > 1 else 1
    total_multiple = math.lcm(multiple * cp, sequence_multiple)

    sequences: list[np.ndarray] = []
    bounds = [0]
    num_inputs = 0
    for position in positions:
        start, stop = minibatch.tokens.offsets[position : position + 2]
        ids = minibatch.tokens.token_ids[start:stop]
        is_of_policy = minibatch.tokens.writers[start:stop] == Writer.POLICY
        length = len(ids) - 1

        sequence = _dummy_tokens(length + -length % sequence_multiple)
        sequence[_INPUT_IDS, :length] = ids[:-1]
        # Only the policy's tokens are predicted: the environment's are context, as the prompt's.
        sequence[_LABELS, :length] = np.where(is_of_policy[1:], ids[1:], -1)
        sequence[_INPUT_INDEX, :length] = np.arange(num_inputs, num_inputs + length)
        sequences.append(sequence)
        bounds.append(bounds[-1] + sequence.shape[1])
        num_inputs += length

    # A micro-batch has at least one token, because its pass runs the graph.
    padding = -bounds[-1] % total_multiple if bounds[-1] else total_multiple
    if padding:
        sequences.append(_dummy_tokens(padding))
        bounds.append(bounds[-1] + padding)

    packed = torch.from_numpy(np.concatenate(sequences, axis=1))
    return packed, torch.tensor(bounds, dtype=torch.int32)


def _dummy_tokens(length: int) -> np.ndarray:
    """int64 [4, length]: input ids 0, positions, no labels, no input indices."""
    tokens = np.full((4, length), -1, dtype=np.int64)
    tokens[_INPUT_IDS] = 0
    tokens[_POSITION_IDS] = np.arange(length)
    return tokens


def _part_of_rank(packed: Tensor, bounds: Tensor, cp: int) -> tuple[Tensor, Tensor]:
    """This context-parallel rank's part of the packed tokens.

    Args:
        packed: int64 [4, cp t], of `_pack`.
        bounds: int32 [sequences + 1], of `_pack`.
        cp: number of context-parallel ranks.

    Returns:
        int64 [4, t], in the order of `zigzag_index`.
        int64 [local], which of the k response tokens this rank predicts, in the same order.
    """
    rank = parallel_state.get_context_parallel_rank()
    index = zigzag_index(bounds.tolist(), cp)[rank]

    is_label = packed[_LABELS] >= 0
    number_of_label = is_label.cumsum(0) - 1
    local = number_of_label[index][is_label[index]]
    return packed[:, index], local


def _slots(response_lens: np.ndarray) -> np.ndarray:
    """int64 [k], index of each response token in a flattened [samples, longest response]."""
    padded_starts = np.arange(len(response_lens)) * response_lens.max(initial=0)
    return ranges(padded_starts, response_lens)


def _concat(pieces: list[np.ndarray]) -> Tensor:
    """float32, the pieces one after the other; [0] without pieces."""
    empty = np.empty(0, dtype=np.float32)
    return torch.from_numpy(np.concatenate([empty, *pieces]))


def packed_params(bounds: Tensor, device: torch.device, *, padded: bool = False) -> PackedSeqParams:
    """Megatron's parameters of packed sequences.

    Args:
        bounds: int32 [sequences + 1] on the CPU, the start of each sequence, and the end of the
            last one.
        device: of the bounds in the result.
        padded: with context parallelism, for which Transformer Engine requires padded bounds. They
            equal the bounds here, because padding counts as a part of its sequence.
    """
    longest = int(bounds.diff().max())
    bounds = bounds.to(device)
    padded_bounds = bounds if padded else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded_bounds,
        cu_seqlens_kv_padded=padded_bounds,
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
    """The objective's record of a micro-batch, or of a slice of this rank's response tokens.

    Args:
        batch: the micro-batch.
        logprobs: [tokens], fp32, nats, of this rank's response tokens in `tokens`.
        entropy: [tokens], fp32, nats; None: not computed.
        is_step_start: whether the policy still has the step-start weights, so `logprobs` are also
            the step-start log-probs.
        tokens: slice of [local]; None: all.
    """
    part = slice(None) if tokens is None else tokens

    def select(values: Tensor) -> Tensor:
        """[k] -> [tokens]"""
        if batch.local is None:
            return values[part]
        return values[batch.local[part]]

    step_start_logprobs = None
    if batch.step_start_logprobs is not None:
        step_start_logprobs = select(batch.step_start_logprobs)
    elif is_step_start:
        step_start_logprobs = logprobs.detach()

    reference_logprobs = None
    if batch.reference_logprobs is not None:
        reference_logprobs = select(batch.reference_logprobs)

    return TokenRecord(
        logprobs=logprobs,
        mask=torch.ones_like(logprobs, requires_grad=False),
        sample_of_token=select(batch.sample_of_token),
        response_lens=batch.all_response_lens,
        step_start_logprobs=step_start_logprobs,
        reference_logprobs=reference_logprobs,
        sampler_logprobs=select(batch.sampler_logprobs),
        entropy=entropy,
        estimates={name: select(values) for name, values in batch.estimates.items()},
    )


@dataclass(slots=True, kw_only=True)
class SampleStatistics:
    """Statistics of the samples of a pass; they stay on the device until `column` reads them."""

    names: Collection[Statistic]
    """the statistics to compute"""
    by_batch: list[tuple[np.ndarray, dict[Statistic, Tensor]]] = field(default_factory=list)
    """rows int64 [samples], and each statistic float64 [samples], of every micro-batch so far"""

    def add(
        self,
        batch: MicroBatch,
        record: TokenRecord,
        objective: Objective,
    ) -> dict[Statistic, Tensor]:
        """Adds a micro-batch. Collective over the context-parallel ranks.

        Returns:
            float64 [samples] for each statistic of `names`.
        """
        values: dict[Statistic, Tensor] = {}
        if "score" in self.names:
            reduce = batch.largest if objective.score_is_maximum else batch.sums
            values["score"] = reduce(objective.token_scores(record) * record.mask)
        if "sampler_ratio" in self.names:
            assert record.step_start_logprobs is not None
            assert record.sampler_logprobs is not None
            log_ratio = record.step_start_logprobs.double() - record.sampler_logprobs.double()
            values["sampler_ratio"] = batch.means(log_ratio * record.mask)
        self.by_batch.append((batch.rows, values))
        return values

    def column(self, name: Statistic) -> tuple[np.ndarray, np.ndarray]:
        """The values of this rank's samples. Synchronises with the device once.

        Returns:
            int64 [m], rows of the samples in the mini-batch's facts.
            float64 [m], the value of each.
        """
        if not self.by_batch:
            return np.empty(0, dtype=np.int64), np.empty(0)
        rows = np.concatenate([rows for rows, _ in self.by_batch])
        values = torch.cat([values[name] for _, values in self.by_batch])
        return rows, values.cpu().numpy()


def coupled(
    objective: Objective,
    table: SampleTable,
    statistics: Mapping[Statistic, Tensor],
    known: Mapping[str, Tensor],
    num_samples: int,
) -> dict[str, Tensor]:
    """Coefficients of coupled samples, for `Prepared.per_sample`.

    Args:
        objective: its `couple` computes the coefficients.
        table: of the m coupled samples.
        statistics: float64 [m] each, in the order of the table.
        known: float64 [n] each, of `Objective.known`.
        num_samples: n, the samples of the whole mini-batch.

    Returns:
        float64 [n] each, 0 outside the table's rows.
    """
    known_of_rows = {name: values[table.rows] for name, values in known.items()}
    coefficients = objective.couple(
        table, statistics.get("score"), statistics.get("sampler_ratio"), known_of_rows
    )

    scattered = {}
    for name, values in coefficients.items():
        zeros = values.new_zeros(num_samples)
        scattered[name] = zeros.index_copy(0, table.rows, values)
    return scattered


@dataclass(slots=True, kw_only=True)
class UpdateLoss:
    """The loss function of one update's forward_backward.

    It raises for no value and does not synchronise with the device.
    """

    prepared: Prepared
    """coefficients that are known before the pass, on the device"""
    objective: Objective
    statistics: SampleStatistics
    """of this update's forward pass; filled micro-batch by micro-batch"""
    is_step_start: bool
    mismatch_threshold: float
    """nats; counts tokens whose log-prob differs by more from the sampler's"""
    known: Mapping[str, Tensor] = field(default_factory=dict)
    """float64 [n], `Objective.known` on the device"""

    def __call__(
        self,
        batch: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch on this rank.

        Args:
            batch: the micro-batch.
            logprobs: [local], fp32, nats, with the autograd graph.
            entropy: [local], fp32, nats, with the autograd graph.

        Returns:
            [], the loss to back-propagate: the sum over this rank's response tokens.
            [] each, sums to report over this rank's response tokens; maxima for names `max/...`.
        """
        record = build_record(batch, logprobs, entropy, is_step_start=self.is_step_start)
        prepared = self.prepared
        if self.statistics.names:
            with torch.no_grad():
                detached = replace(record, logprobs=logprobs.detach())
                statistics = self.statistics.add(batch, detached, self.objective)
                if batch.table is not None:
                    prepared = self._coupled(batch, batch.table, statistics)

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
        """The loss's derivatives by log-probs and entropies, for the head.

        None if they depend on other tokens of this forward.
        """
        if batch.table is not None:
            return None

        def by_tokens(
            tokens: slice, logprobs: Tensor, entropies: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            with torch.enable_grad():
                logprob_leaf = logprobs.detach().requires_grad_(True)
                entropy_leaf = None
                leaves = [logprob_leaf]
                if entropies is not None:
                    entropy_leaf = entropies.detach().requires_grad_(True)
                    leaves.append(entropy_leaf)

                record = build_record(
                    batch,
                    logprob_leaf,
                    entropy_leaf,
                    is_step_start=self.is_step_start,
                    tokens=tokens,
                )
                loss = (self.objective.token_loss(record, self.prepared) * record.mask).sum()
                slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
            return slopes[0], None if entropies is None else slopes[1]

        return by_tokens

    def _coupled(
        self,
        batch: MicroBatch,
        table: SampleTable,
        statistics: Mapping[Statistic, Tensor],
    ) -> Prepared:
        """Coefficients of the micro-batch's groups from this forward.

        Replaces values that are not finite by 0; all ranks raise together after the backward pass.

        Args:
            batch: the micro-batch.
            table: of its samples.
            statistics: float64 [samples] each, in the order of `batch.rows`.
        """
        # Rows ascend in a micro-batch; the table has the order of the sample ids.
        in_order = torch.searchsorted(batch.row_index, table.rows)
        of_table = {name: values[in_order] for name, values in statistics.items()}
        per_sample = coupled(
            self.objective, table, of_table, self.known, len(batch.all_response_lens)
        )
        finite = {name: values.nan_to_num(0.0, 0.0, 0.0) for name, values in per_sample.items()}
        return replace(self.prepared, per_sample=finite)

    def _mismatch(self, log_ratio: Tensor) -> dict[str, Tensor]:
        """Distance between the trainer's and the sampler's log-probs, to report.

        The KL is estimated by k3 (Schulman 2020, "Approximating KL divergence"):
        exp(x) - 1 - x with x = log pi_trainer - log pi_sampler of the sampled tokens.

        Args:
            log_ratio: [local], fp32, x, nats; 0 for tokens outside the mask.

        Returns:
            [] each, fp32, sums over the tokens; a maximum for `max/...`.
        """
        distance = log_ratio.abs()
        bounded = log_ratio.clamp(max=MAX_MISMATCH_LOG_RATIO)
        is_over = distance > self.mismatch_threshold
        return {
            "sum/mismatch_abs": distance.sum(),
            "sum/mismatch_ratio": log_ratio.sum(),
            "sum/mismatch_kl": (bounded.exp() - 1 - log_ratio).sum(),
            "sum/mismatch_over": is_over.float().sum(),
            "max/mismatch_abs": distance.max() if distance.numel() else distance.new_zeros(()),
        }

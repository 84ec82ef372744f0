"""Input of one forward pass: packed tokens, sequence bounds, the tokens to predict, and the record for the objective."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from pacs_megatron.contracts import MiniBatch, TokenRecord
from pacs_megatron.policy.context import zigzag_index


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed samples of one micro-batch, on the device.

    The last token of a sample is never fed: nothing is predicted from it. `t` counts fed tokens and padding that this
    rank holds, `k` all response tokens; with context parallelism this rank predicts some of them, `local`.
    """

    rows: np.ndarray
    """int64 [samples], rows in the mini-batch's SampleFacts"""
    input_ids: Tensor
    """int64 [1, t]"""
    position_ids: Tensor
    """int64 [1, t]"""
    labels: Tensor
    """int64 [1, t], the response token that a position predicts, -1 elsewhere"""
    packed: PackedSeqParams
    sample_of_token: Tensor
    """int64 [k], row in the mini-batch's SampleFacts"""
    response_lens: np.ndarray
    """int64 [samples]"""
    local: Tensor | None
    """int64 [k / cp, about], which of the k response tokens this rank predicts, in its order; None: all of them"""

    def gather(self, values: Tensor) -> Tensor:
        """[local] of every context-parallel rank -> [k] in packed order, on each. Collective; no gradient."""
        if self.local is None:
            return values
        full = torch.zeros(len(self.sample_of_token), dtype=values.dtype, device=values.device)
        # A sum with zeros changes no bit: every token is predicted on exactly one rank.
        full[self.local] = values
        dist.all_reduce(full, group=parallel_state.get_context_parallel_group())
        return full


def build_microbatch(minibatch: MiniBatch, rows: np.ndarray, *, multiple: int, device: torch.device) -> MicroBatch:
    """Packs `rows` of `part`, padded by one dummy sequence so that a rank holds a multiple of `multiple` tokens.

    No rows give a padding micro-batch: dummy tokens that run the graph and predict nothing. With context parallelism
    every sequence is padded at its end to a multiple of 2 cp, where causal attention hides the padding.
    """
    cp = parallel_state.get_context_parallel_world_size()
    sequence_multiple = 2 * cp if cp > 1 else 1
    multiple = math.lcm(multiple * cp, sequence_multiple)
    position_of_row = {int(row): position for position, row in enumerate(minibatch.tokens.index)}
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for row in rows:
        at = position_of_row[int(row)]
        tokens = minibatch.tokens.token_ids[minibatch.tokens.offsets[at] : minibatch.tokens.offsets[at + 1]].astype(
            np.int64
        )
        prompt_len = int(minibatch.facts.prompt_lens[row])
        label = np.full(len(tokens) - 1, -1, dtype=np.int64)
        label[prompt_len - 1 :] = tokens[prompt_len:]
        fill = -(len(tokens) - 1) % sequence_multiple
        ids.append(np.pad(tokens[:-1], (0, fill)))
        positions.append(np.arange(len(tokens) - 1 + fill))
        labels.append(np.pad(label, (0, fill), constant_values=-1))
    total = sum(len(part_ids) for part_ids in ids)
    padding = -total % multiple if total else multiple
    if padding:
        ids.append(np.zeros(padding, dtype=np.int64))
        positions.append(np.arange(padding))
        labels.append(np.full(padding, -1, dtype=np.int64))
    lens = [len(part_ids) for part_ids in ids]
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(lens)]), dtype=torch.int32, device=device)
    longest = max(lens)
    response_lens = minibatch.facts.response_lens[rows]

    label_row = torch.from_numpy(np.concatenate(labels))
    mine, local = None, None
    if cp > 1:
        mine = zigzag_index(bounds.tolist(), cp)[parallel_state.get_context_parallel_rank()]
        number = (label_row >= 0).cumsum(0) - 1
        local = number[mine][label_row[mine] >= 0].to(device)

    def row_tensor(row: Tensor) -> Tensor:
        return (row if mine is None else row[mine])[None].to(device)

    return MicroBatch(
        rows=rows,
        input_ids=row_tensor(torch.from_numpy(np.concatenate(ids))),
        position_ids=row_tensor(torch.from_numpy(np.concatenate(positions))),
        labels=row_tensor(label_row),
        # Padding counts as a part of its sequence, so the padded bounds that Transformer Engine's context parallelism
        # also asks for are the same ones.
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds if cp > 1 else None,
            cu_seqlens_kv_padded=bounds if cp > 1 else None,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        sample_of_token=torch.from_numpy(np.repeat(rows, response_lens)).to(device),
        response_lens=response_lens,
        local=local,
    )


def build_record(
    minibatch: MiniBatch,
    batch: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    gathered: bool,
) -> TokenRecord:
    """The objective's view of a micro-batch whose log-probs were computed: all k of them (`gathered`), or this rank's
    `local` ones.
    """
    local = batch.local if batch.local is not None and not gathered else None

    def pick(values: Tensor) -> Tensor:
        values = values.to(logprobs.device)
        return values if local is None else values[local]

    def by_token(values: Mapping[int, np.ndarray] | None) -> Tensor | None:
        return None if values is None else pick(_by_token(values, batch))

    return TokenRecord(
        logprobs=logprobs,
        mask=torch.ones_like(logprobs, requires_grad=False),
        sample_of_token=pick(batch.sample_of_token),
        response_lens=torch.from_numpy(minibatch.facts.response_lens).to(logprobs.device),
        step_start_logprobs=by_token(minibatch.step_start_logprobs),
        reference_logprobs=by_token(minibatch.reference_logprobs),
        sampler_logprobs=pick(_sampler_logprobs(minibatch, batch)),
        entropy=entropy,
    )


def _by_token(values: Mapping[int, np.ndarray], batch: MicroBatch) -> Tensor:
    minibatches = [values[int(row)] for row in batch.rows]
    return torch.from_numpy(np.concatenate(minibatches) if minibatches else np.empty(0, dtype=np.float32))


def _sampler_logprobs(minibatch: MiniBatch, batch: MicroBatch) -> Tensor:
    position_of_row = {int(row): position for position, row in enumerate(minibatch.tokens.index)}
    bounds = minibatch.tokens.response_offsets
    minibatches = [
        minibatch.tokens.sampler_logprobs[bounds[position_of_row[int(row)]] : bounds[position_of_row[int(row)] + 1]]
        for row in batch.rows
    ]
    return torch.from_numpy(np.concatenate(minibatches) if minibatches else np.empty(0, dtype=np.float32))

"""What one forward pass sees: packed tokens, sequence bounds, the tokens to predict, and the record for the objective."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from pacs_megatron.contracts import Part, TokenRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed samples of one micro-batch, on the device.

    The last token of a sample is never fed: nothing is predicted from it. `t` counts fed tokens and padding, `k`
    response tokens.
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


def build_microbatch(part: Part, rows: np.ndarray, *, multiple: int, device: torch.device) -> MicroBatch:
    """Packs `rows` of `part`, padded by one dummy sequence to a multiple of `multiple` tokens.

    No rows give a padding micro-batch: dummy tokens that run the graph and predict nothing.
    """
    position_of_row = {int(row): position for position, row in enumerate(part.tokens.index)}
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for row in rows:
        at = position_of_row[int(row)]
        tokens = part.tokens.token_ids[part.tokens.offsets[at] : part.tokens.offsets[at + 1]].astype(np.int64)
        prompt_len = int(part.facts.prompt_lens[row])
        label = np.full(len(tokens) - 1, -1, dtype=np.int64)
        label[prompt_len - 1 :] = tokens[prompt_len:]
        ids.append(tokens[:-1])
        positions.append(np.arange(len(tokens) - 1))
        labels.append(label)
    total = sum(len(part_ids) for part_ids in ids)
    padding = -total % multiple if total else multiple
    if padding:
        ids.append(np.zeros(padding, dtype=np.int64))
        positions.append(np.arange(padding))
        labels.append(np.full(padding, -1, dtype=np.int64))
    lens = [len(part_ids) for part_ids in ids]
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(lens)]), dtype=torch.int32, device=device)
    longest = max(lens)
    response_lens = part.facts.response_lens[rows]

    def row_tensor(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts))[None].to(device)

    return MicroBatch(
        rows=rows,
        input_ids=row_tensor(ids),
        position_ids=row_tensor(positions),
        labels=row_tensor(labels),
        packed=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
        sample_of_token=torch.from_numpy(np.repeat(rows, response_lens)).to(device),
        response_lens=response_lens,
    )


def build_record(
    part: Part, batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None, all_response_lens: Tensor
) -> TokenRecord:
    """The objective's view of a micro-batch whose log-probs were computed. `all_response_lens`: int64 [n]."""
    device = logprobs.device
    return TokenRecord(
        logprobs=logprobs,
        mask=torch.ones_like(logprobs, requires_grad=False),
        sample_of_token=batch.sample_of_token,
        response_lens=all_response_lens,
        step_start_logprobs=_by_token(part.step_start_logprobs, batch, device),
        reference_logprobs=_by_token(part.reference_logprobs, batch, device),
        sampler_logprobs=_sampler_logprobs(part, batch).to(device),
        entropy=entropy,
    )


def _by_token(values: Mapping[int, np.ndarray] | None, batch: MicroBatch, device: torch.device) -> Tensor | None:
    if values is None:
        return None
    parts = [values[int(row)] for row in batch.rows]
    joined = np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)
    return torch.from_numpy(joined).to(device)


def _sampler_logprobs(part: Part, batch: MicroBatch) -> Tensor:
    position_of_row = {int(row): position for position, row in enumerate(part.tokens.index)}
    bounds = part.tokens.response_offsets
    parts = [
        part.tokens.sampler_logprobs[bounds[position_of_row[int(row)]] : bounds[position_of_row[int(row)] + 1]]
        for row in batch.rows
    ]
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=np.float32))

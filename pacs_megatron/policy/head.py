"""Log-probabilities and entropies of given tokens from hidden states, with bounded memory at any vocabulary.

Only the positions that predict a response token reach the output layer, and the [chunk, v] logits exist for one chunk of
positions at a time: the backward pass recomputes them. The vocabulary is split over the tensor-parallel ranks; padded
rows of the vocabulary are masked out and have probability 0.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

LOGITS_PER_CHUNK = 1 << 26
"""Elements of one chunk of logits on one rank: 256 MiB in fp32."""


def _rows_per_chunk(vocab_local: int) -> int:
    return max(1, LOGITS_PER_CHUNK // vocab_local)


def _chunk_logits(hidden: Tensor, weight: Tensor, num_valid: int, temperature: float) -> Tensor:
    """float32 [c, v / tp]; rows of the vocabulary from `num_valid` on are padding."""
    logits = F.linear(hidden, weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    if num_valid < logits.shape[-1]:
        logits[:, num_valid:] = float("-inf")
    return logits


def _local_targets(targets: Tensor, vocab_start: int, num_valid: int) -> tuple[Tensor, Tensor]:
    local = targets - vocab_start
    inside = (local >= 0) & (local < num_valid)
    return local.clamp(0, max(num_valid - 1, 0)), inside


class _ChunkedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup,
        temperature: float,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        vocab_local = weight.shape[0]
        vocab_start = group.rank() * vocab_local
        num_valid = max(0, min(vocab_local, vocab_size - vocab_start))
        logprobs, log_z, entropies = [], [], []
        for start in range(0, hidden.shape[0], _rows_per_chunk(vocab_local)):
            rows = slice(start, start + _rows_per_chunk(vocab_local))
            logits = _chunk_logits(hidden[rows], weight, num_valid, temperature)
            top = logits.max(dim=-1).values
            _reduce(top, dist.ReduceOp.MAX, group)
            logits -= top[:, None]
            local, inside = _local_targets(targets[rows], vocab_start, num_valid)
            target_logit = logits.gather(1, local[:, None])[:, 0].masked_fill(~inside, 0.0)
            if want_entropy:
                # exp(-inf) * -inf is nan: the sum of p * logit excludes padding.
                weights = logits.exp()
                moment = (weights[:, :num_valid] * logits[:, :num_valid]).sum(-1)
                sums = torch.stack([weights.sum(-1), target_logit, moment])
            else:
                sums = torch.stack([logits.exp_().sum(-1), target_logit])
            _reduce(sums, dist.ReduceOp.SUM, group)
            log_sum = sums[0].log()
            logprobs.append(sums[1] - log_sum)
            log_z.append(log_sum + top)
            if want_entropy:
                entropies.append(log_sum - sums[2] / sums[0])
        logprob, entropy = _join(logprobs, hidden), _join(entropies, hidden)
        ctx.save_for_backward(hidden, weight, targets, _join(log_z, hidden))
        ctx.vocab_start, ctx.num_valid, ctx.temperature = vocab_start, num_valid, temperature
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob = grads[0]
        hidden, weight, targets, log_z = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        chunk = _rows_per_chunk(weight.shape[0])
        one_chunk = hidden.shape[0] <= chunk
        # Several chunks accumulate in fp32: bf16 would lose small contributions.
        grad_weight = torch.zeros_like(weight, dtype=weight.dtype if one_chunk else torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = _chunk_logits(hidden[rows], weight, ctx.num_valid, ctx.temperature)
            grad_logits = logits.sub_(log_z[rows, None]).exp_().neg_()
            local, inside = _local_targets(targets[rows], ctx.vocab_start, ctx.num_valid)
            grad_logits.scatter_add_(1, local[:, None], inside[:, None].to(grad_logits.dtype))
            grad_logits *= (grad_logprob[rows] / ctx.temperature)[:, None]
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight += grad_logits.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _join(chunks: list[Tensor], like: Tensor) -> Tensor:
    """A new tensor for each call. If log-probs and entropies of no rows were one object, marking the entropies as not
    differentiable would also skip the backward pass of a micro-batch without targets, and peers would hang in it."""
    return torch.cat(chunks) if chunks else like.new_zeros(0, dtype=torch.float32)


def _reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)


def token_logprobs(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies of the whole distributions, nats.

    Args:
        hidden: [t, hidden], final hidden states of the predicting positions, equal on all tensor-parallel ranks; its
            gradient is this rank's part (the caller's `copy_to_tensor_model_parallel_region` sums the parts).
        weight: [v / tp, hidden], this rank's rows of the output embedding, padded rows included.
        targets: int64 [t], token ids.
        vocab_size: true size; columns from it on are padding.
        group: tensor-parallel group.
        temperature: logits are divided by it.

    Returns:
        float32 [t] log-probs with gradient, float32 [t] entropies without (empty unless `want_entropy`).
    """
    logprobs, entropy = _ChunkedLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, vocab_size, group, temperature, want_entropy
    )
    return logprobs, entropy

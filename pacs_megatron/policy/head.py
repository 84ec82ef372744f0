"""Log-probabilities and entropies of given tokens from hidden states, with bounded memory at any
vocabulary.

The [chunk, v] logits exist for one chunk of positions at a time. The forward pass computes the
gradients if it knows the derivative of the loss; otherwise the backward pass computes the logits
again. The vocabulary is split over the tensor-parallel ranks; padded rows have probability 0.
Hidden states in fp32 and weights in bf16 give fp32 logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pacs_megatron.contracts.layout import logits_per_chunk

LossGradient = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(positions, log-probs [c], entropies [c]) -> derivatives of the loss by both, float32 [c]; None:
none by entropies
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The arguments that all chunks share."""

    weight: Tensor
    vocab_size: int
    group: dist.ProcessGroup
    temperature: float
    want_entropy: bool
    loss_gradient: LossGradient | None

    @property
    def vocab_start(self) -> int:
        return self.group.rank() * self.weight.shape[0]

    @property
    def num_valid(self) -> int:
        """True tokens among this rank's rows of the vocabulary; padding follows."""
        return max(0, min(self.weight.shape[0], self.vocab_size - self.vocab_start))

    def chunks(self, num_positions: int) -> list[slice]:
        """Slices of the positions.

        They depend on the device's total memory only: other chunks may change the bits.
        """
        device = self.weight.device
        total = (
            torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        )
        size = max(1, logits_per_chunk(total) // self.weight.shape[0])
        return [slice(start, start + size) for start in range(0, num_positions, size)]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [c, v / tp]"""
        if hidden.dtype == self.weight.dtype:
            logits = F.linear(hidden, self.weight).float()
        elif self.weight.is_cuda:
            # Splits fp32 hidden states into two bf16 summands, so the weights need no fp32 copy.
            high = hidden.to(self.weight.dtype)
            logits = _product(high, self.weight.t())
            _add_product(logits, (hidden - high).to(self.weight.dtype), self.weight.t())
        else:
            logits = F.linear(hidden, self.weight.float())
        if self.temperature != 1.0:
            logits = logits / self.temperature
        if self.num_valid < logits.shape[-1]:
            logits[:, self.num_valid :] = float("-inf")
        return logits

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(column of each target in this rank's logits, whether it is one of them)"""
        local = targets - self.vocab_start
        inside = (local >= 0) & (local < self.num_valid)
        return local.clamp(0, max(self.num_valid - 1, 0)), inside

    def reduce(self, tensor: Tensor, op: Any) -> None:
        if self.group.size() > 1:
            dist.all_reduce(tensor, op=op, group=self.group)

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(log-probs, log of the partition function, entropies), [c] each.

        With `loss_gradient` keeps `logits`.
        """
        top = logits.max(dim=-1).values
        self.reduce(top, dist.ReduceOp.MAX)
        logits = logits.sub_(top[:, None]) if self.loss_gradient is None else logits - top[:, None]
        local, inside = self.local_targets(targets)
        target_logit = logits.gather(1, local[:, None])[:, 0].masked_fill(~inside, 0.0)
        if self.want_entropy:
            weights = logits.exp()
            # exp(-inf) * -inf is nan: the sum of p * logit excludes padding.
            moment = logits.mul_(weights)[:, : self.num_valid].sum(-1)
            sums = torch.stack([weights.sum(-1), target_logit, moment])
        else:
            sums = torch.stack([logits.exp_().sum(-1), target_logit])
        self.reduce(sums, dist.ReduceOp.SUM)
        log_sum = sums[0].log()
        entropy = log_sum - sums[2] / sums[0] if self.want_entropy else None
        return sums[1] - log_sum, log_sum + top, entropy

    def gradient_of_logits(
        self,
        logits: Tensor,
        targets: Tensor,
        log_z: Tensor,
        upstream: Tensor,
        by_entropy: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Gradient [c, v / tp] in the weights' dtype; overwrites `logits`.

        `by_entropy`: (derivatives, entropies).
        """
        logits.sub_(log_z[:, None])
        slope = None
        if by_entropy is not None:
            # dH/dlogit = -p (log p + H). Skips padding, where p = 0 and log p = -inf.
            slope = logits[:, : self.num_valid] + by_entropy[1][:, None]
            slope *= (by_entropy[0] / self.temperature)[:, None]
        gradient = logits.exp_().neg_()
        if slope is not None:
            slope *= gradient[:, : self.num_valid]
        local, inside = self.local_targets(targets)
        gradient.scatter_add_(1, local[:, None], inside[:, None].to(gradient.dtype))
        gradient *= (upstream / self.temperature)[:, None]
        if slope is not None:
            gradient[:, : self.num_valid] += slope
        return gradient.to(self.weight.dtype)


class _Gradients:
    """Gradients of the hidden states and of the weights, filled chunk by chunk."""

    def __init__(self, head: _Head, hidden: Tensor) -> None:
        self._weight = head.weight
        self.of_hidden = torch.empty_like(hidden)
        # Several chunks accumulate in fp32, because bf16 loses small contributions.
        is_one_chunk = len(head.chunks(hidden.shape[0])) <= 1
        self.of_weight = torch.zeros_like(
            head.weight, dtype=head.weight.dtype if is_one_chunk else torch.float32
        )

    def add(self, positions: slice, hidden: Tensor, of_logits: Tensor) -> None:
        """One chunk: `hidden` [c, h] and the gradient of its logits."""
        product = torch.matmul if hidden.dtype == of_logits.dtype else _product
        self.of_hidden[positions] = product(of_logits, self._weight)
        _add_product(self.of_weight, of_logits.t(), hidden.to(of_logits.dtype))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in fp32.

    On CUDA bf16 factors accumulate and return fp32; on the CPU they are cast first.
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`; where `total` is fp32 the product accumulates into it."""
    if total.dtype != torch.float32:
        total += a @ b
    elif a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a.float() @ b.float()


class _ChunkedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        gradients = None if head.loss_gradient is None else _Gradients(head, hidden)
        logprobs = []
        log_z = []
        entropies = []
        for positions in head.chunks(hidden.shape[0]):
            logits = head.logits(hidden[positions])
            logprob, chunk_log_z, entropy = head.statistics(logits, targets[positions])
            if gradients is not None and head.loss_gradient is not None:
                upstream, of_entropy = head.loss_gradient(positions, logprob, entropy)
                by_entropy = (
                    None if of_entropy is None or entropy is None else (of_entropy, entropy)
                )
                of_logits = head.gradient_of_logits(
                    logits, targets[positions], chunk_log_z, upstream, by_entropy
                )
                gradients.add(positions, hidden[positions], of_logits)
            logprobs.append(logprob)
            log_z.append(chunk_log_z)
            if entropy is not None:
                entropies.append(entropy)
        joined = _join(logprobs, hidden)
        all_entropies = _join(entropies, hidden)
        ctx.head = head
        if gradients is None:
            ctx.save_for_backward(hidden, targets, _join(log_z, hidden), all_entropies.detach())
        else:
            ctx.save_for_backward(gradients.of_hidden, gradients.of_weight.to(weight.dtype))
        ctx.set_materialize_grads(False)  # None if the loss does not use the entropies
        if gradients is not None or not head.want_entropy:
            ctx.mark_non_differentiable(all_entropies)
        return joined, all_entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        head: _Head = ctx.head
        if head.loss_gradient is not None:
            return *ctx.saved_tensors, None, None
        hidden, targets, log_z, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = grads
        assert of_logprobs is not None
        gradients = _Gradients(head, hidden)
        for positions in head.chunks(hidden.shape[0]):
            logits = head.logits(hidden[positions])
            by_entropy = (
                None if of_entropies is None else (of_entropies[positions], entropies[positions])
            )
            of_logits = head.gradient_of_logits(
                logits, targets[positions], log_z[positions], of_logprobs[positions], by_entropy
            )
            gradients.add(positions, hidden[positions], of_logits)
        return gradients.of_hidden, gradients.of_weight.to(head.weight.dtype), None, None


def _join(chunks: list[Tensor], like: Tensor) -> Tensor:
    """The chunks as one new tensor.

    Log-probs and entropies need separate tensors, also without rows: a shared one, marked as not
    differentiable, would skip the backward pass of a padding micro-batch, and peers would hang.
    """
    return torch.cat(chunks) if chunks else like.new_zeros(0, dtype=torch.float32)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    want_entropy: bool = False,
    loss_gradient: LossGradient | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies of the whole distributions, nats.

    Args:
        hidden: [t, hidden], final hidden states of the predicting positions, equal on all
            tensor-parallel ranks; its
            gradient is this rank's part (the caller's `copy_to_tensor_model_parallel_region` sums
            the parts).
        weight: [v / tp, hidden], this rank's rows of the output embedding, padded rows included.
        targets: int64 [t], token ids.
        vocab_size: true size; columns from it on are padding.
        group: tensor-parallel group.
        loss_gradient: the derivative of the loss, where a token's derivative depends on no other
            token's log-prob.
            Gradients are then computed in the forward pass; the backward pass ignores its input,
            this derivative.

    Returns:
        float32 [t] log-probs and float32 [t] entropies (empty unless `want_entropy`), both with
        gradient.
    """
    head = _Head(
        weight=weight.detach(),
        vocab_size=vocab_size,
        group=group,
        temperature=temperature,
        want_entropy=want_entropy,
        loss_gradient=loss_gradient,
    )
    logprobs, entropy = _ChunkedLogProb.apply(hidden, weight, targets, head)  # type: ignore[no-untyped-call]
    return logprobs, entropy

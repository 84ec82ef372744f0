"""Log-probs and entropies of given tokens, with bounded memory at any size of the vocabulary.

The [c, v / tp] logits exist for one chunk of c positions at a time. The forward pass computes the
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
"""Derivatives of the loss for one chunk of c positions.

Args:
    positions: the chunk, a slice of the t positions.
    logprobs: [c], fp32, nats.
    entropies: [c], fp32, nats; None unless the head computes entropies.

Returns:
    [c], fp32, derivative of the loss by each log-prob.
    [c], fp32, derivative of the loss by each entropy; None if the loss does not depend on them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The arguments that all chunks share, and the computation of one chunk."""

    weight: Tensor
    """[v / tp, hidden], this rank's rows of the output embedding, padded rows included"""
    vocab_size: int
    """size of the vocabulary without padding"""
    group: dist.ProcessGroup
    """tensor-parallel group"""
    temperature: float
    want_entropy: bool
    loss_gradient: LossGradient | None
    trains_weight: bool = False
    """whether the weight needs a gradient"""
    want_certainty: bool = False

    @property
    def vocab_start(self) -> int:
        """The token id of this rank's first row."""
        return self.group.rank() * self.weight.shape[0]

    @property
    def num_valid(self) -> int:
        """Number of this rank's rows that belong to a token; padded rows follow."""
        remaining = self.vocab_size - self.vocab_start
        return max(0, min(self.weight.shape[0], remaining))

    def chunks(self, num_positions: int) -> list[slice]:
        """Slices that cover the positions.

        Their size follows from the device's total memory and this rank's number of rows. It does
        not follow free memory, because another size may change the bits of the result.
        """
        total_bytes = None
        if self.weight.device.type == "cuda":
            total_bytes = torch.cuda.get_device_properties(self.weight.device).total_memory
        size = max(1, logits_per_chunk(total_bytes) // self.weight.shape[0])
        return [slice(start, start + size) for start in range(0, num_positions, size)]

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits, divided by the temperature; -inf for padded rows.

        Args:
            hidden: [c, hidden], in the dtype of the weights or fp32.

        Returns:
            [c, v / tp], a new tensor, fp32, or in the dtype of the weights if the product has it.
        """
        if hidden.dtype == self.weight.dtype:
            logits = F.linear(hidden, self.weight)
        elif self.weight.is_cuda:
            # Splits fp32 hidden states into two bf16 summands, so the weights need no fp32 copy.
            high = hidden.to(self.weight.dtype)
            low = (hidden - high).to(self.weight.dtype)
            logits = _product(high, self.weight.t())
            _add_product(logits, low, self.weight.t())
        else:
            logits = F.linear(hidden, self.weight.float())

        if self.temperature != 1.0:
            logits = logits.float() / self.temperature
        if self.num_valid < logits.shape[-1]:
            logits[:, self.num_valid :] = float("-inf")
        return logits

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets as columns of this rank's logits.

        Args:
            targets: [c], int64, token ids.

        Returns:
            [c], int64, the column of each target; another column if another rank has the target.
            [c], bool, whether this rank has the target.
        """
        local = targets - self.vocab_start
        inside = (local >= 0) & (local < self.num_valid)
        columns = local.clamp(0, max(self.num_valid - 1, 0))
        return columns, inside

    def reduce(self, tensor: Tensor, op: Any) -> None:
        """Reduces `tensor` in place over the tensor-parallel ranks."""
        if self.group.size() > 1:
            dist.all_reduce(tensor, op=op, group=self.group)

    def statistics(
        self, logits: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Log-probs and entropies of one chunk. Collective over the tensor-parallel ranks.

        With z the logits minus their maximum and Z = sum exp z: log p = z_target - log Z,
        H = log Z - sum (z exp z) / Z, and the certainty log Z - mean z.

        Args:
            logits: [c, v / tp], of `logits`. Overwritten unless there is a `loss_gradient`, for
                which the forward pass needs them again.
            targets: [c], int64, token ids.

        Returns:
            [c], fp32, log-probs, nats.
            [c], fp32, log of the partition function of the unshifted logits, nats.
            [c], fp32, entropies, nats; None unless `want_entropy`.
            [c], fp32, certainties, nats; None unless `want_certainty`.
        """
        top = logits.max(dim=-1).values.float()
        self.reduce(top, dist.ReduceOp.MAX)
        logits = _minus(logits, top, overwrite=self.loss_gradient is None)

        columns, inside = self.local_targets(targets)
        target_logit = logits.gather(1, columns[:, None])[:, 0].masked_fill(~inside, 0.0)

        # One reduction for all sums.
        of_logits = []
        if self.want_certainty:
            of_logits = [logits[:, : self.num_valid].sum(-1)]
        if self.want_entropy:
            weights = logits.exp()
            # exp(-inf) * -inf is nan: the sum of p * logit excludes padding.
            moment = logits.mul_(weights)[:, : self.num_valid].sum(-1)
            sums = torch.stack([weights.sum(-1), target_logit, moment, *of_logits])
        else:
            sums = torch.stack([logits.exp_().sum(-1), target_logit, *of_logits])
        self.reduce(sums, dist.ReduceOp.SUM)

        log_sum = sums[0].log()
        entropy = None
        if self.want_entropy:
            entropy = log_sum - sums[2] / sums[0]
        certainty = None
        if self.want_certainty:
            certainty = log_sum - sums[-1] / self.vocab_size
        return sums[1] - log_sum, log_sum + top, entropy, certainty

    def gradient_of_logits(
        self,
        logits: Tensor,
        targets: Tensor,
        log_z: Tensor,
        upstream: Tensor,
        by_entropy: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The gradient of the loss by the logits before the temperature.

        With p the softmax and T the temperature: (upstream * (1[target] - p) + dL/dH * dH/dz) / T,
        where dH/dz = -p (log p + H).

        Args:
            logits: [c, v / tp], of `logits`; overwritten.
            targets: [c], int64, token ids.
            log_z: [c], fp32, log of the partition function.
            upstream: [c], fp32, derivative of the loss by each log-prob.
            by_entropy: derivatives of the loss by the entropies and the entropies, [c], fp32 each;
                None if the loss does not depend on the entropies.

        Returns:
            [c, v / tp], in the dtype of the weights.
        """
        log_p = _minus(logits, log_z, overwrite=True)

        slope = None
        if by_entropy is not None:
            of_entropy, entropy = by_entropy
            # Skips padding, where p = 0 and log p = -inf.
            slope = log_p[:, : self.num_valid] + entropy[:, None]
            slope *= (of_entropy / self.temperature)[:, None]

        probabilities = log_p.exp_()
        if slope is not None:
            slope *= probabilities[:, : self.num_valid]

        # The gradient is -(p - 1[target]) * upstream / T, minus the slope. Each pass over a chunk
        # costs time, so the factor has the sign, and the product the dtype of the result.
        columns, inside = self.local_targets(targets)
        probabilities.scatter_add_(1, columns[:, None], -inside[:, None].to(probabilities.dtype))
        factor = (-upstream / self.temperature)[:, None]
        if slope is None and self.weight.dtype != torch.float32:
            out = torch.empty_like(probabilities, dtype=self.weight.dtype)
            return torch.mul(probabilities, factor, out=out)

        gradient = probabilities.mul_(factor)
        if slope is not None:
            gradient[:, : self.num_valid] -= slope
        return gradient.to(self.weight.dtype)


def _minus(logits: Tensor, column: Tensor, *, overwrite: bool) -> Tensor:
    """`logits` minus a value for each row, in fp32.

    Args:
        logits: [c, v / tp], fp32 or bf16.
        column: [c], fp32.
        overwrite: writes fp32 logits in place.

    Returns:
        [c, v / tp], fp32.
    """
    if overwrite and logits.dtype == torch.float32:
        return logits.sub_(column[:, None])
    return logits - column[:, None]


class _Gradients:
    """Gradients of the hidden states and of the weights, filled chunk by chunk.

    `of_hidden` is [t, hidden] in the dtype of the hidden states, `of_weight` [v / tp, hidden].
    """

    def __init__(self, head: _Head, hidden: Tensor) -> None:
        self._weight = head.weight
        self.of_hidden = torch.empty_like(hidden)

        # Several chunks accumulate in fp32, because bf16 loses small contributions.
        is_one_chunk = len(head.chunks(hidden.shape[0])) <= 1
        dtype = head.weight.dtype if is_one_chunk else torch.float32
        self.of_weight: Tensor | None = None
        """None for a frozen weight"""
        if head.trains_weight:
            self.of_weight = torch.zeros_like(head.weight, dtype=dtype)

    def add(self, positions: slice, hidden: Tensor, of_logits: Tensor) -> None:
        """Adds one chunk.

        Args:
            positions: of the chunk.
            hidden: [c, hidden], hidden states of the chunk.
            of_logits: [c, v / tp], gradient of its logits, in the dtype of the weights.
        """
        product = torch.matmul if hidden.dtype == of_logits.dtype else _product
        self.of_hidden[positions] = product(of_logits, self._weight)
        if self.of_weight is not None:
            _add_product(self.of_weight, of_logits.t(), hidden.to(of_logits.dtype))

    def of_weight_as(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient of the weights in `dtype`; None for frozen ones."""
        return None if self.of_weight is None else self.of_weight.to(dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in fp32.

    On CUDA bf16 factors accumulate and return fp32; on the CPU they are cast first.
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`; if `total` is fp32, the product accumulates into it."""
    if total.dtype != torch.float32:
        total += a @ b
    elif a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a.float() @ b.float()


def _forward_chunk(
    head: _Head,
    positions: slice,
    hidden: Tensor,
    targets: Tensor,
    gradients: _Gradients | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, log-partition and entropies of one chunk; its gradients too, if they are known.

    A function of its own, so that a chunk's logits are freed before the next chunk has its own.
    """
    logits = head.logits(hidden)
    logprob, log_z, entropy, _ = head.statistics(logits, targets)
    if gradients is not None and head.loss_gradient is not None:
        upstream, of_entropy = head.loss_gradient(positions, logprob, entropy)
        by_entropy = None
        if of_entropy is not None and entropy is not None:
            by_entropy = (of_entropy, entropy)
        of_logits = head.gradient_of_logits(logits, targets, log_z, upstream, by_entropy)
        gradients.add(positions, hidden, of_logits)
    return logprob, log_z, entropy


def _backward_chunk(  # noqa: PLR0913  (what the forward pass saved)
    head: _Head,
    positions: slice,
    hidden: Tensor,
    targets: Tensor,
    log_z: Tensor,
    of_logprobs: Tensor,
    by_entropy: tuple[Tensor, Tensor] | None,
    gradients: _Gradients,
) -> None:
    """Adds one chunk's gradients. A function of its own, as `_forward_chunk` is."""
    logits = head.logits(hidden)
    of_logits = head.gradient_of_logits(logits, targets, log_z, of_logprobs, by_entropy)
    gradients.add(positions, hidden, of_logits)


class _ChunkedLogProb(torch.autograd.Function):
    """`token_logprobs` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: _Head,
    ) -> tuple[Tensor, Tensor]:
        gradients = None
        if head.loss_gradient is not None:
            gradients = _Gradients(head, hidden)

        logprobs = []
        log_z = []
        entropies = []
        for positions in head.chunks(hidden.shape[0]):
            logprob, chunk_log_z, entropy = _forward_chunk(
                head, positions, hidden[positions], targets[positions], gradients
            )
            logprobs.append(logprob)
            log_z.append(chunk_log_z)
            if entropy is not None:
                entropies.append(entropy)

        all_logprobs = _join(logprobs, hidden)
        all_entropies = _join(entropies, hidden)

        ctx.head = head
        if gradients is None:
            ctx.save_for_backward(hidden, targets, _join(log_z, hidden), all_entropies.detach())
        else:
            ctx.save_for_backward(gradients.of_hidden, gradients.of_weight_as(weight.dtype))
        # The backward pass gets None, not zeros, if the loss does not use the entropies.
        ctx.set_materialize_grads(False)
        if gradients is not None or not head.want_entropy:
            ctx.mark_non_differentiable(all_entropies)
        return all_logprobs, all_entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        head: _Head = ctx.head
        if head.loss_gradient is not None:
            of_hidden, of_weight = ctx.saved_tensors
            return of_hidden, of_weight, None, None

        hidden, targets, log_z, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = grads
        assert of_logprobs is not None

        gradients = _Gradients(head, hidden)
        for positions in head.chunks(hidden.shape[0]):
            by_entropy = None
            if of_entropies is not None:
                by_entropy = (of_entropies[positions], entropies[positions])
            _backward_chunk(
                head,
                positions,
                hidden[positions],
                targets[positions],
                log_z[positions],
                of_logprobs[positions],
                by_entropy,
                gradients,
            )
        return gradients.of_hidden, gradients.of_weight_as(head.weight.dtype), None, None


def _join(chunks: list[Tensor], like: Tensor) -> Tensor:
    """The chunks as one new tensor.

    Log-probs and entropies need separate tensors, also without rows: a shared one, marked as not
    differentiable, would skip the backward pass of a padding micro-batch, and peers would hang.
    """
    if not chunks:
        return like.new_zeros(0, dtype=torch.float32)
    return torch.cat(chunks)


def token_logprobs(  # noqa: PLR0913
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
    """Log-probs of `targets` and entropies of the whole distributions.

    Collective over the tensor-parallel ranks, in the forward pass.

    Args:
        hidden: [t, hidden], final hidden states of the predicting positions, in the dtype of
            `weight` or fp32, equal on all tensor-parallel ranks. Its gradient is this rank's part;
            the caller's `copy_to_tensor_model_parallel_region` sums the parts.
        weight: [v / tp, hidden], this rank's rows of the output embedding, padded rows included.
        targets: [t], int64, token ids.
        vocab_size: size of the vocabulary; rows from it on are padding.
        group: tensor-parallel group.
        temperature: divides the logits.
        want_entropy: whether to compute the entropies.
        loss_gradient: the derivative of the loss, if a token's derivative depends on no other
            token's log-prob. The forward pass then computes the gradients, and the backward pass
            returns them and ignores its input, which is this derivative.

    Returns:
        [t], fp32, log-probs, nats, with gradient.
        [t], fp32, entropies, nats; [0] unless `want_entropy`. They have a gradient unless there is
        a `loss_gradient`, which covers them.
    """
    head = _Head(
        weight=weight.detach(),
        trains_weight=weight.requires_grad,
        vocab_size=vocab_size,
        group=group,
        temperature=temperature,
        want_entropy=want_entropy,
        loss_gradient=loss_gradient,
    )
    logprobs, entropies = _ChunkedLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, head
    )
    return logprobs, entropies


@torch.no_grad()
def token_certainties(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`token_logprobs` without gradient, with the certainties and the logits of `targets`.

    The logits are divided by the temperature. See `token_logprobs` for the arguments.

    Returns:
        [t], fp32, log-probs, nats.
        [t], fp32, entropies, nats; [0] unless `want_entropy`.
        [t], fp32, log sum_v exp z_v - mean_v z_v of the logits z, nats.
        [t], fp32, the logit of each target, nats.
    """
    head = _Head(
        weight=weight.detach(),
        vocab_size=vocab_size,
        group=group,
        temperature=temperature,
        want_entropy=want_entropy,
        loss_gradient=None,
        want_certainty=True,
    )
    logprobs = []
    entropies = []
    certainties = []
    target_logits = []
    for positions in head.chunks(hidden.shape[0]):
        logits = head.logits(hidden[positions])
        logprob, log_z, entropy, certainty = head.statistics(logits, targets[positions])
        del logits  # before the next chunk has its own
        logprobs.append(logprob)
        target_logits.append(logprob + log_z)
        if entropy is not None:
            entropies.append(entropy)
        if certainty is not None:
            certainties.append(certainty)
    columns = (logprobs, entropies, certainties, target_logits)
    joined = [_join(column, hidden) for column in columns]
    return joined[0], joined[1], joined[2], joined[3]

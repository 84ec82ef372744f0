"""Apex's kernels over lists of tensors, computed by torch."""

from collections import Counter

import torch
from torch import Tensor

CALLS: Counter[str] = Counter()
"""Calls of each kernel"""


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam (Kingma and Ba 2015, algorithm 1) in fp32 on lists of gradients, parameters and both
    moments.

    Args:
        chunk_size: unused here.
        noop_flag: unused here.
        tensor_lists: gradients, parameters, first and second moments.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root.
        step: from 1.
        mode: 1: decoupled decay (Loshchilov and Hutter 2019); 0: decay added to the gradient.
        bias_correction: 1: moments are divided by 1 - beta ** step.
        weight_decay: factor of the decay.
    """
    CALLS["multi_tensor_adam"] += 1
    correct1 = 1 - beta1**step if bias_correction else 1.0
    correct2 = 1 - beta2**step if bias_correction else 1.0
    for gradient, parameter, mean, square in zip(*tensor_lists, strict=True):
        g = gradient.float()
        p = parameter.float()
        if mode == 0:
            g = g + weight_decay * p
        mean.copy_(beta1 * mean + (1 - beta1) * g)
        square.copy_(beta2 * square + (1 - beta2) * g * g)
        update = (mean / correct1) / ((square / correct2).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * p
        parameter.copy_(p - lr * update)


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    per_parameter: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm over all tensors of the list, [1] fp32, and the norms of each."""
    CALLS["multi_tensor_l2norm"] += 1
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_parameter else norms[:0]


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    """The first list, scaled, into the second one."""
    CALLS["multi_tensor_scale"] += 1
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)

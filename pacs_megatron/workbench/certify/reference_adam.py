"""The optimizer of `certify`'s reference, written from docs/configuration.md.

It imports nothing of pacs_megatron.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Adam:
    """AdamW with decoupled decay of matrices only, clipping by the global norm, and the schedule.

    Args:
        parameters: by name; the optimizer reads their `grad`.
        options: the section `optimizer` of the configuration.
        clip: largest global norm of the gradient; 0 disables clipping.
        total: planned updates of the run.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], options: Mapping[str, Any], clip: float, total: int
    ) -> None:
        self.parameters = parameters
        self.options = options
        self.clip = clip
        self.total = total
        self.reset()

    def reset(self) -> None:
        """Sets the moments and the count of the bias correction to 0."""
        self.count = 0
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def norm(self) -> float:
        """The global norm of the gradient."""
        square = 0.0
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                square += float(parameter.grad.pow(2).sum())
        return math.sqrt(square)

    def clips(self, norm: float) -> bool:
        return 0 < self.clip < norm

    def rate(self, number: int) -> float:
        """Learning rate of the planned update `number`, from 1."""
        o = self.options
        peak = float(o["lr"])
        warmup = int(min(o["warmup_updates"], self.total - 1))
        if number <= warmup:
            return peak * number / warmup
        if o["schedule"] == "constant":
            return peak

        # The last update uses min_lr, unless min_lr is 0: a decay to 0 ends one update later.
        lowest = float(o["min_lr"])
        last = self.total + 1 if lowest == 0 else self.total
        done: float = (number - warmup) / (last - warmup)
        share = 1 - done if o["schedule"] == "linear" else (1 + math.cos(math.pi * done)) / 2
        return lowest + share * (peak - lowest)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update (arXiv:1412.6980, algorithm 1; decay of arXiv:1711.05101), with the clipped
        gradient.
        """
        o = self.options
        b1 = o["adam_beta1"]
        b2 = o["adam_beta2"]
        norm = self.norm()
        scale = self.clip / (norm + 1e-6) if self.clips(norm) else 1.0
        self.count += 1

        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                gradient = torch.zeros_like(parameter)
            else:
                gradient = parameter.grad * scale
            first = self.first[name].mul_(b1).add_(gradient, alpha=1 - b1)
            second = self.second[name].mul_(b2).add_(gradient * gradient, alpha=1 - b2)
            m = first / (1 - b1**self.count)
            v = second / (1 - b2**self.count)

            decay = o["weight_decay"] if parameter.ndim > 1 else 0.0
            parameter *= 1 - lr * decay
            parameter -= lr * m / (v.sqrt() + o["adam_eps"])

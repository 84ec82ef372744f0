"""The objectives as their papers write them: the reference of `certify` and of the tests.

These files import nothing else of pacs_megatron and share no arithmetic with it. Every objective is
one function of a whole mini-batch in float64, one sample after the other, and autograd
differentiates it: no coefficient, no closed form, no micro-batch, no rank. Options and what the
project adds to the papers are in docs/objective.md.
"""

from collections.abc import Callable

from torch import Tensor

from pacs_megatron.workbench.certify.formulas.batch import Batch, Metrics, Options, PerSample
from pacs_megatron.workbench.certify.formulas.critic import estimates, gae, value_loss, whitened
from pacs_megatron.workbench.certify.formulas.pacs import pacs, weighted_losses
from pacs_megatron.workbench.certify.formulas.policy_gradient import (
    policy_gradient,
    token_advantages,
)
from pacs_megatron.workbench.certify.formulas.real import real, real_bce
from pacs_megatron.workbench.certify.formulas.sft import sft
from pacs_megatron.workbench.certify.formulas.vimpo import implicit_advantages, vimpo

__all__ = [
    "OBJECTIVES",
    "Batch",
    "Metrics",
    "Options",
    "PerSample",
    "estimates",
    "gae",
    "implicit_advantages",
    "policy_gradient",
    "token_advantages",
    "value_loss",
    "weighted_losses",
    "whitened",
]

OBJECTIVES: dict[str, Callable[[Batch], tuple[Tensor, Metrics]]] = {
    "pacs": pacs,
    "grpo": policy_gradient,
    "dapo": policy_gradient,
    "dr_grpo": policy_gradient,
    "gspo": policy_gradient,
    "luspo": policy_gradient,
    "cispo": policy_gradient,
    "rloo": policy_gradient,
    "w_reinforce": policy_gradient,
    "maxrl": policy_gradient,
    "dgpo": policy_gradient,
    "distill": policy_gradient,
    "steer": policy_gradient,
    "ucas": policy_gradient,
    "reinforce_pp": policy_gradient,
    "ppo": policy_gradient,
    "vimpo": vimpo,
    "real": real,
    "real_bce": real_bce,
    "sft": sft,
}
"""Objective -> function of a mini-batch that returns (loss with graph, metrics)"""

"""Scores psi (6), class weights (3.5) and the sample loss (2) of PACS, each with its derivative.
float64 [m], any device.

Numbers in brackets are equations and sections of arXiv:2509.02522. These functions run between
forward and backward of a micro-batch, so they raise for no value and do not synchronise with the
host.
"""

from typing import Literal

from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.sample_table import SampleTable

ScoreName = Literal["rloo", "dr_grpo", "grpo", "naive"]
WeightingName = Literal["question", "only_positive", "only_negative", "none"]

SCORE_EPS = 1e-6
"""e of the `grpo` score, added to the standard deviation (the authors' value)."""


def group_scores(
    proxy: Tensor, table: SampleTable, score: ScoreName, std_floor: float | None
) -> Tensor:
    """psi (6) from the reward proxy r.

    `std_floor`: the `grpo` score divides by max(s, std_floor) + e. In a group below the floor the
    divisor is a constant.
    """
    centred = table.centred(proxy)
    match score:
        case "naive":
            return proxy
        case "dr_grpo":
            return centred
        case "rloo":
            return _leave_one_out(table) * centred
        case "grpo":
            return centred / _group_std(centred, table, std_floor)[0]


def proxy_gradient(
    residual: Tensor, proxy: Tensor, table: SampleTable, score: ScoreName, std_floor: float | None
) -> Tensor:
    """c_j = dL/dr_j from g_i = dL/dpsi_i: the transposed Jacobian of `group_scores` at the proxy r.

    Exactly 0 in a group whose g are all equal (except for `naive`): a group of one class with equal
    r.
    """
    match score:
        case "naive":
            return residual
        case "dr_grpo":
            return table.centred(residual)
        case "rloo":
            return _leave_one_out(table) * table.centred(residual)
        case "grpo":
            centred = table.centred(proxy)
            divisor, slope = _group_std(centred, table, std_floor)
            along = table.total(residual * centred) / (table.sizes - 1.0)
            through_std = centred * along[table.group_of_sample] * slope / divisor**2
            return table.centred(residual) / divisor - through_std


def class_weights(labels: Tensor, table: SampleTable, weighting: WeightingName) -> Tensor:
    """w (3.5), float64 [m].

    `question` gives each class half of a group's weight G. In a group of one class w is 1.
    """
    match weighting:
        case "none":
            return torch.ones_like(labels)
        case "only_positive":
            return labels.clone()
        case "only_negative":
            return 1.0 - labels
        case "question":
            positives = table.total(labels)[table.group_of_sample]
            sizes = table.sizes[table.group_of_sample]
            own_class = torch.where(labels == 1.0, positives, sizes - positives)
            return torch.where(own_class == sizes, 1.0, sizes / (2.0 * own_class))


def one_class(labels: Tensor, table: SampleTable) -> Tensor:
    """bool [g], groups whose labels are all equal."""
    positives = table.total(labels)
    return (positives == 0.0) | (positives == table.sizes)


def sample_loss(psi: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """BCE of sigmoid(psi) against the label (2), nats, and its derivative sigmoid(psi) - y.

    Both use the margin z = (1 - 2y) psi: loss = softplus(z), derivative = (1 - 2y) sigmoid(z). So
    neither overflows nor cancels, and both have full relative precision in both tails.
    """
    sign = 1.0 - 2.0 * labels
    margin = sign * psi
    decay = torch.exp(-margin.abs())
    loss = margin.clamp(min=0.0) + torch.log1p(decay)
    sigmoid = torch.where(margin >= 0.0, 1.0, decay) / (1.0 + decay)
    return loss, sign * sigmoid


def _leave_one_out(table: SampleTable) -> Tensor:
    """G / (G - 1) of each sample: r_i - mean of the others = G/(G-1) (r_i - mean of all)."""
    sizes = table.sizes
    return (sizes / (sizes - 1.0))[table.group_of_sample]


def _group_std(centred: Tensor, table: SampleTable, floor: float | None) -> tuple[Tensor, Tensor]:
    """(max(s, floor) + e, 1 / s if that depends on s, else 0) of each sample's group, [m] each."""
    std = table.std(centred)
    moves = std > (0.0 if floor is None else floor)
    divisor = (std if floor is None else std.clamp(min=floor)) + SCORE_EPS
    slope = torch.where(moves, 1.0 / torch.where(moves, std, 1.0), 0.0)
    return divisor[table.group_of_sample], slope[table.group_of_sample]

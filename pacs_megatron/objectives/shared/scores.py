"""Scores psi (6), class weights (3.5) and the sample loss (2) of PACS, each with its derivative.

Tensors are float64 [m] or [g], on any device. Numbers in brackets are equations and sections of
arXiv:2509.02522. These functions run between forward and backward of a micro-batch, so they raise
for no value and do not synchronise with the host.
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
    """The score psi (6).

    Args:
        proxy: [m], the reward proxy r (7).
        table: m samples in whole groups.
        score: the estimator that centres and scales the proxies of a group.
        std_floor: the `grpo` score divides by max(s, std_floor) + e. In a group below the floor
            the divisor is a constant.

    Returns:
        [m].
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
            divisor, _ = _group_std(centred, table, std_floor)
            return centred / divisor


def proxy_gradient(
    residual: Tensor, proxy: Tensor, table: SampleTable, score: ScoreName, std_floor: float | None
) -> Tensor:
    """c_j = dL/dr_j from g_i = dL/dpsi_i: the transposed Jacobian of `group_scores`.

    docs/objective.md has the formulas. Exactly 0 in a group whose g are all equal (except for
    `naive`): a group of one class with equal r.

    Args:
        residual: [m], g.
        proxy: [m], r, where the Jacobian is taken.
        table: m samples in whole groups.
        score: see `group_scores`.
        std_floor: see `group_scores`.

    Returns:
        [m], c.
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

            # ds/dr_j = (r_j - rbar) / ((G - 1) s); `slope` is 1 / s, or 0 where s is constant.
            along = table.total(residual * centred) / (table.sizes - 1.0)
            through_std = centred * along[table.group_of_sample] * slope / divisor**2
            return table.centred(residual) / divisor - through_std


def class_weights(labels: Tensor, table: SampleTable, weighting: WeightingName) -> Tensor:
    """The class weight w (3.5) of each sample.

    Args:
        labels: [m], in {0, 1}.
        table: m samples in whole groups.
        weighting: `question` gives each class half of a group's weight G. In a group of one class
            w is 1.

    Returns:
        [m].
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
            class_size = torch.where(labels == 1.0, positives, sizes - positives)
            return torch.where(class_size == sizes, 1.0, sizes / (2.0 * class_size))


def one_class(labels: Tensor, table: SampleTable) -> Tensor:
    """Which groups have labels that are all equal.

    Args:
        labels: [m], in {0, 1}.

    Returns:
        [g], bool.
    """
    positives = table.total(labels)
    return (positives == 0.0) | (positives == table.sizes)


def sample_loss(psi: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The binary cross-entropy of sigmoid(psi) against the label (2), and its derivative.

    Both use the margin z = (1 - 2y) psi: loss = softplus(z), derivative = (1 - 2y) sigmoid(z). So
    neither overflows nor cancels, and both have full relative precision in both tails.

    Args:
        psi: [m].
        labels: [m], y in {0, 1}.

    Returns:
        (loss in nats, its derivative sigmoid(psi) - y), [m] each.
    """
    sign = 1.0 - 2.0 * labels
    margin = sign * psi
    decay = torch.exp(-margin.abs())

    loss = margin.clamp(min=0.0) + torch.log1p(decay)
    sigmoid = torch.where(margin >= 0.0, 1.0, decay) / (1.0 + decay)
    return loss, sign * sigmoid


def _leave_one_out(table: SampleTable) -> Tensor:
    """G / (G - 1) of each sample, [m]: r_i - mean of the others = G/(G-1) (r_i - mean of all)."""
    sizes = table.sizes
    return (sizes / (sizes - 1.0))[table.group_of_sample]


def _group_std(centred: Tensor, table: SampleTable, floor: float | None) -> tuple[Tensor, Tensor]:
    """The divisor of the `grpo` score, and 1 / s for its derivative.

    Args:
        centred: [m], r - rbar.

    Returns:
        (max(s, floor) + e, 1 / s if the divisor depends on s, else 0) of each sample's group, [m]
        each.
    """
    std = table.std(centred)
    depends_on_std = std > (0.0 if floor is None else floor)
    divisor = (std if floor is None else std.clamp(min=floor)) + SCORE_EPS

    # 1 / s would be Inf in the branch that is not chosen.
    nonzero_std = torch.where(depends_on_std, std, 1.0)
    slope = torch.where(depends_on_std, 1.0 / nonzero_std, 0.0)
    return divisor[table.group_of_sample], slope[table.group_of_sample]

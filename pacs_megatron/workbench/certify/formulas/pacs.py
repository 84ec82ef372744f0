"""PACS (arXiv:2509.02522). Numbers in brackets are its equations and sections."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from pacs_megatron.workbench.certify.formulas.batch import (
    Batch,
    Metrics,
    Options,
    mean_and_count,
    zero,
)


def pacs(batch: Batch) -> tuple[Tensor, Metrics]:
    """(8): the mean over samples of w_i l_i, with the actor term of (5)."""
    o = batch.options
    psi, losses = weighted_losses(proxies(batch), batch.labels, batch.groups, o)
    importance = importance_weights(batch)
    if importance is not None:
        losses = losses * importance

    loss = losses.mean()
    if o["actor_term"] > 0:
        loss = loss + o["actor_term"] * actor_term(batch, losses.detach())
    return loss, metrics(batch, psi.detach(), importance)


def proxies(batch: Batch) -> Tensor:
    """The reward proxy r of each sample, [n]: (7), or `mean_log_prob` of the authors' code."""
    o = batch.options
    values = []
    for row, logprob in enumerate(batch.logprobs):
        if o["reward_proxy"] == "mean_log_prob":
            value = logprob.mean()
        elif o["reference"] == "frozen":
            value = (logprob - batch.frozen_logprobs[row]).sum()
        else:
            value = (logprob - batch.start_logprobs[row]).sum()
        values.append(o["beta"] * value)
    return torch.stack(values)


def weighted_losses(
    r: Tensor, labels: Tensor, groups: list[list[int]], o: Options
) -> tuple[Tensor, Tensor]:
    """The scores psi and the losses w_i l_i of all samples.

    l_i is the binary cross-entropy of sigmoid(psi_i) against y_i (2).

    Args:
        r: [n], the reward proxies.
        labels: [n], y.
        groups: the samples of each group.

    Returns:
        [n] each.
    """
    psi = torch.zeros_like(r)
    weight = torch.zeros_like(r)
    for rows in groups:
        psi[rows] = group_scores(r[rows], o["score"], o["score_std_floor"])
        weight[rows] = class_weights(labels[rows], o["weighting"])

    loss = binary_cross_entropy_with_logits(psi, labels, reduction="none")
    return psi, weight * loss


def group_scores(r: Tensor, score: str, std_floor: float | None) -> Tensor:
    """The score psi (6) of one group, [G]."""
    match score:
        case "rloo":
            psi = []
            for i in range(len(r)):
                others = torch.cat([r[:i], r[i + 1 :]])
                psi.append(r[i] - others.mean())
            return torch.stack(psi)
        case "dr_grpo":
            return r - r.mean()
        case "grpo":
            return (r - r.mean()) / (floored_std(r, std_floor or 0.0) + 1e-6)
        case _:
            return r


def floored_std(r: Tensor, floor: float) -> Tensor:
    """max(unbiased standard deviation, floor), a constant where the floor applies."""
    # Equal numbers have a deviation of exactly 0, also where their mean is rounded. Its derivative
    # would be NaN.
    is_equal = bool((r == r[0]).all())
    if is_equal or float(r.detach().std()) <= floor:
        return torch.tensor(floor, dtype=r.dtype)
    return r.std()


def class_weights(labels: Tensor, weighting: str) -> Tensor:
    """The weights w (3.5) of one group, [G]."""
    match weighting:
        case "only_positive":
            return labels.clone()
        case "only_negative":
            return 1.0 - labels
        case "none":
            return torch.ones_like(labels)

    size = len(labels)
    num_correct = int(labels.sum())
    if num_correct in (0, size):
        return torch.ones_like(labels)
    weight_of_correct = size / (2 * num_correct)
    weight_of_incorrect = size / (2 * (size - num_correct))
    return labels * weight_of_correct + (1.0 - labels) * weight_of_incorrect


def importance_weights(batch: Batch) -> Tensor | None:
    """min(exp(mean_t(log pi_step_start - log pi_sampler)), cap), [n] (docs/objective.md)."""
    cap = batch.options["importance_cap"]
    if cap is None:
        return None

    ratios = []
    for start, sampler in zip(batch.start_logprobs, batch.sampler_logprobs, strict=True):
        ratios.append((start - sampler).mean().exp())
    return torch.stack(ratios).clamp(max=cap)


def actor_term(batch: Batch, losses: Tensor) -> Tensor:
    """The score-function part of (5): the mean over samples of log pi_theta(o_i) times the losses
    that depend on o_i. Its value is 0, only its gradient counts.

    Args:
        losses: [n], w_i l_i, without graph.
    """
    total = zero()
    for rows in batch.groups:
        for row in rows:
            dependent = rows if batch.options["actor_scope"] == "group" else [row]
            logprob = batch.logprobs[row].sum()
            total = total + losses[dependent].sum() * (logprob - logprob.detach())
    return total / batch.size


def metrics(batch: Batch, psi: Tensor, importance: Tensor | None) -> Metrics:
    """The metrics of docs/objective.md."""
    y = batch.labels
    is_one_class = []
    for rows in batch.groups:
        is_one_class.append(bool((y[rows] == y[rows[0]]).all()))

    values = {
        "pacs/psi_mean_pos": mean_and_count(psi[y == 1]),
        "pacs/psi_mean_neg": mean_and_count(psi[y == 0]),
        "pacs/residual_mean": mean_and_count((psi.sigmoid() - y).abs()),
        "pacs/psi_over_8_frac": mean_and_count(psi.abs() > 8),
        "pacs/one_class_group_frac": mean_and_count(torch.tensor(is_one_class)),
    }
    if importance is not None:
        is_capped = importance >= batch.options["importance_cap"]
        values["pacs/importance_mean"] = mean_and_count(importance)
        values["pacs/importance_capped_frac"] = mean_and_count(is_capped)
    return values

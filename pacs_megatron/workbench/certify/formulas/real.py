"""REAL (arXiv:2602.05630) and its BCE variant, by the authors' code (docs/objective.md)."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from pacs_megatron.workbench.certify.formulas.batch import Batch, Metrics


def real(batch: Batch) -> tuple[Tensor, Metrics]:
    """The mean over all groups of the classification loss; a group of one class has none."""
    two_class_groups = groups_of_two_classes(batch)
    loss = zero_with_graph(batch)
    for rows in two_class_groups:
        loss = loss + group_loss(scaled_scores(batch, rows), batch.labels[rows])

    num_groups = len(batch.groups)
    return loss / num_groups, metrics(batch, len(two_class_groups))


def real_bce(batch: Batch) -> tuple[Tensor, Metrics]:
    """The mean over the samples of groups with both classes of the binary cross-entropy of
    sigmoid(s / tau) against y.
    """
    two_class_groups = groups_of_two_classes(batch)
    loss = zero_with_graph(batch)
    num_samples = 0
    for rows in two_class_groups:
        scores = scaled_scores(batch, rows)
        loss = loss + binary_cross_entropy_with_logits(scores, batch.labels[rows], reduction="sum")
        num_samples += len(rows)

    return loss / max(num_samples, 1), metrics(batch, len(two_class_groups))


def group_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """log(1 + sum over correct of exp(-s/tau)) + log(1 + sum over incorrect of exp(s/tau)).

    Args:
        scores: [G], s / tau.
        labels: [G], y.
    """
    correct = scores[labels == 1]
    incorrect = scores[labels == 0]
    return torch.log1p((-correct).exp().sum()) + torch.log1p(incorrect.exp().sum())


def scaled_scores(batch: Batch, rows: list[int]) -> Tensor:
    """s / tau of some samples, with s the mean over tokens of log pi_theta - log pi_step_start."""
    scores = []
    for row in rows:
        log_ratio = batch.logprobs[row] - batch.start_logprobs[row]
        scores.append(log_ratio.mean() / batch.options["tau"])
    return torch.stack(scores)


def groups_of_two_classes(batch: Batch) -> list[list[int]]:
    return [rows for rows in batch.groups if 0 < float(batch.labels[rows].mean()) < 1]


def zero_with_graph(batch: Batch) -> Tensor:
    """0, with a derivative of 0, for a mini-batch whose groups all have one class."""
    return 0.0 * torch.cat(batch.logprobs).sum()


def metrics(batch: Batch, num_two_class_groups: int) -> Metrics:
    """The metrics of docs/objective.md."""
    num_groups = len(batch.groups)
    share = 1 - num_two_class_groups / num_groups
    return {f"{batch.options['name']}/one_class_group_frac": (share, float(num_groups))}

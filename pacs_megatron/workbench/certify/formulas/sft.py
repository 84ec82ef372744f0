"""Supervised fine-tuning."""

import torch
from torch import Tensor

from pacs_megatron.workbench.certify.formulas.batch import Batch, Metrics


def sft(batch: Batch) -> tuple[Tensor, Metrics]:
    """The mean negative log-likelihood over tokens, or the mean of each response's mean."""
    if batch.options["loss_mean"] == "token":
        return -torch.cat(batch.logprobs).mean(), {}

    means = [logprob.mean() for logprob in batch.logprobs]
    return -torch.stack(means).mean(), {}

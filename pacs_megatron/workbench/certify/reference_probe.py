"""The objective alone at drawn log-probs, which a tiny run does not reach: ratios beyond every
limit, mini-batches of one class, groups of one class, equal rewards.

With the formulas it imports nothing of pacs_megatron.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.workbench.certify.formulas import (
    OBJECTIVES,
    Batch,
    Options,
    PerSample,
    value_loss,
)

NUM_GROUPS = 7
MAX_LENGTH = 9
"""tokens of a response"""
SMALL_STEP = 0.05
"""nats, standard deviation of a token's log-ratio"""
LARGE_STEP = 27.0
"""nats, above every limit of a log-ratio"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One mini-batch, which is a whole rollout batch too. [n] samples, [t] tokens one after the
    other; log-probs and entropies are float64, nats.
    """

    name: str
    index: int
    """number of the update in its step: at 0 the policy is that of the step's start"""
    groups: np.ndarray
    """int64 [n]"""
    labels: np.ndarray
    """float64 [n], in {0, 1}"""
    rewards: np.ndarray
    """float64 [n]"""
    lens: np.ndarray
    """int64 [n]"""
    logprobs: np.ndarray
    """[t], of the policy"""
    starts: np.ndarray
    """[t], of the step's start"""
    references: np.ndarray
    """[t], of the frozen reference"""
    samplers: np.ndarray
    """[t], of the rollout engine"""
    entropies: np.ndarray
    """[t]"""
    advantages: np.ndarray
    """[t], of a critic"""
    returns: np.ndarray
    """[t], of a critic; UCAS has them for logits, and entropies for certainties"""

    def split(self, values: np.ndarray) -> PerSample:
        """`values` [t] as one tensor [response] for each sample."""
        ends = np.cumsum(self.lens)[:-1]
        return [torch.from_numpy(part.copy()) for part in np.split(values, ends)]


def probes(options: Options, num_updates: int, seed: int) -> Iterator[Probe]:
    """The mini-batches of a certificate.

    Args:
        options: of the objective.
        num_updates: updates of a step; the second one has ratios that are not 1.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    # In a reward exp(20) would leave no digits to the other samples of its group.
    has_far_reference = options.get("kl_in") != "reward"
    for index in range(min(num_updates, 2)):
        for kind in ("near", "far"):
            for labels in ("drawn", "correct", "incorrect"):
                yield draw(
                    rng,
                    index=index,
                    kind=kind,
                    labels=labels,
                    has_far_reference=has_far_reference,
                )


def draw(
    rng: np.random.Generator,
    *,
    index: int,
    kind: str,
    labels: str,
    has_far_reference: bool = True,
) -> Probe:
    """A mini-batch of uneven groups; two of them have one class, one has equal rewards.

    Args:
        rng: its generator.
        index: number of the update in its step.
        kind: `near`: log-ratios of a usual update; `far`: some are beyond every limit.
        labels: `drawn`, or all samples are `correct` or `incorrect`.
        has_far_reference: whether the frozen reference is far away too; False: it is near the
            step's start.
    """
    sizes = rng.integers(2, 6, NUM_GROUPS)
    groups = np.repeat(np.arange(NUM_GROUPS), sizes)
    num_samples = len(groups)
    label = rng.integers(0, 2, num_samples).astype(np.float64)
    label[groups == 0] = 1.0
    label[groups == 1] = 0.0
    if labels != "drawn":
        label[:] = float(labels == "correct")

    # Not negative: an objective may divide by their mean.
    rewards = np.abs(label + rng.normal(0, 0.1, num_samples))
    rewards[groups == NUM_GROUPS - 1] = 0.5
    lens = rng.integers(1, MAX_LENGTH + 1, num_samples)
    num_tokens = int(lens.sum())
    is_far = kind == "far"

    logprobs = -rng.exponential(1.0, num_tokens)
    moved = _log_ratios(rng, lens, is_far=is_far) if index else np.zeros(num_tokens)
    starts = logprobs - moved
    # The KL of a reward is that of the start, the KL of a loss that of the policy.
    if has_far_reference:
        references = logprobs + _log_ratios(rng, lens, is_far=is_far)
    else:
        references = starts + _log_ratios(rng, lens, is_far=False)
    return Probe(
        name=f"update {index + 1}, {kind}, labels {labels}",
        index=index,
        groups=groups,
        labels=label,
        rewards=rewards,
        lens=lens,
        logprobs=logprobs,
        starts=starts,
        references=references,
        samplers=starts - 8 * _log_ratios(rng, lens, is_far=False),
        entropies=rng.exponential(1.0, num_tokens),
        advantages=rng.normal(0, 1.0, num_tokens),
        returns=rng.normal(0, 1.0, num_tokens),
    )


def _log_ratios(rng: np.random.Generator, lens: np.ndarray, *, is_far: bool) -> np.ndarray:
    """[t]; with `is_far` a sample's tokens are all near 0, one token is far away, the sum is, or
    every token is, in either direction.
    """
    of_samples = []
    for length in lens:
        ratios = rng.normal(0, SMALL_STEP, length)
        shape = rng.integers(0, 7) if is_far else 0
        sign = 1.0 if shape % 2 else -1.0
        if shape in (1, 2):
            ratios[rng.integers(0, length)] += sign * LARGE_STEP
        elif shape in (3, 4):
            ratios += sign * LARGE_STEP / length
        elif shape in (5, 6):
            ratios += sign * LARGE_STEP
        of_samples.append(ratios)
    return np.concatenate(of_samples)


def expected(options: Options, probe: Probe) -> dict[str, np.ndarray]:
    """The loss of the formulas, and its derivatives.

    Returns:
        `loss` [1], `by_logprob` [t], `by_entropy` [t]; of PPO `value_loss` [1] and `by_value` [t]
        too, with the policy's log-probs for values.
    """
    batch = _batch(options, probe)
    loss, _ = OBJECTIVES[options["name"]](batch)
    torch.autograd.backward(loss)
    arrays = {
        "loss": loss.detach().reshape(1).numpy(),
        "by_logprob": _derivatives(batch.logprobs),
        "by_entropy": _derivatives(batch.entropies),
    }
    if options["name"] != "ppo":
        return arrays

    values = _leaves(probe.split(probe.logprobs))
    of_critic, _ = value_loss(
        options, values, probe.split(probe.starts), probe.split(probe.returns)
    )
    torch.autograd.backward(of_critic)
    return arrays | {
        "value_loss": of_critic.detach().reshape(1).numpy(),
        "by_value": _derivatives(values),
    }


def by_place(probe: Probe, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """ "<probe>, <quantity>" -> a loss; "<probe>, <quantity>, sample <row>" -> [response]."""
    ends = np.cumsum(probe.lens)[:-1]
    places = {}
    for name, values in arrays.items():
        if not name.startswith("by_"):
            places[f"{probe.name}, {name}"] = values
            continue
        for row, part in enumerate(np.split(values, ends)):
            places[f"{probe.name}, {name}, sample {row}"] = part
    return places


def _batch(options: Mapping[str, Any], probe: Probe) -> Batch:
    groups = [np.flatnonzero(probe.groups == group).tolist() for group in np.unique(probe.groups)]
    has_estimates = options["name"] in ("ppo", "vimpo")
    return Batch(
        options=options,
        groups=groups,
        labels=torch.from_numpy(probe.labels),
        rewards=torch.from_numpy(probe.rewards),
        logprobs=_leaves(probe.split(probe.logprobs)),
        start_logprobs=probe.split(probe.starts),
        frozen_logprobs=probe.split(probe.references),
        sampler_logprobs=probe.split(probe.samplers),
        entropies=_leaves(probe.split(probe.entropies)),
        certainties=probe.split(probe.entropies),
        logits=probe.split(probe.returns),
        rows=list(range(len(probe.lens))),
        advantages=probe.split(probe.advantages) if has_estimates else None,
    )


def _leaves(values: PerSample) -> PerSample:
    return [value.requires_grad_() for value in values]


def _derivatives(leaves: PerSample) -> np.ndarray:
    """[t]; 0 where the loss does not read a tensor."""
    parts: list[Tensor] = []
    for leaf in leaves:
        parts.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    return torch.cat(parts).detach().numpy()

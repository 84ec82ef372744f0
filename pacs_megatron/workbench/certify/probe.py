"""The product's objective on the mini-batches of `reference_probe`, as the engine evaluates it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacs_megatron.contracts import SampleFacts, TokenRecord
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.objectives.shared.base import CommonOptions, Objective, at_tokens
from pacs_megatron.workbench.certify.reference_probe import Probe, by_place, expected, probes
from pacs_megatron.workbench.certify.shrink import Case


def write_probes(case: Case, folder: Path, seed: int) -> None:
    """Writes `probes.npz` of the product and of the reference: "<probe>, <place>" -> array, a loss
    or the derivatives of one sample.
    """
    options = case.config.objective
    num_updates = case.config.batch.num_updates
    of_product: dict[str, Any] = {}
    of_reference: dict[str, Any] = {}
    plain_options = options.model_dump(mode="json")
    for probe in probes(plain_options, num_updates, seed):
        of_product |= by_place(probe, evaluate(options, num_updates, probe))
        of_reference |= by_place(probe, expected(plain_options, probe))

    np.savez(folder / "product" / "probes.npz", **of_product)
    np.savez(folder / "probes.npz", **of_reference)


def evaluate(options: CommonOptions, num_updates: int, probe: Probe) -> dict[str, np.ndarray]:
    """The quantities of `reference_probe.expected`, from the objective of `options`."""
    objective = build_objective(options, updates_per_step=num_updates)
    facts = _facts(objective, probe)
    logprobs = torch.from_numpy(probe.logprobs).requires_grad_()
    entropies = torch.from_numpy(probe.entropies).requires_grad_()
    record = _record(probe, logprobs, entropies)

    statistics = objective.statistics(probe.index)
    scores = None
    if "score" in statistics:
        detached = replace(record, logprobs=logprobs.detach())
        values = objective.token_scores(detached)
        scores = _by_sample(probe, values)
        if objective.score_is_maximum:
            sizes = probe.lens.tolist()
            scores = torch.stack([part.max() for part in torch.split(values, sizes)])
    prepared = objective.prepare(scores, facts, objective.prepare_step(facts))

    mask = torch.ones(len(probe.logprobs))
    has_no_pass = not statistics and "step_start" not in objective.logprob_passes(probe.index)
    if has_no_pass and prepared.zero_gradient is not None:
        # The engine skips these samples.
        mask = 1.0 - at_tokens(prepared.zero_gradient.double(), record)
    surrogate = (objective.token_loss(record, prepared) * mask).sum()
    surrogate.backward()  # type: ignore[no-untyped-call]

    loss = float(surrogate.detach()) if prepared.loss is None else prepared.loss
    found = {
        "loss": np.array([loss]),
        "by_logprob": _derivative(logprobs),
        "by_entropy": _derivative(entropies),
    }
    if objective.critic is not None:
        found |= _of_critic(objective.critic, facts, probe)
    return found


def _facts(objective: Objective, probe: Probe) -> SampleFacts:
    """The facts, with the statistics that the engine adds for the objective."""
    num_samples = len(probe.lens)
    facts = SampleFacts(
        ids=tuple(f"1:probe/{row}#{row}" for row in range(num_samples)),
        groups=probe.groups,
        labels=probe.labels,
        rewards=probe.rewards,
        prompt_lens=np.ones(num_samples, dtype=np.int64),
        response_lens=probe.lens,
        environment_lens=np.zeros(num_samples, dtype=np.int64),
        truncated=np.zeros(num_samples, dtype=np.bool_),
        advantage_abs=_by_sample(probe, torch.from_numpy(probe.advantages).abs()).numpy(),
        certainty=_by_sample(probe, torch.from_numpy(probe.entropies)).numpy(),
        logit_min=np.array([float(part.min()) for part in probe.split(probe.returns)]),
        logit_max=np.array([float(part.max()) for part in probe.split(probe.returns)]),
    )
    if objective.kl_in_reward:
        pairs = zip(probe.split(probe.starts), probe.split(probe.references), strict=True)
        kls = [objective.sample_kl(start.numpy(), other.numpy()) for start, other in pairs]
        facts = replace(facts, kl_to_reference=np.array(kls))
    if "sampler_ratio" in objective.statistics(probe.index):
        log_ratios = torch.from_numpy(probe.starts - probe.samplers)
        means = _by_sample(probe, log_ratios).numpy() / probe.lens
        facts = replace(facts, log_ratio_to_sampler=means)
    return facts


def _record(probe: Probe, logprobs: Tensor, entropies: Tensor | None) -> TokenRecord:
    return TokenRecord(
        logprobs=logprobs,
        mask=torch.ones_like(logprobs, requires_grad=False),
        sample_of_token=torch.repeat_interleave(torch.from_numpy(probe.lens)),
        response_lens=torch.from_numpy(probe.lens),
        step_start_logprobs=torch.from_numpy(probe.starts),
        reference_logprobs=torch.from_numpy(probe.references),
        sampler_logprobs=torch.from_numpy(probe.samplers),
        entropy=entropies,
        estimates=_estimates(probe),
    )


def _estimates(probe: Probe) -> Mapping[str, Tensor]:
    """Of a critic whose values at the step's start are `starts`."""
    return {
        "advantage": torch.from_numpy(probe.advantages),
        "return": torch.from_numpy(probe.returns),
        "value": torch.from_numpy(probe.starts),
        "logit": torch.from_numpy(probe.returns),
    }


def _of_critic(critic: Objective, facts: SampleFacts, probe: Probe) -> dict[str, np.ndarray]:
    values = torch.from_numpy(probe.logprobs).requires_grad_()
    prepared = critic.prepare(None, facts, {})
    loss = critic.token_loss(_record(probe, values, None), prepared).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return {"value_loss": np.array([float(loss.detach())]), "by_value": _derivative(values)}


def _by_sample(probe: Probe, values: Tensor) -> Tensor:
    """[n], sums of `values` [t]."""
    sample_of_token = torch.repeat_interleave(torch.from_numpy(probe.lens))
    zeros = torch.zeros(len(probe.lens), dtype=values.dtype)
    return zeros.index_add(0, sample_of_token, values)


def _derivative(leaf: Tensor) -> np.ndarray:
    return np.zeros(len(leaf)) if leaf.grad is None else leaf.grad.numpy()

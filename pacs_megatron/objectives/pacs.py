"""PACS (arXiv:2509.02522): supervised learning of verifiable outcomes with the policy as its own critic.

docs/objective.md has the formulas. L couples the siblings of a group, but depends on the model through one number per
sample, the reward proxy r_j. So `prepare` differentiates L with respect to every r_j, and `token_loss` is the plain sum
of coefficient times log-prob: its gradient is dL/dtheta for any split of the mini-batch.
"""

from typing import Any

import numpy as np
import torch

from pacs_megatron.config.objective_options import PacsOptions
from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.protocols import LogprobSource
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.groups import FloatArray, Groups, build_groups, canonical_order
from pacs_megatron.objectives.lookup import at_tokens, to_tensor
from pacs_megatron.objectives.scores import class_weights, group_scores, one_class, proxy_gradient, sample_loss

SATURATED_SCORE = 8.0
"""Above it sigmoid(psi) is within 4e-4 of 0 or 1: correct samples have no gradient left and wrong ones the full one."""


class Pacs:
    """The PACS objective; see `contracts.Objective` for the protocol."""

    name = "pacs"

    def __init__(self, options: PacsOptions, *, updates_per_step: int) -> None:
        self._options = options
        self._updates_per_step = updates_per_step
        self._uses_log_ratio = options.reward_proxy == "sum_log_ratio"
        self._closed_form_first_update = self._uses_log_ratio and options.reference == "step_start"

    def logprob_passes(self) -> frozenset[LogprobSource]:
        """One update a step at `step_start` needs none: its r_j are 0 for any log-probs."""
        passes: set[LogprobSource] = set()
        if self._uses_log_ratio and self._options.reference == "frozen":
            passes.add("reference")
        if self._closed_form_first_update and self._updates_per_step > 1:
            passes.add("step_start")
        if self._options.importance_cap is not None:
            passes.add("step_start")
        return frozenset(passes)

    def needs_scores(self, update_index: int) -> bool:
        """False for the first update against the step's own start: there r_j = 0 exactly."""
        return update_index > 0 or not self._closed_form_first_update

    def token_scores(self, tokens: TokenRecord) -> torch.Tensor:
        """float64 [t]; its masked sum over a sample's tokens is the reward proxy r_j (7).

        Raises ValueError where the reference log-probs that `logprob_passes` names are missing.
        """
        logprobs = tokens.logprobs.double()
        if not self._uses_log_ratio:
            per_token = self._options.beta / tokens.response_lens.clamp(min=1).double()
            return logprobs * at_tokens(per_token, tokens)
        frozen = self._options.reference == "frozen"
        reference = tokens.reference_logprobs if frozen else tokens.step_start_logprobs
        if reference is None:
            source = "reference" if frozen else "step_start"
            raise ValueError(f"objective: the score pass needs {source} log-probs, but the token record has none")
        return self._options.beta * (logprobs - reference.double())

    def prepare_step(self, facts: SampleFacts) -> None:
        """Nothing: PACS uses the mini-batch only."""

    def prepare(self, scores: torch.Tensor | None, facts: SampleFacts, step_inputs: Any) -> Prepared:
        """Loss, metrics, and per sample [n] float64: `coefficient` a_j = da/dlog pi (beta, 1/N, 1/|o_j| inside),
        `score` psi and `weight` w.

        Does not depend on the order of the rows, bit for bit: computed in the order of the sample ids.
        Raises NonFiniteError for a NaN or Inf in `scores`, ValueError on internal errors.
        """
        order = canonical_order(facts)
        ids = tuple(facts.ids[i] for i in order)
        groups = build_groups(facts.groups[order], ids)
        labels = _checked_labels(facts.labels[order], ids)
        proxy = self._checked_proxy(scores, order, ids)
        found = group_scores(proxy, groups, self._options.score, self._options.score_std_floor)
        loss, slope = sample_loss(found.psi, labels)
        weights = class_weights(labels, groups, self._options.weighting)
        metrics = _metrics(found.psi, slope, labels, facts.truncated, groups)
        if self._options.importance_cap is not None:
            ratios = _importance(facts, order, self._options.importance_cap)
            weights = weights * ratios
            metrics["pacs/importance_mean"] = float(ratios.sum()) / len(ids)
            metrics["pacs/importance_capped_frac"] = float((ratios >= self._options.importance_cap).sum()) / len(ids)
        num_samples = float(len(ids))
        gradient = proxy_gradient(weights * slope / num_samples, found, groups, self._options.score)
        gradient = gradient + self._actor_gradient(weights * loss, groups, num_samples)
        coefficient = self._options.beta * gradient
        if not self._uses_log_ratio:
            coefficient = coefficient / np.maximum(facts.response_lens[order], 1)
        return Prepared(
            per_sample={
                "coefficient": to_tensor(coefficient, order),
                "score": to_tensor(found.psi, order),
                "weight": to_tensor(weights, order),
            },
            loss=float((weights * loss).sum() / num_samples),
            metrics=metrics,
            zero_gradient=to_tensor(coefficient, order) == 0.0,
        )

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> torch.Tensor:
        """[t], a_j log pi_theta: not the loss but a surrogate whose summed gradient is dL/dtheta."""
        return at_tokens(prepared.per_sample["coefficient"], tokens).to(tokens.logprobs.dtype) * tokens.logprobs

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, torch.Tensor]:
        """None: `prepare` returns all metrics."""
        return {}

    def _checked_proxy(self, scores: torch.Tensor | None, order: np.ndarray, ids: tuple[str, ...]) -> FloatArray:
        if scores is None:
            if not self._closed_form_first_update:
                raise ValueError("objective: this setting needs the score pass before every update, got scores=None")
            return np.zeros(len(ids))
        if scores.dtype != torch.float64 or tuple(scores.shape) != (len(ids),):
            raise ValueError(
                f"objective: scores must be float64 [{len(ids)}], got {scores.dtype} {tuple(scores.shape)}"
            )
        proxy: FloatArray = scores.detach().cpu().numpy()[order]
        bad = np.flatnonzero(~np.isfinite(proxy))
        if len(bad):
            raise NonFiniteError(
                f"reward proxy of sample {ids[bad[0]]} is {proxy[bad[0]]} ({len(bad)} of {len(ids)} samples); expected "
                "finite log-probs; no weight was changed; look at the sample in rollouts/ and at precision.dtype"
            )
        return proxy

    def _actor_gradient(self, losses: FloatArray, groups: Groups, num_samples: float) -> FloatArray:
        """The score-function part of (5): every response's log-prob times the weighted losses that depend on it."""
        if self._options.actor_term == 0.0:
            return np.zeros_like(losses)
        summed = groups.total(losses)[groups.of_sample] if self._options.actor_scope == "group" else losses
        return self._options.actor_term / (num_samples * self._options.beta) * summed


def _checked_labels(labels: FloatArray, ids: tuple[str, ...]) -> FloatArray:
    bad = np.flatnonzero((labels != 0.0) & (labels != 1.0))
    if len(bad):
        raise ValueError(f"objective: label of sample {ids[bad[0]]} is {labels[bad[0]]}, expected 0 or 1")
    return labels.astype(np.float64)


def _importance(facts: SampleFacts, order: np.ndarray, cap: float) -> FloatArray:
    if facts.log_ratio_to_sampler is None:
        raise ValueError("objective: importance_cap needs facts.log_ratio_to_sampler, which the engine must fill in")
    # The cap applies in log space: exp of a large ratio would overflow.
    log_ratio = facts.log_ratio_to_sampler[order]
    return np.where(log_ratio >= np.log(cap), cap, np.exp(np.minimum(log_ratio, np.log(cap))))


def _metrics(
    psi: FloatArray, slope: FloatArray, labels: FloatArray, truncated: np.ndarray, groups: Groups
) -> dict[str, float]:
    """Denominators: samples of that label for psi_mean_*; all samples, but groups for one_class_group_frac.

    A mean over no sample is left out.
    """
    num_samples = float(len(psi))
    metrics: dict[str, float] = {}
    positives = float(labels.sum())
    if positives > 0:
        metrics["pacs/psi_mean_pos"] = float((psi * labels).sum()) / positives
    if positives < num_samples:
        metrics["pacs/psi_mean_neg"] = float((psi * (1.0 - labels)).sum()) / (num_samples - positives)
    metrics["pacs/residual_mean"] = float(np.abs(slope).sum()) / num_samples
    metrics["pacs/psi_over_8_frac"] = float((np.abs(psi) > SATURATED_SCORE).sum()) / num_samples
    metrics["pacs/one_class_group_frac"] = float(one_class(labels, groups).sum()) / groups.num_groups
    metrics["pacs/truncated_frac"] = float(truncated.sum()) / num_samples
    return metrics

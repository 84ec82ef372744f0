"""PACS (arXiv:2509.02522): supervised learning of verifiable outcomes with the policy as its own
critic.

docs/objective.md has the formulas. L couples the siblings of a group, but it depends on the model
only through one number per sample, the reward proxy r_j. So `prepare` differentiates L with respect
to every r_j, and `token_loss` returns coefficient times log-prob. The gradient of its sum is
dL/dtheta for any split of the mini-batch.
"""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.protocols import Coupling, LogprobSource, Statistic
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.shared.base import Objective, ReferenceOptions, at_tokens, given
from pacs_megatron.objectives.shared.groups import IntArray, build_table, by_row
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.sample_table import SampleTable
from pacs_megatron.objectives.shared.scores import (
    class_weights,
    group_scores,
    one_class,
    proxy_gradient,
    sample_loss,
)

SATURATED_SCORE = 8.0
"""Above this |psi|, sigmoid(psi) is within 4e-4 of 0 or 1: a right prediction has no gradient, a
wrong one all of it.
"""


class PacsOptions(ReferenceOptions):
    """PACS: supervised cross-entropy on labels, with psi from the policy's own log-probs.

    Numbers are the paper's equations.
    """

    name: Literal["pacs"]
    """Name of the objective."""
    clip_grad: float = Field(default=0.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping.

    Norms of PACS are 10 to 100 times those of GRPO, so a limit of 1.0 rescales nearly every update
    to the same length.
    """
    beta: float = Field(default=1.0, gt=0)
    """Scale of the reward proxy, beta in (7)."""
    reward_proxy: Literal["sum_log_ratio", "mean_log_prob"] = "sum_log_ratio"
    """Reward proxy.

    `sum_log_ratio` sums log-ratios to `reference` over the response; `mean_log_prob` has no
    reference.
    """
    score: Literal["rloo", "dr_grpo", "grpo", "naive"] = "rloo"
    """Score psi from the proxies of a group (6): the estimator that centres and scales them."""
    score_std_floor: float | None = Field(default=None, gt=0)
    """Lower bound of a group's standard deviation.

    `score: grpo` requires it, for instance 0.1, or 0.01 with `reward_proxy: mean_log_prob`: without
    one, a group of nearly equal proxies has 1e5 times the gradient of others.
    """
    weighting: Literal["question", "only_positive", "only_negative", "none"] = "question"
    """Class weights of correct and incorrect samples (section 3.5)."""
    reference: Literal["step_start", "frozen"] | None = Field(
        default_factory=lambda given: (
            "step_start" if given["reward_proxy"] == "sum_log_ratio" else None
        )
    )
    """Reference policy of `reward_proxy: sum_log_ratio`: the policy at the start of the step, or a
    frozen snapshot.
    """
    actor_term: float = Field(default=0.0, ge=0.0, le=1.0)
    """Weight of the score-function term of the gradient (5)."""
    actor_scope: Literal["group", "own"] | None = Field(
        default_factory=lambda given: "group" if given["actor_term"] > 0 else None
    )
    """Losses in the score-function term: of the whole group (the true gradient, default), or of the
    sample, as (5) prints.
    """
    importance_cap: float | None = Field(default=None, gt=0)
    """Cap of the importance weight of stale samples, w_i *= min(exp(mean_t(log pi_step_start - log
    pi_sampler)), cap). null disables the correction.
    """

    @model_validator(mode="after")
    def _refuse_unused(self) -> Self:
        is_sum = self.reward_proxy == "sum_log_ratio"
        self.refuse_unused("reference", is_used=is_sum, by=f"reward_proxy={self.reward_proxy}")
        if self.reset_every is not None and self.reference != "frozen":
            raise ValueError(
                f"objective.reset_every={self.reset_every} needs objective.reference=frozen, got "
                f"{self.reference or 'no reference'}; remove it or set reference to frozen"
            )
        self.refuse_unused(
            "score_std_floor", is_used=self.score == "grpo", by=f"score={self.score}"
        )
        self.refuse_unused(
            "actor_scope", is_used=self.actor_term > 0, by=f"actor_term={self.actor_term}"
        )
        if self.actor_term > 0 and not is_sum:
            raise ValueError(
                f"objective.actor_term={self.actor_term} requires "
                "objective.reward_proxy=sum_log_ratio, got "
                f"{self.reward_proxy}; set actor_term to 0"
            )
        return self

    def refuse_updates_per_step(self, updates_per_step: int) -> None:
        """Raises ValueError if these options do not allow `updates_per_step` updates, those of all
        epochs.
        """
        if self.actor_term > 0 and updates_per_step > 1:
            raise ValueError(
                f"objective.actor_term={self.actor_term} needs one update a step, got "
                f"{updates_per_step} (batch.updates_per_step * batch.epochs): later updates are "
                "off-policy; use actor_term 0, or 1 for both"
            )


class Pacs(Objective, options=PacsOptions):
    """The PACS objective; see `Objective` for the protocol."""

    coupling: Coupling = "group"
    passes: dict[LogprobSource, int]
    coupled_by: dict[Statistic, int]

    def __init__(self, options: PacsOptions) -> None:
        self._options = options
        self._uses_log_ratio = options.reward_proxy == "sum_log_ratio"
        self._closed_form_first_update = self._uses_log_ratio and options.reference == "step_start"
        self.passes = {"reference": 0} if options.reference == "frozen" else {}
        if self._closed_form_first_update or options.importance_cap is not None:
            self.passes["step_start"] = 1
        # At the first update r_j = 0 exactly if the reference is the policy at the step's start.
        self.coupled_by = {"score": 1 if self._closed_form_first_update else 0}
        if options.importance_cap is not None:
            self.coupled_by["sampler_ratio"] = 0

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """float64 [t]; its masked sum over a sample's tokens is the reward proxy r_j (7).

        Raises ValueError if the reference log-probs are missing.
        """
        logprobs = tokens.logprobs.double()
        if not self._uses_log_ratio:
            per_token = self._options.beta / tokens.response_lens.clamp(min=1).double()
            return logprobs * at_tokens(per_token, tokens)
        if self._options.reference == "frozen":
            reference = given(tokens.reference_logprobs, "reference log-probs")
        else:
            reference = given(tokens.step_start_logprobs, "step_start log-probs")
        return self._options.beta * (logprobs - reference.double())

    def couple(
        self,
        table: SampleTable,
        scores: Tensor | None,
        sampler_ratios: Tensor | None,
        known: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """[m] float64:

        `coefficient` a_j, the derivative of L by each token's log-prob, with beta, 1/N and 1/|o_j|;
        `score` psi, `slope` sigmoid(psi) - y, `weight` w_i, `loss` w_i l_i and, if it is corrected,
        `importance`.
        """
        options = self._options
        num_samples = float(table.num_samples)
        proxy = torch.zeros_like(table.labels) if scores is None else scores
        psi = group_scores(proxy, table, options.score, options.score_std_floor)
        loss, slope = sample_loss(psi, table.labels)
        weight = class_weights(table.labels, table, options.weighting)
        found = {"score": psi, "slope": slope}
        if options.importance_cap is not None and sampler_ratios is not None:
            # The cap applies in log space: exp of a large ratio would overflow.
            limit = float(np.log(options.importance_cap))
            is_capped = sampler_ratios >= limit
            found["importance"] = torch.where(
                is_capped, options.importance_cap, sampler_ratios.clamp(max=limit).exp()
            )
            weight = weight * found["importance"]
        residual = weight * slope / num_samples
        gradient = proxy_gradient(residual, proxy, table, options.score, options.score_std_floor)
        gradient = gradient + self._actor_gradient(weight * loss, table, num_samples)
        coefficient = options.beta * gradient
        if not self._uses_log_ratio:
            coefficient = coefficient / table.response_lens.clamp(min=1.0)
        return {"coefficient": coefficient, "weight": weight, "loss": weight * loss} | found

    def prepare(self, scores: Tensor | None, facts: SampleFacts, step_inputs: Any) -> Prepared:
        """Loss, metrics, and the values of `couple` per sample, float64 [n].

        Computes in the order of the sample ids, so the bits do not depend on the order of the rows.
        Raises NonFiniteError for a NaN or Inf in `scores`, ValueError on internal errors.
        """
        table = build_table(facts)
        _check_labels(table, facts)
        proxy = self._checked_proxy(scores, facts)[table.rows]
        ratios = None
        if self._options.importance_cap is not None:
            to_sampler = given(facts.log_ratio_to_sampler, "facts.log_ratio_to_sampler")
            ratios = torch.from_numpy(to_sampler)[table.rows]
        found = self.couple(table, proxy, ratios, {})
        metrics, denominators = _metrics(found, table, facts, self._options.importance_cap)
        if scores is not None:
            metrics["pacs/psi_mean_square"] = float(found["score"].square().mean())
        per_sample = {name: by_row(values, table) for name, values in found.items()}
        return Prepared(
            per_sample=per_sample,
            loss=float(found["loss"].numpy().sum() / facts.num_samples),
            metrics=metrics,
            denominators=denominators,
            zero_gradient=per_sample["coefficient"] == 0.0,
        )

    def score_noise(
        self, before: Tensor, after: Tensor, facts: SampleFacts, rows: IntArray
    ) -> dict[str, float]:
        """Metrics of the change of r and psi from `before` to `after`, both r [n] of `rows` with
        equal weights.

        The exponent is the slope of log |change of r| over log length: 0.5 for independent
        differences of tokens.
        """
        table = build_table(facts, rows)
        first, second = (
            group_scores(
                proxy[table.rows], table, self._options.score, self._options.score_std_floor
            )
            for proxy in (before, after)
        )
        change = (after - before)[table.rows].numpy()
        metrics = {
            "pacs/score_noise": float((second - first).square().mean().sqrt()),
            "pacs/score_noise_bias": float(change.mean()),
        }
        lengths = np.log(table.response_lens.numpy()[change != 0])
        sizes = np.log(np.abs(change[change != 0]))
        if len(np.unique(lengths)) > 1:
            metrics["pacs/score_noise_exponent"] = float(np.polyfit(lengths, sizes, 1)[0])
        return metrics

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """[t], a_j log pi_theta.

        This is a surrogate, not the loss: the gradient of its sum is dL/dtheta.
        """
        return (
            at_tokens(prepared.per_sample["coefficient"], tokens).to(tokens.logprobs.dtype)
            * tokens.logprobs
        )

    def _checked_proxy(self, scores: Tensor | None, facts: SampleFacts) -> Tensor:
        """float64 [n], in the order of the facts."""
        size = facts.num_samples
        if scores is None:
            if not self._closed_form_first_update:
                raise ValueError(
                    "objective: this setting needs scores for every update, got scores=None"
                )
            return torch.zeros(size, dtype=torch.float64)
        if scores.dtype != torch.float64 or tuple(scores.shape) != (size,):
            raise ValueError(
                f"objective: scores must be float64 [{size}], got {scores.dtype} "
                f"{tuple(scores.shape)}"
            )
        proxy = scores.detach().cpu()
        bad = (~torch.isfinite(proxy)).nonzero()[:, 0].tolist()
        if bad:
            first = min(bad, key=lambda row: facts.ids[row])
            raise NonFiniteError(
                f"reward proxy of sample {facts.ids[first]} is {float(proxy[first])} ({len(bad)} "
                f"of {size} samples); expected finite log-probs; no weight was changed; look at "
                "the sample in rollouts/ and at precision.dtype"
            )
        return proxy

    def _actor_gradient(self, losses: Tensor, table: SampleTable, num_samples: float) -> Tensor:
        """The score-function part of (5): every response's log-prob times the weighted losses that
        depend on it.
        """
        if self._options.actor_term == 0.0:
            return torch.zeros_like(losses)
        summed = (
            table.total(losses)[table.group_of_sample]
            if self._options.actor_scope == "group"
            else losses
        )
        return self._options.actor_term / (num_samples * self._options.beta) * summed


def _check_labels(table: SampleTable, facts: SampleFacts) -> None:
    bad = ((table.labels != 0.0) & (table.labels != 1.0)).nonzero()[:, 0].tolist()
    if bad:
        row = int(table.rows[bad[0]])
        raise ValueError(
            f"objective: label of sample {facts.ids[row]} is {facts.labels[row]}, expected 0 or 1"
        )


def _metrics(
    found: dict[str, Tensor], table: SampleTable, facts: SampleFacts, cap: float | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics and their denominators, without means over no sample."""
    psi = found["score"].numpy()
    labels = table.labels.numpy()
    num_samples = float(facts.num_samples)
    positives = float(labels.sum())
    sums = {
        "pacs/psi_mean_pos": ((psi * labels).sum(), positives),
        "pacs/psi_mean_neg": ((psi * (1.0 - labels)).sum(), num_samples - positives),
        "pacs/residual_mean": (np.abs(found["slope"].numpy()).sum(), num_samples),
        "pacs/psi_over_8_frac": ((np.abs(psi) > SATURATED_SCORE).sum(), num_samples),
        "pacs/one_class_group_frac": (
            one_class(table.labels, table).sum(),
            float(table.num_groups),
        ),
        "pacs/truncated_frac": (facts.truncated.sum(), num_samples),
    }
    if cap is not None:
        importance = found["importance"].numpy()
        sums["pacs/importance_mean"] = importance.sum(), num_samples
        sums["pacs/importance_capped_frac"] = (importance >= cap).sum(), num_samples
    metrics = {name: float(total) / count for name, (total, count) in sums.items() if count > 0}
    return metrics, {name: count for name, (_, count) in sums.items()}

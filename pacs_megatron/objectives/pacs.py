"""PACS (arXiv:2509.02522): supervised learning of verifiable outcomes with the policy as its own
critic.

docs/objective.md has the formulas. L couples the siblings of a group, but it depends on the model
only through one number per sample, the reward proxy r_j. So `prepare` differentiates L with respect
to every r_j, and `token_loss` returns coefficient times log-prob. The gradient of its sum is
dL/dtheta for any split of the mini-batch.

Numbers in brackets are the paper's equations and sections.
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.protocols import Coupling, LogprobSource, Statistic
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.shared.base import (
    Objective,
    ReferenceOptions,
    StepInputs,
    at_tokens,
    required,
)
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
"""Above this |psi|, sigmoid(psi) is within 4e-4 of 0 or 1: a correct prediction has almost no
gradient, a wrong one almost the largest.
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
        default_factory=lambda options: (
            "step_start" if options["reward_proxy"] == "sum_log_ratio" else None
        )
    )
    """Reference policy of `reward_proxy: sum_log_ratio`: the policy at the start of the step, or a
    frozen snapshot.
    """
    actor_term: float = Field(default=0.0, ge=0.0, le=1.0)
    """Weight of the score-function term of the gradient (5)."""
    actor_scope: Literal["group", "own"] | None = Field(
        default_factory=lambda options: "group" if options["actor_term"] > 0 else None
    )
    """Losses in the score-function term: of the whole group (the true gradient, default), or of the
    sample, as (5) prints.
    """
    importance_cap: float | None = Field(default=None, gt=0)
    """Cap of the importance weight of stale samples, w_i *= min(exp(mean_t(log pi_step_start - log
    pi_sampler)), cap). null disables the correction.
    """

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        is_sum = self.reward_proxy == "sum_log_ratio"
        is_grpo = self.score == "grpo"
        has_actor = self.actor_term > 0

        self.check_used("reference", is_used=is_sum, by=f"reward_proxy={self.reward_proxy}")
        if self.reset_every is not None and self.reference != "frozen":
            raise ValueError(
                f"objective.reset_every={self.reset_every} needs objective.reference=frozen, got "
                f"{self.reference or 'no reference'}; remove it or set reference to frozen"
            )
        self.check_used("score_std_floor", is_used=is_grpo, by=f"score={self.score}")
        self.check_used("actor_scope", is_used=has_actor, by=f"actor_term={self.actor_term}")
        if has_actor and not is_sum:
            raise ValueError(
                f"objective.actor_term={self.actor_term} requires "
                "objective.reward_proxy=sum_log_ratio, got "
                f"{self.reward_proxy}; set actor_term to 0"
            )
        return self

    def check_updates_per_step(self, updates_per_step: int) -> None:
        """Checks that the actor term, which is valid on-policy only, has one update a step.

        Args:
            updates_per_step: updates a step, of all epochs together.

        Raises:
            ValueError: these options do not allow so many updates.
        """
        if self.actor_term > 0 and updates_per_step > 1:
            raise ValueError(
                f"objective.actor_term={self.actor_term} needs one update a step, got "
                f"{updates_per_step} "
                "(batch.updates_per_step * batch.epochs): later updates are off-policy; use "
                "actor_term 0, or 1 for both"
            )


class Pacs(Objective, options=PacsOptions):
    """The PACS objective; see `Objective` for the protocol."""

    coupling: Coupling = "group"
    passes: dict[LogprobSource, int]
    coupled_by: dict[Statistic, int]

    def __init__(self, options: PacsOptions) -> None:
        self._options = options
        self._uses_log_ratio = options.reward_proxy == "sum_log_ratio"
        # At the first update r_j = 0 exactly if the reference is the policy at the step's start.
        self._closed_form_first_update = self._uses_log_ratio and options.reference == "step_start"

        self.passes = {"reference": 0} if options.reference == "frozen" else {}
        if self._closed_form_first_update or options.importance_cap is not None:
            self.passes["step_start"] = 1

        self.coupled_by = {"score": 1 if self._closed_form_first_update else 0}
        if options.importance_cap is not None:
            self.coupled_by["sampler_ratio"] = 0

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """Each token's part of the reward proxy r_j (7).

        Returns:
            [t], float64; its masked sum over a sample's tokens is r_j.

        Raises:
            ValueError: the reference log-probs are missing.
        """
        logprobs = tokens.logprobs.double()
        if not self._uses_log_ratio:
            scale = self._options.beta / tokens.response_lens.clamp(min=1).double()
            return logprobs * at_tokens(scale, tokens)

        if self._options.reference == "frozen":
            reference = required(tokens.reference_logprobs, "reference log-probs")
        else:
            reference = required(tokens.step_start_logprobs, "step_start log-probs")
        return self._options.beta * (logprobs - reference.double())

    def couple(
        self,
        table: SampleTable,
        scores: Tensor | None,
        sampler_ratios: Tensor | None,
        known: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Coefficients and losses of whole groups.

        Args:
            table: m samples in whole groups.
            scores: [m], float64, the proxy r; None: the first update, where r is 0.
            sampler_ratios: [m], float64, nats; None: not corrected.
            known: empty.

        Returns:
            float64 [m] each: `coefficient` a_j, the derivative of L by each token's log-prob, with
            beta, 1/N and 1/|o_j|; `weight` w_i; `loss` w_i l_i; `score` psi; `slope` sigmoid(psi)
            - y; and, if it is corrected, `importance`.
        """
        options = self._options
        proxy = torch.zeros_like(table.labels) if scores is None else scores
        psi = group_scores(proxy, table, options.score, options.score_std_floor)
        loss, slope = sample_loss(psi, table.labels)
        weight = class_weights(table.labels, table, options.weighting)

        extra = {}
        if options.importance_cap is not None and sampler_ratios is not None:
            extra["importance"] = _capped_importance(sampler_ratios, options.importance_cap)
            weight = weight * extra["importance"]

        num_samples = float(table.num_samples)
        residual = weight * slope / num_samples
        gradient = proxy_gradient(residual, proxy, table, options.score, options.score_std_floor)
        gradient = gradient + self._actor_gradient(weight * loss, table, num_samples)
        coefficient = options.beta * gradient
        if not self._uses_log_ratio:
            coefficient = coefficient / table.response_lens.clamp(min=1.0)

        return {
            "coefficient": coefficient,
            "weight": weight,
            "loss": weight * loss,
            "score": psi,
            "slope": slope,
            **extra,
        }

    def prepare(
        self, scores: Tensor | None, facts: SampleFacts, step_inputs: StepInputs
    ) -> Prepared:
        """Loss, metrics, and the values of `couple` per sample, float64 [n].

        Computes in the order of the sample ids, so the bits do not depend on the order of the rows.

        Args:
            scores: [n], float64, the proxy r; None: the first update, where r is 0.
            facts: of the whole mini-batch.
            step_inputs: not used.

        Raises:
            NonFiniteError: a NaN or Inf in `scores`.
            ValueError: an internal error.
        """
        table = build_table(facts)
        _check_labels(table, facts)
        proxy = self._checked_proxy(scores, facts)[table.rows]

        sampler_ratios = None
        if self._options.importance_cap is not None:
            ratios = required(facts.log_ratio_to_sampler, "facts.log_ratio_to_sampler")
            sampler_ratios = torch.from_numpy(ratios)[table.rows]

        coupled = self.couple(table, proxy, sampler_ratios, {})
        metrics, denominators = _metrics(coupled, table, facts, self._options.importance_cap)
        if scores is not None:
            metrics["pacs/psi_mean_square"] = float(coupled["score"].square().mean())

        per_sample = {name: by_row(values, table) for name, values in coupled.items()}
        return Prepared(
            per_sample=per_sample,
            loss=float(coupled["loss"].numpy().sum() / facts.num_samples),
            metrics=metrics,
            denominators=denominators,
            zero_gradient=per_sample["coefficient"] == 0.0,
        )

    def score_noise(
        self, before: Tensor, after: Tensor, facts: SampleFacts, rows: IntArray
    ) -> dict[str, float]:
        """Metrics of the change of r and psi between two passes with equal weights.

        The exponent is the slope of log |change of r| over log length: 0.5 for independent
        differences of tokens.

        Args:
            before: [n], float64, r of the first pass.
            after: [n], float64, r of the second pass.
            facts: of the whole mini-batch.
            rows: [m], int64, the samples of whole groups to compare.
        """
        options = self._options
        table = build_table(facts, rows)
        psi_before = group_scores(before[table.rows], table, options.score, options.score_std_floor)
        psi_after = group_scores(after[table.rows], table, options.score, options.score_std_floor)
        change = (after - before)[table.rows].numpy()
        metrics = {
            "pacs/score_noise": float((psi_after - psi_before).square().mean().sqrt()),
            "pacs/score_noise_bias": float(change.mean()),
        }

        has_changed = change != 0
        log_lens = np.log(table.response_lens.numpy()[has_changed])
        log_sizes = np.log(np.abs(change[has_changed]))
        if len(np.unique(log_lens)) > 1:
            slope, _ = np.polyfit(log_lens, log_sizes, 1)
            metrics["pacs/score_noise_exponent"] = float(slope)
        return metrics

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """a_j log pi_theta of each token, [t].

        This is a surrogate, not the loss: the gradient of its sum is dL/dtheta.
        """
        coefficient = at_tokens(prepared.per_sample["coefficient"], tokens)
        return coefficient.to(tokens.logprobs.dtype) * tokens.logprobs

    def _checked_proxy(self, scores: Tensor | None, facts: SampleFacts) -> Tensor:
        """r in the order of the facts, float64 [n], finite."""
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
        bad_rows = (~torch.isfinite(proxy)).nonzero()[:, 0].tolist()
        if bad_rows:
            # The smallest id: the same message for every order of the rows.
            first = min(bad_rows, key=lambda row: facts.ids[row])
            raise NonFiniteError(
                f"reward proxy of sample {facts.ids[first]} is {float(proxy[first])} "
                f"({len(bad_rows)} of {size} samples); expected finite log-probs; no weight was "
                "changed; look at the sample in rollouts/ and at precision.dtype"
            )
        return proxy

    def _actor_gradient(self, losses: Tensor, table: SampleTable, num_samples: float) -> Tensor:
        """The score-function part of (5): every response's log-prob times the weighted losses that
        depend on it.

        Args:
            losses: [m], w_i l_i.
            table: m samples in whole groups.
            num_samples: N.

        Returns:
            [m], the part of dL/dr_j.
        """
        if self._options.actor_term == 0.0:
            return torch.zeros_like(losses)
        if self._options.actor_scope == "group":
            losses = table.total(losses)[table.group_of_sample]
        return self._options.actor_term / (num_samples * self._options.beta) * losses


def _capped_importance(log_ratios: Tensor, cap: float) -> Tensor:
    """min(exp(log-ratio), cap), same shape."""
    # The cap applies in log space: exp of a large ratio would overflow.
    limit = float(np.log(cap))
    is_capped = log_ratios >= limit
    return torch.where(is_capped, cap, log_ratios.clamp(max=limit).exp())


def _check_labels(table: SampleTable, facts: SampleFacts) -> None:
    is_bad = (table.labels != 0.0) & (table.labels != 1.0)
    bad_places = is_bad.nonzero()[:, 0].tolist()
    if bad_places:
        row = int(table.rows[bad_places[0]])
        raise ValueError(
            f"objective: label of sample {facts.ids[row]} is {facts.labels[row]}, expected 0 or 1"
        )


def _metrics(
    coupled: dict[str, Tensor], table: SampleTable, facts: SampleFacts, cap: float | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of a mini-batch and their denominators (docs/objective.md).

    Args:
        coupled: the result of `Pacs.couple` for all samples.
        table: all samples.
        facts: of the whole mini-batch.
        cap: `importance_cap`.

    Returns:
        (metrics, denominators); a mean over no sample has a denominator only.
    """
    psi = coupled["score"].numpy()
    slope = coupled["slope"].numpy()
    labels = table.labels.numpy()
    num_samples = float(facts.num_samples)
    num_groups = float(table.num_groups)
    positives = float(labels.sum())
    negatives = num_samples - positives
    num_saturated = (np.abs(psi) > SATURATED_SCORE).sum()

    # name -> (sum, count)
    sums = {
        "pacs/psi_mean_pos": ((psi * labels).sum(), positives),
        "pacs/psi_mean_neg": ((psi * (1.0 - labels)).sum(), negatives),
        "pacs/residual_mean": (np.abs(slope).sum(), num_samples),
        "pacs/psi_over_8_frac": (num_saturated, num_samples),
        "pacs/one_class_group_frac": (one_class(table.labels, table).sum(), num_groups),
        "pacs/truncated_frac": (facts.truncated.sum(), num_samples),
    }
    if cap is not None:
        importance = coupled["importance"].numpy()
        sums["pacs/importance_mean"] = (importance.sum(), num_samples)
        sums["pacs/importance_capped_frac"] = ((importance >= cap).sum(), num_samples)

    metrics = {name: float(total) / count for name, (total, count) in sums.items() if count > 0}
    return metrics, {name: count for name, (_, count) in sums.items()}

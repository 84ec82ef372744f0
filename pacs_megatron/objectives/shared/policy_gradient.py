"""The clipped policy gradient, the base of most other objectives.

They differ in the advantage, in the ratio (of a token or of a sample), in the clipping and in the
mean. The loss is the sum over trained tokens of

    u_i * (w * l(rho, A_i) + kl_coef * k - entropy_coef * H)

- u_i contains every divisor.
- l = -min(rho A, clip(rho, 1 - low, 1 + high) A), PPO's surrogate (arXiv:1707.06347, equation 7).
- rho is exp(log pi_theta - log pi_step_start) of the token or of its sample (`ratio_of`). A
  sample's ratio couples its own tokens only. They are all in one micro-batch, so the ratio comes
  from the update's own forward.
- w is 1, or the ratio of `importance` exp(log pi_step_start - log pi_sampler), without gradient,
  of the token or of the whole sample (the product), truncated (as in IMPALA, arXiv:1802.01561) or
  masked outside a band.
- k estimates KL(pi_theta || reference) of a token (joschu.net/blog/kl-approx.html), see
  `kl_estimator`. `kl_in: reward` works as in TRL's RLOO; verl's apply_kl_penalty subtracts the KL
  token by token.
- H is the entropy of the whole next-token distribution, with gradient.
- The log-ratios of rho, of w and of k3 are at most LOG_RATIO_LIMIT. Above it a token, or all tokens
  of a sample with such a ratio, have no gradient.
"""

from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.protocols import LogprobSource, Statistic
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.shared.base import (
    Objective,
    ReferenceOptions,
    StepInputs,
    at_tokens,
    required,
)
from pacs_megatron.objectives.shared.groups import FloatArray, IntArray, build_table, by_row
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.sample_table import SampleTable

LOG_RATIO_LIMIT = 20.0
"""Upper limit of log-ratios inside an exponential, nats, without gradient above: exp would
overflow, and Inf * 0 in a clipped branch is NaN. The papers have none.
"""


class PolicyGradientOptions(ReferenceOptions):
    """Options of every policy gradient."""

    clip_high: float = Field(default=0.2, gt=0)
    """Clip the probability ratio at 1 + clip_high from above."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the estimate of the KL divergence to the frozen reference."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default_factory=lambda options: "k3" if options["kl_coef"] > 0 else None
    )
    """Estimate of a token's KL divergence, with q = log pi_reference - log pi.

    `k1`: -q; `k2`: q^2 / 2; `k3`: exp(q) - q - 1. The gradient of `k1` has mean 0, so `kl_in: loss`
    rejects it. Default k3.
    """
    kl_in: Literal["loss", "reward"] | None = Field(
        default_factory=lambda options: "loss" if options["kl_coef"] > 0 else None
    )
    """Place of the KL term.

    `loss` adds it to every token's loss. `reward` subtracts its sum over a sample, with the
    step-start weights, from the sample's reward before the advantages are computed. Default loss.
    """
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus: entropy_coef times the entropy of each token's distribution is
    subtracted from its loss.
    """
    importance: Literal["none", "truncate", "mask"] = "none"
    """Importance correction for stale samples and for sampler mismatch, with w = exp(log
    pi_step_start - log pi_sampler), without gradient. `truncate` multiplies the loss by min(w,
    importance_cap); `mask` by w, or by 0 outside importance_floor <= w <= importance_cap.
    """
    importance_level: Literal["token", "sequence"] | None = Field(
        default_factory=lambda options: None if options["importance"] == "none" else "token"
    )
    """The ratio w of `importance`: of each token, or the product over the sample's tokens.

    Default token.
    """
    importance_cap: float | None = Field(
        default_factory=lambda options: None if options["importance"] == "none" else 2.0, gt=0
    )
    """Upper bound of the importance weight; default 2."""
    importance_floor: float | None = Field(
        default_factory=lambda options: 0.5 if options["importance"] == "mask" else None, gt=0
    )
    """Lower bound of the importance weight of `importance: mask`; default 0.5."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        # An option that the other settings do not use defaults to null, so a value there is an
        # error.
        for key in ("kl_estimator", "kl_in"):
            self.check_used(key, is_used=self.kl_coef > 0, by=f"kl_coef={self.kl_coef}")
        by_importance = f"importance={self.importance}"
        for key in ("importance_level", "importance_cap"):
            self.check_used(key, is_used=self.importance != "none", by=by_importance)
        self.check_used("importance_floor", is_used=self.importance == "mask", by=by_importance)

        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "objective.kl_estimator=k1 with kl_in=loss has a gradient of mean 0, so it adds "
                "noise only; use k2 or k3, or kl_in=reward"
            )
        if self.reset_every is not None and self.kl_coef == 0:
            raise ValueError(
                f"objective.reset_every={self.reset_every} requires objective.kl_coef > 0, which "
                "uses the frozen reference; remove it"
            )
        cap = self.importance_cap or 0
        if self.importance_floor is not None and self.importance_floor >= cap:
            raise ValueError(
                f"objective.importance_floor={self.importance_floor} is not below "
                f"importance_cap={self.importance_cap}; lower importance_floor"
            )
        return self


class ClippedOptions(PolicyGradientOptions):
    """Options of a policy gradient whose ratio is clipped from both sides."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Clip the probability ratio at 1 - clip_low from below."""


class BoundedOptions(ClippedOptions):
    """Options of a clipped policy gradient with a bound of the ratio (arXiv:1912.09729)."""

    ratio_max: float = Field(default=10.0, gt=1)
    """Upper bound of the probability ratio of tokens with a negative advantage."""


class TokenMeanOptions(PolicyGradientOptions):
    """Options of a policy gradient with a choice of the mean."""

    loss_mean: Literal["token", "sequence", "dr_grpo"] = "token"
    """Averaging of token losses.

    `token`: over all tokens of the mini-batch; `sequence`: mean of sequence means; `dr_grpo`: sum
    divided by `constant_length`.
    """
    constant_length: PositiveInt | None = None
    """Divisor of `loss_mean: dr_grpo`, in tokens."""

    @model_validator(mode="after")
    def _check_constant_length(self) -> Self:
        is_used = self.loss_mean == "dr_grpo"
        self.check_used("constant_length", is_used=is_used, by=f"loss_mean={self.loss_mean}")
        return self


class PolicyGradient(Objective):
    """A policy gradient; see `Objective` for the protocol.

    It is GRPO's unless a subclass changes a part.
    """

    ratio_of: ClassVar[Literal["token", "mean", "product"]] = "token"
    """rho of a token, or of its sample: the geometric mean over the sample's tokens, or their
    product.
    """
    options: PolicyGradientOptions
    passes: dict[LogprobSource, int]
    coupled_by: dict[Statistic, int]

    def __init__(self, options: PolicyGradientOptions) -> None:
        super().__init__(options)
        has_sample_ratio = self.ratio_of != "token"
        has_sample_importance = options.importance_level == "sequence"

        self.kl_in_reward = options.kl_in == "reward"
        self.passes = {"step_start": 0 if self.kl_in_reward else 1}
        if options.kl_coef > 0:
            self.passes["reference"] = 0

        # A sample's log-ratio is 0 by construction at the first update.
        self.coupled_by = {"score": 1} if has_sample_ratio else {}
        if has_sample_importance:
            self.coupled_by["sampler_ratio"] = 0
        if has_sample_ratio or has_sample_importance:
            self.coupling = "sample"

    # The parts that subclasses change: rewards, advantages, surrogate, clipping, mean.

    def rewards(self, facts: SampleFacts) -> FloatArray:
        """Rewards before the KL, float64 [n]."""
        return np.asarray(facts.rewards)

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """Advantages of a whole rollout batch: (R - mean) / (s + 1e-6) in the group, with the
        unbiased s.

        Args:
            rewards: [m], float64, the result of `self.rewards`, minus the KL of `kl_in: reward`.
            table: m samples; whole groups if the options compare siblings.

        Returns:
            [m], float64.
        """
        centred = table.centred(rewards)
        return centred / (table.std(centred) + 1e-6)[table.group_of_sample]

    def token_weights(self, facts: SampleFacts, advantages: Tensor) -> FloatArray:
        """u_i, the weight of each token of a sample, which contains every divisor.

        Args:
            facts: of the mini-batch.
            advantages: [n], float64.

        Returns:
            [n], float64; 0 for samples that the objective does not train.
        """
        assert isinstance(self.options, TokenMeanOptions)
        return mean_weights(
            facts.response_lens, self.options.loss_mean, self.options.constant_length
        )

    def has_gradient(self, advantage: Tensor) -> Tensor:
        """The samples whose tokens may have an advantage, bool [n].

        Args:
            advantage: [n], the result of `prepare_step`.
        """
        return advantage != 0.0

    def token_advantage(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """The advantage of each token's sample, [t]."""
        return at_tokens(prepared.per_sample["advantage"], tokens)

    def surrogate(self, ratio: Tensor, advantage: Tensor, tokens: TokenRecord) -> Tensor:
        """l(rho, A).

        Args:
            ratio: [t], rho, with gradient.
            advantage: [t], A.

        Returns:
            [t].
        """
        assert isinstance(self.options, ClippedOptions)
        clipped = ratio.clamp(1.0 - self.options.clip_low, 1.0 + self.options.clip_high)
        return -torch.minimum(ratio * advantage, clipped * advantage)

    def token_factor(self, tokens: TokenRecord, prepared: Prepared) -> Tensor | None:
        """The factor of each token's surrogate, [t], without gradient; None: 1."""
        return None

    def is_clipped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """The tokens whose gradient is clipped to 0, bool [t]. See `surrogate`."""
        assert isinstance(self.options, ClippedOptions)
        too_high = (advantage > 0) & (ratio > 1.0 + self.options.clip_high)
        too_low = (advantage < 0) & (ratio < 1.0 - self.options.clip_low)
        return too_high | too_low

    # The protocol of `Objective`.

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """log rho of each token, float64 [t].

        Raises:
            ValueError: rho is not of the sample.
        """
        if self.ratio_of == "token":
            return super().token_scores(tokens)
        return tokens.logprobs.double() - self._step_start(tokens).double()

    def sample_kl(self, step_start: FloatArray, reference: FloatArray) -> float:
        """Sum of k over a sample's tokens, nats; the arguments are float32 [response] each."""
        log_ratio = reference.astype(np.float64) - step_start
        return float(self._estimate_kl(torch.from_numpy(log_ratio)).sum())

    def prepare_step(self, facts: SampleFacts) -> StepInputs:
        """`advantage` of each sample, from the rewards of the whole rollout batch.

        The bits do not depend on the order of the rows.

        Raises:
            NonFiniteError: a NaN or Inf among the rewards.
        """
        table = build_table(facts, whole_groups=self.options.compares_siblings)
        order = table.rows.numpy()

        rewards = self.rewards(facts)
        if self.kl_in_reward:
            kl = required(facts.kl_to_reference, "facts.kl_to_reference")
            rewards = rewards - self.options.kl_coef * kl
        rewards = rewards[order]
        _check_rewards(rewards, order, facts)

        advantages = self.advantages(torch.from_numpy(rewards), table)
        return {"advantage": by_row(advantages, table).numpy()}

    def known(self, facts: SampleFacts, step_inputs: StepInputs) -> dict[str, Tensor]:
        """Of each sample, float64 [n]: `advantage`; `token_weight` u_i; `num_tokens`, the tokens of
        all samples that the objective trains, 0 for the others; `importance_share`.
        """
        advantage = torch.from_numpy(step_inputs["advantage"])
        has_gradient = self.has_gradient(advantage)
        token_weight = torch.from_numpy(self.token_weights(facts, advantage))
        is_trained = token_weight != 0.0
        num_trained_tokens = float(facts.response_lens[is_trained.numpy()].sum())

        # The engine may skip samples of zero advantage, so importance is a mean over the tokens of
        # the other samples.
        num_tokens = float(facts.response_lens[has_gradient.numpy()].sum())
        return {
            "advantage": advantage,
            "token_weight": token_weight,
            "num_tokens": is_trained.double() * num_trained_tokens,
            "importance_share": has_gradient.double() / max(num_tokens, 1.0),
        }

    def couple(
        self,
        table: SampleTable,
        scores: Tensor | None,
        sampler_ratios: Tensor | None,
        known: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """`ratio` rho, `ratio_slope` (0 above the limit of rho, else 1) and `sampler_ratio` w of
        each sample, float64 [m], and `known` unchanged.

        See `Objective.couple` for the arguments. `scores` None: the first update, rho is 1.
        """
        per_sample = dict(known)
        lens = table.response_lens.clamp(min=1.0)
        if self.ratio_of != "token":
            log_ratio = torch.zeros_like(lens) if scores is None else scores
            if self.ratio_of == "mean":
                log_ratio = log_ratio / lens
            per_sample["ratio"] = log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()
            per_sample["ratio_slope"] = (log_ratio <= LOG_RATIO_LIMIT).double()
        if sampler_ratios is not None:
            log_ratio = sampler_ratios * lens
            per_sample["sampler_ratio"] = log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()
        return per_sample

    def prepare(
        self, scores: Tensor | None, facts: SampleFacts, step_inputs: StepInputs
    ) -> Prepared:
        """Per sample, float64 [n]: see `known` and `couple`."""
        per_sample = self.known(facts, step_inputs)
        if self.coupling != "token":
            per_sample |= self._coupled(scores, facts, per_sample)

        has_gradient = self.has_gradient(per_sample["advantage"]).numpy()
        advantage_sizes = np.abs(per_sample["advantage"].numpy())
        num_samples = facts.num_samples
        metrics = {
            "advantage_abs_mean": float(advantage_sizes.sum()) / num_samples,
            "zero_advantage_frac": float((advantage_sizes == 0.0).sum()) / num_samples,
            "truncated_frac": float(facts.truncated.sum()) / num_samples,
        }

        num_tokens = float(per_sample["num_tokens"].max())
        num_corrected = float(facts.response_lens[has_gradient].sum())
        denominators = {
            "importance_mean": num_corrected,
            "importance_cut_frac": num_corrected,
            "clip_frac": num_tokens,
            "kl": num_tokens,
        }

        return Prepared(
            per_sample=per_sample,
            metrics=self._with_prefix(metrics),
            denominators=self._with_prefix(denominators),
            zero_gradient=self._zero_gradient(per_sample),
        )

    def _zero_gradient(self, per_sample: dict[str, Tensor]) -> Tensor | None:
        """The samples whose gradient is exactly 0, bool [n]; None: there are none.

        A sample without advantage has the KL and the entropy of the loss, if the objective trains
        it.
        """
        has_other_terms = self.options.kl_in == "loss" or self.options.entropy_coef > 0
        if not has_other_terms:
            return ~self.has_gradient(per_sample["advantage"])
        is_untrained = per_sample["token_weight"] == 0.0
        return is_untrained if bool(is_untrained.any()) else None

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """Each token's loss, [t]; its masked sum is the true loss."""
        dtype = tokens.logprobs.dtype
        advantage = self.token_advantage(tokens, prepared).to(dtype)
        weight = at_tokens(prepared.per_sample["token_weight"], tokens).to(dtype)

        loss = self.surrogate(self._ratio(tokens, prepared), advantage, tokens)
        for factor in (self.token_factor(tokens, prepared), self._importance(tokens, prepared)):
            if factor is not None:
                loss = loss * factor.to(dtype)
        if self.options.kl_in == "loss":
            loss = loss + self.options.kl_coef * self._kl(tokens)
        if self.options.entropy_coef > 0:
            loss = loss - self.options.entropy_coef * required(tokens.entropy, "entropies")
        return weight * loss

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """Each token's part of the metrics, [t], with the objective's name before each name.

        `clip_frac`: the share of trained tokens whose gradient is clipped. `kl`, with kl_coef > 0:
        the mean over trained tokens, nats. `importance_mean` and `importance_cut_frac`, with
        importance: over the tokens of samples with a nonzero advantage, so without groups of equal
        rewards.
        """
        num_tokens = at_tokens(prepared.per_sample["num_tokens"], tokens)
        is_trained = num_tokens > 0.0

        def of_mean(values: Tensor) -> Tensor:
            """Each token's part of the mean over trained tokens, [t]."""
            values = torch.where(is_trained, values, 0.0)
            return values / num_tokens.clamp(min=1.0).to(values.dtype)

        advantage = self.token_advantage(tokens, prepared)
        ratio = self._ratio(tokens, prepared)
        metrics = {"clip_frac": of_mean(self.is_clipped(ratio, advantage).to(ratio.dtype))}

        importance = self._importance(tokens, prepared)
        if importance is not None:
            share = at_tokens(prepared.per_sample["importance_share"], tokens)
            is_cut = self._is_cut(self._sampler_ratio(tokens, prepared))
            metrics["importance_mean"] = importance * share
            metrics["importance_cut_frac"] = is_cut * share

        if self.options.kl_coef > 0:
            metrics["kl"] = of_mean(self._kl(tokens))
        return self._with_prefix(metrics)

    def _with_prefix(self, values: dict[str, Any]) -> dict[str, Any]:
        return {f"{self.name}/{name}": value for name, value in values.items()}

    def _coupled(
        self, scores: Tensor | None, facts: SampleFacts, known: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The values of `couple` for all samples of a mini-batch, float64 [n]."""
        table = build_table(facts, whole_groups=False)
        table_scores = None if scores is None else scores[table.rows]

        sampler_ratios = None
        if self.options.importance_level == "sequence":
            ratios = required(facts.log_ratio_to_sampler, "facts.log_ratio_to_sampler")
            sampler_ratios = torch.from_numpy(ratios)[table.rows]

        known_of_table = {name: values[table.rows] for name, values in known.items()}
        coupled = self.couple(table, table_scores, sampler_ratios, known_of_table)
        return {name: by_row(values, table) for name, values in coupled.items()}

    def _ratio(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """rho of each token with gradient, also if its value is 1 by construction, [t].

        A sample's rho has the sample's value, and the gradient of its u_i |o_i| l(rho) by the
        token's own log-prob; none above the limit of its log-ratio.
        """
        if self.ratio_of == "token":
            log_ratio = tokens.logprobs - self._step_start(tokens)
            return torch.exp(log_ratio.clamp(max=LOG_RATIO_LIMIT))

        value = at_tokens(prepared.per_sample["ratio"], tokens).to(tokens.logprobs.dtype)
        # 0, with gradient 1. The gradient of a geometric mean has the factor 1 / |o|, which cancels
        # the |o| equal terms of the sum over tokens; that of a product has none.
        zero = tokens.logprobs - tokens.logprobs.detach()
        slope = at_tokens(prepared.per_sample["ratio_slope"], tokens)
        zero = zero * slope.to(tokens.logprobs.dtype)
        if self.ratio_of == "product":
            zero = zero * at_tokens(tokens.response_lens, tokens)
        return value * (1.0 + zero)

    def _step_start(self, tokens: TokenRecord) -> Tensor:
        """log pi_step_start, [t]."""
        return required(tokens.step_start_logprobs, "step_start log-probs")

    def _importance(self, tokens: TokenRecord, prepared: Prepared) -> Tensor | None:
        """The factor of the policy-gradient term, [t], without gradient; None when there is no
        correction.
        """
        cap = self.options.importance_cap
        if cap is None:
            return None
        ratio = self._sampler_ratio(tokens, prepared)
        if self.options.importance == "mask":
            return torch.where(self._is_cut(ratio), torch.zeros_like(ratio), ratio)
        return ratio.clamp(max=cap)

    def _is_cut(self, ratio: Tensor) -> Tensor:
        """The tokens whose `_importance` is a bound or 0 instead of the ratio, bool [t]."""
        cap = self.options.importance_cap
        floor = self.options.importance_floor
        assert cap is not None
        if floor is None:
            return ratio > cap
        return (ratio > cap) | (ratio < floor)

    def _sampler_ratio(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """w = pi_step_start / pi_sampler of the sampled tokens, or of their samples, [t]."""
        if self.options.importance_level == "sequence":
            return at_tokens(prepared.per_sample["sampler_ratio"], tokens)
        sampler = required(tokens.sampler_logprobs, "the sampler's log-probs")
        log_ratio = self._step_start(tokens).detach() - sampler
        return torch.exp(log_ratio.clamp(max=LOG_RATIO_LIMIT))

    def _kl(self, tokens: TokenRecord) -> Tensor:
        """Estimate of each token's KL to the reference, [t], nats."""
        reference = required(tokens.reference_logprobs, "reference log-probs")
        return self._estimate_kl(reference - tokens.logprobs)

    def _estimate_kl(self, log_ratio: Tensor) -> Tensor:
        """k, nats, of q = log pi_reference - log pi; same shape."""
        return estimate_kl(self.options.kl_estimator, log_ratio)


class BoundedPolicyGradient(PolicyGradient):
    """A policy gradient whose ratio is also bounded where the advantage is negative."""

    def surrogate(self, ratio: Tensor, advantage: Tensor, tokens: TokenRecord) -> Tensor:
        """l(rho, A), at most ratio_max |A| where A < 0, [t]."""
        assert isinstance(self.options, BoundedOptions)
        loss = super().surrogate(ratio, advantage, tokens)
        bounded = torch.minimum(loss, -advantage * self.options.ratio_max)
        return torch.where(advantage < 0.0, bounded, loss)

    def is_clipped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """The tokens whose gradient is clipped to 0, bool [t]."""
        assert isinstance(self.options, BoundedOptions)
        is_bounded = (advantage < 0.0) & (ratio > self.options.ratio_max)
        return super().is_clipped(ratio, advantage) | is_bounded


def estimate_kl(estimator: Literal["k1", "k2", "k3"] | None, log_ratio: Tensor) -> Tensor:
    """The estimate of a token's KL divergence; None: k3. Only k3 has an exponential.

    Args:
        estimator: see `PolicyGradientOptions.kl_estimator`.
        log_ratio: q = log pi_reference - log pi, nats, of any shape.

    Returns:
        nats, of the same shape.
    """
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case _:
            limited = log_ratio.clamp(max=LOG_RATIO_LIMIT)
            return torch.expm1(limited) - limited


def leave_one_out(rewards: Tensor, table: SampleTable) -> Tensor:
    """R minus the mean of the siblings, [m]: RLOO's baseline (arXiv:2402.14740)."""
    factor = table.sizes / (table.sizes - 1.0)
    return table.centred(rewards) * factor[table.group_of_sample]


def mean_weights(
    response_lens: IntArray,
    loss_mean: Literal["token", "sequence", "dr_grpo"],
    constant_length: int | None = None,
) -> FloatArray:
    """The weight of each token of a sample.

    Args:
        response_lens: [n], int64.
        loss_mean: `token`: 1/T over all T tokens; `sequence`: 1/(N |o_i|); `dr_grpo`:
            1/(N constant_length).
        constant_length: of `dr_grpo`, in tokens.

    Returns:
        [n], float64.
    """
    num_samples = len(response_lens)
    match loss_mean:
        case "token":
            return np.full(num_samples, 1.0 / max(int(response_lens.sum()), 1))
        case "sequence":
            return 1.0 / (num_samples * np.maximum(response_lens, 1).astype(np.float64))
        case "dr_grpo":
            assert constant_length is not None
            return np.full(num_samples, 1.0 / (num_samples * constant_length))


def _check_rewards(rewards: FloatArray, order: IntArray, facts: SampleFacts) -> None:
    """`rewards`: [m], of the rows `order` of the facts."""
    bad = np.flatnonzero(~np.isfinite(rewards))
    if len(bad):
        raise NonFiniteError(
            f"reward of sample {facts.ids[order[bad[0]]]} is {rewards[bad[0]]}; expected a "
            "finite number"
        )

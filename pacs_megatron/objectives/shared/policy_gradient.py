"""The clipped policy gradient, the base of most other objectives.

They differ in the advantage, in the ratio (of a token or of a sample), in the clipping and in the
mean.

The loss is the sum over trained tokens of u_i * (w * l(rho, A_i) + kl_coef * k - entropy_coef * H).
u_i contains every divisor, l = -min(rho A, clip(rho, 1 - low, 1 + high) A), and rho is exp(log
pi_theta - log pi_step_start) of the token or of its sample (`ratio_of`). A sample's ratio couples
its own tokens only. They are all in one micro-batch, so the ratio comes from the update's own
forward.

- w is 1, or the ratio of `importance` exp(log pi_step_start - log pi_sampler), without gradient, of
  the token or of the
  whole sample (the product), truncated (as in IMPALA, arXiv:1802.01561) or masked outside a band.
- k estimates KL(pi_theta || reference) of a token (joschu.net/blog/kl-approx.html), see
  `kl_estimator`. `kl_in: reward`
  works as in TRL's RLOO; verl's apply_kl_penalty subtracts the KL token by token.
- H is the entropy of the whole next-token distribution, with gradient.
"""

from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from pacs_megatron.contracts import Prepared, SampleFacts, TokenRecord
from pacs_megatron.contracts.protocols import LogprobSource, Statistic
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.shared.base import Objective, ReferenceOptions, at_tokens, given
from pacs_megatron.objectives.shared.groups import FloatArray, IntArray, build_table, by_row
from pacs_megatron.objectives.shared.lazy import Tensor, torch
from pacs_megatron.objectives.shared.sample_table import SampleTable

MAX_LOG_RATIO = 20.0
"""Upper limit of log-ratios, nats, without gradient above: exp would overflow, and Inf * 0 in a
clipped branch is NaN.
"""


class PolicyGradientOptions(ReferenceOptions):
    """Options of every policy gradient."""

    clip_high: float = Field(default=0.2, gt=0)
    """Clip the probability ratio at 1 + clip_high from above."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the estimate of the KL divergence to the frozen reference."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default_factory=lambda given: "k3" if given["kl_coef"] > 0 else None
    )
    """Estimate of a token's KL divergence, with q = log pi_reference - log pi.

    `k1`: -q; `k2`: q^2 / 2; `k3`: exp(q) - q - 1. The gradient of `k1` has mean 0, so `kl_in: loss`
    rejects it. Default k3.
    """
    kl_in: Literal["loss", "reward"] | None = Field(
        default_factory=lambda given: "loss" if given["kl_coef"] > 0 else None
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
        default_factory=lambda given: None if given["importance"] == "none" else "token"
    )
    """The ratio w of `importance`: of each token, or the product over the sample's tokens.

    Default token.
    """
    importance_cap: float | None = Field(
        default_factory=lambda given: None if given["importance"] == "none" else 2.0, gt=0
    )
    """Upper bound of the importance weight; default 2."""
    importance_floor: float | None = Field(
        default_factory=lambda given: 0.5 if given["importance"] == "mask" else None, gt=0
    )
    """Lower bound of the importance weight of `importance: mask`; default 0.5."""

    @model_validator(mode="after")
    def _refuse_bad_combinations(self) -> Self:
        # An option that the other settings do not use defaults to null, so a value given there is
        # an error.
        for key in ("kl_estimator", "kl_in"):
            self.refuse_unused(key, is_used=self.kl_coef > 0, by=f"kl_coef={self.kl_coef}")
        for key in ("importance_level", "importance_cap"):
            self.refuse_unused(
                key, is_used=self.importance != "none", by=f"importance={self.importance}"
            )
        self.refuse_unused(
            "importance_floor",
            is_used=self.importance == "mask",
            by=f"importance={self.importance}",
        )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "objective.kl_estimator=k1 with kl_in=loss has a gradient of mean 0, so it adds "
                "noise only; use k2 or k3, or "
                "kl_in=reward"
            )
        if self.reset_every is not None and self.kl_coef == 0:
            raise ValueError(
                f"objective.reset_every={self.reset_every} requires objective.kl_coef > 0, which "
                "uses the frozen "
                "reference; remove it"
            )
        if self.importance_floor is not None and self.importance_floor >= (
            self.importance_cap or 0
        ):
            raise ValueError(
                f"objective.importance_floor={self.importance_floor} is not below "
                f"importance_cap={self.importance_cap}; "
                "lower importance_floor"
            )
        return self


class ClippedOptions(PolicyGradientOptions):
    """Options of a policy gradient whose ratio is clipped from both sides."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Clip the probability ratio at 1 - clip_low from below."""


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
    def _refuse_unused_length(self) -> Self:
        self.refuse_unused(
            "constant_length", is_used=self.loss_mean == "dr_grpo", by=f"loss_mean={self.loss_mean}"
        )
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
        self.kl_in_reward = options.kl_in == "reward"
        self.passes = {"step_start": 0 if self.kl_in_reward else 1}
        if options.kl_coef > 0:
            self.passes["reference"] = 0
        # A sample's log-ratio is 0 by construction at the first update.
        self.coupled_by = {} if self.ratio_of == "token" else {"score": 1}
        if options.importance_level == "sequence":
            self.coupled_by["sampler_ratio"] = 0
        if self.ratio_of != "token" or options.importance_level == "sequence":
            self.coupling = "sample"

    def advantages(self, rewards: Tensor, table: SampleTable) -> Tensor:
        """float64 [m], advantages of a whole rollout batch:

        (R - mean) / (s + 1e-6) in the group, with the unbiased s.

        `rewards` [m]: the result of `self.rewards`, minus the KL of `kl_in: reward`.
        """
        centred = table.centred(rewards)
        return centred / (table.std(centred) + 1e-6)[table.group_of_sample]

    def rewards(self, facts: SampleFacts) -> FloatArray:
        """float64 [n], rewards before the KL."""
        return np.asarray(facts.rewards)

    def token_weights(self, facts: SampleFacts, advantages: Tensor) -> FloatArray:
        """float64 [n], u_i, which contains every divisor."""
        assert isinstance(self.options, TokenMeanOptions)
        return mean_weights(
            facts.response_lens, self.options.loss_mean, self.options.constant_length
        )

    def token_advantage(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """[t], the advantage of each token's sample."""
        return at_tokens(prepared.per_sample["advantage"], tokens)

    def surrogate(self, ratio: Tensor, advantage: Tensor, tokens: TokenRecord) -> Tensor:
        """[t], l(rho, A)."""
        assert isinstance(self.options, ClippedOptions)
        clipped = ratio.clamp(1.0 - self.options.clip_low, 1.0 + self.options.clip_high)
        return -torch.minimum(ratio * advantage, clipped * advantage)

    def is_clipped(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        """bool [t], tokens whose gradient is clipped to 0."""
        assert isinstance(self.options, ClippedOptions)
        too_high = (advantage > 0) & (ratio > 1.0 + self.options.clip_high)
        return too_high | ((advantage < 0) & (ratio < 1.0 - self.options.clip_low))

    def token_scores(self, tokens: TokenRecord) -> Tensor:
        """float64 [t], log rho of the token. Raises ValueError if rho is not of the sample."""
        if self.ratio_of == "token":
            return super().token_scores(tokens)
        return tokens.logprobs.double() - self._step_start(tokens).double()

    def sample_kl(self, step_start: FloatArray, reference: FloatArray) -> float:
        """Sum of k over a sample's tokens, nats; float32 [response] each."""
        log_ratio = np.minimum(reference.astype(np.float64) - step_start, MAX_LOG_RATIO)
        return float(self._estimate(torch.from_numpy(log_ratio)).sum())

    def prepare_step(self, facts: SampleFacts) -> dict[str, float]:
        """Advantage of each sample id, from the rewards of the whole rollout batch.

        The bits do not depend on the order of the rows. Raises NonFiniteError for a NaN or Inf
        among the rewards.
        """
        table = build_table(facts, whole_groups=self.options.compares_siblings)
        order = table.rows.numpy()
        rewards = self.rewards(facts)
        if self.kl_in_reward:
            rewards = rewards - self.options.kl_coef * given(
                facts.kl_to_reference, "facts.kl_to_reference"
            )
        rewards = rewards[order]
        bad = np.flatnonzero(~np.isfinite(rewards))
        if len(bad):
            raise NonFiniteError(
                f"reward of sample {facts.ids[order[bad[0]]]} is {rewards[bad[0]]}; expected a "
                "finite number"
            )
        advantages = self.advantages(torch.from_numpy(rewards), table)
        return {
            facts.ids[row]: advantage
            for row, advantage in zip(order, advantages.tolist(), strict=True)
        }

    def known(self, facts: SampleFacts, step_inputs: dict[str, float]) -> dict[str, Tensor]:
        """Per sample [n] float64:

        `advantage`, `token_weight` u_i with every divisor inside, `importance_share`.
        """
        advantage = torch.tensor(
            [step_inputs[sample_id] for sample_id in facts.ids], dtype=torch.float64
        )
        has_gradient = advantage != 0.0
        # The engine may skip samples of zero advantage, so importance is a mean over the tokens of
        # the other samples.
        num_tokens = float(facts.response_lens[has_gradient.numpy()].sum())
        return {
            "advantage": advantage,
            "token_weight": torch.from_numpy(self.token_weights(facts, advantage)),
            "importance_share": has_gradient.double() / max(num_tokens, 1.0),
        }

    def couple(
        self,
        table: SampleTable,
        scores: Tensor | None,
        sampler_ratios: Tensor | None,
        known: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """float64 [m]: `ratio` rho and `sampler_ratio` w of each sample, and `known` unchanged."""
        found = dict(known)
        lens = table.response_lens.clamp(min=1.0)
        if self.ratio_of != "token":
            log_ratio = torch.zeros_like(lens) if scores is None else scores
            log_ratio = log_ratio / lens if self.ratio_of == "mean" else log_ratio
            found["ratio"] = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        if sampler_ratios is not None:
            found["sampler_ratio"] = (sampler_ratios * lens).clamp(max=MAX_LOG_RATIO).exp()
        return found

    def prepare(
        self, scores: Tensor | None, facts: SampleFacts, step_inputs: dict[str, float]
    ) -> Prepared:
        """Per sample [n] float64: see `known` and `couple`."""
        per_sample = self.known(facts, step_inputs)
        if self.coupling == "sample":
            table = build_table(facts, whole_groups=False)
            in_order = None
            if self.options.importance_level == "sequence":
                ratios = given(facts.log_ratio_to_sampler, "facts.log_ratio_to_sampler")
                in_order = torch.from_numpy(ratios)[table.rows]
            found = self.couple(table, None if scores is None else scores[table.rows], in_order, {})
            per_sample |= {name: by_row(values, table) for name, values in found.items()}
        no_gradient = per_sample["advantage"] == 0.0
        num_samples = facts.num_samples
        num_tokens = float(facts.response_lens[~no_gradient.numpy()].sum())
        has_other_terms = self.options.kl_in == "loss" or self.options.entropy_coef > 0
        return Prepared(
            per_sample=per_sample,
            denominators=self._named(importance_mean=num_tokens, importance_cut_frac=num_tokens)
            | dict.fromkeys(self._named(clip_frac=0, kl=0), float(facts.response_lens.sum())),
            metrics=self._named(
                advantage_abs_mean=float(np.abs(per_sample["advantage"].numpy()).sum())
                / num_samples,
                zero_advantage_frac=float(no_gradient.sum()) / num_samples,
                truncated_frac=float(facts.truncated.sum()) / num_samples,
            ),
            zero_gradient=None if has_other_terms else no_gradient,
        )

    def token_loss(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """[t]; its masked sum is the true loss."""
        dtype = tokens.logprobs.dtype
        advantage = self.token_advantage(tokens, prepared).to(dtype)
        weight = at_tokens(prepared.per_sample["token_weight"], tokens).to(dtype)
        loss = self.surrogate(self._ratio(tokens, prepared), advantage, tokens)
        importance = self._importance(tokens, prepared)
        if importance is not None:
            loss = loss * importance.to(dtype)
        if self.options.kl_in == "loss":
            loss = loss + self.options.kl_coef * self._kl(tokens)
        if self.options.entropy_coef > 0:
            loss = loss - self.options.entropy_coef * given(tokens.entropy, "entropies")
        return weight * loss

    def token_metrics(self, tokens: TokenRecord, prepared: Prepared) -> dict[str, Tensor]:
        """`clip_frac`, the share of trained tokens whose gradient is clipped, and with kl_coef > 0
        the mean `kl` (nats). With importance: `importance_mean` and `importance_cut_frac` over the
        tokens of samples with a nonzero advantage, so without groups of equal rewards. The
        objective's name precedes each name.
        """
        num_tokens = tokens.response_lens.sum().clamp(min=1)
        advantage = self.token_advantage(tokens, prepared)
        ratio = self._ratio(tokens, prepared)
        metrics = self._named(
            clip_frac=self.is_clipped(ratio, advantage).to(ratio.dtype) / num_tokens
        )
        importance = self._importance(tokens, prepared)
        if importance is not None:
            share = at_tokens(prepared.per_sample["importance_share"], tokens)
            is_cut = self._is_cut(self._sampler_ratio(tokens, prepared))
            metrics |= self._named(
                importance_mean=importance * share, importance_cut_frac=is_cut * share
            )
        if self.options.kl_coef > 0:
            metrics |= self._named(kl=self._kl(tokens) / num_tokens)
        return metrics

    def _named(self, **values: Any) -> dict[str, Any]:
        return {f"{self.name}/{name}": value for name, value in values.items()}

    def _ratio(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """[t], rho with gradient, also if its value is 1 by construction.

        A sample's rho has the sample's value, and the gradient of its u_i |o_i| l(rho) by the
        token's own log-prob.
        """
        if self.ratio_of == "token":
            return torch.exp((tokens.logprobs - self._step_start(tokens)).clamp(max=MAX_LOG_RATIO))
        value = at_tokens(prepared.per_sample["ratio"], tokens).to(tokens.logprobs.dtype)
        moved = tokens.logprobs - tokens.logprobs.detach()
        if self.ratio_of == "product":
            moved = moved * at_tokens(tokens.response_lens, tokens)
        return value * (1.0 + moved)

    def _step_start(self, tokens: TokenRecord) -> Tensor:
        """[t], log pi_step_start."""
        return given(tokens.step_start_logprobs, "step_start log-probs")

    def _importance(self, tokens: TokenRecord, prepared: Prepared) -> Tensor | None:
        """[t], the factor of the policy-gradient term, without gradient; None when there is no
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
        """bool [t], tokens whose `_importance` is a bound or 0 instead of the ratio."""
        cap = self.options.importance_cap
        floor = self.options.importance_floor
        assert cap is not None
        return ratio > cap if floor is None else (ratio > cap) | (ratio < floor)

    def _sampler_ratio(self, tokens: TokenRecord, prepared: Prepared) -> Tensor:
        """[t], w = pi_step_start / pi_sampler of the sampled tokens, or of their samples."""
        if self.options.importance_level == "sequence":
            return at_tokens(prepared.per_sample["sampler_ratio"], tokens)
        log_ratio = self._step_start(tokens).detach() - given(
            tokens.sampler_logprobs, "the sampler's log-probs"
        )
        return torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))

    def _kl(self, tokens: TokenRecord) -> Tensor:
        """[t], estimate of each token's KL to the reference, nats."""
        reference = given(tokens.reference_logprobs, "reference log-probs")
        return self._estimate((reference - tokens.logprobs).clamp(max=MAX_LOG_RATIO))

    def _estimate(self, log_ratio: Tensor) -> Tensor:
        """k of q = log pi_reference - log pi, nats."""
        match self.options.kl_estimator:
            case "k1":
                return -log_ratio
            case "k2":
                return 0.5 * log_ratio.square()
            case _:
                return torch.expm1(log_ratio) - log_ratio


def leave_one_out(rewards: Tensor, table: SampleTable) -> Tensor:
    """[m], R - mean of the siblings."""
    return table.centred(rewards) * (table.sizes / (table.sizes - 1.0))[table.group_of_sample]


def mean_weights(
    response_lens: IntArray,
    loss_mean: Literal["token", "sequence", "dr_grpo"],
    constant_length: int | None = None,
) -> FloatArray:
    """float64 [n], weight of each token of a sample:

    1/T over all T tokens, 1/(N |o_i|), or 1/(N constant_length).
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

"""The options of each objective: a part of the schema (config/schema.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from pacs_megatron.config.text import Options


# An option that the other settings do not use defaults to None, so a value given there can be refused.
def _default_reference(given: dict[str, Any]) -> Literal["step_start", "frozen"] | None:
    return "step_start" if given["reward_proxy"] == "sum_log_ratio" else None


def _default_actor_scope(given: dict[str, Any]) -> Literal["group", "own"] | None:
    return "group" if given["actor_term"] > 0 else None


def _default_importance_cap(given: dict[str, Any]) -> float | None:
    return 2.0 if given["importance"] in ("truncate", "mask") else None


def _default_importance_floor(given: dict[str, Any]) -> float | None:
    return 0.5 if given["importance"] == "mask" else None


def _default_advantage_eps(given: dict[str, Any]) -> float | None:
    return 1e-6 if given["advantage"] == "grpo" else None


class _TrainedOptions(Options):
    """Options of every objective."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping. The default depends on the objective
    (docs/measurements/defaults.md)."""


class PacsOptions(_TrainedOptions):
    """PACS: supervised cross-entropy on labels, with psi from the policy's own log-probs. Numbers are the paper's equations."""

    name: Literal["pacs"]
    """Loss function: `pacs`, `grpo` or `sft`."""
    clip_grad: float = Field(default=0.0, ge=0)
    """Maximum global gradient norm; 0 disables clipping. Norms of PACS are 10 to 100 times those of GRPO, so a limit of
    1.0 rescales nearly every update to the same length."""
    beta: float = Field(default=1.0, gt=0)
    """Scale of the reward proxy, beta in (7)."""
    reward_proxy: Literal["sum_log_ratio", "mean_log_prob"] = "sum_log_ratio"
    """Reward proxy. `sum_log_ratio` sums log-ratios to `reference` over the response; `mean_log_prob` has no reference."""
    score: Literal["rloo", "dr_grpo", "grpo", "naive"] = "rloo"
    """Score psi from the proxies of a group (6): the estimator that centres and scales them."""
    score_std_floor: float | None = Field(default=None, gt=0)
    """Lower bound of a group's standard deviation with `score: grpo`. Required with a reference."""
    weighting: Literal["question", "only_positive", "only_negative", "none"] = "question"
    """Class weights of correct and incorrect samples (section 3.5)."""
    reference: Literal["step_start", "frozen"] | None = Field(default_factory=_default_reference)
    """Reference policy of `reward_proxy: sum_log_ratio`: the policy at the start of the step, or a frozen snapshot."""
    reset_every: PositiveInt | None = None
    """Interval, in steps, at which `reference: frozen` is reset to the current policy; null never resets it."""
    actor_term: float = Field(default=0.0, ge=0.0, le=1.0)
    """Weight of the score-function term of the gradient (5)."""
    actor_scope: Literal["group", "own"] | None = Field(default_factory=_default_actor_scope)
    """Losses in the score-function term: of the whole group (the true gradient, default), or of the sample, as (5) prints."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Cap of the importance weight of stale samples, w_i *= min(exp(mean_t(log pi_step_start - log pi_sampler)), cap).
    null disables the correction."""

    @model_validator(mode="after")
    def _refuse_unused(self) -> PacsOptions:
        if self.reward_proxy == "mean_log_prob" and self.reference is not None:
            raise ValueError(
                f"objective.reference={self.reference} is not used by reward_proxy mean_log_prob, which has no "
                "reference; remove it, or set objective.reward_proxy=sum_log_ratio"
            )
        if self.reward_proxy == "sum_log_ratio" and self.reference is None:
            raise ValueError(
                "objective.reference is null but reward_proxy sum_log_ratio requires it; use step_start or frozen"
            )
        if self.reset_every is not None and self.reference != "frozen":
            raise ValueError(
                f"objective.reset_every={self.reset_every} needs objective.reference=frozen, got "
                f"{self.reference or 'no reference'}; remove it or set reference to frozen"
            )
        if self.score_std_floor is not None and self.score != "grpo":
            raise ValueError(f"objective.score_std_floor is used by score grpo only, got score={self.score}; remove it")
        if self.score == "grpo" and self.reference is not None and self.score_std_floor is None:
            when = "at the first update" if self.reference == "step_start" else "when the snapshot is the policy itself"
            raise ValueError(
                f"objective.score_std_floor is required with score grpo and reference {self.reference}: every score is 0 "
                f"{when}, so the standard deviation is 0 too; set it (for instance 0.1) or use score rloo"
            )
        if self.actor_scope is not None and self.actor_term == 0:
            raise ValueError(f"objective.actor_scope={self.actor_scope} needs objective.actor_term > 0; remove it")
        if self.actor_scope is None and self.actor_term > 0:
            raise ValueError("objective.actor_scope is null but actor_term > 0 needs it; use group or own")
        if self.actor_term > 0 and self.reward_proxy != "sum_log_ratio":
            raise ValueError(
                f"objective.actor_term={self.actor_term} requires objective.reward_proxy=sum_log_ratio, got "
                f"{self.reward_proxy}; set actor_term to 0"
            )
        return self

    def refuse_updates_per_step(self, updates_per_step: int) -> None:
        """Raises ValueError if these options do not allow `updates_per_step` updates."""
        if self.actor_term > 0 and updates_per_step > 1:
            raise ValueError(
                f"objective.actor_term={self.actor_term} needs batch.updates_per_step=1, got {updates_per_step}: later "
                "updates are off-policy; set actor_term to 0 or updates_per_step to 1"
            )


class GrpoOptions(_TrainedOptions):
    """GRPO and its variants: clipped policy gradient with group-relative advantages."""

    name: Literal["grpo"]
    """Loss function: `pacs`, `grpo` or `sft`."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Advantage of a sample in its group. `grpo`: (R - mean) / std; `dr_grpo`: R - mean; `rloo`: leave one out."""
    advantage_eps: float | None = Field(default_factory=_default_advantage_eps, gt=0)
    """Constant added to the standard deviation of `advantage: grpo`; default 1e-6."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Clip the probability ratio at 1 - clip_low from below."""
    clip_high: float = Field(default=0.2, gt=0)
    """Clip the probability ratio at 1 + clip_high from above (DAPO's clip-higher: 0.28)."""
    loss_mean: Literal["token", "sequence", "dr_grpo"] = "token"
    """Averaging of token losses. `token`: over all tokens of the mini-batch; `sequence`: mean of sequence means; `dr_grpo`:
    sum divided by `constant_length`."""
    constant_length: PositiveInt | None = None
    """Divisor of `loss_mean: dr_grpo`, in tokens."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 estimate of the KL divergence to the frozen reference."""
    reset_every: PositiveInt | None = None
    """Interval, in steps, at which the frozen reference is reset to the current policy; null never resets it. Requires
    kl_coef > 0."""
    importance: Literal["none", "truncate", "mask"] = "none"
    """Importance correction per token for stale samples and for sampler mismatch, with
    w = exp(log pi_step_start - log pi_sampler), without gradient. `truncate` multiplies the token loss by
    min(w, importance_cap); `mask` by w, or by 0 outside importance_floor <= w <= importance_cap."""
    importance_cap: float | None = Field(default_factory=_default_importance_cap, gt=0)
    """Upper bound of the importance weight; default 2."""
    importance_floor: float | None = Field(default_factory=_default_importance_floor, gt=0)
    """Lower bound of the importance weight of `importance: mask`; default 0.5."""

    @model_validator(mode="after")
    def _refuse_unused(self) -> GrpoOptions:
        if (self.advantage_eps is not None) != (self.advantage == "grpo"):
            raise ValueError(
                f"objective.advantage_eps={self.advantage_eps} does not go with advantage={self.advantage}: "
                "only advantage grpo uses it, and requires a number; remove the key"
            )
        if self.constant_length is not None and self.loss_mean != "dr_grpo":
            raise ValueError(
                f"objective.constant_length is used by loss_mean dr_grpo only, got {self.loss_mean}; remove it"
            )
        if self.constant_length is None and self.loss_mean == "dr_grpo":
            raise ValueError(
                "objective.constant_length is required with loss_mean dr_grpo; set it to rollout.sampling."
                "max_response_tokens"
            )
        if (self.importance_cap is not None) != (self.importance != "none"):
            raise ValueError(
                f"objective.importance_cap={self.importance_cap} does not go with importance={self.importance}: only "
                "truncate and mask use it, and require a number; remove the key"
            )
        if (self.importance_floor is not None) != (self.importance == "mask"):
            raise ValueError(
                f"objective.importance_floor={self.importance_floor} does not go with importance={self.importance}: only "
                "mask uses it, and requires a number; remove the key"
            )
        if self.importance_floor is not None and self.importance_floor >= (self.importance_cap or 0):
            raise ValueError(
                f"objective.importance_floor={self.importance_floor} is not below importance_cap={self.importance_cap}; "
                "lower importance_floor"
            )
        if self.reset_every is not None and self.kl_coef == 0:
            raise ValueError(
                f"objective.reset_every={self.reset_every} requires objective.kl_coef > 0, which uses the frozen "
                "reference; remove it"
            )
        return self


class SftOptions(_TrainedOptions):
    """Supervised fine-tuning on demonstrations."""

    name: Literal["sft"]
    """Loss function: `pacs`, `grpo` or `sft`."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Averaging of token losses. `token`: over all response tokens of the mini-batch; `sequence`: mean of response means."""


ObjectiveOptions = Annotated[PacsOptions | GrpoOptions | SftOptions, Field(discriminator="name")]

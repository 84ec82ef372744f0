"""The options of each objective: a part of the schema (config/schema.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from pacs_megatron.config.options import Options


# Fields that only some settings use default to None where they are unused, so that giving one there can be refused.
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
    """Limit of the gradient's global norm; 0: no clipping. The default is the objective's own
    (docs/measurements/defaults.md)."""


class PacsOptions(_TrainedOptions):
    name: Literal["pacs"]
    clip_grad: float = Field(default=0.0, ge=0)
    """Limit of the gradient's global norm; 0: no clipping. PACS's norms are 10 to 100 times GRPO's, so a limit of 1.0
    gives nearly every update one length."""
    beta: float = Field(default=1.0, gt=0)
    """Scale of the reward proxy (7)."""
    reward_proxy: Literal["sum_log_ratio", "mean_log_prob"] = "sum_log_ratio"
    """`sum_log_ratio`: of all response tokens against `reference`; `mean_log_prob`: no reference."""
    score: Literal["rloo", "dr_grpo", "grpo", "naive"] = "rloo"
    """How siblings centre and scale the proxy (6)."""
    score_std_floor: float | None = Field(default=None, gt=0)
    """With `score: grpo`: lower bound of the group's standard deviation; required with `reference: step_start`."""
    weighting: Literal["question", "only_positive", "only_negative", "none"] = "question"
    """Class weights (3.5)."""
    reference: Literal["step_start", "frozen"] | None = Field(default_factory=_default_reference)
    """With `reward_proxy: sum_log_ratio`; default step_start: the trainer's own policy at the start of the step."""
    reset_every: PositiveInt | None = None
    """With `reference: frozen`: hard reset of the snapshot to the current policy every so many steps."""
    actor_term: float = Field(default=0.0, ge=0.0, le=1.0)
    """Weight of the score-function part of the gradient (5)."""
    actor_scope: Literal["group", "own"] | None = Field(default_factory=_default_actor_scope)
    """With actor_term > 0: losses of the whole group (the true gradient, the default), or (5) as printed."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Importance correction for stale rollouts: w_i *= min(exp(mean_t(log pi_step_start - log pi_sampler)), cap)."""

    @model_validator(mode="after")
    def _refuse_unused(self) -> PacsOptions:
        if self.reward_proxy == "mean_log_prob" and self.reference is not None:
            raise ValueError(
                f"objective.reference={self.reference} is not used by reward_proxy mean_log_prob, which has no "
                "reference; remove it, or set objective.reward_proxy=sum_log_ratio"
            )
        if self.reward_proxy == "sum_log_ratio" and self.reference is None:
            raise ValueError(
                "objective.reference is null but reward_proxy sum_log_ratio needs it; use step_start or frozen"
            )
        if self.reset_every is not None and self.reference != "frozen":
            raise ValueError(
                f"objective.reset_every={self.reset_every} needs objective.reference=frozen, got "
                f"{self.reference or 'no reference'}; remove it or set reference to frozen"
            )
        if self.score_std_floor is not None and self.score != "grpo":
            raise ValueError(f"objective.score_std_floor is used by score grpo only, got score={self.score}; remove it")
        if self.score == "grpo" and self.reference == "step_start" and self.score_std_floor is None:
            raise ValueError(
                "objective.score_std_floor is required with score grpo and reference step_start: every score is 0 at "
                "the first update, so the standard deviation is 0 too; set it (for instance 0.1) or use score rloo"
            )
        if self.actor_scope is not None and self.actor_term == 0:
            raise ValueError(f"objective.actor_scope={self.actor_scope} needs objective.actor_term > 0; remove it")
        if self.actor_scope is None and self.actor_term > 0:
            raise ValueError("objective.actor_scope is null but actor_term > 0 needs it; use group or own")
        if self.actor_term > 0 and self.reward_proxy != "sum_log_ratio":
            raise ValueError(
                f"objective.actor_term={self.actor_term} needs objective.reward_proxy=sum_log_ratio, got "
                f"{self.reward_proxy}; set actor_term to 0"
            )
        return self

    def refuse_updates_per_step(self, updates_per_step: int) -> None:
        """Raises ValueError when these options cannot run with so many updates a step."""
        if self.actor_term > 0 and updates_per_step > 1:
            raise ValueError(
                f"objective.actor_term={self.actor_term} needs batch.updates_per_step=1, got {updates_per_step}: later "
                "updates are off-policy; set actor_term to 0 or updates_per_step to 1"
            )


class GrpoOptions(_TrainedOptions):
    name: Literal["grpo"]
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """`grpo`: (R - mean)/std of the group; `dr_grpo`: R - mean; `rloo`: leave one out."""
    advantage_eps: float | None = Field(default_factory=_default_advantage_eps, gt=0)
    """With `advantage: grpo`, default 1e-6: added to the standard deviation."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratio clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio clipped above at 1 + clip_high (DAPO's clip-higher: 0.28)."""
    loss_mean: Literal["token", "sequence", "dr_grpo"] = "token"
    """`token`: over all tokens of the mini-batch; `sequence`: mean of sequence means; `dr_grpo`: a constant length."""
    constant_length: PositiveInt | None = None
    """With `loss_mean: dr_grpo`: the divisor in tokens."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL estimate against the frozen reference."""
    reset_every: PositiveInt | None = None
    """With kl_coef > 0: hard reset of the frozen reference every so many steps."""
    importance: Literal["none", "truncate", "mask"] = "none"
    """Correction for stale samples and for a sampler that is not the trainer, by the token ratio
    w = exp(log pi_step_start - log pi_sampler) without gradient. `truncate`: a token's loss times min(w, importance_cap);
    `mask`: times w, but 0 outside importance_floor <= w <= importance_cap."""
    importance_cap: float | None = Field(default_factory=_default_importance_cap, gt=0)
    """With `importance`; default 2."""
    importance_floor: float | None = Field(default_factory=_default_importance_floor, gt=0)
    """With `importance: mask`; default 0.5."""

    @model_validator(mode="after")
    def _refuse_unused(self) -> GrpoOptions:
        if (self.advantage_eps is not None) != (self.advantage == "grpo"):
            raise ValueError(
                f"objective.advantage_eps={self.advantage_eps} does not go with advantage={self.advantage}: "
                "advantage grpo needs a number, the others do not use it; remove the key"
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
                f"objective.importance_cap={self.importance_cap} does not go with importance={self.importance}: truncate "
                "and mask need a number, none does not use it; remove the key"
            )
        if (self.importance_floor is not None) != (self.importance == "mask"):
            raise ValueError(
                f"objective.importance_floor={self.importance_floor} does not go with importance={self.importance}: mask "
                "needs a number, the others do not use it; remove the key"
            )
        if self.importance_floor is not None and self.importance_floor >= (self.importance_cap or 0):
            raise ValueError(
                f"objective.importance_floor={self.importance_floor} is not below importance_cap={self.importance_cap}"
            )
        if self.reset_every is not None and self.kl_coef == 0:
            raise ValueError(
                f"objective.reset_every={self.reset_every} needs objective.kl_coef > 0: without it there is no frozen "
                "reference; remove it"
            )
        return self


class SftOptions(_TrainedOptions):
    name: Literal["sft"]
    loss_mean: Literal["token", "sequence"] = "token"
    """`token`: over all response tokens of the mini-batch; `sequence`: mean of the responses' means."""


ObjectiveOptions = Annotated[PacsOptions | GrpoOptions | SftOptions, Field(discriminator="name")]

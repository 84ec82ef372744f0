"""Checks a step's metrics against the limits of `mismatch`, finds steps that train nothing, and
warns when most updates are clipped.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pacs_megatron.config.schema import MismatchOptions
from pacs_megatron.errors import RolloutError
from pacs_megatron.objectives.shared.base import CommonOptions

logger = logging.getLogger(__name__)

_SAMPLER_ADVICE = (
    "Check weight sync (rollout.sync.verify=full), the sampler's dtype or quantisation, then "
    "packing and layout (mismatch/* in metrics.jsonl)"
)
_SCORE_ADVICE = (
    "Set precision.head=fp32 with bf16 weights, lower objective.beta, use "
    "objective.reward_proxy=mean_log_prob, or shorten responses (docs/numerics.md; pacs/score_* "
    "in metrics.jsonl)"
)
LIMITS = {
    "max_abs_mean": (
        "mismatch/logprob_abs_mean",
        "trainer and sampler log-probs differ by {:.4f} nats a token",
    ),
    "max_kl": (
        "mismatch/kl",
        "KL(sampler, trainer) is {:.4f} nats a token",
    ),
    "max_over_frac": (
        "mismatch/over_frac",
        "a share of {:.4f} of the tokens is above mismatch.threshold",
    ),
    "max_score_noise": (
        "pacs/score_noise",
        "scores differ by {:.4f} between two packings",
    ),
    "min_score_snr": (
        "pacs/score_snr",
        "the variance of the scores is {:.4f} times that of their noise",
    ),
}
"""Option of `mismatch` -> metric, message"""


def exceeded_limit(options: MismatchOptions, row: Mapping[str, float | None]) -> str | None:
    """The first limit that a step's metrics exceed, with the fix; None if there is none."""
    for option, (metric, message) in LIMITS.items():
        limit = getattr(options, option)
        value = row.get(metric)
        if limit is None or value is None:
            continue

        is_minimum = option.startswith("min_")
        is_exceeded = value < limit if is_minimum else value > limit
        if is_exceeded:
            comparison = "less" if is_minimum else "more"
            advice = _SAMPLER_ADVICE if metric.startswith("mismatch/") else _SCORE_ADVICE
            return (
                f"{message.format(value)}, {comparison} than mismatch.{option}={limit:g}; saved. "
                f"{advice}"
            )
    return None


def idle_reason(row: Mapping[str, float | None]) -> str | None:
    """Why a step has trained nothing; None if it has, also if only a critic was trained."""
    if row.get("admission/num_groups") == 0:
        prefix = "admission/dropped_"
        counts = []
        for name, count in row.items():
            if name.startswith(prefix) and count:
                counts.append(f"{name.removeprefix(prefix)}: {count:.0f}")
        return f"admission dropped every group ({', '.join(counts)})"
    if row.get("optimizer/grad_norm") == 0 and not row.get("critic/grad_norm"):
        return (
            f"every gradient is 0 (mean label {row.get('reward/label_mean')}): the samples of each "
            "group have one label or one reward"
        )
    return None


def check_idle(
    step: int, row: Mapping[str, float | None], idle_steps: int | None, limit: int | None
) -> None:
    """Raises RolloutError if the run has trained nothing since its start, for too many steps.

    Args:
        step: the last complete step.
        row: its metrics.
        idle_steps: number of first steps that have trained nothing; None: one has.
        limit: `admission.max_idle_steps`.
    """
    if idle_steps is None or limit is None or idle_steps < limit:
        return
    reason = idle_reason(row)
    if reason is not None:
        raise RolloutError(
            f"step {step}: the first {idle_steps} steps have trained nothing, {reason}; saved. "
            "Check the reward with `pacs-megatron data preview` and the responses in rollouts/, "
            "use easier problems, or raise admission.max_idle_steps"
        )


def with_signal_to_noise(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with `pacs/score_snr`, if it has the noise and scores that are not 0 by construction.

    The scores' mean square contains that of their noise: snr = (mean psi^2 - noise^2) / noise^2.
    """
    noise = row.get("pacs/score_noise")
    observed = row.get("pacs/psi_mean_square")
    if not noise or observed is None:
        return row
    return row | {"pacs/score_snr": observed / noise**2 - 1}


def warn_of_clipping(clipped_fracs: Sequence[float], objective: CommonOptions) -> None:
    """Warns if more than half of an attempt's updates were clipped by a limit that was configured.

    The default of an objective gives no warning.

    Called at the end only: a healthy run that starts from random weights clips its first updates
    too.

    Args:
        clipped_fracs: `optimizer/clipped_frac` of each step of the attempt.
        objective: options of the run's objective.
    """
    if objective.clip_grad == type(objective).model_fields["clip_grad"].default:
        return
    if sum(clipped_fracs) > len(clipped_fracs) / 2:
        logger.warning(
            "%.0f %% of the updates were clipped to a gradient norm of objective.clip_grad=%g, so "
            "large and small gradients gave updates of one length; raise clip_grad, or set it to 0",
            100 * sum(clipped_fracs) / len(clipped_fracs),
            objective.clip_grad,
        )

"""The circuit breaker: a run saves and stops when the log-probs of a step cannot be trusted."""

from collections.abc import Mapping
from typing import Any

from pacs_megatron.config.schema import MismatchOptions

_SAMPLER_ADVICE = (
    "Look at weight sync (rollout.sync.verify=full), the sampler's dtype or quantisation, temperature and filters, then "
    "packing and layout (mismatch/* in metrics.jsonl)"
)
_SCORE_ADVICE = (
    "Set precision.head=fp32 with bf16 weights, lower objective.beta, use objective.reward_proxy=mean_log_prob, or shorten "
    "responses (docs/numerics.md; pacs/score_* in metrics.jsonl)"
)
LIMITS = {
    "max_abs_mean": (
        "mismatch/logprob_abs_mean",
        "trainer and sampler log-probs differ by {:.4f} nats a token",
        _SAMPLER_ADVICE,
    ),
    "max_kl": ("mismatch/kl", "KL(sampler, trainer) is {:.4f} nats a token", _SAMPLER_ADVICE),
    "max_over_frac": (
        "mismatch/over_frac",
        "a share of {:.4f} of the tokens is above mismatch.threshold",
        _SAMPLER_ADVICE,
    ),
    "max_score_noise": ("pacs/score_noise", "scores differ by {:.4f} between two packings", _SCORE_ADVICE),
    "min_score_snr": (
        "pacs/score_snr",
        "the variance of the scores is {:.4f} times that of their noise",
        _SCORE_ADVICE,
    ),
}
"""Option of `mismatch` -> metric, message, advice"""


def exceeded_limit(options: MismatchOptions, row: Mapping[str, float | None]) -> str | None:
    """The first limit that a step's metrics exceed, with the fix; None if there is none."""
    for option, (metric, message, advice) in LIMITS.items():
        limit, found = getattr(options, option), row.get(metric)
        if limit is None or found is None:
            continue
        word = "less" if option.startswith("min_") else "more"
        if found < limit if word == "less" else found > limit:
            return f"{message.format(found)}, {word} than mismatch.{option}={limit:g}; saved. {advice}"
    return None


def with_signal_to_noise(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with `pacs/score_snr`, if it has the noise and scores that are not 0 by construction."""
    noise, observed = row.get("pacs/score_noise"), row.get("pacs/psi_mean_square")
    if not noise or observed is None:
        return row
    return row | {"pacs/score_snr": observed / noise**2 - 1}

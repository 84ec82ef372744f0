"""Titles and units of metrics, for every page and program that shows one.

Most titles come from the words of the key: `grpo/clip_frac` is `GRPO: clipped share`.
"""

from typing import NamedTuple


class MetricWords(NamedTuple):
    """How a metric is shown."""

    title: str
    unit: str = ""
    """its unit, its denominator, or what it is of; empty where the title has it"""


TITLES = {
    "reward/mean": MetricWords("reward", "mean over samples"),
    "objective/loss": MetricWords("loss", "objective of the mini-batches"),
    "optimizer/grad_norm": MetricWords("gradient norm", "before clipping"),
    "policy/entropy": MetricWords("entropy", "nats a token"),
    "policy/entropy_step_start": MetricWords(
        "entropy at the step's start", "nats a token, all responses"
    ),
    "response/len_mean": MetricWords("response length", "tokens"),
    "response/len_max": MetricWords("longest response", "tokens"),
    "tokens_per_s": MetricWords("tokens/s"),
    "speed/tokens_per_s_per_gpu": MetricWords("tokens/s a GPU"),
    "speed/tflops_per_gpu": MetricWords("TFLOP/s a GPU", "in log-prob passes and updates"),
    "speed/mfu": MetricWords("MFU of training", "share of the bf16 peak"),
    "speed/step_mfu": MetricWords("MFU of the step", "share of the bf16 peak"),
    "pacs/residual_mean": MetricWords("distance to the label", "mean abs(σ(ψ) − y)"),
    "pacs/psi_mean_pos": MetricWords("mean ψ of right answers"),
    "pacs/psi_mean_neg": MetricWords("mean ψ of wrong answers"),
    "pacs/one_class_group_frac": MetricWords("groups of one class", "share"),
    "pacs/truncated_frac": MetricWords("truncated responses", "share"),
    "pacs/psi_over_8_frac": MetricWords("absolute ψ above 8", "share"),
    "critic/value_mean": MetricWords("value", "mean over tokens"),
    "critic/return_mean": MetricWords("return", "mean over tokens"),
    "time/step_s": MetricWords("time of a step", "seconds"),
}
"""Metric -> its words, where those of its key are not enough; docs/metrics.md has the same table"""
_GROUPS = {
    "cispo": "CISPO",
    "dapo": "DAPO",
    "dgpo": "DGPO",
    "distill": "distillation",
    "dr_grpo": "Dr. GRPO",
    "grpo": "GRPO",
    "gspo": "GSPO",
    "maxrl": "MaxRL",
    "pacs": "PACS",
    "ppo": "PPO",
    "real": "REAL",
    "reinforce_pp": "REINFORCE++",
    "rloo": "RLOO",
    "sft": "SFT",
    "steer": "STEER",
    "ucas": "UCAS",
    "vimpo": "VIMPO",
    "w_reinforce": "W-REINFORCE",
    "mismatch": "sampler and trainer",
    "eval": "evaluation",
}
_WORDS = {
    "abs": "absolute",
    "clip": "clipped",
    "dp": "data-parallel",
    "frac": "share",
    "grad": "gradient",
    "kl": "KL",
    "len": "length",
    "logprob": "log-prob",
    "lr": "learning rate",
    "max": "largest",
    "mfu": "MFU",
    "min": "least",
    "neg": "of wrong ones",
    "num": "number of",
    "pos": "of right ones",
    "psi": "ψ",
    "s": "seconds",
    "snr": "signal to noise",
}
_FIRST = ("mean", "max", "min", "num")
"""Words that come before what they are of: `len_max` is `largest length`."""


def words_of(key: str) -> MetricWords:
    """The title and the unit of a metric."""
    if key in TITLES:
        return TITLES[key]
    benchmark, _, rate = key.removeprefix("eval/").rpartition("/")
    if key.startswith("eval/") and "@" in rate and "_" not in rate:
        return MetricWords(f"{benchmark} {rate}", "share of the problems")
    return MetricWords(_in_words(key))


def _in_words(key: str) -> str:
    """The name of a metric in words; the parts of its groups come first."""
    *groups, name = key.split("/")
    parts = name.split("_")
    if len(parts) > 1 and parts[-1] in _FIRST:
        parts = [parts[-1], *parts[:-1]]
    words = " ".join(_WORDS.get(part, part) for part in parts)
    words = words.replace("per seconds", "per second")
    titles = [_GROUPS.get(group, group.replace("_", " ")) for group in groups]
    return ": ".join([*titles, words])

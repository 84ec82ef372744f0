"""Names of metrics in words, for titles of charts: `grpo/clip_frac` is `GRPO: clipped share`."""

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


def in_words(key: str) -> str:
    """The name of a metric in words; the parts of its groups come first."""
    *groups, name = key.split("/")
    parts = name.split("_")
    if len(parts) > 1 and parts[-1] in _FIRST:
        parts = [parts[-1], *parts[:-1]]
    words = " ".join(_WORDS.get(part, part) for part in parts)
    words = words.replace("per seconds", "per second")
    titles = [_GROUPS.get(group, group.replace("_", " ")) for group in groups]
    return ": ".join([*titles, words])

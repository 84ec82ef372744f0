"""Names of metrics in words."""

import pytest

from pacs_megatron.observability.metric_words import in_words


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("grpo/clip_frac", "GRPO: clipped share"),
        ("response/len_max", "response: largest length"),
        ("mismatch/kl", "sampler and trainer: KL"),
        ("critic/grad_norm", "critic: gradient norm"),
        ("eval/aime24/num_problems", "evaluation: aime24: number of problems"),
        ("time/update/forward_s", "time: update: forward seconds"),
        ("tokens_per_s", "tokens per second"),
        ("custom/thing", "custom: thing"),
    ],
)
def test_metrics_have_names_in_words(key: str, words: str) -> None:
    assert in_words(key) == words

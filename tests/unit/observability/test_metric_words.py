"""Titles and units of metrics: one table for report, TensorBoard, `compare` and document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pacs_megatron.observability.metric_words import TITLES, words_of
from tests.support.reports import step_row

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("grpo/clip_frac", "GRPO: clipped share"),
        ("response/len_max", "longest response"),
        ("mismatch/kl", "sampler and trainer: KL"),
        ("critic/grad_norm", "critic: gradient norm"),
        ("eval/aime24/num_problems", "evaluation: aime24: number of problems"),
        ("eval/aime24/pass@8", "aime24 pass@8"),
        ("eval/aime24/pass@8_se", "evaluation: aime24: pass@8 se"),
        ("time/update/forward_s", "time: update: forward seconds"),
        ("tokens_per_s", "tokens/s"),
        ("custom/thing", "custom: thing"),
    ],
)
def test_metrics_have_names_in_words(key: str, words: str) -> None:
    assert words_of(key).title == words


def test_the_document_has_the_same_titles() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Titles")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|([^\n]*)\|$", section, flags=re.M)
    documented = {key: (title, unit.strip()) for key, title, unit in rows}
    assert documented == TITLES


def test_titles_are_of_different_metrics() -> None:
    titles = [words_of(key).title for key in {*TITLES, *step_row(1)}]
    assert len(titles) == len(set(titles))

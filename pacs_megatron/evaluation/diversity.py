"""Diversity of the correct responses to one problem (arXiv:2509.02522, analysis of diversity)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pacs_megatron.errors import DataError

Embedder = Callable[[Sequence[str]], np.ndarray]
"""Texts -> float [texts, dimension]. The caller chooses the embedding model and reports it beside the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Mean pairwise cosine distance, in [0, 2]: 0 if all correct responses have the same direction."""

    mean: float | None
    """over `num_questions`; None if there are none"""
    num_questions: int
    """questions with at least two correct responses"""
    num_excluded: int
    """questions with fewer correct responses"""


def diversity(correct_responses: Mapping[str, Sequence[str]], embed: Embedder) -> Diversity:
    """Average over questions of the mean of 1 - cos over all pairs of that question's correct responses.

    `correct_responses` by question id; an empty sequence counts as an excluded question. Raises DataError if an embedding
    has the wrong shape, is not finite or is zero.
    """
    distances: list[float] = []
    for question_id in sorted(correct_responses):
        texts = correct_responses[question_id]
        if len(texts) >= 2:
            distances.append(_mean_pairwise_distance(_checked(embed(texts), len(texts), question_id)))
    count = len(distances)
    return Diversity(
        mean=math.fsum(distances) / count if count else None,
        num_questions=count,
        num_excluded=len(correct_responses) - count,
    )


def _mean_pairwise_distance(vectors: np.ndarray) -> float:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit.T
    rows, columns = np.triu_indices(len(unit), k=1)
    return float(np.mean(1.0 - cosines[rows, columns]))


def _checked(vectors: np.ndarray, num_texts: int, question_id: str) -> np.ndarray:
    vectors = np.asarray(vectors, dtype=np.float64)
    if vectors.ndim != 2 or len(vectors) != num_texts:
        raise DataError(
            f"diversity of {question_id}: embeddings have shape {vectors.shape}, expected ({num_texts}, dimension); "
            "fix the embedding function"
        )
    if not np.isfinite(vectors).all() or not np.linalg.norm(vectors, axis=1).all():
        raise DataError(
            f"diversity of {question_id}: an embedding is zero or not finite and has no direction; "
            "fix the embedding function"
        )
    return vectors

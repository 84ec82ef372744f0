"""The sampled distribution, against its definition and against counting."""

import numpy as np
import pytest
import torch

from pacs_megatron.contracts import SamplingOptions
from pacs_megatron.embedded.sampling import RowSampler
from tests.support.rollout import sampling

VOCAB = 20
CASES = [
    sampling(),
    sampling(temperature=0.6, top_p=0.95, top_k=12),
    sampling(temperature=1.3, top_p=0.5, top_k=7),
    sampling(top_k=1),
    sampling(top_p=1e-6),
    sampling(temperature=0.6),
    sampling(temperature=1.7),
    sampling(top_k=5),
    sampling(top_p=0.8),
    sampling(top_k=10 * VOCAB),
    # The five most likely tokens have 0.91 of the probability: top_p excludes none of them.
    sampling(top_k=5, top_p=0.95),
]


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities, float64."""
    scaled: np.ndarray = np.exp((logits - logits.max()) / temperature)
    scaled /= scaled.sum()
    return scaled


def allowed(probs: np.ndarray, params: SamplingOptions) -> set[int]:
    """The tokens that pass both filters, each of which is applied to all probabilities.

    `top_p` is Holtzman et al. 2020, equation 2: the smallest set whose sum is at least top_p.
    """
    order = np.argsort(-probs, kind="stable")
    nucleus = 1 + int(np.sum(np.cumsum(probs[order]) < params.top_p))
    in_nucleus = set(order[:nucleus].tolist())
    most_likely = set(order[: params.top_k or None].tolist())
    return in_nucleus & most_likely


@pytest.mark.parametrize(
    "params",
    [*CASES[:5], CASES[-1]]
    + [pytest.param(params, marks=pytest.mark.full) for params in CASES[5:-1]],
    ids=str,
)
def test_distribution_and_log_probs(params: SamplingOptions) -> None:
    """Tokens are drawn from the filtered distribution; log-probs are those before the filters."""
    rows = 40_000
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    logits = row.expand(rows, VOCAB)
    model_probs = softmax(row.double().numpy(), params.temperature)
    sampler = RowSampler(params, range(rows), torch.device("cpu"))
    ids, logprobs = sampler.draw(logits)
    expected = np.log(model_probs)[ids.numpy()]
    np.testing.assert_allclose(logprobs.double().numpy(), expected, atol=1e-6, rtol=1e-6)

    counts = np.bincount(ids.numpy(), minlength=VOCAB)
    is_allowed = np.isin(np.arange(VOCAB), sorted(allowed(model_probs, params)))
    probs = np.where(is_allowed, model_probs, 0.0)
    probs /= probs.sum()
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    chi2 = float(((counts[kept] - rows * probs[kept]) ** 2 / (rows * probs[kept])).sum())
    freedom = int(kept.sum()) - 1
    assert chi2 <= freedom + 4 * np.sqrt(2 * freedom)  # fixed seeds: about 4 standard deviations


def test_a_row_draws_the_same_numbers_beside_any_neighbours() -> None:
    generator = torch.Generator().manual_seed(3)
    steps = [
        torch.randn((6, VOCAB), generator=generator) for _ in range(300)
    ]  # beyond one block of numbers
    params = sampling(top_p=0.9)

    def run(rows: list[int], drop_at: int | None) -> list[int]:
        sampler = RowSampler(params, rows, torch.device("cpu"))
        drawn = []
        for index, logits in enumerate(steps):
            if index == drop_at:
                sampler.keep(torch.tensor([rows.index(4)]))
                rows = [4]
            ids, _ = sampler.draw(logits[rows])
            drawn.append(int(ids[rows.index(4)]))
        return drawn

    alone = run([4], None)
    assert run([0, 1, 2, 3, 4, 5], None) == alone
    assert run([5, 4, 2], 130) == alone
    assert len(set(alone)) > 5


def test_extreme_logits() -> None:
    logits = torch.full((3, VOCAB), -1e4)
    logits[0, 3] = 1e4
    logits[1, -1] = 0.0
    logits[2] = -torch.inf
    logits[2, 7] = 5.0
    for params in (sampling(), sampling(top_p=0.9), sampling(top_k=3), sampling(temperature=0.0)):
        ids, logprobs = RowSampler(params, [1, 2, 3], torch.device("cpu")).draw(logits)
        assert ids.tolist() == [3, VOCAB - 1, 7]
        assert logprobs.tolist() == [0.0, 0.0, 0.0]

"""PACS against autograd in float64, its closed forms, and what must not depend on order or cut."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.contracts import Prepared, SampleFacts
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.objectives.pacs import Pacs, PacsOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.objectives.shared.groups import build_table
from tests.support.policies.objective_reference import (
    Batch,
    assert_metrics_equal,
    flat_reference_loss,
    make_facts,
    objective_gradient,
    objective_scores,
    random_batch,
    reference_loss,
    reference_loss_of_proxies,
)

SCORES = ("rloo", "dr_grpo", "grpo", "naive")
PROXIES = ("sum_log_ratio", "mean_log_prob")
WEIGHTINGS = ("question", "only_positive", "only_negative", "none")


def pacs(updates_per_step: int = 1, **options: Any) -> Objective:
    """A floor far below every standard deviation here stands for no floor, which `score: grpo`
    rejects.
    """
    if options.get("score") == "grpo":
        options = {"score_std_floor": 1e-20} | options
    return build_objective(PacsOptions(name="pacs", **options), updates_per_step=updates_per_step)


def with_any_reference(proxy: str, **options: Any) -> Objective:
    reference = {"reference": "frozen"} if proxy == "sum_log_ratio" else {}
    return pacs(reward_proxy=proxy, **reference, **options)


def prepare(objective: Objective, facts: SampleFacts, scores: torch.Tensor | None) -> Prepared:
    return objective.prepare(scores, facts, objective.prepare_step(facts))


def coefficient(prepared: Prepared) -> np.ndarray:
    return prepared.per_sample["coefficient"].numpy()


# --------------------------------------------------------------------------------------------------
# against autograd
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("proxy", PROXIES)
def test_loss_and_gradient_match_autograd(proxy: str, score: str, weighting: str) -> None:
    options = {"score": score, "weighting": weighting, "beta": 0.7}
    for seed in range(3):
        batch = random_batch(seed)
        objective = with_any_reference(proxy, **options)
        prepared = prepare(objective, batch.facts, objective_scores(objective, batch))
        gradient, _ = objective_gradient(objective, batch, prepared, cuts=7, seed=seed)

        logprobs = batch.logprobs.clone().requires_grad_(True)
        of_reference = {"name": "pacs", "reward_proxy": proxy, "reference": "frozen", **options}
        loss, metrics = flat_reference_loss(of_reference, batch, logprobs)
        loss.backward()
        assert prepared.loss == pytest.approx(float(loss.detach()), rel=1e-12)
        np.testing.assert_allclose(gradient, logprobs.grad, rtol=1e-9, atol=1e-14)
        assert float(gradient.abs().max()) > 1e-4
        assert_metrics_equal(prepared.metrics, metrics)


@pytest.mark.parametrize("floor", [1e-3, 0.8, 50.0])
def test_std_floor_matches_autograd(floor: float) -> None:
    """Below, among and above the groups' standard deviations; where the floor binds the divisor is
    a constant.
    """
    batch = random_batch(3)
    objective = pacs(score="grpo", reference="frozen", score_std_floor=floor)
    scores = objective_scores(objective, batch)
    prepared = prepare(objective, batch.facts, scores)
    r = scores.clone().requires_grad_(True)
    loss = reference_loss_of_proxies(r, batch.facts, score="grpo", score_std_floor=floor)
    loss.backward()
    assert prepared.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    np.testing.assert_allclose(coefficient(prepared), r.grad, rtol=1e-9, atol=1e-15)
    stds = np.array(
        [
            scores[torch.from_numpy(batch.facts.groups == g)].std()
            for g in range(batch.facts.num_groups)
        ]
    )
    assert (stds < floor).sum() == {1e-3: 0, 0.8: (stds < 0.8).sum(), 50.0: len(stds)}[floor]
    assert 0 < (stds < 0.8).sum() < len(stds)


@pytest.mark.parametrize("score", SCORES)
def test_groups_whose_proxies_are_all_equal(score: str) -> None:
    """0.1 three, five, six or seven times: a mean in floating point need not return it, the score
    must be 0.
    """
    sizes = (3, 5, 6, 7)
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(4), sizes))
    labels = np.random.default_rng(1).integers(0, 2, len(groups)).astype(float)
    facts = make_facts(groups.tolist(), labels.tolist())
    r = torch.full((len(groups),), 0.1, dtype=torch.float64, requires_grad=True)
    prepared = prepare(pacs(score=score, reference="frozen"), facts, r.detach())
    loss = reference_loss_of_proxies(r, facts, score=score)
    loss.backward()
    np.testing.assert_allclose(coefficient(prepared), r.grad, rtol=1e-9, atol=1e-15)
    if score != "naive":
        assert (prepared.per_sample["score"] == 0.0).all()
        assert prepared.loss == pytest.approx(np.log(2.0), rel=1e-15)


def test_several_updates_follow_a_plain_implementation() -> None:
    """Three updates of one rollout batch against the step's start, SGD, a policy of one softmax
    table.
    """
    rng = np.random.default_rng(7)
    groups = rng.permutation(np.repeat(np.arange(4), (2, 3, 4, 5)))
    labels = rng.integers(0, 2, len(groups)).astype(float).tolist()
    tokens = torch.from_numpy(rng.integers(0, 6, (len(groups), 5)))
    sample_of_token = torch.arange(len(groups)).repeat_interleave(5)
    facts = make_facts(groups.tolist(), labels, lens=[5] * len(groups))
    start = torch.from_numpy(rng.normal(size=(5, 6)))

    def token_logprobs(table: torch.Tensor) -> torch.Tensor:
        return (
            torch.log_softmax(table, -1)
            .expand(len(groups), -1, -1)
            .gather(-1, tokens[..., None])
            .flatten()
        )

    def batch_at(table: torch.Tensor) -> Batch:
        return Batch(
            facts=facts,
            logprobs=token_logprobs(table).detach(),
            reference=token_logprobs(start),
            mask=torch.ones(len(sample_of_token), dtype=torch.float64),
            sample_of_token=sample_of_token,
        )

    ours = start.clone()
    plain = start.clone()
    objective = pacs(updates_per_step=3)
    for update in range(3):
        batch = batch_at(ours)
        scores = (
            objective_scores(objective, batch) if "score" in objective.statistics(update) else None
        )
        assert (scores is None) == (update == 0)
        prepared = prepare(objective, facts, scores)
        gradient, _ = objective_gradient(objective, batch, prepared, cuts=6, seed=update)
        leaf = ours.clone().requires_grad_(True)
        token_logprobs(leaf).backward(gradient)
        ours = ours - 2.0 * leaf.grad

        leaf = plain.clone().requires_grad_(True)
        responses = token_logprobs(leaf).view(len(groups), 5).unbind()
        starts = token_logprobs(start).view(len(groups), 5).unbind()
        loss, _ = reference_loss({"name": "pacs"}, facts, responses, starts=starts)
        loss.backward()
        plain = plain - 2.0 * leaf.grad
        assert prepared.loss == pytest.approx(float(loss.detach()), rel=1e-12)
        np.testing.assert_allclose(ours, plain, rtol=1e-11, atol=1e-13)
    assert float(loss.detach()) < np.log(2.0) - 1e-3


# --------------------------------------------------------------------------------------------------
# the closed first update
def test_first_update_is_rloo_without_weights() -> None:
    facts = random_batch(1).facts
    a = coefficient(prepare(pacs(weighting="none", beta=0.5), facts, None))
    n = facts.num_samples
    for j in range(n):
        others = [
            facts.labels[i] for i in range(n) if facts.groups[i] == facts.groups[j] and i != j
        ]
        assert a[j] == pytest.approx(
            -0.5 / n * (facts.labels[j] - np.mean(others)), rel=1e-13, abs=1e-18
        )


@pytest.mark.parametrize("size", range(2, 9))
def test_first_update_with_question_weights(size: int) -> None:
    for correct in range(1, size):
        facts = make_facts([0] * size, [1.0] * correct + [0.0] * (size - correct))
        ascent = -coefficient(prepare(pacs(), facts, None)) * size
        np.testing.assert_allclose(
            ascent[:correct], size**2 / (4 * correct * (size - 1)), rtol=1e-13
        )
        np.testing.assert_allclose(
            ascent[correct:], -(size**2) / (4 * (size - correct) * (size - 1)), rtol=1e-13
        )


@pytest.mark.parametrize("score", SCORES)
def test_one_class_groups_have_no_gradient_at_the_first_update(score: str) -> None:
    sizes = np.arange(2, 9)
    groups = np.repeat(np.arange(15), np.concatenate([sizes, sizes, [4]]))
    labels = np.where(groups < 7, 1.0, 0.0)
    labels[-1] = 1.0
    floor = {"score_std_floor": 0.1} if score == "grpo" else {}
    prepared = prepare(
        pacs(score=score, **floor), make_facts(groups.tolist(), labels.tolist()), None
    )
    assert prepared.zero_gradient is not None
    expected = np.zeros(len(groups), bool) if score == "naive" else groups < 14
    np.testing.assert_array_equal(prepared.zero_gradient, expected)
    np.testing.assert_array_equal(coefficient(prepared) == 0.0, expected)


def test_one_class_groups_pull_scores_together_later() -> None:
    facts = make_facts([0, 0, 0], [1.0, 1.0, 1.0])
    prepared = prepare(
        pacs(updates_per_step=2), facts, torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    )
    assert coefficient(prepared)[0] > 0 > coefficient(prepared)[2]
    assert prepared.zero_gradient is not None and not prepared.zero_gradient[[0, 2]].any()


@pytest.mark.parametrize("score", ["rloo", "dr_grpo", "naive"])
def test_null_scores_are_the_closed_form_bit_for_bit(score: str) -> None:
    """A score pass at unchanged weights gives r = 0 exactly, in float32 too, and the same
    coefficients as no pass.
    """
    batch = random_batch(5)
    record = batch.record(logprobs=batch.logprobs.float())
    record.step_start_logprobs = record.logprobs.clone()
    objective = pacs(updates_per_step=2, score=score)
    scores = batch.sums(objective.token_scores(record))
    assert scores.dtype == torch.float64 and (scores == 0.0).all()
    without = prepare(objective, batch.facts, None)
    given = prepare(objective, batch.facts, scores)
    assert torch.equal(without.per_sample["coefficient"], given.per_sample["coefficient"])
    assert without.loss == given.loss
    assert without.metrics | {"pacs/psi_mean_square": 0.0} == given.metrics


# --------------------------------------------------------------------------------------------------
# order and cut
def test_order_of_arrival_changes_no_bit() -> None:
    batch = random_batch(11, sizes=tuple(range(2, 9)) * 20)
    n = batch.facts.num_samples
    rng = np.random.default_rng(0)
    log_ratios = rng.normal(0, 0.3, n)
    facts = make_facts(
        batch.facts.groups.tolist(),
        batch.facts.labels.tolist(),
        log_ratio_to_sampler=log_ratios.tolist(),
    )
    scores = torch.from_numpy(rng.normal(0, 3, n))
    for score in SCORES:
        objective = pacs(reference="frozen", score=score, importance_cap=2.0, beta=0.3)
        first = prepare(objective, facts, scores)
        for _ in range(3):
            order = rng.permutation(n)
            shuffled = facts.select(order)
            renumbered = rng.permutation(facts.num_groups)
            shuffled.groups[:] = renumbered[shuffled.groups]
            again = prepare(objective, shuffled, scores[order])
            assert again.loss == first.loss
            for name, values in first.per_sample.items():
                assert torch.equal(again.per_sample[name], values[order]), name
            assert again.metrics == first.metrics


def test_the_cut_into_micro_batches_does_not_matter_but_a_loss_per_micro_batch_would() -> None:
    batch = random_batch(13)
    objective = pacs(reference="frozen")
    scores = objective_scores(objective, batch)
    prepared = prepare(objective, batch.facts, scores)
    whole, _ = objective_gradient(objective, batch, prepared, cuts=1)
    for cuts in (2, 5, batch.facts.num_samples):
        cut, _ = objective_gradient(objective, batch, prepared, cuts=cuts, seed=cuts)
        np.testing.assert_allclose(cut, whole, rtol=1e-14, atol=0)
    # The authors' way: the loss and its mean inside each micro-batch, then the mean of the
    # micro-batches.
    by_group = np.argsort(batch.facts.groups, kind="stable")
    at = int(np.searchsorted(batch.facts.groups[by_group], 3))
    halves = [by_group[:at], by_group[at:]]
    minibatches = [
        coefficient(prepare(objective, batch.facts.select(rows), scores[rows])) / len(halves)
        for rows in halves
    ]
    assert not np.allclose(np.concatenate(minibatches), coefficient(prepared)[by_group], rtol=1e-3)


def test_masked_tokens_do_not_count() -> None:
    batch = random_batch(17)
    dropped = batch.mask == 0
    assert dropped.any()
    for proxy in PROXIES:
        objective = with_any_reference(proxy)
        scores = objective_scores(objective, batch)
        gradient, _ = objective_gradient(objective, batch, prepare(objective, batch.facts, scores))
        assert (gradient[dropped] == 0).all() and (gradient[~dropped] != 0).any()
        moved = Batch(
            facts=batch.facts,
            logprobs=torch.where(dropped, batch.logprobs - 100.0, batch.logprobs),
            reference=batch.reference,
            mask=batch.mask,
            sample_of_token=batch.sample_of_token,
        )
        assert torch.equal(objective_scores(objective, moved), scores)


# --------------------------------------------------------------------------------------------------
# numerics
def test_extreme_scores_keep_their_precision() -> None:
    psi = torch.tensor([1000.0, -1000.0, 40.0, -40.0, 700.0, -0.5], dtype=torch.float64)
    n = len(psi)
    for label in (0.0, 1.0):
        facts = make_facts([0] * n, [label] * n)
        for row in range(n):
            r = torch.zeros(n, dtype=torch.float64)
            r[0] = psi[row]
            prepared = prepare(pacs(score="naive", reference="frozen", weighting="none"), facts, r)
            z = float(psi[row]) * (1 - 2 * label)
            tail = np.exp(-abs(z))
            assert prepared.loss is not None
            loss = prepared.loss * n - (n - 1) * np.log(2.0)
            assert loss == pytest.approx(max(z, 0.0) + np.log1p(tail), rel=1e-12, abs=1e-14)
            sigmoid = tail / (1 + tail) if z < 0 else 1 / (1 + tail)
            # No absolute tolerance: at |psi| = 700 the residual is 1e-304, and still right.
            assert coefficient(prepared)[0] * n == pytest.approx(
                (1 - 2 * label) * sigmoid, rel=1e-14, abs=0
            )


def test_float32_log_probs_get_float32_coefficients() -> None:
    batch = random_batch(19)
    objective = pacs()
    prepared = prepare(objective, batch.facts, None)
    record = batch.record(logprobs=batch.logprobs.float())
    loss = objective.token_loss(record, prepared)
    assert loss.dtype == torch.float32 and loss.shape == record.mask.shape
    assert all(values.dtype == torch.float64 for values in prepared.per_sample.values())


# --------------------------------------------------------------------------------------------------
# actor term
class Enumeration:
    """A policy over 3 tokens, responses of two, groups of three: all 9^3 groups, each one prompt's
    mini-batch.
    """

    SIZE = 3
    BETA = 0.7
    LOGITS = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64)
    LABELS = torch.tensor([1, 0, 0, 1, 1, 0, 0, 0, 1], dtype=torch.float64)

    def __init__(self, reference_logits: torch.Tensor, **options: Any) -> None:
        self.reference_logits = reference_logits
        self.options = options
        self.responses = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        self.members = torch.cartesian_prod(*[torch.arange(9)] * self.SIZE)
        self.num_groups = len(self.members)

    def response_logprobs(self, theta: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(theta, -1)[self.responses].sum(-1)

    def gradient(self, **actor: Any) -> torch.Tensor:
        """Expectation of what the objective back-propagates."""
        facts = make_facts(
            torch.arange(self.num_groups).repeat_interleave(self.SIZE).tolist(),
            self.LABELS[self.members].flatten().tolist(),
            lens=[2] * self.members.numel(),
        )
        objective = pacs(beta=self.BETA, **self.options, **actor)
        log_ratio = self.response_logprobs(self.LOGITS) - self.response_logprobs(
            self.reference_logits
        )
        scores = (
            (self.BETA * log_ratio[self.members]).flatten()
            if "score" in objective.statistics(0)
            else None
        )
        # One mini-batch of all groups divides by num_groups more than a mini-batch of one prompt.
        a = (
            prepare(objective, facts, scores).per_sample["coefficient"].view(-1, self.SIZE)
            * self.num_groups
        )
        theta = self.LOGITS.clone().requires_grad_(True)
        logprobs = self.response_logprobs(theta)[self.members]
        (logprobs.sum(-1).exp().detach()[:, None] * a * logprobs).sum().backward()
        assert theta.grad is not None
        return theta.grad

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradient of the expectation by autograd: through the loss, and through the sampling."""
        theta = self.LOGITS.clone().requires_grad_(True)
        r = (
            self.BETA
            * (self.response_logprobs(theta) - self.response_logprobs(self.reference_logits))[
                self.members
            ]
        )
        losses = []
        for k, row in enumerate(self.members):
            facts = make_facts([0] * self.SIZE, self.LABELS[row].tolist())
            losses.append(
                reference_loss_of_proxies(
                    r[k], facts, score=self.options["score"], weighting=self.options["weighting"]
                )
            )
        probability = self.response_logprobs(theta)[self.members].sum(-1).exp()
        loss = torch.stack(losses)
        through_loss = torch.autograd.grad(
            (probability.detach() * loss).sum(), theta, retain_graph=True
        )[0]
        through_sampling = torch.autograd.grad((probability * loss.detach()).sum(), theta)[0]
        return through_loss, through_sampling


@pytest.mark.parametrize("actor_term", [1.0, 0.5])
@pytest.mark.parametrize(
    ("reference", "score", "weighting", "own_is_true_too"),
    [
        ("step_start", "rloo", "question", False),
        # w_i l_i = y_i log 2 depends on no sibling here.
        ("step_start", "rloo", "only_positive", True),
        ("frozen", "rloo", "question", False),
        ("frozen", "dr_grpo", "none", False),
        ("frozen", "grpo", "question", False),
    ],
)
def test_actor_term_by_exact_enumeration(
    reference: str, score: str, weighting: str, own_is_true_too: bool, actor_term: float
) -> None:
    """The group form is the true gradient of the expectation, the own form is not."""
    start = Enumeration.LOGITS
    moved = start + torch.tensor([0.6, -0.2, -0.9], dtype=torch.float64)
    case = Enumeration(
        moved if reference == "frozen" else start,
        reference=reference,
        score=score,
        weighting=weighting,
    )
    through_loss, through_sampling = case.truth()
    truth = through_loss + actor_term * through_sampling
    torch.testing.assert_close(case.gradient(), through_loss, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(case.gradient(actor_term=actor_term), truth, rtol=1e-10, atol=1e-14)
    own = case.gradient(actor_term=actor_term, actor_scope="own")
    assert float((own - case.gradient()).abs().max()) > 5e-4
    assert torch.allclose(own, truth, rtol=1e-6) == own_is_true_too


@pytest.mark.parametrize("weighting", ["question", "none"])
def test_at_step_start_the_groups_losses_are_constant_so_its_actor_term_is_noise_alone(
    weighting: str,
) -> None:
    """Every l_i is log 2 and the weights of a group add up to G: there is nothing to learn from
    sampling.
    """
    case = Enumeration(
        Enumeration.LOGITS, reference="step_start", score="rloo", weighting=weighting
    )
    through_loss, through_sampling = case.truth()
    assert float(through_loss.abs().max()) > 1e-2 and float(through_sampling.abs().max()) < 1e-14
    torch.testing.assert_close(
        case.gradient(actor_term=1.0), case.gradient(), rtol=1e-10, atol=1e-14
    )


def test_actor_term_keeps_one_class_groups_and_own_scope_is_5_as_printed() -> None:
    facts = make_facts([0, 0, 1, 1, 1], [1.0, 1.0, 1.0, 0.0, 0.0])
    base = prepare(pacs(), facts, None)
    own = prepare(pacs(actor_term=0.5, actor_scope="own"), facts, None)
    group = prepare(pacs(actor_term=0.5), facts, None)
    weighted = np.array([1.0, 1.0, 1.5, 0.75, 0.75]) * np.log(2.0)
    np.testing.assert_allclose(coefficient(own) - coefficient(base), 0.5 / 5 * weighted, rtol=1e-12)
    sums = np.array([2.0, 2.0, 3.0, 3.0, 3.0]) * np.log(2.0)
    np.testing.assert_allclose(coefficient(group) - coefficient(base), 0.5 / 5 * sums, rtol=1e-12)
    assert group.zero_gradient is not None and not group.zero_gradient.any()
    assert group.loss == base.loss


# --------------------------------------------------------------------------------------------------
# importance correction
def test_importance_weights_are_capped_and_scale_weights() -> None:
    groups = [0, 0, 1, 1, 1, 0]
    labels = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    log_ratios = [0.0, -0.5, 0.2, 3.0, 5000.0, -5000.0]
    facts = make_facts(groups, labels, log_ratio_to_sampler=log_ratios)
    plain = prepare(pacs(), facts, None)
    prepared = prepare(pacs(importance_cap=2.0), facts, None)
    ratios = np.array([1.0, np.exp(-0.5), np.exp(0.2), 2.0, 2.0, 0.0])
    weights = plain.per_sample["weight"].numpy() * ratios
    np.testing.assert_allclose(prepared.per_sample["weight"], weights, rtol=1e-14)
    assert prepared.loss == pytest.approx(weights.mean() * np.log(2.0), rel=1e-14)
    assert prepared.metrics["pacs/importance_mean"] == pytest.approx(ratios.mean())
    assert prepared.metrics["pacs/importance_capped_frac"] == pytest.approx(2 / 6)
    logprobs = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    loss, metrics = reference_loss(
        {"name": "pacs", "importance_cap": 2.0},
        facts,
        logprobs[:, None].unbind(),
        samplers=(-torch.tensor(log_ratios, dtype=torch.float64))[:, None].unbind(),
    )
    loss.backward()
    np.testing.assert_allclose(coefficient(prepared), logprobs.grad, rtol=1e-12, atol=1e-17)
    assert_metrics_equal(prepared.metrics, metrics)


def test_importance_needs_the_log_ratios_and_select_keeps_them() -> None:
    with pytest.raises(ValueError, match="log_ratio_to_sampler"):
        prepare(pacs(importance_cap=2.0), make_facts([0, 0], [0.0, 1.0]), None)
    facts = make_facts(
        [0, 0, 1, 1], [0.0, 1.0, 0.0, 1.0], log_ratio_to_sampler=[0.1, 0.2, 0.3, 0.4]
    )
    selected = facts.select(np.array([3, 2]))
    assert selected.log_ratio_to_sampler is not None and selected.log_ratio_to_sampler.tolist() == [
        0.4,
        0.3,
    ]


# --------------------------------------------------------------------------------------------------
# passes, errors
@pytest.mark.parametrize(
    ("options", "first", "later", "first_statistics", "later_statistics"),
    [
        ({}, "", "step_start", "", "score"),
        ({"importance_cap": 2.0}, "", "step_start", "sampler_ratio", "score sampler_ratio"),
        ({"reference": "frozen"}, "reference", "reference", "score", "score"),
        (
            {"reference": "frozen", "importance_cap": 2.0},
            "reference",
            "reference step_start",
            "score sampler_ratio",
            "score sampler_ratio",
        ),
        ({"reward_proxy": "mean_log_prob"}, "", "", "score", "score"),
        (
            {"reward_proxy": "mean_log_prob", "importance_cap": 2.0},
            "",
            "step_start",
            "score sampler_ratio",
            "score sampler_ratio",
        ),
    ],
)
def test_passes_and_statistics_of_the_first_and_later_updates(
    options: dict[str, Any], first: str, later: str, first_statistics: str, later_statistics: str
) -> None:
    """The first update needs no step-start pass: its own forward computes these log-probs."""
    objective = pacs(updates_per_step=2, **options)
    assert [set(objective.logprob_passes(index)) for index in (0, 1)] == [
        set(first.split()),
        set(later.split()),
    ]
    assert set(objective.statistics(0)) == set(first_statistics.split())
    assert set(objective.statistics(1)) == set(later_statistics.split())


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("proxy", PROXIES)
def test_coefficients_of_some_groups_equal_those_of_the_whole_mini_batch(
    proxy: str, score: str, weighting: str
) -> None:
    """`couple` on the groups of a micro-batch gives the same bits as `prepare` on all groups; N is
    the mini-batch's.
    """
    batch = random_batch(4)
    objective = with_any_reference(
        proxy,
        score=score,
        weighting=weighting,
        importance_cap=1.3,
        **({"actor_term": 0.5} if proxy == "sum_log_ratio" else {}),
    )
    scores = objective_scores(objective, batch)
    ratios = np.random.default_rng(0).normal(0, 0.3, batch.facts.num_samples)
    facts = replace(batch.facts, log_ratio_to_sampler=ratios)
    whole = coefficient(prepare(objective, facts, scores))
    for groups in ([0], [1, 5], [2, 3, 8]):
        table = build_table(facts, np.flatnonzero(np.isin(facts.groups, groups)))
        found = objective.couple(
            table, scores[table.rows], torch.from_numpy(ratios)[table.rows], {}
        )["coefficient"]
        np.testing.assert_array_equal(found.numpy(), whole[table.rows])


def test_bugs_of_the_caller_are_rejected() -> None:
    objective = pacs(reference="frozen")
    facts = make_facts([0, 1, 0], [0.0, 1.0, 1.0])
    zeros = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="0:data/1#1 is alone in its group"):
        prepare(objective, facts, zeros)
    with pytest.raises(ValueError, match="not dense"):
        prepare(
            objective,
            make_facts([0, 0, 2, 2], [0.0, 1.0, 1.0, 0.0]),
            torch.zeros(4, dtype=torch.float64),
        )
    facts = make_facts([0, 0], [0.0, 1.0])
    with pytest.raises(ValueError, match="needs scores for every update"):
        prepare(objective, facts, None)
    with pytest.raises(ValueError, match=r"float64 \[2\]"):
        prepare(objective, facts, torch.zeros(2))
    with pytest.raises(ValueError, match=r"label of sample 0:data/0#1 is 0.5"):
        prepare(objective, make_facts([0, 0], [0.0, 0.5]), zeros[:2])
    record = random_batch(0).record()
    record.reference_logprobs = None
    with pytest.raises(ValueError, match="needs reference log-probs"):
        objective.token_scores(record)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_scores_never_become_coefficients(value: float) -> None:
    scores = torch.tensor([0.0, value], dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="0:data/0#1"):
        prepare(pacs(reference="frozen"), make_facts([0, 0], [0.0, 1.0]), scores)


# --------------------------------------------------------------------------------------------------
# metrics
def test_metrics_and_their_denominators() -> None:
    facts = make_facts(
        [0, 0, 1, 1, 2, 2],
        [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
        truncated=[False, True, False, False, True, True],
    )
    scores = torch.tensor([8.01, -9.0, 0.0, 2.0, 7.99, -8.5], dtype=torch.float64)
    metrics = prepare(pacs(score="naive", reference="frozen"), facts, scores).metrics
    residuals = [
        abs(1 / (1 + np.exp(-float(s))) - y) for s, y in zip(scores, facts.labels, strict=True)
    ]
    assert metrics == pytest.approx(
        {
            "pacs/psi_mean_pos": 10.01 / 3,
            "pacs/psi_mean_neg": -9.51 / 3,
            "pacs/psi_mean_square": float((scores**2).mean()),
            "pacs/residual_mean": np.mean(residuals),
            "pacs/psi_over_8_frac": 3 / 6,
            "pacs/one_class_group_frac": 2 / 3,
            "pacs/truncated_frac": 3 / 6,
        }
    )
    only_correct = prepare(pacs(), make_facts([0, 0], [1.0, 1.0]), None).metrics
    assert "pacs/psi_mean_neg" not in only_correct and only_correct["pacs/psi_mean_pos"] == 0.0


def test_pacs_is_an_objective() -> None:
    objective = pacs()
    assert isinstance(objective, Pacs) and isinstance(objective, Objective)
    batch = random_batch(0)
    assert objective.token_metrics(batch.record(), prepare(objective, batch.facts, None)) == {}


@pytest.mark.parametrize("proxy", PROXIES)
def test_nearly_equal_proxies_have_a_bounded_gradient(proxy: str) -> None:
    """With the floor, a group's gradient does not grow as its proxies approach each other; without
    one it does.
    """
    facts = make_facts([0] * 8, [1.0, 0, 1, 0, 0, 0, 1, 1], lens=[100] * 8)
    reference = {"reference": "frozen"} if proxy == "sum_log_ratio" else {}
    spread = np.random.default_rng(0).normal(0, 1, 8)

    def largest(sd: float, floor: float) -> float:
        objective = pacs(reward_proxy=proxy, score="grpo", score_std_floor=floor, **reference)
        scores = torch.from_numpy(spread * sd - 0.5)
        return float(objective.prepare(scores, facts, None).per_sample["coefficient"].abs().max())

    usual = largest(0.3, 0.1)
    assert largest(0.3, 1e-20) == usual
    for sd in (0.1, 1e-2, 1e-3, 1e-5, 1e-7, 0.0):
        assert largest(sd, 0.1) < 2 * max(usual, largest(0.1, 0.1))
    assert largest(1e-7, 1e-20) > 1e5 * usual

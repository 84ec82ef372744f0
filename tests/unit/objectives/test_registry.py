"""Each objective but PACS, PPO and SFT against the reference with autograd in float64, and what the
files of the folder promise.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from pacs_megatron.contracts import Prepared
from pacs_megatron.errors import RewardError
from pacs_megatron.objectives.registry import REGISTRY, ObjectiveOptions, build_objective
from pacs_megatron.objectives.shared.base import Objective
from tests.support.policies.objective_cases import OBJECTIVE_CASES
from tests.support.policies.objective_reference import (
    Batch,
    assert_metrics_equal,
    flat_reference_loss,
    make_facts,
    make_record,
    objective_scores,
    random_batch,
    token_metric_sums,
)

METRICS = set(
    re.findall(
        r"`(?:grpo|pacs|steer|vimpo)/([^`]+)`",
        (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8"),
    )
)


def build(case: str, updates: int = 2) -> Objective:
    options = TypeAdapter(ObjectiveOptions).validate_python(OBJECTIVE_CASES[case])
    return build_objective(options, updates_per_step=updates)


def drawn_batch(seed: int, *, moved: float) -> Batch:
    """A mini-batch with log-probs of the sampler and of the step's start.

    Args:
        moved: standard deviation of the policy's log-probs from those of the step's start.
    """
    batch = random_batch(seed, spread=0.2)
    rng = np.random.default_rng(seed)
    distance = torch.from_numpy(rng.normal(0, 1.0, len(batch.mask))) * moved
    noise = torch.from_numpy(rng.normal(0, 0.4, len(batch.mask)))
    batch.step_start = batch.logprobs - distance
    batch.sampler = batch.logprobs + noise
    return batch


def prepared_like_the_engine(
    objective: Objective, batch: Batch, index: int
) -> tuple[Batch, Prepared]:
    facts = batch.facts
    if objective.kl_in_reward:
        pairs = zip(batch.split(batch.start), batch.split(batch.reference), strict=True)
        kls = [objective.sample_kl(start.numpy(), reference.numpy()) for start, reference in pairs]
        facts = replace(facts, kl_to_reference=np.array(kls))

    names = objective.statistics(index)
    if "sampler_ratio" in names:
        assert batch.sampler is not None
        ratios = [float(ratio.mean()) for ratio in batch.split(batch.start - batch.sampler)]
        facts = replace(facts, log_ratio_to_sampler=np.array(ratios))

    scores = objective_scores(objective, batch) if "score" in names else None
    prepared = objective.prepare(scores, facts, objective.prepare_step(facts))
    return replace(batch, facts=facts), prepared


def gradients(
    objective: Objective, batch: Batch, prepared: Prepared, entropy: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(derivatives by log-probs, by entropies, loss) of five micro-batches."""
    logprobs = batch.logprobs.clone().requires_grad_(True)
    entropies = entropy.clone().requires_grad_(True)
    order = np.random.default_rng(seed).permutation(batch.facts.num_samples)
    total = 0.0
    for rows in torch.tensor_split(torch.from_numpy(order), 5):
        tokens = torch.nonzero(torch.isin(batch.sample_of_token, rows))[:, 0]
        record = replace(batch.record(tokens, logprobs), entropy=entropies[tokens])
        loss = (objective.token_loss(record, prepared) * record.mask).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    assert logprobs.grad is not None
    by_entropy = torch.zeros_like(entropy) if entropies.grad is None else entropies.grad
    return logprobs.grad, by_entropy, total


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("case", OBJECTIVE_CASES)
def test_loss_and_gradient_match_autograd(case: str, index: int) -> None:
    """At the first update the policy is the step's start; later ones have moved so far that clips
    apply.
    """
    options = OBJECTIVE_CASES[case]
    objective = build(case)
    for seed in range(2):
        batch = drawn_batch(seed, moved=0.05 if index else 0.0)
        entropy = batch.entropy
        assert entropy is not None
        batch, prepared = prepared_like_the_engine(objective, batch, index)
        by_logprob, by_entropy, total = gradients(objective, batch, prepared, entropy, seed)

        logprobs = batch.logprobs.clone().requires_grad_(True)
        entropies = entropy.clone().requires_grad_(True)
        loss, reference_metrics = flat_reference_loss(options, batch, logprobs, entropies)
        loss.backward()  # type: ignore[no-untyped-call]
        found_loss = total if prepared.loss is None else prepared.loss
        assert found_loss == pytest.approx(float(loss.detach()), rel=1e-9)
        np.testing.assert_allclose(by_logprob, logprobs.grad, rtol=1e-9, atol=1e-15)
        assert float(by_logprob.abs().max()) > 0
        if "entropy_coef" in options:
            np.testing.assert_allclose(by_entropy, entropies.grad, rtol=1e-12)

        metrics = prepared.metrics | token_metric_sums(objective, batch, prepared)
        assert all(name.startswith(f"{objective.name}/") for name in metrics)
        assert {name.partition("/")[2] for name in metrics} <= METRICS, "not in docs/metrics.md"
        assert_metrics_equal(metrics, reference_metrics)
        clip_frac = metrics.get(f"{objective.name}/clip_frac")
        if index and clip_frac is not None and "clip_high" in options:
            assert 0 < clip_frac < 1, "the clip never applied"


def test_a_wrong_formula_would_be_found() -> None:
    """No two cases have the same loss on the same inputs."""
    batch = random_batch(3, spread=0.2)
    batch.step_start = batch.logprobs - 0.1
    batch.sampler = batch.logprobs + 0.1
    losses = {}
    for case, options in OBJECTIVE_CASES.items():
        loss, _ = flat_reference_loss(options, batch, batch.logprobs, batch.logprobs)
        losses[case] = float(loss)
    assert len({round(value, 9) for value in losses.values()}) == len(OBJECTIVE_CASES), losses


def test_every_objective_has_a_case_or_a_test_file_of_its_own() -> None:
    assert {options["name"] for options in OBJECTIVE_CASES.values()} | {
        "pacs",
        "sft",
        "ppo",
        "ucas",
        "vimpo",
    } == set(REGISTRY)


@pytest.mark.parametrize(
    ("case", "coupling", "first", "later"),
    [
        ("cispo", "token", set(), set()),
        ("gspo", "sample", set(), {"score"}),
        ("luspo", "sample", set(), {"score"}),
        ("rloo", "sample", set(), {"score"}),
        ("rloo-mask", "sample", {"sampler_ratio"}, {"score", "sampler_ratio"}),
        ("w_reinforce", "sample", {"sampler_ratio"}, {"sampler_ratio"}),
        ("psr", "token", set(), set()),
        ("distill", "token", set(), set()),
        ("steer", "minibatch", {"score"}, {"score"}),
        ("real", "group", set(), {"score"}),
        ("real_bce", "sample", set(), {"score"}),
    ],
)
def test_what_the_coefficients_depend_on(
    case: str, coupling: str, first: set[str], later: set[str]
) -> None:
    objective = build(case)
    assert (objective.coupling, objective.statistics(0), objective.statistics(1)) == (
        coupling,
        first,
        later,
    )


def test_kl_in_the_reward_needs_both_passes_at_every_update() -> None:
    objective = build("rloo")
    assert objective.logprob_passes(0) == objective.logprob_passes(1) == {"step_start", "reference"}
    with pytest.raises(ValueError, match="needs facts"):
        objective.prepare_step(random_batch(0).facts)


def test_advantages_of_reinforce_pp_are_scaled_over_the_whole_rollout_batch() -> None:
    facts = random_batch(5).facts
    objective = build("reinforce_pp-baseline")
    step = objective.prepare_step(facts)["advantage"]
    rows = np.flatnonzero(facts.groups < 4)
    minibatch = objective.prepare(None, facts.select(rows), {"advantage": step[rows]})
    assert minibatch.per_sample["advantage"].tolist() == step[rows].tolist()
    weighted = np.repeat(step, facts.response_lens)
    assert weighted.mean() == pytest.approx(0, abs=1e-12) and weighted.std() == pytest.approx(1)


def test_maxrl_and_dgpo_on_numbers_by_hand() -> None:
    """Groups of accuracy 1/4, 1 and 3/4 with 2, 3 and 1 tokens a response."""
    labels = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    facts = make_facts([0] * 4 + [1] * 4 + [2] * 4, labels, lens=[2] * 4 + [3] * 4 + [1] * 4)

    maxrl = build("maxrl").prepare_step(facts)["advantage"]
    expected = [3, -1, -1, -1, 0, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3, -1]
    assert maxrl.tolist() == pytest.approx(expected, rel=1e-5, abs=0)

    # 24 tokens, 12 of them in groups with both labels; softmax of (-1/4, -3/4) / 0.5.
    odds = np.exp([-0.5, -1.5])
    first, last = 2 * odds / odds.sum()
    dgpo = build("dgpo").prepare_step(facts)["advantage"]
    expected = [2 * first, *[-2 / 3 * first] * 3, 0, 0, 0, 0, *[2 / 3 * last] * 3, -2 * last]
    expected = [2 * value for value in expected]
    assert dgpo.tolist() == pytest.approx(expected, rel=1e-4, abs=0)


def test_distill_on_numbers_by_hand() -> None:
    """Two groups of labels (1, 0) and (1, 1), one token a response: the label's advantage is
    +-sqrt(1/2) in the first group and 0 in the second one.
    """
    facts = make_facts([0, 0, 1, 1], [1.0, 0.0, 1.0, 1.0])
    objective = build("distill-labels")
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    assert prepared.zero_gradient is None or not bool(prepared.zero_gradient.any())

    start = torch.tensor([-1.0, -2.0, -0.5, -0.1], dtype=torch.float64)
    teacher = torch.tensor([-0.5, -2.5, -0.5, -3.0], dtype=torch.float64)
    logprobs = start.clone().requires_grad_(True)
    tokens = make_record(
        logprobs,
        [1, 1, 1, 1],
        step_start_logprobs=start,
        reference_logprobs=teacher,
        sampler_logprobs=start,
        entropy=torch.zeros(4, dtype=torch.float64),
    )
    expected = [0.5 + 0.3 * 0.5**0.5, -0.5 - 0.3 * 0.5**0.5, 0.0, -2.9]
    assert objective.token_advantage(tokens, prepared).tolist() == pytest.approx(expected, rel=1e-5)

    # The first update's gradient is -A / 4, a mean over four tokens.
    objective.token_loss(tokens, prepared).sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-value / 4 for value in expected], rel=1e-5)
    kl = objective.token_metrics(tokens, prepared)["distill/kl"]
    assert float(kl.sum().detach()) == pytest.approx((-0.5 + 0.5 + 0.0 + 2.9) / 4)


def test_the_mean_gradient_of_distill_is_that_of_the_reverse_kl() -> None:
    """Over all tokens of a vocabulary of five, weighted by the policy; without labels a group may
    have one sample.
    """
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=rng, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, generator=rng, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)

    options = TypeAdapter(ObjectiveOptions).validate_python({"name": "distill", "teacher": "t"})
    objective = build_objective(options, updates_per_step=1)
    assert not objective.options.compares_siblings
    facts = make_facts([0, 1, 2, 3, 4], [1.0, 0.0, 0.0, 1.0, 1.0])
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    logprobs = logits.log_softmax(0)
    tokens = make_record(
        logprobs,
        [1] * 5,
        step_start_logprobs=logprobs.detach(),
        reference_logprobs=teacher,
    )
    mean = (5 * policy.detach().exp() * objective.token_loss(tokens, prepared)).sum()
    (found,) = torch.autograd.grad(mean, logits)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_maxrl_rejects_a_negative_reward() -> None:
    facts = make_facts([0, 0], [1.0, 0.0], rewards=[1.0, -1.0])
    with pytest.raises(RewardError, match=r"^reward of sample 0:data/0#1 is -1.0; .* let the"):
        build("maxrl").prepare_step(facts)


def test_w_reinforce_trains_single_samples_and_leaves_one_class_out() -> None:
    facts = make_facts([0, 1, 2], [1.0, 0.0, 1.0], lens=[2, 3, 4])
    for case, advantages in (("psr", [1, 0, 1]), ("nsr", [0, -1, 0])):
        objective = build(case)
        prepared = objective.prepare(None, facts, objective.prepare_step(facts))
        assert prepared.per_sample["advantage"].tolist() == advantages
        weight = 1 / (6 if case == "psr" else 3)
        assert prepared.per_sample["token_weight"].tolist() == [
            weight * (advantage != 0) for advantage in advantages
        ]
    assert not REGISTRY["w_reinforce"].options_class.compares_siblings


@pytest.mark.parametrize("labels", [[1.0, 0.0, 1.0, 0.0], [1.0] * 4, [0.0] * 4])
@pytest.mark.parametrize("classes", ["positive", "negative"])
def test_samples_of_the_other_class_have_neither_kl_nor_entropy(
    classes: str, labels: list[float]
) -> None:
    """The loss is the mean over the tokens of the trained class, 0 where it is empty; the engine
    may skip the others.
    """
    lens = [2, 3, 1, 4]
    facts = make_facts([0, 0, 1, 1], labels, lens=lens)
    rng = np.random.default_rng(0)
    logprobs = torch.from_numpy(-rng.exponential(1.0, sum(lens)))
    batch = Batch(
        facts=facts,
        logprobs=logprobs,
        reference=logprobs + 0.3,
        step_start=logprobs,
        mask=torch.ones(sum(lens), dtype=torch.float64),
        sample_of_token=torch.repeat_interleave(torch.tensor(lens)),
    )
    options = TypeAdapter(ObjectiveOptions).validate_python(
        {"name": "w_reinforce", "classes": classes, "kl_coef": 0.5, "entropy_coef": 0.25}
    )
    objective = build_objective(options, updates_per_step=1)
    prepared = objective.prepare(None, facts, objective.prepare_step(facts))
    entropy = torch.from_numpy(rng.exponential(1.0, sum(lens)))
    by_logprob, by_entropy, total = gradients(objective, batch, prepared, entropy, 0)

    wanted = 1.0 if classes == "positive" else 0.0
    is_trained = (torch.tensor(labels).double() == wanted).double()[batch.sample_of_token]
    num_tokens = max(int(is_trained.sum()), 1)
    advantage = 1.0 if classes == "positive" else -1.0
    kl = np.expm1(0.3) - 0.3
    loss = is_trained * (-advantage + 0.5 * kl - 0.25 * entropy) / num_tokens
    slope = is_trained * -(advantage + 0.5 * np.expm1(0.3)) / num_tokens
    assert total == pytest.approx(float(loss.sum()), rel=1e-12, abs=1e-15)
    np.testing.assert_allclose(by_logprob, slope, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(by_entropy, -0.25 * is_trained / num_tokens, rtol=1e-12)

    of_samples = [label != wanted for label in labels]
    if any(of_samples):
        assert prepared.zero_gradient is not None
        assert prepared.zero_gradient.tolist() == of_samples
    else:
        assert prepared.zero_gradient is None
    sums = token_metric_sums(objective, batch, prepared)
    assert sums["w_reinforce/kl"] == pytest.approx(kl if is_trained.any() else 0.0, rel=1e-12)
    assert prepared.denominators["w_reinforce/kl"] == int(is_trained.sum())


def test_real_leaves_groups_of_one_class_out_and_counts_them() -> None:
    facts = make_facts([0, 0, 1, 1], [1.0, 0.0, 1.0, 1.0], lens=[1, 1, 2, 2])
    prepared = build("real").prepare(None, facts, None)
    slope = 1 / (0.5 * 2 * 2)  # 1 / tau, e^0 / (1 + e^0), and one of two groups
    assert prepared.per_sample["coefficient"].tolist() == [-slope, slope, 0, 0]
    assert prepared.zero_gradient is not None and prepared.zero_gradient.tolist() == [
        False,
        False,
        True,
        True,
    ]
    huge = torch.tensor([1e5, -1e5, 0, 0], dtype=torch.float64)
    for scores, loss in ((huge, 0.0), (-huge, 2e5)):  # both of a mixed group are right, or wrong
        prepared = build("real").prepare(scores, facts, None)
        assert torch.isfinite(prepared.per_sample["coefficient"]).all()
        assert prepared.loss == pytest.approx(loss)


def test_real_divides_a_class_with_huge_scores_among_its_samples() -> None:
    """The derivative of log(1 + e^2000 + e^1999 + ...) by its exponents is their softmax."""
    facts = make_facts([0, 0, 0], [0.0, 0.0, 1.0])
    scores = torch.tensor([1000.0, 999.5, 0.0], dtype=torch.float64)  # tau is 0.5
    prepared = build("real").prepare(scores, facts, None)
    share = 1 / (1 + np.exp(-1.0))
    assert prepared.per_sample["coefficient"].tolist() == pytest.approx(
        [2 * share, 2 * (1 - share), -1.0], rel=1e-12
    )
    assert prepared.loss == pytest.approx(2000 - np.log(share) + np.log(2), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "gspo", "clip_high": 0.2}, "less than 0.1"),
        ({"name": "gspo", "loss_mean": "token"}, "Extra inputs"),
        ({"name": "cispo", "clip_low": 0.2}, "Extra inputs"),
        ({"name": "sft", "entropy_coef": 0.1}, "Extra inputs"),
        ({"name": "real", "kl_coef": 0.1}, "Extra inputs"),
        ({"name": "dr_grpo"}, "Field required"),
        ({"name": "dapo", "overlong_buffer": 5}, "go together"),
        (
            {"name": "dapo", "overlong_buffer": 5, "overlong_length": 5},
            "is not below overlong_length=5",
        ),
        (
            {"name": "w_reinforce", "classes": "positive", "positive_weight": 0.2},
            "does not go with classes=positive",
        ),
        (
            {"name": "w_reinforce", "kl_coef": 0.1, "kl_in": "reward"},
            "objective.kl_in=reward does not go with objective.name=w_reinforce",
        ),
        (
            {"name": "maxrl", "kl_coef": 0.1, "kl_in": "reward"},
            "objective.kl_in=reward does not go with objective.name=maxrl",
        ),
        ({"name": "dgpo", "difficulty_temperature": 0}, "greater than 0"),
        ({"name": "distill"}, "Field required"),
        ({"name": "steer", "weight_min": 1.0}, "less than 1"),
        ({"name": "vimpo", "value_kl": "k1"}, "Input should be 'k2' or 'k3'"),
        (
            {"name": "vimpo", "kl_coef": 0.1},
            "objective.kl_coef=0.1 does not go with objective.name=vimpo",
        ),
        ({"name": "steer", "ratio_max": 1.0}, "greater than 1"),
        (
            {"name": "distill", "teacher": "t", "kl_coef": 0.1},
            "objective.kl_coef=0.1 does not go with objective.name=distill",
        ),
        ({"name": "distill", "teacher": "t", "reset_every": 2}, "remove it"),
        (
            {"name": "grpo", "kl_estimator": "k2"},
            "objective.kl_estimator=k2 does not go with kl_coef=0",
        ),
        ({"name": "grpo", "kl_in": "loss"}, "objective.kl_in=loss does not go with kl_coef=0"),
        ({"name": "grpo", "kl_coef": 0.1, "kl_estimator": "k1"}, "has a gradient of mean 0"),
        (
            {"name": "grpo", "importance_level": "sequence"},
            "importance_level=sequence does not go with importance=none",
        ),
        (
            {"name": "grpo", "importance": "mask", "importance_level": None},
            "importance_level=None does not go with importance=mask: it is required there",
        ),
    ],
)
def test_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TypeAdapter(ObjectiveOptions).validate_python(options)

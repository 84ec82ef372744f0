"""PPO with a critic on the real policy: every update of two steps in any layout equals the plain
loop in float64.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.policies.policy_cases import random_step
from tests.support.policies.ppo_run import Step, attempt, config_of, make_models, split
from tests.support.policies.ppo_trainer import PPO, PpoTrainer
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"cp": 2}),
    "optimizer2": (2, {"distributed_optimizer": True}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
}
CHEAP = ("one", "tp2-pp2", "dp2")


def recorded_steps() -> list[Step]:
    """Two steps whose rewards are not their labels; some responses are truncated."""
    steps = []
    for step, (facts, tokens) in enumerate((random_step(31), random_step(32)), start=1):
        rng = np.random.default_rng(step)
        rewards = facts.labels + rng.normal(0, 0.1, facts.num_samples)
        truncated = rng.random(facts.num_samples) < 0.3
        ids = tuple(name.replace("0:", f"{step}:", 1) for name in facts.ids)
        steps.append((replace(facts, ids=ids, rewards=rewards, truncated=truncated), tokens))
    return steps


STEPS = recorded_steps()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> PpoTrainer:
    reference = PpoTrainer(*models, PPO, critic_lr=2e-3)
    for facts, tokens in STEPS:
        reference.step(facts, tokens, split(facts, 2), epochs=2)
    return reference


def check(found: dict[str, Any], expected: PpoTrainer, first: int = 0) -> None:
    """`found` has the updates from `first` on."""
    for name, model in (("policy", expected.policy), ("critic", expected.critic)):
        np.testing.assert_allclose(
            found["numbers"][name], expected.numbers[name][first:], rtol=1e-5, atol=1e-6
        )
        weights = expected.weights(model)
        assert found["weights"][name].keys() == weights.keys()
        for key, weight in weights.items():
            np.testing.assert_allclose(found["weights"][name][key], weight, atol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in CHEAP else pytest.mark.full) for name in LAYOUTS],
)
def test_two_steps_of_two_epochs_equal_the_plain_loop(
    models: tuple[Path, Path], expected: PpoTrainer, layout: str, tmp_path: Path
) -> None:
    world, parallel = LAYOUTS[layout]
    config = config_of(tmp_path, models, PPO, parallel, epochs=2)
    for found in run_ranks(lambda _rank, _world: attempt(config, tmp_path / "run", STEPS), world):
        check(found, expected)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Path, Path], PpoTrainer]:
    models = make_models(tmp_path_factory.mktemp("experts"), "qwen3_moe")
    reference = PpoTrainer(*models, PPO, critic_lr=2e-3)
    for facts, tokens in STEPS:
        reference.step(facts, tokens, split(facts, 2), epochs=2)
    return models, reference


def injected_none(_monkeypatch: pytest.MonkeyPatch) -> None:
    """No error."""


def injected_head_as_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the value head is summed over the ranks with the same experts only."""
    from pacs_megatron.policy import model

    exact = torch.nn.Linear

    def linear(*args: Any, **options: Any) -> Any:
        head = exact(*args, **options)
        for parameter in head.parameters():
            parameter.allreduce = False
        return head

    monkeypatch.setattr(model.torch.nn, "Linear", linear)


def injected_experts_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The critic replays them."""
    from pacs_megatron.training import phases

    def kept(item: Any, **changes: Any) -> Any:
        return replace(
            item,
            **{
                key: value for key, value in changes.items() if key != "routes" or value is not None
            },
        )

    monkeypatch.setattr(phases, "replace", kept)


def injected_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy chooses its experts in each update."""
    from pacs_megatron.policy.routing import Routing

    exact = Routing.__init__
    monkeypatch.setattr(
        Routing, "__init__", lambda self, spec, models, _given: exact(self, spec, models, None)
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "inject",
    [injected_none, injected_head_as_expert, injected_experts_of_the_policy, injected_no_replay],
)
def test_experts_on_two_ranks_equal_the_plain_loop(
    experts: tuple[tuple[Path, Path], PpoTrainer],
    inject: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inject(monkeypatch)
    models, expected = experts
    config = config_of(tmp_path, models, PPO, {"ep": 2}, epochs=2)
    results = run_ranks(lambda _rank, _world: attempt(config, tmp_path / "run", STEPS), 2)
    for found in results:
        if inject is injected_none:
            check(found, expected)
        else:
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                check(found, expected)


RESUMED = {
    # layout of the first attempt, of the second one
    "pp2 -> tp2": ("pp2", "tp2-sp"),
    "dp2 -> one": ("dp2", "one"),
    "optimizer2 -> pp2-vpp2": ("optimizer2", "pp2-vpp2"),
    "cp2 -> optimizer2": ("cp2", "optimizer2"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", RESUMED)
def test_a_run_that_stops_inside_an_epoch_resumes_in_another_layout(
    models: tuple[Path, Path], expected: PpoTrainer, case: str, tmp_path: Path
) -> None:
    for number, layout in enumerate(RESUMED[case]):
        world, parallel = LAYOUTS[layout]
        config = config_of(tmp_path, models, PPO, parallel, epochs=2)
        stop_after = 3 if number == 0 else None
        found = run_ranks(
            lambda _rank, _world, config=config, stop_after=stop_after: attempt(
                config, tmp_path / "run", STEPS, stop_after=stop_after
            ),
            world,
        )
        if number == 0:
            assert (
                tmp_path
                / "run"
                / "checkpoints"
                / "step_000000_plus_03"
                / "critic"
                / "manifest.json"
            ).is_file()
        else:
            check(found[0], expected, first=3)


@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2-pp2", marks=pytest.mark.full)])
def test_resume_export_and_conversion_are_equal_bit_for_bit(
    models: tuple[Path, Path], layout: str, tmp_path: Path
) -> None:
    """Also a critic that starts without a value head, and one that starts from an export."""
    from transformers import AutoModelForTokenClassification

    from pacs_megatron.convert.convert import ConversionOptions, megatron_to_hf

    world, parallel = LAYOUTS[layout]
    config = config_of(tmp_path, (models[0], None), PPO, parallel, epochs=2)
    whole = run_ranks(lambda _rank, _world: attempt(config, tmp_path / "whole", STEPS), world)[0]
    run_ranks(lambda _rank, _world: attempt(config, tmp_path / "run", STEPS, stop_after=3), world)
    export = tmp_path / "export"
    resumed = run_ranks(
        lambda _rank, _world: attempt(config, tmp_path / "run", STEPS, export=export), world
    )[0]
    first = whole["rows"][0]
    # At the start every value is 0, so nothing is explained; the critic's rows of weights move from
    # there.
    assert (
        whole["numbers"]["critic"][3:] == resumed["numbers"]["critic"]
        and first["critic/value_mean"] != 0
    )
    for name in ("policy", "critic"):
        for key, weight in whole["weights"][name].items():
            np.testing.assert_array_equal(resumed["weights"][name][key], weight, err_msg=key)
    source = tmp_path / "run" / "checkpoints" / "step_000002" / "critic"
    megatron_to_hf(source, ConversionOptions(out=tmp_path / "hf"), step=None, max_shard_bytes=10**9)
    for folder in (export / "critic", tmp_path / "hf"):
        state = AutoModelForTokenClassification.from_pretrained(folder).state_dict()
        assert state.keys() == whole["weights"]["critic"].keys()
        for key, tensor in state.items():
            np.testing.assert_array_equal(tensor.numpy(), whole["weights"]["critic"][key])


WITHOUT_KL = {key: value for key, value in PPO.items() if not key.startswith("kl_")}


def test_warm_up_trains_the_critic_alone(models: tuple[Path, Path], tmp_path: Path) -> None:
    options = WITHOUT_KL
    expected = PpoTrainer(*models, options, critic_lr=2e-3)
    for number, (facts, tokens) in enumerate(STEPS):
        expected.step(facts, tokens, split(facts, 2), warmup=2 if number == 0 else 0)
    config = config_of(tmp_path, models, options, {})
    config = with_warmup(config, 1)
    [found] = run_ranks(lambda _rank, _world: attempt(config, tmp_path / "run", STEPS), 1)
    assert len(found["numbers"]["policy"]) == 2 and len(found["numbers"]["critic"]) == 4
    assert found["rows"][0]["optimizer/lr"] == 0 and found["rows"][0]["critic/lr"] == 2e-3
    check(found, expected)


def with_warmup(config: Any, steps: int) -> Any:
    critic = config.objective.critic.model_copy(update={"warmup_steps": steps})
    return config.model_copy(
        update={"objective": config.objective.model_copy(update={"critic": critic})}
    )


def linear(first: int, count: int, total: int) -> list[float]:
    """Factors of the rates of planned updates from `first` on; a decay to 0 reaches it one update
    after the last.
    """
    return [1 - update / (total + 1) for update in range(first, first + count)]


CHANGES: dict[str, Any] = {
    # (updates per step, epochs, warm-up) of both attempts, updates of the first one, warm-up
    # updates and rates by step
    "longer warm-up": ((2, 1, 1), (2, 1, 2), 2, (2, 2), (linear(1, 2, 4), linear(3, 2, 4))),
    "no warm-up any more, inside a step": (
        (2, 1, 1),
        (2, 1, 0),
        1,
        (1, 0),
        (linear(1, 2, 4), linear(3, 2, 4)),
    ),
    "more updates": ((1, 1, 0), (2, 2, 0), 1, (0, 0), (linear(1, 1, 2), linear(5, 4, 8))),
    "fewer updates": ((2, 2, 0), (1, 1, 0), 4, (0, 0), (linear(1, 4, 8), linear(2, 1, 2))),
}


@pytest.mark.parametrize("case", in_test(CHANGES, "fewer updates"))
def test_updates_epochs_and_warm_up_change_on_resume(
    models: tuple[Path, Path], case: str, tmp_path: Path
) -> None:
    """The schedule counts all steps as the present attempt does."""
    *attempts, stop_after, warmup, rates = CHANGES[case]
    expected = PpoTrainer(*models, WITHOUT_KL, critic_lr=2e-3)
    for (facts, tokens), (parts, epochs, _), first, factors in zip(
        STEPS, attempts, warmup, rates, strict=True
    ):
        expected.step(
            facts, tokens, split(facts, parts), epochs=epochs, warmup=first, rates=factors
        )
    numbers: dict[str, list[Any]] = {"policy": [], "critic": []}
    for number, (parts, epochs, steps) in enumerate(attempts):
        config = with_warmup(
            config_of(tmp_path, models, WITHOUT_KL, {}, updates_per_step=parts, epochs=epochs),
            steps,
        )
        config = config.model_copy(
            update={"optimizer": config.optimizer.model_copy(update={"schedule": "linear"})}
        )
        stop = stop_after if number == 0 else None
        [found] = run_ranks(
            lambda _rank, _world, config=config, stop=stop: attempt(
                config, tmp_path / "run", STEPS, stop_after=stop
            ),
            1,
        )
        numbers = {name: before + found["numbers"][name] for name, before in numbers.items()}
    check(found | {"numbers": numbers}, expected)


def _injected_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    from pacs_megatron.objectives import ppo

    exact = ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda r, v, gamma, lam: exact(r, v, gamma, 1.0))


def _injected_rank_whitening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank whitens with its own sums."""
    from pacs_megatron.policy.engine import MegatronPolicy

    def own_only(_self: Any, facts: Any, minibatches: Any, own: Any) -> Any:
        found = {}
        for minibatch, values in zip(minibatches, own, strict=True):
            rows = minibatch.tokens.index[: len(values)]
            found |= {minibatch.facts.ids[row]: v for row, v in zip(rows, values, strict=True)}
        share = len(facts.ids) / max(len(found), 1)
        return np.array([found.get(name, 0.0) for name in facts.ids]) * share

    monkeypatch.setattr(MegatronPolicy, "by_sample", own_only)


def _injected_shifted_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value after a token in the place of the value before it."""
    from pacs_megatron.policy.model import PolicyModel

    exact = PolicyModel._values
    monkeypatch.setattr(
        PolicyModel, "_values", lambda self, hidden, labels: exact(self, hidden.roll(-1, 0), labels)
    )


def _injected_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value after the last token: the last one again."""
    from pacs_megatron.objectives import ppo

    exact = ppo.gae

    def bootstrapped(rewards: Any, values: Any, gamma: float, lam: float) -> Any:
        return exact(
            [
                np.append(r[:-1], r[-1] + gamma * v[-1])
                for r, v in zip(rewards, values, strict=True)
            ],
            values,
            gamma,
            lam,
        )

    monkeypatch.setattr(ppo, "gae", bootstrapped)


def _injected_value_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    from pacs_megatron.objectives.ppo import ValueLoss

    monkeypatch.setattr(ValueLoss, "_clipped", lambda _self, tokens: tokens.logprobs)


INJECTED = {
    "lambda": _injected_lambda,
    "whitening by rank": _injected_rank_whitening,
    "value of the next token": _injected_shifted_value,
    "value after the last token": _injected_bootstrap,
    "no value clip": _injected_value_clip,
}


@pytest.mark.full
@pytest.mark.parametrize("error", INJECTED)
def test_a_injected_error_is_found(
    models: tuple[Path, Path],
    expected: PpoTrainer,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    INJECTED[error](monkeypatch)
    config = config_of(tmp_path, models, PPO, {}, epochs=2)
    found = run_ranks(lambda _rank, _world: attempt(config, tmp_path / "run", STEPS), 2)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(found[0], expected)

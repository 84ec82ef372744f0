"""Invalid combinations of objective options and their messages."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pacs_megatron.errors import ConfigError
from pacs_megatron.objectives.grpo import GrpoOptions
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import ObjectiveOptions, build_objective

OPTIONS: TypeAdapter[Any] = TypeAdapter(ObjectiveOptions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"name": "pacs", "reward_proxy": "mean_log_prob", "reference": "frozen"},
            "objective.reference=frozen",
        ),
        (
            {"name": "pacs", "reward_proxy": "mean_log_prob", "reference": "step_start"},
            "not used there; remove",
        ),
        (
            {"name": "pacs", "reference": None},
            "reference=None does not go with reward_proxy=sum_log_ratio: it is required",
        ),
        (
            {"name": "pacs", "reset_every": 5},
            "objective.reset_every=5 needs objective.reference=frozen",
        ),
        (
            {"name": "pacs", "score_std_floor": 0.1},
            "objective.score_std_floor=0.1 does not go with score=rloo",
        ),
        (
            {"name": "pacs", "score": "grpo"},
            "objective.score_std_floor=None does not go with score=grpo: it is required",
        ),
        (
            {"name": "pacs", "score": "grpo", "reference": "frozen"},
            "score_std_floor=None does not go with",
        ),
        (
            {"name": "pacs", "score": "grpo", "reward_proxy": "mean_log_prob"},
            "score_std_floor=None does not go with score=grpo",
        ),
        (
            {"name": "dapo", "overlong_penalty": 0.9},
            "objective.overlong_penalty=0.9 is not used without",
        ),
        (
            {"name": "pacs", "actor_scope": "own"},
            "objective.actor_scope=own does not go with actor_term=0.0",
        ),
        (
            {"name": "pacs", "actor_term": 0.5, "actor_scope": None},
            "actor_scope=None does not go with actor_term=0.5: it is required there",
        ),
        (
            {"name": "pacs", "actor_term": 0.5, "reward_proxy": "mean_log_prob"},
            "objective.reward_proxy=sum_log_ratio",
        ),
        ({"name": "pacs", "actor_term": 1.5}, "less than or equal to 1"),
        (
            {"name": "grpo", "kl_coef": 0.1, "kl_in": None},
            "kl_in=None does not go with kl_coef=0.1: it is required there; set the key",
        ),
        (
            {"name": "grpo", "constant_length": 7},
            "constant_length=7 does not go with loss_mean=token: it is not used there; remove the "
            "key",
        ),
        (
            {"name": "grpo", "loss_mean": "dr_grpo"},
            "constant_length=None does not go with loss_mean=dr_grpo: it is required there",
        ),
        ({"name": "grpo", "reset_every": 5}, "requires objective.kl_coef > 0"),
        ({"name": "sft", "loss_mean": "dr_grpo"}, "'token' or 'sequence'"),
        ({"name": "sft", "beta": 1.0}, "Extra inputs"),
    ],
)
def test_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        OPTIONS.validate_python(options)
    # Defaults that depend on a wrong option are reported as well; the loader of the config drops
    # those lines.
    (problem,) = (
        found for found in error.value.errors() if found["type"] != "default_factory_not_called"
    )
    assert words in problem["msg"] and "\n" not in problem["msg"]


@pytest.mark.parametrize(
    "options",
    [
        {"name": "pacs"},
        {"name": "pacs", "reference": "frozen"},
        {"name": "pacs", "reference": "frozen", "reset_every": 20},
        {"name": "pacs", "reward_proxy": "mean_log_prob", "score": "grpo", "score_std_floor": 0.01},
        {"name": "pacs", "score": "grpo", "reference": "frozen", "score_std_floor": 0.1},
        {"name": "pacs", "score": "grpo", "score_std_floor": 0.1},
        {"name": "pacs", "actor_term": 1.0, "reference": "frozen"},
        {"name": "grpo", "loss_mean": "dr_grpo", "constant_length": 100},
        {"name": "grpo", "kl_coef": 0.1, "reset_every": 3},
        {"name": "sft"},
    ],
)
def test_accepted_and_a_resolved_copy_reads_back(options: dict[str, Any]) -> None:
    resolved = OPTIONS.validate_python(options)
    assert OPTIONS.validate_python(resolved.model_dump()) == resolved
    assert build_objective(resolved, updates_per_step=1).name == options["name"]


def test_defaults_that_depend_on_other_options() -> None:
    assert PacsOptions(name="pacs").reference == "step_start"
    assert PacsOptions(name="pacs", reward_proxy="mean_log_prob").reference is None
    assert PacsOptions(name="pacs").actor_scope is None
    assert PacsOptions(name="pacs", actor_term=0.1).actor_scope == "group"
    assert GrpoOptions(name="grpo").kl_in is None
    assert GrpoOptions(name="grpo", kl_coef=0.1).kl_in == "loss"


def test_actor_term_off_policy_is_a_config_error() -> None:
    options = PacsOptions(name="pacs", actor_term=0.5)
    with pytest.raises(
        ConfigError, match=r"objective.actor_term=0.5 needs one update a step, got 2"
    ):
        build_objective(options, updates_per_step=2)

"""`certify` with other options in the attempt that resumes; the reference follows them from the
same update on.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pacs_megatron.config import load_config
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.errors import ConfigError
from pacs_megatron.workbench.certify import ranks, reference
from pacs_megatron.workbench.certify import run as certify_run
from pacs_megatron.workbench.certify.certificate import Certificate
from pacs_megatron.workbench.certify.formulas import Batch, estimates
from pacs_megatron.workbench.certify.shrink import Case
from tests.support.policies.certify_runs import write_run
from tests.support.policies.injected_errors.injection import SAMPLER_ROUTES
from tests.support.tiny_families import CASES

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """`before`: changes of BASE. `later`: of the second attempt, in the sizes of the tiny case."""

    before: Sections
    later: Sections
    family: str = "qwen3"
    clip: float = 1.0
    """factor of the second attempt's `clip_grad`"""
    stop_after: int | None = None
    """updates of the first attempt, in the place of the case's own number"""
    data: Callable[[pytest.MonkeyPatch], None] = lambda _patch: None
    """changes the recorded samples"""


def certify_changed(folder: Path, case: Changed, *, ignored: Sections | None = None) -> Certificate:
    """`ignored`: values that the product keeps, as if it ignored a changed key."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after: list[int] = []
        make_case = certify_run.make_case

        def make(*args: Any) -> Case:
            tiny = make_case(*args)
            tiny = replace(tiny, stop_after=case.stop_after or tiny.stop_after)
            stop_after.append(tiny.stop_after)
            return tiny

        patch.setattr(certify_run, "make_case", make)
        case.data(patch)
        _change_product(patch, case, ignored or {})
        _change_reference(patch, case, stop_after)
        path = write_run(folder, dict(case.before), case.family)
        certificate = certify_run.certify(path, [], out=folder / "certificate")
    assert certificate is not None
    return certificate


def _merged(before: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        k: _merged(before[k], v)
        for k, v in values.items()
        if isinstance(v, Mapping) and before.get(k)
    }
    return {**before, **values, **nested}


def _change_product(patch: pytest.MonkeyPatch, case: Changed, ignored: Sections) -> None:
    attempt = ranks.attempt

    def changed(tiny: Case, folder: Path, number: int) -> None:
        if number:
            tree = _merged(_merged(tiny.config.model_dump(mode="json"), case.later), ignored)
            tiny = replace(tiny, config=RunConfig.model_validate(tree))
            for name in ("build_policy", "build_critic"):
                patch.setattr(ranks, name, _clipped(getattr(ranks, name), case.clip))
        attempt(tiny, folder, number)

    patch.setattr(ranks, "attempt", changed)


def _clipped(build: Any, factor: float) -> Any:
    def built(config: RunConfig, *args: Any) -> Any:
        objective = config.objective.model_copy(
            update={"clip_grad": factor * config.objective.clip_grad}
        )
        return build(config.model_copy(update={"objective": objective}), *args)

    return built


def _change_reference(patch: pytest.MonkeyPatch, case: Changed, stop_after: list[int]) -> None:
    """The reference changes its options before the first pass after update `stop_after`."""
    kind = reference.Reference
    update = kind._update
    logprobs = kind.logprobs
    estimate = kind._estimate
    state = {"is_due": False, "is_open": False}
    """the change comes before the next pass; it came inside a step"""

    def change(self: Any) -> None:
        if state["is_due"]:
            state["is_due"] = False
            _apply(self, case)

    def changed_update(self: Any, number: int, step: Any, index: int, *args: Any) -> Any:
        state["is_open"] = state["is_due"] and index > 0
        change(self)
        result = update(self, number, step, index, *args)
        state["is_due"] = number == stop_after[0]
        adds_reference = case.later.get("objective", {}).get("reference") == "frozen"
        if state["is_due"] and adds_reference and self.options["reference"] != "frozen":
            self.frozen = self.model.copy()
        return result

    def changed_logprobs(self: Any, *args: Any, **options: Any) -> Any:
        change(self)
        return logprobs(self, *args, **options)

    def changed_estimate(self: Any, step: Any, index: int, batch: Batch) -> None:
        # A resume computes the estimates of an open step again.
        if state["is_open"] and self.critic is not None and batch.step is not None:
            self.advantages, self.returns = estimates(batch.step, self.start_values)
        estimate(self, step, index, batch)

    patch.setattr(kind, "_update", changed_update)
    patch.setattr(kind, "logprobs", changed_logprobs)
    patch.setattr(kind, "_estimate", changed_estimate)


def _apply(trainer: Any, case: Changed) -> None:
    """Changes the options of the reference to those of the second attempt."""
    trainer.options = _merged(trainer.options, case.later.get("objective", {}))
    for key, value in case.later.get("batch", {}).items():
        if key in ("updates_per_step", "epochs"):
            trainer.case[key] = value
    trainer.case["optimizer"] = _merged(trainer.case["optimizer"], case.later.get("optimizer", {}))
    total = trainer.case["steps"] * trainer.planned_updates()
    sampling = case.later.get("rollout", {}).get("sampling", {})
    trainer.model.temperature = sampling.get("temperature", trainer.model.temperature)

    trainer.adam.total = total
    trainer.adam.options = trainer.case["optimizer"]
    trainer.adam.clip *= case.clip
    if trainer.critic is not None:
        trainer.critic_adam.total = total
        trainer.critic_adam.options = trainer.critic_optimizer()
        trainer.critic_adam.clip = trainer.adam.clip


OPTIMIZER = {
    "lr": 5e-4,
    "min_lr": 2e-4,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_eps": 2e-3,
    "weight_decay": 2.0,
}
DECAYED = {
    "optimizer": {"schedule": "linear", "min_lr": 1e-7, "weight_decay": 0.1, "warmup_updates": 1}
}
COSINE = {"schedule": "cosine", "weight_decay": 0.1}
"""To a rate of 0"""
ONE_UPDATE = {"batch": {"updates_per_step": 1}}
"""The first attempt ends between two steps; otherwise inside one."""
CHANGED: dict[str, Changed] = {
    "pacs": Changed(
        before=DECAYED | {"objective": {"name": "pacs", "clip_grad": 1.0, "importance_cap": 2.0}},
        later={
            "objective": {
                "beta": 0.5,
                "score": "dr_grpo",
                "weighting": "only_negative",
                "importance_cap": 1.05,
            },
            "optimizer": OPTIMIZER | {"schedule": "cosine"},
        },
        clip=0.7,
    ),
    "pacs with a frozen reference, between steps": Changed(
        before=ONE_UPDATE
        | {
            "objective": {
                "name": "pacs",
                "reference": "frozen",
                "score": "grpo",
                "score_std_floor": 0.1,
            }
        },
        later={
            "objective": {
                "score_std_floor": 0.3,
                "actor_term": 0.5,
                "actor_scope": "group",
                "reset_every": 1,
            },
            "rollout": {"sampling": {"temperature": 0.8}},
        },
    ),
    "grpo": Changed(
        before=DECAYED
        | {
            "objective": {
                "name": "grpo",
                "kl_coef": 0.1,
                "importance": "truncate",
                "clip_grad": 1.0,
            },
            "parallel": {"pp": 2},
        },
        later={
            "objective": {
                "clip_low": 0.01,
                "clip_high": 0.015,
                "kl_coef": 0.3,
                "kl_estimator": "k2",
                "entropy_coef": 0.01,
                "loss_mean": "sequence",
                "importance_cap": 1.2,
            },
            "optimizer": OPTIMIZER,
        },
        clip=1.5,
    ),
    "dapo": Changed(
        before={"objective": {"name": "dapo", "overlong_length": 90, "overlong_buffer": 40}},
        later={"objective": {"overlong_length": 10, "overlong_buffer": 8, "overlong_penalty": 0.5}},
    ),
    "gspo": Changed(
        before={"objective": {"name": "gspo", "importance": "truncate"}},
        later={
            "objective": {
                "importance": "mask",
                "importance_level": "sequence",
                "importance_floor": 0.8,
            }
        },
    ),
    "reinforce_pp, between steps": Changed(
        before=ONE_UPDATE
        | {
            "objective": {
                "name": "reinforce_pp",
                "kl_coef": 0.1,
                "kl_in": "reward",
                "kl_estimator": "k1",
            }
        },
        later={"objective": {"baseline": "group", "kl_estimator": "k3", "kl_coef": 0.5}},
    ),
    "pacs with another proxy, between steps": Changed(
        before=ONE_UPDATE | {"objective": {"name": "pacs"}},
        later={
            "objective": {
                "reward_proxy": "mean_log_prob",
                "reference": None,
                "score": "grpo",
                "score_std_floor": 0.01,
                "beta": 2.0,
            }
        },
    ),
    "pacs with a reference that the resume adds, more updates of it": Changed(
        before=ONE_UPDATE | {"objective": {"name": "pacs"}, "optimizer": COSINE},
        later={
            "objective": {"reference": "frozen"},
            "batch": {
                "updates_per_step": 2,
                "epochs": 2,
                "groups": "apart",
                "tokens_per_microbatch": 60,
            },
        },
    ),
    "grpo with the KL in the reward, between steps": Changed(
        before=ONE_UPDATE
        | {
            "objective": {
                "name": "grpo",
                "kl_coef": 0.1,
                "kl_estimator": "k2",
                "loss_mean": "dr_grpo",
                "constant_length": 100,
            }
        },
        later={"objective": {"kl_in": "reward", "constant_length": 7}},
    ),
    "ppo with fewer updates": Changed(
        before={
            "batch": {"updates_per_step": 4},
            "objective": {"name": "ppo"},
            "optimizer": COSINE,
        },
        later={"batch": {"updates_per_step": 1}},
        stop_after=7,
    ),
    "w_reinforce on one class": Changed(
        before={"objective": {"name": "w_reinforce"}},
        later={"objective": {"classes": "negative", "positive_weight": None}},
    ),
    "w_reinforce": Changed(
        before={"objective": {"name": "w_reinforce"}},
        later={"objective": {"positive_weight": 0.7}},
    ),
    "real": Changed(before={"objective": {"name": "real"}}, later={"objective": {"tau": 1.5}}),
    "dgpo": Changed(
        before={"objective": {"name": "dgpo"}},
        later={"objective": {"difficulty_temperature": 0.5}},
    ),
    "distill": Changed(
        before={"objective": {"name": "distill", "teacher": "teacher", "label_coef": 0.5}},
        later={"objective": {"label_coef": 2.0}},
    ),
    "steer": Changed(
        before={"objective": {"name": "steer"}},
        later={"objective": {"weight_min": 0.5, "ratio_max": 1.01}},
    ),
    "ucas": Changed(
        before={"objective": {"name": "ucas", "logit_coef": 0.3}},
        later={"objective": {"correct_coef": 0.5, "wrong_coef": 0.1, "logit_coef": 1.0}},
    ),
    "vimpo, between steps": Changed(
        before=ONE_UPDATE | {"objective": {"name": "vimpo", "beta": 0.1, "actor_coef": 0.5}},
        later={"objective": {"beta": 0.02, "actor_coef": 2.0, "lam": 0.9, "value_kl": "k2"}},
    ),
    "ppo": Changed(
        before=DECAYED
        | {
            "objective": {
                "name": "ppo",
                "clip_grad": 1.0,
                "kl_coef": 0.1,
                "kl_in": "reward",
                "kl_estimator": "k1",
            }
        },
        later={
            "objective": {
                "gamma": 0.9,
                "lam": 0.8,
                "value_clip": 0.01,
                "kl_coef": 0.3,
                "loss_mean": "sequence",
                "entropy_coef": 0.01,
                "critic": {"lr": 5e-4},
            },
            "optimizer": OPTIMIZER,
        },
        clip=0.7,
    ),
    "ppo with experts, between steps": Changed(
        before=ONE_UPDATE
        | {
            "objective": {"name": "ppo", "value_clip": None},
            "parallel": {"ep": 2, "distributed_optimizer": True},
        },
        later={
            "objective": {
                "lam": 0.5,
                "value_clip": 0.05,
                "value_coef": 1.0,
                "critic": {"lr": 1e-3},
            },
            "optimizer": OPTIMIZER,
        },
        family="qwen3_moe",
    ),
}
"""Keys of each objective and of the optimizer that a resume may change, several in a case."""

_DENSE: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "sequence_parallel": True}),
    (4, {"tp": 4}),
    (4, {"pp": 2, "vpp": 2}),
    (4, {"pp": 4}),
    (4, {"cp": 2}),
    (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    (4, {"tp": 2, "cp": 2}),
    (4, {"pp": 2, "cp": 2}),
    (2, {}),
]
_EXPERTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"ep": 2}),
    (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    (4, {"pp": 2, "ep": 2}),
    (4, {"cp": 2, "ep": 2}),
]
_NAMES = (
    "pacs",
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "luspo",
    "cispo",
    "reinforce_pp",
    "rloo",
    "w_reinforce",
    "ppo",
)


def random_change(seed: int, folder: Path) -> Changed:
    """A legal draw over family, layout, objective, options, precision, packing and schedule, with
    options drawn again for the resume. Reproducible.
    """
    for number in range(100):
        draw = random.Random(f"{seed}.{number}")
        with contextlib.suppress(ConfigError, ValidationError, ValueError):
            return _draw(draw, folder / str(number))
    raise AssertionError(seed)


def _draw(draw: random.Random, folder: Path) -> Changed:
    family = draw.choice([*CASES])
    is_moe = family.startswith("qwen3_moe")
    ranks_, axes = draw.choice(_EXPERTS if is_moe else _DENSE)
    recompute = {"granularity": draw.choice(["none", "selective", "full"])}
    name = draw.choice([*_NAMES, "pacs", "ppo", "real", "real_bce", "sft"])
    frozen = draw.random() < 0.5
    where = draw.choice(["loss", "reward"]) if draw.random() < 0.5 else None
    first, second = (_options(draw, name, frozen, where) for _ in range(2))
    sampling = {"max_response_tokens": 100, "temperature": draw.choice([1.0, 0.7])}
    before: dict[str, Any] = {
        "run": {"nproc": ranks_},
        "precision": {
            "dtype": draw.choice(["fp32", "bf16"]),
            "head": draw.choice(["bf16", "fp32"]),
        },
        "parallel": axes | {"distributed_optimizer": draw.random() < 0.5, "recompute": recompute},
        "objective": first,
        "batch": {
            "updates_per_step": 1
            if first.get("actor_term") or second.get("actor_term")
            else draw.randint(1, 4),
            "samples_per_prompt": draw.choice([2, 3, 4]),
            "tokens_per_microbatch": draw.choice([160, 200, 400, 1600]),
            "groups": draw.choice(["auto", "apart"]),
        },
        "optimizer": {
            "schedule": "cosine",
            "min_lr": 2e-7,
            "weight_decay": draw.choice([0.0, 0.1]),
        },
    }
    if name != "sft":
        before["rollout"] = {"engine": "embedded", "sampling": sampling}
    if is_moe and name != "sft" and draw.random() < 0.5:
        rollout = SAMPLER_ROUTES["rollout"] | {"sampling": sampling}
        before |= SAMPLER_ROUTES | {"rollout": rollout}
    config = load_config(write_run(folder, before | {"objective": second}, family)).config
    certify_run.make_case(load_config(write_run(folder, before, family)), None)
    later = config.objective.model_dump(
        mode="json", exclude={"name", "clip_grad", "constant_length"}
    )
    later |= {
        key: 0.1 * later[key]
        for key in ("clip_low", "clip_high", "value_clip")
        if (later.get(key) or 0) >= 0.05
    }
    if "critic" in later:
        later["critic"] = {"lr": draw.choice([5e-4, 3e-3])}
    optimizer = {
        "lr": draw.choice([5e-4, 2e-3]),
        "adam_beta1": 0.8,
        "adam_eps": 2e-3,
        "schedule": "linear",
    }
    clip = draw.choice([0.7, 1.5]) if first.get("clip_grad") else 1.0
    return Changed(
        before=before, later={"objective": later, "optimizer": optimizer}, family=family, clip=clip
    )


def _options(draw: random.Random, name: str, frozen: bool, where: str | None) -> dict[str, Any]:
    """`frozen`, and `where` the KL is, stay: they select passes, which stay inside a step."""
    o: dict[str, Any] = {"name": name, "clip_grad": 1.0}
    if name == "pacs":
        o |= {
            "beta": draw.choice([1.0, 0.3]),
            "score": draw.choice(["rloo", "dr_grpo", "grpo", "naive"]),
        }
        o |= {
            "weighting": draw.choice(["question", "only_positive", "none"]),
            "importance_cap": draw.choice([1.1, 2.0]),
        }
        o |= {"reference": "frozen", "reset_every": draw.choice([1, 2, None])} if frozen else {}
        o |= {"score_std_floor": draw.choice([0.1, 0.3])} if o["score"] == "grpo" else {}
        return o | ({"actor_term": 0.5} if draw.random() < 0.2 else {})
    if name in ("real", "real_bce"):
        return o | {"tau": draw.choice([0.3, 0.5, 2.0])}
    if name == "sft":
        return o | {"loss_mean": draw.choice(["token", "sequence"])}
    if where is not None:
        o |= {
            "kl_coef": draw.choice([0.05, 0.3]),
            "kl_in": where,
            "reset_every": draw.choice([1, 2, None]),
        }
        o["kl_estimator"] = (
            "k1" if name == "ppo" and where == "reward" else draw.choice(["k2", "k3"])
        )
    if draw.random() < 0.4:
        o["entropy_coef"] = draw.choice([0.005, 0.02])
    o["importance"] = draw.choice(["none", "truncate", "mask"])
    if o["importance"] != "none":
        o |= {
            "importance_cap": draw.choice([1.2, 2.0]),
            "importance_level": draw.choice(["token", "sequence"]),
        }
    if name in ("grpo", "dapo", "cispo", "reinforce_pp", "ppo"):
        o["loss_mean"] = draw.choice(["token", "sequence"])
    if name == "reinforce_pp":
        o["baseline"] = draw.choice(["none", "group"])
    if name == "ppo":
        o |= {
            "gamma": draw.choice([1.0, 0.95]),
            "lam": draw.choice([1.0, 0.9, 0.0]),
            "value_clip": draw.choice([None, 0.2]),
        }
    return o

"""An error injected into the product. The processes of `certify` fork, so it reaches the ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

OBJECTIVES = "pacs_megatron.objectives"
POLICY = "pacs_megatron.policy"
TRAINING = "pacs_megatron.training"

# Changes of the configuration, so that it uses the code with the error.
FROZEN = {"objective": {"name": "pacs", "reference": "frozen", "reset_every": 2}}
GRPO = {
    "objective": {"name": "grpo", "kl_coef": 0.1, "importance": "truncate", "loss_mean": "sequence"}
}
PPO = {"objective": {"name": "ppo"}}
STEER = {"objective": {"name": "steer"}}
UCAS = {"objective": {"name": "ucas", "logit_coef": 0.3}}
VIMPO = {"objective": {"name": "vimpo", "beta": 0.1, "actor_coef": 0.5}}
DISTILL = {"objective": {"name": "distill", "teacher": "teacher", "label_coef": 0.5}}
DECAY = {
    "optimizer": {"weight_decay": 0.1, "schedule": "linear", "min_lr": 1e-7, "warmup_updates": 2}
}
CLIPPED = {"objective": {"name": "pacs", "clip_grad": 1.0}}
FOUR_UPDATES = {"batch": {"updates_per_step": 4}}
TEMPERATURE = {
    "rollout": {"engine": "embedded", "sampling": {"max_response_tokens": 100, "temperature": 0.7}}
}
SAMPLER_ROUTES: dict[str, Any] = {
    "policy": {"routing": "replay_sampler"},
    "rollout": {
        "engine": "sglang",
        "urls": ["http://127.0.0.1:1"],
        "dtype": "fp32",
        "sync": {"transport": "disk"},
        "sampling": {"max_response_tokens": 100},
    },
}
"""Recorded samples need no server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedError:
    """`target` is replaced by `change(original, *arguments)`."""

    target: str
    """module.attribute, or module.class.attribute"""
    change: Callable[..., Any]
    changes: dict[str, Any] = field(default_factory=dict)
    """of the configuration BASE of certify_runs.py"""
    family: str = "qwen3"

    def inject(self, patch: pytest.MonkeyPatch) -> None:
        owner, name = _owner(self.target)
        attribute = owner.__dict__[name]
        original = _function_of(attribute)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return self.change(original, *args, **kwargs)

        is_wrapped = isinstance(attribute, classmethod | staticmethod | property)
        patch.setattr(owner, name, type(attribute)(replaced) if is_wrapped else replaced)


def _owner(target: str) -> tuple[Any, str]:
    """The module or class of an attribute, and its name."""
    *path, name = target.split(".")
    for end in range(len(path), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(path[:end]))
        except ModuleNotFoundError:
            continue
        for part in path[end:]:
            owner = getattr(owner, part)
        return owner, name
    raise AssertionError(target)


def _function_of(attribute: Any) -> Any:
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, classmethod | staticmethod):
        return attribute.__func__
    return attribute


def with_option(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A change that calls the original with another value of one keyword argument."""

    def changed(original: Any, *args: Any, **options: Any) -> Any:
        return original(*args, **options | {name: change(options[name])})

    return changed


def with_attributes(**values: Any) -> Callable[..., Any]:
    """A change that sets attributes of the original's result."""

    def changed(original: Any, *args: Any) -> Any:
        result = original(*args)
        for name, value in values.items():
            assert getattr(result, name) != value
            setattr(result, name, value)
        return result

    return changed


def after_resume(action: Callable[[Any], object]) -> InjectedError:
    """`action(run)` follows each resume."""
    return after_resume_of({}, action)


def after_resume_of(changes: dict[str, Any], action: Callable[[Any], object]) -> InjectedError:
    """Same as `after_resume`, with changes of the configuration."""

    def changed(original: Any, run: Any) -> Any:
        progress = original(run)
        if progress is not None:
            action(run)
        return progress

    return InjectedError(target=f"{TRAINING}.saving.resume", change=changed, changes=changes)


def does_nothing(_original: Any, *_args: Any, **_options: Any) -> None:
    """A change that never calls the original."""

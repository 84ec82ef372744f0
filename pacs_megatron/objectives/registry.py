"""All objectives of this folder: the schema of their options, and the objective of given options."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from pacs_megatron import objectives
from pacs_megatron.contracts.protocols import LogprobSource
from pacs_megatron.errors import ConfigError
from pacs_megatron.objectives.shared.base import REGISTRY, CommonOptions, Objective

__all__ = ["REGISTRY", "ObjectiveOptions", "build_objective"]

for _module in pkgutil.iter_modules(objectives.__path__, "pacs_megatron.objectives."):
    importlib.import_module(_module.name)

if TYPE_CHECKING:
    ObjectiveOptions = CommonOptions
else:
    _members = tuple(objective.options_class for objective in REGISTRY.values())
    ObjectiveOptions = Annotated[Union[_members], Field(discriminator="name")]
    """Options of any objective: a tagged union on `name`."""


def passes_of(objective: Objective, updates: Iterable[int]) -> set[LogprobSource]:
    """The log-prob passes that a mini-batch needs before its first update; `updates`: the indices
    of its updates.
    """
    return set().union(*(objective.logprob_passes(update) for update in updates))


def build_objective(options: CommonOptions, *, updates_per_step: int) -> Objective:
    """The objective of `options` with `updates_per_step` optimizer updates a step.

    Raises ConfigError if the options do not support `updates_per_step` (the config checks the
    same).
    """
    try:
        options.refuse_updates_per_step(updates_per_step)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return REGISTRY[options.name](options)

"""All objectives of this folder: the schema of their options, and the objective of some options."""

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

# The import of an objective's file registers its class.
for _module in pkgutil.iter_modules(objectives.__path__, "pacs_megatron.objectives."):
    importlib.import_module(_module.name)

if TYPE_CHECKING:
    ObjectiveOptions = CommonOptions
else:
    _members = tuple(objective.options_class for objective in REGISTRY.values())
    ObjectiveOptions = Annotated[Union[_members], Field(discriminator="name")]  # noqa: UP007
    """Options of any objective: a tagged union on `name`."""


def passes_of(objective: Objective, updates: Iterable[int]) -> set[LogprobSource]:
    """The log-prob passes that a mini-batch needs before its first update.

    Args:
        updates: numbers of the mini-batch's updates in the step, 0-based: one for each epoch.
    """
    passes: set[LogprobSource] = set()
    for update in updates:
        passes |= objective.logprob_passes(update)
    return passes


def build_objective(options: CommonOptions, *, updates_per_step: int) -> Objective:
    """The objective of `options`.

    Args:
        updates_per_step: optimizer updates a step.

    Raises:
        ConfigError: the options do not support `updates_per_step` (the config checks the same).
    """
    try:
        options.check_updates_per_step(updates_per_step)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return REGISTRY[options.name](options)

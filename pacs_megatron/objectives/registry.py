"""Builds an objective from the options of the config."""

from pacs_megatron.config.objective_options import GrpoOptions, PacsOptions, SftOptions
from pacs_megatron.contracts import Objective
from pacs_megatron.errors import ConfigError
from pacs_megatron.objectives.grpo import Grpo
from pacs_megatron.objectives.pacs import Pacs
from pacs_megatron.objectives.sft import Sft


def build_objective(options: PacsOptions | GrpoOptions | SftOptions, *, updates_per_step: int) -> Objective:
    """The objective of `options` with `updates_per_step` optimizer updates a step.

    Raises ConfigError if the options do not support `updates_per_step` (the config checks the same).
    """
    match options:
        case PacsOptions():
            try:
                options.refuse_updates_per_step(updates_per_step)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            return Pacs(options)
        case GrpoOptions():
            return Grpo(options)
        case SftOptions():
            return Sft(options)

"""Text of `config show`, `config explain` and `config schema`."""

import json
from collections.abc import Sequence
from pathlib import Path

from pacs_megatron.config.checks import layout_problems, max_sequence_tokens
from pacs_megatron.config.layout import layout_of, ranks_to_start
from pacs_megatron.config.load import leaves, load_config
from pacs_megatron.config.schema import BatchOptions, RunConfig

_MAX_COLUMN = 72
"""Column of the origins, unless all lines are shorter"""


def show(config_path: Path, overrides: Sequence[str] = ()) -> str:
    """The resolved configuration, one line `key = value  # origin` per value."""
    loaded = load_config(config_path, overrides)
    texts = {
        key: f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in leaves(loaded.config)
    }
    width = min(max(map(len, texts.values())), _MAX_COLUMN)
    origins = loaded.origins
    return "\n".join(f"{text:<{width}}  # {origins[key]}" for key, text in texts.items())


def explain(config_path: Path, overrides: Sequence[str] = (), ranks: int | None = None) -> str:
    """The derived values as a table, for `ranks` (default: the number that `train` starts).

    Raises:
        ConfigError: The configuration is invalid, or its layout does not fit the ranks.
    """
    loaded = load_config(config_path, overrides)
    config = loaded.config
    world_size = ranks or ranks_to_start(config)
    problems = layout_problems(config, world_size)
    if problems:
        raise loaded.fail(problems[0])

    rows = _derived_values(config, world_size)
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    return "\n".join(
        f"{name:<{name_width}}  {value:>{value_width}}  = {formula}"
        for name, value, formula in rows
    )


def _derived_values(config: RunConfig, world_size: int) -> list[tuple[str, str, str]]:
    """Rows of (name, value, formula)."""
    batch = config.batch
    run = config.run
    samples = batch.prompts_per_step * batch.samples_per_prompt
    updates = run.steps * batch.num_updates
    longest = max_sequence_tokens(config)
    num_longest = batch.tokens_per_microbatch // longest
    return [
        ("ranks", str(world_size), "run.nproc, or tp * pp * cp, or what torchrun / srun starts"),
        ("data-parallel replicas", str(layout_of(config, world_size).dp), "ranks / (tp * pp * cp)"),
        ("samples a step", f"{samples:,}", "batch.prompts_per_step * batch.samples_per_prompt"),
        (
            "samples an update",
            _samples_per_update(batch),
            "whole groups of a step, shared over batch.updates_per_step",
        ),
        ("updates in the run", f"{updates:,}", "run.steps * batch.updates_per_step * batch.epochs"),
        ("samples in the run", f"{samples * run.steps:,}", "samples a step * run.steps"),
        ("longest sample", f"{longest:,} tokens", "prompt limit + response limit"),
        (
            "longest samples in a micro-batch",
            str(num_longest),
            "batch.tokens_per_microbatch / longest sample",
        ),
    ]


def _samples_per_update(batch: BatchOptions) -> str:
    """`64`, or `64 or 72` if the groups of a step do not divide over its updates."""
    groups, remainder = divmod(batch.prompts_per_step, batch.updates_per_step)
    shares = [groups, groups + 1] if remainder else [groups]
    return " or ".join(str(share * batch.samples_per_prompt) for share in shares)


def schema_json() -> str:
    """JSON schema of a run file, for editors. It allows `include:` at the top level."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["include"] = {
        "description": "Files to merge below this one. Paths are relative to this file; later "
        "files win.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return json.dumps(schema, indent=2)

"""Text of `config show`, `config explain` and `config schema`."""

import json
from collections.abc import Sequence
from pathlib import Path

from pacs_megatron.config.checks import layout_problems, max_sequence_tokens
from pacs_megatron.config.layout import layout_of, ranks_to_start
from pacs_megatron.config.load import leaves, load_config
from pacs_megatron.config.schema import RunConfig


def show(config_path: Path, overrides: Sequence[str] = ()) -> str:
    """The resolved configuration, one line `key = value  # origin` per value."""
    loaded = load_config(config_path, overrides)
    rows = [
        (f"{key} = {json.dumps(value, ensure_ascii=False)}", key)
        for key, value in leaves(loaded.config)
    ]
    width = min(max(len(text) for text, _ in rows), 72)
    origins = loaded.origins
    return "\n".join(f"{text:<{width}}  # {origins[key]}" for text, key in rows)


def explain(config_path: Path, overrides: Sequence[str] = (), ranks: int | None = None) -> str:
    """The derived values as a table, for `ranks` (default: the number that `train` starts)."""
    loaded = load_config(config_path, overrides)
    world_size = ranks or ranks_to_start(loaded.config)
    problems = layout_problems(loaded.config, world_size)
    if problems:
        raise loaded.fail(problems[0])
    config = loaded.config
    batch = loaded.config.batch
    run = loaded.config.run
    samples = batch.prompts_per_step * batch.samples_per_prompt
    updates = run.steps * batch.num_updates
    low, rest = divmod(batch.prompts_per_step, batch.updates_per_step)
    shares = [low, low + 1] if rest else [low]
    per_update = " or ".join(str(groups * batch.samples_per_prompt) for groups in shares)
    longest = max_sequence_tokens(config)
    num_longest = batch.tokens_per_microbatch // longest
    values = [
        ("ranks", str(world_size), "run.nproc, or tp * pp * cp, or what torchrun / srun starts"),
        ("data-parallel replicas", str(layout_of(config, world_size).dp), "ranks / (tp * pp * cp)"),
        ("samples a step", f"{samples:,}", "batch.prompts_per_step * batch.samples_per_prompt"),
        (
            "samples an update",
            per_update,
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
    name_width, value_width = (max(len(row[column]) for row in values) for column in (0, 1))
    return "\n".join(
        f"{name:<{name_width}}  {value:>{value_width}}  = {formula}"
        for name, value, formula in values
    )


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

"""Traversal of the schema: all keys, and the keys that are allowed in a section."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import get_args

from pydantic.fields import FieldInfo

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.config.yaml_tree import Node
from pacs_megatron.contracts.options import Options

TAGS: Mapping[str, str] = {"objective": "name", "rollout": "engine", "reward": "name"}
"""Section whose options belong to a strategy -> the key that selects the strategy."""


def all_keys(schema: type[Options] = RunConfig, prefix: str = "") -> Iterator[tuple[str, type[Options], FieldInfo]]:
    """All keys as (dotted key, class, field), for each strategy of a section; a list's index is left out."""
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}", schema, field
        for inner in options_classes(field.annotation):
            yield from all_keys(inner, f"{prefix}{name}.")


def options_classes(annotation: object) -> list[type[Options]]:
    """The sections that a value of this type may be: none for a plain value, several for strategies."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation]
    return [found for part in get_args(annotation) for found in options_classes(part)]


@cache
def strategies(section: str) -> dict[str, type[Options]]:
    """Value of the tag -> class of the options; empty for a section without strategies."""
    if section not in TAGS:
        return {}
    members = options_classes(RunConfig.model_fields[section].annotation)
    return {get_args(member.model_fields[TAGS[section]].annotation)[0]: member for member in members}


def fields_at(path: Sequence[str | int], root: Node, schema: type[Options] = RunConfig) -> dict[str, FieldInfo]:
    """Fields allowed below `path`, of the strategy that the tree `root` selects; empty for a plain value."""
    section = dotted(part for part in path if isinstance(part, str))
    tag = root.at([*path, TAGS[section]]) if section in TAGS else None
    chosen = strategies(section).get(str(tag.value)) if tag is not None else None
    found = [(*key.rpartition("."), owner, field) for key, owner, field in all_keys(schema)]
    return {
        name: field
        for parent, _, name, owner, field in found
        if parent == section and (section not in TAGS or owner is chosen)
    }


def dotted(path: Iterator[str | int] | Sequence[str | int]) -> str:
    """`evaluation.benchmarks.0.path`."""
    return ".".join(map(str, path))

"""Loads YAML files and `key=value` overrides into a validated `RunConfig` that records the origin
of each value.

Precedence, lowest first: included files in order, the file itself, overrides. A later layer merges
mappings key by key and replaces lists and scalars. If it selects another strategy, it replaces all
options of that section. Paths in `include:` are relative to the including file, all other paths to
the working directory.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from pacs_megatron.config.checks import find_problems
from pacs_megatron.config.messages import TAGS, explain_validation, named_key, where
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.config.text import local_path
from pacs_megatron.config.yaml_tree import (
    MAX_YAML_BYTES,
    MAX_YAML_DEPTH,
    YamlNode,
    parse_yaml,
    read_yaml,
)
from pacs_megatron.errors import ConfigError, shown

MAX_FILES = 100
"""Number of files of one configuration, counted with repetition.

Together they have at most MAX_YAML_BYTES.
"""
_INDEX = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated configuration and the origin of each value."""

    config: RunConfig
    path: Path
    tree: YamlNode
    """The merged YAML, before defaults."""

    @property
    def origins(self) -> dict[str, str]:
        """Dotted key of every value -> `file:line`, `override` or `default`."""
        origins = {}
        for key, _ in leaves(self.config):
            node = self.tree.find(_split(key))
            origins[key] = "default" if node is None else node.origin
        return origins

    def where(self, key: str) -> str:
        """`file:line` of `key`, or of the nearest enclosing section in the files."""
        return where(_split(key), self.tree)

    def to_yaml(self) -> str:
        """The resolved configuration with all defaults, as YAML.

        Loading it gives an equal configuration.
        """
        values = self.config.model_dump(mode="json")
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)

    def fail(self, problem: str) -> ConfigError:
        """The error for `problem`, with the origin of the key that it names first."""
        return ConfigError(f"{problem} ({self.where(named_key(problem))})")


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Reads, merges and validates a run's configuration.

    Args:
        path: The YAML file.
        overrides: `key=value` with a dotted key and a value in YAML.

    Raises:
        ConfigError: With the origin of the value that is wrong.
    """
    tree = _read(Path(path), (), [])
    if overrides:
        tree = merge(tree, _merge_all([_parse_override(text) for text in overrides]))

    try:
        config = RunConfig.model_validate(tree.plain())
    except ValidationError as error:
        raise ConfigError(explain_validation(error.errors(), tree)) from None

    loaded = LoadedConfig(config, Path(path), tree)
    problems = find_problems(config)
    if problems:
        raise loaded.fail(problems[0])
    return loaded


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of each plain value.

    Lists and mappings of sections are traversed, others are leaves.
    """
    for name in type(section).model_fields:
        yield from _leaves_of(getattr(section, name), f"{prefix}{name}")


def _leaves_of(value: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, BaseModel):
        yield from leaves(value, f"{key}.")
    elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
        for index, item in enumerate(value):
            yield from _leaves_of(item, f"{key}.{index}")
    elif isinstance(value, dict) and any(isinstance(item, BaseModel) for item in value.values()):
        for name, item in value.items():
            yield from _leaves_of(item, f"{key}.{name}")
    else:
        yield key, value


def merge(base: YamlNode, over: YamlNode, section: str = "") -> YamlNode:
    """`base` merged with `over`, which wins.

    Args:
        base: The lower layer.
        over: The higher layer.
        section: Dotted key of both; its tag selects a strategy.
    """
    if not isinstance(over.value, dict):
        return over
    if isinstance(base.value, list):
        items = _merge_items(base.value, over.value)
        return over if items is None else YamlNode(items, base.origin)
    if not isinstance(base.value, dict):
        return over

    if section in TAGS:
        before = base.find([TAGS[section]])
        after = over.find([TAGS[section]])
        if _is_other_tag(before, after):
            return over  # the options of `base` belong to another strategy

    merged = dict(base.value)
    for key, node in over.value.items():
        if key in merged:
            node = merge(merged[key], node, f"{section}.{key}".strip("."))
        merged[key] = node
    return YamlNode(merged, base.origin)


def _is_other_tag(before: YamlNode | None, after: YamlNode | None) -> bool:
    if before is None or after is None or isinstance(after.value, dict):
        return False  # a tool of the name `kind` is no tag
    return bool(before.value != after.value)


def _merge_items(items: list[YamlNode], over: Mapping[str, YamlNode]) -> list[YamlNode] | None:
    """`items` merged with a mapping from indices, as in `evaluation.benchmarks.0.path=...`.

    None if the mapping is empty or has a key that is not the index of an item.
    """
    if not over:
        return None
    merged = list(items)
    for key, node in over.items():
        if not _INDEX.fullmatch(key) or int(key) >= len(items):
            return None
        merged[int(key)] = merge(items[int(key)], node, "0")
    return merged


def _merge_all(layers: Sequence[YamlNode]) -> YamlNode:
    """Overrides merged with each other, so that a strategy and its options may have any order."""
    merged = layers[0]
    for layer in layers[1:]:
        merged = merge(merged, layer)
    return merged


def _read(path: Path, chain: tuple[Path, ...], sizes: list[int]) -> YamlNode:
    """A file merged with its includes.

    Args:
        path: The file.
        chain: The files that include it, outermost first.
        sizes: Sizes of all files so far in bytes, because nested includes can multiply.
    """
    display = _display(path)
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of symbolic links, a NUL
        raise ConfigError(
            f"cannot read the configuration {display}: {error}; give a file"
        ) from None
    if resolved in chain:
        cycle = [*chain[chain.index(resolved) :], resolved]
        text = " -> ".join(map(_display, cycle))
        raise ConfigError(f"include cycle: {text}; remove one of these includes")

    file = read_yaml(path, display)
    sizes.append(os.path.getsize(path))
    _check_sizes(sizes, display)

    assert isinstance(file.value, dict)  # checked by read_yaml
    entries = dict(file.value)
    include = entries.pop("include", None)
    tree = YamlNode({}, file.origin)
    for target in _included(include, path.parent):
        tree = merge(tree, _read(target, (*chain, resolved), sizes))
    tree = merge(tree, YamlNode(entries, file.origin))
    return YamlNode(tree.value, file.origin)


def _check_sizes(sizes: Sequence[int], display: str) -> None:
    if len(sizes) > MAX_FILES:
        limit = f"{MAX_FILES} files"
    elif sum(sizes) > MAX_YAML_BYTES:
        limit = f"{MAX_YAML_BYTES} bytes"
    else:
        return
    raise ConfigError(
        f"more than {limit} by `include:`, the last is {display}; include fewer files"
    )


def _included(include: YamlNode | None, folder: Path) -> Iterator[Path]:
    """The files of an `include:` value in `folder`."""
    if include is None:
        return
    nodes = include.value if isinstance(include.value, list) else [include]
    for node in nodes:
        if not isinstance(node.value, str):
            text = "expected a file name or a list of file names; fix it"
            raise ConfigError(f"include={node.plain()!r}: {text} ({node.origin})")
        file = folder / local_path(node.value)
        if not os.path.isfile(file):
            raise ConfigError(
                f"include={node.value!r}: no such file {_display(file)}; paths are relative to the "
                f"including file ({node.origin})"
            )
        yield file


def _parse_override(text: str) -> YamlNode:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    is_key = all(part and part.strip() == part for part in parts)
    if not equals or not is_key or len(parts) > MAX_YAML_DEPTH:
        raise ConfigError(
            f"override {shown(text)}: expected key=value with a dotted key, such as "
            "optimizer.lr=1e-6"
        )

    node = YamlNode("", "override")  # `key=` is an empty string; YAML would give null
    if value:
        try:
            node = parse_yaml(value, f"override {shown(key)}", fixed_origin="override")
        except ConfigError as error:
            # Errors of a value name the file and line, which an override does not have.
            named = "" if key in str(error) else f"{key}: "
            raise ConfigError(f"{named}{error}") from None
    for part in reversed(parts):
        node = YamlNode({part: node}, "override")
    return node


def _split(key: str) -> list[str | int]:
    if not key:
        return []
    return [int(part) if _INDEX.fullmatch(part) else part for part in key.split(".")]


def _display(path: Path) -> str:
    """`path` relative to the working directory if it is inside, else unchanged."""
    if len(str(path)) > 500:
        return f"{str(path)[:500]}..."
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

"""Loads YAML files and `key=value` overrides into a validated `RunConfig` that records the origin
of each value.

Precedence, lowest first: included files in order, the file itself, overrides. A later layer merges
mappings key by key and replaces lists and scalars. If it selects another strategy, it replaces all
options of that section. Paths in `include:` are relative to the including file, all other paths to
the working directory.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from pacs_megatron.config.checks import find_problems
from pacs_megatron.config.messages import TAGS, explain_validation, named_key, where
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.config.yaml_tree import MAX_BYTES, MAX_DEPTH, Node, parse_yaml, read_yaml
from pacs_megatron.errors import ConfigError, shown

MAX_FILES = 100
"""Number of files of one configuration, counted with repetition.

Together they have at most MAX_BYTES.
"""
_INDEX = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated configuration and the origin of each value."""

    config: RunConfig
    path: Path
    tree: Node
    """The merged YAML, before defaults."""

    @property
    def origins(self) -> dict[str, str]:
        """Dotted key of every value -> `file:line`, `override` or `default`."""
        nodes = {key: self.tree.at(_split(key)) for key, _ in leaves(self.config)}
        return {key: "default" if node is None else node.origin for key, node in nodes.items()}

    def where(self, key: str) -> str:
        """`file:line` of `key`, or of the nearest enclosing section in the files."""
        return where(_split(key), self.tree)

    def to_yaml(self) -> str:
        """The resolved configuration with all defaults, as YAML.

        Loading it gives an equal configuration.
        """
        return yaml.safe_dump(
            self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=1000
        )

    def fail(self, problem: str) -> ConfigError:
        """The error for `problem`, with the origin of the key that it names first."""
        return ConfigError(f"{problem} ({self.where(named_key(problem))})")


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Reads, merges and validates a run's configuration. Raises ConfigError."""
    tree = _read(Path(path), (), [])
    if overrides:
        first, *rest = map(_parse_override, overrides)
        for (
            node
        ) in rest:  # merges overrides first, so a strategy and its options may have any order
            first = merge(first, node)
        tree = merge(tree, first)
    try:
        config = RunConfig.model_validate(tree.plain())
    except ValidationError as error:
        raise ConfigError(explain_validation(error.errors(), tree)) from None
    loaded = LoadedConfig(config, Path(path), tree)
    if problems := find_problems(config):
        raise loaded.fail(problems[0])
    return loaded


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of each plain value.

    Lists of sections are traversed, other lists are leaves.
    """
    for name in type(section).model_fields:
        yield from _leaves_of(getattr(section, name), f"{prefix}{name}")


def _leaves_of(value: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, BaseModel):
        yield from leaves(value, f"{key}.")
    elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
        for index, item in enumerate(value):
            yield from _leaves_of(item, f"{key}.{index}")
    else:
        yield key, value


def merge(base: Node, over: Node, section: str = "") -> Node:
    """`base` merged with `over`, which wins.

    `section` is the dotted key of both; its tag selects a strategy.
    """
    if not isinstance(over.value, dict) or not isinstance(base.value, dict | list):
        return over
    if isinstance(base.value, list):
        if not over.value or not all(
            _INDEX.fullmatch(key) and int(key) < len(base.value) for key in over.value
        ):
            return over
        changed = {int(key): node for key, node in over.value.items()}
        return Node(
            [merge(n, changed[k], "0") if k in changed else n for k, n in enumerate(base.value)],
            base.origin,
        )
    if section in TAGS:
        before, after = (node.at([TAGS[section]]) for node in (base, over))
        if before is not None and after is not None and before.value != after.value:
            return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = (
            merge(merged[key], node, f"{section}.{key}".strip(".")) if key in merged else node
        )
    return Node(merged, base.origin)


def _read(path: Path, chain: tuple[Path, ...], sizes: list[int]) -> Node:
    """A file merged with its includes.

    `sizes`: sizes of all files so far, because nested includes can multiply.
    """
    display = _display(path)
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of symbolic links, a NUL
        raise ConfigError(
            f"cannot read the configuration {display}: {error}; give a file"
        ) from None
    if resolved in chain:
        cycle = " -> ".join(_display(step) for step in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(f"include cycle: {cycle}; remove one of these includes")
    own = read_yaml(path, display)
    sizes.append(os.path.getsize(path))
    if len(sizes) > MAX_FILES or sum(sizes) > MAX_BYTES:
        limit = f"{MAX_FILES} files" if len(sizes) > MAX_FILES else f"{MAX_BYTES} bytes"
        raise ConfigError(
            f"more than {limit} by `include:`, the last is {display}; include fewer files"
        )
    assert isinstance(own.value, dict)
    entries = dict(own.value)
    include = entries.pop("include", None)
    tree = Node({}, own.origin)
    for target in _included(include, path.parent):
        tree = merge(tree, _read(target, (*chain, resolved), sizes))
    return Node(merge(tree, Node(entries, own.origin)).value, own.origin)


def _included(include: Node | None, folder: Path) -> Iterator[Path]:
    """The files of an `include:` value in `folder`."""
    nodes = (
        [] if include is None else include.value if isinstance(include.value, list) else [include]
    )
    for node in nodes:
        if not isinstance(node.value, str):
            text = "expected a file name or a list of file names; fix it"
            raise ConfigError(f"include={node.plain()!r}: {text} ({node.origin})")
        if not os.path.isfile(folder / node.value):
            raise ConfigError(
                f"include={node.value!r}: no such file {_display(folder / node.value)}; paths are "
                f"relative to the including file ({node.origin})"
            )
        yield folder / node.value


def _parse_override(text: str) -> Node:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if (
        not equals
        or len(parts) > MAX_DEPTH
        or not all(part.strip() == part and part for part in parts)
    ):
        raise ConfigError(
            f"override {shown(text)}: expected key=value with a dotted key, such as "
            "optimizer.lr=1e-6"
        )
    node = (
        parse_yaml(value, f"override {shown(key)}", fixed_origin="override")
        if value
        else Node("", "override")
    )
    for part in reversed(parts):
        node = Node({part: node}, "override")
    return node


def _split(key: str) -> list[str | int]:
    return [int(part) if _INDEX.fullmatch(part) else part for part in key.split(".")] if key else []


def _display(path: Path) -> str:
    """`path` relative to the working directory if it is inside, else unchanged."""
    if len(str(path)) > 500:
        return f"{str(path)[:500]}..."
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

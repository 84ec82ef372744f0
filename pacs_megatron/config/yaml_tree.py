"""Parses YAML into a tree with the file and line of each value.

Plain scalars follow the core schema of YAML 1.2: `1e-6` is a number, `no` and `12:30` are strings (unlike YAML 1.1,
PyYAML's default). Tags, anchors and merge keys are refused; `include:` composes files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from pacs_megatron.errors import ConfigError

Scalar = str | int | float | bool | None
Plain = Scalar | list["Plain"] | dict[str, "Plain"]

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INT = re.compile(r"[-+]?[0-9]+")
_CONSTANTS: Mapping[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a configuration file (a scalar, a list or a mapping) and its origin."""

    value: Scalar | list[Node] | dict[str, Node]
    origin: str
    """`file:line`, or `override`."""

    def plain(self) -> Plain:
        """The value without origins, for pydantic."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def at(self, path: Sequence[str | int]) -> Node | None:
        """The node at `path`, or None if it is not set."""
        node: Node | None = self
        for key in path:
            if node is None:
                return None
            inner = node.value
            if isinstance(inner, dict):
                node = inner.get(str(key))
            elif isinstance(inner, list) and isinstance(key, int) and key < len(inner):
                node = inner[key]
            else:
                return None
        return node


def parse_yaml(text: str, source: str, *, fixed_origin: str | None = None) -> Node:
    """Parse `text`. Messages and origins are `source:line`, or `fixed_origin` if it is given.

    Raises ConfigError for malformed YAML, a duplicate key, a tag, an anchor, or a key that is not a string.
    """
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(error, source)) from None
    if root is None:
        return Node(None, fixed_origin or f"{source}:1")
    return _convert(root, source, fixed_origin, set())


def read_yaml(path: Path, display: str) -> Node:
    """Read and parse one file, named `display` in messages. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {display}: {error.strerror}; give an existing file") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"cannot read the configuration {display}: it is not UTF-8 text; re-save it as such"
        ) from None
    node = parse_yaml(text, display)
    if not isinstance(node.value, dict):
        kind = "nothing" if node.value is None else f"a {type(node.value).__name__}"
        raise ConfigError(
            f"{display}: expected a mapping (`key: value` lines) at the top, got {kind}; see configs/runs/"
        )
    return node


def _convert(node: yaml.Node, source: str, fixed_origin: str | None, seen: set[int]) -> Node:
    origin = fixed_origin or f"{source}:{node.start_mark.line + 1}"
    if id(node) in seen:
        raise ConfigError(
            f"YAML anchors and aliases are not supported; repeat the value or `include:` a file ({origin})"
        )
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        return Node(_scalar(node, origin), origin)
    if isinstance(node, yaml.SequenceNode):
        _refuse_tag(node, "tag:yaml.org,2002:seq", origin)
        return Node([_convert(item, source, fixed_origin, seen) for item in node.value], origin)
    _refuse_tag(node, "tag:yaml.org,2002:map", origin)
    entries: dict[str, Node] = {}
    for key_node, value_node in node.value:
        where = fixed_origin or f"{source}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(
                f"expected a plain word as key, got a {key_node.id}; quote text that starts with [ or {{ ({where})"
            )
        key = key_node.value
        if key in entries:
            raise ConfigError(
                f"key `{key}` is written twice in one mapping, first at {entries[key].origin}; keep one ({where})"
            )
        child = _convert(value_node, source, fixed_origin, seen)
        entries[key] = Node(child.value, where)
    return Node(entries, origin)


def _scalar(node: yaml.ScalarNode, origin: str) -> Scalar:
    text: str = node.value
    _refuse_tag(node, "tag:yaml.org,2002:str", origin)
    if node.style is not None:  # quoted and block text is always a string
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _refuse_tag(node: yaml.Node, plain_tag: str, origin: str) -> None:
    if node.tag != plain_tag:
        raise ConfigError(f"YAML tag {node.tag!r} is not supported; write a plain value ({origin})")


def _syntax_message(error: yaml.YAMLError, source: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        problem = " ".join(filter(None, (error.context, error.problem)))
        return f"not valid YAML: {problem}; fix the line ({source}:{error.problem_mark.line + 1})"
    return f"not valid YAML: {' '.join(str(error).split())} ({source})"

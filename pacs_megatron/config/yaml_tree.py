"""The only YAML reader.

Returns a tree with the file and line of each value; limits size, depth and numbers.

Plain scalars follow the core schema of YAML 1.2: `1e-6` is a number, `no` and `12:30` are strings
(unlike YAML 1.1, PyYAML's default). Tags, anchors and merge keys are rejected. Every fault is a
ConfigError.
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

MAX_BYTES = 256 * 1024
"""Maximum size of a file or an override."""
MAX_DEPTH = 32
MAX_DIGITS = 24
"""Maximum number of digits of an integer; products of several such integers still fit into a float.
"""

_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
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
        if not path:
            return self
        key = path[0]
        inner = self.value
        if isinstance(inner, dict) and str(key) in inner:
            return inner[str(key)].at(path[1:])
        if isinstance(inner, list) and isinstance(key, int) and key < len(inner):
            return inner[key].at(path[1:])
        return None


def parse_yaml(text: str, source: str, *, fixed_origin: str | None = None) -> Node:
    """Parses `text`.

    Messages and origins are `source:line`, or `fixed_origin` if it is given. Raises ConfigError.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(
            f"{source}: {len(text)} characters of YAML, but at most {MAX_BYTES} are read; shorten "
            "it"
        )
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except RecursionError:
        raise _too_deep(fixed_origin or source) from None
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
    ) as error:  # ValueError: an escape of a character that does not exist
        raise _syntax_error(error, source) from None
    if root is None:
        return Node(None, fixed_origin or f"{source}:1")
    return _Converter(source, fixed_origin).convert(root, 0)


def read_yaml(path: Path, display: str) -> Node:
    """Reads and parses one file, named `display` in messages. Raises ConfigError."""
    node = parse_yaml(_read_text(path, display), display)
    if not isinstance(node.value, dict):
        kind = "nothing" if node.value is None else f"a {type(node.value).__name__}"
        text = "expected a mapping (`key: value` lines) at the top"
        raise ConfigError(f"{display}: {text}, got {kind}; see configs/runs/")
    return node


def _read_text(path: Path, display: str) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"cannot read the configuration {display}: it is not a regular file; give a file"
            )
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {display}: {error.strerror}; give an existing file"
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{display}: more than {MAX_BYTES} bytes; a configuration is smaller, give another file"
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(
            f"cannot read the configuration {display}: not UTF-8 text; re-save it as such"
        ) from None


class _Converter:
    """Turns PyYAML's nodes into ours."""

    def __init__(self, source: str, fixed_origin: str | None) -> None:
        self._source = source
        self._fixed_origin = fixed_origin
        self._seen: set[int] = set()

    def _origin(self, node: yaml.Node) -> str:
        return self._fixed_origin or f"{self._source}:{node.start_mark.line + 1}"

    def convert(self, node: yaml.Node, depth: int) -> Node:
        origin = self._origin(node)
        if id(node) in self._seen:
            raise ConfigError(
                "YAML anchors and aliases are not supported; repeat the value or `include:` a "
                f"file ({origin})"
            )
        self._seen.add(id(node))
        if depth > MAX_DEPTH:
            raise _too_deep(origin)
        if isinstance(node, yaml.ScalarNode):
            return Node(_scalar(node, origin), origin)
        if isinstance(node, yaml.SequenceNode):
            _refuse_tag(node, "tag:yaml.org,2002:seq", origin)
            return Node([self.convert(item, depth + 1) for item in node.value], origin)
        _refuse_tag(node, "tag:yaml.org,2002:map", origin)
        return Node(self._mapping(node, depth), origin)

    def _mapping(self, node: yaml.Node, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = self._origin(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    f"expected a plain word as key, got a {key_node.id}; quote text that starts "
                    f"with [ or {{ ({where})"
                )
            key = _readable(key_node.value, where)
            if key in entries:
                raise ConfigError(
                    f"key `{key}` is written twice in one mapping, first at "
                    f"{entries[key].origin}; keep one ({where})"
                )
            entries[key] = Node(self.convert(value_node, depth + 1).value, where)
        return entries


def _too_deep(origin: str) -> ConfigError:
    return ConfigError(
        f"values are nested more than {MAX_DEPTH} levels deep; flatten them ({origin})"
    )


def _readable(text: str, origin: str) -> str:
    """`text`.

    Raises ConfigError for NUL and lone surrogates, which no file name or UTF-8 text can contain.
    """
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(
            f"text contains NUL or a lone surrogate: {text[:40]!r}; remove it ({origin})"
        )
    return text


def _scalar(node: yaml.ScalarNode, origin: str) -> Scalar:
    text = _readable(node.value, origin)
    _refuse_tag(node, "tag:yaml.org,2002:str", origin)
    if node.style is not None:  # quoted and block text is always a string
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ConfigError(
                f"a number of {len(text)} digits, expected at most {MAX_DIGITS}; correct it "
                f"({origin})"
            )
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _refuse_tag(node: yaml.Node, plain_tag: str, origin: str) -> None:
    if node.tag != plain_tag:
        raise ConfigError(f"YAML tag {node.tag!r} is not supported; write a plain value ({origin})")


def _syntax_error(error: Exception, source: str) -> ConfigError:
    problem = " ".join(str(error).split())
    place = source
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        problem = " ".join(filter(None, (error.context, error.problem)))
        place = f"{source}:{error.problem_mark.line + 1}"
    return ConfigError(f"not valid YAML: {problem}; fix the line ({place})")

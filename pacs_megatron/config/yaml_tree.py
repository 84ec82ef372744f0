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

from pacs_megatron.config.text import near_file
from pacs_megatron.errors import ConfigError

Scalar = str | int | float | bool | None
Plain = Scalar | list["Plain"] | dict[str, "Plain"]

_OTHER_KINDS = (".csv", ".jsonl", ".parquet", ".py", ".safetensors")
MAX_YAML_BYTES = 256 * 1024
"""Maximum size of a file or an override."""
MAX_YAML_DEPTH = 32
MAX_YAML_DIGITS = 24
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
class YamlNode:
    """One value of a configuration file (a scalar, a list or a mapping) and its origin."""

    value: Scalar | list[YamlNode] | dict[str, YamlNode]
    origin: str
    """`file:line`, or `override`."""

    def plain(self) -> Plain:
        """The value without origins, for pydantic."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def find(self, path: Sequence[str | int]) -> YamlNode | None:
        """The node at `path`, or None if it is not set."""
        if not path:
            return self
        key = path[0]
        inner = self.value
        if isinstance(inner, dict) and str(key) in inner:
            return inner[str(key)].find(path[1:])
        if isinstance(inner, list) and isinstance(key, int) and key < len(inner):
            return inner[key].find(path[1:])
        return None


def parse_yaml(text: str, source: str, *, fixed_origin: str | None = None) -> YamlNode:
    """Parses one YAML document.

    Args:
        text: The document.
        source: Name of the file or the override, for messages and origins (`source:line`).
        fixed_origin: The origin of all values, in place of `source:line`.

    Raises:
        ConfigError: The text is not YAML, or exceeds a limit.
    """
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(
            f"{source}: {len(text)} characters of YAML, but at most {MAX_YAML_BYTES} are read; "
            "shorten it"
        )

    try:
        # BaseLoader resolves no types: every plain scalar is text, which `_scalar` reads.
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except RecursionError:
        raise _too_deep(fixed_origin or source) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # ValueError: an escape of a character that does not exist.
        raise _syntax_error(error, source) from None

    if root is None:
        return YamlNode(None, fixed_origin or f"{source}:1")
    return _Converter(source, fixed_origin).convert(root, 0)


def read_yaml(path: Path, display: str) -> YamlNode:
    """Reads and parses one file, named `display` in messages. Raises ConfigError."""
    node = parse_yaml(_read_text(path, display), display)
    if not isinstance(node.value, dict):
        kind = "nothing" if node.value is None else f"a {type(node.value).__name__}"
        text = "expected a mapping (`key: value` lines) at the top"
        raise ConfigError(f"{display}: {text}, got {kind}; see configs/runs/")
    return node


def _read_text(path: Path, display: str) -> str:
    try:
        if path.is_dir():
            example = f", such as {display}/config.yaml" if (path / "config.yaml").is_file() else ""
            raise ConfigError(
                f"cannot read the configuration {display}: it is a folder; give a file{example}"
            )
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"cannot read the configuration {display}: it is not a regular file; give a file"
            )
        if path.suffix in _OTHER_KINDS:
            raise ConfigError(
                f"{display}: {path.suffix} is no configuration; give a YAML file, see configs/runs/"
            )
        with path.open("rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {display}: {error.strerror}; give an existing file"
            f"{near_file(path)}"
        ) from None

    if len(data) > MAX_YAML_BYTES:
        raise ConfigError(
            f"{display}: more than {MAX_YAML_BYTES} bytes; a configuration is smaller, give "
            "another file"
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
        """ids of PyYAML's nodes; an alias is the node of its anchor a second time"""

    def _origin(self, node: yaml.Node) -> str:
        return self._fixed_origin or f"{self._source}:{node.start_mark.line + 1}"

    def convert(self, node: yaml.Node, depth: int) -> YamlNode:
        origin = self._origin(node)
        if id(node) in self._seen:
            raise ConfigError(
                "YAML anchors and aliases are not supported; repeat the value or `include:` a "
                f"file ({origin})"
            )
        self._seen.add(id(node))
        if depth > MAX_YAML_DEPTH:
            raise _too_deep(origin)

        if isinstance(node, yaml.ScalarNode):
            return YamlNode(_scalar(node, origin), origin)
        if isinstance(node, yaml.SequenceNode):
            _check_tag(node, "tag:yaml.org,2002:seq", origin)
            return YamlNode([self.convert(item, depth + 1) for item in node.value], origin)
        _check_tag(node, "tag:yaml.org,2002:map", origin)
        return YamlNode(self._mapping(node, depth), origin)

    def _mapping(self, node: yaml.Node, depth: int) -> dict[str, YamlNode]:
        entries: dict[str, YamlNode] = {}
        for key_node, value_node in node.value:
            origin = self._origin(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    f"expected a plain word as key, got a {key_node.id}; quote text that starts "
                    f"with [ or {{ ({origin})"
                )
            key = _readable(key_node.value, origin)
            if key in entries:
                raise ConfigError(
                    f"key `{key}` is written twice in one mapping, first at "
                    f"{entries[key].origin}; keep one ({origin})"
                )
            # With the line of the key: a mapping below it starts on the next line.
            entries[key] = YamlNode(self.convert(value_node, depth + 1).value, origin)
        return entries


def _too_deep(origin: str) -> ConfigError:
    return ConfigError(
        f"values are nested more than {MAX_YAML_DEPTH} levels deep; flatten them ({origin})"
    )


def _readable(text: str, origin: str) -> str:
    """Returns `text`.

    Raises ConfigError for NUL and lone surrogates, which no file name or UTF-8 text can contain.
    """
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(
            f"text contains NUL or a lone surrogate: {text[:40]!r}; remove it ({origin})"
        )
    return text


def _scalar(node: yaml.ScalarNode, origin: str) -> Scalar:
    text = _readable(node.value, origin)
    _check_tag(node, "tag:yaml.org,2002:str", origin)
    if node.style is not None:  # quoted and block text is always a string
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        if len(text) > MAX_YAML_DIGITS:
            raise ConfigError(
                f"a number of {len(text)} digits, expected at most {MAX_YAML_DIGITS}; correct it "
                f"({origin})"
            )
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _check_tag(node: yaml.Node, plain_tag: str, origin: str) -> None:
    if node.tag != plain_tag:
        raise ConfigError(f"YAML tag {node.tag!r} is not supported; write a plain value ({origin})")


def _syntax_error(error: Exception, source: str) -> ConfigError:
    problem = " ".join(str(error).split())
    place = source
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        problem = " ".join(filter(None, (error.context, error.problem)))
        place = f"{source}:{error.problem_mark.line + 1}"
    return ConfigError(f"not valid YAML: {problem}; fix the line ({place})")

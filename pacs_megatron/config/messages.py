"""All keys of the schema, and one-line messages for pydantic's errors: key, value, expected, fix,
origin.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.config.yaml_tree import YamlNode
from pacs_megatron.contracts.options import Options
from pacs_megatron.errors import did_you_mean, shown

Detail = Mapping[str, Any]
"""An entry of `pydantic.ValidationError.errors()`"""
KeyPath = Sequence[str | int]
"""Keys and list indices from the top of a configuration to a value"""

TAGS: Mapping[str, str] = {
    "objective": "name",
    "rollout": "engine",
    "reward": "name",
    "reward.components.reward": "name",
    "rollout.agent.tools": "kind",
}
"""Section whose options belong to a strategy -> the key that selects the strategy. The sections of
a mapping of names, such as `tools`, have its key.
"""
RENAMED_KEYS = {
    "rollout.max_lag": "rollout.max_staleness",
    "rollout.sync.way": "rollout.sync.transport",
    "optimizer.clip_grad": "objective.clip_grad",
    "rollout.answer_s": "rollout.probe_timeout_s",
    "rollout.probe_s": "rollout.probe_interval_s",
}
"""Old key -> new key. An old key is rejected with the new name."""

_LISTS = {"data.train": "the other files of a mixture belong to data.mix, each with its weight"}
"""Section -> what to write in place of a list"""


@cache
def all_keys(
    schema: type[Options] = RunConfig, prefix: str = ""
) -> tuple[tuple[str, type[Options], FieldInfo], ...]:
    """All keys as (dotted key, class, field), for each strategy of a section, without list
    indices.
    """
    found = []
    for name, field in schema.model_fields.items():
        found.append((f"{prefix}{name}", schema, field))
        for inner in options_classes(field.annotation):
            found += all_keys(inner, f"{prefix}{name}.")
    return tuple(found)


def options_classes(annotation: object) -> list[type[Options]]:
    """The section classes of a type: none for a plain value, several for strategies."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation]
    classes = []
    for part in get_args(annotation):
        classes += options_classes(part)
    return classes


@cache
def strategies(section: str) -> dict[str, type[Options]]:
    """Value of the tag -> class of the options; empty for a section without strategies."""
    if section not in TAGS:
        return {}
    field = next(field for key, _, field in all_keys() if key == section)
    classes = {}
    for options_class in options_classes(field.annotation):
        tag = options_class.model_fields[TAGS[section]].annotation  # a Literal of one value
        classes[get_args(tag)[0]] = options_class
    return classes


def fields_at(
    path: KeyPath, root: YamlNode, schema: type[Options] = RunConfig
) -> dict[str, FieldInfo]:
    """Fields allowed below a place of the configuration; empty for a plain value.

    Args:
        path: Keys and list indices of the place.
        root: The configuration, which selects the strategy of a section.
        schema: Class of `root`.
    """
    section = _section_of(path, schema)
    tag = _tag_of(path, schema)
    strategy = None
    if tag is not None:
        chosen = root.find([*path, tag])
        strategy = None if chosen is None else strategies(section).get(str(chosen.value))

    fields = {}
    for key, owner, field in all_keys(schema):
        parent, _, name = key.rpartition(".")
        is_of_strategy = tag is None or owner is strategy
        if parent == section and is_of_strategy:
            fields[name] = field
    return fields


@cache
def _mappings(schema: type[Options]) -> frozenset[str]:
    """The keys of all mappings from names to sections."""
    found = set()
    for key, _, field in all_keys(schema):
        if get_origin(field.annotation) is dict and options_classes(field.annotation):
            found.add(key)
    return frozenset(found)


def _section_of(path: KeyPath, schema: type[Options]) -> str:
    """The dotted key of a place without list indices and without names that the user chooses, such
    as the columns of `where`.
    """
    mappings = _mappings(schema)
    parts: list[str] = []
    is_name = False
    for part in path:
        if is_name:
            is_name = False
        elif isinstance(part, str):
            parts.append(part)
            is_name = dotted(parts) in mappings
    return dotted(parts)


def _tag_of(path: KeyPath, schema: type[Options]) -> str | None:
    """The key that selects the strategy of the section at a place; None for any other place."""
    section = _section_of(path, schema)
    # At a mapping of names, the next part is a name.
    is_mapping = _section_of([*path, "name"], schema) == section
    return None if is_mapping else TAGS.get(section)


def dotted(path: Iterable[str | int]) -> str:
    """`evaluation.benchmarks.0.path`."""
    return ".".join(map(str, path))


def explain_validation(
    details: Sequence[Detail], root: YamlNode, schema: type[Options] = RunConfig
) -> str:
    """The first error as one line, with the number of others.

    Unknown keys come first: they cause other errors.

    Args:
        details: Errors of pydantic.
        root: The configuration, for the origins.
        schema: Class that rejected it.
    """
    causes = [detail for detail in details if detail["type"] != "default_factory_not_called"]
    unknown_keys = [detail for detail in causes if detail["type"] == "extra_forbidden"]
    first = (unknown_keys or causes)[0]
    others = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return f"{_explain(first, root, schema)}{others}"


def _explain(detail: Detail, root: YamlNode, schema: type[Options]) -> str:
    """One error as a line: key, value, expected value, fix, origin."""
    path = _path_of(detail, schema)
    section = _section_of(path, schema)
    key = dotted(path)
    name = str(path[-1]) if path else ""
    kind = detail["type"]

    if kind == "extra_forbidden":
        advice = _unknown_key_advice(path, root, schema)
        return f"unknown key `{key}`; {advice} ({where(path, root)})"
    if kind == "missing":
        meaning = _meaning(fields_at(path[:-1], root, schema).get(name))
        return f"`{key}` is missing; add it{meaning} ({where(path, root)})"
    if kind == "union_tag_not_found":
        tags = ", ".join(strategies(section))
        return f"`{key}.{TAGS[section]}` is missing; set it to one of {tags} ({where(path, root)})"
    if kind == "union_tag_invalid":
        tag_path = [*path, TAGS[section]]
        return _choice_line(tag_path, detail["ctx"]["tag"], list(strategies(section)), root)
    if kind == "literal_error":
        expected = detail["ctx"]["expected"].replace(" or ", ", ")
        choices = [choice.strip().strip("'") for choice in expected.split(",")]
        return _choice_line(path, detail["input"], choices, root)
    if kind == "value_error":
        return _validator_line(str(detail["ctx"]["error"]), path, root, schema)
    if kind in ("model_type", "model_attributes_type"):
        return _section_line(path, detail["input"], root, schema)
    expected = _expected(detail["msg"]) + _type_advice(detail)
    return f"{key}={shown(detail['input'])}: expected {expected} ({where(path, root)})"


def _path_of(detail: Detail, schema: type[Options]) -> list[str | int]:
    """The place of an error, without the tags, which pydantic inserts behind a section with
    strategies.
    """
    path: list[str | int] = []
    is_behind_tag = False
    for part in detail["loc"]:
        has_tag = not is_behind_tag and _tag_of(path, schema) is not None
        is_behind_tag = has_tag and part in strategies(_section_of(path, schema))
        if not is_behind_tag:
            path.append(part)
    return path


def _meaning(field: FieldInfo | None) -> str:
    """The first paragraph of a field's description on one line, after a colon."""
    if field is None or not field.description:
        return ""
    paragraph, _, _ = field.description.strip().partition("\n\n")
    return ": " + " ".join(paragraph.split())


def _validator_line(text: str, path: KeyPath, root: YamlNode, schema: type[Options]) -> str:
    """The line of a validator's message: for one value, or for a section if the message names the
    key.
    """
    is_value = bool(path) and not fields_at(path, root, schema)
    if is_value:
        return f"{dotted(path)}: {text} ({where(path, root)})"
    key = named_key(text)
    if key:
        return f"{text} ({where(key.split('.'), root)})"
    prefix = f"{dotted(path)}: " if path else ""
    return f"{prefix}{text} ({where(path, root)})"


def named_key(text: str) -> str:
    """The first key in a message: a dotted one, or one in backticks. Empty if it names none."""
    match = re.search(r"`([a-z][\w.]*)`|\b[a-z]\w*(?:\.\w+)+", text)
    if match is None:
        return ""
    return match[1] or match[0]


def where(path: KeyPath, root: YamlNode) -> str:
    """`file:line` of the value at `path`, or of the nearest enclosing mapping of `root`."""
    for end in range(len(path), 0, -1):
        node = root.find(path[:end])
        if node is not None:
            return node.origin
    return root.origin


def _unknown_key_advice(path: KeyPath, root: YamlNode, schema: type[Options]) -> str:
    """The first of these that applies: the new name, the strategy that has the key, a similar key
    of the section, the same key in another section, all keys of the section.
    """
    new_key = RENAMED_KEYS.get(dotted(path))
    if new_key is not None:
        return f"it is now called `{new_key}`"

    *parent, name = path
    section = _section_of(parent, schema)
    owners = [tag for tag, options in strategies(section).items() if name in options.model_fields]
    chosen = root.find([*parent, TAGS[section]]) if owners else None
    if chosen is not None:
        tag_key = dotted([*parent, TAGS[section]])
        return (
            f"it belongs to {tag_key}={' | '.join(owners)}, and {tag_key}={chosen.value} does not "
            "use it; remove the key"
        )

    known = list(fields_at(parent, root, schema))
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{dotted([*parent, close[0]])}`?"
    elsewhere = {key for key, _, _ in all_keys(schema) if key.rpartition(".")[2] == name}
    if elsewhere:
        return f"did you mean `{'` or `'.join(sorted(elsewhere)[:3])}`?"
    return f"known here: {', '.join(known)}"


def _choice_line(path: KeyPath, value: object, choices: Sequence[str], root: YamlNode) -> str:
    """The line of a value that is not one of `choices`."""
    hint = did_you_mean(str(value), choices, cutoff=0.5)
    return (
        f"{dotted(path)}={shown(value)}: expected one of {', '.join(choices)}{hint} "
        f"({where(path, root)})"
    )


def _section_line(path: KeyPath, value: object, root: YamlNode, schema: type[Options]) -> str:
    """The line of a section that is not a mapping."""
    key = dotted(path)
    tag = _tag_of(path, schema)
    if tag is not None:
        names = list(strategies(_section_of(path, schema)))
        named = value if value in names else names[0]
        example = f"{key}: {{{tag}: {named}}}"
    else:
        fields = list(fields_at(path, root, schema))
        example = f"{path[-1] if path else key}: {{{fields[0]}: ...}}"
        if len(fields) > 1:
            example += f", with any of {', '.join(fields[:6])}"
    if isinstance(value, list) and key in _LISTS:
        example += f"; {_LISTS[key]}"
    return f"{key}={shown(value)}: expected a mapping; write {example} ({where(path, root)})"


def _expected(message: str) -> str:
    """`an integer` of pydantic's `Input should be a valid integer`."""
    text = re.sub("^(Input should (be )?|Tuple should have )", "", message)
    text = text.partition(" after validation")[0]
    text = text.replace("a valid dictionary", "a mapping").replace("a valid tuple", "a list")
    return text.replace("a valid integer", "an integer").replace("a valid ", "a ")


def _type_advice(detail: Detail) -> str:
    """How to write the value in YAML, for the types that users often write as another one."""
    kind = detail["type"]
    if kind == "bool_type" and isinstance(detail["input"], str):
        return ", not text; write true or false"
    if kind in ("int_type", "float_type") and isinstance(detail["input"], str):
        example = "8192" if kind == "int_type" else "0.7 or 1e-6"
        odd = [letter for letter in detail["input"] if not letter.isascii()]
        letters = f" ({odd[0]} is the letter U+{ord(odd[0]):04X})" if odd else ""
        return (
            f", not text{letters}; write a plain value without quotes and units, such as {example}"
        )
    if kind == "string_type":
        return "; put it in quotes"
    if kind == "tuple_type":
        return ": [a, b]"
    return ""

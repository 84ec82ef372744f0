"""All keys of the schema, and one-line messages for pydantic's errors: key, value, expected, fix,
origin.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.config.yaml_tree import Node
from pacs_megatron.contracts.options import Options
from pacs_megatron.errors import shown

Detail = Mapping[str, Any]  # an entry of `pydantic.ValidationError.errors()`

TAGS: Mapping[str, str] = {"objective": "name", "rollout": "engine", "reward": "name"}
"""Section whose options belong to a strategy -> the key that selects the strategy."""
RENAMED_KEYS = {
    "rollout.max_lag": "rollout.max_staleness",
    "rollout.sync.way": "rollout.sync.transport",
    "optimizer.clip_grad": "objective.clip_grad",
    "rollout.answer_s": "rollout.probe_timeout_s",
    "rollout.probe_s": "rollout.probe_interval_s",
}
"""Old key -> new key. An old key is rejected with the new name."""


def all_keys(
    schema: type[Options] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, type[Options], FieldInfo]]:
    """All keys as (dotted key, class, field), for each strategy of a section, without list indices."""
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}", schema, field
        for inner in options_classes(field.annotation):
            yield from all_keys(inner, f"{prefix}{name}.")


def options_classes(annotation: object) -> list[type[Options]]:
    """The section classes of a type: none for a plain value, several for strategies."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation]
    return [found for part in get_args(annotation) for found in options_classes(part)]


@cache
def strategies(section: str) -> dict[str, type[Options]]:
    """Value of the tag -> class of the options; empty for a section without strategies."""
    if section not in TAGS:
        return {}
    members = options_classes(RunConfig.model_fields[section].annotation)
    return {
        get_args(member.model_fields[TAGS[section]].annotation)[0]: member for member in members
    }


def fields_at(
    path: Sequence[str | int], root: Node, schema: type[Options] = RunConfig
) -> dict[str, FieldInfo]:
    """Fields allowed below `path`, of the strategy that the tree `root` selects; empty for a plain
    value.
    """
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


def explain_validation(
    details: Sequence[Detail], root: Node, schema: type[Options] = RunConfig
) -> str:
    """The first error as one line, with the number of others.

    Unknown keys come first: they cause other errors.
    """
    causes = [detail for detail in details if detail["type"] != "default_factory_not_called"]
    first = min(causes, key=lambda detail: detail["type"] != "extra_forbidden")
    others = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return f"{_explain(first, root, schema)}{others}"


def _explain(detail: Detail, root: Node, schema: type[Options]) -> str:
    loc = detail["loc"]
    # Without the tags, which pydantic inserts behind the section.
    path = [
        part
        for before, part in zip(("", *loc), loc, strict=False)
        if part not in strategies(str(before))
    ]
    kind = detail["type"]
    key = dotted(path)
    section = str(path[-1]) if path else ""  # of a tagged union, at any depth
    tags = list(strategies(section))
    if kind == "extra_forbidden":
        return (
            f"unknown key `{key}`; {_unknown_key_advice(path, root, schema)} ({where(path, root)})"
        )
    if kind == "missing":
        field = fields_at(path[:-1], root, schema).get(section)
        meaning = (
            ""
            if field is None or not field.description
            else ": " + field.description.strip().split("\n")[0]
        )
        return f"`{key}` is missing; add it{meaning} ({where(path, root)})"
    if kind == "union_tag_not_found":
        return f"`{key}.{TAGS[section]}` is missing; set it to one of {', '.join(tags)} ({where(path, root)})"
    if kind == "union_tag_invalid":
        return _choice_line([*path, TAGS[section]], detail["ctx"]["tag"], tags, root)
    if kind == "literal_error":
        choices = [
            part.strip().strip("'")
            for part in detail["ctx"]["expected"].replace(" or ", ", ").split(",")
        ]
        return _choice_line(path, detail["input"], choices, root)
    if kind == "value_error":
        return _validator_line(str(detail["ctx"]["error"]), path, root, schema)
    expected = _expected(detail["msg"])
    return f"{key}={shown(detail['input'])}: expected {expected}{_type_advice(detail)} ({where(path, root)})"


def _validator_line(text: str, path: Sequence[str | int], root: Node, schema: type[Options]) -> str:
    """The line of a validator's message: for one value, or for a section if the message names the
    key.
    """
    if path and not fields_at(path, root, schema):
        return f"{dotted(path)}: {text} ({where(path, root)})"
    named = named_key(text)
    prefix = "" if named or not path else f"{dotted(path)}: "
    return f"{prefix}{text} ({where(named.split('.') if named else path, root)})"


def named_key(text: str) -> str:
    """The first key in a message: a dotted one, or one in backticks. Empty if it names none."""
    found = re.search(r"`([a-z][\w.]*)`|\b[a-z]\w*(?:\.\w+)+", text)
    return "" if found is None else found[1] or found[0]


def where(path: Sequence[str | int], root: Node) -> str:
    """`file:line` of the value at `path`, or of the nearest enclosing mapping."""
    nodes = (root.at(path[:end]) for end in range(len(path), -1, -1))
    return next(node.origin for node in nodes if node is not None)


def _unknown_key_advice(path: Sequence[str | int], root: Node, schema: type[Options]) -> str:
    *parent, name = path
    if (new := RENAMED_KEYS.get(dotted(path))) is not None:
        return f"it is now called `{new}`"
    section = dotted(parent)
    owners = [tag for tag, member in strategies(section).items() if name in member.model_fields]
    chosen = root.at([section, TAGS[section]]) if owners else None
    if chosen is not None:
        key = f"{section}.{TAGS[section]}"
        return f"it belongs to {key}={' | '.join(owners)}, and {key}={chosen.value} does not use it; remove the key"
    known = list(fields_at(parent, root, schema))
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{dotted([*parent, close[0]])}`?"
    elsewhere = sorted({key for key, _, _ in all_keys(schema) if key.rsplit(".", 1)[-1] == name})
    if elsewhere:
        return f"did you mean `{'` or `'.join(elsewhere[:3])}`?"
    return f"known here: {', '.join(known)}"


def _choice_line(path: Sequence[str | int], got: object, choices: Sequence[str], root: Node) -> str:
    close = difflib.get_close_matches(str(got), choices, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{dotted(path)}={shown(got)}: expected one of {', '.join(choices)}{hint} ({where(path, root)})"


def _expected(message: str) -> str:
    text = re.sub("^(Input should (be )?|Tuple should have )", "", message).partition(
        " after validation"
    )[0]
    text = text.replace("a valid dictionary or instance of", "a mapping of")
    return text.replace("a valid integer", "an integer").replace("a valid ", "a ")


def _type_advice(detail: Detail) -> str:
    if detail["type"] in ("int_type", "float_type", "bool_type") and isinstance(
        detail["input"], str
    ):
        return ", not text; remove the quotes or write a plain value"
    return {"string_type": "; put it in quotes", "tuple_type": "; write a list: [a, b]"}.get(
        detail["type"], ""
    )

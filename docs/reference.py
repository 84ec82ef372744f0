"""Tables of every configuration key, from the schema."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from sphinx.util import logging

from pacs_megatron.config.explain import schema_json

logger = logging.getLogger(__name__)
Schema = dict[str, Any]


def markdown() -> str:
    """One section for each section of the file; a strategy (`rollout.engine`, ...) has a table of
    its own.
    """
    schema = json.loads(schema_json())
    parts = []
    for name, section in schema["properties"].items():
        if name == "include":
            continue
        parts.append(f"\n## `{name}`\n")
        for variant in _objects(section, schema["$defs"]):
            choice = _choice(variant)
            if choice:
                parts.append(f"\n### `{name}.{choice}`\n")
            rows = "\n".join(_rows(variant, name, schema["$defs"]))
            parts.append(f"\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _rows(schema: Schema, prefix: str, defs: Schema) -> Iterator[str]:
    for name, field in schema["properties"].items():
        key = f"{prefix}.{name}"
        if "const" in field:
            continue  # the choice of the strategy, in the heading
        nested = _objects(field, defs)
        meaning = field.get("description", "")
        if not meaning and not nested:
            logger.warning("configuration key %s has no description", key)
        if meaning or not nested:
            default = (
                _code(json.dumps(field["default"])) if "default" in field and not nested else ""
            )
            required = "required" if name in schema.get("required", ()) else default
            yield f"| `{key}` | {_type(field, defs)} | {required} | {_cell(meaning)} |"
        for variant in nested:
            inside = f"{key}.0" if field.get("type") == "array" else key
            yield from _rows(variant, inside, defs)


def _objects(field: Schema, defs: Schema) -> list[Schema]:
    """The sections that a field may contain: its own, those of its list items, those of its
    strategies.
    """
    if "$ref" in field:
        return [defs[field["$ref"].rpartition("/")[2]]]
    found = (
        [field["items"]] if "items" in field else [*field.get("oneOf", ()), *field.get("anyOf", ())]
    )
    return list(itertools.chain.from_iterable(_objects(option, defs) for option in found))


def _choice(variant: Schema) -> str:
    return next(
        (
            f"{name}: {field['const']}"
            for name, field in variant["properties"].items()
            if "const" in field
        ),
        "",
    )


def _type(field: Schema, defs: Schema) -> str:
    if "enum" in field:
        return ", ".join(_code(json.dumps(value).strip('"')) for value in field["enum"])
    if "anyOf" in field or "oneOf" in field:
        types = (
            _type(option, defs) for option in [*field.get("anyOf", ()), *field.get("oneOf", ())]
        )
        return " or ".join(dict.fromkeys(types))
    if "$ref" in field:
        return "section"
    if field.get("type") == "array":
        return f"list of {_type(field['items'], defs)}" if "items" in field else "list"
    return str(field.get("type", "any")) + _limits(field)


def _limits(field: Schema) -> str:
    names = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return "".join(
        f" {sign} {field[name]}" for name, sign in names.items() if name in field
    ).replace("|", "")


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

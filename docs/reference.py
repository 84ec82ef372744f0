"""Tables of every configuration key, from the schema."""

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
    """One row of Markdown for each key of a section and of the sections in it.

    Args:
        schema: of the section.
        prefix: its dotted key.
        defs: name -> schema, for references.
    """
    for name, field in schema["properties"].items():
        if "const" in field:
            continue  # the choice of the strategy, in the heading
        key = f"{prefix}.{name}"
        nested = _objects(field, defs)
        meaning = field.get("description", "")
        if not meaning and not nested:
            logger.warning("configuration key %s has no description", key)

        if meaning or not nested:
            default = ""
            if name in schema.get("required", ()):
                default = "required"
            elif "default" in field and not nested:
                default = _code(json.dumps(field["default"]))
            yield f"| `{key}` | {_type(field, defs)} | {default} | {_cell(meaning)} |"
        for variant in nested:
            inner_prefix = f"{key}.0" if field.get("type") == "array" else key
            yield from _rows(variant, inner_prefix, defs)


def _objects(field: Schema, defs: Schema) -> list[Schema]:
    """The sections that a field may contain: its own, those of its list items, those of its
    strategies.
    """
    if "$ref" in field:
        return [defs[field["$ref"].rpartition("/")[2]]]
    options = [field["items"]] if "items" in field else _options(field)
    objects: list[Schema] = []
    for option in options:
        objects += _objects(option, defs)
    return objects


def _options(field: Schema) -> list[Schema]:
    """The alternatives of a field."""
    return [*field.get("oneOf", ()), *field.get("anyOf", ())]


def _choice(variant: Schema) -> str:
    """`engine: sglang` for the section of a strategy, else empty."""
    for name, field in variant["properties"].items():
        if "const" in field:
            return f"{name}: {field['const']}"
    return ""


def _type(field: Schema, defs: Schema) -> str:
    """The type of a field in words."""
    if "enum" in field:
        return ", ".join(_code(json.dumps(value).strip('"')) for value in field["enum"])
    if "anyOf" in field or "oneOf" in field:
        options = [*field.get("anyOf", ()), *field.get("oneOf", ())]
        types = [_type(option, defs) for option in options]
        return " or ".join(dict.fromkeys(types))  # without repetitions
    if "$ref" in field:
        return "section"
    if field.get("type") == "array":
        return f"list of {_type(field['items'], defs)}" if "items" in field else "list"
    return str(field.get("type", "any")) + _limits(field)


def _limits(field: Schema) -> str:
    """The limits of a number."""
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f" {sign} {field[name]}" for name, sign in signs.items() if name in field]
    return "".join(limits).replace("|", "")


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    """One line without column separators."""
    return " ".join(text.split()).replace("|", "\\|")

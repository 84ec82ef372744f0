"""Traversal of the schema: the options class at a key, and its fields."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.config.yaml_tree import Node
from pacs_megatron.contracts.options import Options


@dataclass(frozen=True, slots=True)
class Slot:
    """The values that the schema allows at one key."""

    members: tuple[type[Options], ...]
    """Options classes: none for a plain value, several for a tagged union."""
    tag: str | None = None
    """Key that selects a member of the union."""
    item: Slot | None = None
    """Slot of a list's elements."""

    def tags(self) -> dict[str, type[Options]]:
        """Tag value -> member of the union; empty without a tag."""
        if self.tag is None:
            return {}
        return {get_args(member.model_fields[self.tag].annotation)[0]: member for member in self.members}

    def choose(self, node: Node | None) -> type[Options] | None:
        """The class that `node` selects; None for a plain value, or if the tag is missing or unknown."""
        if self.tag is None:
            return self.members[0] if self.members else None
        tag_node = node.at([self.tag]) if node is not None else None
        return self.tags().get(str(tag_node.value)) if tag_node is not None else None


ROOT = Slot((RunConfig,))


def slot_of(field: FieldInfo) -> Slot:
    """The slot of a schema field."""
    return _slot(field.annotation, field.discriminator if isinstance(field.discriminator, str) else None)


def _slot(annotation: object, tag: str | None) -> Slot:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        for extra in extras:
            if isinstance(extra, FieldInfo) and isinstance(extra.discriminator, str):
                tag = extra.discriminator
        return _slot(inner, tag)
    if origin in (Union, types.UnionType):
        slots = [_slot(part, tag) for part in get_args(annotation)]
        members = tuple(member for slot in slots for member in slot.members)
        found_tag = next((slot.tag for slot in slots if slot.tag is not None), None)
        item = next((slot.item for slot in slots if slot.item is not None), None)
        return Slot(members, found_tag, item)
    if origin in (tuple, list):
        return Slot((), item=_slot(get_args(annotation)[0], None))
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return Slot((annotation,), tag)
    return Slot(())


def slot_at(path: Sequence[str | int], root: Node) -> Slot | None:
    """The slot at `path`, with the union members selected in the tree `root`; None if the schema has no such key."""
    slot, node = ROOT, root
    for depth, key in enumerate(path):
        if isinstance(key, int):
            found = slot.item
        else:
            chosen = slot.choose(node)
            if chosen is None or key not in chosen.model_fields:
                return None
            found = slot_of(chosen.model_fields[key])
        if found is None:
            return None
        slot, node = found, root.at(path[: depth + 1]) or Node(None, "")
    return slot


def fields_at(path: Sequence[str | int], root: Node) -> Mapping[str, FieldInfo]:
    """Fields allowed below `path`; empty for a plain value."""
    slot = slot_at(path, root)
    chosen = slot.choose(root.at(path)) if slot is not None else None
    return chosen.model_fields if chosen is not None else {}


def all_keys() -> Iterator[tuple[str, type[Options], FieldInfo]]:
    """All keys of the schema as (dotted key, class, field), for each member of each union."""
    yield from _walk(ROOT, "")


def _walk(slot: Slot, prefix: str) -> Iterator[tuple[str, type[Options], FieldInfo]]:
    for member in slot.members:
        for name, field in member.model_fields.items():
            key = f"{prefix}{name}"
            yield key, member, field
            inner = slot_of(field)
            yield from _walk(inner, f"{key}.")
            if inner.item is not None:
                yield from _walk(inner.item, f"{key}.")

"""No option without a reader: each key of the schema is read by code outside config/.

A key counts as read where an attribute of its name is taken from something that is recognisably its
section: the expression ends in the section's name (`config.checkpoint.every`, `checkpoint.every`),
or the file names the options class, its base or a union that contains it, or a property of the
options class reads the key and such code reads the property. A union's tag is read by pydantic
itself. Checks, messages and `config explain` do not count: they act on nothing.
"""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

from pacs_megatron.config.messages import TAGS, all_keys, options_classes, strategies
from pacs_megatron.training import breaker

PACKAGE = Path(__file__).parents[3] / "pacs_megatron"
READERS_IN_CONFIG = {"layout.py"}


class Reads:
    """The attribute reads and names of one file."""

    def __init__(self, source: str) -> None:
        self.from_section: set[tuple[str, str]] = set()
        self.attributes: set[str] = set()
        self.names: set[str] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self.attributes.add(node.attr)
                receiver = node.value
                if isinstance(receiver, ast.Attribute):
                    self.from_section.add((receiver.attr, node.attr))
                elif isinstance(receiver, ast.Name):
                    self.from_section.add((receiver.id, node.attr))
            if isinstance(node, ast.Name):
                self.names.add(node.id)
            elif isinstance(node, ast.alias):
                self.names.add(node.name.rsplit(".", 1)[-1])

    def reads(self, section: str, owner: str, field: str) -> bool:
        """Does this file read `section.field`, a field of the class `owner`?"""
        return (section, field) in self.from_section or (
            owner in self.names and field in self.attributes
        )


def readers() -> Iterator[Reads]:
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "config" or path.name in READERS_IN_CONFIG:
            yield Reads(path.read_text(encoding="utf-8"))


def unions() -> dict[str, set[str]]:
    """Names of classes by each union of them that the package gives a name (`AnyReward = MathReward
    | ...`).
    """
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                members = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
                found[node.targets[0].id] = members
    return {
        name: set().union(members, *(found.get(member, ()) for member in members))
        for name, members in found.items()
    }


def read_by_properties(files: list[Reads]) -> set[tuple[str, str]]:
    """(class, key) of every key that a property of the rollout or reward options reads, if a file
    reads the property.
    """
    found = set()
    used = set()
    for reads in files:
        for name in reads.attributes:
            used.add(name)
    sources = [
        (PACKAGE / "config" / f"{name}_options.py").read_text(encoding="utf-8")
        for name in ("rollout", "reward")
    ]
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(source)) for source in sources):
        for function in node.body if isinstance(node, ast.ClassDef) else ():
            if (
                isinstance(function, ast.FunctionDef)
                and function.decorator_list
                and function.name in used
            ):
                found |= {
                    (node.name, read.attr)
                    for read in ast.walk(function)
                    if isinstance(read, ast.Attribute)
                }
    return found


def tags() -> set[tuple[str, str]]:
    """(class, key) of every key that chooses between strategies."""
    result = set()
    for section, tag in TAGS.items():
        for member in strategies(section).values():
            result.add((member.__name__, tag))
    return result


def test_every_section_with_several_classes_has_a_tag() -> None:
    several = {key for key, _, field in all_keys() if len(options_classes(field.annotation)) > 1}
    assert several == set(TAGS)


def test_every_key_is_read() -> None:
    files = list(readers())
    named = unions()
    read_elsewhere = tags() | read_by_properties(files)
    unread = []
    for key, owner, _ in all_keys():
        if owner.__name__ == "MegatronOptions":
            # Read by name; tests/unit/policy/test_precision.py compares the names with Megatron's.
            continue
        if key.startswith("mismatch.") and key.removeprefix("mismatch.") in breaker.LIMITS:
            continue  # read by name
        if any((base.__name__, key.rsplit(".", 1)[-1]) in read_elsewhere for base in owner.__mro__):
            continue
        *_, section, field = ["", *key.split(".")]
        owners = [
            base.__name__ for base in owner.__mro__ if field in getattr(base, "__annotations__", {})
        ]
        owners += [
            owner.__name__,
            *(name for name, members in named.items() if owner.__name__ in members),
        ]
        pairs = itertools.product(files, owners)
        if not any(reads.reads(section, name, field) for reads, name in pairs):
            unread.append(f"{key} ({owner.__name__})")
    assert not unread, "read by nothing: " + ", ".join(unread)


def test_the_rule_sees_what_is_not_read() -> None:
    reads = Reads(
        "def f(config, other):\n    config.batch.size\n    other.every\n    config.run.steps = 1\n"
    )
    assert reads.reads("batch", "BatchOptions", "size")
    assert not reads.reads("checkpoint", "CheckpointOptions", "every")
    assert not reads.reads("run", "RunOptions", "steps")  # written, not read
    named = Reads("def f(options: CheckpointOptions):\n    return options.every\n")
    assert named.reads("checkpoint", "CheckpointOptions", "every")

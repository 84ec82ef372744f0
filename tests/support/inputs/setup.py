"""The verbs with which a case changes its world. tests/inputs/README.md lists them."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
import yaml

from tests.support.inputs import builders
from tests.support.inputs.world import World

REMOVED = "(removed)"
"""As a value of a patch: the key goes."""
TWICE = "(twice)"
"""As a patch of a row: it occurs a second time, at the end."""


def arrange(steps: dict[str, Any], world: World) -> None:
    """Executes the steps in their order; each key is a verb, each value what it gets."""
    for verb, value in steps.items():
        VERBS[verb](world, value)


def content(value: Any, world: World) -> bytes:
    """Bytes of a content.

    Args:
        value: text; a list of texts and of [text, times]; or a map of one kind to a value.
        world: replaces {w}, {m}, {c}, {r} and {s} in texts.
    """
    if isinstance(value, str):
        return world.place(value).encode("utf-8", "surrogatepass")
    if isinstance(value, list):
        return b"".join(_part(part, world) for part in value)
    [(kind, inner)] = value.items()
    if kind == "json":
        return json.dumps(inner).encode()
    if kind == "yaml":
        return str(yaml.safe_dump(inner, allow_unicode=True)).encode()
    if kind == "rows":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in inner).encode()
    if kind == "bytes":
        return _raw(inner)
    if kind == "every_byte":
        return bytes(range(256)) * int(inner)
    if kind == "escaped":
        return str(inner).encode().decode("unicode_escape").encode("utf-8", "surrogatepass")
    if kind == "sums":
        return _sums(**inner)
    if kind == "gzip":
        return gzip.compress(content(inner, world))
    text: str = content(inner, world).decode()
    return text.encode(kind)


def _sums(before: str = "", after: str = "", answer: str = "") -> bytes:
    """Eight lines with a sum and its answer, between other texts."""
    rows = [
        {"problem": before + problem + after, "answer": answer + found}
        for problem, found in builders.SUMS
    ]
    return content({"rows": rows}, World(Path()))


def _part(part: Any, world: World) -> bytes:
    if not isinstance(part, list):
        return content(part, world)
    text, times = part
    return content(text, world) * int(times)


def _raw(value: str | list[Any]) -> bytes:
    """Bytes from letters up to U+00FF."""
    parts = [value] if isinstance(value, str) else value
    found = b""
    for part in parts:
        text, times = (part, 1) if isinstance(part, str) else part
        found += text.encode("latin-1") * times
    return found


def merge(tree: Any, patch: Any) -> Any:
    """`tree` with the values of `patch`, map by map. An empty map replaces what was there."""
    if not isinstance(patch, dict) or not patch or not isinstance(tree, dict):
        return patch
    merged = dict(tree)
    for key, value in patch.items():
        if value == REMOVED:
            del merged[key]
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def free(path: Path) -> Path:
    """`path`, at which nothing is left, in an existing folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Replaces the JSON in `path` by what `change` returns for it."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def edit_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replaces the header of a safetensors file, and leaves its data."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def fit_manifest(path: Path) -> None:
    """Writes size and digest that a file of a checkpoint has now into its manifest."""
    folder = next(parent for parent in path.parents if (parent / "manifest.json").is_file())
    data = path.read_bytes()
    entry = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    name = str(path.relative_to(folder))
    edit_json(folder / "manifest.json", lambda tree: merge(tree, {"files": {name: entry}}))


# ------------------------------------------------------------------------------------------- verbs
def _write(path: Path, value: Any, world: World) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        free(path)
    path.write_bytes(content(value, world))


def _program(path: Path, value: Any, world: World) -> None:
    _write(path, value, world)
    path.chmod(0o755)


def _append(path: Path, value: Any, world: World) -> None:
    path.write_bytes(path.read_bytes() + content(value, world))


def _prepend(path: Path, value: Any, world: World) -> None:
    path.write_bytes(content(value, world) + path.read_bytes())


def _replace(path: Path, value: list[str], world: World) -> None:
    old, new = (world.place(text).encode() for text in value)
    data = path.read_bytes()
    assert old in data, f"{path} has no {old!r}"
    path.write_bytes(data.replace(old, new, 1))


def _json(path: Path, value: Any, _: World) -> None:
    edit_json(path, lambda tree: merge(tree, value))


def _yaml(path: Path, value: Any, _: World) -> None:
    path.write_text(yaml.safe_dump(merge(yaml.safe_load(path.read_text()), value)))


def _link(path: Path, value: str, world: World) -> None:
    free(path).symlink_to(world.place(value))


def _move(path: Path, value: str, world: World) -> None:
    shutil.move(path, free(world.folder / value))


def _copy(path: Path, value: str, world: World) -> None:
    target = free(world.folder / value)
    if path.is_dir():
        shutil.copytree(path, target, symlinks=True)
    else:
        shutil.copyfile(path, target)


def _size(path: Path, value: int | float, _: World) -> None:
    """A number of bytes; below 0, so many fewer; below 1, this part of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    size = path.stat().st_size
    if value < 0:
        size += int(value)
    else:
        size = int(size * value) if isinstance(value, float) else value
    os.truncate(path, size)


def _encode(path: Path, value: str, _: World) -> None:
    path.write_bytes(path.read_bytes().decode().encode(value))


def _rows(path: Path, value: dict[int | str, Any], _: World) -> None:
    """Patches of lines of JSON by their number; `rest`: of all but the first."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, patch in value.items():
        for at in range(1, len(rows)) if number == "rest" else [int(number)]:
            if patch == REMOVED:
                rows.pop(at)
            elif patch == TWICE:
                rows.append(rows[at])
            else:
                rows[at] = merge(rows[at], _long(patch))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _long(patch: dict[str, Any]) -> dict[str, Any]:
    """A patch whose long texts are given as {parts: [[text, times], ...]}."""
    found = {}
    for key, value in patch.items():
        is_long = isinstance(value, dict) and set(value) == {"parts"}
        found[key] = _text_of(value["parts"]) if is_long else value
    return found


def _text_of(parts: list[Any]) -> str:
    return content(parts, World(Path())).decode("utf-8", "surrogatepass")


def _touch(path: Path, value: int, _: World) -> None:
    for found in [path, *path.rglob("*")]:
        os.utime(found, (value, value), follow_symlinks=False)


def _pipe(path: Path) -> None:
    os.mkfifo(free(path))


def _folder(path: Path) -> None:
    free(path).mkdir()


def _socket(path: Path) -> None:
    free(path)
    before = Path.cwd()
    os.chdir(path.parent)  # an address has 108 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


def _remove(path: Path) -> None:
    assert os.path.lexists(path), path
    free(path)


def _flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(bytes(data))


def _gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes()))


def _header(world: World, value: dict[str, Any]) -> None:
    """The header of the model's weights."""
    edit_header(world.model / "model.safetensors", lambda header: merge(header, value))


def _new_header(world: World, value: Any) -> None:
    edit_header(world.model / "model.safetensors", lambda _: value)


def _reward(world: World, value: str | dict[str, str]) -> None:
    """The body of a reward function that then returns 0 or 1; or its head and body."""
    parts = {"head": "", "body": value} if isinstance(value, str) else value
    body = "".join(f"    {line}\n" for line in world.place(parts["body"]).splitlines())
    text = (
        f"import os, signal, time\n{parts['head']}\n\n"
        f"def reward(prompt, response):\n{body}    return float(sum(response.encode()) % 2)\n"
    )
    (world.folder / "reward.py").write_text(text)


def _cluster(world: World, value: dict[str, Any]) -> None:
    """cluster.yaml of a sound cluster with these values."""
    sound = {"name": "c", "python": ["python"]}
    text = yaml.safe_dump(merge(sound, value), allow_unicode=True)
    (world.folder / "cluster.yaml").write_text(text)


def _runs(world: World, names: list[str]) -> None:
    """Finished runs with metrics and an evaluation; `a` has seed 0, `b` seed 1, and so on."""
    for seed, name in enumerate(names):
        builders.finished_run(world.folder / "runs" / name, name, seed)


def _build(world: World, value: str | dict[str, Any]) -> None:
    """A function of builders.py: its name, or its name and arguments."""
    if isinstance(value, str):
        value = {value: {}}
    for name, options in value.items():
        builders.BUILDERS[name.lower().replace(" ", "_")](world, **options)


def _path(name: str, world: World) -> Path:
    """A path below the world; with a `*`, the file that it matches."""
    return next(world.folder.glob(name)) if "*" in name else world.folder / world.place(name)


def _of_each(verb: Callable[[Path, Any, World], None]) -> Callable[[World, Any], None]:
    """A verb of a map of paths to values."""

    def execute(world: World, value: dict[str, Any]) -> None:
        for name, given in value.items():
            verb(_path(name, world), given, world)

    return execute


def _of_paths(verb: Callable[[Path], None]) -> Callable[[World, Any], None]:
    """A verb of one path or a list of paths."""

    def execute(world: World, value: str | list[str]) -> None:
        for name in [value] if isinstance(value, str) else value:
            verb(_path(name, world))

    return execute


VERBS: dict[str, Callable[[World, Any], None]] = {
    "write": _of_each(_write),
    "program": _of_each(_program),
    "append": _of_each(_append),
    "prepend": _of_each(_prepend),
    "replace": _of_each(_replace),
    "json": _of_each(_json),
    "yaml": _of_each(_yaml),
    "encode": _of_each(_encode),
    "size": _of_each(_size),
    "link": _of_each(_link),
    "copy": _of_each(_copy),
    "move": _of_each(_move),
    "time": _of_each(_touch),
    "parquet": _of_each(lambda path, value, _: builders.write_parquet(path, value)),
    "flip": _of_paths(_flip),
    "gzip": _of_paths(_gzip),
    "remove": _of_paths(_remove),
    "pipe": _of_paths(_pipe),
    "folder": _of_paths(_folder),
    "socket": _of_paths(_socket),
    "manifest_of": _of_paths(fit_manifest),
    "rows": _of_each(_rows),
    "header": _header,
    "new_header": _new_header,
    "reward": _reward,
    "cluster": _cluster,
    "runs": _runs,
    "build": _build,
}

"""Inputs that need code: the functions that the verb `build` of a case names."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

from pacs_megatron.config import load_config
from tests.support.inputs import setup
from tests.support.inputs.process import ROOT, run
from tests.support.inputs.world import World
from tests.support.tiny_models import make_tiny_qwen3, save_tokenizer

STEP = "runs/tiny/checkpoints/step_000002"
SUMS = [(f"{number} + 1 = ?", str(number + 1)) for number in range(8)]
SAMPLE = {
    "id": "1:x/0#0",
    "prompt_id": "x/0",
    "source": "x",
    "prompt": "p",
    "answer": "1",
    "response": "r",
    "label": 1,
    "failure": None,
    "stop": "eos",
    "prompt_tokens": 1,
    "response_tokens": 1,
}


def _lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _pickle(world: World) -> bytes:
    """A pickle that executes a command."""
    return f"cposix\nsystem\n(S'touch {world.folder}/canary'\ntR.".encode()


# ---------------------------------------------------------------------------------- finished runs
def finished_run(folder: Path, name: str, seed: int) -> None:
    """A run with three rows of metrics and an evaluation of two samples."""
    config = {"run": {"name": name, "seed": seed}, "objective": {"name": "pacs"}}
    _text(folder / "config.yaml", yaml.safe_dump(config))
    steps = range(3)
    rows = [{"step": n, "reward/mean": 0.1 * n, "eval/x/pass@1": 0.2 * n} for n in steps]
    _text(folder / "metrics.jsonl", _lines(rows))
    results = {"samples": "samples-1.jsonl", "metrics": {"eval/x/pass@1": 0.4}}
    _text(folder / "eval/results.json", json.dumps(results))
    second = SAMPLE | {"id": "1:x/0#1", "response": "s"}
    samples = [{"digest": "1", "judged_by": {}}, SAMPLE, second]
    _text(folder / "eval/samples-1.jsonl", _lines(samples))


def a_run_with_a_name(world: World, name: str) -> None:
    """The run `b`: its name, objective and a metric have this text."""
    config = {"run": {"name": name, "seed": 1}, "objective": {"name": name}}
    _text(world.folder / "runs/b/config.yaml", yaml.safe_dump(config))
    rows = [{"step": n, "reward/mean": 0.1, name: 0.5, "eval/x/pass@1": 0.1} for n in range(3)]
    _text(world.folder / "runs/b/metrics.jsonl", _lines(rows))


def many_steps(world: World, count: int) -> None:
    """Two runs of `count` steps."""
    rows = [{"step": 3 * n, "reward/mean": 0.1, "eval/x/pass@1": 0.2} for n in range(count)]
    for name in ("a", "b"):
        _text(world.folder / f"runs/{name}/metrics.jsonl", _lines(rows))


def a_row_of_many_keys(world: World, count: int) -> None:
    """Metrics of one step with `count` names."""
    row = {"step": 1} | {f"x/{number}": number for number in range(count)}
    _text(world.folder / "runs/a/metrics.jsonl", _lines([row]))


def arrays_of_numpy(world: World, file: str) -> None:
    """A user's file of arrays."""
    np.savez(world.folder / file, weights=np.ones(9))


# ------------------------------------------------------------------------------------------- models
def weights_end_in(world: World, value: float, count: int) -> None:
    """The last numbers of the weights are `value`."""
    path = world.model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4 * count :] = struct.pack(f"<{count}f", *[value] * count)
    path.write_bytes(bytes(data))


def weights_of_one_byte(world: World, folder: str) -> None:
    """All numbers of a model consist of the byte 255: nan."""
    path = world.folder / folder / "model.safetensors"
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    path.write_bytes(data[:start] + b"\xff" * (len(data) - start))


def other_weights(world: World, folder: str) -> None:
    """A copy of the model whose numbers are doubled."""
    shutil.copytree(world.model, world.folder / folder)
    path = world.folder / folder / "model.safetensors"
    tensors = {name: tensor * 2 for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


def tensor_names(
    world: World, before: str = "", after: str = "", times: int = 1, old: str = "", new: str = ""
) -> None:
    """All tensors have other names; `after` may have escapes."""
    end = after.encode().decode("unicode_escape") * times

    def rename(header: dict[str, Any]) -> dict[str, Any]:
        return {before + (name.replace(old, new) if old else name) + end: entry
                for name, entry in header.items()}  # fmt: skip

    setup.edit_header(world.model / "model.safetensors", rename)


def two_layers_change_places(world: World) -> None:
    """Layer 0 has the weights of layer 1, and vice versa."""

    def rename(header: dict[str, Any]) -> dict[str, Any]:
        swapped = {}
        for name, entry in header.items():
            other = name.replace("layers.0.", "layers.x.").replace("layers.1.", "layers.0.")
            swapped[other.replace("layers.x.", "layers.1.")] = entry
        return swapped

    setup.edit_header(world.model / "model.safetensors", rename)


def many_tensors(world: World, count: int) -> None:
    """The header lists `count` empty tensors more."""
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    more = {f"x{number}": empty for number in range(count)}
    setup.edit_header(world.model / "model.safetensors", lambda header: header | more)


def every_tensor(world: World, **entry: Any) -> None:
    """Every entry of the header has these values."""

    def change(header: dict[str, Any]) -> dict[str, Any]:
        for name in header.keys() - {"__metadata__"}:
            header[name] |= entry
        return header

    setup.edit_header(world.model / "model.safetensors", change)


def a_tensor_of_many_axes(world: World, count: int) -> None:
    """A norm of the shape [1, 1, ...]."""
    patch = {"model.norm.weight": {"shape": [1] * count}}
    setup.VERBS["header"](world, patch)


def _header_text(world: World, change: Any) -> None:
    """The text of the header, changed as text."""
    path = world.model / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    new = change(data[8 : 8 + length].decode()).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])


def two_tensors_are_listed_twice(world: World) -> None:
    """The second time, each has the bytes of the other."""
    first = "model.norm.weight"
    second = "model.layers.0.input_layernorm.weight"

    def change(header: str) -> str:
        entries = json.loads(header)
        more = {first: entries[second], second: entries[first]}
        return header.rstrip()[:-1] + ", " + json.dumps(more)[1:]

    _header_text(world, change)


def blanks_behind_the_header(world: World) -> None:
    """Padding, as other writers do it."""
    _header_text(world, lambda header: header.rstrip() + " " * 24)


def bfloat16_called_float16(world: World) -> None:
    """Weights in bfloat16 whose header names float16."""
    shutil.rmtree(world.model)
    make_tiny_qwen3(world.model, dtype="bfloat16")
    every_tensor(world, dtype="F16")


def a_shard_and_its_index(
    world: World,
    file: Any = "model-00001-of-00001.safetensors",
    more: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    map: Any = None,
) -> None:
    """One shard, and an index in which all tensors are in `file`; or the index `map`."""
    names = [name for name in load_file(world.model / "model.safetensors") if name not in without]
    shard = world.model / "model-00001-of-00001.safetensors"
    (world.model / "model.safetensors").rename(shard)
    files = dict.fromkeys([*names, *more], file) if map is None else map
    tree = {"metadata": {}, "weight_map": files}
    _text(world.model / "model.safetensors.index.json", json.dumps(tree))


def two_shards(world: World, second: str, has: str = "") -> None:
    """The index places the last norm in `second`, which contains the tensor `has`, times 3."""
    tensors = load_file(world.model / "model.safetensors")
    first = world.model / "a.safetensors"
    (world.model / "model.safetensors").rename(first)
    shutil.copy(first, world.folder / "model.safetensors")
    if has:
        found = tensors.get(has, np.ones(3, np.float32)) * np.float32(3)
        save_file({has: found}, world.model / second)
    files = dict.fromkeys(tensors, first.name) | {"model.norm.weight": second}
    tree = {"metadata": {}, "weight_map": files}
    _text(world.model / "model.safetensors.index.json", json.dumps(tree))


def links_into_a_cache_of_blobs(world: World) -> None:
    """Every file of the model is a link, as in the hub's cache."""
    (world.folder / "blobs").mkdir()
    for number, path in enumerate(sorted(world.model.iterdir())):
        path.rename(world.folder / f"blobs/{number}")
        path.symlink_to(f"../blobs/{number}")


def a_tensor_more(world: World, name: str) -> None:
    """The weights have a tensor that the model lacks."""
    path = world.model / "model.safetensors"
    save_file(load_file(path) | {name: np.zeros((2, 2), np.float32)}, path)


def a_tensor_of_bytes(world: World, name: str) -> None:
    """One tensor of the weights has 8-bit integers."""
    path = world.model / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].astype(np.int8)}, path)


def a_tokenizer_of_a_larger_model(world: World) -> None:
    """The tokenizer has 100 tokens that the model lacks."""
    tokenizer = save_tokenizer(world.model)
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(100)])
    tokenizer.save_pretrained(world.model)


def a_tokenizer_without_a_template(world: World) -> None:
    """The tokenizer of a model that is no chat model."""
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        (world.model / name).unlink(missing_ok=True)
    save_tokenizer(world.model, chat_template=None)


def more_tokens(world: World, count: int) -> None:
    """A vocabulary with `count` words more than the model has."""
    words = {f"word{number}": 1000 + number for number in range(count)}
    setup.VERBS["json"](world, {"model/tokenizer.json": {"model": {"vocab": words}}})


# -------------------------------------------------------------------------------------- checkpoints
def change_places(world: World, first: str, second: str) -> None:
    """Two files or folders have each other's name."""
    paths = world.folder / first, world.folder / second
    aside = world.folder / "aside"
    paths[0].rename(aside)
    paths[1].rename(paths[0])
    aside.rename(paths[1])


def every_entry_of_the_manifest(world: World, **entry: Any) -> None:
    """Every file of the manifest has these values."""

    def change(tree: dict[str, Any]) -> dict[str, Any]:
        for found in tree["files"].values():
            found |= entry
        return tree

    setup.edit_json(world.checkpoint / "manifest.json", change)


def a_second_name_in_the_manifest(world: World, name: str, of: str) -> None:
    """The manifest lists a file a second time, by another name."""

    def change(tree: dict[str, Any]) -> dict[str, Any]:
        tree["files"][name] = tree["files"][of]
        return tree

    setup.edit_json(world.checkpoint / "manifest.json", change)


def a_manifest_in_a_list(world: World) -> None:
    """The manifest is the only item of a list."""
    setup.edit_json(world.checkpoint / "manifest.json", lambda tree: [tree])


def a_deep_manifest(world: World, levels: int) -> None:
    """A note in the manifest is a list in a list, and so on."""
    path = world.checkpoint / "manifest.json"
    note = '{"note": ' + "[" * levels + "]" * levels + ", "
    path.write_text(path.read_text().replace("{", note, 1))


def parts_that_are_pointers(world: World) -> None:
    """Pointers of Git LFS in the place of the weights."""
    for path in world.checkpoint.glob("dist/*.distcp"):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3945\n")


def parts_that_link_into_nowhere(world: World) -> None:
    """Dangling links in the place of the weights."""
    for path in world.checkpoint.glob("dist/*.distcp"):
        path.unlink()
        path.symlink_to("/nonexistent")


def numbers_of_a_tensor(
    world: World, file: str, tensor: str, value: float, at: int | None = None
) -> None:
    """All numbers of a tensor in `file`, or the one `at` a place, are `value`."""
    path = world.folder / file
    tensors = {name: found.copy() for name, found in load_file(path).items()}
    tensors[tensor][slice(None) if at is None else at] = value
    save_file(tensors, path)


def one_byte_of_each_tensor(world: World, file: str) -> None:
    """Every tensor of a file, and the manifest that fits it, has its first number only."""
    path = world.folder / file
    tensors = {}
    for name, tensor in load_file(path).items():
        tensors[name] = tensor[:1].copy() if tensor.ndim else tensor
    save_file(tensors, path)
    setup.fit_manifest(path)


def rows_in_a_wrong_order(world: World) -> None:
    """The metrics of a run, sorted backwards."""
    path = world.folder / "runs/tiny/metrics.jsonl"
    path.write_text("".join(sorted(path.read_text().splitlines(keepends=True), reverse=True)))


def metrics_of_windows(world: World) -> None:
    """A byte order mark, and line ends of two letters."""
    path = world.folder / "runs/tiny/metrics.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))


def an_export_with_a_flipped_bit(world: World) -> None:
    """The export of the run in `e`, with one bit of the weights changed."""
    outcome = run(["export", f"{world.folder}/runs/tiny", "--out", "e"], world.folder, {})
    assert outcome.code == 0, outcome.text
    path = world.folder / "e/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 0x01
    path.write_bytes(bytes(data))


def an_evaluation_into_runs_e(world: World, windows: bool = False) -> None:
    """Samples and results of an evaluation; `windows`: with line ends of two letters."""
    words = ["eval", f"{world.folder}/eval.yaml", "--out", "runs/e"]
    outcome = run(words, world.folder, {})
    assert outcome.code == 0, outcome.text
    path = next((world.folder / "runs/e").glob("samples*.jsonl"))
    if windows:
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def a_lock(world: World, **changes: Any) -> None:
    """A lock of process 1 of this host, which started at another time."""
    lease = {
        "command": "train",
        "host": socket.gethostname(),
        "namespace": os.readlink("/proc/self/ns/pid"),
        "pid": 1,
        "started": "1",
        "since": "2026-01-01 00:00:00",
        "token": "a" * 32,
        "heartbeat": 1,
    }
    _text(world.folder / "runs/tiny/run.lock", json.dumps(lease | changes))


def a_lock_of_this_process(world: World) -> None:
    """The lock of a process that lives."""
    from pacs_megatron.runtime.run_lock import _own_lease

    _text(world.folder / "runs/tiny/run.lock", json.dumps(asdict(_own_lease("train"))))


def the_record_of_an_earlier_run(world: World, overrides: tuple[str, ...] = ()) -> None:
    """The run's folder has a checkpoint and the configuration of a run with `overrides`."""
    text = load_config(world.run, list(overrides)).to_yaml()
    _text(world.folder / "runs/tiny/config.yaml", text)
    _text(world.folder / "runs/tiny/checkpoints/step_000001/manifest.json", "{}")


def the_configuration_of_another_world(world: World) -> None:
    """other.yaml uses the run's folder with another model and another seed."""
    shutil.copytree(world.model, world.folder / "other_model")
    setup.VERBS["json"](world, {"other_model/config.json": {"rope_theta": 54321.0}})
    tree = yaml.safe_load(world.run.read_text())
    tree["run"]["seed"] = 11
    tree["model"]["path"] = str(world.folder / "other_model")
    _text(world.folder / "other.yaml", yaml.safe_dump(tree))


# --------------------------------------------------------------------------------------------- data
def write_parquet(path: Path, columns: Any) -> None:
    """A table; a column is a list, or a map of one kind to values."""
    import pyarrow
    from pyarrow import parquet

    pairs = columns.items() if isinstance(columns, dict) else columns
    arrays = []
    names = []
    for name, values in pairs:
        names.append(name)
        arrays.append(_column(pyarrow, values))
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=names), path)


def _column(pyarrow: Any, values: Any) -> Any:
    if isinstance(values, list):
        return pyarrow.array(values)
    [(kind, inner)] = values.items()
    if kind == "times":
        return pyarrow.array(inner, pyarrow.timestamp("us"))
    if kind == "bytes":
        return pyarrow.array([text.encode("latin-1") for text in inner])
    if kind == "categories":
        return pyarrow.array(inner).dictionary_encode()
    if kind == "large_text":
        return pyarrow.array(inner, pyarrow.large_string())
    value, count = inner
    return pyarrow.array([value] * count)


def a_parquet_file_of_many_columns(world: World, count: int) -> None:
    """Eight rows with `count` columns beside problem and answer."""
    problems, answers = zip(*SUMS, strict=True)
    columns = {"problem": list(problems), "answer": list(answers)}
    columns |= {f"c{number}": [str(number)] * 8 for number in range(count)}
    write_parquet(world.folder / "d.parquet", columns)


def a_parquet_file_of_300_million_letters(world: World) -> None:
    """One problem that compresses to almost nothing."""
    program = (
        "import pyarrow, pyarrow.parquet, sys; "
        "table = pyarrow.table({'problem': ['x' * 300_000_000, '1'], 'answer': ['1', '2']}); "
        "pyarrow.parquet.write_table(table, sys.argv[1], compression='zstd')"
    )
    subprocess.run([sys.executable, "-c", program, f"{world.folder}/d.parquet"], check=True)


def an_archive_that_climbs(world: World) -> None:
    """A zip whose only entry lies above it."""
    (world.folder / "d").mkdir()
    with zipfile.ZipFile(world.folder / "d/train.zip", "w") as file:
        file.writestr("../../canary", "{}")


def a_reward_file_with_a_long_name(world: World) -> None:
    """A file name of 253 letters, and rewards that are lists."""
    _text(world.folder / ("r" * 250 + ".py"), "def reward(p, r):\n    return []\n")


def web_data_with_a_pickle(world: World) -> None:
    """An archive of web data: a sample whose parts are a pickle and JSON."""
    import tarfile

    (world.folder / "0.pkl").write_bytes(_pickle(world))
    _text(
        world.folder / "0.json", json.dumps(dict(zip(("problem", "answer"), SUMS[0], strict=True)))
    )
    (world.folder / "d").mkdir()
    with tarfile.open(world.folder / "d/train.tar", "w") as file:
        for name in ("0.pkl", "0.json"):
            file.add(world.folder / name, name)


def programming_problems(
    world: World, name: str, private: str = "", change: dict[str, Any] | None = None
) -> None:
    """The first row of a set four times, with other tests."""
    rows = ROOT / f"tests/data/problems/{name}.jsonl"
    row = json.loads(rows.read_text().splitlines()[0])
    for key, (text, times) in (change or {}).items():
        row[key] = text * times
    if private:
        data = [_pickle(world)] if private == "a pickle" else [bytes(1 << 26)] * 4
        press = zlib.compressobj(9)
        packed = b"".join(press.compress(part) for part in data) + press.flush()
        row["private_test_cases"] = base64.b64encode(packed).decode()
    _text(world.folder / "d.jsonl", _lines([row] * 4))


def a_long_suffix(world: World, count: int) -> None:
    """A prompt suffix of `count` letters."""
    setup.VERBS["yaml"](world, {"tiny.yaml": {"data": {"prompt_suffix": "x" * count}}})


def problems_that_are_a_page(world: World) -> None:
    """Problems and answers with scripts."""
    script = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    answer = "</script><script>alert(1)"
    rows = [{"problem": f"{script} {number}", "answer": answer} for number in range(16)]
    _text(world.folder / "train.jsonl", _lines(rows))


# ---------------------------------------------------------------------------------------- includes
def a_chain_of_includes(world: World, count: int) -> None:
    """f0.yaml includes f1.yaml, and so on; the last one is the run."""
    for number in range(count):
        _text(world.folder / f"f{number}.yaml", f"include: [f{number + 1}.yaml]\n")
    shutil.copy(world.run, world.folder / f"f{count}.yaml")


def includes_that_double(world: World, count: int) -> None:
    """Every file includes the next one twice."""
    for number in range(count):
        following = f"f{number + 1}.yaml"
        _text(world.folder / f"f{number}.yaml", f"include: [{following}, {following}]\n")
    _text(world.folder / f"f{count}.yaml", "run: {seed: 1}\n")


def many_includes(world: World, count: int) -> None:
    """The run's file includes `count` empty files."""
    names = [f"part{number}.yaml" for number in range(count)]
    for name in names:
        _text(world.folder / name, "{}")
    world.run.write_text(f"include: [{', '.join(names)}]\n" + world.run.read_text())


def wide_includes(world: World, count: int) -> None:
    """y.yaml includes `count` files of 14,000 keys."""
    names = [f"f{number}.yaml" for number in range(count)]
    for number, name in enumerate(names):
        keys = ", ".join(f"k{number}x{key}: {key}" for key in range(14_000))
        _text(world.folder / name, f"data: {{chat_template_args: {{{keys}}}}}\n")
    _text(world.folder / "y.yaml", f"include: [tiny.yaml, {', '.join(names)}]\n")


# --------------------------------------------------------------------------------------- programs
TOOLS = (
    *("nvidia-smi", "bwrap", "squeue", "sacct", "sinfo", "scontrol", "lfs", "quota", "git"),
    *("hostname", "ip", "df"),
)


def programs_of_the_host(world: World, script: str) -> None:
    """Every tool that preflight and doctor start is this script."""
    _programs(world, **dict.fromkeys(TOOLS, script))


def a_quota(world: World, figures: str) -> None:
    """A program `quota` that prints these figures for the world's disk."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    parents = [mount for mount in mounts if world.folder.is_relative_to(mount[1])]
    device = max(parents, key=lambda mount: len(mount[1]))[0]
    _programs(world, quota=f"echo '{device} {figures}'")


def sbatch_that_runs_the_script(world: World) -> None:
    """An sbatch that executes the batch script at once."""
    sbatch = 'for f; do :; done; timeout 20 bash "$f" > /dev/null 2>&1; echo 7'
    _programs(world, sbatch=sbatch, srun="true", scontrol="true", squeue="true")


def _programs(world: World, **scripts: str) -> None:
    steps = {f"bin/{name}": f"#!/bin/sh\n{script}\n" for name, script in scripts.items()}
    setup.VERBS["program"](world, steps)


def modules_named_as_libraries(world: World) -> None:
    """Files of the user with the names of modules."""
    names = (
        *("random", "yaml", "queue", "numpy", "torch", "xxhash", "jinja2", "tokenizers"),
        *("reward_tools", "http"),
    )
    for name in names:
        text = f"open('{world.folder}/canary', 'w')\nraise ImportError('mine')\n"
        _text(world.folder / f"{name}.py", text)


BUILDERS = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__module__", None) == __name__ and not name.startswith("_")
}

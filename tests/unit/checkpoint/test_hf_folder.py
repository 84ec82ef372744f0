"""Hugging Face folders: what is whole loads, what is not is named; nothing half-written keeps a
good name.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pacs_megatron.checkpoint import staging
from pacs_megatron.checkpoint.hf_folder import (
    HfFolder,
    HfFolderWriter,
    copy_hf_metadata,
    hf_tensors,
    metadata_files,
)
from pacs_megatron.checkpoint.safetensors_file import SafetensorsFile, TensorInfo
from pacs_megatron.errors import CheckpointError, ConversionError, PacsError
from pacs_megatron.models import load_spec, weight_table
from tests.support.fuzz import damaged, fuzz, json_documents
from tests.support.tiny_models import make_tiny_qwen3


@pytest.fixture(scope="module")
def written(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in several shards with an index, written by our writer; read only."""
    source = HfFolder(tiny_qwen3)
    infos = [source.info(name) for name in source.names]
    out = tmp_path_factory.mktemp("written") / "sharded"
    with HfFolderWriter(out, infos, max_shard_bytes=100_000) as writer:
        for name in source.names:
            writer.put(name, source.get(name))
        return writer.finish(tiny_qwen3)


@pytest.fixture
def sharded(written: Path, tmp_path: Path) -> Path:
    """A copy of `written` to damage."""
    return shutil.copytree(written, tmp_path / "sharded")


def test_reads_what_safetensors_wrote(tiny_qwen3: Path) -> None:
    folder = HfFolder(tiny_qwen3)
    expected = load_file(tiny_qwen3 / "model.safetensors")
    assert set(folder.names) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(folder.get(name), tensor)
        assert (folder.info(name).shape, folder.info(name).dtype) == (
            tuple(tensor.shape),
            tensor.dtype,
        )
    assert sum(folder.info(name).nbytes for name in folder.names) == sum(
        t.nbytes for t in expected.values()
    )
    assert folder.config["model_type"] == "qwen3"


def test_a_view_never_reaches_the_file(tiny_qwen3: Path) -> None:
    name = "model.norm.weight"
    before = HfFolder(tiny_qwen3).get(name).clone()
    HfFolder(tiny_qwen3).get(name).zero_()
    assert torch.equal(HfFolder(tiny_qwen3).get(name), before)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "b": torch.ones(5, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert all(torch.equal(file.get(name), tensor) for name, tensor in tensors.items())


def test_transformers_loads_what_was_written(sharded: Path, tiny_qwen3: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = sorted(p.name for p in sharded.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (sharded, tiny_qwen3)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    tokenizers = [AutoTokenizer.from_pretrained(f) for f in (sharded, tiny_qwen3)]
    message = [{"role": "user", "content": "1+1?"}]
    rendered = [
        t.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        for t in tokenizers
    ]
    assert rendered[0] == rendered[1]


def test_one_shard_has_the_plain_name_and_dtype_reaches_the_config(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    source = HfFolder(tiny_qwen3)
    table = weight_table(load_spec(tiny_qwen3))
    with HfFolderWriter(
        tmp_path / "out", hf_tensors(table.entries, torch.bfloat16), max_shard_bytes=10**9
    ) as writer:
        for name in source.names:
            writer.put(name, source.get(name))
        out = writer.finish(tiny_qwen3)
    assert [p.name for p in out.glob("*.safetensors*")] == ["model.safetensors"]
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(written[n], source.get(n).bfloat16()) for n in source.names)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert (out / "tokenizer.json").exists() and (out / "chat_template.jinja").exists()


# --------------------------------------------------------------------------------------------------
# damaged folders
def _first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def _truncate(folder: Path) -> None:
    shard = _first_shard(folder)
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)


def _grow(folder: Path) -> None:
    with _first_shard(folder).open("ab") as file:
        file.write(b"\0")


def _rewrite_header(folder: Path, change: Callable[[str], str]) -> None:
    shard = _first_shard(folder)
    data = shard.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    text = change(data[8 : 8 + length].decode()).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def _duplicate_over_files(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    tensors = load_file(shards[1])
    name, tensor = next(iter(load_file(shards[0]).items()))
    save_file(tensors | {name: tensor}, shards[1])


def _same_name_twice(header: str) -> str:
    name, entry = next((n, e) for n, e in json.loads(header).items() if n != "__metadata__")
    return header.rstrip()[:-1] + f',"{name}":{json.dumps(entry)}' + "}"


def _change_entry(folder: Path, key: str | None, value: Any) -> None:
    def change(text: str) -> str:
        header = json.loads(text)
        name = next(name for name in header if name != "__metadata__")
        header[name] = value if key is None else header[name] | {key: value}
        return json.dumps(header)

    _rewrite_header(folder, change)


def _relabel_half(folder: Path) -> None:
    tensors = load_file(_first_shard(folder))
    save_file({name: tensor.half() for name, tensor in tensors.items()}, _first_shard(folder))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))


BAD_ENTRIES: dict[str, tuple[str | None, Any]] = {
    "is a list": (None, [1]),
    "is null": (None, None),
    "is a list of its values": (None, ["F32", [272, 64], [0, 69632]]),
    "has floats as shape": ("shape", [272.0, 64.0]),
    "has a negative size": ("shape", [-272, -64]),
    "has booleans as shape": ("shape", [True, True]),
    "has a huge shape": ("shape", [10**200]),
    "has too many dimensions": ("shape", [1] * 100_000),
    "has a word as shape": ("shape", "ab"),
    "has no offsets": ("data_offsets", None),
    "has three offsets": ("data_offsets", [0, 1, 2]),
    "has floats as offsets": ("data_offsets", [0.0, 69632.0]),
    "has a list as dtype": ("dtype", ["F32"]),
    "has an object as dtype": ("dtype", {"F32": None}),
}
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (
        lambda f: _first_shard(f).unlink(),
        r"model-00001-of-\d+\.safetensors is missing",
    ),
    "truncated shard": (
        _truncate,
        r"model-00001-of-\d+\.safetensors is truncated or damaged .*file not fully covered",
    ),
    "bytes too many": (_grow, "file not fully covered"),
    "empty shard": (
        lambda f: _first_shard(f).write_bytes(b""),
        "is truncated or damaged.*header too (small|large)",
    ),
    "header longer than the file": (
        lambda f: _first_shard(f).write_bytes(b"\xff" * 64),
        "is truncated or damaged.*header too (small|large)",
    ),
    "header is no JSON": (
        lambda f: _rewrite_header(f, lambda h: h.replace("{", "[", 1)),
        "invalid JSON in header",
    ),
    "unknown dtype": (
        lambda f: _rewrite_header(f, lambda h: h.replace('"F32"', '"F99"', 1)),
        "unknown variant `F99`",
    ),
    "wrong shape": (
        lambda f: _rewrite_header(f, lambda h: h.replace("[272,64]", "[271,64]", 1)),
        "invalid shape",
    ),
    "integers instead of floats": (
        lambda f: _rewrite_header(f, lambda h: h.replace('"F32"', '"I32"')),
        "is torch.int32, expected one of torch.float64",
    ),
    "half instead of bfloat16": (
        _relabel_half,
        "is torch.float16, but config.json declares bfloat16",
    ),
    **{
        f"entry {name}": (
            lambda f, key=key, value=value: _change_entry(f, key, value),  # type: ignore[misc]
            "invalid JSON in header|invalid shape|is not supported|entry of .* is damaged",
        )
        for name, (key, value) in BAD_ENTRIES.items()
    },
    "name twice in a file": (
        lambda f: _rewrite_header(f, _same_name_twice),
        "is repeated in one object",
    ),
    "name twice over files": (_duplicate_over_files, r"is in model-00001.* and in model-00002"),
    "name not in the index": (
        lambda f: _edit_index(f, lambda m: m.pop("model.norm.weight")),
        "model.norm.weight, which .*index",
    ),
    "name in the wrong file": (
        lambda f: _edit_index(f, lambda m: m.update({"model.norm.weight": _first_shard(f).name})),
        "maps model.norm.weight to",
    ),
    "name in no file": (
        lambda f: _edit_index(f, lambda m: m.update({"ghost": _first_shard(f).name})),
        "maps ghost to",
    ),
    "path in the index": (
        lambda f: _edit_index(f, lambda m: m.update({"x": "../../etc/passwd"})),
        "not a file of this folder",
    ),
    "index is no JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        "index.json.*malformed JSON",
    ),
    "index missing": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "index.json is missing",
    ),
    "config missing": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "another save beside the index": (
        lambda f: save_file({"a": torch.ones(1)}, f / "model.safetensors"),
        r"both model\.safetensors, which transformers loads, and model\.safetensors\.index\.json",
    ),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "adapter_config.json: transformers would add this adapter",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_folder_is_rejected_in_one_line(fault: str, sharded: Path) -> None:
    HfFolder(sharded)
    damage, words = FAULTS[fault]
    damage(sharded)
    with pytest.raises(PacsError, match=words) as caught:
        HfFolder(sharded)
    assert isinstance(caught.value, CheckpointError | ConversionError)
    assert "\n" not in str(caught.value)


@fuzz
@given(data=st.data())
def test_any_header_gives_a_folder_or_the_named_error(
    data: st.DataObject, written: Path, tmp_path: Path
) -> None:
    """Bytes of the header changed, or an entry replaced."""
    content = _first_shard(written).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header[data.draw(st.sampled_from(sorted(header)))] = data.draw(json_documents())
    text = data.draw(damaged(content[8 : 8 + length]) | st.just(json.dumps(header).encode()))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + content[8 + length :]
    )
    _open_or_named_error(tmp_path)


@fuzz
@given(data=st.data())
def test_any_index_gives_a_folder_or_the_named_error(
    data: st.DataObject, written: Path, sharded: Path
) -> None:
    """Bytes of the index changed, or a file of the map replaced."""
    content = (written / "model.safetensors.index.json").read_bytes()
    index = json.loads(content)
    index["weight_map"][data.draw(st.sampled_from(sorted(index["weight_map"])))] = data.draw(
        json_documents()
    )
    text = data.draw(damaged(content) | st.just(json.dumps(index).encode()))
    (sharded / "model.safetensors.index.json").write_bytes(text)
    _open_or_named_error(sharded)


def _open_or_named_error(folder: Path) -> None:
    try:
        opened = HfFolder(folder)
        assert all(opened.get(name).shape == opened.info(name).shape for name in opened.names)
    except (CheckpointError, ConversionError) as error:
        assert "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize("stray", ["model-00001-of-00002", "adapter_model", "model.fp16"])
def test_weights_beside_a_single_file_are_rejected(
    stray: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """Without an index SGLang loads every file, transformers the one."""
    folder = shutil.copytree(tiny_qwen3, tmp_path / "hf")
    save_file({"model.norm.weight": torch.ones(64)}, folder / f"{stray}.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors and {stray}\.safetensors"):
        HfFolder(folder)


@pytest.mark.parametrize(
    "others",
    [
        ("consolidated.safetensors",),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
        ("consolidated.safetensors", "model-00009-of-00009.safetensors"),
    ],
)
def test_files_that_every_program_skips_change_nothing(
    others: tuple[str, ...], written: Path, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """The third only beside an index, which lists what counts."""
    from transformers import AutoModelForCausalLM

    expected = load_file(tiny_qwen3 / "model.safetensors")
    for source in (written, tiny_qwen3)[: 1 if len(others) == 2 and "bin" not in others[0] else 2]:
        folder = shutil.copytree(source, tmp_path / source.name)
        for name in others:
            if name.endswith(".safetensors"):
                save_file({"model.norm.weight": torch.ones(64)}, folder / name)
            else:
                (folder / name).write_text("{}")
        ours = HfFolder(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert set(ours.names) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(ours.get(name), tensor) and torch.equal(theirs[name], tensor)


def test_a_pipe_is_no_file_of_weights(tiny_qwen3: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_qwen3 / "config.json", tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="not a regular file"
    ):  # and does not wait for a writer
        HfFolder(tmp_path)


def test_pickled_weights_are_not_loaded(tiny_qwen3: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_qwen3 / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="has no weights"):
        HfFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only pickled weights"):
        HfFolder(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        HfFolder(tmp_path / "nowhere")


# --------------------------------------------------------------------------------------------------
# writing
INFOS = [TensorInfo("a", torch.float32, (2, 2)), TensorInfo("b", torch.float32, (3,))]


def test_an_incomplete_or_wrong_write_leaves_nothing(tiny_qwen3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cases: list[tuple[Callable[[HfFolderWriter], object], str]] = [
        (lambda w: w.finish(tiny_qwen3), "2 tensors were never written, e.g. a"),
        (
            lambda w: (w.put("a", torch.ones(2, 2)), w.put("a", torch.ones(2, 2))),
            "a was written already",
        ),
        (lambda w: w.put("c", torch.ones(1)), "c was not announced"),
        (lambda w: w.put("b", torch.ones(4)), r"b: shape \[4\], announced as \[3\]"),
    ]
    for action, words in cases:
        with (
            pytest.raises(CheckpointError, match=words),
            HfFolderWriter(out, INFOS, max_shard_bytes=100) as writer,
        ):
            action(writer)
        assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(CheckpointError, match="exists already"):
        HfFolderWriter(tmp_path / "out", INFOS, max_shard_bytes=100)
    assert (tmp_path / "out" / "mine").read_text() == "keep"


def test_leftovers_of_a_killed_writer_are_removed_but_not_those_of_a_living_one(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom pacs_megatron.checkpoint.staging import "
        "StagedFolder\n"
        "s = StagedFolder(Path(sys.argv[1]))\n(s.path / 'x').write_text('x')\nprint('ready', "
        "flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    (leftover,) = tmp_path.glob("out.partial-*")
    with staging.StagedFolder(tmp_path / "out"):
        assert leftover.exists()
    process.kill()
    process.wait()
    process.stdout.close()
    time.sleep(0.05)
    assert leftover.exists()
    with staging.StagedFolder(tmp_path / "out") as staged:
        assert not leftover.exists()
        staged.commit()
    assert (
        sorted(p.name for p in tmp_path.iterdir()) == ["out"]
        and list((tmp_path / "out").iterdir()) == []
    )


def test_free_disk_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    staging.check_free_disk(tmp_path / "a" / "b", free // 2)
    with pytest.raises(CheckpointError, match=r"needs [\d.]+ GB and .* has [\d.]+ GB free"):
        staging.check_free_disk(tmp_path / "a" / "b", 2 * free)
    assert list(tmp_path.iterdir()) == []


def test_a_link_with_the_name_of_a_leftover_stays(tmp_path: Path) -> None:
    """No lock is written into the folder behind it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "out.partial-1").symlink_to("mine")
    (tmp_path / "out.partial-2").touch()
    with staging.StagedFolder(tmp_path / "out") as staged:
        staged.commit()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine",
        "out",
        "out.partial-1",
        "out.partial-2",
    ]
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("config", "generation", "stops", "expected"),
    [
        (258, {"eos_token_id": [258], "top_k": 9}, (258,), None),
        (258, {"eos_token_id": 258}, (258,), None),
        (258, "no file", (258,), None),
        ([256, 258], "no file", (258, 256), None),
        (258, {"eos_token_id": [256], "top_k": 9}, (256, 258), {"top_k": 9}),
        ([256, 258], {}, (256, 258), {}),
        (258, "no file", (256, 258), {"bos_token_id": 256, "pad_token_id": 256}),
    ],
)
def test_an_export_lists_the_stop_tokens_of_the_run(
    tiny_qwen3: Path,
    tmp_path: Path,
    config: Any,
    generation: Any,
    stops: tuple[int, ...],
    expected: dict[str, Any] | None,
) -> None:
    """`expected` are the other keys of the new generation_config.json; None: it stays as it is."""
    source = tmp_path / "source"
    target = tmp_path / "target"
    target.mkdir()
    shutil.copytree(tiny_qwen3, source)
    model = json.loads((source / "config.json").read_text()) | {"eos_token_id": config}
    (source / "config.json").write_text(json.dumps(model))
    file = source / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation != "no file":
        file.write_text(json.dumps(generation))

    copy_hf_metadata(source, target, dtypes={torch.float32}, stop_token_ids=stops)
    written = target / "generation_config.json"
    if expected is None:
        assert written.exists() == file.exists()
        assert not written.exists() or written.read_bytes() == file.read_bytes()
    else:
        found = json.loads(written.read_text())
        assert found == {**expected, "eos_token_id": sorted(stops)}


def test_hidden_files_of_other_systems_are_no_part_of_a_model(tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model")
    before = metadata_files(model)
    weights = HfFolder(model).names
    for name in ("._config.json", "._model.safetensors", ".nfs000012", ".DS_Store"):
        (model / name).write_bytes(b"\0\5\x16\7")
    assert metadata_files(model) == before
    assert HfFolder(model).names == weights


def test_a_pointer_of_git_lfs_as_weights_is_named(tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model")
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid a\n")
    with pytest.raises(CheckpointError, match=r"pointer of git-lfs.*run `git lfs pull`"):
        HfFolder(model)

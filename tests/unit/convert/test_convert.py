"""HF -> Megatron -> HF is bit-identical for every family; verification finds a flipped bit; faults
leave nothing behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pacs_megatron.checkpoint import staging
from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.manifest import Manifest, read_manifest, write_manifest
from pacs_megatron.checkpoint.megatron_weights import MegatronWeights, find_checkpoint, open_weights
from pacs_megatron.cli import main
from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron, megatron_to_hf
from pacs_megatron.convert.pipeline import IN_FLIGHT_BYTES, Task, run_tasks
from pacs_megatron.convert.verify import verify
from pacs_megatron.errors import CheckpointError, ConfigError, ConversionError, PacsError
from pacs_megatron.models import load_spec, weight_table
from tests.support.tiny_families import CASES, make_family

ROOT = Path(__file__).parents[3]


def to_megatron(hf: Path, out: Path, **changes: object) -> Path:
    hf_to_megatron(str(hf), ConversionOptions(out=out, **changes))  # type: ignore[arg-type]
    return out


def to_hf(checkpoint: Path, out: Path, *, max_shard_bytes: int = 10**9, **changes: object) -> Path:
    options = ConversionOptions(out=out, **changes)  # type: ignore[arg-type]
    megatron_to_hf(checkpoint, options, step=None, max_shard_bytes=max_shard_bytes)
    return out


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Read by safetensors itself."""
    result = {}
    for file in sorted(folder.glob("*.safetensors")):
        for n, t in load_file(file).items():
            result[n] = t
    return result


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and tensor.shape == right[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def converted(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3 as a Megatron checkpoint; read only."""
    return to_megatron(tiny_qwen3, tmp_path_factory.mktemp("converted") / "ckpt")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_identical(
    case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "bfloat16":
        # Some jobs are over the limit of bytes in flight.
        monkeypatch.setattr("pacs_megatron.convert.pipeline.IN_FLIGHT_BYTES", 8000)
    hf = make_family(tmp_path / "hf", case, dtype=dtype)
    checkpoint = to_megatron(hf, tmp_path / "ckpt")
    back = to_hf(checkpoint, tmp_path / "back", max_shard_bytes=20_000)
    assert len(list(back.glob("*.safetensors"))) > 1
    assert_same_bits(tensors_of(back), tensors_of(hf))
    assert load_spec(back) == load_spec(hf)


def test_special_values_survive(tiny_qwen3: Path, tmp_path: Path) -> None:
    hf = shutil.copytree(tiny_qwen3, tmp_path / "hf")
    tensors = load_file(hf / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, :3] = torch.tensor(
        [float("nan"), float("-inf"), -0.0]
    )
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    checkpoint = to_megatron(hf, tmp_path / "ckpt", verify=True)
    assert_same_bits(tensors_of(to_hf(checkpoint, tmp_path / "back", verify=True)), tensors)


def test_cast_on_the_way(tiny_qwen3: Path, tmp_path: Path) -> None:
    checkpoint = to_megatron(tiny_qwen3, tmp_path / "ckpt", dtype="bf16", verify=True)
    expected = {n: t.bfloat16() for n, t in tensors_of(tiny_qwen3).items()}
    back = to_hf(checkpoint, tmp_path / "back")
    assert_same_bits(tensors_of(back), expected)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    wide = to_hf(checkpoint, tmp_path / "wide", dtype="fp32", verify=True)
    assert_same_bits(tensors_of(wide), {n: t.float() for n, t in expected.items()})
    checks = json.loads((checkpoint / "certificate.json").read_text())["checks"]
    assert "cast (float32 against bfloat16)" in checks[-1]["result"]


def test_the_exported_folder_is_complete(converted: Path, tiny_qwen3: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    back = to_hf(converted, tmp_path / "back")
    expected = {p.name for p in tiny_qwen3.iterdir()}
    assert {p.name for p in back.iterdir()} == expected | {"certificate.json"}
    model = AutoModelForCausalLM.from_pretrained(back)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(
            model(tokens).logits, AutoModelForCausalLM.from_pretrained(tiny_qwen3)(tokens).logits
        )
    assert (
        AutoTokenizer.from_pretrained(back).chat_template
        == AutoTokenizer.from_pretrained(tiny_qwen3).chat_template
    )


def test_the_certificate_lists_both_sides(converted: Path, tiny_qwen3: Path) -> None:
    import xxhash

    certificate = json.loads((converted / "certificate.json").read_text())
    table = weight_table(load_spec(tiny_qwen3))
    records = {r["name"]: r for r in certificate["hf"]["tensors"]}
    for name, tensor in tensors_of(tiny_qwen3).items():
        assert records[name]["xxh3_128"] == xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
        assert records[name]["shape"] == list(tensor.shape)
    assert {r["name"] for r in certificate["megatron"]["tensors"]} == set(table.by_megatron)
    assert certificate["hf"]["nbytes"] == sum(t.nbytes for t in tensors_of(tiny_qwen3).values())


def test_a_checkpoint_reads_like_a_folder(converted: Path, tiny_qwen3: Path) -> None:
    weights = open_weights(converted)
    folder = open_weights(tiny_qwen3)
    assert isinstance(weights, MegatronWeights) and isinstance(folder, HfFolder)
    assert set(weights.names) == set(folder.names)
    assert all(torch.equal(weights.get(name), folder.get(name)) for name in folder.names)


# --------------------------------------------------------------------------------------------------
# verification
def test_verify_writes_a_certificate_and_finds_a_flipped_bit(
    converted: Path, tiny_qwen3: Path, tmp_path: Path
) -> None:
    out = tmp_path / "certificate.json"
    summary = verify(str(tiny_qwen3), converted, out, step=None, logits=None)
    assert "equal bit for bit" in summary
    assert [c["name"] for c in json.loads(out.read_text())["checks"]] == [
        "names and shapes",
        "files of the checkpoint",
        "tensors, read back",
    ]
    out.unlink()
    altered = shutil.copytree(tiny_qwen3, tmp_path / "altered")
    tensors = load_file(altered / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"].view(torch.int32)[3, 5] ^= 1
    save_file(tensors, altered / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConversionError, match=r"layers\.1\.self_attn\.k_proj\.weight of .* differs"
    ):
        verify(str(altered), converted, out, step=None, logits=None)
    assert not out.exists()


def test_verify_finds_another_config(converted: Path, tiny_qwen3: Path, tmp_path: Path) -> None:
    """Equal tensors of a model that computes something else."""
    altered = shutil.copytree(tiny_qwen3, tmp_path / "altered")
    config = json.loads((altered / "config.json").read_text())
    (altered / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(
        ConversionError, match=r"altered: config\.json has norm_eps=0\.001, .* has 1e-06"
    ):
        verify(str(altered), converted, tmp_path / "certificate.json", step=None, logits=None)


@pytest.mark.parametrize("existing", ["another file", "a folder", "a pipe"])
def test_a_certificate_replaces_nothing_else(
    existing: str, converted: Path, tiny_qwen3: Path, tmp_path: Path
) -> None:
    out = tmp_path / "certificate.json"
    verify(str(tiny_qwen3), converted, out, step=None, logits=None)
    verify(str(tiny_qwen3), converted, out, step=None, logits=None)  # its own earlier file
    out.unlink()
    if existing == "a pipe":
        os.mkfifo(out)
    elif existing == "a folder":
        out.mkdir()
    else:
        out.write_text('{"model_type": "qwen3"}')
    with pytest.raises(
        ConfigError, match=r"is not an earlier output of this command|is not a regular file"
    ):
        verify(str(tiny_qwen3), converted, out, step=None, logits=None)
    assert [path.name for path in tmp_path.iterdir()] == ["certificate.json"]


def test_verify_finds_an_altered_checkpoint_file(
    converted: Path, tiny_qwen3: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(converted, tmp_path / "ckpt")
    file = max((copy / "dist").glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(PacsError, match=r"distcp was altered"):
        verify(str(tiny_qwen3), copy, tmp_path / "certificate.json", step=None, logits=None)


def test_verification_while_converting_keeps_a_wrong_result_from_its_name(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pacs_megatron.models import Entry

    honest = Entry.to_megatron

    def swapped(self: Entry, tensors: list[torch.Tensor]) -> torch.Tensor:
        return honest(self, tensors[::-1] if len(self.hf_names) == 2 else tensors)

    monkeypatch.setattr(Entry, "to_megatron", swapped)
    with pytest.raises(ConversionError, match=r"gate_proj\.weight .* differs"):
        to_megatron(tiny_qwen3, tmp_path / "ckpt", verify=True)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------
# faults
def _edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def _config(**changes: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


SOURCE_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "row without a tensor": (
        _edit(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        r"lacks model\.layers\.1\.mlp\.up_proj",
    ),
    "tensor without a row": (
        _edit(lambda t: t.update({"model.layers.0.extra": torch.ones(1)})),
        r"model\.layers\.0\.extra, which no row",
    ),
    "wrong shape": (
        _edit(lambda t: t.update({"model.norm.weight": torch.ones(3)})),
        r"model\.norm\.weight is \[3\], expected \[64\]",
    ),
    "mixed dtypes in one row": (
        _edit(
            lambda t: t.update({k: t[k].bfloat16() for k in ["model.layers.0.mlp.up_proj.weight"]})
        ),
        "dtypes differ",
    ),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 5000), "truncated|no whole"),
    "unsupported family": (_config(model_type="gemma3"), "model_type='gemma3'"),
    "a layer more than the weights have": (
        _config(num_hidden_layers=3, layer_types=None),
        r"lacks model\.layers\.2",
    ),
    "marked as tied, but with its own output": (
        _config(tie_word_embeddings=True),
        "lm_head.weight differs",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
}


@pytest.mark.parametrize("fault", SOURCE_FAULTS)
def test_a_bad_source_is_one_line_a_code_and_no_output(
    fault: str,
    tiny_qwen3: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A handler set up here would keep this test's stderr for the whole session.
    monkeypatch.setattr("pacs_megatron.observability.logs.setup_command_logging", lambda: None)
    hf = shutil.copytree(tiny_qwen3, tmp_path / "hf")
    damage, words = SOURCE_FAULTS[fault]
    damage(hf)
    (tmp_path / "work").mkdir()
    code = main(
        ["convert", "to-megatron", "--hf", str(hf), "--out", str(tmp_path / "work" / "ckpt")]
    )
    captured = capsys.readouterr()
    assert code == 1
    error_lines = [line for line in captured.err.splitlines() if "Error: " in line]
    assert len(error_lines) == 1
    assert re.search(words, error_lines[0]), error_lines[0]
    assert captured.out == "" and list((tmp_path / "work").iterdir()) == []


def _drop_key(folder: Path) -> None:
    import pickle

    from pacs_megatron.checkpoint.dist_reader import read_metadata

    metadata = read_metadata(folder / "dist")
    metadata.state_dict_metadata.pop("model.decoder.final_layernorm.weight")
    (folder / "dist" / ".metadata").write_bytes(pickle.dumps(metadata))
    _refresh_manifest(folder)


def _refresh_manifest(folder: Path) -> None:
    from pacs_megatron.checkpoint.manifest import digest_file

    manifest = read_manifest(folder)
    write_manifest(
        folder,
        Manifest(step=manifest.step, files={n: digest_file(folder / n) for n in manifest.files}),
    )


def _deeper_config(folder: Path) -> None:
    _config(num_hidden_layers=1, layer_types=None)(folder / "hf")
    _refresh_manifest(folder)


def _wider_config(folder: Path) -> None:
    _config(intermediate_size=160)(folder / "hf")
    _refresh_manifest(folder)


CHECKPOINT_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "no complete checkpoint"),
    "file missing": (lambda f: (f / "dist" / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
    "file truncated": (
        lambda f: os.truncate(f / "dist" / "__0_0.distcp", 10),
        "truncated or altered",
    ),
    "key without a row": (_deeper_config, r"contains model\.decoder\.layers\.1\..*which no row"),
    "row without a key": (_drop_key, r"lacks model\.decoder\.final_layernorm\.weight"),
    "wrong shape": (_wider_config, r"linear_fc1\.weight is \[256, 64\], expected \[320, 64\]"),
}


@pytest.mark.parametrize("fault", CHECKPOINT_FAULTS)
def test_a_bad_checkpoint_is_one_line_and_no_output(
    fault: str, converted: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(converted, tmp_path / "ckpt")
    damage, words = CHECKPOINT_FAULTS[fault]
    damage(copy)
    with pytest.raises(PacsError, match=words) as caught:
        to_hf(copy, tmp_path / "back")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "name", ["dist/__0_0.distcp", "dist/common.pt", "dist/.metadata", "hf/tokenizer.json"]
)
def test_a_flipped_bit_is_rejected_and_no_verify_is_recorded(
    name: str, converted: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(converted, tmp_path / "ckpt")
    flip_a_bit(copy / name)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} was altered"):
        to_hf(copy, tmp_path / "back")
    with pytest.raises(CheckpointError, match="was altered"):
        MegatronWeights(copy)
    if name.startswith("hf/"):
        exported = to_hf(copy, tmp_path / "back", verify_source=False)
        checks = json.loads((exported / "certificate.json").read_text())["checks"]
        assert {"name": "files of the checkpoint", "result": "not verified (--no-verify)"} in checks


def test_an_existing_output_and_a_full_disk(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckpt").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        to_megatron(tiny_qwen3, tmp_path / "ckpt")
    monkeypatch.setattr(
        staging.shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(100, 90, 10)
    )  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"GB free; free some"):
        to_megatron(tiny_qwen3, tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_a_redundant_copy_of_tied_embeddings_is_left_out(
    tiny_qwen3_tied: Path, tmp_path: Path
) -> None:
    hf = shutil.copytree(tiny_qwen3_tied, tmp_path / "hf")
    _edit(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(hf)
    _edit(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))(hf)
    checkpoint = to_megatron(hf, tmp_path / "ckpt", verify=True)
    left_out = json.loads((checkpoint / "certificate.json").read_text())["left_out"]
    assert left_out == ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert_same_bits(tensors_of(to_hf(checkpoint, tmp_path / "back")), tensors_of(tiny_qwen3_tied))


def test_finding_a_step_of_a_run(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        folder = shutil.copytree(converted, tmp_path / "checkpoints" / f"step_{step:06d}")
        write_manifest(folder, Manifest(step=step, files=read_manifest(folder).files))
    unfinished = tmp_path / "checkpoints" / "step_000030"
    unfinished.mkdir()
    assert find_checkpoint(tmp_path, None).name == "step_000020"
    assert find_checkpoint(tmp_path / "checkpoints", 10).name == "step_000010"
    with pytest.raises(CheckpointError, match="no checkpoint of step 30; there are 10, 20"):
        find_checkpoint(tmp_path, 30)
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert find_checkpoint(".", None).name == "step_000020"
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    assert find_checkpoint(tmp_path / "link", None).name == "step_000020"
    (tmp_path / "checkpoints" / "step_000020").rename(tmp_path / "checkpoints" / "best")
    assert find_checkpoint(tmp_path, 20).name == "best"
    with pytest.raises(CheckpointError, match="checkpoint of step 10, not of step 20"):
        find_checkpoint(tmp_path / "checkpoints" / "step_000010", 20)


# --------------------------------------------------------------------------------------------------
# pipeline
def test_an_error_of_a_worker_stops_the_rest_and_travels() -> None:
    started: list[int] = []

    def job(number: int) -> None:
        started.append(number)
        if number == 3:
            raise ConversionError("number 3")
        time.sleep(0.01)

    with pytest.raises(ConversionError, match="number 3"):
        run_tasks("test", [Task(1, lambda n=n: job(n)) for n in range(200)], workers=2)  # type: ignore[misc]
    assert len(started) < 20


def test_bytes_in_flight_are_bounded_and_one_large_job_runs_beside_them() -> None:
    mutex = threading.Lock()
    now: list[int] = []
    peak = 0
    most_large = 0
    overlapped = False

    def job(size: int) -> None:
        nonlocal peak, most_large, overlapped
        with mutex:
            now.append(size)
            large = [s for s in now if s > IN_FLIGHT_BYTES]
            peak = max(peak, sum(now) - sum(large))
            most_large = max(most_large, len(large))
            overlapped |= bool(large) and len(now) > 1
        time.sleep(0.005)
        with mutex:
            now.remove(size)

    sizes = [
        IN_FLIGHT_BYTES // 3,
        IN_FLIGHT_BYTES // 2,
        2 * IN_FLIGHT_BYTES,
        IN_FLIGHT_BYTES // 4,
    ] * 5
    run_tasks("test", [Task(size, lambda s=size: job(s)) for size in sizes], workers=4)  # type: ignore[misc]
    assert not now and peak <= IN_FLIGHT_BYTES and most_large == 1 and overlapped


# --------------------------------------------------------------------------------------------------
# interrupts
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGKILL]
)
def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(
    number: signal.Signals, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """The real command, held in the middle by a slow tensor.

    After SIGKILL the next run cleans up.
    """
    out = tmp_path / "ckpt"
    slow = (
        "import os, sys, time\nfrom pacs_megatron.checkpoint import dist_writer\nhonest = "
        "dist_writer.DistWriter.put\n"
        "def put(self, piece):\n    honest(self, piece)\n    os.write(1, b'piece\\n')\n    "
        "time.sleep(0.3)\n"
        "dist_writer.DistWriter.put = put\nfrom pacs_megatron.cli import main\n"
        "sys.exit(main(['convert', 'to-megatron', *sys.argv[1:]]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "--hf", str(tiny_qwen3), "--out", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"piece\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    expected = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
    assert process.returncode == expected[number], errors.decode()
    assert not out.exists()
    assert bool(list(tmp_path.iterdir())) == (number == signal.SIGKILL)
    to_megatron(tiny_qwen3, out)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    MegatronWeights(out)

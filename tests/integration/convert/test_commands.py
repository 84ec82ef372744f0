"""The three commands as a person runs them; the example; memory that does not grow with the model;
the benchmark.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.conversion import run_measured
from pacs_megatron.checkpoint.megatron_weights import find_checkpoint
from pacs_megatron.convert.logits import LogitsOptions, compare_logits
from pacs_megatron.errors import ConversionError
from tests.support.hub import serve
from tests.support.messages import error_lines
from tests.support.tiny_families import make_family
from tests.support.tiny_models import make_tiny_qwen3

ROOT = Path(__file__).parents[3]


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if check and done.returncode:
        pytest.fail(f"{command} exited with {done.returncode}:\n{done.stderr}")
    return done


@pytest.mark.full
def test_the_example_converts_both_ways_and_compares_logits(tmp_path: Path) -> None:
    hf = make_tiny_qwen3(tmp_path / "model", num_hidden_layers=4)
    done = subprocess.run(
        [
            str(ROOT / "examples" / "convert_checkpoint.sh"),
            str(hf),
            str(tmp_path / "work"),
            "2",
            "1",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,  # from anywhere
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("equal" in line for line in lines)
    certificate = json.loads((tmp_path / "work" / "certificate.json").read_text())
    assert 0 < certificate["logits"]["max_abs_difference"] <= 2e-5
    assert (certificate["logits"]["tp"], certificate["logits"]["dtype"]) == (2, "fp32")
    assert certificate["logits"]["num_tokens"] > 100


@pytest.mark.full
def test_logits_find_a_wrong_architecture(tmp_path: Path) -> None:
    """All tensors are equal, but transformers computes something else, as if this project read
    config.json wrongly.
    """
    hf = make_tiny_qwen3(tmp_path / "model")
    command = [
        sys.executable,
        "conversion/hf_to_megatron.py",
        "--hf",
        str(hf),
        "--out",
        str(tmp_path / "ckpt"),
    ]
    run(*command)
    path = hf / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    path.write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="differ from transformers"):
        compare_logits(hf, find_checkpoint(tmp_path / "ckpt", None), LogitsOptions())


def test_the_same_as_verbs_of_the_command_line(tmp_path: Path) -> None:
    hf = make_family(tmp_path / "model", "qwen2-tied-mqa")
    program = [sys.executable, "-m", "pacs_megatron", "convert"]
    run(
        *program, "to-megatron", "--hf", str(hf), "--out", str(tmp_path / "ckpt"), "--dtype", "bf16"
    )
    done = run(
        *program,
        "to-hf",
        "--checkpoint",
        str(tmp_path / "ckpt"),
        "--out",
        str(tmp_path / "back"),
        "--verify",
    )
    assert "read back and equal bit for bit" in done.stdout
    refused = run(
        *program, "to-hf", "--checkpoint", str(hf), "--out", str(tmp_path / "other"), check=False
    )
    assert refused.returncode == 1
    [line] = error_lines(refused.stderr)
    assert line.startswith("CheckpointError: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "ckpt", "model"]


@pytest.mark.full
def test_a_hub_id_is_downloaded_and_what_is_no_id_is_rejected(tmp_path: Path) -> None:
    """By the hub's real client, from a loopback hub; no pickled weights and no code come along."""
    hf = make_tiny_qwen3(tmp_path / "model")
    (hf / "pytorch_model.bin").write_bytes(b"pickled")
    (hf / "modeling.py").write_text("raise SystemExit\n")
    program = [sys.executable, str(ROOT / "conversion" / "hf_to_megatron.py")]
    with serve({"tiny/qwen3": hf}, {}) as hub:
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }
        for hub_id, out in (("tiny/qwen3", "ckpt"), ("tiny/absent", "other")):
            done = subprocess.run(
                [*program, "--hf", hub_id, "--out", str(tmp_path / out)],
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
                env=environment,
            )
            assert (tmp_path / out).exists() == (out == "ckpt"), done.stderr
            assert (done.returncode == 0) == (out == "ckpt")
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    assert (
        len(errors) == 1
        and errors[0].startswith("CheckpointError: --hf=tiny/absent")
        and "Traceback" not in done.stderr
    )
    assert not {"pytorch_model.bin", "modeling.py"} & set(hub.downloads)
    run(
        *program[:1],
        "conversion/megatron_to_hf.py",
        "--checkpoint",
        str(tmp_path / "ckpt"),
        "--out",
        str(tmp_path / "back"),
    )
    back, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", hf))
    assert back.keys() == original.keys() and all(
        torch.equal(back[name], original[name]) for name in original
    )
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (
        hf / "tokenizer.json"
    ).read_bytes()


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Ten times the layers, the same peak of anonymous memory, both ways, with little allowed in
    flight.
    """
    code = (
        "import sys\nfrom pacs_megatron.convert import pipeline\npipeline.IN_FLIGHT_BYTES = 4 << "
        "20\n"
        "from pacs_megatron.cli import main\nsys.exit(main(['convert', *sys.argv[1:]]))"
    )
    peaks: dict[str, list[int]] = {"to-megatron": [], "to-hf": []}
    for num_layers in (3, 30):
        hf, checkpoint, back = (tmp_path / f"{name}{num_layers}" for name in ("hf", "ckpt", "back"))
        _large_model(hf, num_layers)
        steps = {
            "to-megatron": ["--hf", str(hf), "--out", str(checkpoint)],
            "to-hf": ["--checkpoint", str(checkpoint), "--out", str(back)],
        }
        for verb, arguments in steps.items():
            _, peak = run_measured([sys.executable, "-c", code, verb, *arguments])
            peaks[verb].append(peak)
        size = (hf / "model.safetensors").stat().st_size
        for folder in (hf, checkpoint, back):
            shutil.rmtree(folder)
    assert size > 200 << 20
    for verb, (small, large) in peaks.items():
        assert small > 50 << 20, verb  # it was measured
        assert large - small < 60 << 20, (verb, small, large)


def _large_model(folder: Path, num_layers: int) -> None:
    from pacs_megatron.checkpoint.hf_folder import HfFolderWriter, hf_tensors
    from pacs_megatron.models import read_spec, weight_table
    from tests.support.tiny_families import config_of

    shape = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "head_dim": 64,
        "num_attention_heads": 8,
    }
    config = config_of("qwen3", shape | {"num_hidden_layers": num_layers})
    source = folder.with_name(f"{folder.name}-config")
    config.save_pretrained(source)
    infos = hf_tensors(weight_table(read_spec(config.to_dict())).entries, torch.bfloat16)
    with HfFolderWriter(folder, infos, max_shard_bytes=10**10) as writer:
        for info in infos:
            writer.put(info.name, torch.full(info.shape, 0.5, dtype=torch.bfloat16))
        writer.finish(source)
    shutil.rmtree(source)


@pytest.mark.full
def test_the_benchmark_runs_and_checks_the_round_trip(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    work = tmp_path / "work"
    done = run(
        sys.executable,
        "benchmarks/conversion.py",
        "--shape",
        "tiny",
        "--work",
        str(work),
        "--json",
        str(out),
    )
    result = json.loads(out.read_text())
    assert result["identical_after_round_trip"] is True and len(result["stages"]) == 4
    assert all(
        s["peak_anonymous_bytes"] > 10 << 20
        for s in result["stages"]
        if not s["name"].startswith("cp")
    )
    assert "| HF -> Megatron |" in done.stdout
    assert not work.exists()

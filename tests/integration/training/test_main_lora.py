"""A run that trains adapters, as a user starts it: stopped, resumed, exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.policies.lora_trainer import LoraTrainer
from tests.support.policies.plain_trainer import PlainTrainer
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

OVERRIDES = (
    "policy.lora={rank: 4, alpha: 8, targets: [q_proj, v_proj, o_proj, up_proj, down_proj]}",
    "objective.reference=frozen",
    "objective.reset_every=2",
    "optimizer.lr=1e-2",
    "checkpoint.every=1",
)


def pacs(*arguments: str) -> tuple[int, str]:
    """Exit code and the lines of stderr of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "pacs_megatron", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    return done.returncode, done.stderr


def train(config: Path, *overrides: str) -> tuple[int, str]:
    return pacs("train", str(config), *OVERRIDES, *overrides)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_a_run_resumes_exports_and_rejects_another_model(tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model", tied=True, vocab_size=262)
    config = write_tiny_run(tmp_path, model)
    run = tmp_path / "runs" / "tiny"
    assert train(config, "run.steps=1")[0] == 0
    # Two data-parallel ranks in the place of two tensor-parallel ones, after a reset.
    code, text = train(config, "run.steps=3", "parallel.tp=1", "run.nproc=2")
    assert code == 0, text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]

    # The export of a checkpoint has the bits of the run's own export.
    code, text = pacs("export", str(run), "--out", str(tmp_path / "export"))
    assert code == 0, text
    merged = tensors_of(run / "hf")
    for name, tensor in tensors_of(tmp_path / "export").items():
        assert torch.equal(tensor, merged[name]), name
    adapters = tensors_of(run / "adapters")
    for name, tensor in tensors_of(tmp_path / "export_adapters").items():
        assert torch.equal(tensor, adapters[name]), name
    assert all(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)

    # The merged model computes what the frozen model with its adapters does.
    ids = torch.arange(3, 40)[None]
    by_hand = LoraTrainer(
        model, {name: tensor.numpy() for name, tensor in adapters.items()}, rank=4, alpha=8
    )
    whole = PlainTrainer(run / "hf", dtype=torch.float64)
    with torch.no_grad():
        difference = by_hand.model(ids).logits - whole.model(ids).logits
    assert difference.abs().max() < 1e-4

    # A folder of PEFT starts another run, which the run's adapters continue.
    code, text = train(
        config, "run.name=second", "run.steps=1", f"policy.lora.path={run / 'adapters'}"
    )
    assert code == 0, text
    first = tmp_path / "runs" / "second" / "checkpoints"
    assert sorted(path.name for path in first.iterdir()) == ["step_000001"]

    # Other settings, and another model at the same path, are errors of one line.
    code, text = train(config, "run.steps=4", "policy.lora.alpha=9")
    assert code == 1
    assert "was trained with policy.lora.alpha=8.0, got 9.0" in text.splitlines()[-1]
    code, text = train(config, "run.steps=4", "policy.lora=null")
    assert code == 1
    assert "has adapters, which policy.lora of this run contradicts" in text.splitlines()[-1]

    file = model / "model.safetensors"
    changed = load_file(file)
    changed["model.norm.weight"][0] += 1e-3
    save_file(changed, file, metadata={"format": "pt"})
    code, text = train(config, "run.steps=4")
    assert code == 1
    assert "has adapters of other frozen weights than model.path=" in text.splitlines()[-1]
    code, text = pacs("export", str(run), "--out", str(tmp_path / "other"))
    assert code == 1
    assert "has adapters of other weights than those in" in text.splitlines()[-1]
    assert not (tmp_path / "other").exists()

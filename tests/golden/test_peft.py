"""Adapters that PEFT 0.21 has made, trained and saved (tests/golden/make_peft_golden.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pacs_megatron.checkpoint.adapters import read_peft, write_peft
from pacs_megatron.config.schema import LoraOptions
from pacs_megatron.errors import CheckpointError
from pacs_megatron.models import load_spec, weight_table
from pacs_megatron.models.lora import fused_up, merged, peft_config
from tests.support.policies.lora_trainer import PEFT_CASE, LoraTrainer, nll, peft_base

FOLDER = Path(__file__).with_name("peft_adapters")
OPTIONS = LoraOptions(**PEFT_CASE)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_base(tmp_path_factory.mktemp("base"))


def test_lora_by_hand_trains_as_peft(base: Path) -> None:
    """The reference of tests/distributed/policy/test_lora.py, in float64."""
    start = load_file(FOLDER / "start" / "adapter_model.safetensors")
    matrices = {name: tensor.numpy() for name, tensor in start.items()}
    trainer = LoraTrainer(base, matrices, rank=OPTIONS.rank, alpha=OPTIONS.alpha)
    optimizer = torch.optim.AdamW(trainer.matrices.values(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    losses = []
    for seed in range(3):
        optimizer.zero_grad()
        loss = nll(trainer.model, seed)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss))

    found = load_file(FOLDER / "found.safetensors")
    np.testing.assert_allclose(losses, found["losses"].numpy(), rtol=1e-12)
    trained = load_file(FOLDER / "trained" / "adapter_model.safetensors")
    assert set(trained) == set(trainer.matrices)
    for name, values in trainer.adapters().items():
        np.testing.assert_allclose(values, trained[name].numpy(), rtol=0, atol=1e-12)
        assert np.abs(values - matrices[name]).max() > 1e-3, "not trained by PEFT"


def test_the_files_are_read_and_written_bit_for_bit(base: Path, tmp_path: Path) -> None:
    table = weight_table(load_spec(base))
    source = FOLDER / "start"
    with pytest.raises(CheckpointError, match=r"is torch\.float64"):
        read_peft(source, table, OPTIONS)

    narrow = {
        name: tensor.float()
        for name, tensor in load_file(source / "adapter_model.safetensors").items()
    }
    config = json.loads((source / "adapter_config.json").read_text())
    write_peft(tmp_path / "first", narrow, config)
    read = read_peft(tmp_path / "first", table, OPTIONS)
    written = write_peft(tmp_path / "second", read, peft_config(table.spec, OPTIONS, "BASE"))
    first = (tmp_path / "first" / "adapter_model.safetensors").read_bytes()
    assert (written / "adapter_model.safetensors").read_bytes() == first
    for name, tensor in narrow.items():
        assert torch.equal(read[name], tensor)


def test_a_file_has_the_bytes_of_peft(base: Path, tmp_path: Path) -> None:
    """Names, order, header and values."""
    source = FOLDER / "start"
    tensors = load_file(source / "adapter_model.safetensors")
    config = peft_config(load_spec(base), OPTIONS, "BASE")
    written = write_peft(tmp_path / "adapters", dict(reversed(tensors.items())), config)
    name = "adapter_model.safetensors"
    assert (written / name).read_bytes() == (source / name).read_bytes()

    of_peft = json.loads((source / "adapter_config.json").read_text())
    ours = json.loads((written / "adapter_config.json").read_text())
    for key, value in ours.items():
        if key == "target_modules":
            assert set(value) == set(of_peft[key])
        else:
            assert value == of_peft[key], key


def test_the_merged_weight_is_that_of_peft(base: Path) -> None:
    trained = load_file(FOLDER / "trained" / "adapter_model.safetensors")
    table = weight_table(load_spec(base))
    frozen = load_file(base / "model.safetensors")
    entry = table.by_hf["model.layers.1.mlp.up_proj.weight"]
    prefixes = [f"base_model.model.{name.removesuffix('.weight')}" for name in entry.hf_names]
    ups = {
        name: trained[f"{prefix}.lora_B.weight"]
        for name, prefix in zip(entry.hf_names, prefixes, strict=True)
    }
    down = torch.cat([trained[f"{prefix}.lora_A.weight"] for prefix in prefixes])
    full = entry.to_megatron([frozen[name].double() for name in entry.hf_names])
    whole = merged(full, fused_up(entry, ups, entry.sizes), down, OPTIONS.alpha / OPTIONS.rank)
    _, up_proj = entry.to_hf(whole)
    expected = load_file(FOLDER / "found.safetensors")["merged.model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(up_proj, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"r": 4}, "r is 4, expected 2"),
        ({"lora_alpha": 16}, "lora_alpha is 16, expected 3"),
        ({"use_rslora": True}, "use_rslora is True, expected False"),
        ({"target_modules": ["q_proj"]}, "target_modules is"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ],
)
def test_other_adapters_are_rejected(
    base: Path, tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    config = json.loads((FOLDER / "start" / "adapter_config.json").read_text())
    tensors = {
        name: tensor.float()
        for name, tensor in load_file(FOLDER / "start" / "adapter_model.safetensors").items()
    }
    folder = write_peft(tmp_path / "adapters", tensors, {**config, **change})
    with pytest.raises(CheckpointError) as caught:
        read_peft(folder, weight_table(load_spec(base)), OPTIONS)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_matrix_is_named(base: Path, tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "start" / "adapter_model.safetensors")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    lost = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    del tensors[lost]
    config = json.loads((FOLDER / "start" / "adapter_config.json").read_text())
    folder = write_peft(tmp_path / "adapters", tensors, config)
    with pytest.raises(CheckpointError, match=f"{lost} is missing"):
        read_peft(folder, weight_table(load_spec(base)), OPTIONS)

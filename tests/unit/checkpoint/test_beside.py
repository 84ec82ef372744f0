"""Vision towers and MTP layers are kept beside a checkpoint and written back unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pacs_megatron.checkpoint.beside import Beside
from pacs_megatron.checkpoint.hf_folder import HfFolder
from pacs_megatron.checkpoint.megatron_weights import MegatronWeights
from pacs_megatron.convert.convert import ConversionOptions, hf_to_megatron, megatron_to_hf
from pacs_megatron.errors import CheckpointError, ConversionError
from pacs_megatron.models import load_spec
from tests.support.tiny_families import WITH_VISION, make_family, make_with_vision


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        same = found[name].contiguous().view(torch.uint8)
        assert torch.equal(same, tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("max_shard_bytes", [10**9, 30_000])
@pytest.mark.parametrize("case", WITH_VISION)
def test_a_model_with_a_vision_tower_comes_back_bit_for_bit(
    case: str, max_shard_bytes: int, tmp_path: Path
) -> None:
    hf = make_with_vision(tmp_path / "hf", case)
    expected = tensors_of(hf)
    others = [name for name in expected if "visual" in name or "mtp" in name]
    assert load_spec(hf).hf_prefix == "model.language_model."

    checkpoint = tmp_path / "ckpt"
    line = hf_to_megatron(str(hf), ConversionOptions(out=checkpoint, verify=True))
    assert line.endswith(
        f"; {len(others)} tensors of a vision tower or MTP layers (0.000 GB) are kept beside, "
        "unchanged and untrained"
    )
    MegatronWeights(checkpoint)  # every digest matches

    back = tmp_path / "back"
    options = ConversionOptions(out=back, verify=True)
    line = megatron_to_hf(checkpoint, options, step=None, max_shard_bytes=max_shard_bytes)
    assert "kept beside" in line
    assert_same_bits(tensors_of(back), expected)
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (hf / "config.json").read_text()
    )


def test_experts_of_a_layer_in_one_tensor_are_read_as_those_of_each(tmp_path: Path) -> None:
    """Published checkpoints have one tensor, transformers saves one a matrix and loads both."""
    hf = make_with_vision(tmp_path / "hf", "qwen3_5_moe", all_experts=True)
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors_of(hf)
    expected = tensors_of(make_with_vision(tmp_path / "by_expert", "qwen3_5_moe"))

    folder = HfFolder(hf)
    assert set(folder.names) == expected.keys()
    for name in folder.names:
        assert folder.info(name).shape == expected[name].shape, name
    checkpoint = tmp_path / "ckpt"
    hf_to_megatron(str(hf), ConversionOptions(out=checkpoint, verify=True))
    back = tmp_path / "back"
    megatron_to_hf(checkpoint, ConversionOptions(out=back, verify=True), step=None)
    assert_same_bits(tensors_of(back), expected)


def test_experts_in_both_forms_are_rejected(tmp_path: Path) -> None:
    hf = make_with_vision(tmp_path / "hf", "qwen3_5_moe", all_experts=True)
    file = hf / "model.safetensors"
    added = {"model.language_model.layers.0.mlp.experts.1.up_proj.weight": torch.zeros(24, 32)}
    save_file(load_file(file) | added, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has both .*gate_up_proj and .*experts\.1\.up_proj"):
        HfFolder(hf)


def test_a_cast_changes_the_model_only(tmp_path: Path) -> None:
    hf = make_with_vision(tmp_path / "hf", "qwen3_5")
    checkpoint = tmp_path / "ckpt"
    hf_to_megatron(str(hf), ConversionOptions(out=checkpoint, dtype="bf16"))
    back = tmp_path / "back"
    megatron_to_hf(checkpoint, ConversionOptions(out=back), step=None)
    expected = tensors_of(hf)
    found = tensors_of(back)
    for name, tensor in expected.items():
        if "visual" in name or "mtp" in name:
            assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor), name
        else:
            assert torch.equal(found[name], tensor.bfloat16()), name
    config = json.loads((back / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "dtype" not in config["text_config"]


def test_other_tensors_are_rejected_as_before(tmp_path: Path) -> None:
    hf = make_family(tmp_path / "hf", "qwen3")
    file = hf / "model.safetensors"
    added = {"mtp.fc.weight": torch.zeros(2, 2)}
    save_file(load_file(file) | added, file, {"format": "pt"})
    with pytest.raises(ConversionError, match=r"contains mtp\.fc\.weight"):
        hf_to_megatron(str(hf), ConversionOptions(out=tmp_path / "ckpt"))
    assert Beside(hf).infos == []


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_a_language_model_with_names_beside_a_vision_tower_is_rejected(
    tmp_path: Path, case: str
) -> None:
    """transformers writes such a folder from a published model; the error's advice helps."""
    from transformers import AutoModelForCausalLM

    published = make_with_vision(tmp_path / "published", case)
    model = AutoModelForCausalLM.from_pretrained(published)
    model.save_pretrained(tmp_path / "text")
    with pytest.raises(
        ConversionError,
        match=r"contains model\.language_model\..* config\.json is of the language model alone .*"
        r"save_original_format=False",
    ):
        hf_to_megatron(str(tmp_path / "text"), ConversionOptions(out=tmp_path / "none"))

    model.save_pretrained(tmp_path / "plain", save_original_format=False)
    checkpoint = tmp_path / "ckpt"
    hf_to_megatron(str(tmp_path / "plain"), ConversionOptions(out=checkpoint, verify=True))
    assert MegatronWeights(checkpoint).table.spec.hf_prefix == "model."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config=None, expected an object"),
        ({"text_config": {"model_type": "llama"}}, "in text_config='llama', expected 'qwen3_5"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True, expected False as in text"),
        ({"architectures": ["Qwen9ForCausalLM"]}, r"architectures=\['Qwen9ForCausalLM'\]"),
        ({"architectures": "Qwen3_5ForCausalLM"}, "expected a list of class names"),
    ],
)
def test_a_config_that_contradicts_itself_is_rejected(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    hf = make_with_vision(tmp_path / "hf", "qwen3_5")
    path = hf / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConversionError, match=message):
        load_spec(hf)

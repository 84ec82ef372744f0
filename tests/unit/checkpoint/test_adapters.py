"""Facts of adapters in a checkpoint: what a run may continue from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacs_megatron.checkpoint.adapters import LORA_FILE, LoraFacts, check_facts, combined_digest
from pacs_megatron.errors import CheckpointError

FACTS = LoraFacts(
    rank=8, alpha=16.0, targets=("q_proj", "v_proj"), base="models/a", base_digest="0" * 32
)


def test_equal_facts_and_none_continue(tmp_path: Path) -> None:
    check_facts(None, None, tmp_path)
    FACTS.write(tmp_path)
    check_facts(LoraFacts.read(tmp_path), FACTS, tmp_path)
    # A moved base with the same tensors is the same base.
    check_facts(FACTS, replace(FACTS, base="elsewhere"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rank": 4}, r"policy\.lora\.rank=8, got 4; set it back"),
        ({"alpha": 8.0}, r"policy\.lora\.alpha=16.*, got 8"),
        ({"targets": ("q_proj",)}, r"policy\.lora\.targets=.*v_proj.*, got"),
        ({"base_digest": "f" * 32}, r"other frozen weights .* 000000000000, got ffffffffffff"),
    ],
)
def test_other_facts_are_one_line(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=expected) as error:
        check_facts(FACTS, replace(FACTS, **changes), tmp_path)
    assert "\n" not in str(error.value)


def test_adapters_and_all_weights_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has all weights, .*; remove policy\.lora"):
        check_facts(None, FACTS, tmp_path)
    with pytest.raises(CheckpointError, match=r"has adapters, .*; set policy\.lora"):
        check_facts(FACTS, None, tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"rank": 8}', "[]", '{"rank": 8, "targets": 1}'])
def test_a_malformed_file_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / LORA_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=LORA_FILE) as error:
        LoraFacts.read(tmp_path)
    assert "\n" not in str(error.value)


def test_the_digest_of_a_model_does_not_depend_on_the_order() -> None:
    names = {"a": "1", "b": "2"}
    assert combined_digest(names) == combined_digest({"b": "2", "a": "1"})
    assert combined_digest(names) != combined_digest({"a": "2", "b": "1"})

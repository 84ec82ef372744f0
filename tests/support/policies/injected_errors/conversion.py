"""Errors in export and conversion: weight table, types, metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.policies.injected_errors.injection import InjectedError

TABLE = "pacs_megatron.models.table"
HF_FOLDER = "pacs_megatron.checkpoint.hf_folder"


def _reversed(original: Any, *args: Any) -> Any:
    return original(*args)[::-1]


def _exchanged_key_and_value(original: Any, self: Any, tensors: Any, dims: Any) -> Any:
    query, key, value = tensors
    return original(self, [query, value, key], dims)


def _reversed_query_heads(original: Any, self: Any, *args: Any) -> Any:
    query, key, value = original(self, *args)
    return query.flip(0), key, value


def _reversed_experts(original: Any, self: Any, tensor: Any) -> Any:
    return tuple(part.flip(0) for part in original(self, tensor))


def _rounded(original: Any, self: Any, name: str, tensor: Any, *args: Any) -> Any:
    return original(self, name, tensor.bfloat16().to(tensor.dtype), *args)


def _other_epsilon(original: Any, source: Path, target: Path, **options: Any) -> None:
    original(source, target, **options)
    file = target / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"rms_norm_eps": 10 * content["rms_norm_eps"]}))


CONVERSION_ERRORS: dict[str, InjectedError] = {
    "gate and up are swapped": InjectedError(target=f"{TABLE}.Concat.to_hf", change=_reversed),
    "key and value are swapped": InjectedError(
        target=f"{TABLE}.Qkv.to_megatron", change=_exchanged_key_and_value
    ),
    "query heads of the conversion in the other order": InjectedError(
        target=f"{TABLE}.Qkv.to_hf", change=_reversed_query_heads
    ),
    "experts in the other order": InjectedError(
        target="pacs_megatron.convert.convert.Entry.to_hf",
        change=_reversed_experts,
        family="qwen3_moe",
    ),
    "the export rounds": InjectedError(target=f"{HF_FOLDER}.HfFolderWriter.put", change=_rounded),
    "the converted config.json has another epsilon": InjectedError(
        target=f"{HF_FOLDER}.copy_hf_metadata", change=_other_epsilon
    ),
}

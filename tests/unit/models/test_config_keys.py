"""The three tables of config.json's keys, against the config classes and the model code of the
installed transformers.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import cache_utils, masking_utils, modeling_layers, modeling_rope_utils

from pacs_megatron.errors import ConversionError
from pacs_megatron.models import read_spec
from pacs_megatron.models.config_keys import (
    DEFAULTS,
    NEUTRAL_ROPE_KEYS,
    OPTIONAL_ROPE_KEYS,
    ROPE_KEYS,
    USED,
    USED_IN,
    keys_without_effect,
    rejected_keys,
)
from pacs_megatron.models.families import FAMILIES
from tests.support.tiny_families import CASES, EXPERTS, LLAMA3_ROPE, YARN_ROPE, config_of

CASE_OF = {
    "mistral": "mistral",
    "llama": "llama-tied-mha",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
_READS = re.compile(r"(?<![\w.])(?:self\.)?config\.([a-z]\w*)")
_MAY_READ = re.compile(r"getattr\((?:self\.)?config, \"([a-z]\w*)\"")
_TAKES = re.compile(r"kwargs\.(?:pop|get)\(\"([a-z]\w*)\"")
_METHODS = {"get_text_config", "standardize_rope_params", "validate_rope"}
NO_KEYS = {
    # of `GenericForTokenClassification`'s base and of caches: set by the library, not by a file
    "per_layer_attributes",
    "is_heterogeneous",
}
OTHER = {
    "initializer_range": 0.5,
    "use_cache": False,
    "pad_token_id": 3,
    "bos_token_id": 5,
    "eos_token_id": 7,
    "pretraining_tp": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "output_hidden_states": True,
    "output_attentions": True,
    "return_dict": True,
    "chunk_size_feed_forward": 8,
    "gradient_checkpointing": True,
    "attn_implementation": "eager",
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0},
    "num_labels": 3,
    "problem_type": "regression",
    "classifier_dropout": 0.5,
    "hidden_dropout": 0.5,
    "name_or_path": "somewhere",
    "transformers_version": "4.0.0",
    "attention_bias": True,
}
"""Key without effect -> another value"""
NOT_TRIED = {"experts_implementation", "distributed_config"}
"""Names of kernels and placements, which a host has or has not"""


def config_class(family: str) -> Any:
    return type(config_of(family, EXPERTS if family == "qwen3_moe" else {}))


def tiny(family: str) -> dict[str, Any]:
    """config.json of a tiny model, as transformers writes it."""
    own_family, changes = CASES[CASE_OF[family]]
    assert own_family == family
    return dict(config_of(family, changes).to_dict())


def fields(family: str) -> set[str]:
    """The fields of a config class."""
    kind = config_class(family)
    names = {field.name for field in dataclasses.fields(kind)}
    names |= kind.attribute_map.keys() | set(kind.attribute_map.values()) | kind().to_dict().keys()
    return {name for name in names if not name.startswith("_")}


def read_keys(family: str) -> set[str]:
    """The keys that code of transformers reads from a config of the family."""
    name = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    base = transformers.PreTrainedConfig
    sources = [
        inspect.getsource(module),
        inspect.getsource(modeling_layers.GenericForTokenClassification),
    ]
    names: set[str] = set()
    for source in sources:
        names |= set(_READS.findall(source))
    generic = (masking_utils, cache_utils, modeling_layers.GenericForTokenClassification)
    for source in (*sources, *map(inspect.getsource, generic)):
        names |= set(_MAY_READ.findall(source))
    for function in (base.__post_init__, base.convert_rope_params_to_dict):
        names |= set(_TAKES.findall(inspect.getsource(function)))
    return names - _METHODS - NO_KEYS - other_keys(family)


def other_keys(family: str) -> set[str]:
    """The keys of the vision tower, and of the config that has it beside that of the text."""
    if not family.startswith("qwen3_5"):
        return set()
    names: set[str] = set()
    for kind in (transformers.Qwen3_5VisionConfig, transformers.Qwen3_5Config):
        names |= {field.name for field in dataclasses.fields(kind)}
    return names - fields(family)


def table_of(family: str, key: str) -> Iterator[str]:
    """Names of the tables that have the key."""
    is_dense = FAMILIES[family].experts is None
    if key in rejected_keys(family, is_dense=is_dense):
        yield "rejected"
    elif key in USED or key in USED_IN.get(family, {}):
        yield "used"
    if key in keys_without_effect(family):
        yield "without effect"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_in_one_table(family: str) -> None:
    for key in sorted(fields(family) | read_keys(family)):
        assert len(list(table_of(family, key))) == 1, key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_has_transformers_default_or_is_an_error(family: str) -> None:
    complete = tiny(family)
    kind = config_class(family)
    for key in complete:
        rest = {name: value for name, value in complete.items() if name != key}
        try:
            spec = read_spec(rest)
        except ConversionError as error:
            assert key in str(error), key
            continue
        assert spec == read_spec(kind.from_dict(rest).to_dict()), key

    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for key, value in DEFAULTS[family].items():
        assert defaults[key] == value, key
    for key, rule in rejected_keys(family, is_dense=FAMILIES[family].experts is None).items():
        default = defaults.get(key)
        assert default is None or default in rule.unless, key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rejected_key_has_neutral_values_only(family: str) -> None:
    config = tiny(family)
    expected = read_spec(config)
    for key, rule in rejected_keys(family, is_dense=FAMILIES[family].experts is None).items():
        for value in (None, *rule.unless):
            assert read_spec(config | {key: value}) == expected, (key, value)
        for value in (True, 2, 0.5, "other", [1], {"a": 1}):
            if any(value == neutral for neutral in rule.unless):
                continue
            with pytest.raises(ConversionError, match=rf"config\.json: {key}=.* not supported"):
                read_spec(config | {key: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_without_effect_changes_neither_the_spec_nor_a_logit(family: str) -> None:
    config = tiny(family)
    kind = config_class(family)
    tokens = torch.arange(40)[None] % config["vocab_size"]

    def logits(changes: dict[str, Any]) -> torch.Tensor:
        """Of transformers, with weights that do not depend on the config."""
        model = transformers.AutoModelForCausalLM.from_config(kind.from_dict(config | changes))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.15, generator=generator)
            found: torch.Tensor = model.eval()(tokens).logits
        return found

    expected = logits({})
    keys = keys_without_effect(family).keys() - NOT_TRIED
    assert keys <= OTHER.keys()
    for key in sorted(keys):
        change = {key: OTHER[key]}
        assert read_spec(config | change) == read_spec(config), key
        if family == "qwen2" or key != "attention_bias":
            # Eager attention, which these choose, sums in another order.
            tolerance = 1e-5 if key in ("output_attentions", "attn_implementation") else 0.0
            torch.testing.assert_close(logits(change), expected, atol=tolerance, rtol=tolerance)


def test_every_key_of_a_rotation_is_used_or_rejected() -> None:
    config = tiny("llama")
    rotations = {
        "default": {"rope_type": "default", "rope_theta": 1e4},
        "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        "llama3": LLAMA3_ROPE,
        "yarn": YARN_ROPE,
    }
    assert rotations.keys() == ROPE_KEYS.keys()
    for kind, rotation in rotations.items():
        for key in modeling_rope_utils.RopeParameters.__annotations__:
            used = (*ROPE_KEYS[kind], *OPTIONAL_ROPE_KEYS.get(kind, ()))
            if key in (*used, "rope_type", "rope_theta"):
                continue
            neutral = NEUTRAL_ROPE_KEYS.get(key)
            for value in (None, neutral):
                read_spec(config | {"rope_parameters": rotation | {key: value}})
            with pytest.raises(ConversionError, match=f"rope parameters have {key}="):
                read_spec(config | {"rope_parameters": rotation | {key: 0.25}})


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_other_rotations_are_rejected_in_both_spellings(spelling: str) -> None:
    config = tiny("llama")
    del config["rope_parameters"]
    for kind in (*modeling_rope_utils.ROPE_INIT_FUNCTIONS, "magic"):
        if kind in ROPE_KEYS:
            continue
        for name in ("rope_type", "type"):
            with pytest.raises(ConversionError, match=f"rope_type='{kind}' is not supported"):
                read_spec(config | {spelling: {name: kind, "factor": 4.0}})

"""config.json of transformers 4 and 5 -> ModelSpec, and what is rejected."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.errors import ConversionError
from pacs_megatron.models import ModelSpec, MoeSpec, load_spec, read_spec, weight_table
from tests.support.fuzz import damaged, fuzz, json_documents
from tests.support.tiny_families import CASES, LLAMA3_ROPE, YARN_ROPE, config_of

YARN = {key: value for key, value in YARN_ROPE.items() if key != "rope_theta"}

# As published with the checkpoints (transformers 4 style); the counts are the models' own.
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN3_14B = QWEN3 | {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "max_window_layers": 40,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-0.6B": (
        QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "Qwen3-14B": (QWEN3_14B, 14_768_307_200),
    "Qwen3-30B-A3B": (
        QWEN3
        | {
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        30_532_122_624,
    ),
    "Qwen2.5-7B": (
        {
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    "Llama-3.1-8B": (
        {
            "model_type": "llama",
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "Mistral-7B-v0.3": (
        {
            "model_type": "mistral",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 32768,
        },
        7_248_023_552,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    config, size = PUBLISHED[name]
    assert weight_table(read_spec(config)).num_parameters == size


def test_every_field_of_a_published_config() -> None:
    config, _ = PUBLISHED["Qwen3-30B-A3B"]
    assert read_spec(config) == ModelSpec(
        family="qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        ffn_size=6144,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        max_positions=40960,
        tied=False,
        rope_theta=1e6,
        rope_scaling=None,
        norm_eps=1e-6,
        qk_norm=True,
        qkv_bias=False,
        moe=MoeSpec(num_experts=128, top_k=8, expert_ffn_size=768, norm_topk_prob=True),
        dtype="bfloat16",
    )


@pytest.mark.parametrize("case", CASES)
def test_transformers_5_config_objects_agree(case: str) -> None:
    family, changes = CASES[case]
    config = config_of(family, changes)
    spec = read_spec(config.to_dict())
    assert spec.family == family
    assert spec.head_dim == (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    assert spec.tied == config.tie_word_embeddings
    assert spec.rope_theta == config.rope_parameters["rope_theta"]
    assert (spec.rope_scaling is not None) == (config.rope_parameters["rope_type"] != "default")


def test_rope_scaling_of_both_styles_reads_alike() -> None:
    config, _ = PUBLISHED["Llama-3.1-8B"]
    new = {
        k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta", "torch_dtype")
    }
    new |= {
        "rope_parameters": config["rope_scaling"] | {"rope_theta": 500000.0},
        "dtype": "bfloat16",
    }
    assert read_spec(new) == read_spec(config)
    assert read_spec(config).rope_scaling == config["rope_scaling"]


def test_defaults_that_transformers_takes_for_missing_keys() -> None:
    missing = ("head_dim", "num_key_value_heads", "torch_dtype", "tie_word_embeddings")
    config = {key: value for key, value in QWEN3_14B.items() if key not in missing}
    spec = read_spec(config | {"num_attention_heads": 64})
    assert (spec.head_dim, spec.num_kv_heads, spec.dtype, spec.tied) == (128, 32, "float32", False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3'"),
        (
            {"use_sliding_window": True, "max_window_layers": 4, "sliding_window": 512},
            "sliding-window",
        ),
        ({"layer_types": ["full_attention"] * 39 + ["sliding_attention"]}, "sliding-window"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_type='longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "forty"}, "num_hidden_layers='forty'"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"torch_dtype": "int4"}, "dtype='int4'"),
        ({"dtype": "float32"}, "torch_dtype='bfloat16', expected 'float32' as dtype has"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "expected a language model or a"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 2.0}},
            "type='default', expected 'linear' as in rope_type",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "attention_factor": 1.5}},
            "attention_factor=1.5, which is not supported with rope_type=linear",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lacks original_max_position"),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.5}},
            "attention_factor=1.5, which is not",
        ),
        (
            {"rope_scaling": YARN | {"beta_fast": 2, "beta_slow": 2}},
            "beta_slow=2, expected less",
        ),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "one of mscale and mscale_all_dim"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate=1, expected true or false"),
        (
            {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
            "factor=2.0, which is not supported with rope_type=default",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5, which is not supported",
        ),
        (
            {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 4096}
            | {"rope_theta": 500000.0},
            "original_max_position_embeddings=4096, expected 64 as in the rope parameters",
        ),
        ({"rope_theta": None}, "rope_theta=None, expected a number"),
    ],
)
def test_what_would_be_computed_wrongly_is_rejected(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConversionError) as caught:
        read_spec(QWEN3_14B | change)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_family_rules() -> None:
    window = {"use_sliding_window": True, "sliding_window": 512}
    assert (
        read_spec(QWEN3_14B | window | {"max_window_layers": 40}).num_layers == 40
    )  # no layer is windowed
    mistral, _ = PUBLISHED["Mistral-7B-v0.3"]
    assert (
        read_spec(mistral | {"sliding_window": 32768}).family == "mistral"
    )  # a window as long as the positions
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(ConversionError, match="sequences of up to 65536 tokens"):
        read_spec(mistral | {"sliding_window": 32768} | linear)
    with pytest.raises(ConversionError, match=r"sliding_window=4096\)"):
        read_spec(mistral | {"sliding_window": 4096})
    without_window = {key: value for key, value in mistral.items() if key != "sliding_window"}
    with pytest.raises(ConversionError, match=r"sliding_window=4096, transformers' default\)"):
        read_spec(without_window)
    with pytest.raises(ConversionError, match=r"layer_types=.* for Ministral\)"):
        read_spec(mistral | {"layer_types": ["full_attention"] * 32})
    moe, _ = PUBLISHED["Qwen3-30B-A3B"]
    # transformers does not read max_window_layers in this family: all layers have the window.
    with pytest.raises(ConversionError, match="sliding_window=512"):
        read_spec(moe | window | {"max_window_layers": 48})
    with pytest.raises(ConversionError, match="num_local_experts=4, expected 128 as num_experts"):
        read_spec(moe | {"num_local_experts": 4})
    with pytest.raises(ConversionError, match="decoder_sparse_step=2"):
        read_spec(moe | {"decoder_sparse_step": 2})
    with pytest.raises(ConversionError, match="mlp_only_layers"):
        read_spec(moe | {"mlp_only_layers": [0]})
    renamed = {k: v for k, v in moe.items() if k != "num_experts"} | {"num_local_experts": 128}
    assert read_spec(renamed) == read_spec(moe)
    llama, _ = PUBLISHED["Llama-3.1-8B"]
    with pytest.raises(ConversionError, match="mlp_bias"):
        read_spec(llama | {"mlp_bias": True})
    assert read_spec(llama | {"rope_scaling": LLAMA3_ROPE}).rope_theta == 500000.0


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("Llama-3.1-8B", "num_hidden_layers"),
        ("Qwen3-30B-A3B", "num_experts"),
        ("Llama-3.1-8B", "vocab_size"),
    ],
)
def test_sizes_are_limited(model: str, key: str) -> None:
    """The weight table has a row for each layer and expert: 10 ** 9 of them took minutes."""
    config, _ = PUBLISHED[model]
    with pytest.raises(ConversionError, match=f"{key}=10+, expected a positive integer of at most"):
        read_spec(config | {key: 10**13})


INTEGERS = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "vocab_size",
    ),
    *(
        "max_position_embeddings",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ),
)
NO_INTEGER = (math.nan, math.inf, -1, 0, 0.5, 8.0, "8", True, [8], {"a": 8}, 10**13, 10**400)
LLAMA3 = LLAMA3_ROPE | {"rope_theta": 1e6}


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", NO_INTEGER, ids=str)
def test_every_size_is_a_positive_integer(key: str, value: Any) -> None:
    with pytest.raises(
        ConversionError, match=f"config.json: {key}=.* expected a positive integer of at most"
    ):
        read_spec(PUBLISHED["Qwen3-30B-A3B"][0] | {key: value})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -1e-6, 0, 10**400, "1e-6", True, [1e-6]], ids=str
)
def test_every_number_has_its_range(key: str, value: Any) -> None:
    with pytest.raises(ConversionError, match=f"config.json: {key}=.* expected a number"):
        read_spec(QWEN3_14B | {key: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": 1.0}, "rms_norm_eps=1.0"),
        ({"rope_theta": 0.5}, "rope_theta=0.5"),
        ({"rope_parameters": LLAMA3 | {"rope_theta": "1e6"}}, "rope_theta='1e6'"),
        ({"rope_parameters": LLAMA3 | {"factor": math.nan}}, "factor=nan"),
        ({"rope_parameters": LLAMA3 | {"factor": 0}}, "factor=0"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": -1.0}}, "low_freq_factor=-1.0"),
        (
            {"rope_parameters": LLAMA3 | {"high_freq_factor": LLAMA3["low_freq_factor"]}},
            "high_freq_factor",
        ),
        (
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192.5}},
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor='4'"),
        ({"rope_scaling": {"type": ["linear"], "factor": 4.0}}, "rope_type=['linear']"),
        ({"rope_scaling": "linear"}, "rope parameters are 'linear'"),
        ({"rope_scaling": 0}, "rope parameters are 0"),
        ({"model_type": ["qwen3"]}, "['qwen3']"),
        ({"layer_types": 40}, "layer_types=40"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"head_dim": 127}, "head_dim=127"),
        ({"head_dim": None, "hidden_size": 5121}, "hidden_size=5121"),
        ({"max_window_layers": -1, "use_sliding_window": True}, "max_window_layers=-1"),
        (
            {"head_dim": None, "num_attention_heads": 10240, "num_key_value_heads": 8},
            "num_attention_heads=10240",
        ),
        ({"torch_dtype": ["bfloat16"]}, "dtype=['bfloat16']"),
    ],
)
def test_numbers_and_types_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConversionError) as caught:
        read_spec(QWEN3_14B | change)
    assert words in str(caught.value)


def test_more_experts_chosen_than_present() -> None:
    with pytest.raises(ConversionError, match="num_experts_per_tok=129"):
        read_spec(PUBLISHED["Qwen3-30B-A3B"][0] | {"num_experts_per_tok": 129})


def test_folder_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"config\.json is missing"):
        load_spec(tmp_path)
    for text, words in (
        ("{", "malformed JSON"),
        ("[]", "expected a JSON object, got an array"),
        ('{"a": NaN}', "NaN"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConversionError, match=rf"config\.json.*{words}"):
            load_spec(tmp_path)


def test_rope_by_layer_type_is_rejected_in_every_family() -> None:
    """Qwen's classes would read the object of a layer type, others would ignore it and rotate with
    the default base.
    """
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    for config, _ in PUBLISHED.values():
        plain = {key: config[key] for key in config if key not in ("rope_theta", "rope_scaling")}
        with pytest.raises(ConversionError, match=r"by layer type \('full_attention'\)"):
            read_spec(plain | {"rope_parameters": nested})


def test_linear_scaling_extends_the_context() -> None:
    config, _ = PUBLISHED["Llama-3.1-8B"]
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert read_spec(config | {"max_position_embeddings": 10}).max_context == 10  # llama3
    assert read_spec(config | {"max_position_embeddings": 10} | linear).max_context == 40


def test_two_scalings_that_differ_are_rejected() -> None:
    """transformers takes `rope_scaling`, which a user adds for a longer context, over
    `rope_parameters`.
    """
    config = PUBLISHED["Qwen3-30B-A3B"][0]
    linear = {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(ConversionError, match=r"rope_scaling=.*remove one of them"):
        read_spec(
            config
            | {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": linear,
            }
        )
    assert (
        read_spec(config | {"rope_parameters": linear, "rope_scaling": linear}).rope_scaling
        is not None
    )


def test_two_bases_that_differ_and_another_architecture_are_errors() -> None:
    """transformers takes the base of `rope_parameters`, a server may take the other; it chooses the
    class by its name.
    """
    config = QWEN3_14B | {"rope_theta": 1e6}
    with pytest.raises(
        ConversionError, match=r"rope_theta=12345\.0, expected 1000000\.0 as in rope_parameters"
    ):
        read_spec(
            config
            | {
                "rope_theta": 12345.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            }
        )
    assert (
        read_spec(
            config | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        ).rope_theta
        == 1e6
    )
    with pytest.raises(
        ConversionError,
        match=r"architectures=.*LlamaForCausalLM.*, expected a language model or a critic of "
        r"model_type=qwen3",
    ):
        read_spec(config | {"architectures": ["LlamaForCausalLM"]})


@fuzz
@given(
    document=json_documents(),
    key=st.sampled_from(sorted(PUBLISHED["Qwen3-30B-A3B"][0])),
    data=st.data(),
)
def test_any_value_in_config_json_gives_a_spec_or_the_named_error(
    document: Any, key: str, data: st.DataObject, tmp_path: Path
) -> None:
    """A value replaced in a published config, or the whole file damaged."""
    config = PUBLISHED["Qwen3-30B-A3B"][0] | {key: document}
    try:
        weight_table(
            read_spec(
                config
                | {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
                | {key: document}
            )
        )
    except ConversionError as error:
        assert "\n" not in str(error)
    (tmp_path / "config.json").write_bytes(data.draw(damaged(json.dumps(config).encode())))
    try:
        load_spec(tmp_path)
    except ConversionError as error:
        assert "\n" not in str(error)


def test_import_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, pacs_megatron.models; print([m for m in ('torch', 'megatron', "
        "'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.strip() == "[]"

"""The low-rank adapters of a model: their modules, shapes and names in PEFT's files.

Does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pacs_megatron.config.schema import LoraOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.models.config_reader import ModelSpec
from pacs_megatron.models.table import Entry, Shape, Sizes, WeightTable

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["A", "B"]
"""The matrix A [rank, inputs] or B [outputs, rank] of a module"""
KINDS: tuple[Kind, ...] = ("A", "B")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_WEIGHT = ".weight"
_SPLIT_SIZES = ("heads", "kv_heads", "groups", "ffn", "shared_ffn")
"""Dimensions of adapted layers that tensor parallelism splits"""
_PEFT_PREFIX = "base_model.model."
_SAME_KEYS = (
    "bias",
    "fan_in_fan_out",
    "lora_alpha",
    "peft_type",
    "r",
    "use_dora",
    "use_rslora",
)
"""Keys of adapter_config.json whose values must be ours"""
_EMPTY_KEYS = (
    "alpha_pattern",
    "layers_pattern",
    "layers_to_transform",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
)
"""Keys of adapter_config.json that this program does not support"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMatrix:
    """A or B of one Hugging Face module."""

    kind: Kind
    hf_name: str
    """of the module's weight"""
    shape: Shape
    split_dim: int | None
    """the dimension that tensor parallelism splits; None: every rank has the whole matrix"""

    @property
    def name(self) -> str:
        """PEFT's name of the tensor."""
        return f"{_PEFT_PREFIX}{self.hf_name.removesuffix(_WEIGHT)}.lora_{self.kind}.weight"


def target_of(hf_name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return hf_name.removesuffix(_WEIGHT).rpartition(".")[2]


def adapter_matrices(entry: Entry, options: LoraOptions) -> list[AdapterMatrix]:
    """A and B of every target of one Megatron tensor, in the order of its Hugging Face tensors.

    Empty for a tensor without a target, and for the experts.
    """
    if entry.expert is not None:
        return []
    matrices = []
    is_column_parallel = entry.transform.tp_dim == 0
    for hf_name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
        if not hf_name.endswith(_WEIGHT) or target_of(hf_name) not in options.targets:
            continue
        outputs, inputs = shape
        for kind in KINDS:
            split_dim = None
            if is_column_parallel == (kind == "B"):
                split_dim = 0 if kind == "B" else 1
            matrix_shape = (options.rank, inputs) if kind == "A" else (outputs, options.rank)
            matrices.append(
                AdapterMatrix(kind=kind, hf_name=hf_name, shape=matrix_shape, split_dim=split_dim)
            )
    return matrices


def all_matrices(table: WeightTable, options: LoraOptions) -> list[AdapterMatrix]:
    """`adapter_matrices` of a whole model, in the table's order."""
    matrices = []
    for entry in table.entries:
        matrices += adapter_matrices(entry, options)
    return matrices


def check_targets(table: WeightTable, options: LoraOptions) -> None:
    """Raises ConfigError for a target that the model does not have outside its experts."""
    found = {target_of(matrix.hf_name) for matrix in all_matrices(table, options)}
    missing = [target for target in options.targets if target not in found]
    if missing:
        known = ", ".join(target for target in options.targets if target in found)
        reason = "no such module"
        if table.spec.moe is not None:
            reason = "such modules only in its experts, which have no adapters"
        raise ConfigError(
            f"policy.lora.targets contains {', '.join(missing)}, but the model "
            f"({table.spec.family}) has {reason}; use policy.lora.targets=[{known}]"
        )


def sizes_of_rank(sizes: Sizes, tp: int) -> dict[str, int]:
    """The sizes of a tensor-parallel rank's part of an adapted layer."""
    local = dict(sizes)
    for name in _SPLIT_SIZES:
        if name in local:
            local[name] //= tp
    return local


def fused_up(entry: Entry, ups: "Mapping[str, Tensor]", sizes: Sizes) -> "Tensor":
    """B of all targets of a layer, in the layer's order of rows.

    A row has the B of its module in the columns of the module's A, and 0 elsewhere.

    Args:
        entry: of the layer's weight.
        ups: name of a module's weight -> its B [outputs, rank].
        sizes: of the layer, or of a tensor-parallel rank's part of it (`sizes_of_rank`).

    Returns:
        [outputs, modules * rank].
    """
    import torch.nn.functional as F

    first, *_ = ups.values()
    if entry.transform.tp_dim != 0:  # a row-parallel layer is one module
        return first
    rank = first.shape[1]
    num_columns = len(ups) * rank
    padded = {}
    for position, (name, up) in enumerate(ups.items()):
        left = position * rank
        padded[name] = F.pad(up, (left, num_columns - left - rank))

    # The transform's columns are those of the layer's weight.
    sizes = {**sizes, "hidden": num_columns}
    blocks = []
    for name, shape in zip(entry.hf_names, entry.transform.hf_shapes(sizes), strict=True):
        blocks.append(padded[name] if name in padded else first.new_zeros(shape))
    return entry.transform.to_megatron(blocks, sizes)


def merged(weight: "Tensor", up: "Tensor", down: "Tensor", scale: float) -> "Tensor":
    """W + scale * B A in float64, rounded once, so that every layout gives the same bits.

    Args:
        weight: [outputs, inputs].
        up: B [outputs, rank], float64.
        down: A [rank, inputs], float64.
        scale: alpha / rank.

    Returns:
        As `weight`, a new tensor.
    """
    return (up @ down).mul_(scale).add_(weight).to(weight.dtype)


def peft_config(spec: ModelSpec, options: LoraOptions, base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json.

    Args:
        spec: of the model.
        options: of the section `policy.lora`.
        base: the model to which the adapters belong, a folder or a hub id.
    """
    experts = None if spec.moe is None else r".*\.experts\..*"
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": experts,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": options.rank,
        "target_modules": list(options.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def first_difference(config: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The first key of an adapter_config.json that makes other adapters than expected; None: none.

    Args:
        config: of a file.
        expected: of `peft_config`.
    """
    for key in _SAME_KEYS:
        if config.get(key, expected[key]) != expected[key]:
            return key
    if config.get("target_modules") is None or isinstance(config["target_modules"], str):
        return "target_modules"
    if set(config["target_modules"]) != set(expected["target_modules"]):
        return "target_modules"
    for key in _EMPTY_KEYS:
        if config.get(key):
            return key
    return None

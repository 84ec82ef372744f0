"""The accelerator software of this machine, and Megatron's precision arguments for it.

The software is Transformer Engine with FP8, and NVIDIA Apex.
"""

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pacs_megatron.config.schema import Fp8Options, MegatronOptions, PrecisionOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.environment import (
    ApexKind,
    Version,
    apex_kind,
    check_apex,
    installed,
    parse_version,
    transformer_engine_problem,
    version_text,
)

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_FP8_NEEDS: dict[str, tuple[Version, Version, Version]] = {
    "delayed": ((2, 1), (8, 9), (0, 0)),
    "tensorwise": ((2, 2), (8, 9), (0, 0)),
    "blockwise": ((2, 3), (9, 0), (12, 9)),
}
"""FP8 recipe -> oldest Transformer Engine, compute capability and CUDA"""
_MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""`exp_avg_dtype` and `exp_avg_sq_dtype` -> type of Adam's moments"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Accelerator software that this process can use."""

    cuda: bool
    """whether torch can use a GPU"""
    capability: Version | None
    """compute capability of the current device"""
    cuda_version: Version | None
    """of CUDA that torch was built with"""
    transformer_engine: Version | None
    """None if it is not installed"""
    apex: ApexKind
    """the package `apex`; Megatron-Core uses NVIDIA's where Transformer Engine is not installed"""
    megatron: Version
    """of megatron-core"""
    linear_attention: bool = False
    """whether flash-linear-attention is installed, whose kernels a gated delta net needs on a GPU
    """
    gradient_fusion: bool = False
    """whether Apex's kernel is importable that adds a weight's gradient to the fp32 buffer"""


def inspect_machine() -> Machine:
    """Inspects this machine without importing the packages."""
    cuda = torch.cuda.is_available()
    engine = installed("transformer-engine") or installed("transformer-engine-torch")
    return Machine(
        cuda=cuda,
        capability=torch.cuda.get_device_capability() if cuda else None,
        cuda_version=parse_version(torch.version.cuda),
        transformer_engine=parse_version(engine),
        apex=apex_kind(),
        megatron=parse_version(installed("megatron-core")) or (0, 16),
        linear_attention=importlib.util.find_spec("fla") is not None,
        gradient_fusion=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )


def uses_transformer_engine(dtype: torch.dtype, machine: Machine) -> bool:
    """Whether the layers are Transformer Engine's.

    Its attention does not support fp32; fp32 uses the local layers.
    """
    return machine.cuda and machine.transformer_engine is not None and dtype is torch.bfloat16


def check(options: PrecisionOptions, machine: Machine) -> None:
    """Checks that this machine supports `options`.

    Raises:
        ConfigError: with the reason, if this GPU, CUDA, Transformer Engine or Apex does not.
    """
    check_apex()
    if machine.cuda and machine.transformer_engine is None and machine.apex == "no kernels":
        raise ConfigError(
            "NVIDIA Apex is installed without its CUDA kernels (no amp_C), and Megatron-Core uses "
            "its FusedAdam where Transformer Engine is not installed; build it with --cpp_ext and "
            "--cuda_ext, or run `pip uninstall apex`"
        )
    if machine.cuda and machine.transformer_engine is not None:
        problem = transformer_engine_problem(machine.transformer_engine, machine.megatron)
        if problem is not None:
            raise ConfigError(problem)
    if options.fp8 is not None:
        _check_fp8(options.fp8, machine)


def _check_fp8(fp8: Fp8Options, machine: Machine) -> None:
    option = f"precision.fp8.recipe={fp8.recipe}"
    num_bf16_layers = fp8.first_last_layers_bf16
    if fp8.recipe == "delayed" and num_bf16_layers:
        raise ConfigError(
            f"precision.fp8.first_last_layers_bf16={num_bf16_layers} cannot be combined with "
            f"{option}: all layers share its scales; set it to 0 or use recipe tensorwise or "
            "blockwise"
        )
    if not machine.cuda:
        raise ConfigError(
            f"{option} needs a CUDA GPU, but none was found; remove precision.fp8 to train in bf16 "
            "or fp32"
        )
    if machine.transformer_engine is None:
        raise ConfigError(
            f"{option} needs Transformer Engine, which is not installed; install it with "
            "`make install-gpu`"
        )

    engine, capability, cuda = _FP8_NEEDS[fp8.recipe]
    requirements = (
        ("Transformer Engine", engine, machine.transformer_engine, "this is"),
        ("compute capability", capability, machine.capability, "this GPU has"),
        ("CUDA", cuda, machine.cuda_version, "torch was built with"),
    )
    for name, oldest, present, owner in requirements:
        if present is None or present < oldest:
            version = "unknown" if present is None else version_text(present)
            raise ConfigError(
                f"{option} needs {name} >= {version_text(oldest)}, {owner} {version}; change it or "
                "remove precision.fp8"
            )


def weight_dtype(options: PrecisionOptions) -> torch.dtype:
    """The type of the weights."""
    return torch.bfloat16 if options.dtype == "bf16" else torch.float32


def describe(options: PrecisionOptions, machine: Machine) -> str:
    """One line for the log: the layers and optimizer in use, and missing packages."""
    fp8 = "off"
    if options.fp8 is not None:
        fp8 = f"{options.fp8.recipe}/{options.fp8.format}"

    if machine.cuda:
        used = f"{_layers(options, machine)}, {_adam(machine)}"
        is_local = not _has_transformer_layers(options, machine)
        if is_local and _has_gradient_fusion(weight_dtype(options), machine):
            used += ", fused weight gradients of NVIDIA Apex"
    else:
        used = "local layers, torch AdamW"
    line = f"precision {options.dtype}, fp8 {fp8}; using {used}"

    missing = _missing(machine)
    if missing:
        line += f"; missing: {', '.join(missing)}"
    return line


def _has_transformer_layers(options: PrecisionOptions, machine: Machine) -> bool:
    return uses_transformer_engine(weight_dtype(options), machine)


def _layers(options: PrecisionOptions, machine: Machine) -> str:
    """The layers on a machine with CUDA."""
    engine = machine.transformer_engine
    if engine is None:
        return "local layers"
    if _has_transformer_layers(options, machine):
        return f"Transformer Engine {version_text(engine)}"
    return "local layers (Transformer Engine's attention has no fp32)"


def _adam(machine: Machine) -> str:
    """The optimizer on a machine with CUDA; Megatron-Core prefers Transformer Engine's."""
    if machine.transformer_engine is not None:
        return "FusedAdam of Transformer Engine"
    if machine.apex == "nvidia":
        return "FusedAdam of NVIDIA Apex"
    return "AdamW of torch"


def _missing(machine: Machine) -> list[str]:
    """Software that this machine lacks, for the log."""
    if not machine.cuda:
        return ["no CUDA"]
    missing = []
    if machine.transformer_engine is None:
        missing.append("Transformer Engine")
    if machine.apex != "nvidia":
        missing.append("NVIDIA Apex")
    return missing


def megatron_arguments(options: PrecisionOptions, machine: Machine) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig for this precision on this machine."""
    dtype = weight_dtype(options)
    has_te = uses_transformer_engine(dtype, machine)
    arguments: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": machine.cuda,
        "bias_dropout_fusion": machine.cuda,
        "persist_layer_norm": has_te,
        "apply_rope_fusion": has_te,
        "use_cpu_initialization": not machine.cuda,
    }
    if options.fp8 is not None:
        arguments |= {"fp8": options.fp8.format, "fp8_recipe": options.fp8.recipe}
        if options.fp8.recipe == "delayed":
            arguments |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
        num_bf16_layers = options.fp8.first_last_layers_bf16
        if num_bf16_layers:
            arguments |= {
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": num_bf16_layers,
                "num_layers_at_end_in_bf16": num_bf16_layers,
            }
    return arguments


def token_multiple(options: PrecisionOptions) -> int:
    """The number of packed tokens of a rank is padded to a multiple of this.

    FP8 matrix products need aligned dimensions.
    """
    if options.fp8 is None:
        return 1
    return 128 if options.fp8.recipe == "blockwise" else 16


def megatron_options(
    target: type,
    options: MegatronOptions,
    machine: Machine,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Keyword arguments of one of Megatron's dataclasses from `parallel.megatron`.

    Args:
        target: the dataclass, of which the result has fields only.
        options: of the section `parallel.megatron`; null: this machine's default.
        machine: this rank's accelerator software.
        dtype: of the weights.
    """
    values = {name: value for name, value in options.model_dump().items() if value is not None}
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        values[name] = _MOMENT_DTYPES[values[name]]
    overlap = values.setdefault("overlap_grad_reduce", machine.cuda)
    values.setdefault("overlap_param_gather", overlap)
    values.setdefault("gradient_accumulation_fusion", _has_gradient_fusion(dtype, machine))

    names = {field.name for field in dataclasses.fields(target)}
    return {name: value for name, value in values.items() if name in names}


def _has_gradient_fusion(dtype: torch.dtype, machine: Machine) -> bool:
    """Whether a kernel can add a weight's gradient to the fp32 buffer: Transformer Engine's in its
    layers, Apex's in the local layers.

    fp32 does not use Apex's: it calls cublasGemmEx with CUBLAS_GEMM_DEFAULT_TENSOR_OP, which allows
    products in 16 bits (Apex, csrc/megatron/fused_weight_gradient_dense_cuda.cu).
    """
    of_apex = machine.cuda and machine.gradient_fusion and dtype is torch.bfloat16
    return uses_transformer_engine(dtype, machine) or of_apex


def check_kernels(options: MegatronOptions, dtype: torch.dtype, machine: Machine) -> None:
    """Checks that a package has the kernels of `options`.

    Raises:
        ConfigError: with the package that is missing.
    """
    if options.gradient_accumulation_fusion and not _has_gradient_fusion(dtype, machine):
        raise ConfigError(
            "parallel.megatron.gradient_accumulation_fusion=true needs Transformer Engine, or "
            "NVIDIA Apex with fused_weight_gradient_mlp_cuda; install one of them, or remove the "
            "key"
        )

    # With optimizer_cpu_offload the CPU computes the update.
    is_on_gpu = machine.cuda and not options.optimizer_cpu_offload
    if options.use_precision_aware_optimizer and is_on_gpu and machine.transformer_engine is None:
        raise ConfigError(
            "parallel.megatron.use_precision_aware_optimizer=true needs Transformer Engine's "
            "FusedAdam (Apex's has no such mode); install transformer-engine, or remove the key"
        )


def start_userbuffers(config: "TransformerConfig", tokens: int) -> None:
    """Creates Transformer Engine's buffers of `tp_comm_overlap`. Collective; once a run.

    Args:
        config: Megatron's config of the model.
        tokens: input tokens of a rank in every micro-batch.
    """
    from transformer_engine.pytorch.module import base

    has_fp8 = config.fp8 is not None
    quantization_modes = []
    if has_fp8:
        quantization_modes.append(base.UserBufferQuantizationMode.FP8)
    if not has_fp8 or config.first_last_layers_bf16:
        quantization_modes.append(base.UserBufferQuantizationMode.NONE)

    base.initialize_ub(
        [tokens, config.hidden_size],
        config.tensor_model_parallel_size,
        quantization_modes=quantization_modes,
    )

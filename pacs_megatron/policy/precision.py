"""Finds the accelerator software (Transformer Engine, NVIDIA Apex, FP8) and sets Megatron's
precision arguments.
"""

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pacs_megatron.config.schema import MegatronOptions, PrecisionOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.environment import installed

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_TE_RANGES = {(0, 16): ((2, 9), (2, 12)), (0, 19): ((2, 14), (2, 21))}
"""megatron-core -> Transformer Engine from, below: what each one requires (its pyproject and its
imports).
"""
_NEEDS = {
    "delayed": ((2, 1), (8, 9), (0, 0)),
    "tensorwise": ((2, 2), (8, 9), (0, 0)),
    "blockwise": ((2, 3), (9, 0), (12, 9)),
}
"""FP8 recipe -> oldest Transformer Engine, compute capability and CUDA"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Accelerator software that this process can use."""

    cuda: bool
    capability: tuple[int, int] | None  # compute capability of the current device
    cuda_version: tuple[int, int] | None
    transformer_engine: tuple[int, int] | None  # (major, minor), None when it is not installed
    apex: bool  # NVIDIA Apex's fused kernels are importable
    megatron: tuple[int, int]  # (major, minor) of megatron-core
    foreign_apex: (
        bool  # a package named apex is installed that is not NVIDIA's (PyPI's is a web toolkit)
    )


def _pair(version: str | None) -> tuple[int, int] | None:
    if version is None:
        return None
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def inspect_machine() -> Machine:
    """Inspects this machine without importing the packages."""
    cuda = torch.cuda.is_available()
    has_apex_name, has_apex_kernels = (
        importlib.util.find_spec(name) is not None for name in ("apex", "amp_C")
    )
    return Machine(
        cuda=cuda,
        capability=torch.cuda.get_device_capability() if cuda else None,
        cuda_version=_pair(torch.version.cuda),
        transformer_engine=_pair(
            installed("transformer-engine") or installed("transformer-engine-torch")
        ),
        apex=has_apex_name and has_apex_kernels,
        megatron=_pair(installed("megatron-core")) or (0, 16),
        foreign_apex=has_apex_name and not has_apex_kernels,
    )


def uses_transformer_engine(dtype: torch.dtype, machine: Machine) -> bool:
    """Whether the layers are Transformer Engine's.

    Its attention does not support fp32; fp32 uses the local layers.
    """
    return machine.cuda and machine.transformer_engine is not None and dtype is torch.bfloat16


def check(options: PrecisionOptions, machine: Machine) -> None:
    """Raises ConfigError, with the reason, if this GPU, CUDA or Transformer Engine does not support
    `options`.
    """
    if machine.cuda and machine.transformer_engine is not None:
        megatron = max(version for version in _TE_RANGES if version <= machine.megatron)
        low, high = _TE_RANGES[megatron]
        if not low <= machine.transformer_engine < high:
            raise ConfigError(
                f"Transformer Engine {_text(machine.transformer_engine)} is not supported by "
                "megatron-core "
                f"{_text(megatron)}, which needs >= {_text(low)} and < {_text(high)}; install "
                "such a transformer-engine"
            )
    if options.fp8 is None:
        return
    where = f"precision.fp8.recipe={options.fp8.recipe}"
    edges = options.fp8.first_last_layers_bf16
    if options.fp8.recipe == "delayed" and edges:
        raise ConfigError(
            f"precision.fp8.first_last_layers_bf16={edges} cannot be combined with {where}: "
            "all layers share its scales; set it to 0 or use recipe tensorwise or blockwise"
        )
    if not machine.cuda:
        raise ConfigError(
            f"{where} needs a CUDA GPU, but none was found; remove precision.fp8 to train in bf16 "
            "or fp32"
        )
    if machine.transformer_engine is None:
        raise ConfigError(
            f"{where} needs Transformer Engine, which is not installed; install "
            "transformer-engine 2.11"
        )
    engine, capability, cuda = _NEEDS[options.fp8.recipe]
    for name, needed, found, owner in (
        ("Transformer Engine", engine, machine.transformer_engine, "this is"),
        ("compute capability", capability, machine.capability, "this GPU has"),
        ("CUDA", cuda, machine.cuda_version, "torch was built with"),
    ):
        if found is None or found < needed:
            have = "unknown" if found is None else _text(found)
            raise ConfigError(
                f"{where} needs {name} >= {_text(needed)}, {owner} {have}; change it or remove "
                "precision.fp8"
            )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def describe(options: PrecisionOptions, machine: Machine) -> str:
    """One line for the log: the layers and optimizer in use, and missing packages."""
    fp8 = "off" if options.fp8 is None else f"{options.fp8.recipe}/{options.fp8.format}"
    engine = machine.transformer_engine
    if not machine.cuda:
        used = "local layers, torch AdamW"
        missing = "no CUDA"
    else:
        has = {"Transformer Engine": engine is not None, "NVIDIA Apex": machine.apex}
        missing = ", ".join(name for name, is_present in has.items() if not is_present)
        used = (
            "local layers"
            if engine is None
            else "local layers (Transformer Engine's attention has no fp32)"
        )
        if engine is not None and options.dtype == "bf16":
            used = f"Transformer Engine {_text(engine)}"
        optimizer = (
            "Transformer Engine"
            if engine is not None
            else "Apex"
            if machine.apex
            else "torch (AdamW)"
        )
        used += f", FusedAdam of {optimizer}"
    line = f"precision {options.dtype}, fp8 {fp8}; using {used}" + (
        f"; missing: {missing}" if missing else ""
    )
    if machine.foreign_apex:
        line += (
            "; the installed package 'apex' is PyPI's web toolkit, not NVIDIA Apex: uninstall it"
        )
    return line


def megatron_arguments(options: PrecisionOptions, machine: Machine) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig for this precision on this machine."""
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
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
        if edges := options.fp8.first_last_layers_bf16:
            arguments |= {"num_layers_at_start_in_bf16": edges, "num_layers_at_end_in_bf16": edges}
            arguments["first_last_layers_bf16"] = True
    return arguments


def token_multiple(options: PrecisionOptions) -> int:
    """Packed tokens are padded to a multiple of this: FP8 matrix products need aligned dimensions."""
    if options.fp8 is None:
        return 1
    return 128 if options.fp8.recipe == "blockwise" else 16


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def megatron_options(
    target: type, options: MegatronOptions, machine: Machine, dtype: torch.dtype
) -> dict[str, Any]:
    """The fields of Megatron's dataclass `target` that `parallel.megatron` names, with this
    machine's defaults.
    """
    given = {name: value for name, value in options.model_dump().items() if value is not None}
    given |= {name: _DTYPES[given[name]] for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    overlap = given.setdefault("overlap_grad_reduce", machine.cuda)
    given.setdefault("overlap_param_gather", overlap)
    given.setdefault("gradient_accumulation_fusion", uses_transformer_engine(dtype, machine))
    names = {field.name for field in dataclasses.fields(target)}
    return {name: value for name, value in given.items() if name in names}


def start_userbuffers(config: "TransformerConfig", tokens: int) -> None:
    """Creates Transformer Engine's buffers of `tp_comm_overlap` for `tokens` per micro-batch.

    Collective; once a run.
    """
    from transformer_engine.pytorch.module import base

    modes = base.UserBufferQuantizationMode
    has_fp8 = config.fp8 is not None
    base.initialize_ub(
        [tokens, config.hidden_size],
        config.tensor_model_parallel_size,
        quantization_modes=[modes.FP8] * has_fp8
        + [modes.NONE] * (not has_fp8 or config.first_last_layers_bf16),
    )

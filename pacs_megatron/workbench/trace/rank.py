"""Runs a step of a configuration as one rank on fake CUDA, and prints what it recorded as JSON.

    python -m pacs_megatron.workbench.trace.rank '{"config": "configs/runs/X.yaml", "rank": 0}'

One process a rank: fake CUDA replaces torch.cuda for the rest of the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from pacs_megatron.runtime.processes import die_with_parent
from pacs_megatron.workbench.trace.guard import install_guard, load_guard


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """The work of one process."""

    config: str
    overrides: list[str] = field(default_factory=list)
    rank: int = 0
    num_layers: int | None = None
    """layers of the traced model; None: all of the model's"""
    shape: dict[str, Any] = field(default_factory=dict)
    """changes of the model's config.json"""
    transformer_engine: bool = True
    """use it if it is installed"""
    prompt_tokens: int = 512
    response_tokens: int | None = None
    """None: as many as let a group fill the token budget"""
    num_groups: int = 4
    group_size: int = 8
    updates: int = 2
    index: int = 0
    """number of the update in its step; from 1 on PACS's coefficients depend on the forward"""
    paths: tuple[str, ...] = ("step",)
    """in order, of: step, reference, offload, export, checkpoint, whole step"""
    has_uneven_lengths: bool = False
    """of responses; otherwise all are equally long"""
    num_one_class_groups: int = 0
    """number of groups whose samples have one label, so that some objectives skip them"""
    stop_rank: int = 0
    """rank that gets a stop request in a whole step"""
    stop_at_poll: int | None = None
    """number of that rank's polls before the stop request; None: there is none"""


def main() -> int:
    """Traces the request of the first argument."""
    die_with_parent()
    request = TraceRequest(**json.loads(sys.argv[1]))
    prepare_process(request)

    from pacs_megatron.workbench.trace.step import trace_step

    json.dump(trace_step(request), sys.stdout)
    return 0


def prepare_process(request: TraceRequest) -> None:
    """Imports torch with the guard, before anything else does."""
    # Megatron and Transformer Engine compile fused functions; dynamo would meet another fake mode.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.environ["FAKE_ALLOW_META"] = "1"

    library = load_guard()
    import torch

    install_guard(library)
    # A CUDA build of torch chooses a kernel of attention by the properties of the GPU, which do not
    # exist here. Only products and softmax are left, as in a CPU build.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    hide_packages(request)


def hide_packages(request: TraceRequest) -> None:
    """Lets Megatron find no Apex, and Transformer Engine only where the request wants it."""
    hidden = ["apex", "amp_C"]
    if not request.transformer_engine or not has_transformer_engine():
        hidden += ["transformer_engine", "transformer_engine_torch"]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed here."""
    return importlib.util.find_spec("transformer_engine") is not None


def to_argument(request: TraceRequest) -> str:
    """The request as the argument of this module."""
    return json.dumps(asdict(request))


if __name__ == "__main__":
    sys.exit(main())

"""CPU replacement of SGLang's CUDA kernels (see cuda_only.py)."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from cuda_only import install

__version__ = "0.4.10"
__getattr__ = install("sgl_kernel", "delta_nets", "mamba")

importlib.import_module("sgl_kernel.delta_nets")  # registers operators


def _no_cudart() -> Any:
    """Pins nothing:

    `--enable-return-routed-experts` pins a host buffer on every device
    (mem_cache/pool_host/common.py:147).
    """
    return SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)


if not torch.cuda.is_available():
    torch.cuda.cudart = _no_cudart

"""CPU replacement of SGLang's CUDA kernels (see cuda_only.py)."""

from cuda_only import install

__version__ = "0.4.10"
__getattr__ = install("sgl_kernel")

"""CPU replacement of torchvision, which SGLang imports for its image models (see cuda_only.py)."""

from cuda_only import install

__version__ = "0.28.0"
__getattr__ = install("torchvision")

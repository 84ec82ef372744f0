"""The trained model on Megatron-Core."""

from pacs_megatron.parallel import cpu_redirects

# Before this package imports Megatron: where there is no CUDA, Megatron must not find the optimizers that need it.
cpu_redirects.install()

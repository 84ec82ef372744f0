"""The trained model on Megatron-Core."""

from pacs_megatron.parallel import cpu_redirects

# This runs before the package imports Megatron: without CUDA, Megatron must not find optimizers
# that need CUDA.
cpu_redirects.install()

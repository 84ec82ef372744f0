"""Process groups, and Megatron-Core on a host without CUDA."""

from pacs_megatron.parallel import cpu_redirects

# This runs before a module imports Megatron: without CUDA, Megatron must not find optimizers that
# need CUDA.
cpu_redirects.install()

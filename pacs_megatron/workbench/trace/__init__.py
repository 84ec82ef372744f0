"""A step of the product's own GPU path on fake CUDA: memory, collectives and work without a GPU."""

"""The trained model on Megatron-Core."""

# This import comes before those of Megatron.
import pacs_megatron.parallel  # noqa: F401

"""Defects of megatron-core 0.16 that we step around; each undoes itself where a release has mended it."""

from megatron.core.transformer.moe import moe_utils


def apply() -> None:
    """Safe to call again."""
    # The router asks `te_general_gemm is not None`, but without Transformer Engine the name is never bound (NameError).
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

"""Workarounds for defects of megatron-core 0.16; each does nothing once a release has fixed the defect."""

from megatron.core.transformer.moe import moe_utils


def apply() -> None:
    """Applies all workarounds; repeated calls have no effect."""
    # The router tests `te_general_gemm is not None`, a name that is unbound without Transformer Engine (NameError).
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

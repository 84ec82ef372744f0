"""Norms of Apex. Megatron-Core has them for LayerNorm only, and every model here has RMSNorm."""

"""Helpers that tests share; imports of torch, transformers and Megatron stay inside the functions."""

"""Helpers that tests share.

Imports of torch, transformers and Megatron stay inside the functions.
"""

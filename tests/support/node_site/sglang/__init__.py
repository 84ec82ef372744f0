"""Replaces SGLang in the stand-in servers' interpreter (tests/support/node_of_eight.py)."""

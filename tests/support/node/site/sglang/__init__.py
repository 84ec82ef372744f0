"""Replaces SGLang in the stand-in servers' interpreter (tests/support/node/servers.py)."""

"""Equality of mathematical answers. spelling.py gives one form to many spellings, reading.py
recognises the kind of an answer, equality.py compares kinds, value.py compares expressions.
"""

from pacs_megatron.rewards.mathematics.comparison import (
    Comparison,
    compare,
    is_readable,
    read_gold,
    shown,
)

__all__ = ["Comparison", "compare", "is_readable", "read_gold", "shown"]

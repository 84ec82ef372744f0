"""Arrays that are sent without a copy of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Pieces:
    """An array in pieces along its first axis, which are sent without a copy of the whole."""

    pieces: Sequence[np.ndarray]
    """at least one; of one dtype, and of one shape but for the first axis"""

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pieces[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        length = sum(len(piece) for piece in self.pieces)
        return (length, *self.pieces[0].shape[1:])

    def joined(self) -> np.ndarray:
        """The array."""
        return np.concatenate(self.pieces)


ToSend = Mapping[str, np.ndarray | Pieces]
"""Arrays that are sent. All of them arrive as arrays."""

"""Warns when gradient clipping, not the learning rate, sets the length of most updates."""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


class ClippingWarning:
    """Counts the updates of an attempt whose gradient was clipped. Every step has the same number of updates."""

    def __init__(self) -> None:
        self._steps = 0
        self._clipped = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Counts one step's row of metrics."""
        share = row.get("optimizer/clipped_frac")
        if share is not None:
            self._steps += 1
            self._clipped += share

    def report(self) -> None:
        """Warns at the end of an attempt if more than half of the updates were clipped."""
        # Not earlier: the first updates from random weights are clipped in a healthy run too.
        if self._clipped > self._steps / 2:
            logger.warning(
                "%.0f %% of the updates were clipped to a gradient norm of objective.clip_grad, so large and small "
                "gradients gave updates of one length; raise clip_grad, set it to 0, or lower optimizer.lr",
                100 * self._clipped / self._steps,
            )

"""Warns when gradient clipping, not the learning rate, sets the length of most updates."""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

MIN_STEPS = 20


class ClippingWarning:
    """Warns once when more than half of the updates were clipped, over all steps of this attempt and at least `MIN_STEPS`."""

    def __init__(self) -> None:
        self._steps = 0
        self._clipped = 0.0
        self._is_given = False

    def add(self, row: Mapping[str, Any]) -> None:
        """Counts one step's row of metrics; every step has the same number of updates."""
        share = row.get("optimizer/clipped_frac")
        if share is None:
            return
        self._steps += 1
        self._clipped += share
        if self._steps >= MIN_STEPS and self._clipped > self._steps / 2 and not self._is_given:
            self._is_given = True
            logger.warning(
                "step %d: %.0f %% of the updates so far were clipped to a gradient norm of objective.clip_grad, so large "
                "and small gradients give updates of one length; raise clip_grad, set it to 0, or lower optimizer.lr",
                row["step"],
                100 * self._clipped / self._steps,
            )

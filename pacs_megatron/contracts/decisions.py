"""The small message that rank 0 broadcasts at each phase boundary, so that all ranks run the same phase."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class DecisionKind(StrEnum):
    """The next phase of all ranks."""

    WAIT = "wait"
    """Heartbeat: the driver is alive and busy."""
    GENERATE = "generate"
    """Embedded engine: every rank samples its share of the requests that follow."""
    SYNC = "sync"
    """The servers lost the weights: all ranks send them again, then rank 0 repeats the request."""
    TRAIN = "train"
    EVALUATE = "evaluate"
    STOP = "stop"
    """All ranks leave the exchange with the error in `detail`."""


class Interrupted(Exception):  # noqa: N818  (not an error: a stop request)
    """A rank has a stop request. Raised on all ranks; the loop saves the position of the run and returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`detail` is a JSON object of plain values. Tokens are sent separately, as flat buffers."""

    kind: DecisionKind
    reason: str
    detail: dict[str, Any]

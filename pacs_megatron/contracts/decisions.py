"""The message that rank 0 broadcasts at each phase boundary, so that all ranks take the same action."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class DecisionKind(StrEnum):
    """The next action of all ranks."""

    WAIT = "wait"
    """Heartbeat: the driver is busy; keep waiting."""
    GENERATE = "generate"
    """Embedded engine: sample the requests that follow."""
    SYNC = "sync"
    """The servers have lost the weights: send them again, then repeat the request."""
    TRAIN = "train"
    EVALUATE = "evaluate"
    STOP = "stop"
    """Leave the loop because of `reason`; `error` marks a failure."""


class Interrupted(Exception):  # noqa: N818  (not an error: a stop request)
    """All ranks agreed to stop; the run saves its position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`detail` is a JSON object of plain values; token payloads are sent separately as flat buffers."""

    kind: DecisionKind
    reason: str
    detail: dict[str, Any]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Decision":
        raw = json.loads(data)
        return cls(kind=DecisionKind(raw["kind"]), reason=raw["reason"], detail=raw["detail"])

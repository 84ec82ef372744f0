"""The small message that rank 0 broadcasts at each phase boundary, so that all ranks do the same thing."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class DecisionKind(StrEnum):
    """What all ranks do next."""

    WAIT = "wait"
    """Heartbeat: the driver is alive and busy; keep waiting."""
    GENERATE = "generate"
    """Embedded engine: sample the requests that follow."""
    SYNC = "sync"
    """The servers have lost the weights: send them once more, then ask again."""
    TRAIN = "train"
    EVALUATE = "evaluate"
    STOP = "stop"
    """Leave the loop; `reason` says why and `error` whether it is a failure."""


class Interrupted(Exception):  # noqa: N818  (not an error: the run was asked to stop)
    """All ranks agreed to abandon the step; the last boundary is what gets saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`detail` is a JSON object of plain values; token payloads travel apart, as flat buffers."""

    kind: DecisionKind
    reason: str
    detail: dict[str, Any]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Decision":
        raw = json.loads(data)
        return cls(kind=DecisionKind(raw["kind"]), reason=raw["reason"], detail=raw["detail"])

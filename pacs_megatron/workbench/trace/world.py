"""Traces all ranks of small worlds and compares their collectives.

    python -m pacs_megatron.workbench.trace.world '[{"config": "configs/runs/X.yaml", ...}]'

torch and Megatron are imported once; every rank of every world is a fork of this process. It prints
a JSON list with one value of `WorldTrace.to_json` for each world.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.config.load import load_config
from pacs_megatron.runtime.processes import die_with_parent
from pacs_megatron.workbench.trace.rank import TraceRequest, prepare_process


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldTrace:
    """Result of a world."""

    hang: str
    """which rank waits for what, if ranks waited for each other; otherwise empty"""
    differences: list[str]
    """of the collectives between ranks of a group; empty if there is none"""
    errors: list[str]
    """the traceback of each rank that failed for another reason than a hang"""
    outcomes: list[str]
    """of each rank's whole step"""
    num_collectives: list[int]
    """by rank"""
    num_bytes: list[int]
    """of the collectives' buffers, by rank"""
    host_syncs: list[dict[str, Any]]
    """of all ranks, in the form of a single rank's trace"""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def main() -> int:
    """Traces the worlds of the first argument, whose runs have GPUs of one kind."""
    die_with_parent()
    requests = [TraceRequest(**each) for each in json.loads(sys.argv[1])]
    prepare_process(requests[0])

    import torch

    from pacs_megatron.workbench.trace.collectives import CollectiveTrace
    from pacs_megatron.workbench.trace.mode import FakeCuda
    from pacs_megatron.workbench.trace.step import fake_gpus

    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork
    mode = FakeCuda(CollectiveTrace())
    fake_gpus(requests[0], mode)
    # Forked ranks then have them.
    import pacs_megatron.policy.critic
    import pacs_megatron.workbench.trace.whole_step  # noqa: F401

    worlds = [_trace_world(request, mode).to_json() for request in requests]
    json.dump(worlds, sys.stdout)
    return 0


def _trace_world(request: TraceRequest, mode: Any) -> WorldTrace:
    from pacs_megatron.workbench.trace.exchange import Exchanges

    config = load_config(Path(request.config), request.overrides).config
    connections: dict[int, Connection] = {}
    children = []
    for rank in range(ranks_to_start(config)):
        here, there = Pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            for other in [here, *connections.values()]:
                other.close()
            _rank_main(replace(request, rank=rank), mode, there)
        there.close()
        connections[rank] = here
        children.append(pid)

    exchanges = Exchanges(connections)
    results = exchanges.serve()
    for pid in children:
        os.waitpid(pid, 0)
    for connection in connections.values():
        connection.close()
    return _compared(results, exchanges.hang)


def _rank_main(request: TraceRequest, mode: Any, connection: Connection) -> NoReturn:
    """One rank. Never returns: every outcome ends in os._exit."""
    gc.freeze()
    die_with_parent()
    from pacs_megatron.workbench.trace.exchange import EndlessWaitError, Exchange

    exchange = Exchange(connection)
    mode.collectives.exchange = exchange
    result: dict[str, Any] = {"error": "", "outcome": "", "has_ended": False}
    try:
        result["outcome"] = _execute(request, mode)
        result["has_ended"] = True
    except EndlessWaitError:
        pass
    except BaseException:  # noqa: BLE001  every failure is reported to the parent
        result["error"] = f"rank {request.rank}: {traceback.format_exc()}"
    result["calls"] = mode.collectives.calls
    result["host_syncs"] = dict(mode.host_syncs)
    exchange.finish(result)
    os._exit(0)


def _execute(request: TraceRequest, mode: Any) -> str:
    from pacs_megatron.workbench.trace.step import execute

    return execute(request, mode).outcome


def _compared(results: Mapping[int, dict[str, Any] | None], hang: str) -> WorldTrace:
    from pacs_megatron.workbench.trace.compare import RankCalls, differences

    ranks = []
    errors = []
    syncs: dict[tuple[str, str, str, str], int] = {}
    for rank, result in results.items():
        if result is None:
            errors.append(f"rank {rank} died")
            continue
        if result["error"]:
            errors.append(result["error"])
        ranks.append(RankCalls(rank=rank, calls=result["calls"], has_ended=result["has_ended"]))
        for key, count in result["host_syncs"].items():
            syncs[key] = syncs.get(key, 0) + count

    names = ("phase", "operation", "place", "function")
    return WorldTrace(
        hang=hang,
        differences=differences(ranks),
        errors=errors,
        outcomes=[result["outcome"] for result in results.values() if result is not None],
        num_collectives=[len(each.calls) for each in ranks],
        num_bytes=[sum(call.num_bytes for call in each.calls) for each in ranks],
        host_syncs=[
            {**dict(zip(names, key, strict=True)), "count": count} for key, count in syncs.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())

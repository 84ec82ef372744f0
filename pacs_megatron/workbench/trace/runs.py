"""Traces of several ranks: one child process each, kept below the cache folder by digest."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pacs_megatron
from pacs_megatron.config import LoadedConfig
from pacs_megatron.errors import ConfigError, PacsError, one_line
from pacs_megatron.runtime.files import json_line, write_atomically
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.workbench.plan.known_models import need_config
from pacs_megatron.workbench.trace.guard import cache_folder
from pacs_megatron.workbench.trace.rank import TraceRequest, to_argument

_LIMIT_S = 3600.0
"""seconds until a child that hangs is ended"""
_AT_ONCE = 2
"""children at once: each has up to 17 GiB of host memory for a whole model"""
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy")
"""whose versions change a trace"""


def trace_ranks(loaded: LoadedConfig, requests: Sequence[TraceRequest]) -> list[dict[str, Any]]:
    """The traces of the requests, from the cache where they are there.

    Args:
        loaded: the configuration of all requests.
        requests: of one rank each.

    Raises:
        ConfigError: with the last line of the child that failed.
    """
    common = _common_digest(loaded)
    finished: list[int] = []

    def result_of(request: TraceRequest) -> dict[str, Any]:
        path = cache_folder() / "traces" / f"{_digest(common, request)}.json"
        traced = _read(path)
        if traced is None:
            traced = _run(request)
            write_atomically(path, [json_line(traced)])
        finished.append(request.rank)
        return traced

    def reason() -> str:
        return f"for traces of ranks ({len(finished)} of {len(requests)} done)"

    with report_wait(reason), ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(result_of, requests))


def _run(request: TraceRequest) -> dict[str, Any]:
    """The trace of a child process."""
    command = [sys.executable, "-m", "pacs_megatron.workbench.trace.rank", to_argument(request)]
    root = str(Path(pacs_megatron.__file__).parents[1])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            output, errors = child.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            raise ConfigError(
                f"the trace of rank {request.rank} did not end within {_LIMIT_S:.0f} s"
            ) from None

    if child.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {child.returncode}"
        raise ConfigError(f"the trace of rank {request.rank} failed: {one_line(reason)}")
    traced: dict[str, Any] = json.loads(output)
    return traced


def _read(path: Path) -> dict[str, Any] | None:
    """A kept trace; None if there is none that can be read."""
    with suppress(OSError, ValueError):
        traced: dict[str, Any] = json.loads(path.read_bytes())
        return traced
    return None


def _digest(common: str, request: TraceRequest) -> str:
    options = asdict(request)
    # The resolved configuration is in `common`; its path and overrides do not matter.
    for name in ("config", "overrides"):
        del options[name]
    text = common + json.dumps(options, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _common_digest(loaded: LoadedConfig) -> str:
    """Of the configuration, the model, this package's code and the versions below it."""
    digest = hashlib.sha256(loaded.to_yaml().encode())
    with suppress(PacsError):
        model = need_config(loaded.config.model.path, loaded.where("model.path"))
        digest.update(json.dumps(dict(model), sort_keys=True, default=str).encode())
    root = Path(pacs_megatron.__file__).parent
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.cpp")]):
        digest.update(path.read_bytes())

    digest.update(sys.version.encode())
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name}={importlib.metadata.version(name)}".encode())
    return digest.hexdigest()

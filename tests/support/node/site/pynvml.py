"""NVML of a modelled GPU: total and free memory."""

from types import SimpleNamespace

from node_link import call, connect


def nvmlInit() -> None:  # noqa: N802
    """Nothing."""


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def nvmlDeviceGetMemoryInfo(gpu: int) -> SimpleNamespace:  # noqa: N802
    with connect() as link:
        return SimpleNamespace(**call(link, {"op": "memory", "gpu": gpu}))

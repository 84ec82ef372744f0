"""NVML of a modelled GPU: total and free memory."""

from types import SimpleNamespace

from node_link import call, connect


def nvmlInit() -> None:  # NVML's names
    """Nothing."""


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetMemoryInfo(gpu: int) -> SimpleNamespace:
    with connect() as link:
        return SimpleNamespace(**call(link, {"op": "memory", "gpu": gpu}))

"""Ports for servers that start in another process."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SERVER_PORTS = range(10_000, 19_000)
"""The ports from 20000 to 31999 are for `MASTER_PORT` of Slurm jobs (environment.job_port)."""
_ATTEMPTS = 64


def free_port(host: str, wanted: int = 0) -> int:
    """`wanted`, or another port if `wanted` has a listener.

    The port is below those of Slurm jobs and of outgoing connections, which could use it before a
    slow server binds it.
    """
    try:
        below = range(
            _SERVER_PORTS.start, min(_SERVER_PORTS.stop, int(_KERNEL_RANGE.read_text().split()[0]))
        )
    except (OSError, ValueError, IndexError):
        below = range(0)
    # Processes with equal seeds choose different ports.
    others = random.SystemRandom().choices(below, k=_ATTEMPTS) if below else []
    for port in filter(None, (wanted, *others)):
        with suppress(OSError):
            return _bound(host, port)
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    """Binds `port` and returns its number. Raises OSError if it has a listener."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port > 0))
        probe.bind((host, port))
        return int(probe.getsockname()[1])

"""Ports for servers that start in another process."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SERVER_PORTS = range(10_000, 19_000)
"""The ports from 20000 to 31999 are for `MASTER_PORT` of Slurm jobs (environment.job_port)."""
_ATTEMPTS = 64
_given: set[int] = set()
"""by this process: a server that starts binds its port seconds later"""


def free_port(host: str, preferred: int = 0) -> int:
    """`preferred`, or another port if `preferred` has a listener: one that this process has not
    given before.

    The port is below those of Slurm jobs and of outgoing connections, which could use it before a
    slow server binds it.

    Args:
        host: Address on which the server will listen.
        preferred: 0 for any port.
    """
    candidates = [preferred] if preferred else []
    ports = _ports_for_servers()
    if ports:
        # Seeded by the system, so that processes of a job choose different ports.
        drawn = random.SystemRandom().choices(ports, k=_ATTEMPTS)
        candidates += [port for port in drawn if port not in _given]

    for port in candidates:
        with suppress(OSError):
            found = _bound(host, port)
            _given.add(found)
            return found
    return _bound(host, 0)


def _ports_for_servers() -> range:
    """The part of _SERVER_PORTS below the kernel's range for outgoing connections; empty where that
    range is not readable.
    """
    try:
        first_outgoing = int(_KERNEL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return range(0)
    return range(_SERVER_PORTS.start, min(_SERVER_PORTS.stop, first_outgoing))


def _bound(host: str, port: int) -> int:
    """Binds `port`, or any port for 0, and returns its number.

    Raises OSError if the port has a listener.
    """
    with socket.socket() as probe:
        # A port in TIME_WAIT counts as free; for port 0 the kernel chooses a free one.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port > 0))
        probe.bind((host, port))
        return int(probe.getsockname()[1])

"""The port of a server that binds later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pacs_megatron.runtime import ports
from pacs_megatron.runtime.environment import job_port
from pacs_megatron.runtime.ports import free_port


def test_no_outgoing_connection_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives the ports of its range to any socket of a busy host."""
    (tmp_path / "range").write_text("18000\t60999\n")
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "range")
    found = {free_port("127.0.0.1") for _ in range(50)}
    assert len(found) > 40 and all(10_000 <= port < 18_000 for port in found)


def test_no_server_takes_the_port_of_a_job() -> None:
    jobs = {job_port(str(number)) for number in range(24_000)}
    assert not jobs & set(ports._SERVER_PORTS)
    assert not jobs & {free_port("127.0.0.1") for _ in range(200)}


def test_a_port_with_a_listener_is_not_chosen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert free_port("127.0.0.1", taken) != taken
    assert free_port("127.0.0.1", taken) == taken


@pytest.mark.parametrize("text", [None, "", "x y", "1024 65535"])
def test_without_ports_below_the_kernels_the_kernel_chooses(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_KERNEL_RANGE", tmp_path / "range")
    if text is not None:
        (tmp_path / "range").write_text(text)
    assert free_port("127.0.0.1") > 0


def test_an_address_of_another_host_is_an_error() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("203.0.113.1")


def test_no_two_servers_get_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of the same start has not bound its port yet when the next one gets its own."""
    monkeypatch.setattr(ports, "_SERVER_PORTS", range(10_000, 10_400))
    given = [free_port("127.0.0.1") for _ in range(60)]
    assert len(set(given)) == 60
    # A restart keeps its port.
    assert free_port("127.0.0.1", given[0]) == given[0]

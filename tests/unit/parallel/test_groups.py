"""Ranks that cannot connect end in one line that names the cause."""

from __future__ import annotations

import os
import resource
import socket

from pacs_megatron.contracts import Layout
from pacs_megatron.errors import ConnectError
from tests.support.ranks import run_ranks


def message_of(variables: dict[str, str], num_files: int | None = None) -> str:
    """Of the error of a rank with these variables and this limit of open files."""

    def connect(_rank: int, _world: int) -> str:
        from pacs_megatron.parallel.groups import initialize

        os.environ.update(variables)
        if num_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
        try:
            initialize(Layout(world_size=1), seed=0, control_timeout_s=10.0)
        except ConnectError as error:
            return str(error)
        return ""

    [message] = run_ranks(connect, 1, init_process_group=False)
    return message


def test_an_interface_that_does_not_exist() -> None:
    message = message_of({"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert "nosuch0" in message and "GLOO_SOCKET_IFNAME" in message


def test_a_port_of_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = message_of({"MASTER_PORT": port})
    assert f"127.0.0.1:{port}" in message and "EADDRINUSE" in message


def test_too_few_files() -> None:
    assert "`ulimit -n`" in message_of({}, num_files=12)

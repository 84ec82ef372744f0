"""Calls to the modelled host. Standard library only:
it runs in the stand-in servers' interpreter.
"""

import json
import os
import socket


def connect() -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ["PACS_TEST_NODE"])
    return link


def call(link: socket.socket, request: "dict[str, object]") -> "dict[str, object]":
    link.sendall(json.dumps(request).encode() + b"\n")
    with link.makefile("rb") as file:
        line = file.readline()
    return dict(json.loads(line)) if line else {"code": 1, "reason": "the modelled host has ended"}

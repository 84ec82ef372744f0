"""Framed messages between rank 0 and the driver: a JSON header and flat arrays. No pickled objects.

Frame: int64 header bytes, int64 payload bytes, header, payload. The payload has the arrays one
after the other, the header their layout (`parallel.transfer`).
"""

import contextlib
import json
import select
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pacs_megatron.contracts.pieces import ToSend
from pacs_megatron.errors import RolloutError
from pacs_megatron.parallel.transfer import layout_of, padded_bytes, views

_PREFIX = struct.Struct("<qq")
_CHUNK = 1 << 20
_ON_WAIT_S = 1.0
_LAYOUT = "layout"
"""key of the arrays' layout in a header"""
OnWait = Callable[[], None] | None


class Connection:
    """One end of a stream socket.

    `timeout_s` limits a pause inside a message; `poll` waits for the first byte.
    """

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float | None = None) -> None:
        self._sock = sock
        self._peer = peer
        self._sock.settimeout(timeout_s)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(
        self, header: Mapping[str, Any], arrays: ToSend | None = None, on_wait: OnWait = None
    ) -> None:
        """Sends a message. Calls `on_wait` every second until the peer reads.

        Raises RolloutError if the peer has ended.
        """
        # Not joined, because the payload can be gigabytes.
        parts = padded_bytes(arrays or {})
        head = json.dumps({**header, _LAYOUT: layout_of(arrays or {})}).encode()
        prefix = _PREFIX.pack(len(head), sum(len(part) for part in parts))
        with self._peer_errors():
            self._send_all(memoryview(prefix + head), on_wait)
            for block in _blocks(parts):
                self._send_all(block.data, on_wait)

    def poll(self, timeout_s: float) -> bool:
        """Whether data or the end of the stream arrives within `timeout_s`."""
        readable, _, _ = select.select([self._sock], [], [], timeout_s)
        return bool(readable)

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The next message. Raises RolloutError if the peer has ended."""
        head_size, payload_size = _PREFIX.unpack(bytes(self._read(_PREFIX.size)))
        header = json.loads(bytes(self._read(head_size)))
        payload = np.frombuffer(self._read(payload_size), np.uint8)
        return header, views(payload, header.pop(_LAYOUT))

    def close(self) -> None:
        self._sock.close()

    def _send_all(self, view: memoryview, on_wait: OnWait) -> None:
        while view:
            if on_wait is not None:
                _, writable, _ = select.select([], [self._sock], [], _ON_WAIT_S)
                if not writable:
                    on_wait()
                    continue
            num_sent = self._sock.send(view)
            view = view[num_sent:]

    def _read(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)
        num_read = 0
        with self._peer_errors():
            while num_read < size:
                count = self._sock.recv_into(view[num_read:], min(_CHUNK, size - num_read))
                if count == 0:
                    raise ConnectionResetError
                num_read += count
        return buffer

    @contextlib.contextmanager
    def _peer_errors(self) -> Iterator[None]:
        """Converts errors of the socket to RolloutError with the name of the peer."""
        try:
            yield
        except TimeoutError as error:
            raise RolloutError(
                f"the {self._peer} stopped in the middle of a message for "
                f"{self._sock.gettimeout():g} s; see its log in the run's folder"
            ) from error
        except OSError as error:
            raise RolloutError(
                f"the {self._peer} has ended unexpectedly; see its log in the run's folder"
            ) from error


def _blocks(parts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The same bytes. Small parts are copied together, up to _CHUNK bytes, for fewer calls of the
    kernel; a large one is not copied.
    """
    block: list[np.ndarray] = []
    size = 0
    for part in parts:
        if size + len(part) > _CHUNK and block:
            yield _joined(block)
            block = []
            size = 0
        block.append(part)
        size += len(part)
    if block:
        yield _joined(block)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

"""Framed messages between rank 0 and the driver: a JSON header and flat arrays. No pickled objects.

Frame: int64 header bytes, int64 payload bytes, header, payload (`parallel.transfer`'s packing).
"""

import contextlib
import json
import select
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pacs_megatron.errors import RolloutError
from pacs_megatron.parallel.transfer import pack_arrays, unpack_arrays

_PREFIX = struct.Struct("<qq")
_CHUNK = 1 << 20
_ON_WAIT_S = 1.0
Arrays = Mapping[str, np.ndarray] | None
OnWait = Callable[[], None] | None


class Connection:
    """One end of a stream socket.

    `timeout_s` limits a pause inside a message; `poll` waits for the first byte.
    """

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float | None = None) -> None:
        self._sock = sock
        self._peer = peer
        self._sock.settimeout(timeout_s)

    def send(
        self, header: Mapping[str, Any], arrays: Arrays = None, on_wait: OnWait = None
    ) -> None:
        """Sends a message.

        Calls `on_wait` every second until the peer reads. Raises RolloutError if it has ended.
        """
        head = json.dumps(header).encode()
        payload = pack_arrays(arrays) if arrays else b""
        with self._named():
            for data in (_PREFIX.pack(len(head), len(payload)) + head, payload):
                view = memoryview(data)
                while view:
                    if (
                        on_wait is not None
                        and not select.select([], [self._sock], [], _ON_WAIT_S)[1]
                    ):
                        on_wait()
                    else:
                        view = view[self._sock.send(view) :]

    def fileno(self) -> int:
        return self._sock.fileno()

    def poll(self, timeout_s: float) -> bool:
        """Whether data or the end of the stream arrives within `timeout_s`."""
        return bool(select.select([self._sock], [], [], timeout_s)[0])

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The next message. Raises RolloutError if the peer has ended."""
        head_size, payload_size = _PREFIX.unpack(bytes(self._read(_PREFIX.size)))
        header = json.loads(bytes(self._read(head_size)))
        return header, unpack_arrays(bytes(self._read(payload_size))) if payload_size else {}

    def _read(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)
        done = 0
        with self._named():
            while done < size:
                count = self._sock.recv_into(view[done:], min(_CHUNK, size - done))
                if count == 0:
                    raise ConnectionResetError
                done += count
        return buffer

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
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

    def close(self) -> None:
        self._sock.close()

"""Messages between rank 0 and the driver arrive as they were sent."""

import socket
import threading

import numpy as np
import pytest

from pacs_megatron.contracts.pieces import Pieces
from pacs_megatron.errors import RolloutError
from pacs_megatron.rollout.wire import Connection

ARRAYS = {
    "ids": np.arange(200_001, dtype=np.int32),  # no multiple of 8 bytes
    "flags": np.array([True, False, True]),
    "empty": np.empty((0, 3), np.int16),
    "logprobs": np.array([-0.5, np.nan, -0.0], np.float32),
    "transposed": np.arange(12).reshape(3, 4).T,
    "offsets": np.array([0, 3]),
}


def test_arrays_arrive_with_their_bits_and_shapes() -> None:
    ours, theirs = (Connection(end, "peer", 10.0) for end in socket.socketpair())
    sender = threading.Thread(
        target=lambda: [ours.send({"op": "a"}, ARRAYS), ours.send({"op": "b"})]
    )
    sender.start()
    header, arrays = theirs.receive()
    assert header == {"op": "a"} and list(arrays) == list(ARRAYS)
    for name, sent in ARRAYS.items():
        assert arrays[name].dtype == sent.dtype and arrays[name].shape == sent.shape
        assert arrays[name].tobytes() == sent.tobytes()
        assert not arrays[name].flags.writeable
    assert theirs.receive() == ({"op": "b"}, {})
    sender.join()
    ours.close()
    with pytest.raises(RolloutError, match="the peer has ended unexpectedly"):
        theirs.receive()
    theirs.close()


def test_pieces_arrive_as_one_array() -> None:
    """Small and large ones: several in one call of the kernel, and several calls for one."""
    whole = np.arange(3_000_001, dtype=np.uint8)
    pieces = Pieces(np.split(whole, [1, 5, 5, 700_000, 1_400_000, 2_900_000]))
    ours, theirs = (Connection(end, "peer", 10.0) for end in socket.socketpair())
    message = {"pieces": pieces, "offsets": np.array([0, 3])}
    sender = threading.Thread(target=lambda: ours.send({}, message))
    sender.start()
    _, arrays = theirs.receive()
    sender.join()
    np.testing.assert_array_equal(arrays["pieces"], whole, strict=True)
    assert arrays["offsets"].tolist() == [0, 3]
    ours.close()
    theirs.close()

"""What a received message is: its bytes, and what came with them."""

from __future__ import annotations

import copy
import pickle

import pytest

import pyverbs_lite as pvl
from pyverbs_lite._connection.inbox import Arrival

PLAIN = Arrival(memoryview(b"plain"), 5, None, pvl.WCOpcode.RECV, 0)
MARKED = Arrival(memoryview(b"marked"), 6, 0xFFFFFFFE, pvl.WCOpcode.RECV, 1)
NOTICE = Arrival(memoryview(b""), 12345, 0, pvl.WCOpcode.RECV_RDMA_WITH_IMM, 2)


@pytest.mark.parametrize(("arrival", "data"), [(PLAIN, b"plain"), (MARKED, b"marked"), (NOTICE, b"")])
def test_it_is_bytes_with_what_came_with_them(arrival: Arrival, data: bytes) -> None:
    message = pvl.Message._of(arrival)
    for found in (message, copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert isinstance(found, pvl.Message)
        assert (found, repr(found), hash(found), found[1:3]) == (data, repr(data), hash(data), data[1:3])
        assert (found.imm, found.opcode, found.byte_len) == (arrival.imm, arrival.opcode, arrival.byte_len)
        assert type(found) is type(message)
    assert memoryview(message).obj is message


def test_one_without_more_is_no_more_than_bytes() -> None:
    message = pvl.Message._of(PLAIN)
    assert type(message) is pvl.Message
    assert not hasattr(message, "__dict__")
    assert pvl.Message(b"plain") == message
    with pytest.raises(AttributeError):
        message.imm = 5

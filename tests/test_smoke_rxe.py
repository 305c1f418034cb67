from __future__ import annotations

import pytest
from support import connected

pytestmark = pytest.mark.rdma


def test_a_message_each_way() -> None:
    with connected() as (left, right):
        left.send(b"to the right", imm=0x89ABCDEF)
        message = right.recv(timeout=10)
        assert (message, message.imm) == (b"to the right", 0x89ABCDEF)
        right.send(b"and back")
        answer = left.recv(timeout=10)
        assert (answer, answer.imm) == (b"and back", None)

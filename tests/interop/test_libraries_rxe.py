"""Other Python libraries at the other end of an RC connection made by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from support import own_gid

import pyverbs_lite as pvl

from .processes import PEERS, PYTHON, ROOT, Program, free_port, until_tcp_listens
from .rows import LIBRARIES, Row, of

pytestmark = pytest.mark.rdma

LIE = """
import runpy, sys
sys.path.insert(0, {peers!r})
import by_hand
right = by_hand.pattern
by_hand.pattern = lambda side, what, length: right(side, what, length)[:: -1 if what == "write" else 1]
runpy.run_path({peers!r} + "/by_hand_pvl.py")
"""


@pytest.mark.parametrize("row", of("libraries"), ids=str)
def test_library(row: Row, start: Callable[..., Program], context: pvl.Context) -> None:
    port = free_port()
    where = (context.name, own_gid(context).gid_index, port)
    commands = {
        "ours": (sys.executable, "-W", "error", ROOT / row.program),
        "theirs": (PYTHON[row.peer], PEERS / LIBRARIES[row.peer]),
    }
    sides = ("ours", "theirs") if row.ours == "server" else ("theirs", "ours")
    server = start(*commands[sides[0]], *where, "server")
    until_tcp_listens(port, server)
    client = start(*commands[sides[1]], *where, "client")
    for program in (client, server):
        assert "every byte and number is right" in program.end()


@pytest.mark.parametrize("peer", LIBRARIES)
def test_wrong_bytes_are_noticed(peer: str, start: Callable[..., Program], context: pvl.Context) -> None:
    """Ours writes other bytes than it should: the end of the other library has to see it."""
    port = free_port()
    where = (context.name, own_gid(context).gid_index, port)
    server = start(PYTHON[peer], PEERS / LIBRARIES[peer], *where, "server")
    until_tcp_listens(port, server)
    client = start(sys.executable, "-W", "error", "-c", LIE.format(peers=str(PEERS)), *where, "client")
    assert "AssertionError: written: byte 0 of 6007 is" in server.end(None)
    assert "the peer hung up" in client.end(None)

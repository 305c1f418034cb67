"""What the table has no rows for: each peer is asked, and refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from .processes import PEERS, Program, free_port, until_cm_listens, until_tcp_listens
from .rows import HOLES, LIBRARIES, Hole

pytestmark = pytest.mark.rdma

SIW = "198.51.100.1"
#: Peer -> what it says when it is to use siw.
SAYS = {
    "ibv_rc_pingpong": "Failed to modify QP to RTS",
    "ibv_srq_pingpong": "Failed to modify QP[0] to RTS",
    "ibv_uc_pingpong": "Couldn't create QP",
    "ibv_ud_pingpong": "Couldn't create QP",
    "udaddy": "unable to create QP: Operation not supported",
    "mckey": "unable to create QP: Operation not supported",
    "pyverbs": "Failed to modify QP state to RTS",
    "ibverbs": "No space left on device",
}


def over_siw(peer: str, start: Callable[..., Program]) -> Program:
    if peer == "mckey":
        return start("mckey", "-m", "239.7.8.30", "-b", SIW)
    if peer == "udaddy":
        server = start("udaddy", "-b", SIW)
        until_cm_listens(server)
        return start("udaddy", "-s", SIW)
    port = free_port()
    if peer in LIBRARIES:
        command: tuple[object, ...] = (interpreter(peer), PEERS / LIBRARIES[peer], "siw0", 0, port)
        server = start(*command, "server")
        until_tcp_listens(port, server)
        return start(*command, "client")
    common = (peer, "-d", "siw0", "-g", 0, "-p", port)
    server = start(*common)
    if SAYS[peer] == "Couldn't create QP":
        return server
    until_tcp_listens(port, server)
    return start(*common, "127.0.0.1")

"""What the table has no rows for: each peer is asked, and refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from support import own_gid

import pyverbs_lite as pvl

from .processes import PEERS, PYTHON, ROOT, Program, free_port, until_cm_listens, until_tcp_listens
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
    "ibverbs": "ibv_modify_qp(->RTS) failed",
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
        command: tuple[object, ...] = (PYTHON[peer], PEERS / LIBRARIES[peer], "siw0", 0, port)
        server = start(*command, "server")
        until_tcp_listens(port, server)
        return start(*command, "client")
    common = (peer, "-d", "siw0", "-g", 0, "-p", port)
    server = start(*common)
    if SAYS[peer] != "Couldn't create QP":
        until_tcp_listens(port, server)
        start(*common, "127.0.0.1")  # which may wait for ever once the server is gone
    return server


@pytest.mark.parametrize("hole", [hole for hole in HOLES if hole.where == "over siw"], ids=str)
def test_what_siw_has_not(hole: Hole, start: Callable[..., Program]) -> None:
    assert SAYS[hole.peer] in over_siw(hole.peer, start).end(None)


@pytest.mark.parametrize("hole", [hole for hole in HOLES if "wrong data" in hole.where], ids=str)
def test_what_srq_pingpong_cannot_notice(hole: Hole, start: Callable[..., Program], context: pvl.Context) -> None:
    port = free_port()
    common = ("-d", context.name, "-p", port, "-n", 10)
    ours = (sys.executable, "-W", "error", ROOT / "examples" / "srq_pingpong.py")
    tool = (hole.peer, "-g", own_gid(context).gid_index)
    servers, clients = (tool, ours) if hole.where.endswith("client") else (ours, tool)
    server = start(*servers, *common, "-c")
    until_tcp_listens(port, server)
    client = start(*clients, *common, "127.0.0.1")
    client.end()
    assert "invalid data" not in server.end()

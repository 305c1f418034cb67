"""rping as the server of examples/rping.py, and as its client, on RoCE and on iWARP."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from .processes import ROOT, Program, free_port, until_cm_listens
from .rows import Row, of

pytestmark = pytest.mark.rdma

ADDRESS = {"rxe": "192.0.2.1", "siw": "198.51.100.1"}
IPV6 = "2001:db8::1"
LETTERS = bytes(range(65, 123)).decode()


def ping(number: int, size: int) -> str:
    """Return the text of a ping: its number, and letters from another one on each time; a NUL ends it."""
    head = f"rdma-ping-{number}: "
    return (head + (LETTERS[number:] + LETTERS * (size // len(LETTERS) + 1)))[: size - 1]


@pytest.mark.parametrize("row", [row for row in of("rping") if "wrong" not in row.options], ids=str)
def test_rping(row: Row, start: Callable[..., Program]) -> None:
    options, _, where = row.options.partition(", ")
    words = options.split()
    common = ("-a", IPV6 if where else ADDRESS[row.device], "-p", free_port(), *words)
    ours, tool = (sys.executable, "-W", "error", ROOT / row.program), ("rping",)
    servers, clients = (tool, ours) if row.ours == "client" else (ours, tool)
    server = start(*servers, "-s", *common)
    until_cm_listens(server)
    client = start(*clients, "-c", *common)
    client.end()
    server.end()
    size = int(words[words.index("-S") + 1]) if "-S" in words else 64
    pings = [ping(number, size) for number in range(int(words[words.index("-C") + 1]))]
    shown = pings if "-v" in words else []
    for program, start_of in ((client, "ping data: "), (server, "server ping data: ")):
        lines = [line for line in program.output.splitlines() if line.startswith(start_of)]
        assert lines == [start_of + text for text in shown], program.all()
        assert "mismatch" not in program.output


#: Runs an example that changes the memory behind its own back: the server what it writes, the client its ping.
LIE = """
import ctypes, runpy, struct, sys
import pyverbs_lite as pvl

post, adverts = pvl.QP.post_send, []

def flip(addr):
    byte = ctypes.c_char.from_address(addr + 20)
    byte.value = bytes([byte.value[0] ^ 1])

def lie(self, *requests):
    for wr in requests:
        addr = wr.sg_list[0].addr
        if wr.opcode == pvl.WROpcode.RDMA_WRITE:
            flip(addr)
        elif wr.opcode == pvl.WROpcode.SEND and "-c" in sys.argv:
            adverts.append(struct.unpack(">QII", ctypes.string_at(addr, 16)))
            if len(adverts) % 2 == 0:  # the peer has read the ping, and is told where to write it back
                flip(adverts[-2][0])
    post(self, *requests)

pvl.QP.post_send = lie
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("row", [row for row in of("rping") if "wrong" in row.options], ids=str)
def test_wrong_bytes_are_noticed(row: Row, start: Callable[..., Program]) -> None:
    common = ("-a", ADDRESS[row.device], "-p", free_port(), *row.options.partition(",")[0].split())
    ours, tool = (sys.executable, "-W", "error", "-c", LIE, ROOT / row.program), ("rping",)
    servers, clients = (tool, ours) if row.ours == "client" else (ours, tool)
    server = start(*servers, "-s", *common)
    until_cm_listens(server)
    client = start(*clients, "-c", *common)
    assert "data mismatch!" in client.end(None)
    server.end()

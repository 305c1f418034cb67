"""librdmacm's tools, each opposite a small script of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from .processes import ROOT, Program, free_port, until_cm_listens, until_in_group
from .rows import Row, of

pytestmark = pytest.mark.rdma

ADDRESS = {"rxe": "192.0.2.1", "siw": "198.51.100.1"}
#: One for each test: what is left of a group is not to meet the next.
GROUPS = {"client": "239.7.8.31", "server": "239.7.8.32", "neither": "239.7.8.33"}


def rows(*peers: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [row for row in of("cm_tools") if row.peer in peers], ids=str)


def run(row: Row, start: Callable[..., Program], *options: object, server_flag: str = "-b") -> tuple[str, str]:
    """Run the tool and our script, the server first; return what each wrote: the tool, and we."""
    address = ADDRESS[row.device]
    ours, tool = (sys.executable, "-W", "error", ROOT / row.program), (row.peer,)
    if row.ours == "client":
        server = start(*tool, server_flag, address, *options)
        until_cm_listens(server)
        client = start(*ours, "-s", address, *options)
        programs = server, client
    else:
        server = start(*ours, "-b", address, *options)
        server.line("listening")
        client = start(*tool, "-s", address, *options)
        programs = client, server
    client.end()
    server.end()
    assert programs[1].output.endswith("all right\n")
    return programs[0].output, programs[1].output


@rows("ucmatose")
def test_ucmatose(row: Row, start: Callable[..., Program]) -> None:
    told, _ = run(row, start, "-p", free_port(), *row.options.split())
    assert "data transfers complete" in told
    assert told.endswith("test complete\nreturn status 0\n")


@rows("rdma_server", "rdma_client")
def test_rdma_client_and_server(row: Row, start: Callable[..., Program]) -> None:
    told, _ = run(row, start, "-p", free_port(), server_flag="-s")
    assert told == f"{row.peer}: start\n{row.peer}: end 0\n"


@rows("udaddy")
def test_udaddy(row: Row, start: Callable[..., Program]) -> None:
    told, _ = run(row, start, *row.options.split())
    assert told.endswith("data transfers complete\ntest complete\nreturn status 0\n")


#: What the tool's sender writes before it posts its datagrams, and after.
POSTING = (
    "mckey: starting client\nmckey: joining\nmckey: joined dgid: ::ffff:{} mlid 0x0 sl 0\ninitiating data transfers\n"
)
POSTED = "data transfers complete\n"


@rows("mckey")
def test_mckey(row: Row, start: Callable[..., Program]) -> None:
    """The tool pauses for three seconds once it has joined, and its receives are posted before.

    Its sender is held between posting and destroying until everything has arrived; see docs/interop.md.
    """
    group = GROUPS[row.ours]
    common = ("-m", group, "-b", ADDRESS[row.device], "-C", 6)
    script = (sys.executable, "-W", "error", ROOT / row.program)
    if row.ours == "server":
        receiver = start(*script, "receive", *common)
        receiver.line("joined")
    else:
        receiver = start("mckey", *common)
        until_in_group(group, receiver)
    if row.ours == "client":
        sender = start(*script, "send", *common)
    else:
        sender = start("mckey", "-s", *common, held=len(POSTING.format(group)) + len(POSTED) // 2)
    received = receiver.end()
    if row.ours != "client":
        assert sender.process.poll() is None
        sender.release()
    sent = sender.end()
    for output, ours in ((received, "server"), (sent, "client")):
        assert output.endswith("all right\n" if row.ours == ours else f"{POSTED}test complete\nreturn status 0\n")
    if row.ours != "client":
        assert sent.startswith(POSTING.format(group) + POSTED)

"""The four ibv_*_pingpong, each as the server of our example and as its client."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from support import own_gid

import pyverbs_lite as pvl

from .processes import ROOT, Program, free_port, until_tcp_listens
from .rows import Row, of

pytestmark = pytest.mark.rdma

ITERS = 60


@pytest.mark.parametrize("row", of("pingpong"), ids=str)
def test_pingpong(row: Row, start: Callable[..., Program], context: pvl.Context) -> None:
    options, _, wrong = row.options.partition(", wrong")
    words = options.split()
    size = int(words[words.index("-s") + 1]) if "-s" in words else 1024
    port = free_port()
    common = ["-p", port, "-d", context.name, "-n", ITERS, *words, *(["-s", size] if "-s" not in words else [])]
    unmarked = [word for word in common if word != "-c"] if wrong else common
    gid_index = own_gid(context).gid_index
    ours, tool = (sys.executable, ROOT / row.program), (row.peer, "-g", gid_index)
    servers, clients = (tool, ours) if row.ours == "client" else (ours, tool)
    server = start(*servers, *common)
    until_tcp_listens(port, server)
    client = start(*clients, *unmarked, "127.0.0.1")
    ended = [client.end()]
    # The C server says what is wrong, and ends with 0 all the same.
    ended.append(server.end(None if wrong and row.ours == "server" else 0))
    for output in ended:
        assert f"{size * ITERS * 2} bytes in " in output
        assert f"{ITERS} iters in " in output
    found = [text for text in "".join(ended).splitlines() if "invalid data in page" in text]
    pages = (size + 4095) // 4096
    assert [text.rpartition(" ")[2] for text in found] == ([str(page) for page in range(pages)] if wrong else [])

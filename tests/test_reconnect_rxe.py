"""Connecting to who is not there yet, and again to who was lost."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from certificates import dialling, serving
from support import connected, counts, in_thread

import pyverbs_lite as pvl

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(120)]

QUICK = pvl.Backoff(first=0.02, most=0.1, total=20)
WAYS = {"tcp": (pvl, "127.0.0.1"), "rxe": (pvl.cm, "192.0.2.1"), "siw": (pvl.cm, "198.51.100.1")}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def lose(left: pvl.Connection, right: pvl.Connection) -> None:
    """Let the peer be gone for ``left``, as it is where its process dies."""
    right._link.peer.control.close()
    right.close()
    with pytest.raises(pvl.PeerClosedError):
        left.recv(timeout=10)


def pinned() -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmPin")).split()[1])


# ------------------------------------------------------------ until somebody is there


@pytest.mark.parametrize("way", ["tcp", "rxe"])
def test_connect_waits_for_a_listener_that_comes_late(way: str) -> None:
    via, host = WAYS[way]
    port = free_port()
    dial = in_thread(via.connect, host, port, reconnect=QUICK)
    time.sleep(0.1)
    with via.listen(host, port) as listener, listener.accept(20) as right, dial() as left:
        left.send(b"at last")
        assert right.recv(timeout=5) == b"at last"


def test_connect_waits_for_room(no_leaks: None) -> None:
    def handler(conn: pvl.Connection) -> None:
        conn.send(conn.recv())

    with pvl.Server("127.0.0.1", 0, handler, max_connections=1) as server:
        server.start()
        first = pvl.connect("127.0.0.1", server.port)
        with pytest.raises(pvl.HandshakeError):
            pvl.connect("127.0.0.1", server.port)
        dial = in_thread(pvl.connect, "127.0.0.1", server.port, reconnect=QUICK)
        time.sleep(0.1)
        first.close()
        with dial() as second:
            second.send(b"room")
            assert second.recv(timeout=10) == b"room"


def test_another_key_is_no_reason_to_try_again() -> None:
    with pvl.listen("127.0.0.1", 0, authkey="one") as listener:
        accepted = in_thread(listener.accept, 10)
        with pytest.raises(pvl.AuthenticationError):
            pvl.connect("127.0.0.1", listener.port, authkey="other", reconnect=QUICK)
        with pytest.raises(pvl.AuthenticationError):
            accepted()


def test_a_cancelled_attempt_ends(no_leaks: None) -> None:
    async def run() -> None:
        opening = pvl.aio.connect("127.0.0.1", free_port(), reconnect=pvl.Backoff(first=30, most=30))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_await(opening), 0.1)

    async def _await(opening: Any) -> Any:
        return await opening

    asyncio.run(run())
    limit = time.monotonic() + 5
    while any("connect" in thread.name for thread in threading.enumerate()) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not [thread.name for thread in threading.enumerate() if "connect" in thread.name]


# ------------------------------------------------------------ anew


@pytest.mark.parametrize("way", WAYS)
def test_a_lost_connection_is_made_anew_with_its_buffers(way: str) -> None:
    via, host = WAYS[way]
    start, later, gone = bytearray(b"start"), bytearray(b"later"), bytearray(b"gone")
    with via.listen(host, 0, buffers={"theirs": bytearray(b"theirs")}) as listener:
        accepted = in_thread(listener.accept, 20)
        left = via.connect(host, listener.port, buffers={"start": start}, recv_depth=9)
        right = accepted()
        left.register(later, name="later", access=pvl.AccessFlags.REMOTE_READ)
        left.register(gone, name="gone").close()
        old = left.remote["theirs"]
        lose(left, right)
        accepted = in_thread(listener.accept, 20)
        with left.reconnect() as again, accepted() as other:
            assert left.closed
            assert again.info.recv_depth == 9
            assert sorted(again.local) == sorted(other.remote) == ["later", "start"]
            assert other.remote["later"].access == pvl.AccessFlags.REMOTE_READ
            other.write(other.remote["start"], b"START")
            assert start == b"START"
            assert other.read(other.remote["later"]) == b"later"
            with pytest.raises(pvl.StateError):
                again.read(old)
            assert again.read(again.remote["theirs"]) == b"theirs"
            again.send(b"good")
            assert other.recv(timeout=5) == b"good"


def test_what_was_in_flight_is_not_sent_again() -> None:
    with pvl.listen("127.0.0.1", 0) as listener:
        accepted = in_thread(listener.accept, 20)
        left = pvl.connect("127.0.0.1", listener.port)
        right = accepted()
        lose(left, right)
        with pytest.raises(pvl.VerbsError):
            left.send(b"lost")
        accepted = in_thread(listener.accept, 20)
        with left.reconnect() as again, accepted() as other:
            again.send(b"new")
            assert other.recv(timeout=5) == b"new"


def test_key_and_tls_are_used_again() -> None:
    with pvl.listen("127.0.0.1", 0, authkey="k", ssl_context=serving()) as listener:
        accepted = in_thread(listener.accept, 20)
        left = pvl.connect("127.0.0.1", listener.port, authkey="k", ssl_context=dialling())
        lose(left, accepted())
        accepted = in_thread(listener.accept, 20)
        with left.reconnect() as again, accepted() as other:
            again.send(b"good")
            assert other.recv(timeout=5) == b"good"


def test_reconnect_may_fail_and_be_called_again(no_leaks: None) -> None:
    with pvl.listen("127.0.0.1", 0) as listener:
        port = listener.port
        accepted = in_thread(listener.accept, 20)
        left = pvl.connect("127.0.0.1", port, buffers={"mine": bytearray(b"mine")})
        lose(left, accepted())
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            left.reconnect(timeout=5)
    with pvl.listen("127.0.0.1", port) as listener:
        accepted = in_thread(listener.accept, 20)
        with left.reconnect() as again, accepted() as other:
            assert other.read(other.remote["mine"]) == b"mine"
            assert again.local["mine"].length == 4


def test_it_waits_for_a_listener_that_was_started_again() -> None:
    with pvl.listen("127.0.0.1", 0) as listener:
        port = listener.port
        accepted = in_thread(listener.accept, 20)
        left = pvl.connect("127.0.0.1", port, reconnect=QUICK)
        lose(left, accepted())
    renewed = in_thread(left.reconnect)
    time.sleep(0.1)
    with pvl.listen("127.0.0.1", port) as listener, listener.accept(20) as other, renewed() as again:
        again.send(b"good")
        assert other.recv(timeout=5) == b"good"


def test_who_may_not_is_told_why() -> None:
    with connected() as (left, right):
        with pytest.raises(pvl.StateError, match="this side has accepted the connection"):
            right.reconnect()
        with pytest.raises(ValueError, match="timeout"):
            left.reconnect(timeout=-1)
        left.send(b"it is as it was")
        assert right.recv(timeout=5) == b"it is as it was"
        left.close()
        with pytest.raises(pvl.ClosedError, match="closed by this side; use connect"):
            left.reconnect()


def test_a_forked_child_may_not() -> None:
    with connected() as (left, _):
        pid = os.fork()
        if not pid:
            try:
                left.reconnect()
            except pvl.ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_connection_that_works_may_be_renewed_too() -> None:
    with pvl.listen("127.0.0.1", 0) as listener:
        accepted = in_thread(listener.accept, 20)
        left = pvl.connect("127.0.0.1", listener.port)
        right = accepted()
        accepted = in_thread(listener.accept, 20)
        with left.reconnect() as again, accepted() as other:
            with pytest.raises(pvl.PeerClosedError):
                right.recv(timeout=5)
            again.send(b"good")
            assert other.recv(timeout=5) == b"good"
        right.close()


@pytest.mark.parametrize("cm", [False, True])
def test_in_asyncio(cm: bool) -> None:
    listen, connect = (pvl.aio.cm_listen, pvl.aio.cm_connect) if cm else (pvl.aio.listen, pvl.aio.connect)

    async def run() -> None:
        async with listen("192.0.2.1", 0) as listener:
            accepting = asyncio.ensure_future(listener.accept(20))
            left = await connect("192.0.2.1", listener.port, buffers={"mine": bytearray(b"mine")}, reconnect=QUICK)
            right = await accepting
            await right.close()
            with pytest.raises(pvl.PeerClosedError):
                await left.recv(timeout=10)
            accepting = asyncio.ensure_future(listener.accept(20))
            async with await left.reconnect() as again, await accepting as other:
                assert list(again.local) == ["mine"]
                assert await other.read(other.remote["mine"]) == b"mine"
                await again.send(b"good")
                assert await other.recv(timeout=5) == b"good"

    asyncio.run(run())


# ------------------------------------------------------------ fifty times (report 35)


@pytest.mark.parametrize("way", ["tcp", "rxe"])
def test_fifty_reconnects_leave_nothing_behind(way: str) -> None:
    via, host = WAYS[way]
    with via.listen(host, 0, recv_depth=4, send_depth=4, max_message_size=512) as listener:
        accepted = in_thread(listener.accept, 20)
        options = {"recv_depth": 4, "send_depth": 4, "max_message_size": 512}
        left = via.connect(host, listener.port, buffers={"mine": bytearray(1000)}, **options)
        right = accepted()
        seen = []
        for number in range(50):
            if number % 2:
                right.close()
            else:  # without a goodbye
                right._link.peer.control.close()
            accepted = in_thread(listener.accept, 20)
            left = left.reconnect()
            right.close()
            right = accepted()
            left.send(b"%d" % number)
            assert right.recv(timeout=10) == b"%d" % number
            assert right.remote["mine"].length == 1000
            if number in (4, 49):
                seen.append({**counts(), "pinned": pinned()})
        assert seen[1] == seen[0]
        left.close()
        right.close()


def test_a_hundred_failures_leave_nothing_behind(no_leaks: None) -> None:
    """Each on another path: nobody there, another key, TLS on one side, a peer that leaves, no such GID."""
    with pvl.listen("127.0.0.1", 0, authkey="k", timeout=5) as listener:

        def accept() -> Any:
            with suppress(pvl.VerbsError):
                return listener.accept(10)

        def leave() -> None:
            with socket.create_connection((listener.host, listener.port)) as sock:
                sock.sendall(b"\x89PVL\r\n")

        refused = free_port()
        ways: list[Any] = [
            lambda: pvl.connect("127.0.0.1", listener.port, authkey="other"),
            lambda: pvl.connect("127.0.0.1", listener.port, authkey="k", ssl_context=dialling()),
            leave,
            lambda: pvl.connect("127.0.0.1", listener.port, authkey="k", gid_index=200),
        ]
        for number in range(100):
            with suppress(OSError, pvl.VerbsError):
                pvl.connect("127.0.0.1", refused)
            accepting = in_thread(accept)
            with suppress(OSError, pvl.VerbsError):
                ways[number % len(ways)]()
            assert accepting() is None


ORPHAN = """
    import os, sys, threading, time
    import pyverbs_lite as pvl

    with pvl.listen("127.0.0.1", 0) as listener:
        threading.Thread(target=listener.accept, daemon=True).start()
        conn = pvl.connect("127.0.0.1", listener.port, buffers={"big": bytearray(1 << 20)})
        print("here", flush=True)
        time.sleep(60)
"""


def test_a_killed_process_leaves_no_orphans() -> None:
    """The kernel takes back what a process had, however it ended (report 36)."""
    with connected():
        pass
    before = counts()
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(ORPHAN)], stdout=subprocess.PIPE)
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline() == b"here\n"
        during = counts()
        process.kill()
        process.wait()
    assert during["qp"] > before["qp"]
    limit = time.monotonic() + 10
    while {**counts(), "fd": 0} != {**before, "fd": 0} and time.monotonic() < limit:
        time.sleep(0.02)
    assert {**counts(), "fd": 0} == {**before, "fd": 0}
    assert os.path.exists("/sys/class/infiniband/rxe0")

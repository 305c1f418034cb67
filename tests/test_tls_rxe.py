"""Connections whose control channel is protected by TLS, with a key and without, and in asyncio."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest
from certificates import dialling, serving
from support import in_thread

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma


@pytest.mark.parametrize("authkey", [None, "and a key"])
def test_everything_works_through_tls(authkey, no_leaks):
    options: dict[str, Any] = {"authkey": authkey, "buffers": {"from the start": bytearray(b"there")}}
    with pvl.listen("127.0.0.1", 0, ssl_context=serving(), **options) as listener:
        accepted = in_thread(listener.accept, 10)
        with (
            pvl.connect("localhost", listener.port, ssl_context=dialling(), **options) as left,
            accepted() as right,
        ):
            left.send(b"question")
            assert right.recv(timeout=5) == b"question"
            assert left.read(left.remote["from the start"]) == b"there"
            with right.register(bytearray(b"later on"), name="later"):
                assert left.read(left.remote.wait("later", 5)) == b"later on"
            limit = time.monotonic() + 5
            while "later" in left.remote and time.monotonic() < limit:
                time.sleep(0.001)
            assert list(left.remote) == ["from the start"]
            left.close()
            with pytest.raises(pvl.PeerClosedError, match="closed the connection"):
                right.recv(timeout=5)


def test_a_listener_goes_on_after_those_who_do_not_get_through(no_leaks):
    with pvl.listen("127.0.0.1", 0, ssl_context=serving(), timeout=2) as listener:
        for options, mine, theirs in (
            ({"ssl_context": dialling(trust="another")}, pvl.AuthenticationError, pvl.AuthenticationError),
            ({}, pvl.HandshakeError, pvl.PeerProtocolError),
        ):
            accepted = in_thread(listener.accept, 10)
            with pytest.raises(mine):
                pvl.connect("127.0.0.1", listener.port, **options)
            with pytest.raises(theirs):
                accepted()
        accepted = in_thread(listener.accept, 10)
        with socket.create_connection((listener.host, listener.port)), pytest.raises(pvl.HandshakeTimeout):
            accepted()  # it says nothing
        accepted = in_thread(listener.accept, 10)
        with pvl.connect("127.0.0.1", listener.port, ssl_context=dialling()) as left, accepted() as right:
            left.send(b"good")
            assert right.recv(timeout=5) == b"good"


def test_in_asyncio(no_leaks):
    async def run() -> None:
        async with pvl.aio.listen("127.0.0.1", 0, ssl_context=serving(), authkey=b"k") as listener:

            async def dial(**options: Any) -> pvl.aio.Connection:
                return await pvl.aio.connect("127.0.0.1", listener.port, authkey=b"k", **options)

            both = await asyncio.gather(
                listener.accept(10), dial(ssl_context=dialling(trust="another")), return_exceptions=True
            )
            assert [type(one) for one in both] == [pvl.AuthenticationError] * 2
            right, left = await asyncio.gather(listener.accept(10), dial(ssl_context=dialling()))
            async with left, right:
                await left.send(b"good")
                assert await right.recv(timeout=5) == b"good"

    asyncio.run(run())


def test_a_cancelled_handshake_leaves_nothing(no_leaks):
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            with pytest.raises(TimeoutError):
                opening = pvl.aio.connect("127.0.0.1", silent.getsockname()[1], ssl_context=dialling())
                await asyncio.wait_for(_await(opening), 0.2)

    async def _await(opening: Any) -> Any:
        return await opening

    asyncio.run(run())
    time.sleep(0.3)


def test_a_server_lets_in_who_has_certificate_and_key(no_leaks):
    """A peer that is silent, or has no certificate or no key, holds up nobody."""

    def handler(conn: pvl.Connection) -> None:
        conn.send(bytes(conn.recv(timeout=10)).upper())

    with_both: dict[str, Any] = {"ssl_context": dialling(show="the right one"), "authkey": "k"}
    without: tuple[dict[str, Any], ...] = (
        {"authkey": "k"},
        {"authkey": "k", "ssl_context": dialling()},
        {"authkey": "k", "ssl_context": dialling(show="another")},
        {"authkey": "other", "ssl_context": with_both["ssl_context"]},
        {"ssl_context": with_both["ssl_context"]},
    )
    with pvl.Server("127.0.0.1", 0, handler, ssl_context=serving(demand=True), authkey="k") as server:
        server.start()
        with socket.create_connection((server.host, server.port)):  # says nothing
            for options in without:
                with pytest.raises(pvl.HandshakeError):
                    pvl.connect("127.0.0.1", server.port, **options)
                with pvl.connect("127.0.0.1", server.port, **with_both) as conn:
                    conn.send(b"good")
                    assert conn.recv(timeout=10) == b"GOOD"
        assert server.stats.accepted == len(without)

"""A server whose handlers are coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop
from support import counts

import pyverbs_lite as pvl
from pyverbs_lite import aio, wire

pytestmark = pytest.mark.rdma

HERE = "127.0.0.1"
SMALL: dict[str, Any] = {"max_message_size": 512, "recv_depth": 4, "send_depth": 4}


def run(main: Callable[[], Awaitable[Any]], seconds: float = 30) -> None:
    """Run it in a loop of its own, with a limit."""

    async def limited() -> None:
        await asyncio.wait_for(main(), seconds)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(limited())


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Let uvloop open what it keeps for as long as the process lives."""
    loop = uvloop.new_event_loop()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Check that a test leaves nothing behind, without waiting for the garbage collector."""

    async def warm() -> None:
        async with aio.Server(HERE, 0, echo, **SMALL) as server, connect(server) as conn:
            assert await ask(conn, b"warm") == b"WARM"

    run(warm)
    before = counts()
    yield
    assert counts() == before


async def echo(conn: aio.Connection) -> None:
    async for message in conn:
        await conn.send(message.upper(), imm=message.imm)


def connect(server: aio.Server, **options: Any) -> Any:
    return aio.connect(HERE, server.port, **{**SMALL, "timeout": 20, **options})


async def ask(conn: aio.Connection, data: bytes) -> bytes:
    await conn.send(data)
    return bytes(await conn.recv())


async def until(what: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.005)


def test_each_peer_has_a_task_and_the_loop_one_descriptor_for_all(no_leaks: None) -> None:
    async def main() -> None:
        cache = bytearray(b"cache" * 10)
        async with aio.Server(HERE, 0, echo, buffers={"cache": cache}, **SMALL) as server:
            await server.start()  # again is the same as once
            context = pvl.open_device()
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(context)
                peers = [await stack.enter_async_context(connect(server, device=context)) for _ in range(3)]
                await until(lambda: len(server.connections) == 3)
                fds = len(os.listdir("/proc/self/fd"))
                more = await stack.enter_async_context(connect(server, device=context))
                await until(lambda: len(server.connections) == 4)
                client = 1 + 1 + 3  # TCP, a channel, and what its watch copies and makes
                assert len(os.listdir("/proc/self/fd")) - fds == client + 1  # the server's own: TCP
                answers = await asyncio.gather(*(ask(peer, b"n%d" % n) for n, peer in enumerate(peers)))
                assert answers == [b"N0", b"N1", b"N2"]
                assert await more.read(more.remote["cache"][:7]) == b"cacheca"
                late = await server.register(bytearray(b"late"), name="late")
                for peer in peers:
                    assert await peer.read(await peer.remote.wait("late", 20)) == b"late"
                late.close()
                await until(lambda: "late" not in peers[0].remote)
                stats = server.stats
                assert (stats.accepted, stats.refused, stats.failed, stats.handler_errors, stats.open) == (
                    4,
                    0,
                    0,
                    0,
                    4,
                )
                assert sorted(peer.recvs for peer in stats.peers.values()) == [0, 1, 1, 1]
            await until(lambda: server.stats.open == 0)
        assert repr(server) == f"<aio.Server on {HERE} port {server.port} (stopped)>"
        cache += b"free again"

    run(main)


def test_it_runs_on_uvloop(no_leaks: None) -> None:
    async def main() -> None:
        async with aio.Server(HERE, 0, echo, **SMALL) as server:
            async with connect(server) as left, connect(server) as right:
                for number in range(20):
                    answers = await asyncio.gather(ask(left, b"l%d" % number), ask(right, b"r%d" % number))
                    assert answers == [b"L%d" % number, b"R%d" % number]
            await until(lambda: server.stats.open == 0)

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), 30))
    finally:
        loop.close()


def test_slow_handshakes_and_a_full_house_hold_up_nobody(no_leaks: None) -> None:
    async def main() -> None:
        async with aio.Server(HERE, 0, echo, timeout=60, max_handshakes=2, max_connections=1, **SMALL) as server:
            with contextlib.ExitStack() as stack:
                for _ in range(50):
                    stack.enter_context(socket.create_connection((HERE, server.port)))
                async with connect(server) as conn:
                    assert await ask(conn, b"in") == b"IN"
                    with pytest.raises(pvl.HandshakeError, match="BUSY") as caught:
                        await connect(server)
                    assert caught.value.code == wire.RefuseCode.BUSY

    run(main)


def test_a_handler_that_fails_ends_its_own_connection_only(no_leaks: None, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(conn: aio.Connection) -> None:
        if await conn.recv() == b"fail":
            raise LookupError("no such thing")
        await echo(conn)

    async def main() -> None:
        async with aio.Server(HERE, 0, handler, **SMALL) as server:
            async with connect(server) as bad, connect(server) as good:
                await good.send(b"go on")
                await bad.send(b"fail")
                with pytest.raises(pvl.PeerClosedError):
                    await bad.recv()
                assert await ask(good, b"here") == b"HERE"
                assert server.stats.handler_errors == 1
                (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
                assert record.name == "pyverbs_lite.server"

    run(main)


def test_stop_lets_handlers_end_and_then_closes_what_is_left(no_leaks: None) -> None:
    ended = []

    async def handler(conn: aio.Connection) -> None:
        word = bytes(await conn.recv())
        if word == b"deaf":
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("cancelled")
        try:
            await conn.recv()
            ended.append("went")
        except pvl.ClosedError:
            ended.append("closed")

    async def main() -> None:
        async with aio.Server(HERE, 0, handler, **SMALL) as server:
            async with connect(server) as goes, connect(server) as stays:
                await goes.send(b"go")
                await stays.send(b"stay")
                await until(lambda: len(server.connections) == 2)
                stopping = asyncio.create_task(server.stop(1.0))
                await goes.send(b"now")
                with pytest.raises(pvl.PeerClosedError):
                    await goes.recv()
                await stopping
                assert ended == ["went", "closed"]
            with pytest.raises(pvl.ClosedError):
                await server.start()

    run(main)


def test_a_handler_that_takes_no_notice_is_cancelled(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyverbs_lite._aio.server.NOTICE", 0.1)
    ended = []

    async def handler(conn: aio.Connection) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(conn.closed)

    async def main() -> None:
        async with aio.Server(HERE, 0, handler, **SMALL) as server:
            async with connect(server):
                await until(lambda: len(server.connections) == 1)
                await server.stop(0)
        assert ended == [True]
        assert server.stats.handler_errors == 0

    run(main)


def test_who_is_in_a_hurry_need_not_wait_for_who_is_not(no_leaks: None) -> None:
    async def main() -> None:
        async with aio.Server(HERE, 0, aio.Connection.recv, **SMALL) as server, connect(server) as conn:
            patient = asyncio.create_task(server.stop(None))
            await until(lambda: server.closed)
            await server.stop(0.1)
            await patient
            with pytest.raises(pvl.PeerClosedError):
                await conn.recv()

    run(main)


def test_a_handler_may_stop_the_server(no_leaks: None) -> None:
    async def main() -> None:
        async def handler(conn: aio.Connection) -> None:
            await conn.recv()
            await server.stop()
            await conn.send(b"stopped")
            await conn.recv()

        async with aio.Server(HERE, 0, handler, **SMALL) as server:
            async with connect(server) as conn:
                serving = asyncio.create_task(server.serve_forever())
                assert await ask(conn, b"stop") == b"stopped"
                await conn.send(b"bye")
                await serving

    run(main)


def test_a_task_that_is_cancelled_before_it_begins_leaves_no_connection(no_leaks: None) -> None:
    async def main() -> None:
        async with aio.Server(HERE, 0, echo, **SMALL, max_connections=1) as server:
            arrived = server._arrived

            def cancel_at_once(conn: pvl.Connection, peer: str) -> None:
                arrived(conn, peer)
                (task,) = server._tasks
                task.cancel()

            server._arrived = cancel_at_once  # type: ignore[method-assign]
            async with connect(server) as peer:
                with pytest.raises(pvl.PeerClosedError):
                    await peer.recv()
            await until(lambda: not server._tasks)
            del server._arrived
            assert (server.stats.open, server.stats.handler_errors) == (0, 0)
            async with connect(server) as peer:  # its place is free
                assert await ask(peer, b"next") == b"NEXT"

    run(main)


def test_serving_may_be_cancelled(no_leaks: None) -> None:
    async def main() -> None:
        async with aio.Server(HERE, 0, echo, **SMALL) as server:
            serving = asyncio.create_task(server.serve_forever())
            async with connect(server) as conn:
                assert await ask(conn, b"a") == b"A"
                serving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await serving
                assert await ask(conn, b"b") == b"B"

    run(main)


def test_it_says_when_it_is_not_started() -> None:
    async def main() -> None:
        server = aio.Server(HERE, 0, echo)
        assert repr(server) == f"<aio.Server for {HERE} port 0 (not started)>"
        with pytest.raises(pvl.ClosedError, match="async with"):
            server.port  # noqa: B018
        with pytest.raises(TypeError, match="callable"):
            aio.Server(HERE, 0, None)  # type: ignore[arg-type]
        with pytest.raises(pvl.DeviceNotFoundError):
            await aio.Server(HERE, 0, echo, device="nope").start()
        await server.stop()
        with pytest.raises(pvl.ClosedError):
            await server.start()

    run(main)

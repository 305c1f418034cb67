"""A server whose handlers are tasks of any event loop that anyio knows; see ``test_aio_server_rxe`` as well."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from support import counts, settle_threads
from test_anyio_rxe import run  # noqa: F401  # a fixture

import pyverbs_lite as pvl
from pyverbs_lite import anyio as face

pytestmark = pytest.mark.rdma

HERE = "127.0.0.1"
SMALL: dict[str, Any] = {"max_message_size": 512, "recv_depth": 4, "send_depth": 4}


@pytest.fixture(autouse=True)
def _nothing_is_left(run: Any) -> Any:  # noqa: F811  # which lets a loop open what it keeps
    before = counts()
    yield
    settle_threads()
    assert counts() == before


async def echo(conn: face.Connection) -> None:
    async for message in conn:
        await conn.send(message.upper(), imm=message.imm)


def connect(server: face.Server, **options: Any) -> Any:
    return face.connect(HERE, server.port, **{**SMALL, "timeout": 20, **options})


async def ask(conn: face.Connection, data: bytes) -> bytes:
    await conn.send(data)
    return bytes(await conn.recv(timeout=20))


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.005)


def test_each_peer_has_a_task(run: Any) -> None:  # noqa: F811
    cache = bytearray(b"cache" * 10)

    async def main() -> None:
        async with face.Server(HERE, 0, echo, buffers={"cache": cache}, **SMALL) as server:
            assert repr(server) == f"<anyio.Server on {HERE} port {server.port}, 0 connections>"
            async with connect(server) as one, connect(server) as two:
                await until(lambda: len(server.connections) == 2)
                assert all(isinstance(conn, face.Connection) for conn in server.connections)

                async def talk(conn: face.Connection, word: bytes) -> None:
                    for number in range(40):  # more than there are receives
                        assert await ask(conn, b"%s %d" % (word, number)) == b"%s %d" % (word.upper(), number)

                async with anyio.create_task_group() as group:
                    group.start_soon(talk, one, b"one")
                    group.start_soon(talk, two, b"two")
                assert await one.read(one.remote["cache"][3:7]) == b"heca"
                late = await server.register(bytearray(b"late"), name="late")
                assert await two.read(await two.remote.wait("late", 20)) == b"late"
                late.close()
                await until(lambda: "late" not in one.remote)
                assert (server.stats.accepted, server.stats.open, server.stats.total.recvs) == (2, 2, 80)
            await until(lambda: server.stats.open == 0)
            assert server.stats.handler_errors == 0
        assert server.closed
        assert repr(server) == f"<anyio.Server on {HERE} port {server.port} (stopped)>"
        cache.extend(b"free again")
        with pytest.raises(pvl.ClosedError):
            async with server:
                pass

    run(main)


def test_a_handler_sleeps_until_it_is_woken_or_out_of_time(run: Any) -> None:  # noqa: F811
    async def handler(conn: face.Connection) -> None:
        with pytest.raises(pvl.WaitTimeout):
            await conn.recv(timeout=0.02)
        with anyio.move_on_after(0.02) as scope:
            await conn.recv()
        assert scope.cancelled_caught
        got: list[bytes] = []

        async def take() -> None:
            got.append(bytes(await conn.recv()))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(take)
            await conn.send(b"ready")
        assert sorted(got) == [b"0", b"1", b"2"]
        await conn.send(b"good")
        with pytest.raises(pvl.PeerClosedError):
            await conn.recv()

    async def main() -> None:
        async with face.Server(HERE, 0, handler, **SMALL) as server:
            async with connect(server) as conn:
                assert await conn.recv(timeout=20) == b"ready"
                for number in range(3):
                    await conn.send(b"%d" % number)
                assert await conn.recv(timeout=20) == b"good"
            await until(lambda: server.stats.open == 0)
            assert server.stats.handler_errors == 0

    run(main)


def test_a_handler_that_fails_ends_its_own_connection_only(
    run: Any,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(conn: face.Connection) -> None:
        if await conn.recv() == b"fail":
            raise LookupError("no such thing")
        await echo(conn)

    async def main() -> None:
        async with face.Server(HERE, 0, handler, **SMALL) as server, connect(server) as bad, connect(server) as good:
            await good.send(b"go on")
            await bad.send(b"fail")
            with pytest.raises(pvl.PeerClosedError):
                await bad.recv(timeout=20)
            assert await ask(good, b"here") == b"HERE"
            assert server.stats.handler_errors == 1

    run(main)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.name == "pyverbs_lite.server"


def test_stop_lets_handlers_end_then_closes_and_then_cancels(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("pyverbs_lite._anyio.server.NOTICE", 0.1)
    ended: list[str] = []

    async def handler(conn: face.Connection) -> None:
        if await conn.recv() == b"deaf":
            try:
                await anyio.sleep(60)
            finally:
                ended.append(f"cancelled, {conn.closed}")
        try:
            await conn.recv()
            ended.append("went")
        except pvl.ClosedError:
            ended.append("closed")

    async def main() -> None:
        async with face.Server(HERE, 0, handler, **SMALL) as server:
            async with connect(server) as goes, connect(server) as stays, connect(server) as deaf:
                for conn, word in ((goes, b"go"), (stays, b"stay"), (deaf, b"deaf")):
                    await conn.send(word)
                await until(lambda: server.stats.total.recvs == 3)
                async with anyio.create_task_group() as group:
                    group.start_soon(server.stop, None)
                    await until(lambda: server.closed)
                    await goes.send(b"now")
                    with pytest.raises(pvl.PeerClosedError):
                        await goes.recv(timeout=20)
                    await server.stop(0.1)  # who is in a hurry need not wait for who is not
                assert ended == ["went", "closed", "cancelled, True"]
            await server.serve_forever()  # it has stopped
            assert (server.stats.open, server.stats.handler_errors) == (0, 0)

    run(main)


def test_a_handler_may_stop_the_server(run: Any) -> None:  # noqa: F811
    async def main() -> None:
        async def handler(conn: face.Connection) -> None:
            await conn.recv()
            await server.stop()
            await conn.send(b"stopped")
            await conn.recv()

        async with face.Server(HERE, 0, handler, **SMALL) as server:
            async with connect(server) as conn:
                assert await ask(conn, b"stop") == b"stopped"
                await conn.send(b"bye")
                await server.serve_forever()

    run(main)


def test_a_block_that_is_cancelled_or_fails_closes_everything(run: Any) -> None:  # noqa: F811
    ended: list[bool] = []

    async def handler(conn: face.Connection) -> None:
        try:
            await conn.recv()
        finally:
            ended.append(True)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            async with face.Server(HERE, 0, handler, **SMALL) as server:

                async def peer() -> None:
                    async with connect(server) as conn:
                        with pytest.raises(pvl.PeerClosedError):
                            await conn.recv(timeout=20)

                group.start_soon(peer)
                await until(lambda: len(server.connections) == 1)
                with pytest.raises(LookupError):  # and no group of errors
                    async with server_that_fails():
                        pass
                with anyio.CancelScope() as scope:
                    async with face.Server(HERE, 0, handler, **SMALL) as other:
                        async with connect(other):
                            await until(lambda: len(other.connections) == 1)
                            scope.cancel()
                            await other.serve_forever()
                assert scope.cancelled_caught
                assert ended == [True]
        assert ended == [True, True]

    def server_that_fails() -> Any:
        class Failing:
            async def __aenter__(self) -> None:
                async with face.Server(HERE, 0, handler, **SMALL):
                    raise LookupError("in the block")

            async def __aexit__(self, *_: object) -> None:
                pass

        return Failing()

    run(main)


def test_mistakes(run: Any) -> None:  # noqa: F811
    async def main() -> None:
        with pytest.raises(TypeError, match="handler must be callable"):
            face.Server(HERE, 0, None)  # type: ignore[arg-type]
        server = face.Server(HERE, 0, echo, max_connections=0)
        assert repr(server) == f"<anyio.Server for {HERE} port 0 (not started)>"
        with pytest.raises(pvl.ClosedError, match="use async with"):
            _ = server.port
        with pytest.raises(ValueError, match="max_connections"):
            async with server:
                pass
        await server.stop()

    run(main)

"""The anyio face, on trio and on asyncio: operations, cancellation, and what is left behind."""

from __future__ import annotations

import gc
import socket
import warnings
import weakref
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from support import counts, descriptors, in_thread, settle_threads

import pyverbs_lite as pvl
from pyverbs_lite import anyio as face

pytestmark = pytest.mark.rdma

#: Name -> anyio's name of it, and its options.
BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "trio": ("trio", {}),
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
}
WAYS = {
    "tcp": (face.connect, face.listen, "127.0.0.1"),
    "cm": (face.cm_connect, face.cm_listen, "192.0.2.1"),
    "iwarp": (face.cm_connect, face.cm_listen, "198.51.100.1"),
}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Let librdmacm open what it keeps for as long as the process lives."""
    for host in ("192.0.2.1", "198.51.100.1"):
        with pvl.cm.listen(host, 0) as listener:
            accepting = in_thread(listener.accept)
            with pvl.cm.connect(host, listener.port), accepting():
                pass


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Run a coroutine on one backend; afterwards no descriptor, no thread and no warning may be left."""

    backend, options = BACKENDS[request.param]

    async def limited(main: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        with anyio.fail_after(60):
            return await main(*args)

    def call(main: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return anyio.run(limited, main, args, backend=backend, backend_options=options)

    call(anyio.sleep, 0)  # what a loop opens once
    gc.collect()
    before = descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield call
        settle_threads()
        gc.collect()
    assert descriptors() - before == Counter()


@asynccontextmanager
async def connected(
    way: str = "tcp", server: dict[str, Any] | None = None, client: dict[str, Any] | None = None
) -> AsyncIterator[tuple[face.Connection, face.Connection]]:
    connect, listen, host = WAYS[way]
    accepted: list[face.Connection] = []
    async with listen(host, 0, **(server or {})) as listener:

        async def accept() -> None:
            accepted.append(await listener.accept(20))

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            left = await connect(host, listener.port, **(client or {}))
        async with left, accepted[0] as right:
            yield left, right


@pytest.mark.parametrize("way", WAYS)
def test_everything(run: Any, way: str) -> None:
    memory = bytearray(200_000)

    async def main() -> None:
        async with connected(way, {"buffers": {"data": memory}}) as (left, right):
            assert repr(left).startswith("<anyio.Connection with ")
            await left.send(b"hello", imm=41)
            message = await right.recv()
            assert (message, message.imm) == (b"hello", 41)
            into = bytearray(9)
            await right.send(b"world")
            assert (await left.recv_into(into), into[:5]) == (5, b"world")
            data = left.remote["data"]
            await left.write(data[10:], b"small")
            await left.write(data[1000:], bytes(range(200)) * 900, imm=7)
            notice = await right.recv()
            assert (notice.imm, notice.byte_len) == (7, 180_000)
            assert await left.read(data[10:15]) == b"small"
            assert await left.read(data[1000:181_000]) == bytes(range(200)) * 900
            region = await left.register(bytearray(b"0123456789"), name="mine")
            assert (await right.remote.wait("mine", 20)).length == 10
            places = [array("Q", row) for row in ([0, 5], [100, 200], [5, 5])]
            await left.write_many(data, region, *places)
            assert (memory[100:105], memory[200:205]) == (b"01234", b"56789")
            await left.read_many(data, region, places[0], places[1][::-1], places[2])
            assert region.view.tobytes() == b"5678901234"
            async with left.batch() as batch:
                batch.write(data[:2], region[8:10])
            assert memory[:2] == b"34"
            if way == "iwarp":
                with pytest.raises(pvl.StateError, match="allows only REMOTE_READ and REMOTE_WRITE"):
                    await left.fetch_add(data[16:24], 5)
            else:
                assert await left.fetch_add(data[190_000:190_008], 5) == 0
                assert await left.compare_swap(data[190_000:190_008], 5, 9) == 5
            with pytest.raises(pvl.WaitTimeout, match=r"no message arrived within 0\.02 s"):
                await left.recv(timeout=0.02)
            await right.close()
            assert [message async for message in left] == []

    run(main)


def test_many_tasks_of_one_connection(run: Any) -> None:
    async def main() -> None:
        got: list[bytes] = []
        async with connected("tcp", {"recv_depth": 4}, {"send_depth": 3}) as (left, right):

            async def take() -> None:
                got.append(await right.recv())

            async def move(i: int) -> None:
                await left.send(i.to_bytes(2, "big") * (1 + 2000 * (i % 2)))

            async with anyio.create_task_group() as group:
                for i in range(60):
                    group.start_soon(take)
                    group.start_soon(move, i)
        assert sorted(int.from_bytes(message[:2], "big") for message in got) == list(range(60))

    run(main)


def test_messages_go_to_who_came_first(run: Any) -> None:
    async def main() -> None:
        order: list[tuple[int, bytes]] = []
        async with connected() as (left, right):

            async def take(i: int) -> None:
                order.append((i, bytes(await right.recv())))

            async with anyio.create_task_group() as group:
                for i in range(6):
                    group.start_soon(take, i)
                    await anyio.sleep(0.001)  # trio starts tasks in any order
                for i in range(6):
                    await left.send(bytes([i]))
        assert order == [(i, bytes([i])) for i in range(6)]

    run(main)


def test_the_leader_may_go_and_the_others_still_wake(run: Any) -> None:
    async def main() -> None:
        got: list[bytes] = []
        async with connected() as (left, right):

            async def take() -> None:
                got.append(await right.recv())

            async with anyio.create_task_group() as group:
                leader = anyio.CancelScope()

                async def lead() -> None:
                    with leader:
                        await right.recv()
                        got.append(b"not here")

                group.start_soon(lead)
                await anyio.wait_all_tasks_blocked()
                for _ in range(3):
                    group.start_soon(take)
                await anyio.wait_all_tasks_blocked()
                leader.cancel()
                await anyio.wait_all_tasks_blocked()
                for i in range(3):
                    await left.send(bytes([i]))
        assert sorted(got) == [b"\0", b"\1", b"\2"]

    run(main)


def test_a_cancelled_receive_loses_no_message(run: Any) -> None:
    async def main() -> None:
        got: list[bytes] = []
        async with connected() as (left, right):
            async with anyio.create_task_group() as group:

                async def send() -> None:
                    for i in range(40):
                        await left.send(bytes([i]))
                        await anyio.sleep(0.001 * (i % 3))

                group.start_soon(send)
                while len(got) < 40:
                    with anyio.move_on_after(0.001):
                        got.append(await right.recv())
        assert got == [bytes([i]) for i in range(40)]

    run(main)


def test_a_cancelled_operation_holds_its_memory_until_it_has_ended(run: Any) -> None:
    async def main() -> None:
        async with connected("tcp", {"buffers": {"far": bytearray(9000)}}, {"ack_timeout_exp": 20}) as (left, right):
            far = left.remote["far"]
            region, buffer, small = await left.register(bytearray(100)), bytearray(9000), bytearray(b"small")
            right._conn._link.qp.to_reset()  # answers nothing any more
            with pytest.raises(pvl.WaitTimeout, match="still in flight"):
                await left.write(far, region[:50], timeout=0.02)
            for read in (lambda: left.read(far, buffer), lambda: left.read(far[:5], small), lambda: left.read(far)):
                with anyio.move_on_after(0.02) as scope:
                    await read()
                assert scope.cancelled_caught
            with pytest.raises(TimeoutError):
                with anyio.fail_after(0.02):
                    await left.write(far, b"x")
            with pytest.raises(pvl.BusyError, match="in flight"):
                region.close()
            with pytest.raises(BufferError):
                buffer.append(0)
            held = weakref.ref(region)
            del region
            gc.collect()
            assert held() is not None
            assert left._engine.in_flight == 5
            await left.close()
            buffer.append(0)
            small.append(0)
            gc.collect()
            assert held() is None

    run(main)


def test_connecting_may_be_cancelled(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def main() -> None:
            ticks = 0
            with anyio.move_on_after(0.2) as scope:
                async with anyio.create_task_group() as group:

                    async def tick() -> None:
                        nonlocal ticks
                        while True:
                            ticks += 1
                            await anyio.sleep(0.01)

                    group.start_soon(tick)
                    await face.connect("127.0.0.1", silent.getsockname()[1])
            assert scope.cancelled_caught
            assert ticks > 2

        run(main)


def test_what_was_made_too_late_is_closed(run: Any) -> None:
    before = counts()

    async def main() -> None:
        async with face.listen("127.0.0.1", 0) as listener:

            async def accept() -> None:
                with suppress(pvl.VerbsError):  # the peer may have given up before it said anything
                    await listener.accept(5)

            for _ in range(5):
                async with anyio.create_task_group() as group:
                    group.start_soon(accept)
                    await anyio.wait_all_tasks_blocked()
                    with anyio.move_on_after(0.02):
                        async with face.connect("127.0.0.1", listener.port):
                            await anyio.sleep(0)
                    group.cancel_scope.cancel()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # who was accepted and then dropped
        run(main)
        settle_threads()
        gc.collect()
    after = counts()
    assert {kind: after[kind] for kind in ("qp", "cq", "pd", "mr")} == {
        kind: before[kind] for kind in ("qp", "cq", "pd", "mr")
    }


def test_a_block_that_is_cancelled_closes_its_connection(run: Any) -> None:
    async def main() -> None:
        async with connected() as (left, right):
            with anyio.move_on_after(0.05) as scope:
                async with left:
                    await left.recv()
            assert scope.cancelled_caught
            assert left.closed
            assert left._conn._destroyed
            with pytest.raises(pvl.PeerClosedError):
                await right.recv()

    run(main)


def test_closing_wakes_everybody(run: Any) -> None:
    async def main() -> None:
        ended: list[str] = []
        async with connected() as (left, right):

            async def wait(conn: face.Connection, call: Callable[[], Awaitable[Any]]) -> None:
                try:
                    await call()
                except pvl.VerbsError as error:
                    ended.append(f"{'left' if conn is left else 'right'} {type(error).__name__}")

            async with anyio.create_task_group() as group:
                for conn in (left, right):
                    for _ in range(2):
                        group.start_soon(wait, conn, conn.recv)
                    group.start_soon(wait, conn, lambda conn=conn: conn.remote.wait("nothing"))
                await anyio.wait_all_tasks_blocked()
                await left.close()
            assert Counter(ended) == Counter({"left ClosedError": 3, "right PeerClosedError": 3})
            with pytest.raises(pvl.ClosedError):
                await left.send(b"x")

    run(main)


def test_closing_under_a_reader_by_the_synchronous_face(run: Any) -> None:
    async def main() -> None:
        async with connected() as (left, right):
            async with anyio.create_task_group() as group:

                async def wait() -> None:
                    with pytest.raises(pvl.ClosedError):
                        await left.recv()

                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await anyio.to_thread.run_sync(left._conn.close)
            with pytest.raises(pvl.PeerClosedError):
                await right.recv()

    run(main)


def test_a_thread_that_polls_as_well_takes_nothing_away(run: Any) -> None:
    memory = bytearray(8)

    async def main() -> None:
        async with connected("tcp", {"buffers": {"word": memory}}) as (left, right):
            polled = 0

            def poll() -> None:
                nonlocal polled
                while polled < 50:
                    left._conn.fetch_add(left._conn.remote["word"], 1)
                    polled += 1

            async with anyio.create_task_group() as group:
                group.start_soon(anyio.to_thread.run_sync, poll)
                i = 0
                while i < 30 or polled < 50:
                    i += 1
                    await left.send(str(i).encode())
                    assert await right.recv() == str(i).encode()
            assert memory[0] == 50

    run(main)


@pytest.mark.parametrize("way", ["tcp", "cm"])
def test_what_was_kept_of_a_lost_connection_is_stale(run: Any, way: str) -> None:
    connect, listen, host = WAYS[way]

    async def main() -> None:
        made: list[face.Connection] = []
        async with listen(host, 0, buffers={"data": b"theirs"}) as listener:

            async def accept() -> None:
                made.append(await listener.accept(20))

            async with anyio.create_task_group() as group:
                group.start_soon(accept)
                first = await connect(host, listener.port)
            kept = first.remote["data"]
            await made.pop().close()
            with pytest.raises(pvl.PeerClosedError):
                await first.recv()
            async with anyio.create_task_group() as group:
                group.start_soon(accept)
                second = await first.reconnect()
            async with second, made.pop():
                with pytest.raises(pvl.StaleBufferError):
                    await second.read(kept)
                assert await second.read(second.remote["data"]) == b"theirs"

    run(main)


def test_a_listener_with_several_waiters_and_a_timeout(run: Any) -> None:
    async def main() -> None:
        async with face.listen("127.0.0.1", 0) as listener:
            assert repr(listener).startswith("<anyio.Listener")
            with pytest.raises(pvl.WaitTimeout, match="nobody connected"):
                await listener.accept(0.02)
            made: list[face.Connection] = []

            async def accept() -> None:
                made.append(await listener.accept(20))

            async def refused() -> None:
                with pytest.raises(pvl.ClosedError, match="cannot accept"):
                    await listener.accept()

            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(accept)
                for _ in range(3):
                    made.append(await face.connect("127.0.0.1", listener.port))
            async with anyio.create_task_group() as group:
                group.start_soon(refused)
                group.start_soon(refused)
                await anyio.wait_all_tasks_blocked()
                await listener.close()
                await listener.close()
            for conn in made:
                await conn.close()

    run(main)


def test_a_connection_that_is_dropped_is_collected(run: Any) -> None:
    async def main() -> None:
        async with connected() as (left, right):
            pass
        assert left.closed
        assert right.closed
        made: list[face.Connection] = []
        async with face.listen("127.0.0.1", 0) as listener:

            async def accept() -> None:
                made.append(await listener.accept())

            async with anyio.create_task_group() as group:
                group.start_soon(accept)
                made.append(await face.connect("127.0.0.1", listener.port))
            with pytest.warns(ResourceWarning, match="was never closed"):
                made.clear()
                gc.collect()

    run(main)


def test_a_lost_connection_is_made_anew(run: Any) -> None:
    async def main() -> None:
        async with await face.listen("127.0.0.1", 0, authkey="k") as listener:
            ends: list[face.Connection] = []

            async def accept() -> None:
                ends.append(await listener.accept(20))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(accept)
                mine = {"mine": bytearray(b"mine")}
                left = await face.connect("127.0.0.1", listener.port, authkey="k", buffers=mine)
            await ends.pop().close()
            with pytest.raises(pvl.PeerClosedError):
                await left.recv(timeout=10)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(accept)
                again = await left.reconnect()
            async with again, ends.pop() as right:
                assert list(again.local) == ["mine"]
                assert await right.read(right.remote["mine"]) == b"mine"

    run(main)

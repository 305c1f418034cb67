"""The asyncio face, on both event loops: operations, timeouts, cancellation, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support import descriptors, in_thread, settle_threads

import pyverbs_lite as pvl
from pyverbs_lite import aio
from pyverbs_lite._aio import listener as _aio_listener
from pyverbs_lite._aio import watch as _aio_watch
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

ROOT = Path(__file__).resolve().parent.parent
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@contextmanager
def clean_loop(kind: str) -> Iterator[Any]:
    """Yield a new loop; at its end no reader, no task, no error in a callback and no descriptor may be left."""
    before = descriptors()
    loop = LOOPS[kind]()
    readers: set[int] = set()
    add, remove = loop.add_reader, loop.remove_reader

    def add_reader(fd: int, *args: Any) -> None:
        readers.add(fd)
        add(fd, *args)

    def remove_reader(fd: int) -> bool:
        os.fstat(fd)  # a reader goes before its descriptor does
        readers.discard(fd)
        return remove(fd)

    loop.add_reader, loop.remove_reader = add_reader, remove_reader
    errors: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, what: errors.append(what))
    try:
        yield loop
        assert asyncio.all_tasks(loop) == set()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    settle_threads()
    gc.collect()
    assert errors == []
    assert readers == set()
    assert descriptors() - before == Counter()


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Let the loops and librdmacm open what they keep for as long as the process lives."""
    for host in ("192.0.2.1", "198.51.100.1"):
        with pvl.cm.listen(host, 0) as listener:
            accepting = in_thread(listener.accept)
            pvl.cm.connect(host, listener.port).close()
            accepting(20).close()
    for new in LOOPS.values():
        loop = new()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Any:
    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with clean_loop(request.param) as loop:
            return loop.run_until_complete(asyncio.wait_for(main, 60))

    return run


@asynccontextmanager
async def connected(
    server: dict[str, Any] | None = None, client: dict[str, Any] | None = None
) -> AsyncIterator[tuple[aio.Connection, aio.Connection]]:
    async with pvl.aio.listen("127.0.0.1", 0, **(server or {})) as listener:
        accepting = asyncio.create_task(listener.accept(20))
        async with pvl.aio.connect("127.0.0.1", listener.port, **(client or {})) as left, await accepting as right:
            yield left, right


class Ticker:
    """A task that ticks every 10 ms, for as long as the loop goes on."""

    ticks = 0

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        return self

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.ticks += 1

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._task


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def waiting(condition: Any, seconds: float = 10.0) -> None:
    """Let the loop go on until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.002)


class TestOperations:
    def test_every_operation(self, run):
        async def main():
            far, word = bytearray(200_000), bytearray(8)
            async with connected({"buffers": {"far": far, "word": word}}) as (left, right):
                assert left.info.remote_qp_num == right.info.local_qp_num
                await left.send(b"hello", imm=0x89ABCDEF)
                message = await right.recv()
                assert (message, message.imm, message.opcode) == (b"hello", 0x89ABCDEF, pvl.WCOpcode.RECV)
                await right.send(b"m" * 9000)
                target = bytearray(9001)
                assert await left.recv_into(target) == 9000
                assert target == b"m" * 9000 + b"\0"
                remote, counter = left.remote["far"], left.remote["word"]
                await left.write(remote[100:], b"written")
                assert far[99:108] == b"\0written\0"
                await left.write(remote[10_000:], b"W" * 70_001, imm=77)
                notice = await right.recv()
                assert (notice, notice.imm, notice.byte_len) == (b"", 77, 70_001)
                assert far[9_999:80_002] == b"\0" + b"W" * 70_001 + b"\0"
                assert await left.read(remote[100:107]) == b"written"
                assert await left.read(remote[10_000:80_001]) == b"W" * 70_001
                assert await left.read(remote[102:105], target) == 3
                assert target[:4] == b"ittm"
                assert await left.fetch_add(counter, 41) == 0
                assert await left.compare_swap(counter, 41, 7) == 41
                assert int.from_bytes(word, sys.byteorder) == 7
                region = await left.register(bytearray(b"abcdef"), name="mine")
                await waiting(lambda: "mine" in right.remote)
                assert await right.read(right.remote["mine"]) == b"abcdef"
                async with left.batch() as batch:
                    batch.write(remote[:3], region[1:4])
                    batch.write(remote[3:5], region[:2])
                assert far[:6] == b"bcdab\0"
                places = array("Q", [0, 4]), [1000, 2000], [3, 2]
                await left.write_many(remote, region, *places)
                assert (far[1000:1004], far[2000:2003]) == (b"abc\0", b"ef\0")
                back = await left.register(bytearray(6))
                await left.read_many(remote, back, *places, timeout=10)
                assert bytes(back.view) == b"abc\0ef"
                assert not left.closed
            assert left.closed
            assert right.closed

        run(main())

    def test_large_memory_is_registered_beside_the_loop(self, run):
        async def main():
            size = (1 << 20) + 1234
            far = bytearray(size)
            async with connected({"buffers": {"far": far}, "max_message_size": 2 << 20, "recv_depth": 2}) as (a, b):
                data = bytes(range(256)) * (size // 256 + 1)
                remote = a.remote["far"]
                await a.write(remote, data[:size])
                assert far == data[:size]
                assert await a.read(remote) == far
                into = bytearray(size)
                assert await a.read(remote, into) == size
                assert into == far
                await a.send(data[: size - 1])
                assert await b.recv() == data[: size - 1]
                with pytest.raises(ValueError, match="do not fit"):
                    await a.write(remote[1:], data[:size])

        run(main())

    def test_mistakes_are_refused_and_the_connection_goes_on(self, run):
        async def main():
            async with connected({"max_message_size": 100, "buffers": {"far": bytearray(8)}}) as (left, right):
                for awaitable, error in (
                    (left.send(b"x" * 101), ValueError),
                    (left.send(7), TypeError),
                    (left.send(b"x", imm=1 << 32), ValueError),
                    (left.write(left.remote["far"], b"x" * 9), ValueError),
                    (left.fetch_add(left.remote["far"][:4], 1), ValueError),
                    (left.recv(timeout=-1), ValueError),
                    (left.recv_into(b"read-only"), BufferError),
                ):
                    with pytest.raises(error):
                        await awaitable
                await left.send(b"long message")
                with pytest.raises(ValueError, match="12 bytes"):
                    await right.recv_into(bytearray(3))
                assert await right.recv() == b"long message"
                with pytest.raises(RuntimeError, match="nothing was started|with block"):
                    async with left.batch() as batch:
                        raise RuntimeError("with block")
                with pytest.raises(pvl.StateError):
                    _ = batch._batch.work
                with pytest.raises(TypeError, match="RemoteBuffer can"):
                    left.__reduce_ex__(4)
                assert repr(left).startswith("<aio.Connection with 127.0.0.1")

        run(main())

    def test_ways_to_open(self, run):
        async def main():
            listener = await pvl.aio.listen("127.0.0.1", 0)
            assert repr(listener) == f"<aio.Listener on 127.0.0.1 port {listener.port}>"
            accepting = asyncio.ensure_future(listener.accept())
            first = await asyncio.create_task(pvl.aio.connect("127.0.0.1", listener.port))
            ends = [first, await accepting]
            accepting = asyncio.ensure_future(listener.accept())
            ends += await asyncio.gather(pvl.aio.connect("127.0.0.1", listener.port), accepting)
            for end in ends:
                await end.close()
                await end.close()
            await listener.close()
            await listener.close()
            with pytest.raises(pvl.ClosedError, match="cannot accept"):
                await listener.accept()
            with pytest.raises(ConnectionRefusedError):
                await pvl.aio.connect("127.0.0.1", listener.port)
            with pytest.raises(TypeError):
                await pvl.aio.connect(7, listener.port)
            with pytest.raises(ValueError, match="port"):
                await pvl.aio.listen("127.0.0.1", 70_000)
            unused = pvl.aio.connect("127.0.0.1", 1)
            unused.close()

        run(main())

    def test_all_who_ask_at_once_are_heard(self, run):
        async def main():
            async with pvl.aio.cm_listen("192.0.2.1", 0) as listener:
                dialling = [asyncio.create_task(pvl.aio.cm_connect("192.0.2.1", listener.port)) for _ in range(4)]
                await asyncio.sleep(0.3)  # so that several wait before the first is taken; less proves less
                for accepted in [await listener.accept(20) for _ in dialling]:
                    await accepted.close()
                for task in dialling:
                    await (await task).close()

        run(main())

    @pytest.mark.parametrize("host", ["192.0.2.1", "198.51.100.1"], ids=["rxe", "siw"])
    def test_over_the_connection_manager(self, run, host):
        async def main():
            far = bytearray(5000)
            async with pvl.aio.cm_listen(host, 0, buffers={"far": far}) as listener:
                accepting = asyncio.create_task(listener.accept())
                async with pvl.aio.cm_connect(host, listener.port) as left:
                    right = await accepting
                    for number in range(200):  # more than there are receives
                        await left.send(b"%d" % number)
                        assert await right.recv() == b"%d" % number
                    await left.write(left.remote["far"], b"x" * 4999, imm=3)
                    assert (await right.recv()).imm == 3
                    receiving = asyncio.create_task(right.recv())
                    region = await left.register(bytearray(10), name="mine")
                    await waiting(lambda: "mine" in right.remote)
                    region.close()
                    await waiting(lambda: "mine" not in right.remote)
                    await left.send(b"last")
                    assert await receiving == b"last"
                    receiving = asyncio.create_task(collect(right))
                assert await receiving == []
                await right.close()
                with pytest.raises(pvl.WaitTimeout, match="nobody"):
                    await listener.accept(0.01)

        run(main())


async def collect(conn: aio.Connection) -> list[bytes]:
    return [bytes(message) async for message in conn]


class TestIteration:
    def test_until_the_peer_closes(self, run):
        async def main():
            async with connected({"recv_depth": 4}) as (left, right):
                collecting = asyncio.create_task(collect(right))
                sent = [b"%d" % number for number in range(100)]
                for message in sent:
                    await left.send(message)
                await left.close()
                assert await collecting == sent
                with pytest.raises(pvl.PeerClosedError):
                    await right.recv()
                assert await collect(right) == []

        run(main())

    def test_what_had_arrived_comes_first(self, run):
        async def main():
            async with connected() as (left, right):
                for number in range(10):
                    await left.send(b"%d" % number)
                await left.close()
                assert len(await collect(right)) == 10

        run(main())

    def test_a_peer_that_is_lost_raises(self, run):
        code = """if True:
            import os, sys, pyverbs_lite as pvl
            conn = pvl.connect("127.0.0.1", int(sys.argv[1]), buffers={"far": bytearray(100)})
            conn.send(b"here")
            sys.stdin.read()
            """

        async def main():
            async with pvl.aio.listen("127.0.0.1", 0) as listener:
                peer = subprocess.Popen([sys.executable, "-c", code, str(listener.port)], stdin=subprocess.PIPE)
                try:
                    async with await listener.accept() as conn:
                        assert await conn.recv() == b"here"
                        tasks = [asyncio.create_task(call) for call in (collect(conn), conn.recv())]
                        await asyncio.sleep(0)
                        peer.kill()
                        for task in tasks:
                            with pytest.raises(pvl.PeerClosedError):
                                await task
                        with pytest.raises(pvl.PeerClosedError):
                            await conn.send(b"too late")
                        with pytest.raises(pvl.PeerClosedError):
                            _ = conn.remote["far"]
                finally:
                    peer.kill()
                    peer.communicate()

        run(main())

    def test_own_close_ends_it_with_an_error(self, run):
        async def main():
            async with connected() as (left, right):
                calls = (collect(right), right.recv(), right.recv_into(bytearray(3)))
                tasks = [asyncio.create_task(call) for call in calls]
                await asyncio.sleep(0.01)
                await right.close()
                for task in tasks:
                    with pytest.raises(pvl.ClosedError, match="closed"):
                        await task
                with pytest.raises(pvl.ClosedError):
                    await right.send(b"x")
                with pytest.raises(pvl.ClosedError):
                    await right.register(bytearray(3))
                with pytest.raises(pvl.PeerClosedError):
                    await left.recv()

        run(main())


class TestTimeouts:
    def test_recv(self, run):
        async def main():
            async with connected() as (left, right):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(right.recv(), 0.02)
                if sys.version_info >= (3, 11):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.02):
                            await right.recv()
                for seconds in (0.02, 0):
                    with pytest.raises(pvl.WaitTimeout, match=f"no message arrived within {float(seconds)} s"):
                        await right.recv(timeout=seconds)
                await left.send(b"one")
                assert await right.recv(timeout=float("inf")) == b"one"
                await left.send(b"two")
                assert await asyncio.wait_for(right.recv(), 10) == b"two"

        run(main())

    def test_operations_in_flight_hold_their_memory(self, run):
        async def main():
            async with connected({"buffers": {"far": bytearray(9000)}}, {"ack_timeout_exp": 20}) as (left, right):
                remote = left.remote["far"]
                region = await left.register(bytearray(100))
                buffer, small = bytearray(9000), bytearray(b"small")
                right._conn._link.qp.to_reset()  # answers nothing any more
                with pytest.raises(pvl.WaitTimeout, match="still in flight"):
                    await left.write(remote, region[:50], timeout=0.02)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(left.read(remote, buffer), 0.02)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(left.read(remote[:5], small), 0.02)
                task = asyncio.create_task(left.read(remote))
                await asyncio.sleep(0.02)
                await cancelled(task)
                held = weakref.ref(region)
                with pytest.raises(pvl.VerbsError, match="in flight"):
                    region.close()
                del region
                gc.collect()
                assert held() is not None
                with pytest.raises(BufferError):
                    buffer.append(0)
                assert left._engine.in_flight == 4
                await left.close()
                buffer.append(0)
                small.append(0)
                gc.collect()
                assert held() is None

        run(main())

    def test_what_ends_at_the_last_look_is_whole(self, run):
        async def main():
            async with connected({"buffers": {"far": bytearray(b"asymmetric")}}) as (left, _):
                remote = left.remote["far"]

                async def ended(*_: object) -> None:  # out of time; and then, before the last look, it ends
                    time.sleep(0.05)

                left._watch.ended = ended
                assert await left.read(remote[1:8], timeout=0.01) == b"symmetr"

        run(main())

    def test_a_place_in_the_queue(self, run):
        async def main():
            async with connected({"buffers": {"far": bytearray(90)}}, {"send_depth": 2, "ack_timeout_exp": 20}) as (
                left,
                right,
            ):
                remote = left.remote["far"]
                right._conn._link.qp.to_reset()
                stuck = [asyncio.create_task(left.write(remote, b"x")) for _ in range(2)]
                await asyncio.sleep(0.01)
                with pytest.raises(pvl.QueueFullError, match="within 0.02 s; nothing was started"):
                    await left.write(remote, b"y", timeout=0.02)
                late = asyncio.create_task(left.write(remote, b"z"))
                async with Ticker() as ticker:
                    await asyncio.sleep(0.5)
                assert ticker.ticks >= 10  # where each look waited for a slice of time there would be two or three
                await cancelled(late)
                assert left._engine.in_flight == 2
                await left.close()
                for task in stuck:
                    with pytest.raises(pvl.ClosedError):
                        await task

        run(main())

    def test_a_transfer_that_fails(self, run):
        async def main():
            fragile = {"ack_timeout_exp": 8, "retry_cnt": 1}
            async with connected({"buffers": {"far": bytearray(90)}}, fragile) as (left, right):
                remote = left.remote["far"]
                receiving = asyncio.create_task(left.recv())
                await asyncio.sleep(0)
                right._conn._link.qp.to_reset()
                with pytest.raises(pvl.CompletionError) as caught:
                    await left.write(remote, b"x")
                assert caught.value.status == pvl.WCStatus.RETRY_EXC_ERR
                with pytest.raises(pvl.CompletionError) as caught:
                    await receiving
                assert caught.value.status == pvl.WCStatus.RETRY_EXC_ERR
                with pytest.raises(pvl.ClosedError, match="RETRY_EXC"):
                    await left.write(remote, b"x")
                with pytest.raises(pvl.ClosedError, match="RETRY_EXC"):
                    await left.recv()

        run(main())


class TestCancellation:
    def test_a_cancelled_recv_loses_no_message(self, run):
        async def main():
            async with connected() as (left, right):
                got = []
                for number in range(150):
                    task = asyncio.create_task(right.recv())
                    await asyncio.sleep(0)
                    sending = asyncio.create_task(left.send(b"%d" % number))
                    for _ in range(number % 15):
                        await asyncio.sleep(0)
                    task.cancel()
                    try:
                        got.append(await task)
                    except asyncio.CancelledError:
                        got.append(await right.recv())
                    await sending
                assert got == [b"%d" % number for number in range(150)]

        run(main())

    def test_nobody_overtakes_who_waits(self, run):
        async def main():
            async with connected() as (left, right):
                waiting_tasks = [asyncio.create_task(right.recv()) for _ in range(2)]
                await asyncio.sleep(0)
                for message in (b"first", b"second", b"third"):
                    await left.send(message)
                assert await right.recv() == b"third"
                assert [await task for task in waiting_tasks] == [b"first", b"second"]

        run(main())

    def test_nobody_overtakes_who_gives_way(self, run):
        async def main():
            async with connected() as (left, right):
                for _ in range(60):  # after so many a task gives way, whichever of these that is
                    await asyncio.gather(*(left.send(bytes([number])) for number in range(7)))
                    assert [list(await right.recv()) for _ in range(7)] == [[number] for number in range(7)]

        run(main())

    def test_a_task_that_never_waits_gives_way(self, run):
        async def main():
            async with connected({"buffers": {"far": bytearray(64)}}) as (left, right):
                region, turns = await left.register(bytearray(64)), 0

                async def other() -> None:
                    nonlocal turns
                    while True:
                        turns += 1
                        await asyncio.sleep(0)

                task = asyncio.create_task(other())
                for number in range(300):
                    await left.write(left.remote["far"], region)
                    await left.send(b"%d" % number)
                    assert await right.recv() == b"%d" % number
                assert turns >= 8
                await cancelled(task)

        run(main())

    def test_a_cancelled_receiver_passes_its_turn_on(self, run):
        async def main():
            async with connected() as (left, right):
                tasks = [asyncio.create_task(right.recv()) for _ in range(3)]
                await asyncio.sleep(0)
                place = right._receivers.waiting[0]
                sending = asyncio.create_task(left.send(b"for the second"))
                while not place.place.done():
                    await asyncio.sleep(0)
                tasks[0].cancel()  # it was woken, and has not run
                assert await tasks[1] == b"for the second"
                assert tasks[0].cancelled()
                await sending
                await cancelled(tasks[2])

        run(main())

    @pytest.mark.parametrize("how", ["cancel", "timeout"])
    def test_a_silent_peer_holds_nobody_up(self, run, how):
        async def main():
            with socket.create_server(("127.0.0.1", 0)) as silent:
                port = silent.getsockname()[1]
                async with Ticker() as ticker:
                    if how == "timeout":
                        with pytest.raises(pvl.HandshakeTimeout):
                            await pvl.aio.connect("127.0.0.1", port, timeout=0.5)
                    else:
                        task = asyncio.create_task(pvl.aio.connect("127.0.0.1", port, timeout=60))
                        await asyncio.sleep(0.5)
                        await cancelled(task)
                assert ticker.ticks >= 3
                start = time.monotonic()
                await waiting(lambda: not [t for t in threading.enumerate() if t.name.startswith("pyverbs_lite")])
                assert time.monotonic() - start < 2

        run(main())

    def test_through_the_connection_manager_it_ends_soon_too(self, run, monkeypatch):
        def wait(request: pvl.CMID, settings: object, limit: Any) -> None:
            while not limit.expired:
                time.sleep(0.01)
            request.close()
            raise pvl.HandshakeTimeout("given up")

        def making() -> list[str]:
            return [thread.name for thread in threading.enumerate() if thread.name.startswith("pyverbs_lite")]

        async def main():
            async with pvl.aio.cm_listen("192.0.2.1", 0, timeout=60) as listener:
                for accepts in (False, True):
                    tasks = [asyncio.create_task(pvl.aio.cm_connect("192.0.2.1", listener.port, timeout=60))]
                    if accepts:
                        tasks.append(asyncio.create_task(listener.accept()))
                    await waiting(lambda: len(making()) == len(tasks))  # noqa: B023
                    await asyncio.sleep(0.05)
                    for task in tasks:
                        await cancelled(task)
                    await waiting(lambda: not making(), 20)

        monkeypatch.setattr(_aio_listener, "establish_accepting", wait)
        run(main())

    def test_a_connect_cancelled_at_any_moment_leaves_nothing(self, run):
        async def main():
            async with pvl.aio.listen("127.0.0.1", 0) as listener:
                for step in range(12):
                    accepting = asyncio.create_task(listener.accept())
                    connecting = asyncio.create_task(pvl.aio.connect("127.0.0.1", listener.port))
                    await asyncio.sleep(step * 0.003)
                    connecting.cancel()
                    for task in (connecting, accepting):
                        with suppress(asyncio.CancelledError, pvl.HandshakeError):
                            await (await task).close()

        run(main())

    def test_accept(self, run):
        async def main():
            async with pvl.aio.listen("127.0.0.1", 0) as listener:
                waiting_tasks = [asyncio.create_task(listener.accept()) for _ in range(2)]
                await asyncio.sleep(0.01)
                await cancelled(waiting_tasks[0])
                with pytest.raises(pvl.WaitTimeout, match="nobody connected within 0.02 s"):
                    await listener.accept(0.02)
                with socket.create_connection(("127.0.0.1", listener.port)):  # and says nothing
                    slow = asyncio.create_task(listener.accept())
                    async with Ticker() as ticker:
                        await waiting(lambda: ticker.ticks >= 10)
                        accepting = asyncio.create_task(listener.accept())  # one of the three waits for the slow one
                        async with pvl.aio.connect("127.0.0.1", listener.port) as conn:
                            tasks = {waiting_tasks[1], slow, accepting}
                            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=20)
                            async with done.pop().result() as other:
                                await other.send(b"not held up")
                                assert await conn.recv() == b"not held up"
                    for task in pending:
                        await cancelled(task)
                last = asyncio.create_task(listener.accept())
                await asyncio.sleep(0)
                await listener.close()
                with pytest.raises(pvl.ClosedError):
                    await last

        run(main())

    def test_close_goes_on(self, run):
        async def main():
            async with connected() as (left, right):
                task = asyncio.create_task(left.close())
                await asyncio.sleep(0)
                await cancelled(task)
                with pytest.raises(pvl.PeerClosedError):
                    await right.recv()
                await left.close()
                assert left._conn._destroyed

        run(main())


class TestSharing:
    def test_receivers_take_turns(self, run):
        async def main():
            async with connected({"recv_depth": 3}) as (left, right):
                order = []

                async def receiver(number: int) -> None:
                    for _ in range(10):
                        order.append((number, int(await right.recv())))

                tasks = [asyncio.create_task(receiver(number)) for number in range(5)]
                await asyncio.sleep(0)
                for number in range(50):
                    await left.send(b"%d" % number)
                await asyncio.gather(*tasks)
                assert [message for _, message in order] == list(range(50))
                assert [number for number, _ in order[:5]] == [0, 1, 2, 3, 4]
                assert set(Counter(number for number, _ in order).values()) == {10}

        run(main())

    def test_many_tasks_and_a_short_queue(self, run):
        async def main():
            far, word = bytearray(8000), bytearray(8)
            async with connected({"buffers": {"far": far, "word": word}}, {"send_depth": 3}) as (left, right):
                remote, counter = left.remote["far"], left.remote["word"]

                async def work(number: int) -> None:
                    place = remote[number * 40 : number * 40 + 40]
                    await left.write(place, b"%040d" % number)
                    await left.fetch_add(counter, number)
                    await left.send(b"%d" % number)
                    assert await left.read(place) == b"%040d" % number

                receiving = asyncio.gather(*(right.recv() for _ in range(200)))
                await asyncio.gather(*(work(number) for number in range(200)))
                assert sorted(map(int, await receiving)) == list(range(200))
                assert int.from_bytes(word, sys.byteorder) == sum(range(200))

        run(main())

    def test_two_connections_echo_in_one_loop(self, run):
        async def main():
            async with connected() as (one, other), connected() as (two, another):

                async def echo(conn: aio.Connection) -> None:
                    async for message in conn:
                        await conn.send(message[::-1])

                async def ask(conn: aio.Connection, name: bytes) -> None:
                    for number in range(100):
                        question = b"%s %d" % (name, number)
                        await conn.send(question)
                        assert await conn.recv() == question[::-1]
                    await conn.close()

                start = time.monotonic()
                await asyncio.gather(echo(other), echo(another), ask(one, b"one"), ask(two, b"two"))
                assert time.monotonic() - start < 5

        run(main())

    def test_a_thread_that_polls_as_well(self, run):
        async def main():
            async with connected() as (left, right):
                echoing = asyncio.create_task(right.recv())

                def ping() -> None:
                    for number in range(200):
                        left._conn.send(b"%d" % number)

                async def serve() -> None:
                    for number in range(200):
                        await right.send(b"%d" % number)

                thread = threading.Thread(target=ping)
                thread.start()
                serving = asyncio.create_task(serve())
                got = [int(await left.recv(timeout=10)) for _ in range(200)]
                assert got == list(range(200))
                back = [await echoing] + [await right.recv(timeout=10) for _ in range(199)]
                assert list(map(int, back)) == list(range(200))
                await serving
                await asyncio.get_running_loop().run_in_executor(None, thread.join)

        run(main())

    def test_a_thread_that_takes_the_event(self, run):
        async def main():
            async with connected() as (left, right):
                receiving = asyncio.create_task(left.recv())
                await asyncio.sleep(0.05)
                engine = left._engine._c
                polling = in_thread(lib.pvl_progress, engine, lib.PVL_UNTIL_IDLE, ffi.NULL, 0, 600_000_000)
                sending = in_thread(right._conn.send, b"seen by the thread")
                while not engine.arrived:
                    time.sleep(0.01)  # the loop stands still, so that it cannot see it first
                assert await asyncio.wait_for(receiving, 10) == b"seen by the thread"
                polling(10)
                sending(10)

        run(main())

    def test_the_loop_goes_on_during_a_long_list(self, run):
        async def main():
            far = bytearray(64 * 50_000)
            async with connected({"buffers": {"far": far}}) as (left, _):
                region = await left.register(bytearray(b"y" * 64))
                count = 50_000
                async with Ticker() as ticker:
                    await left.write_many(
                        left.remote["far"],
                        region,
                        [0] * count,
                        [(7 * i) % count * 64 for i in range(count)],
                        [64] * count,
                    )
                assert far == b"y" * len(far)
                assert ticker.ticks >= 4

        run(main())


class TestSleeping:
    def test_nothing_happens_while_nothing_comes(self, run, monkeypatch):
        looks = []
        look = _aio_watch.Watch.look
        monkeypatch.setattr(_aio_watch.Watch, "look", lambda watch, **how: looks.append(1) or look(watch, **how))

        async def main():
            async with connected() as (left, right):
                receiving = asyncio.create_task(right.recv())
                await asyncio.sleep(0.05)
                timers = []
                loop = asyncio.get_running_loop()
                later = loop.call_later
                before, cpu = len(looks), time.process_time()
                loop.call_later = lambda *args: timers.append(args) or later(*args)
                await asyncio.sleep(0.4)
                del loop.call_later
                assert len(looks) == before
                assert len(timers) <= 1  # the sleep's own
                assert time.process_time() - cpu < 0.1
                async with Ticker() as ticker:
                    await waiting(lambda: ticker.ticks >= 10)
                await left.send(b"awake")
                assert await receiving == b"awake"

        run(main())

    def test_events_are_asked_for_by_who_sleeps(self, run):
        async def main():
            far = bytearray(64)
            async with connected({"buffers": {"far": far}}) as (left, right):
                remote, region = left.remote["far"], await left.register(bytearray(b"z" * 64))
                await asyncio.sleep(0.01)
                assert not left._watch.armed
                for number in range(40):
                    await left.write(remote, region)
                    await left.send(b"%d" % number)
                    assert await right.recv() == b"%d" % number
                assert not left._watch.armed
                assert not right._watch.turns
                receiving = asyncio.create_task(right.recv())
                await asyncio.sleep(0)
                assert right._watch.armed
                assert right._watch.turns
                await left.send(b"awake")
                assert await receiving == b"awake"
                assert not right._watch.armed
                assert not right._watch.turns
                assert not right._watch.asleep

        run(main())

    def test_what_nobody_waits_for_lets_go_of_its_memory(self, run):
        async def main():
            async with connected({"buffers": {"far": bytearray(1 << 16)}}) as (left, _):
                region = await left.register(bytearray(b"y" * (1 << 16)))
                entries = [0] * 2000, [0] * 2000, [1 << 15] * 2000
                with pytest.raises(pvl.WaitTimeout, match="still in flight"):
                    await left.write_many(left.remote["far"], region, *entries, timeout=0)
                with pytest.raises(pvl.VerbsError, match="in flight"):
                    region.close()
                await waiting(lambda: not left._engine._live)  # nobody does anything but the loop
                region.close()

        run(main())

    def test_who_waits_for_another_thing_is_woken_too(self, run):
        async def main():
            async with connected({"recv_depth": 2, "buffers": {"far": bytearray(64)}}) as (left, right):
                region, sent = await left.register(bytearray(64)), 0
                with suppress(pvl.WaitTimeout):
                    while True:  # until the peer has no receive left
                        await left.send(b"%d" % sent, timeout=0.01)
                        sent += 1
                sending = asyncio.create_task(left.send(b"late"))
                await asyncio.sleep(0.01)
                place = left._messages.waiting[0].place
                assert await right.recv() == b"0"
                for _ in range(50):  # the loop has no turn, so it is a write that finds the receive
                    await left.write(left.remote["far"], region)
                    if place.done():
                        break
                assert place.done()
                await sending
                got = [await right.recv() for _ in range(sent)]
                assert got == [*(b"%d" % number for number in range(1, sent)), b"late"]

        run(main())

    def test_a_lost_peer_costs_no_time(self, run):
        async def main():
            async with connected() as (left, right):
                right._conn._link.peer.control.socket.shutdown(socket.SHUT_RDWR)
                with pytest.raises(pvl.PeerClosedError):
                    await left.recv()
                cpu = time.process_time()
                await asyncio.sleep(0.3)
                assert time.process_time() - cpu < 0.1

        run(main())

    def test_the_device_closed_below(self, run, context):
        async def main():
            shared = pvl.open_device(context.name)
            async with connected(None, {"device": shared}) as (left, right):
                receiving = asyncio.create_task(left.recv())
                await asyncio.sleep(0.01)
                shared.close()
                with pytest.raises(pvl.ClosedError):
                    await receiving
                with pytest.raises(pvl.ClosedError):
                    await left.send(b"x")
                cpu = time.process_time()
                await asyncio.sleep(0.2)
                assert time.process_time() - cpu < 0.1
                with pytest.raises(pvl.PeerClosedError):
                    await left.close()
                    await right.recv()

        run(main())


class TestTheEndOfTheLoop:
    @pytest.mark.parametrize("kind", LOOPS)
    def test_a_loop_closed_with_a_recv_pending(self, kind):
        async def open_pair(keep):
            listener = keep.setdefault("listener", await pvl.aio.listen("127.0.0.1", 0))
            accepting = asyncio.create_task(listener.accept())
            keep["left"] = await pvl.aio.connect("127.0.0.1", listener.port)
            keep["right"] = await accepting

        keep: dict[str, Any] = {}
        loop = LOOPS[kind]()
        loop.run_until_complete(open_pair(keep))
        pending = keep["left"].recv()
        pending.send(None)  # it waits, and no task will complain
        loop.close()
        pending.close()

        async def close_all() -> None:
            for thing in keep.values():
                await thing.close()

        with clean_loop(kind) as second:
            second.run_until_complete(close_all())

    def test_a_program_that_forgets_to_wait(self, tmp_path):
        (tmp_path / "forgets.py").write_text(
            "import asyncio, sys, pyverbs_lite as pvl\n"
            "async def main():\n"
            "    async with pvl.aio.listen('127.0.0.1', 0) as listener:\n"
            "        accepting = asyncio.create_task(listener.accept())\n"
            "        async with pvl.aio.connect('127.0.0.1', listener.port) as left, await accepting as right:\n"
            "            tasks = [asyncio.create_task(c) for c in (left.recv(), right.recv(), listener.accept())]\n"
            "            await asyncio.sleep(0.05)\n"
            "asyncio.run(main())\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "error", str(tmp_path / "forgets.py")],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        # Each of the tasks was told by an exception that nobody looked at; none was pending.
        assert done.returncode == 0
        assert "Task was destroyed" not in done.stderr
        assert "ResourceWarning" not in done.stderr
        assert done.stderr.count("never retrieved") == done.stderr.count("\npyverbs_lite.errors.")

    def test_a_loop_that_is_left_in_the_middle(self, tmp_path):
        (tmp_path / "leaves.py").write_text(
            "import asyncio, pyverbs_lite as pvl\n"
            "async def main():\n"
            "    async with pvl.aio.listen('127.0.0.1', 0) as listener:\n"
            "        accepting = asyncio.create_task(listener.accept())\n"
            "        async with pvl.aio.connect('127.0.0.1', listener.port) as left, await accepting as right:\n"
            "            loop.call_later(0.2, loop.stop)\n"
            "            while True:\n"
            "                await left.send(b'nobody takes it')\n"
            "loop = asyncio.new_event_loop()\n"
            "task = loop.create_task(main())\n"
            "loop.run_forever()\n"
            "loop.close()\n"
        )
        done = subprocess.run(
            [sys.executable, str(tmp_path / "leaves.py")], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0
        assert "Traceback" not in done.stderr

    def test_a_connection_nobody_closed(self, run):
        async def main():
            async with pvl.aio.listen("127.0.0.1", 0) as listener:
                accepting = asyncio.create_task(listener.accept())
                left = await pvl.aio.connect("127.0.0.1", listener.port)
                right = await accepting
                del accepting
                with pytest.warns(ResourceWarning, match="never closed"):
                    del left
                    for _ in range(20):  # the thread that made it may hold it for a moment longer
                        gc.collect()
                        await asyncio.sleep(0.01)
                with pytest.raises(pvl.PeerClosedError):
                    await right.recv()
                await right.close()
                await asyncio.sleep(0.01)
                gc.collect()
                await asyncio.sleep(0.01)

        run(main())


def test_asyncio_is_imported_by_who_uses_it():
    code = "import sys, pyverbs_lite as pvl; print('asyncio' in sys.modules, pvl.aio.connect, 'asyncio' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True).stdout
    assert re.fullmatch(r"False <function connect at \w+> True\n", shown)
    with pytest.raises(AttributeError, match="no attribute 'aoi'"):
        _ = pvl.aoi


def test_the_example():
    path = ROOT / "examples" / "aio_echo.py"
    assert len(path.read_text().splitlines()) < 40
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("A 0 AA 1\nB 0 BB 1\nC 0 CC 1\n", "", 0)

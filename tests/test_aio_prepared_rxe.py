"""Prepared operations, awaited on each kind of event loop; what they have in common see ``test_prepared_rxe``."""

from __future__ import annotations

import gc
from array import array
from contextlib import suppress
from typing import Any

import anyio
import pytest
from test_anyio_rxe import connected, run  # noqa: F401  # a fixture

import pyverbs_lite as pvl
from pyverbs_lite import aio

pytestmark = pytest.mark.rdma

PATIENT = {"ack_timeout_exp": 23, "retry_cnt": 7}


async def until(condition: Any) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.002)


def test_each_kind_moves_what_is_there_when_it_runs(run: Any) -> None:  # noqa: F811
    target = bytearray(300)

    async def main() -> None:
        async with connected("tcp", {"buffers": {"data": target}}) as (left, right):
            remote, region = left.remote["data"], await left.register(bytearray(b"a" * 100))
            write = left.prepare_write(remote[7:107], region[20:60])
            assert isinstance(write, aio.Prepared)
            assert (write.operation, write.part.length) == ("write", 40)
            assert repr(write).startswith(f"<{left._face} prepared write of <40 bytes at offset 20")
            assert await write.run() is None
            assert bytes(target) == bytes(7) + b"a" * 40 + bytes(253)
            region.view[20:60] = b"b" * 40
            await write(timeout=5)
            assert bytes(target[7:47]) == b"b" * 40
            notice, message = left.prepare_write(remote, region[:33], imm=7), left.prepare_send(region[18:22])
            for _ in range(80):  # more than there are receives, and than follow each other without giving way
                await notice()
                arrived = await right.recv()
                assert (arrived.imm, arrived.byte_len) == (7, 33)
                await message()
                assert await right.recv() == b"aabb"
            target[:50] = b"c" * 50
            await left.prepare_read(remote[:50], region[10:80]).run()
            assert bytes(region.view[8:62]) == b"aa" + b"c" * 50 + b"aa"
            rows = array("Q", [0, 8, 16]), [100, 200, 250], array("Q", [3, 2, 1])
            many = left.prepare_write_many(remote, region, *rows)
            assert many.operation == "write_many"
            await many()
            assert (bytes(target[100:104]), bytes(target[200:203])) == (b"aaa\0", b"aa\0")
            target[100:103] = b"xyz"
            await left.prepare_read_many(remote, region, *rows).run(5)
            assert bytes(region.view[:4]) == b"xyza"

    run(main)


def test_many_pieces_that_never_wait_give_way(run: Any) -> None:  # noqa: F811
    async def main() -> None:
        async with connected("tcp", {"buffers": {"far": bytearray(64)}}) as (left, _):
            remote, region, turns = left.remote["far"], await left.register(bytearray(64)), 0
            nothing = left.prepare_write_many(remote, region, [0], [0], [0])

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await anyio.sleep(0)

            async with anyio.create_task_group() as group:
                group.start_soon(other)
                for many in (nothing.run, lambda: left.write_many(remote, region, [0], [0], [0])):
                    await anyio.sleep(0.01)
                    before = turns
                    for _ in range(1000):
                        await many()
                    assert turns >= before + 10
                group.cancel_scope.cancel()

    run(main)


def test_a_message_waits_for_a_receive(run: Any) -> None:  # noqa: F811
    async def main() -> None:
        async with connected("tcp", {"recv_depth": 2}) as (left, right):
            message, sent = left.prepare_send(await left.register(bytearray(b"hello"))), 0
            with pytest.raises(pvl.WaitTimeout, match="has not taken the messages before it"):
                while True:
                    await message.run(0.05)
                    sent += 1
            async with anyio.create_task_group() as group:
                group.start_soon(message.run)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(pvl.BusyError, match="task"):
                    await message.run()
                for _ in range(sent + 1):
                    assert await right.recv(timeout=5) == b"hello"

    run(main)


def test_what_is_not_so_any_more(run: Any) -> None:  # noqa: F811
    async def main() -> None:
        async with connected() as (left, right):
            lent = await right.register(bytearray(64), name="lent")
            await until(lambda: "lent" in left.remote)
            region = await left.register(bytearray(64))
            write, message = left.prepare_write(left.remote["lent"], region), left.prepare_send(region)
            await write()
            other = await right.register(bytearray(8), name="other")
            await until(lambda: "other" in left.remote)
            await write()  # news, but not of this buffer
            lent.close()
            await until(lambda: "lent" not in left.remote)
            with pytest.raises(pvl.StaleBufferError, match="withdrawn 'lent'"):
                await write()
            with pytest.raises(pvl.StaleBufferError):
                left.prepare_write(pvl.RemoteBuffer(1, 2, 3, domain=4), region[:1])
            region.close()
            with pytest.raises(pvl.ClosedError, match="is closed"):
                await message()
            assert left._engine.in_flight == 0
            mine = await left.register(bytearray(8))
            last = left.prepare_send(mine)
            other.close()
            await right.close()
            with pytest.raises(pvl.PeerClosedError):
                await left.recv()
            with pytest.raises(pvl.PeerClosedError):
                await last()
            await left.close()
            with pytest.raises(pvl.ClosedError):
                await last()

    run(main)


def test_one_that_was_cancelled_holds_its_memory_and_is_waited_for(run: Any) -> None:  # noqa: F811
    async def main() -> None:
        async with connected("tcp", {"buffers": {"data": bytearray(64)}}, PATIENT) as (left, right):
            region = await left.register(bytearray(64))
            write = left.prepare_write(left.remote["data"], region)
            right._conn._link.qp.to_reset()
            with anyio.move_on_after(0.02) as scope:
                await write()
            assert scope.cancelled_caught
            for timeout in (0.02, 0):
                with pytest.raises(pvl.WaitTimeout, match="still in flight"):
                    await write(timeout)
                assert left._engine.in_flight == 1  # it has posted nothing
            with pytest.raises(pvl.BusyError, match="in flight"):
                region.close()
            del write
            gc.collect()
            assert region._in_flight == 1
            await left.close()
            assert region.closed
            assert not left._engine._live

    run(main)


def test_a_failure_ends_the_connection(run: Any) -> None:  # noqa: F811
    async def main() -> None:
        async with connected("tcp", {"buffers": {"data": bytearray(64)}}) as (left, _):
            remote, region = left.remote["data"], await left.register(bytearray(64))
            forged = pvl.RemoteBuffer(remote.addr, remote.rkey ^ 0x5500, 64)
            write = left.prepare_write(forged, region)
            with pytest.raises(pvl.RemoteAccessError, match="write"):
                await write()
            with pytest.raises(pvl.ClosedError, match="because"):
                await write()

        async with connected("tcp", {"buffers": {"data": bytearray(64)}}) as (left, _):
            remote, region = left.remote["data"], await left.register(bytearray(64))
            forged = pvl.RemoteBuffer(remote.addr, remote.rkey ^ 0x5500, 64)
            many = left.prepare_write_many(forged, region, [0, 10], [30, 0], [5, 6])
            with pytest.raises(pvl.RemoteAccessError) as caught:
                await many()
            assert caught.value.failed_index == 0

    run(main)


def test_memory_of_a_pool(run: Any) -> None:  # noqa: F811
    target = bytearray(64)

    async def main() -> None:
        async with connected("tcp", {"buffers": {"data": target}}) as (left, _):
            pool = await left.pool()
            part = pool.alloc(64)
            part.view[:] = b"p" * 64
            write = left.prepare_write(left.remote["data"], part)
            for _ in range(70):
                await write()
            assert bytes(target) == b"p" * 64
            assert not part.mr._holders
            part.close()
            with pytest.raises(pvl.ClosedError, match="given back"):
                await write()
            pool.close()

    run(main)


def test_a_task_that_never_waits_gives_way(run: Any) -> None:  # noqa: F811
    async def main() -> None:
        async with connected("tcp", {"buffers": {"data": bytearray(64)}}) as (left, _):
            write, turns = left.prepare_write(left.remote["data"], await left.register(bytearray(64))), 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await anyio.sleep(0)

            async with anyio.create_task_group() as group:
                group.start_soon(other)
                for _ in range(600):
                    with suppress(pvl.WaitTimeout):
                        await write(0)
                group.cancel_scope.cancel()
            assert turns >= 5
            await write()
            assert left._engine.in_flight == 0

    run(main)

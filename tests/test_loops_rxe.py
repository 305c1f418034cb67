"""The verbs' own descriptors in event loops: watched, then left alone, and never in the loop's way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import uvloop
from support import connect_qps, make_qp

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_completion_channel_in_a_loop(context: pvl.Context, pd: pvl.PD, new_loop: Callable[[], Any]) -> None:
    channel = context.create_comp_channel()
    cqs = [context.create_cq(16, channel) for _ in range(2)]
    left, right = (make_qp(pd, cq) for cq in cqs)
    connect_qps(left, right)
    mr = pd.reg_mr(bytearray(100))
    loop = new_loop()
    found: list[tuple[int, pvl.WCOpcode]] = []
    everything: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        assert channel.get_events() >= 1
        for cq in cqs:
            cq.req_notify()
            found.extend((wc.wr_id, wc.opcode) for wc in cq.poll(16))
        if len(found) == 20:
            everything.set_result(None)

    async def main() -> None:
        loop.add_reader(channel, look)
        ticks = 0
        try:
            for cq in cqs:
                cq.req_notify()
            for i in range(10):
                right.post_recv(pvl.RecvWR(wr_id=i, sg_list=[mr[50:60]]))
            for i in range(10):
                left.post_send(pvl.SendWR(wr_id=100 + i, sg_list=[mr[i : i + 5]], opcode=pvl.WROpcode.SEND))
                await asyncio.sleep(0)
                ticks += 1
            await asyncio.wait_for(everything, 20)
        finally:
            loop.remove_reader(channel)
        assert ticks == 10
        assert channel.get_events() == 0  # which does not block

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert sorted(found) == [(i, pvl.WCOpcode.RECV) for i in range(10)] + [
        (i, pvl.WCOpcode.SEND) for i in range(100, 110)
    ]
    for qp in (left, right):
        qp.close()
    for cq in cqs:
        cq.close()  # every event is acknowledged, or this would not return
    channel.close()


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_descriptors_of_every_kind_in_anyio(context: pvl.Context, pd: pvl.PD, backend: str) -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def until(what: Any, take: Callable[[], Any]) -> Any:
        while not (got := take()):
            await anyio.wait_readable(what)
        return got

    async def main() -> None:
        with anyio.fail_after(20), context.create_comp_channel() as channel, context.create_cq(8, channel) as cq:
            with make_qp(pd, cq) as qp, pd.reg_mr(bytearray(9)) as mr:
                qp.to_init()
                qp.post_recv(pvl.RecvWR(wr_id=5, sg_list=[mr[:9]]))
                cq.req_notify()
                ended: list[str] = []

                async def wait(name: str, what: Any, take: Callable[[], Any]) -> None:
                    await until(what, take)
                    ended.append(name)

                async with anyio.create_task_group() as group:
                    group.start_soon(wait, "cq", channel, channel.get_events)
                    await anyio.wait_all_tasks_blocked()
                    with pytest.raises(pvl.WaitTimeout):
                        cq.wait(0)
                    qp.to_error()
                assert ended == ["cq"]
                assert [(wc.wr_id, wc.status) for wc in cq.poll(8)] == [(5, pvl.WCStatus.WR_FLUSH_ERR)]

    limited: Callable[[], Awaitable[None]] = main
    anyio.run(limited, backend=backend)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_connection_managers_events_in_a_loop(new_loop: Callable[[], Any]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pvl.cm.listen("192.0.2.1", 0) as listener:
            asked: asyncio.Future[None] = loop.create_future()
            loop.add_reader(listener, lambda: asked.done() or asked.set_result(None))
            try:
                with pytest.raises(pvl.WaitTimeout):
                    listener.accept(0)
                connecting = asyncio.ensure_future(pvl.aio.cm_connect("192.0.2.1", listener.port))
                await asyncio.wait_for(asked, 20)
            finally:
                loop.remove_reader(listener)
            accepted = await loop.run_in_executor(None, listener.accept, 20)
            async with await connecting as conn:
                await conn.send(b"from the loop")
                assert await loop.run_in_executor(None, accepted.recv) == b"from the loop"
                accepted.close()

    loop = new_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), 60))
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()

"""Named buffers while a connection lives: waited for, withdrawn, replaced, and refused once they are stale."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from support import connected, in_thread

import pyverbs_lite as pvl
from pyverbs_lite import aio
from pyverbs_lite._connection.registry import Registry

pytestmark = pytest.mark.rdma

#: How a connection is made, and over which address.
WAYS = {"tcp": (pvl, "127.0.0.1"), "cm": (pvl.cm, "192.0.2.1"), "iwarp": (pvl.cm, "198.51.100.1")}


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[pvl.Connection, pvl.Connection]]:
    via, host = WAYS[request.param]
    with connected({"buffers": {"early": b"from the start"}}, None, host, via=via) as (left, right):
        yield left, right


# ------------------------------------------------------------ waiting


def test_a_name_is_waited_for(pair: tuple[pvl.Connection, pvl.Connection]) -> None:
    left, right = pair
    assert left.remote.wait("early").length == 14
    waiting = in_thread(left.remote.wait, "late", 20)
    with right.register(bytearray(b"here I am"), name="other"), right.register(bytearray(b"now"), name="late"):
        found = waiting()
        assert (found.name, left.read(found)) == ("late", b"now")
        assert left.remote.wait("other", 0) == left.remote["other"]


def test_news_are_no_matter_of_a_slice_of_time(pair: tuple[pvl.Connection, pvl.Connection], monkeypatch: Any) -> None:
    monkeypatch.setattr("pyverbs_lite._connection.engine._SLICE_NS", 60_000_000_000)
    left, right = pair
    waiting = in_thread(left.remote.wait, "late")
    time.sleep(0.05)  # so that it sleeps; it holds without, too
    with right.register(bytearray(3), name="late"):
        assert waiting(20).length == 3


def test_several_threads_wait_while_another_polls(pair: tuple[pvl.Connection, pvl.Connection]) -> None:
    left, right = pair
    receiving = in_thread(left.recv)
    waiting = [in_thread(left.remote.wait, f"name {i % 3}", 20) for i in range(6)]
    for i in range(3):
        right.register(bytearray(i + 1), name=f"name {i}")
    assert sorted(result().length for result in waiting) == [1, 1, 2, 2, 3, 3]
    right.send(b"bye")
    assert receiving() == b"bye"


def test_what_comes_in_while_something_is_sent_is_no_less_news(pair: tuple[pvl.Connection, pvl.Connection]) -> None:
    left, right = pair
    with ExitStack() as stack:
        for i in range(5):
            mine = stack.enter_context(left.register(bytearray(i + 1), name=f"mine {i}"))
            theirs = stack.enter_context(right.register(bytearray(i + 9), name=f"theirs {i}"))
            assert right.remote.wait(f"mine {i}", 20).addr == mine.addr
            assert left.remote.wait(f"theirs {i}", 20).addr == theirs.addr


def test_a_wait_that_is_too_long_lists_the_names(pair: tuple[pvl.Connection, pvl.Connection]) -> None:
    left, right = pair
    with right.register(bytearray(3), name="another"):
        left.remote.wait("another", 20)
        with pytest.raises(
            pvl.WaitTimeout, match=r"no buffer 'nope' within 0\.05 s; it has 'another', 'early'$"
        ) as caught:
            left.remote.wait("nope", 0.05)
    assert caught.value.operation == "conn.remote.wait"
    with pytest.raises(pvl.WaitTimeout, match="no buffer 'nope' within 0.0 s; it has none"):
        right.remote.wait("nope", 0)


@pytest.mark.parametrize("name", ["", 5, b"early", "x" * 256])
def test_what_is_no_name_is_refused(pair: tuple[pvl.Connection, pvl.Connection], name: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="a buffer's name must"):
        pair[0].remote.wait(name, 0)
    with pytest.raises(ValueError, match="timeout must not be negative"):
        pair[0].remote.wait("early", -1)


def test_the_peers_goodbye_ends_the_wait(pair: tuple[pvl.Connection, pvl.Connection]) -> None:
    left, right = pair
    waiting = [in_thread(left.remote.wait, name) for name in ("nope", "nor this")]
    right.close()
    for result, name in zip(waiting, ("nope", "nor this"), strict=True):
        with pytest.raises(
            pvl.PeerClosedError, match=f"closed.*no buffer '{name}' was named before that, but: 'early'$"
        ):
            result()
    with pytest.raises(pvl.PeerClosedError, match="'early'"):
        left.remote.wait("early")


def test_closing_ends_the_wait(pair: tuple[pvl.Connection, pvl.Connection]) -> None:
    waiting = in_thread(pair[0].remote.wait, "nope")
    pair[0].close()
    with pytest.raises(pvl.ClosedError, match="no buffer 'nope' was named before that"):
        waiting()
    with pytest.raises(pvl.ClosedError, match="no buffer 'nope'"):
        pair[0].remote.wait("nope")


def test_a_servers_connections_wait_and_are_told_of_what_it_names_later() -> None:
    found = []

    def handler(conn: pvl.Connection) -> None:
        mine = conn.remote.wait("mine", 20)
        found.append((conn.read(mine), conn.stats.sleeps > 0))
        conn.send(b"seen")

    with pvl.Server("127.0.0.1", 0, handler) as server:
        server.start()
        with pvl.connect("127.0.0.1", server.port) as left, pvl.connect("127.0.0.1", server.port) as right:
            waiting = [in_thread(conn.remote.wait, "later", 20) for conn in (left, right)]
            with server.register(bytearray(b"to all"), name="later"):
                remotes = [result() for result in waiting]
                assert remotes[0].domain == remotes[1].domain != 0
                assert right.read(remotes[0]) == left.read(remotes[1]) == b"to all"  # of one domain
            for conn in (left, right):
                while "later" in conn.remote:  # its withdrawal may be on its way
                    time.sleep(0.001)
                with pytest.raises(pvl.StaleBufferError, match="the peer has withdrawn 'later'"):
                    conn.read(remotes[0])
                conn.register(b"my own", name="mine")
                assert conn.recv(timeout=20) == b"seen"
    assert found == [(b"my own", True)] * 2


WAIT_AND_INTERRUPT = """
import sys, threading
import pyverbs_lite as pvl
with pvl.listen("127.0.0.1", 0) as listener:
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(20)))
    thread.start()
    with pvl.connect("127.0.0.1", listener.port) as conn:
        thread.join()
        print("waiting", flush=True)
        try:
            conn.remote.wait("never")
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        accepted[0].register(b"value", name="after")
        print(conn.read(conn.remote.wait("after", 20)))
        accepted[0].close()
"""


def test_ctrl_c_ends_the_wait() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT_AND_INTERRUPT], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.05)  # the handler is Python's own; this is to be within the wait
            os.kill(process.pid, signal.SIGINT)
            assert process.communicate(timeout=30)[0] == "interrupted\nb'value'\n"
        finally:
            process.kill()
    assert process.returncode == 0


async def in_a_loop(via: Any, host: str) -> None:
    connect, listen = (aio.connect, aio.listen) if via is pvl else (aio.cm_connect, aio.cm_listen)
    async with listen(host, 0, buffers={"early": b"from the start"}) as listener:
        accepting = asyncio.ensure_future(listener.accept(20))
        async with connect(host, listener.port) as left, await accepting as right:
            assert (await left.remote.wait("early")).length == len(left.remote["early"]) == 14
            waiting = [asyncio.ensure_future(left.remote.wait(name, 20)) for name in ("late", "late", "later")]
            given_up = asyncio.ensure_future(left.remote.wait("late"))
            await asyncio.sleep(0)
            given_up.cancel()
            await right.register(bytearray(b"now"), name="late")
            await left.send(b"other things happen meanwhile")
            await right.recv()
            await right.register(bytearray(b"now, too"), name="later")
            assert [await left.read(found) for found in await asyncio.gather(*waiting)] == [b"now", b"now", b"now, too"]
            with pytest.raises(pvl.WaitTimeout, match=r"'nope' within 0\.02 s; it has 'early', 'late', 'later'$"):
                await left.remote.wait("nope", 0.02)
            with pytest.raises(TypeError, match="must be a str"):
                await left.remote.wait(5)  # type: ignore[arg-type]
            ended = [asyncio.ensure_future(side.remote.wait("nope")) for side in (left, right)]
            await asyncio.sleep(0)
            await right.close()
            for side, error in zip(ended, (pvl.PeerClosedError, pvl.ClosedError), strict=True):
                with pytest.raises(error, match="no buffer 'nope' was named before that"):
                    await side


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("way", WAYS)
def test_a_name_is_waited_for_in_an_event_loop(way: str, loop: Any) -> None:
    runner = loop()
    try:
        runner.run_until_complete(in_a_loop(*WAYS[way]))
        assert asyncio.all_tasks(runner) == set()
    finally:
        runner.close()


# ------------------------------------------------------------ stale ones


def use_everywhere(conn: pvl.Connection, remote: pvl.RemoteBuffer) -> list[Any]:
    """Return every way to use a buffer."""
    region = conn.register(bytearray(8))
    row = [0]

    def batch() -> None:
        with conn.batch() as gathered:
            gathered.write(remote, region)

    return [
        lambda: conn.write(remote, b"x"),
        lambda: conn.write(remote, b"x", imm=1),
        lambda: conn.read(remote),
        lambda: conn.read(remote, bytearray(20)),
        lambda: conn.start_write(remote, b"x"),
        lambda: conn.start_read(remote),
        lambda: conn.write_many(remote, region, row, row, [1]),
        lambda: conn.read_many(remote, region, row, row, [1]),
        batch,
    ]


def test_after_a_reconnect_the_old_ones_are_refused() -> None:
    memory = bytearray(b"0123456789abcdef")
    with pvl.listen("127.0.0.1", 0, buffers={"kv": memory}) as listener:
        accepting = in_thread(listener.accept, 20)
        with pvl.connect("127.0.0.1", listener.port) as first, accepting() as first_served:
            kept = first.remote["kv"]
            assert first.read(kept[4:8]) == b"4567"
            assert kept.domain == first_served._link.pd.domain != 0
        accepting = in_thread(listener.accept, 20)
        with pvl.connect("127.0.0.1", listener.port) as second, accepting():
            before = second._engine._c.in_flight
            port = second._link.peer.control.peer
            for stale in (kept, kept[4:8], pickle.loads(pickle.dumps(kept[4:8]))):
                where = r"\[4:8\]" if len(stale) == 4 else ""
                for use in use_everywhere(second, stale):
                    with pytest.raises(
                        pvl.StaleBufferError,
                        match=rf"^\w+: buffer 'kv'{where} at {port} is stale: the connection that it came from is over,"
                        rf" or another than this one with {port}; nothing was posted, take it anew from conn\.remote$",
                    ):
                        use()
            assert second._engine._c.in_flight == before
            with pytest.raises(pvl.StaleBufferError) as caught:
                second.fetch_add(kept[:8], 1)
            assert caught.value.operation == "fetch_add"
            assert second.read(second.remote["kv"]) == memory
            by_hand = pvl.RemoteBuffer(kept.addr, second.remote["kv"].rkey, kept.length)
            assert second.read(by_hand) == memory


def test_one_of_another_connection_is_refused_but_not_of_another_thread(
    pair: tuple[pvl.Connection, pvl.Connection],
) -> None:
    left, right = pair
    with left.register(bytearray(b"left"), name="mine"):
        mine = right.remote.wait("mine", 20)
        with pytest.raises(pvl.StaleBufferError, match="read: buffer 'mine' at .* is stale: the connection that it"):
            left.read(mine)  # its own memory, which is no memory of its peer's
        with connected() as (other, _):
            for remote in (mine, left.remote["early"]):
                with pytest.raises(pvl.StaleBufferError, match="stale"):
                    other.read(remote)
        assert in_thread(right.read, mine)() == b"left"


def test_connections_of_one_domain_share_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    # What makes a server register once for all of its connections; here two domains that say they are one.
    monkeypatch.setattr(pvl.PD, "domain", 0x1112131415161718)
    with connected({"buffers": {"a": b"first"}}) as (left, _), connected() as (other, _):
        assert left.remote["a"].domain == 0x1112131415161718
        other._check_remote(left.remote["a"], pvl.AccessFlags.REMOTE_READ, "read")


def test_a_withdrawn_one_is_refused_by_name(pair: tuple[pvl.Connection, pvl.Connection]) -> None:
    left, right = pair
    region = right.register(bytearray(b"soon gone"), name="guest")
    guest = left.remote.wait("guest", 20)
    assert left.read(guest) == b"soon gone"
    region.close()
    assert "guest" not in left.remote
    for use in use_everywhere(left, guest[2:]):
        with pytest.raises(
            pvl.StaleBufferError,
            match=r"^\w+: buffer 'guest'\[2:9\] at .* is stale: the peer has withdrawn 'guest'; nothing was",
        ):
            use()
    assert left.read(left.remote["early"]) == b"from the start"  # and the connection lives on
    with right.register(bytearray(b"back again"), name="guest"):
        assert left.read(left.remote.wait("guest", 20)) == b"back again"
        with pytest.raises(pvl.StaleBufferError, match="withdrawn 'guest'"):
            left.read(guest)


def test_a_key_that_is_used_again_is_good_again() -> None:
    with connected() as (left, _):
        peer = left._link.peer
        buffer = pvl.RemoteBuffer(0x1000, 7, 8, "a", pvl.AccessFlags.REMOTE_READ)
        peer.note(pvl.wire.BufferAdded(buffer))
        kept = peer.buffers["a"]
        assert (kept.domain, kept.owner) == (peer.domain, peer.control.peer)
        peer.note(pvl.wire.BufferAdded(replace(buffer, rkey=8)))  # the name means something else now
        with pytest.raises(pvl.StaleBufferError, match="withdrawn 'a'"):
            left.read(kept)
        left._check_remote(replace(kept, name="of another connection"), pvl.AccessFlags.REMOTE_READ, "read")
        peer.note(pvl.wire.BufferAdded(replace(buffer, name="b")))
        left._check_remote(kept, pvl.AccessFlags.REMOTE_READ, "read")
        for rkey in range(10, 5000):
            peer.note(pvl.wire.BufferAdded(replace(buffer, name="c", rkey=rkey)))
            peer.note(pvl.wire.BufferWithdrawn("c"))
        assert len(peer.withdrawn) == 4096
        assert 4999 in peer.withdrawn


def test_a_peer_that_names_no_domain_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pvl.wire.Channel, "domain", lambda self, domain: None)
    with connected({"buffers": {"a": b"value"}}) as (left, _):
        assert left.remote["a"].domain == 0
        assert left.read(left.remote["a"]) == b"value"


def test_the_domain_is_the_protection_domains(pd: pvl.PD, context: pvl.Context) -> None:
    with context.alloc_pd() as other:
        assert 0 < pd.domain == pd.domain < 1 << 64
        assert pd.domain != other.domain
    domains = []
    threads = [threading.Thread(target=lambda: domains.append(pd.domain)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert domains == [pd.domain] * 4


def test_a_name_that_an_interrupt_has_half_entered_is_free(
    pair: tuple[pvl.Connection, pvl.Connection], monkeypatch: Any
) -> None:
    left, right = pair
    enter = Registry._enter

    def struck(self: Registry, name: str, region: Any) -> None:
        enter(self, name, region)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_enter", struck)
        with pytest.raises(KeyboardInterrupt):
            right.register(bytearray(10), name="late")
    assert "late" not in right.local
    with right.register(bytearray(20), name="late") as region:
        assert right.local["late"] is region
        assert left.remote.wait("late", 10).length == 20

"""A peer that is gone, or only seems so: its process killed or stopped, its host unreachable."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from support import connected

import pyverbs_lite as pvl

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(60)]

#: An address on each end of a cable between two network namespaces, for TCP alone: RDMA stays on rxe0.
NEAR, FAR = "203.0.113.1", "203.0.113.2"
#: What a peer does: it connects, says so, and then as it is told by lines.
PEER = """
    import sys
    import pyverbs_lite as pvl

    conn = pvl.connect(sys.argv[1], int(sys.argv[2]), device="rxe0", gid_index=int(sys.argv[3]), keep_alive=1)
    conn.send(b"here")
    for line in sys.stdin:
        if line == "wait\\n":
            try:
                conn.recv(timeout=30)
            except pvl.VerbsError as error:
                print(type(error).__name__, error, flush=True)
        else:
            conn.send(line.encode())
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=10, capture_output=True)


@pytest.fixture
def cable() -> Iterator[None]:
    run("ip", "netns", "add", "far")
    try:
        run("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", "far")
        run("ip", "addr", "add", f"{NEAR}/24", "dev", "near")
        run("ip", "link", "set", "near", "up")
        run("ip", "-n", "far", "addr", "add", f"{FAR}/24", "dev", "far")
        run("ip", "-n", "far", "link", "set", "far", "up")
        yield
    finally:
        with suppress(subprocess.CalledProcessError):  # it was not made
            run("ip", "link", "del", "near")  # now, and not when the kernel comes to it
        run("ip", "netns", "del", "far")


def cut() -> None:
    """Let everything vanish, in both directions, without a word."""
    run("tc", "qdisc", "add", "dev", "near", "root", "netem", "loss", "100%")
    run("tc", "-n", "far", "qdisc", "add", "dev", "far", "root", "netem", "loss", "100%")


@contextmanager
def peer_process(listener: pvl.Listener, gid_index: int, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", textwrap.dedent(PEER), listener.host, str(listener.port), str(gid_index)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        with process.stdin, process.stdout:
            yield process
    finally:
        process.kill()
        process.wait()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def gid_index() -> int:
    with connected() as (left, _):
        return left.info.gid_index


def test_a_host_that_no_longer_answers_is_noticed_on_both_sides(cable: None) -> None:
    row = gid_index()
    with (
        pvl.listen(NEAR, 0, device="rxe0", gid_index=row, keep_alive=1) as listener,
        peer_process(listener, row, "nsenter", "--net=/run/netns/far") as process,
        listener.accept(20) as conn,
    ):
        assert conn.recv(timeout=10) == b"here"
        tell(process, "wait")
        cut()
        start = time.monotonic()
        with pytest.raises(pvl.PeerClosedError, match=r"nothing was heard of .* for 1 s \(keep_alive=\)"):
            conn.recv(timeout=20)
        assert 0.5 < time.monotonic() - start < 15  # two seconds on a machine that has nothing else to do
        with pytest.raises(pvl.PeerClosedError, match="keep_alive"):
            conn.send(b"to nobody")
        assert process.stdout
        assert process.stdout.readline().startswith("PeerClosedError nothing was heard of 203.0.113.1")


def test_so_is_it_in_asyncio(cable: None) -> None:
    row = gid_index()

    async def wait() -> None:
        async with pvl.aio.listen(NEAR, 0, device="rxe0", gid_index=row, keep_alive=1) as listener:
            accepting = asyncio.ensure_future(listener.accept(20))
            with peer_process(listener, row, "nsenter", "--net=/run/netns/far"):
                async with await accepting as conn:
                    assert await conn.recv(timeout=10) == b"here"
                    cut()
                    with pytest.raises(pvl.PeerClosedError, match="keep_alive"):
                        await conn.recv(timeout=20)

    asyncio.run(wait())


def test_without_keep_alive_nobody_is_missed(cable: None) -> None:
    row = gid_index()
    with (
        pvl.listen(NEAR, 0, device="rxe0", gid_index=row, keep_alive=None) as listener,
        peer_process(listener, row, "nsenter", "--net=/run/netns/far"),
        listener.accept(20) as conn,
    ):
        assert conn.recv(timeout=10) == b"here"
        cut()
        with pytest.raises(pvl.WaitTimeout):
            conn.recv(timeout=3)


def test_a_process_that_is_stopped_is_not_gone() -> None:
    row = gid_index()
    with (
        pvl.listen("127.0.0.1", 0, device="rxe0", gid_index=row, keep_alive=1) as listener,
        peer_process(listener, row) as process,
        listener.accept(20) as conn,
    ):
        assert conn.recv(timeout=10) == b"here"
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(pvl.WaitTimeout):
            conn.recv(timeout=3.5)
        os.kill(process.pid, signal.SIGCONT)
        tell(process, "still here")
        assert conn.recv(timeout=20) == b"still here\n"


@pytest.mark.parametrize("keep_alive", [1, None])
def test_a_process_that_is_killed_shows_at_once(keep_alive: float | None) -> None:
    row = gid_index()
    with (
        pvl.listen("127.0.0.1", 0, device="rxe0", gid_index=row, keep_alive=keep_alive) as listener,
        peer_process(listener, row) as process,
        listener.accept(20) as conn,
    ):
        assert conn.recv(timeout=10) == b"here"
        process.kill()
        with pytest.raises(pvl.PeerClosedError, match="its process is gone"):
            conn.recv(timeout=20)


@pytest.mark.parametrize(
    ("seconds", "idle", "interval", "user"), [(10, 5, 1, 10_000), (1.5, 1, 1, 1500), (60, 30, 6, 60_000)]
)
def test_the_kernel_is_told(seconds: float, idle: int, interval: int, user: int) -> None:
    with connected({"keep_alive": seconds}) as (left, right):
        for conn in (left, right):
            sock = conn._link.peer.control.socket
            told = [
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
            ]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert told == ([idle, interval, user] if conn is right else [5, 1, 10_000])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("1", TypeError),
        (True, TypeError),
        (-1, ValueError),
        (0.5, ValueError),
        (1e9, ValueError),
        (float("nan"), ValueError),
    ],
)
def test_what_is_no_time_is_refused(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="keep_alive"):
        pvl.listen("127.0.0.1", 0, keep_alive=value)  # type: ignore[arg-type]


# ------------------------------------------------------------ through librdmacm


def silence(conn: pvl.Connection) -> None:
    """Let a peer's adapter answer nothing any more, without a word to anybody."""
    conn._link.qp.to_reset()


@pytest.mark.parametrize("waits", [True, False])
def test_over_librdmacm_an_adapter_that_does_not_answer_is_noticed(waits: bool) -> None:
    options = {"keep_alive": 1, "retry_cnt": 2}
    with connected(client=options, host="192.0.2.1", via=pvl.cm) as (left, right):
        time.sleep(1.2)  # somebody has asked by then
        left.send(b"still well")
        assert right.recv(timeout=10) == b"still well"
        silence(right)
        if waits:
            with pytest.raises(pvl.RetryExceededError):
                left.recv(timeout=20)
        else:
            limit = time.monotonic() + 20
            while left._engine.failure is None and time.monotonic() < limit:
                time.sleep(0.05)
            with pytest.raises(pvl.ClosedError, match="RETRY_EXC_ERR"):
                left.send(b"to nobody")


def test_over_librdmacm_nobody_asks_without_being_told_to() -> None:
    with connected(host="192.0.2.1", via=pvl.cm) as (left, right):
        silence(right)
        with pytest.raises(pvl.WaitTimeout):
            left.recv(timeout=1)
        assert not [thread for thread in threading.enumerate() if "keep-alive" in thread.name]


@pytest.mark.parametrize("host", ["192.0.2.1", "198.51.100.1"])
def test_over_librdmacm_an_idle_peer_is_not_gone(host: str) -> None:
    """The adapter answers by itself, on iWARP too, and the questions take no place in the queues for good."""
    with connected({"keep_alive": 1}, {"keep_alive": 1, "send_depth": 2}, host=host, via=pvl.cm) as (left, right):
        with pytest.raises(pvl.WaitTimeout):
            left.recv(timeout=2.5)
        for number in range(20):
            left.send(b"%d" % number, timeout=10)
            assert right.recv(timeout=10) == b"%d" % number
    limit = time.monotonic() + 5
    while any("keep-alive" in thread.name for thread in threading.enumerate()) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if "keep-alive" in thread.name]


def test_over_librdmacm_in_asyncio() -> None:
    async def wait() -> None:
        async with pvl.aio.cm_listen("192.0.2.1", 0) as listener:
            accepting = asyncio.ensure_future(listener.accept(20))
            options = {"keep_alive": 1, "retry_cnt": 2}
            async with (
                pvl.aio.cm_connect("192.0.2.1", listener.port, **options) as left,
                await accepting as right,
            ):
                await right.send(b"here")
                assert await left.recv(timeout=10) == b"here"
                silence(right._conn)
                with pytest.raises(pvl.RetryExceededError):
                    await left.recv(timeout=20)

    asyncio.run(wait())

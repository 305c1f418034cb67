"""What a connection does when something ends badly: the right error, nothing lost, nothing left, no memory touched."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from support import connected, counts, in_thread

import pyverbs_lite as pvl
from pyverbs_lite.errors import RemoteAccessError, RetryExceededError, RnrRetryExceededError

pytestmark = pytest.mark.rdma

A = pvl.AccessFlags
#: A peer that does not answer is given up after some 10 ms.
IMPATIENT = {"ack_timeout_exp": 8, "retry_cnt": 1, "rnr_retry": 0}
#: A peer that does not answer is asked again for a quarter of an hour.
PATIENT = {"ack_timeout_exp": 23, "retry_cnt": 7}


def qp_of(conn: pvl.Connection) -> pvl.QP:
    return conn._link.qp


def eventually(condition: Callable[[], Any], limit: float = 10.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


class Owned(bytearray):
    """Memory that can be watched."""


# ------------------------------------------------------------ timeouts hold memory (report 11)


def test_a_late_message_after_a_timeout_is_the_next_one() -> None:
    with connected() as (left, right):
        target = bytearray(64)
        with pytest.raises(pvl.WaitTimeout, match=r"no message arrived within 0.05 s"):
            right.recv_into(target, timeout=0.05)
        del target
        others = [bytearray(b"\x5a" * 64) for _ in range(50)]
        left.send(b"late" * 16)
        assert all(other == b"\x5a" * 64 for other in others)
        assert right.recv(timeout=5) == b"late" * 16


@pytest.mark.parametrize("state", ["RESET", "ERR"])
@pytest.mark.parametrize("operation", ["write", "read", "send"])
def test_a_timeout_holds_the_memory_until_the_flush(state: str, operation: str) -> None:
    """The peer's QP goes dead behind the library's back, so the request stays in flight."""
    with connected({"buffers": {"data": bytearray(1 << 16)}}, PATIENT) as (left, right):
        remote = left.remote["data"][:50_000]
        qp_of(right).modify(pvl.QPAttr(qp_state=pvl.QPState[state]))
        memory = Owned(50_000)
        gone = weakref.ref(memory)
        call = {"write": left.write, "read": left.read}.get(operation)
        start = time.monotonic()
        with pytest.raises(pvl.WaitTimeout, match="still in flight and may complete later"):
            call(remote, memory, timeout=0.1) if call else left.send(memory, timeout=0.1)
        assert time.monotonic() - start < 2
        with pytest.raises(BufferError):
            memory.append(0)  # it is pinned
        del memory
        gc.collect()
        assert gone() is not None
        assert left._engine.in_flight == 1
        left.close()
        assert gone() is None


def test_a_late_read_writes_into_no_memory_that_is_free() -> None:
    """Small reads go through a cell of the connection: what comes too late is thrown away there."""
    large = bytearray(b"\xee") * (8 << 20)
    with connected({"buffers": {"data": large[:4096], "large": large}}) as (left, right):
        remote, target = left.remote["data"], bytearray(4096)
        before = left.start_read(left.remote["large"], left.register(bytearray(len(large))))
        with pytest.raises(pvl.WaitTimeout):  # for it comes after that one
            left.read(remote, target, timeout=0)
        before.wait(20)
        others = [bytearray(4096) for _ in range(50)]
        left.read(remote)  # later than that one
        eventually(lambda: left._engine.in_flight == 0)
        assert target == bytes(4096)
        assert not any(map(any, others))
        assert not left._engine._live
        right.send(b"fine")
        assert left.recv(timeout=5) == b"fine"


def test_a_region_in_flight_cannot_be_closed() -> None:
    with connected({}, PATIENT) as (left, right):
        qp_of(right).to_reset()
        region = left.register(bytearray(9000))
        with pytest.raises(pvl.WaitTimeout):
            left.send(region, timeout=0.05)
        with pytest.raises(pvl.BusyError, match="in flight"):
            region.close()
        assert not region.closed
        left.close()
        assert region.closed


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_full_send_queue_is_an_error_in_time(depth: int) -> None:
    with connected({}, {**PATIENT, "send_depth": depth}) as (left, right):
        qp_of(right).to_reset()
        for _ in range(depth):
            with pytest.raises(pvl.WaitTimeout):
                left.send(b"x", timeout=0.01)
        start = time.monotonic()
        with pytest.raises(pvl.QueueFullError, match=rf"all {depth} requests .*send_depth.* 0.05 s"):
            left.send(b"x", timeout=0.05)
        assert time.monotonic() - start < 1
        assert left._engine.in_flight == depth


def test_slots_come_back_after_timeouts() -> None:
    with connected({"recv_depth": 1}, {"send_depth": 2}) as (left, right):
        left.send(b"taken by nobody yet")
        for text in (b"late 1", b"late 2"):
            with pytest.raises(pvl.WaitTimeout, match="nothing was sent"):
                left.send(text, timeout=0.01)
        assert right.recv(timeout=5) == b"taken by nobody yet"
        for i in range(10):
            left.send(b"%d" % i)
            assert right.recv(timeout=5) == b"%d" % i
        assert left._engine.in_flight == 0
        assert not left._engine._live


# ------------------------------------------------------------ what the other side does not allow (report 25)


@pytest.mark.parametrize("size", [10, 10_000])
def test_a_buffer_that_is_gone_is_a_typed_error(size: int) -> None:
    kept, gone = bytearray(b"k" * size), bytearray(b"g" * size)
    with connected({"buffers": {"kept": kept}}) as (left, right):
        region = right.register(gone, name="gone")
        # Of no known origin, as if the news of its end were still on their way.
        stale = replace(left.remote["gone"], domain=0)
        left.write(left.remote["kept"], b"K" * size)
        region.close()
        assert "gone" not in left.remote
        with pytest.raises(RemoteAccessError, match="stale rkey") as caught:
            left.write(stale, b"G" * size)
        assert caught.value.status == pvl.WCStatus.REM_ACCESS_ERR
        assert (gone, kept) == (b"g" * size, b"K" * size)
        with pytest.raises(pvl.ClosedError, match=r"this connection is over, because .*REM_ACCESS_ERR"):
            left.write(stale, b"G")
        with pytest.raises(pvl.ClosedError):
            left.send(b"x")
        with pytest.raises(pvl.ClosedError):
            left.recv(timeout=1)
        with pytest.raises(pvl.ClosedError):
            left.remote["kept"]


def test_a_forged_range_is_a_typed_error() -> None:
    with connected({"buffers": {"data": bytearray(100)}}) as (left, _):
        remote = left.remote["data"]
        forged = pvl.RemoteBuffer(remote.addr, remote.rkey, 101)
        with pytest.raises(RemoteAccessError):
            left.read(forged)


def test_what_failed_before_the_news_that_the_peer_has_left_is_the_reason() -> None:
    with connected({"buffers": {"data": bytearray(100)}}) as (left, right):
        remote = left.remote["data"]
        work = left.start_read(pvl.RemoteBuffer(remote.addr, remote.rkey, 101))
        with pytest.raises(pvl.VerbsError):  # its QP has failed with the request
            right.recv(timeout=10)
        right.close()
        with pytest.raises(pvl.ClosedError, match=r"this connection is over, because .*REM_ACCESS_ERR"):
            left.remote["data"]  # hears the news before it looks at completions
        with pytest.raises(RemoteAccessError):
            work.wait(10)


def test_a_receiver_that_is_never_ready_is_a_typed_error() -> None:
    with connected({"recv_depth": 1}, IMPATIENT) as (left, right):
        left._engine._c.framing.granted += 10  # more than there are
        for i in range(4):  # those kept for credits are receives too
            left.send(b"%d" % i)
        with pytest.raises(RnrRetryExceededError) as caught:
            left.send(b"one too many")
        assert caught.value.operation == "send"
        assert right.recv(timeout=5) == b"0"


def test_a_dead_qp_is_a_typed_error() -> None:
    with connected({}, IMPATIENT) as (left, right):
        qp_of(right).to_reset()
        waiting = in_thread(left.recv)
        with pytest.raises(RetryExceededError) as caught:
            left.send(b"x")
        assert caught.value.errno
        assert "Success" not in str(caught.value)
        with pytest.raises(RetryExceededError, match="recv: an earlier request"):
            waiting(5)


def test_our_own_qp_in_error_ends_every_wait() -> None:
    """Flushes without a cause: there is nothing else to show then."""
    with connected() as (left, _):
        waiting = in_thread(left.recv)
        qp_of(left).to_error()
        with pytest.raises(pvl.FlushError):
            waiting(5)
        with pytest.raises(pvl.ClosedError, match="is over"):
            left.send(b"x")


def test_our_own_qp_in_reset_does_not_hang_close() -> None:
    with connected() as (left, _):
        waiting = in_thread(left.recv)
        qp_of(left).to_reset()
        start = time.monotonic()
        left.close(timeout=0.3)
        assert time.monotonic() - start < 2
        with pytest.raises(pvl.ClosedError):
            waiting(5)


# ------------------------------------------------------------ the end


def test_all_that_was_sent_is_received_before_the_goodbye_counts() -> None:
    for look_first in (False, True):
        with connected({"recv_depth": 40}) as (left, right):
            for i in range(40):
                left.send(b"%d" % i, imm=i)
            left.close()
            if look_first:
                with pytest.raises(pvl.PeerClosedError):
                    right.remote["anything"]
            assert [int(right.recv(timeout=5)) for _ in range(40)] == list(range(40))
            with pytest.raises(pvl.PeerClosedError, match="closed the connection"):
                right.recv()
            with pytest.raises(pvl.PeerClosedError):
                right.send(b"x")
            with pytest.raises(pvl.PeerClosedError):
                right.register(bytearray(3), name="late")


def test_everything_after_close_is_refused_and_close_is_idempotent() -> None:
    with connected({"buffers": {"data": bytearray(64)}}) as (left, right):
        remote = left.remote["data"]
        region = left.register(bytearray(8), name="mine")
        right.send(b"unread")
        left.close()
        left.close()
        assert left.closed
        assert region.closed
        for call in (
            lambda: left.send(b"x"),
            lambda: left.recv(timeout=1),
            lambda: left.recv_into(bytearray(9), timeout=1),
            lambda: left.write(remote, b"x"),
            lambda: left.write(remote, bytes(64)),
            lambda: left.read(remote),
            lambda: left.read(remote[:0]),
            lambda: left.fetch_add(remote[:8], 1),
            lambda: left.register(bytearray(3)),
            lambda: left.remote["data"],
        ):
            with pytest.raises(pvl.ClosedError):
                call()
        assert "closed" in repr(left)
        region.close()


def test_closing_says_goodbye_for_every_name() -> None:
    with connected({"buffers": {"a": bytearray(3)}}, {"buffers": {"b": bytearray(4)}}) as (left, right):
        right.register(bytearray(5), name="c")
        assert set(left.remote) == {"a", "c"}
        right.close()
        with pytest.raises(pvl.PeerClosedError):
            left.remote["a"]


def test_a_closed_context_closes_its_connections() -> None:
    """Whoever closes the device under a connection finds it stopped first, and waiters end."""
    with pvl.open_device() as context, connected({}, {"device": context}) as (left, _):
        waiting = in_thread(left.recv)
        sending = in_thread(lambda: [left.send(b"x") for _ in range(10**6)])  # uses up the other side's receives
        engine = left._engine._c
        eventually(lambda: engine.framing.sent == engine.framing.granted and engine.polling)
        context.close()
        for wait in (waiting, sending):
            with pytest.raises(pvl.ClosedError, match="the QP of this connection was closed"):
                wait(5)
        with pytest.raises(pvl.ClosedError):
            left.send(b"x")
        left.close()


@pytest.mark.parametrize("busy", [False, True])
def test_a_dropped_connection_warns_once_and_leaves_nothing(busy: bool) -> None:
    with connected():
        pass
    before = counts()
    with pvl.listen("127.0.0.1", 0, buffers={"data": bytearray(1 << 16)}) as listener:
        accepted = in_thread(listener.accept, 5)
        left = pvl.connect("127.0.0.1", listener.port, **PATIENT)
        with accepted(5) as right:
            if busy:
                remote = left.remote["data"]
                qp_of(right).to_reset()
                with pytest.raises(pvl.WaitTimeout):
                    left.read(remote, bytearray(1 << 16), timeout=0.05)
                del remote
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del left
                gc.collect()
            assert [(w.category, "never closed" in str(w.message)) for w in caught] == [(ResourceWarning, True)]
            if not busy:
                with pytest.raises(pvl.PeerClosedError):
                    right.recv(timeout=5)
        del right, accepted
    gc.collect()
    assert counts() == before


def test_a_failed_operation_leaves_no_cycle_behind() -> None:
    with connected() as (left, _):
        gc.collect()
        gc.disable()
        try:
            memory = Owned(8000)
            gone = weakref.ref(memory)
            with pytest.raises(pvl.WaitTimeout):
                left.recv_into(memory, timeout=0)
            left.send(memory)
            del memory
            assert gone() is None
        finally:
            gc.enable()


# ------------------------------------------------------------ processes


class Script:
    """A Python program that talks to this test over its standard streams."""

    def __init__(self, source: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(source), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, limit: float = 20.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=limit)
        return self.process.returncode, out, err

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def start(source: str, *arguments: object) -> Script:
        started.append(Script(source, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.kill()


IDLE = """
    import sys, time
    import pyverbs_lite as pvl
    conn = pvl.connect("127.0.0.1", int(sys.argv[1]), buffers={"data": bytearray(1 << 20)})
    conn.send(b"a last word")
    print("connected", flush=True)
    time.sleep(60)
"""


def test_a_killed_peer_ends_every_wait(script: Callable[..., Script]) -> None:
    """The kernel closes its TCP connection, which is how an idle receiver learns of it (reports 32, 36)."""
    with pvl.listen("127.0.0.1", 0, recv_depth=8, **IMPATIENT) as listener:
        peer = script(IDLE, listener.port)
        with listener.accept(20) as conn:
            assert peer.line() == "connected"
            remote = conn.remote["data"]
            assert conn.recv(timeout=5) == b"a last word"
            waiting = [in_thread(conn.recv) for _ in range(3)]
            busy = in_thread(lambda: [conn.write(remote, bytes(1 << 20)) for _ in range(10**5)])
            eventually(lambda: conn._engine._c.polling)
            peer.process.send_signal(signal.SIGKILL)
            killed = time.monotonic()
            for wait in (*waiting, busy):
                with pytest.raises((pvl.PeerClosedError, pvl.CompletionError)) as caught:
                    wait(10)
                assert not isinstance(caught.value, pvl.FlushError)
            assert time.monotonic() - killed < 3
            for late in (lambda: conn.send(b"x"), lambda: conn.recv(timeout=1), lambda: conn.write(remote, b"x")):
                with pytest.raises((pvl.PeerClosedError, pvl.ClosedError)) as refused:
                    late()
                assert "flush" not in str(refused.value).lower()


def test_an_idle_receiver_learns_of_a_killed_peer_at_once(script: Callable[..., Script]) -> None:
    with pvl.listen("127.0.0.1", 0) as listener:
        peer = script(IDLE, listener.port)
        with listener.accept(20) as conn:
            assert peer.line() == "connected"
            peer.process.send_signal(signal.SIGKILL)
            start = time.monotonic()
            assert conn.recv() == b"a last word"
            with pytest.raises(pvl.PeerClosedError, match="its process is gone"):
                conn.recv()
            assert time.monotonic() - start < 2


WAITERS = {
    "recv": "conn = listener.accept(10); ready(); conn.recv(**limit)",
    "recv_into": "conn = listener.accept(10); ready(); conn.recv_into(bytearray(5), **limit)",
    "send": 'conn = listener.accept(10); conn.send(b"1"); ready(); conn.send(b"2", **limit)',
    "write": 'conn = listener.accept(10); r = conn.remote["d"]; conn.remote.wait("go on", 5); ready();'
    " conn.write(r, bytes(9000), **limit)",
    "accept": "ready(); listener.accept(**limit)",
    "connect": 'ready(); pvl.connect("127.0.0.1", silent.getsockname()[1], **limit)',
}
PROGRAM = """
    import os, signal, socket, sys, threading, time
    import pyverbs_lite as pvl

    limit = {"timeout": None} if sys.argv[1] == "None" else {"timeout": float(sys.argv[1])}
    number = getattr(signal, sys.argv[2])
    busy = sys.argv[3] == "busy"  # another thread polls, and this one waits for it
    conn = None

    def ready():
        if busy and conn is not None:
            threading.Thread(target=second, daemon=True).start()
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        global since
        since = time.monotonic() + 0.3

    def second():
        try:
            conn.recv()
        except pvl.VerbsError:
            pass

    def leave(number, frame):
        raise SystemExit(7)

    signal.signal(signal.SIGTERM, leave)
    with pvl.listen("127.0.0.1", 0, ack_timeout_exp=23, send_depth=2) as listener, \\
         socket.create_server(("127.0.0.1", 0)) as silent:
        print(listener.port, flush=True)
        try:
            {waiter}
        except (KeyboardInterrupt, SystemExit) as error:
            late = time.monotonic() - since
            if conn is not None:
                conn.close()
            assert late < 1, late
            print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize(
    ("waiter", "busy", "limit", "number"),
    [
        *((name, "alone", "None", "SIGINT") for name in WAITERS),
        *((name, "alone", "30", "SIGTERM") for name in ("recv", "write", "accept", "connect")),
        ("recv", "busy", "None", "SIGTERM"),
        ("send", "busy", "30", "SIGINT"),
        ("write", "busy", "None", "SIGINT"),
    ],
)
def test_signals_end_every_wait(waiter: str, busy: str, limit: str, number: str, script: Callable[..., Script]) -> None:
    """Ctrl-C within a second, and close works afterwards (report 18)."""
    program = script(PROGRAM.replace("{waiter}", WAITERS[waiter]), limit, number, busy)
    port = int(program.line())
    if waiter in ("accept", "connect"):
        code, out, err = program.end()
    else:
        with pvl.connect("127.0.0.1", port, recv_depth=1, buffers={"d": bytearray(9000)}) as peer:
            if waiter == "write":
                qp_of(peer).to_reset()  # and then, for a write that comes before would go well
                peer.register(bytearray(1), name="go on")
            code, out, err = program.end()
    assert (code, out.strip(), err) == (0, "KeyboardInterrupt" if number == "SIGINT" else "SystemExit", "")


def test_harmless_signals_disturb_nothing(script: Callable[..., Script]) -> None:
    """A timer that fires all the time neither fails a wait nor prolongs it."""
    program = script("""
        import signal, time
        import pyverbs_lite as pvl

        signal.signal(signal.SIGALRM, lambda *_: None)
        with pvl.listen("127.0.0.1", 0) as listener:
            print(listener.port, flush=True)
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with listener.accept(10) as conn:
                start = time.monotonic()
                assert conn.recv(timeout=10) == b"delayed"
                assert time.monotonic() - start > 0.5
                start = time.monotonic()
                try:
                    conn.recv(timeout=0.5)
                except pvl.WaitTimeout:
                    assert 0.5 <= time.monotonic() - start < 1
                for _ in range(200):
                    conn.send(bytes(5000))
                signal.setitimer(signal.ITIMER_REAL, 0)
                print("done", flush=True)
    """)
    with pvl.connect("127.0.0.1", int(program.line())) as peer:
        time.sleep(1)
        peer.send(b"delayed")
        for _ in range(200):
            assert peer.recv(timeout=10) == bytes(5000)
        assert program.end() == (0, "done\n", "")


def test_interrupts_at_any_moment_lose_nothing(script: Callable[..., Script]) -> None:
    """Exceptions out of a signal handler, hundreds of them, wherever they strike: the connection stays whole."""
    program = script("""
        import random, signal, time
        import pyverbs_lite as pvl

        class Struck(Exception):
            pass

        def strike(*_):
            raise Struck

        signal.signal(signal.SIGALRM, strike)
        with pvl.listen("127.0.0.1", 0, send_depth=2) as listener:
            print(listener.port, flush=True)
            with listener.accept(10) as conn:
                remote, struck = conn.remote["data"], 0
                memory = conn.register(bytearray(9000))
                calls = [
                    lambda: conn.write(remote, memory), lambda: conn.write(remote, bytes(100)),
                    lambda: conn.write(remote, bytes(9000)), lambda: conn.read(remote[:300]),
                    lambda: conn.read(remote, memory), lambda: conn.fetch_add(remote[:8], 1),
                    lambda: conn.recv(timeout=0.002),
                ]
                end = time.monotonic() + 4
                while struck < 400 and time.monotonic() < end:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.002))
                        while True:
                            try:
                                random.choice(calls)()
                            except pvl.WaitTimeout:
                                pass
                    except Struck:
                        struck += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert struck > 100, struck
                assert conn._engine.failure is None, conn._engine.failure
                conn.write(remote, b"whole")
                assert conn.read(remote[:5]) == b"whole"
                assert conn._engine.in_flight == 0
                assert conn._engine._c.free_count == 2
                assert not conn._engine._live and not memory._holders
                memory.close()
                conn.send(b"whole")
                print("done", flush=True)
                assert conn.recv(timeout=10) == b"bye"
    """)
    with pvl.connect("127.0.0.1", int(program.line()), buffers={"data": bytearray(9000)}) as peer:
        with suppress(pvl.PeerClosedError):
            assert peer.recv(timeout=20) == b"whole"
            peer.send(b"bye")
        assert program.end() == (0, "done\n", "")


def test_what_is_left_open_at_exit_is_quiet(script: Callable[..., Script]) -> None:
    program = script("""
        import threading, time, warnings
        import pyverbs_lite as pvl

        warnings.simplefilter("default")
        warnings.simplefilter("ignore", ResourceWarning)
        listener = pvl.listen("127.0.0.1", 0)
        accepted = []
        thread = threading.Thread(target=lambda: accepted.append(listener.accept(10)))
        thread.start()
        conn = pvl.connect("127.0.0.1", listener.port)
        thread.join()
        region = conn.register(bytearray(10), name="left")
        def wait():
            try:
                conn.recv()
            except pvl.VerbsError:
                pass

        threading.Thread(target=wait, daemon=True).start()
        while not conn._engine._c.polling:
            time.sleep(0.01)
    """)
    assert program.end() == (0, "", "")


def test_a_forked_child_can_do_no_harm(script: Callable[..., Script]) -> None:
    program = script("""
        import os, sys, warnings
        import pyverbs_lite as pvl

        with pvl.listen("127.0.0.1", 0) as listener:
            print(listener.port, flush=True)
            with listener.accept(10) as conn:
                pid = os.fork()
                if pid == 0:
                    refused = 0
                    for call in (lambda: conn.send(b"x"), lambda: conn.recv(timeout=1), lambda: conn.remote["d"]):
                        try:
                            call()
                        except pvl.ClosedError as error:
                            refused += "another process" in str(error)
                    conn.close()
                    conn.close()
                    del conn
                    os._exit(refused)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
                conn.send(b"the parent goes on")
                assert conn.recv(timeout=5) == b"so do I"
    """)
    with pvl.connect("127.0.0.1", int(program.line())) as peer:
        assert peer.recv(timeout=5) == b"the parent goes on"
        peer.send(b"so do I")
        code, _, err = program.end()
        assert (code, err) == (0, "")


def test_a_peer_that_does_not_read_its_socket_holds_up_nobody_else() -> None:
    """Names go over TCP; a peer that is busy elsewhere must not block transfers, nor closing for long."""
    with connected() as (left, right):
        memory, stuck = bytearray(1), 0
        for i in range(60_000):
            with suppress(pvl.HandshakeTimeout):
                left.register(memory, name=f"{i} {'n' * 240}", timeout=0.2).close()
                continue
            stuck += 1
            break
        assert stuck
        left.send(b"not held up")
        assert right.recv(timeout=5) == b"not held up"  # this reads the socket, too
        start = time.monotonic()
        left.close()
        assert time.monotonic() - start < 4


def test_the_process_survives_its_own_descriptors_being_few() -> None:
    """A listener without descriptors fails, and works again when there are some."""
    with pvl.listen("127.0.0.1", 0) as listener:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        before = counts()
        for spare in range(1, 6):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
            try:
                with pytest.raises((OSError, pvl.VerbsError)):
                    pvl.connect("127.0.0.1", listener.port, timeout=0.1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            with suppress(pvl.HandshakeError, pvl.WaitTimeout):
                listener.accept(0.05)
        assert counts() == before

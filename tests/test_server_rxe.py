"""A server with many peers: what its connections share, who comes in and who does not, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from certificates import dialling, serving
from support import counts, in_thread

import pyverbs_lite as pvl
from pyverbs_lite import wire
from pyverbs_lite.ffi import lib

pytestmark = pytest.mark.rdma

HERE = "127.0.0.1"
SMALL: dict[str, Any] = {"max_message_size": 512, "recv_depth": 4, "send_depth": 4}


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Check that a test leaves nothing behind, without waiting for the garbage collector."""
    with pvl.Server(HERE, 0, echo, **SMALL) as server:
        server.start()
        with connect(server) as conn:
            assert ask(conn, b"warm") == b"WARM"
    threads = threading.active_count()
    before = counts()
    yield
    assert counts() == before
    assert threading.active_count() == threads


def echo(conn: pvl.Connection) -> None:
    """Answer until the peer leaves."""
    while True:
        message = conn.recv()
        conn.send(message.upper(), imm=message.imm)


def connect(server: pvl.Server, **options: Any) -> pvl.Connection:
    return pvl.connect(HERE, server.port, **{**SMALL, "timeout": 20, **options})


def ask(conn: pvl.Connection, data: bytes) -> bytes:
    conn.send(data, timeout=20)
    return bytes(conn.recv(timeout=20))


def until(what: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for what another thread does, of which nobody is told."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


# ------------------------------------------------------------ who comes in


def test_each_peer_has_a_handler_and_all_share_a_context_and_a_domain(no_leaks: None) -> None:
    domains = set()

    def handler(conn: pvl.Connection) -> None:
        domains.add((conn._link.context, conn._link.pd))
        echo(conn)

    with pvl.Server(HERE, 0, handler, **SMALL) as server, contextlib.ExitStack() as stack:
        server.start()
        server.start()  # again is the same as once
        peers = [stack.enter_context(connect(server)) for _ in range(5)]
        for number, peer in enumerate(peers):
            assert ask(peer, b"from %d" % number) == b"FROM %d" % number
        until(lambda: len(server.connections) == 5)
        assert len(domains) == 1
        stats = server.stats
        assert (stats.accepted, stats.refused, stats.failed, stats.handler_errors, stats.open) == (5, 0, 0, 0, 5)
        assert repr(server) == f"<Server on {HERE} port {server.port}, 5 connections>"
        peers[2].close()
        until(lambda: len(server.connections) == 4)
        assert ask(peers[3], b"still") == b"STILL"
    assert repr(server) == f"<Server on {HERE} port {server.port} (stopped)>"
    assert server.closed
    assert server.stats.open == 0


def test_what_each_peer_has_done_is_accounted_for(no_leaks: None) -> None:
    with pvl.Server(HERE, 0, echo, **SMALL) as server, pvl.open_device() as context:
        server.start()
        with connect(server, device=context) as left, connect(server, device=context) as right:
            for word in (b"one", b"three"):
                assert ask(left, word) == word.upper()
            assert ask(right, b"7" * 100) == b"7" * 100
            until(lambda: server.stats.open == 2)
            names = [f"{HERE} port {conn._link.peer.control.socket.getsockname()[1]}" for conn in (left, right)]  # type: ignore[attr-defined]
            stats = server.stats
            assert set(stats.peers) == set(names)
            seen = [
                (peer.recvs, peer.recv_bytes, peer.sends, peer.send_bytes)
                for peer in map(stats.peers.get, names)
                if peer
            ]
            assert seen == [(2, 8, 2, 8), (1, 100, 1, 100)]
        until(lambda: server.stats.open == 0)
        assert server.stats.peers == {}
        total = server.stats.total
        assert (total.recvs, total.recv_bytes, total.sends, total.send_bytes) == (3, 108, 3, 108)


def test_one_more_than_it_takes_hears_that_it_is_busy(no_leaks: None) -> None:
    with pvl.Server(HERE, 0, echo, max_connections=2, **SMALL) as server:
        server.start()
        with connect(server) as first, connect(server) as second:
            for _ in range(3):
                with pytest.raises(pvl.HandshakeError, match="BUSY: this server takes 2 connections") as caught:
                    connect(server)
                assert caught.value.code == wire.RefuseCode.BUSY
            assert ask(first, b"one") == b"ONE"
            assert ask(second, b"two") == b"TWO"
        until(lambda: server.stats.open == 0)
        with connect(server) as third:
            assert ask(third, b"three") == b"THREE"
        assert server.stats.refused == 3
        assert server.stats.accepted == 3


def silent(port: int) -> Iterator[None]:
    with socket.create_connection((HERE, port)):
        yield


def reset(port: int) -> Iterator[None]:
    sock = socket.create_connection((HERE, port))
    sock.send(wire.preface()[:5])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    yield


def talker(data: bytes, pause: float) -> Callable[[int], Iterator[None]]:
    """Say something again and again, whether or not it is heard."""

    def run(port: int) -> Iterator[None]:
        over = threading.Event()

        def talk() -> None:
            with contextlib.suppress(OSError), socket.create_connection((HERE, port)) as sock:
                sock.settimeout(1)
                while not over.wait(pause):
                    sock.sendall(data)

        thread = threading.Thread(target=talk)
        thread.start()
        yield
        over.set()
        thread.join(10)

    return run


def half_hello(port: int) -> Iterator[None]:
    """Begin well, then say no more."""
    with socket.create_connection((HERE, port)) as sock:
        sock.sendall(wire.preface() + wire.frame_header(wire.FrameType.HELLO, 64) + bytes(20))
        yield


HOSTILE: dict[str, tuple[Callable[[int], Iterator[None]], int]] = {
    "silent": (silent, 50),
    "half a hello": (half_hello, 50),
    "dribbling": (talker(b"\x89", 0.2), 12),
    "http": (talker(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 0.05), 12),
    "garbage": (talker(os.urandom(65536), 0.01), 8),
    "a flood": (talker(wire.preface() + bytes([3, 0, 0, 0]) * 4096, 0.01), 8),
    "reset": (reset, 50),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_peers_hold_up_nobody(no_leaks: None, kind: str) -> None:
    """Reports 7 and 36: with far more of them than there are workers, good peers come in as before."""
    attack, number = HOSTILE[kind]
    with pvl.Server(HERE, 0, echo, max_handshakes=2, max_connections=8, timeout=60, **SMALL) as server:
        server.start()
        with contextlib.ExitStack() as stack:
            for _ in range(number):
                stack.enter_context(contextlib.contextmanager(attack)(server.port))
            for _ in range(4):
                with connect(server) as conn:  # they would have to wait for a minute
                    assert ask(conn, b"good") == b"GOOD"
        assert server.stats.accepted == 4
        assert server.stats.refused == 0
    assert server.stats.failed <= number * 400  # a talker comes once


def test_a_handshake_that_is_not_over_in_time_is_ended(no_leaks: None) -> None:
    with pvl.Server(HERE, 0, echo, timeout=0.3, **SMALL) as server:
        server.start()
        with socket.create_connection((HERE, server.port), 10) as sock:
            assert sock.recv(100) == b""
        with socket.create_connection((HERE, server.port), 10) as sock:
            sock.sendall(wire.preface())  # whoever speaks the protocol is told why
            heard = b"".join(iter(lambda: sock.recv(1000), b""))
            assert b"did not get through the handshake within 0.3 s (waiting for its HELLO)" in heard
        assert server.stats.failed == 2
        with connect(server) as conn:
            assert ask(conn, b"next") == b"NEXT"


def test_one_that_stops_after_its_hello_gives_its_place_back(no_leaks: None) -> None:
    """It has got a QP; that goes with it."""
    with pvl.Server(HERE, 0, echo, timeout=1.0, max_connections=1, **SMALL) as server:
        server.start()
        with pvl.open_device() as context, connect(server, device=context) as good:
            channel = wire.Channel()
            channel.hello(good._link.endpoint)
            hello = channel.data_to_send()
            assert ask(good, b"one") == b"ONE"
            with socket.create_connection((HERE, server.port), 10) as sock:
                sock.sendall(hello)
                assert b"BUSY" in b"".join(iter(lambda: sock.recv(1000), b""))
            good.close()
            until(lambda: server.stats.open == 0)
            with socket.create_connection((HERE, server.port), 10) as sock:
                sock.sendall(hello)
                assert sock.recv(1000)  # its HELLO
                with pytest.raises(pvl.HandshakeError, match="BUSY"):
                    connect(server)
                assert b"waiting for its READY" in b"".join(iter(lambda: sock.recv(1000), b""))
            with connect(server) as conn:
                assert ask(conn, b"two") == b"TWO"


def test_whoever_is_silent_goes_first_where_there_is_no_room(no_leaks: None) -> None:
    with pvl.Server(HERE, 0, echo, max_connections=1, max_handshakes=1, timeout=60, **SMALL) as server:
        server.start()
        room = server._gate._most_waiting
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_connection((HERE, server.port), 10))
            for _ in range(room):
                stack.enter_context(socket.create_connection((HERE, server.port)))
            assert first.recv(10) == b""
            with connect(server) as conn:
                assert ask(conn, b"in") == b"IN"


def test_without_descriptors_it_waits_for_some(no_leaks: None) -> None:
    """EMFILE in accept() must not spin, nor end the server (report 35)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pvl.Server(HERE, 0, echo, timeout=60, **SMALL) as server, pvl.open_device() as context:
        server.start()
        with connect(server, device=context) as good, contextlib.ExitStack() as stack:
            assert ask(good, b"one") == b"ONE"
            sockets = [stack.enter_context(socket.socket()) for _ in range(8)]
            files: list[int] = []
            stack.callback(lambda: [os.close(fd) for fd in files])
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (max(os.listdir("/proc/self/fd"), key=int).__len__() and 256, hard)
            )
            try:
                with contextlib.suppress(OSError):
                    while True:
                        files.append(os.dup(0))
                for sock in sockets:
                    sock.connect((HERE, server.port))
                assert ask(good, b"two") == b"TWO"
                time.sleep(0.1)
                spent = time.process_time()
                time.sleep(0.3)
                assert time.process_time() - spent < 0.15
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            while files:
                os.close(files.pop())
            with connect(server, device=context) as late:
                assert ask(late, b"late") == b"LATE"


def test_a_key_and_tls_keep_strangers_out_and_hold_up_nobody(no_leaks: None) -> None:
    secret: dict[str, Any] = {**SMALL, "authkey": b"known to both of them"}
    with pvl.Server(
        HERE, 0, echo, ssl_context=serving(), timeout=60, max_connections=2, max_handshakes=1, **secret
    ) as server:
        server.start()
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(socket.create_connection((HERE, server.port)))
            for _ in range(2):  # whoever does not get through gives no place away
                with pytest.raises((pvl.HandshakeError, OSError)):
                    connect(server)
                with pytest.raises(pvl.AuthenticationError):
                    connect(server, ssl_context=dialling(), authkey=b"another, just as long")
            with connect(server, ssl_context=dialling(), **secret) as conn:
                assert ask(conn, b"in") == b"IN"
        assert server.stats.accepted == 1
        assert server.stats.failed >= 4


def test_what_comes_and_goes_leaves_nothing_in_a_server_that_goes_on(no_leaks: None) -> None:
    """Report 35: connections that end well, that end badly, and handshakes that fail, again and again."""
    with pvl.Server(HERE, 0, echo, max_connections=2, **SMALL) as server, pvl.open_device() as context:
        server.start()

        def round_(number: int) -> None:
            with connect(server, device=context) as conn:
                assert ask(conn, b"x") == b"X"
            conn = connect(server, device=context)
            conn.send(b"unheard")
            conn._link.peer.control.close()
            conn.close()
            with socket.create_connection((HERE, server.port), 10) as sock:
                sock.sendall(wire.preface() if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1000):
                    pass
            until(lambda: server.stats.open == 0 and not server._gate._guests)

        round_(0)
        before, threads = counts(), threading.active_count()
        for number in range(25):
            round_(number)
        assert counts() == before
        assert threading.active_count() <= threads
        assert server.stats.accepted == 52
        assert server.stats.failed == 26


# ------------------------------------------------------------ handlers


def test_a_handler_that_fails_ends_its_own_connection_only(no_leaks: None, caplog: pytest.LogCaptureFixture) -> None:
    def handler(conn: pvl.Connection) -> None:
        if conn.recv() == b"fail":
            raise LookupError("no such thing")
        echo(conn)

    with pvl.Server(HERE, 0, handler, **SMALL) as server:
        server.start()
        with connect(server) as bad, connect(server) as good:
            good.send(b"go on")
            bad.send(b"fail")
            with pytest.raises(pvl.PeerClosedError):
                bad.recv(timeout=20)
            assert ask(good, b"here") == b"HERE"
            until(lambda: server.stats.handler_errors == 1)
            (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
            address = f"{HERE} port {bad._link.peer.control.socket.getsockname()[1]}"  # type: ignore[attr-defined]
            assert record.name == "pyverbs_lite.server"
            assert address in record.getMessage()
            assert record.exc_info is not None
            assert isinstance(record.exc_info[1], LookupError)


def test_a_peer_that_leaves_or_dies_is_no_error(no_leaks: None, caplog: pytest.LogCaptureFixture) -> None:
    """Report 36: the handler's wait ends, and nothing of the peer stays."""
    with pvl.Server(HERE, 0, echo, **SMALL) as server:
        server.start()
        with connect(server) as conn:
            assert ask(conn, b"hi") == b"HI"
        until(lambda: server.stats.open == 0)
        code = f"""
            import os, signal
            import pyverbs_lite as pvl
            conn = pvl.connect({HERE!r}, {server.port}, max_message_size=512, recv_depth=4, send_depth=4)
            conn.send(b"x")
            conn.recv(timeout=20)
            print("there", flush=True)
            signal.pause()
        """
        with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            assert server.stats.open == 1
            process.kill()
        until(lambda: server.stats.open == 0)
        assert server.stats.handler_errors == 0
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_one_sided_waits_of_a_handler_end_with_their_peer(no_leaks: None) -> None:
    """Report 36: a read of the memory of a process that is gone would only end in retries; the news come first."""
    ended: list[BaseException] = []

    def handler(conn: pvl.Connection) -> None:
        remote = conn.remote.wait("data", 20)
        conn.send(b"reading")
        try:
            while True:
                conn.read(remote)
        except pvl.VerbsError as error:
            ended.append(error)
            raise

    with pvl.Server(HERE, 0, handler, **SMALL) as server:
        server.start()
        code = f"""
            import os, signal
            import pyverbs_lite as pvl
            conn = pvl.connect({HERE!r}, {server.port}, buffers={{"data": bytearray(5000)}}, max_message_size=512)
            conn.recv(timeout=20)
            os.kill(os.getpid(), signal.SIGKILL)
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL
        until(lambda: server.stats.open == 0)
    assert [type(error) for error in ended] == [pvl.PeerClosedError]
    assert server.stats.handler_errors == 0


def test_threads_may_share_what_a_handler_has(no_leaks: None) -> None:
    """Report 33: several threads on each connection, and another one that closes it under them."""
    ended: list[BaseException] = []

    def handler(conn: pvl.Connection) -> None:
        def work() -> None:
            try:
                while True:
                    conn.send(bytes(conn.recv()))
            except pvl.VerbsError as error:
                ended.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pvl.Server(HERE, 0, handler, **SMALL) as server, pvl.open_device() as context:
        server.start()
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(connect(server, device=context)) for _ in range(3)]
            for _ in range(20):
                for peer in peers:
                    assert ask(peer, b"round") == b"round"
            until(lambda: len(server.connections) == 3)
            server.connections[1].close()
            until(lambda: len(ended) == 3)
            assert all(isinstance(error, pvl.ClosedError) for error in ended)
            until(lambda: server.stats.open == 2)


# ------------------------------------------------------------ buffers


def test_buffers_are_registered_once_and_offered_to_all(no_leaks: None) -> None:
    cache = bytearray(b"cache" * 20)
    with pvl.Server(HERE, 0, echo, buffers={"cache": cache}, **SMALL) as server:
        server.start()
        with connect(server) as left, connect(server) as right:
            until(lambda: len(server.connections) == 2)
            assert left.remote["cache"] == right.remote["cache"]  # one registration
            left.write(left.remote["cache"][5:10], b"CACHE", timeout=20)
            assert right.read(right.remote["cache"][:12], timeout=20) == b"cacheCACHEca"
            late = server.register(bytearray(b"later"), name="late")
            for peer in (left, right):
                until(lambda peer=peer: "late" in peer.remote)
                assert peer.read(peer.remote["late"], timeout=20) == b"later"
            with connect(server) as newcomer:
                assert set(newcomer.remote) == {"cache", "late"}
                withdrawn = newcomer.remote["late"]
                late.close()
                for peer in (left, right, newcomer):
                    until(lambda peer=peer: "late" not in peer.remote)
                with pytest.raises(pvl.StaleBufferError, match="withdrawn 'late'"):
                    newcomer.read(withdrawn)
                assert newcomer.read(left.remote["cache"][5:10], timeout=20) == b"CACHE"  # of one domain
    cache += b"not exported any more"
    with pytest.raises(pvl.ClosedError):
        server.register(bytearray(8), name="too late")


def test_what_was_one_connections_is_stale_at_the_next_and_what_is_the_servers_is_not(no_leaks: None) -> None:
    kept = []

    def serve(conn: pvl.Connection) -> None:
        access = pvl.AccessFlags.REMOTE_READ | pvl.AccessFlags.MW_BIND
        own = conn.register(bytearray(b"for one peer"), name="mine", access=access)
        with conn.grant(own[4:7], name="part"):
            conn.recv(timeout=20)

    with pvl.Server("127.0.0.1", 0, serve, buffers={"all": bytearray(b"for everybody")}) as server:
        server.start()
        for _ in range(2):
            with connect(server) as conn:
                mine, part, shared = (conn.remote.wait(name, 20) for name in ("mine", "part", "all"))
                assert mine.domain == part.domain not in (0, shared.domain)
                assert [conn.read(remote) for remote in (mine, part, shared)] == [
                    b"for one peer",
                    b"one",
                    b"for everybody",
                ]
                for old in kept[:2]:
                    with pytest.raises(pvl.StaleBufferError, match="is over, or another"):
                        conn.read(old)
                for old in kept[2:]:
                    assert conn.read(old) == b"for everybody"
                conn.send(b"done")
            kept = [mine, part, shared]


def test_a_name_is_the_servers_or_a_connections() -> None:
    with pvl.Server(HERE, 0, echo, buffers={"taken": bytearray(8)}, **SMALL) as server:
        server.start()
        with connect(server):
            until(lambda: len(server.connections) == 1)
            (conn,) = server.connections
            with pytest.raises(pvl.StateError, match="'taken' is taken by .* of the server"):
                conn.register(bytearray(8), name="taken")
            with pytest.raises(pvl.StateError, match="'taken' is taken by .* of the server"):
                server.register(bytearray(8), name="taken")
            own = conn.register(bytearray(8), name="own")
            with pytest.raises(pvl.StateError, match="'own' is taken by a buffer of the connection"):
                server.register(bytearray(8), name="own")
            own.close()
            server.register(bytearray(8), name="own").close()
            with pytest.raises(ValueError, match="of no use"):
                server.register(bytearray(8), name="useless", access=pvl.AccessFlags.LOCAL_WRITE)


def test_a_peer_that_does_not_read_its_news_holds_up_nobody(no_leaks: None) -> None:
    """What does not fit into its socket now is sent when it reads."""
    with pvl.Server(HERE, 0, echo, **SMALL) as server:
        server.start()
        with connect(server) as deaf, connect(server) as good:
            until(lambda: len(server.connections) == 2)
            for conn in server.connections:
                sock = conn._link.peer.control.socket  # type: ignore[attr-defined]
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            memory = bytearray(64)
            for number in range(300):
                region = server.register(memory, name=f"{number:0200}")
                if number == 299:
                    until(lambda: f"{299:0200}" in good.remote)
                elif number % 8:
                    region.close()
                    good.remote  # noqa: B018
            assert len(good.remote) == 38 + 1
            assert ask(good, b"on") == b"ON"
            until(lambda: len(deaf.remote) == 39)
            assert set(deaf.remote) == set(good.remote)


# ------------------------------------------------------------ the end


def test_stop_lets_handlers_end_and_then_closes_what_is_left(no_leaks: None) -> None:
    ended = []

    def handler(conn: pvl.Connection) -> None:
        try:
            if conn.recv() == b"stay":
                conn.recv()
            ended.append("went")
        except pvl.ClosedError:
            ended.append("closed")

    with pvl.Server(HERE, 0, handler, **SMALL) as server:
        server.start()
        with connect(server) as goes, connect(server) as stays:
            stays.send(b"stay")
            until(lambda: len(server.connections) == 2)
            stopping = in_thread(server.stop, 1.0)
            until(lambda: server.closed)
            with pytest.raises((pvl.HandshakeError, OSError)):
                connect(server)
            goes.send(b"go")
            with pytest.raises(pvl.PeerClosedError):
                goes.recv(timeout=20)
            stopping(20)
            assert ended == ["went", "closed"]
            with pytest.raises(pvl.PeerClosedError):
                stays.recv(timeout=20)
        server.stop()
        with pytest.raises(pvl.ClosedError):
            server.start()


def test_who_is_in_a_hurry_need_not_wait_for_who_is_not(no_leaks: None) -> None:
    with pvl.Server(HERE, 0, lambda conn: conn.recv(), **SMALL) as server:
        server.start()
        with connect(server) as conn:
            patient = in_thread(server.stop, None)
            until(lambda: server.closed)
            in_thread(server.stop, 0.1)(20)
            patient(20)
            with pytest.raises(pvl.PeerClosedError):
                conn.recv(timeout=20)


def test_stop_turns_away_who_is_on_the_way_in(no_leaks: None) -> None:
    with pvl.Server(HERE, 0, echo, timeout=60, **SMALL) as server:
        server.start()
        with (
            socket.create_connection((HERE, server.port)) as mute,
            socket.create_connection((HERE, server.port)) as sock,
        ):
            sock.sendall(wire.preface())
            until(lambda: len(server._gate._guests) == 2)
            time.sleep(0.1)
            server.stop()
            assert mute.recv(10) == b""
            assert b"the server is stopping" in b"".join(iter(lambda: sock.recv(1000), b""))
        assert server.stats.refused == 2


def test_a_handler_may_stop_the_server(no_leaks: None) -> None:
    def handler(conn: pvl.Connection) -> None:
        conn.recv()
        server.stop()
        conn.send(b"stopped")
        conn.recv()

    with pvl.Server(HERE, 0, handler, **SMALL) as server:
        serving = in_thread(server.serve_forever)
        with connect(server) as conn:
            assert ask(conn, b"stop") == b"stopped"
            conn.send(b"bye")
            serving(20)


def test_a_server_that_never_started_lets_go_of_everything(no_leaks: None) -> None:
    server = pvl.Server(HERE, 0, echo, buffers={"memory": bytearray(100)}, **SMALL)
    server.stop()
    with pvl.Server(HERE, 0, echo, **SMALL):
        pass
    with pvl.Server(HERE, 0, echo, **SMALL) as server, pytest.raises(OSError, match="cannot listen") as caught:
        pvl.Server(HERE, server.port, echo)
    assert caught.value.errno == errno.EADDRINUSE


def test_a_closed_context_ends_the_connections_of_its_server(no_leaks: None) -> None:
    """Whoever closes the device under it finds handlers stopped first; then there is nothing that could crash."""
    with pvl.open_device() as context, pvl.Server(HERE, 0, echo, device=context, **SMALL) as server:
        server.start()
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(connect(server)) for _ in range(3)]
            for peer in peers:
                assert ask(peer, b"on") == b"ON"
            context.close()
            for peer in peers:
                with pytest.raises(pvl.PeerClosedError):
                    peer.recv(timeout=20)
            with pytest.raises(pvl.HandshakeError, match="Context is closed"):
                connect(server)
        assert server.stats.handler_errors == 0


def test_ctrl_c_ends_it() -> None:
    """Report 18: Ctrl-C gets out of serve_forever(), and the with block closes what is open."""
    code = f"""
        import os, signal, threading
        import pyverbs_lite as pvl
        def handler(conn):
            conn.recv()
            os.kill(os.getpid(), signal.SIGINT)
            conn.recv()
        with pvl.Server({HERE!r}, 0, handler) as server:
            server.start()
            def client():
                conn = pvl.connect({HERE!r}, server.port)
                conn.send(b"x")
                try:
                    conn.recv()
                except pvl.PeerClosedError:
                    print("told", flush=True)
                conn.close()
            thread = threading.Thread(target=client)
            thread.start()
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                server.stop(0)
            thread.join()
        print("out", threading.active_count())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\nout 1\n", "")


def test_a_forked_child_leaves_it_alone() -> None:
    code = f"""
        import os
        import pyverbs_lite as pvl
        with pvl.Server({HERE!r}, 0, lambda conn: conn.send(conn.recv())) as server:
            server.start()
            if (child := os.fork()) == 0:
                try:
                    server.register(bytearray(8), name="x")
                except pvl.ClosedError:
                    server.stop()
                    os._exit(7 if server._gate._socket.fileno() < 0 else 2)  # else the port outlives the parent
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            with pvl.connect({HERE!r}, server.port) as conn:
                conn.send(b"still")
                print(bytes(conn.recv(timeout=20)))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'still'\n", "")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_connections": 0}, ValueError, "max_connections must be 1"),
        ({"max_handshakes": 0}, ValueError, "max_handshakes must be 1"),
        ({"handler": None}, TypeError, "handler must be callable"),
        ({"device": "nope"}, pvl.DeviceNotFoundError, "nope"),
        ({"device": "siw0"}, pvl.UnsupportedError, "iWARP"),
        ({"max_connection": 3}, TypeError, "max_connection"),
        ({"buffers": {"": bytearray(1)}}, ValueError, "name"),
    ],
)
def test_what_it_is_not_made_with(no_leaks: None, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pvl.Server(HERE, 0, **{"handler": echo, **options})


@pytest.mark.parametrize("close", [lambda context, hub: hub.close(), lambda context, hub: context.close()])
def test_what_the_connections_share_outlives_their_use_of_it(close: Callable[..., None]) -> None:
    """A hub that is closed first would be left by engines when its memory is somebody else's."""
    with pvl.open_device() as context, pvl.Server(HERE, 0, echo, device=context, **SMALL) as server:
        server.start()
        with connect(server) as conn:
            assert ask(conn, b"here") == b"HERE"
            engine = server.connections[0]._engine
            hub = engine.hub
            assert hub is not None
            close(context, hub)
            assert (engine.closed, hub.closed) == (True, True)
            with pytest.raises(pvl.VerbsError):
                ask(conn, b"gone")


def test_an_engine_that_cannot_join_its_hub_is_closed(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> None:
    class Lib:
        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def pvl_hub_join(self, *_: object) -> int:
            return errno.ENOMEM

    with pvl.Server(HERE, 0, echo, **SMALL) as server:
        server.start()
        with monkeypatch.context() as patch:
            patch.setattr("pyverbs_lite._connection.engine.lib", Lib())
            with pytest.raises((pvl.HandshakeError, OSError)):
                connect(server)
        with connect(server) as conn:
            assert ask(conn, b"again") == b"AGAIN"


# ------------------------------------------------------------ the shared receive queue


def test_receives_are_shared_and_used_again(no_leaks: None) -> None:
    with pvl.Server(HERE, 0, echo, max_connections=40, **SMALL) as server, pvl.open_device() as context:
        server.start()
        pool = server._shared.pool
        with connect(server, device=context) as first:
            assert ask(first, b"one") == b"ONE"
            share, taken = first.info.recv_depth, pool.pinned
            assert pool.c.members == 1
            assert share <= pool.c.shares == pool.c.out
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                peers = [stack.enter_context(connect(server, device=context)) for _ in range(6)]
                for number, peer in enumerate(peers):
                    assert ask(peer, b"%d" % number) == b"%d" % number
                until(lambda: pool.c.members == 6)
                assert pool.c.out == pool.c.shares == 6 * pool._share
            until(lambda: server.stats.open == 0)
        assert pool.pinned == taken  # a block is enough for all of these, and stays
        assert (pool.c.members, pool.c.shares, pool.c.lost) == (0, 0, 0)  # everybody said goodbye


def test_peers_whose_messages_are_not_taken_use_up_nobody_elses_receives(no_leaks: None) -> None:
    """All of them send as much as they may; without credits one would empty the queue for all."""
    going = threading.Event()

    def handler(conn: pvl.Connection) -> None:
        if conn.recv() == b"wait":
            going.wait(30)
        echo(conn)

    with pvl.Server(HERE, 0, handler, rnr_retry=0, **SMALL) as server, pvl.open_device() as context:
        server.start()
        with contextlib.ExitStack() as stack:
            full = [stack.enter_context(connect(server, device=context, rnr_retry=0)) for _ in range(4)]
            sent = dict.fromkeys(full, 0)
            for conn in full:
                conn.send(b"wait")
                with pytest.raises(pvl.WaitTimeout, match="has not taken"):
                    while True:
                        conn.send(b"%d" % sent[conn], timeout=0.05)
                        sent[conn] += 1
                assert sent[conn] >= 4
            with connect(server, device=context, rnr_retry=0) as good:
                good.send(b"go on")
                for number in range(40):
                    assert ask(good, b"%d" % number) == b"%d" % number
            going.set()
            for conn in full:
                assert [bytes(conn.recv(timeout=20)) for _ in range(sent[conn])] == [
                    b"%d" % number for number in range(sent[conn])
                ]


def test_a_peer_that_sends_more_than_it_was_granted_is_ended_alone(no_leaks: None) -> None:
    over = threading.Event()

    def handler(conn: pvl.Connection) -> None:
        if conn.recv() == b"flood":
            over.wait(30)
        echo(conn)

    with pvl.Server(HERE, 0, handler, **SMALL) as server, pvl.open_device() as context:
        server.start()
        pool = server._shared.pool
        with connect(server, device=context) as good:
            good.send(b"good")
            with connect(server, device=context, send_depth=64) as bad:
                until(lambda: server.stats.open == 2)
                bad.send(b"flood")
                bad._engine._c.framing.granted += 1000  # it grants itself
                share = pool._share
                works = [bad.start_send(b"%d" % number) for number in range(share + 4)]
                over.set()
                with pytest.raises(pvl.VerbsError):
                    while True:
                        bad.recv(timeout=20)
                assert len(works) > share
            until(lambda: server.stats.open == 1)
            for number in range(30):
                assert ask(good, b"%d" % number) == b"%d" % number
        until(lambda: server.stats.open == 0)
        for _ in range(3):
            with connect(server, device=context) as conn:
                conn.send(b"next")
                assert ask(conn, b"on") == b"ON"


def test_what_a_dead_peer_may_have_taken_with_it_is_made_up_for(no_leaks: None) -> None:
    """A receive in the middle of a message ends with its QP, and no completion tells of it."""
    with pvl.Server(HERE, 0, echo, **SMALL) as server, pvl.open_device() as context:
        server.start()
        pool = server._shared.pool
        with connect(server, device=context) as stays:
            for number in range(1, 4):
                conn = connect(server, device=context)
                assert ask(conn, b"x") == b"X"
                conn._link.peer.control.close()  # no goodbye
                until(lambda: server.stats.open == 1)
                conn.close()
                until(lambda number=number: pool.c.lost == number)
            with connect(server, device=context) as conn:
                assert ask(conn, b"y") == b"Y"
                assert pool.c.out == 2 * pool._share + 3
            assert ask(stays, b"z") == b"Z"
        until(lambda: server.stats.open == 0)
        with connect(server, device=context) as conn:  # nobody was there, so the books begin anew
            assert ask(conn, b"y") == b"Y"
            assert (pool.c.lost, pool.c.out) == (0, pool._share)


def test_a_lent_message_outlives_its_connection(no_leaks: None) -> None:
    lent: list[Any] = []

    def handler(conn: pvl.Connection) -> None:
        message = conn.recv(lend=True)
        lent.append((message, message.view))

    with pvl.Server(HERE, 0, handler, **SMALL) as server, pvl.open_device() as context:
        server.start()
        for word in (b"first", b"second"):
            with connect(server, device=context) as conn:
                conn.send(word)
                with pytest.raises(pvl.PeerClosedError):
                    conn.recv(timeout=20)
            until(lambda: server.stats.open == 0)
        assert [bytes(view) for _, view in lent] == [b"first", b"second"]
        assert server._shared.pool.c.lent == 2
        lent.pop(0)[0].release()
        assert server._shared.pool.c.lent == 1
    message, view = lent.pop()
    assert bytes(view) == b"second"
    del view
    message.release()  # there is no queue any more


# ------------------------------------------------------------ many

CLIENTS = """
    import sys
    import pyverbs_lite as pvl
    port, first, count = map(int, sys.argv[1:])
    small = {"max_message_size": 512, "recv_depth": 4, "send_depth": 4}
    with pvl.open_device() as context:
        numbers = range(first, first + count)
        conns = {n: pvl.connect("127.0.0.1", port, device=context, timeout=60, **small) for n in numbers}
        print(len(conns), flush=True)
        sys.stdin.readline()
        for number, conn in conns.items():
            conn.send(b"peer %d" % number, timeout=60)
            conn.send(b"%d again" % number, timeout=60)
        for number, conn in conns.items():
            assert conn.recv(timeout=60) == b"PEER %d" % number
            assert conn.recv(timeout=60) == b"%d AGAIN" % number
        print("good", flush=True)
        sys.stdin.readline()
        for conn in conns.values():
            conn.close()
"""


def test_five_hundred_peers_in_one_process(no_leaks: None) -> None:
    """Some 15 s where nothing else runs: one takes 25 ms from its beginning to its end, both sides together."""
    with pvl.Server(HERE, 0, echo, max_connections=500, timeout=60, **SMALL) as server, contextlib.ExitStack() as stack:
        server.start()
        fds = len(os.listdir("/proc/self/fd"))
        clients = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", textwrap.dedent(CLIENTS), str(server.port), str(first), "250"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for first in range(0, 500, 250)
        ]
        lines = [client.stdout for client in clients if client.stdout]
        assert [line.readline() for line in lines] == ["250\n"] * 2
        until(lambda: server.stats.open == 500)
        assert len(os.listdir("/proc/self/fd")) - fds == 500 + 2 * 2  # each its TCP socket; and our pipes
        with pytest.raises(pvl.HandshakeError, match="BUSY"):
            connect(server)
        spent = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - spent < 0.2  # who waits costs nothing
        for client in clients:
            print(file=client.stdin, flush=True)
        assert [line.readline() for line in lines] == ["good\n"] * 2
        assert server.stats.accepted == 500
        assert server.stats.failed == 0
        for client in clients:
            client.communicate("\n", timeout=60)
            assert client.returncode == 0
        until(lambda: server.stats.open == 0)

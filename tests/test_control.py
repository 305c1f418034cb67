"""The TCP side of a connection, between two real sockets: no device is needed for it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support import endpoint

import pyverbs_lite as pvl
from pyverbs_lite._base.args import Deadline
from pyverbs_lite._connection.settings import Settings
from pyverbs_lite._control import base as _control_base
from pyverbs_lite._control import control as _control
from pyverbs_lite._control.control import Control, Peer
from pyverbs_lite._control.tcp import address_text, bind_tcp, connect_tcp, own_address, tune
from pyverbs_lite.wire import HelloReceived, ReadyReceived

LEFT = endpoint(0x11)
RIGHT = endpoint(0x22, mtu=pvl.MTU.MTU_2048, max_rd_atomic=3, max_dest_rd_atomic=4, max_message_size=600, recv_depth=5)


def in_time(seconds: float = 5.0) -> Deadline:
    return Deadline(seconds)


def buffer(name: str, length: int = 8) -> pvl.RemoteBuffer:
    return pvl.RemoteBuffer(0x1000, 7, length, name, pvl.AccessFlags.REMOTE_READ)


@pytest.fixture
def controls(sockets: tuple[socket.socket, socket.socket]) -> Iterator[tuple[Control, Control]]:
    left, right = Control(sockets[0]), Control(sockets[1])
    yield left, right
    left.close()
    right.close()


def shake_hands(left: Control, right: Control) -> tuple[Peer, Peer]:
    peers = Peer(left), Peer(right)
    for side, record in ((left, LEFT), (right, RIGHT)):
        side.channel.hello(record)
        side.channel.ready()
        side.flush(in_time())
    for side, peer, record in ((left, peers[0], RIGHT), (right, peers[1], LEFT)):
        assert side.expect(HelloReceived, in_time(), peer.note).endpoint == record
        side.expect(ReadyReceived, in_time(), peer.note)
    return peers


def narrow(peer: Peer) -> None:
    """Make TCP hold less than it likes to."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        peer.control.socket.setsockopt(socket.SOL_SOCKET, option, 1 << 16)


def test_addresses_are_told_with_their_port(controls):
    left, right = controls
    assert left.local_address == right.local_address == "127.0.0.1"
    assert left.peer == f"127.0.0.1 port {right.socket.getsockname()[1]}"


def test_news_come_in_order_and_both_ways(controls):
    left, right = shake_hands(*controls)
    left.say(lambda channel: channel.buffer(buffer("a", 3)))
    left.say(lambda channel: channel.buffer(buffer("b", 4)))
    left.say(lambda channel: channel.withdraw("a"))
    right.say(lambda channel: channel.buffer(buffer("c", 5)))
    for side in controls:
        side.flush(in_time())
    time.sleep(0.05)
    assert right.read() is None
    assert left.read() is None
    assert {name: b.length for name, b in right.buffers.items()} == {"b": 4}
    assert {name: b.length for name, b in left.buffers.items()} == {"c": 5}


def test_the_goodbye_is_the_last_word(controls):
    left, right = shake_hands(*controls)
    left.say(lambda channel: channel.buffer(buffer("a")))
    left.say(lambda channel: channel.goodbye())
    controls[0].flush(in_time())
    controls[0].close()
    for _ in range(3):
        over = right.read()
        assert isinstance(over, pvl.PeerClosedError)
        assert "closed the connection" in str(over)
    with pytest.raises(pvl.StateError):
        left.say(lambda channel: channel.withdraw("a"))
    with pytest.raises(pvl.ClosedError):
        controls[0].flush(in_time())


def test_a_peer_that_is_gone_is_gone_again_and_again(controls):
    _, right = shake_hands(*controls)
    controls[0].close()
    for _ in range(3):
        assert "its process is gone" in str(right.read())
    with pytest.raises(pvl.PeerClosedError):
        right.say(lambda channel: channel.buffer(buffer("a")))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unread", [False, True])
def test_both_say_goodbye_and_one_is_gone_already(controls, unread):
    """A broken pipe under the last word: reading the end over and over must not become a loop."""
    _, right = shake_hands(*controls)
    if unread:  # what is not read makes TCP answer with a reset
        right.say(lambda channel: channel.buffer(buffer("a")))
        controls[1].flush(in_time())
    controls[0].socket.close()
    right.say(lambda channel: channel.goodbye())
    with suppress(pvl.PeerClosedError):
        controls[1].flush(in_time(1))
    time.sleep(0.05)  # until the answer to that is here: a reset
    controls[1]._unsent += b"more"
    with pytest.raises(pvl.PeerClosedError):
        controls[1].flush(in_time(1))
    assert controls[1].receive_now() == []


def test_a_record_may_dribble_in(sockets):
    near, far = sockets
    other = pvl.wire.Channel()
    other.hello(LEFT)
    other.buffer(buffer("early", 9))
    other.ready()
    data = other.data_to_send()

    def dribble() -> None:
        for i in range(len(data)):
            far.sendall(data[i : i + 1])
            time.sleep(0.001)

    thread = threading.Thread(target=dribble)
    thread.start()
    control = Control(near)
    peer = Peer(control)
    assert control.expect(HelloReceived, in_time(), peer.note).endpoint == LEFT
    control.expect(ReadyReceived, in_time(), peer.note)
    thread.join()
    assert peer.buffers["early"].length == 9


def test_the_deadline_is_for_all_of_it(sockets):
    """One byte now and then does not buy more time."""
    near, far = sockets
    stop = threading.Event()

    def dribble() -> None:
        for byte in pvl.wire.MAGIC * 100:
            if stop.wait(0.05):
                return
            far.sendall(bytes([byte]))

    thread = threading.Thread(target=dribble)
    thread.start()
    start = time.monotonic()
    try:
        with pytest.raises(pvl.HandshakeTimeout, match=r"within 0.3 s \(waiting for its HELLO\)"):
            Control(near).expect(HelloReceived, Deadline(0.3), print)
        assert 0.3 <= time.monotonic() - start < 1
    finally:
        stop.set()
        thread.join()


def test_a_flood_does_not_hold_a_caller(controls):
    left, right = controls
    shake_hands(left, right)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with left.lock:
                left.channel.buffer(buffer("x" * 200))
            try:
                left.flush(Deadline(0.2))
            except pvl.HandshakeTimeout:
                return

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        start = time.monotonic()
        for _ in range(20):
            right.receive_now()
        assert time.monotonic() - start < 20  # a busy machine is slow; held, it would not come back at all
    finally:
        stop.set()
        thread.join()


def test_a_peer_that_does_not_read_costs_time_and_no_bytes(controls):
    """What did not go out in time is not lost: half a frame would be garbage to the peer."""
    left, right = shake_hands(*controls)
    narrow(left)
    narrow(right)
    count = 5000
    for i in range(count):
        left.say(lambda channel, i=i: channel.buffer(buffer(f"{i} {'n' * 240}")))
    for _ in range(2):
        with pytest.raises(pvl.HandshakeTimeout, match=r"did not read what it was sent within 0.1 s"):
            controls[0].flush(Deadline(0.1))
    end = time.monotonic() + 10
    while len(right.buffers) < count:
        assert right.read() is None
        assert time.monotonic() < end
        with suppress(pvl.HandshakeTimeout):
            controls[0].flush(Deadline(0.0))
    assert not controls[0]._unsent


def test_a_peer_that_talks_and_does_not_read_fills_no_memory(controls, monkeypatch):
    monkeypatch.setattr(_control, "_MOST_EVENTS", 1000)
    left, right = controls
    _, peer = shake_hands(left, right)
    narrow(peer)
    right.chunk = 4096
    for i in range(20000):
        peer.say(lambda channel, i=i: channel.buffer(buffer(f"{i} {'n' * 240}")))
    with left.lock:
        for _ in range(20000):
            left.channel.buffer(buffer("x"))
        flood = left.channel.data_to_send()
    left.socket.settimeout(10)

    def talk() -> None:
        with suppress(OSError):
            left.socket.sendall(flood)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        with pytest.raises(pvl.HandshakeTimeout, match="did not read"):
            right.flush(Deadline(1.5))
        assert 1000 <= len(right._events) < 1000 + _control_base.MOST_CHUNKS * 4096 // 34
    finally:
        right.close()
        thread.join()


def test_two_that_send_before_they_read_do_not_block_each_other(controls):
    """Many names on both sides are more than the buffers of TCP hold."""
    count = 5000
    peers = shake_hands(*controls)

    def live(peer: Peer) -> None:
        peer.control.flush(in_time(20))
        end = time.monotonic() + 10
        while len(peer.buffers) < count and time.monotonic() < end:
            peer.read()

    for peer in peers:
        narrow(peer)
        for i in range(count):
            peer.say(lambda channel, i=i: channel.buffer(buffer(f"{i} {'n' * 240}")))
    threads = [threading.Thread(target=live, args=(peer,)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(peer.buffers) for peer in peers] == [count, count]


def test_many_threads_talk_and_no_frame_is_torn(controls):
    left, right = shake_hands(*controls)

    def talk(number: int) -> None:
        for i in range(100):
            left.say(lambda channel, i=i: channel.buffer(buffer(f"{number}-{i} {'n' * 100}")))
            controls[0].flush(in_time(20))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while len(right.buffers) < 500:
        assert right.read() is None
        assert time.monotonic() < end
    for thread in threads:
        thread.join()


def test_an_interrupt_within_a_message_ends_the_conversation(controls, monkeypatch):
    """Nobody knows how much of it has gone out, so nothing more may follow."""
    left, _ = shake_hands(*controls)

    class Interrupting:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def send(self, *args: object) -> int:
            self.sock.send(*args)
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> object:
            return getattr(self.sock, name)

    left.say(lambda channel: channel.buffer(buffer("a")))
    with monkeypatch.context() as patch:
        patch.setattr(controls[0], "socket", Interrupting(controls[0].socket))
        with pytest.raises(KeyboardInterrupt):
            controls[0].flush(in_time())
    with pytest.raises(pvl.PeerClosedError, match="interrupted within a message"):
        controls[0].flush(in_time())
    assert isinstance(left.read(), pvl.PeerClosedError)


def test_closing_wakes_who_waits(controls):
    left, _ = controls
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            left.expect(HelloReceived, Deadline(None), print)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    left.close()
    left.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], (pvl.ClosedError, pvl.PeerClosedError))
    assert left.fileno() == -1


def test_a_reset_before_the_first_word_is_an_error_and_closes_the_socket():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.close()
        far, _ = server.accept()
        try:
            control = Control(far)
        except pvl.PeerClosedError:
            assert far.fileno() == -1
        else:
            with pytest.raises(pvl.PeerClosedError):
                control.expect(HelloReceived, in_time(), print)
            control.close()


def test_what_was_said_before_closing_is_read_although_something_was_not(controls):
    """Closing with unread bytes resets the connection, and a reset throws away what the peer has not read yet."""
    left, right = controls
    right.channel.hello(RIGHT)
    right.flush(in_time())
    left.channel.refuse(4, "no room")
    left.flush(in_time())
    closer = threading.Thread(target=left.close, args=(2.0,))
    closer.start()
    right.socket.sendall(b"x" * 100_000)  # too much talk
    with pytest.raises(pvl.HandshakeError, match="refused the connection: no room"):
        right.expect(HelloReceived, in_time(), print)
    right.close()
    closer.join(5)
    assert not closer.is_alive()


def test_nothing_is_read_after_a_goodbye_that_nobody_has_taken_yet(controls, monkeypatch):
    left, right = shake_hands(*controls)
    left.say(lambda channel: channel.goodbye())
    controls[0].flush(in_time())
    assert controls[1]._await_input(in_time())
    controls[1].read_some()
    monkeypatch.setattr(controls[1], "_read", None)
    assert isinstance(right.read(), pvl.PeerClosedError)


def test_events_that_came_before_an_error_come_first(controls):
    left, right = shake_hands(*controls)
    left.say(lambda channel: channel.buffer(buffer("good")))
    with controls[0].lock:
        controls[0].channel._outbox += b"\xff" * 8
    controls[0].flush(in_time())
    time.sleep(0.05)
    assert isinstance(right.read(), pvl.PeerProtocolError)
    assert set(right.buffers) == {"good"}
    # And the other side is told.
    controls[1].flush(in_time())
    time.sleep(0.05)
    assert "refused the connection" in str(left.read())


def test_scopes_are_kept():
    assert address_text(("127.0.0.1", 5)) == "127.0.0.1"
    assert address_text(("::1", 5, 0, 0)) == "::1"
    index, name = socket.if_nameindex()[0]
    assert address_text(("fe80::1", 5, 0, index)) == f"fe80::1%{name}"
    assert address_text(("fe80::1", 5, 0, 99999)) == "fe80::1%99999"
    assert address_text((f"fe80::1%{name}", 5, 0, index)) == f"fe80::1%{name}"


def test_a_host_and_a_port_are_checked():
    for host in (None, "", 5, b"localhost"):
        with pytest.raises(TypeError, match="host"):
            connect_tcp(host, 1, in_time())
    for port in (0, -1, 65536):
        with pytest.raises(ValueError, match=f"port must be .* {port}"):
            connect_tcp("127.0.0.1", port, in_time())
    with pytest.raises(TypeError, match="port"):
        connect_tcp("127.0.0.1", "80", in_time())


def test_a_refusal_names_the_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match=rf"cannot connect to 127\.0\.0\.1 port {port}"):
        connect_tcp("127.0.0.1", port, in_time())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1 port {port}"):
            bind_tcp("127.0.0.1", port, 5)


def test_every_address_of_a_name_is_tried(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port, dead = server.getsockname()[1], other.getsockname()[1]
        other.close()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", p)) for p in (dead, port)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        sock, address = connect_tcp("several", 1, in_time())
        with sock:
            assert sock.getpeername() == address == ("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", ""), ("::ffff:0.0.0.0", ""), ("", "")]
)
@pytest.mark.parametrize("keep_alive", [9.0, None])
def test_what_a_tuned_socket_accepts_has_all_that_it_needs(host, own, keep_alive):
    with bind_tcp(host, 0, 5) as listening:
        tune(listening, keep_alive)
        assert own_address(listening) == own
        near, address = connect_tcp("127.0.0.1", listening.getsockname()[1], in_time())
        settings = Settings(keep_alive=keep_alive)
        left, right = Control.of(near, settings, address=address), Control.accepted(listening, settings, own)
    tcp = socket.IPPROTO_TCP
    wanted = [9, 4, 1, 9000] if keep_alive else [0, None, None, 0]
    for control in (left, right):
        options = [
            control.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and 9,
            *(control.socket.getsockopt(tcp, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)),
            control.socket.getsockopt(tcp, socket.TCP_USER_TIMEOUT),
        ]
        assert [value for value, want in zip(options, wanted, strict=True) if want is not None] == [
            want for want in wanted if want is not None
        ]
        assert control.socket.getsockopt(tcp, socket.TCP_NODELAY)
        assert control.local_address.endswith("127.0.0.1")
    assert left.peer == f"127.0.0.1 port {right.socket.getsockname()[1]}"
    assert right.peer.endswith(f"127.0.0.1 port {near.getsockname()[1]}")
    assert right._read() is None  # it does not block
    left.close()
    right.close()
    left.close()


def test_an_answer_of_tcp_is_awaited_no_longer_than_there_is_time():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port, waiting = server.getsockname()[1], []
        try:
            start = time.monotonic()
            with pytest.raises(
                pvl.HandshakeTimeout, match=rf"no TCP answer from 127\.0\.0\.1 port {port} within 0\.2 s"
            ):
                for _ in range(10):  # the queue is full soon, and nobody takes any
                    waiting.append(connect_tcp("127.0.0.1", port, in_time(0.2))[0])
            assert 0.2 <= time.monotonic() - start < 3
        finally:
            for sock in waiting:
                sock.close()

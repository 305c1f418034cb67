"""From TCP to RTS: what the two sides agree on, and what becomes of those who do not get there."""

from __future__ import annotations

import itertools
import random
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv6Address
from typing import Any

import pytest
from support import connected, counts, in_thread

import pyverbs_lite as pvl
from pyverbs_lite import wire
from pyverbs_lite._connection import link as _link
from pyverbs_lite._connection import moves as _moves

pytestmark = pytest.mark.rdma


def good_round(listener: pvl.Listener) -> None:
    """Check that a good client still gets through, and that its connection works."""
    accepted = in_thread(listener.accept, 10)
    with pvl.connect("127.0.0.1", listener.port) as left, accepted(10) as right:
        left.send(b"good")
        assert right.recv(timeout=5) == b"good"


# ------------------------------------------------------------ what is agreed on


def test_the_path_is_a_global_route_to_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A RoCE address vector needs a GRH with the peer's GID, and hops enough to be routed (report 4)."""
    asked: list[int] = []
    modify = _moves._modify

    def look(engine: Any, attr: Any, mask: int) -> int:
        if mask & pvl.QPAttrMask.AV:
            assert attr.ah_attr.is_global
            asked.append(attr.ah_attr.grh.hop_limit)
        return modify(engine, attr, mask)

    monkeypatch.setattr(_moves, "_modify", look)
    with connected({"hop_limit": 9, "traffic_class": 32}) as (left, right):
        assert sorted(asked) == [9, 64]
        for side, other, traffic_class in ((left, right, 0), (right, left, 32)):
            attr = side._link.qp.query()
            assert attr.ah_attr is not None
            grh = attr.ah_attr.grh
            assert grh is not None
            assert grh.dgid == other.info.local_gid == IPv6Address("::ffff:192.0.2.1")
            assert grh.hop_limit > 1  # the kernel may set it from its route
            assert grh.traffic_class == traffic_class
            assert grh.sgid_index == side.info.gid_index == 1
            assert attr.dest_qp_num == other.info.local_qp_num
            assert side.info.gid_type == pvl.GIDType.ROCE_V2
            assert side.info.link_layer == pvl.LinkLayer.ETHERNET


def test_the_verbs_get_what_was_agreed_on() -> None:
    server = {"path_mtu": 2048, "max_rd_atomic": 5, "max_dest_rd_atomic": 3, "ack_timeout_exp": 15, "retry_cnt": 2}
    client = {"path_mtu": pvl.MTU.MTU_1024, "max_rd_atomic": 16, "max_dest_rd_atomic": 1, "rnr_retry": 1}
    with connected(server, {**client, "min_rnr_timer_code": 7}) as (left, right):
        mine, theirs = left._link.qp.query(), right._link.qp.query()
        assert mine.path_mtu == theirs.path_mtu == pvl.MTU.MTU_1024
        assert left.info.path_mtu == right.info.path_mtu == 1024
        # Depths are rounded up by this driver, so what we asked for is looked at in info.
        assert (left.info.max_rd_atomic, left.info.max_dest_rd_atomic) == (3, 1)
        assert (right.info.max_rd_atomic, right.info.max_dest_rd_atomic) == (1, 3)
        assert (mine.retry_cnt, theirs.retry_cnt) == (7, 2)
        assert (mine.rnr_retry, theirs.rnr_retry) == (1, 7)
        assert (mine.timeout, theirs.timeout) == (14, 15)
        assert (mine.min_rnr_timer, theirs.min_rnr_timer) == (7, 12)


def test_a_path_mtu_above_the_port_is_cut_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pvl.Context.query_port

    def query_port(context: pvl.Context, number: int) -> pvl.PortAttr:
        port = found(context, number)
        object.__setattr__(port, "active_mtu", pvl.MTU.MTU_512)
        return port

    monkeypatch.setattr(pvl.Context, "query_port", query_port)
    with connected({"path_mtu": 4096}, {"path_mtu": 2048}) as (left, right):
        assert left.info.path_mtu == right.info.path_mtu == 512
        left.send(bytes(5000))
        assert right.recv(timeout=5) == bytes(5000)


def test_sequence_numbers_cross() -> None:
    """Each side expects what the other sends first, and no two connections begin alike (report 23)."""
    seen = set()
    for _ in range(8):
        with connected() as (left, right):
            assert left.info.local_psn == right.info.remote_psn
            assert left.info.remote_psn == right.info.local_psn
            seen |= {left.info.local_psn, right.info.local_psn}
            assert all(0 <= psn <= 0xFFFFFF for psn in seen)
    assert len(seen) == 16


def test_sequence_numbers_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    psns = itertools.cycle([0xFFFFFF, 0xFFFFF0])
    drawn = _link.random_bits
    monkeypatch.setattr(_link, "random_bits", lambda bits: next(psns) if bits == 24 else drawn(bits))
    data = bytearray(100_000)
    with connected({"buffers": {"data": data}}) as (left, right):
        assert {left.info.local_psn, right.info.local_psn} == {0xFFFFFF, 0xFFFFF0}
        for i in range(120):
            left.send(b"%d" % i)
            assert right.recv(timeout=5) == b"%d" % i
            right.send(b"-%d" % i)
            assert left.recv(timeout=5) == b"-%d" % i
        left.write(left.remote["data"], bytes([7]) * 100_000)
        assert left.read(left.remote["data"]) == data == bytes([7]) * 100_000


@pytest.mark.parametrize(
    ("server", "client"), [({"max_dest_rd_atomic": 0}, {}), ({}, {"max_rd_atomic": 0}), ({"device": "rxe0"}, None)]
)
def test_a_read_that_could_never_complete_is_refused_at_once(
    server: dict[str, Any], client: dict[str, Any] | None
) -> None:
    """A depth of 0 on either side would make a read hang on this driver (report 21)."""
    with connected({**server, "buffers": {"data": bytearray(64)}}, client) as (left, right):
        remote = left.remote["data"]
        if client is None:
            assert left.read(remote[:3]) == bytes(3)
            return
        start = time.monotonic()
        for call in (lambda: left.read(remote), lambda: left.fetch_add(remote[:8], 1)):
            with pytest.raises(pvl.StateError, match="max_rd_atomic or the peer's max_dest_rd_atomic is 0"):
                call()
        with pytest.raises(pvl.StateError, match="max_dest_rd_atomic"):
            left.compare_swap(remote[:8], 0, 1)
        assert time.monotonic() - start < 1
        left.write(remote, b"writes need no depth")
        left.send(b"nor do messages")
        assert right.recv(timeout=5) == b"nor do messages"


def test_many_reads_share_a_depth_of_one() -> None:
    data = bytearray(random.Random(5).randbytes(64 * 5000))
    with connected({"max_dest_rd_atomic": 1, "buffers": {"data": data}}, {"max_rd_atomic": 16}) as (left, right):
        assert (left.info.max_rd_atomic, right.info.max_dest_rd_atomic) == (1, 1)
        remote = left.remote["data"]
        reads = [in_thread(left.read, remote[i * 5000 : (i + 1) * 5000], timeout=20) for i in range(64)]
        assert b"".join(read(20) for read in reads) == data


# ------------------------------------------------------------ the first message


def test_nothing_is_lost_when_both_sides_send_at_once() -> None:
    """With no retries, one message that met an empty receive queue would end the connection (report 19)."""
    for i in range(25):
        with connected({"rnr_retry": 0, "recv_depth": 1}, {"rnr_retry": 0, "recv_depth": 2}) as (left, right):
            sent = in_thread(right.send, b"server %d" % i)
            left.send(b"client %d" % i)
            sent()
            assert left.recv(timeout=5) == b"server %d" % i
            assert right.recv(timeout=5) == b"client %d" % i


@pytest.mark.parametrize("slow", ["server", "client"])
def test_a_slow_side_is_waited_for(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One side dawdles between RTR and READY; the other must not send before it is there."""
    main, to_rts = threading.current_thread(), _link.Link.to_rts

    def dawdle(link: _link.Link, remote: Any) -> None:
        to_rts(link, remote)
        if (threading.current_thread() is main) == (slow == "client"):
            time.sleep(0.3)

    monkeypatch.setattr(_link.Link, "to_rts", dawdle)
    start = time.monotonic()
    with connected({"rnr_retry": 0}, {"rnr_retry": 0, "retry_cnt": 0}) as (left, right):
        assert time.monotonic() - start >= 0.3
        left.send(b"straight away")
        assert right.recv(timeout=5) == b"straight away"


# ------------------------------------------------------------ peers that are none (report 7)


def record(**changes: int) -> bytes:
    """Return the bytes of a good client's preface and HELLO, with fields of the record changed at will."""
    fields = {
        "nonce": 1,
        "gid": IPv6Address("::ffff:192.0.2.1").packed,
        "qp_num": 0x12345,
        "psn": 77,
        "lid": 0,
        "mtu": 1024,
        "link_layer": 2,
        "max_rd_atomic": 1,
        "max_dest_rd_atomic": 1,
        "credit_depth": 3,
        "max_message_size": 1000,
        "recv_depth": 1,
        "max_msg_sz": 1 << 20,
        **changes,
    }
    payload = struct.pack("!Q16sIIHHBBBBIII", *fields.values())
    return struct.pack("!8sHH", wire.MAGIC, 1, 1) + struct.pack("!BBHI", 1, 0, 0, len(payload)) + payload


def dribble(sock: socket.socket, data: bytes, pause: float) -> None:
    with suppress(OSError):
        for i in range(len(data)):
            sock.sendall(data[i : i + 1])
            time.sleep(pause)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def say_nothing(sock: socket.socket) -> None:
    pass


def say_garbage(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.sendall(random.Random(3).randbytes(65536))


def say_zeros(sock: socket.socket) -> None:
    sock.sendall(bytes(100))


def say_http(sock: socket.socket) -> None:
    sock.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")


def say_a_huge_length(sock: socket.socket) -> None:
    sock.sendall(record()[:12] + struct.pack("!BBHI", 1, 0, 0, 0xFFFFFFFF))


def reset_at_once(sock: socket.socket) -> None:
    reset(sock)


def reset_midway(sock: socket.socket) -> None:
    sock.sendall(record()[:30])
    reset(sock)


def leave_at_once(sock: socket.socket) -> None:
    sock.close()


def leave_midway(sock: socket.socket) -> None:
    sock.sendall(record()[:30])
    sock.close()


def leave_after_the_record(sock: socket.socket) -> None:
    sock.sendall(record())
    sock.close()


def stay_silent_after_the_record(sock: socket.socket) -> None:
    sock.sendall(record())


def say_another_version(sock: socket.socket) -> None:
    sock.sendall(struct.pack("!8sHH", wire.MAGIC, 9, 8))


def be_ready_too_early(sock: socket.socket) -> None:
    sock.sendall(record() + struct.pack("!BBHI", 2, 0, 0, 0))


def give_up(sock: socket.socket) -> None:
    sock.sendall(record() + struct.pack("!BBHI", 5, 0, 0, 0))


def refuse(sock: socket.socket) -> None:
    sock.sendall(record() + struct.pack("!BBHIH", 6, 0, 0, 4 + 2, 4) + b"full")


def withdraw_what_is_not(sock: socket.socket) -> None:
    sock.sendall(record() + struct.pack("!BBHI", 4, 0, 0, 2) + b"no")


BAD: list[tuple[Callable[[socket.socket], None], type[Exception], str]] = [
    (say_nothing, pvl.HandshakeTimeout, "waiting for its HELLO"),
    (lambda sock: dribble(sock, wire.MAGIC + bytes(100), 0.1), pvl.HandshakeTimeout, "waiting for its HELLO"),
    (say_garbage, pvl.PeerProtocolError, "no protocol known here"),
    (say_zeros, pvl.PeerProtocolError, "zeros"),
    (say_http, pvl.PeerProtocolError, "an HTTP request"),
    (say_a_huge_length, pvl.PeerProtocolError, "length is 4294967295"),
    (reset_at_once, pvl.PeerClosedError, "closed"),
    (reset_midway, pvl.PeerClosedError, "before (its HELLO|it said anything)"),
    (leave_at_once, pvl.PeerClosedError, "before its HELLO"),
    (leave_midway, pvl.PeerClosedError, "unfinished"),
    (leave_after_the_record, pvl.PeerClosedError, "closed"),
    (stay_silent_after_the_record, pvl.HandshakeTimeout, "waiting for its READY"),
    (say_another_version, pvl.PeerProtocolError, "versions 8 to 9"),
    (be_ready_too_early, pvl.PeerProtocolError, "READY before"),
    (give_up, pvl.PeerClosedError, "in the middle of the handshake"),
    (refuse, pvl.HandshakeError, "refused the connection: full"),
    (withdraw_what_is_not, pvl.PeerProtocolError, "withdrew 'no'"),
    (lambda sock: sock.sendall(record(link_layer=1, lid=5)), pvl.HandshakeError, "one side is Ethernet"),
]
FIELDS = [
    ("qp_num", 0),
    ("qp_num", 1),
    ("qp_num", 1 << 24),
    ("psn", 1 << 24),
    ("gid", bytes(16)),
    ("gid", b"\xff\x02" + bytes(14)),
    ("mtu", 9),
    ("mtu", 0),
    ("link_layer", 0),
    ("link_layer", 3),
    ("credit_depth", 2),
    ("max_message_size", (1 << 31) + 1),
    ("recv_depth", 1 << 31),
    ("max_msg_sz", 0),
]
BAD += [
    (
        lambda sock, change={name: value}: sock.sendall(record(**change)),  # type: ignore[misc]
        pvl.PeerProtocolError,
        "MTU" if name == "mtu" else name,
    )
    for name, value in FIELDS
]


@contextmanager
def stranger(port: int, behave: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    def live(sock: socket.socket) -> None:
        behave(sock)
        with suppress(OSError):
            while sock.fileno() >= 0 and sock.recv(4096):
                pass  # what it is told, until the other side hangs up
            sock.close()

    with socket.create_connection(("127.0.0.1", port)) as sock:
        done = in_thread(live, sock)
        yield sock
        done(10)


@pytest.mark.parametrize("case", range(len(BAD)), ids=lambda i: getattr(BAD[i][0], "__name__", "") + str(i))
@pytest.mark.usefixtures("no_leaks")
def test_a_stranger_costs_an_error_in_time_and_nothing_else(case: int) -> None:
    behave, error, text = BAD[case]
    limit = 1.0  # of a good one that follows, too, on a machine that has other things to do
    with pvl.listen("127.0.0.1", 0, timeout=limit) as listener:
        with stranger(listener.port, behave):
            start = time.monotonic()
            with pytest.raises(error, match=text) as caught:
                listener.accept(10)
            assert time.monotonic() - start < limit + 0.6
            assert isinstance(caught.value, pvl.HandshakeError)
        good_round(listener)


@pytest.mark.usefixtures("no_leaks")
def test_fifty_strangers_leave_nothing_behind() -> None:
    quick = [case for case in BAD if case[1] is not pvl.HandshakeTimeout]
    with pvl.listen("127.0.0.1", 0, timeout=1) as listener:
        good_round(listener)
        before = counts()
        for behave, _, _ in itertools.islice(itertools.cycle(quick), 50):
            with stranger(listener.port, behave), pytest.raises(pvl.HandshakeError):
                listener.accept(10)
        assert counts() == before
        good_round(listener)


@pytest.mark.parametrize(
    "case",
    # A READY that is too early is only seen if it is there before our record leaves.
    [case for case in range(len(BAD)) if BAD[case][0] is not be_ready_too_early],
    ids=lambda i: getattr(BAD[i][0], "__name__", "") + str(i),
)
def test_a_client_survives_a_stranger_that_listens(case: int) -> None:
    """What holds for ``accept`` holds for ``connect``."""
    behave, _, _ = BAD[case]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                behave(sock)
                with suppress(OSError):
                    while sock.fileno() >= 0 and sock.recv(4096):
                        pass

        done = in_thread(answer)
        start = time.monotonic()
        with pytest.raises(ConnectionError):  # HandshakeError is one, and so is a reset within connect()
            pvl.connect("127.0.0.1", server.getsockname()[1], timeout=0.5)
        assert time.monotonic() - start < 1.5
        done(10)


def test_who_breaks_a_rule_is_told(no_leaks: None) -> None:
    with pvl.listen("127.0.0.1", 0) as listener:
        with socket.create_connection(("127.0.0.1", listener.port)) as sock:
            sock.sendall(record(mtu=9))
            with pytest.raises(pvl.PeerProtocolError):
                listener.accept(5)
            channel = wire.Channel()
            events = channel.receive_data(sock.recv(4096))
            assert isinstance(events[0], wire.Refused)
            assert events[0].code == wire.RefuseCode.PROTOCOL
            assert "path MTU must be one of" in events[0].reason
        with socket.create_connection(("127.0.0.1", listener.port)) as sock:
            say_http(sock)
            with pytest.raises(pvl.PeerProtocolError):
                listener.accept(5)
            assert sock.recv(4096) in (b"",)  # a stranger is told nothing


def relay(source: socket.socket, target: socket.socket, sizes: Callable[[], int], pause: float) -> None:
    """Pass bytes on in pieces of given sizes."""
    with suppress(OSError):
        while data := source.recv(65536):
            while data:
                size = sizes()
                target.sendall(data[:size])
                data = data[size:]
                time.sleep(pause)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(("size", "pause"), [(1, 0.002), (7, 0.0), (31, 0.001)])
def test_records_arrive_in_any_pieces(size: int, pause: float) -> None:
    """TCP keeps no borders: one byte at a time is as good as all at once (report 6)."""
    data = bytearray(b"one byte at a time")
    with (
        pvl.listen("127.0.0.1", 0, buffers={"data": data}) as listener,
        socket.create_server(("127.0.0.1", 0)) as between,
    ):
        accepted = in_thread(listener.accept, 10)

        def pass_on() -> None:
            with between.accept()[0] as near, socket.create_connection(("127.0.0.1", listener.port)) as far:
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = in_thread(relay, far, near, lambda: size, pause)
                relay(near, far, lambda: size, pause)
                back(10)

        relayed = in_thread(pass_on)
        with pvl.connect("127.0.0.1", between.getsockname()[1], buffers={"x" * 40: data}) as left:
            right = accepted(10)
            left.write(left.remote["data"], b"ONE")
            assert right.remote["x" * 40].length == len(data)
            left.send(b"through")
            assert right.recv(timeout=5) == b"through"
            right.close()
        relayed(10)


def test_hundreds_of_names_on_both_sides() -> None:
    server = {f"server's {i} {'s' * 200}": bytes([i % 256 + 0] * (i + 1)) for i in range(300)}
    client = {f"client's {i} {'c' * 200}": bytearray(i + 1) for i in range(200)}
    with connected({"buffers": server}, {"buffers": client}) as (left, right):
        assert {name: buffer.length for name, buffer in left.remote.items()} == {n: len(b) for n, b in server.items()}
        assert {name: buffer.length for name, buffer in right.remote.items()} == {n: len(b) for n, b in client.items()}
        name = f"server's 299 {'s' * 200}"
        assert left.read(left.remote[name]) == server[name]


# ------------------------------------------------------------ this side is not able


def both_errors(server: dict[str, Any], client: dict[str, Any]) -> tuple[BaseException, BaseException]:
    """Return what the client and the server get."""
    with pvl.listen("127.0.0.1", 0, **server) as listener:
        accepted = in_thread(listener.accept, 5)
        with pytest.raises(Exception) as left:  # noqa: PT011 - whatever it is, the caller looks
            pvl.connect("127.0.0.1", listener.port, **client).close()
        with pytest.raises(Exception) as right:  # noqa: PT011
            accepted(10)
    return left.value, right.value


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ({"device": "mlx5_77"}, pvl.DeviceNotFoundError, "mlx5_77.*rxe0"),
        ({"port_num": 2}, ValueError, "port_num of rxe0 must be 1 to 1, not 2"),
        ({"gid_index": 200}, pvl.GIDError, "gid_index=200.*\n.*\n.*192.0.2.1"),
        ({"gid_ip": "192.0.2.99"}, pvl.GIDError, "192.0.2.99"),
        ({"gid_netdev": "eth77"}, pvl.GIDError, "eth77"),
        ({"device": "siw0"}, pvl.VerbsError, ""),
    ],
)
@pytest.mark.usefixtures("no_leaks")
def test_who_cannot_says_so_and_the_other_is_told(bad: dict[str, Any], error: type[Exception], text: str) -> None:
    left, right = both_errors({}, bad)
    assert isinstance(left, error)
    assert re.search(text, str(left), re.DOTALL)
    assert isinstance(right, pvl.HandshakeError)
    assert "refused the connection" in str(right)
    first = str(left).splitlines()[0]
    assert first[:60] in str(right)
    if bad.get("device") != "mlx5_77":  # a listener looks for its device at once
        left, right = both_errors(bad, {})
        assert isinstance(right, error)
        assert isinstance(left, pvl.HandshakeError)
        assert str(right).splitlines()[0][:60] in str(left)


def test_a_listener_looks_for_its_device_at_once() -> None:
    with pytest.raises(pvl.DeviceNotFoundError, match=r"'mlx5_77'; the devices are: .*rxe0"):
        pvl.listen("127.0.0.1", 0, device="mlx5_77")


@pytest.mark.usefixtures("no_leaks")
def test_a_port_that_is_down_is_an_error_on_both_sides() -> None:
    subprocess.run(["ip", "link", "set", "veth0", "down"], check=True)
    try:
        for where in ({"device": "rxe0"}, {}):
            left, right = both_errors({}, where)
            assert isinstance(left, (pvl.DeviceNotFoundError, pvl.HandshakeError))
            assert isinstance(right, (pvl.DeviceNotFoundError, pvl.HandshakeError))
            assert "not ACTIVE" in str(left) + str(right) or "no RDMA device has an ACTIVE port" in str(left)
    finally:
        subprocess.run(["ip", "link", "set", "veth0", "up"], check=True)
        subprocess.run(["ip", "addr", "add", "2001:db8::1/64", "dev", "veth0", "nodad"], check=True)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with pvl.Context("rxe0") as context:
            rows = {str(row) for row in context.gid_table(1)}
            if context.active_port() and {"::ffff:192.0.2.1", "2001:db8::1"} <= rows:
                break
        time.sleep(0.02)
    with connected() as (left_end, right_end):
        left_end.send(b"up again")
        assert right_end.recv(timeout=5) == b"up again"


@pytest.mark.usefixtures("no_leaks")
def test_a_failed_transition_unwinds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that cannot be routed to, and every verb that may fail on the way (report 17)."""
    for step in ("to_init", "to_rtr", "to_rts"):
        done, at_once = getattr(pvl.QP, step), getattr(_moves, step)

        def fail(qp: pvl.QP, done: Any = done, step: str = step, **values: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                raise pvl.VerbsOSError(22, "ibv_modify_qp", f"{step} was made to fail")
            done(qp, **values)

        def refuse(*values: Any, at_once: Any = at_once) -> bool:
            return threading.current_thread() is not threading.main_thread() and bool(at_once(*values))

        with monkeypatch.context() as patch:
            patch.setattr(pvl.QP, step, fail)
            patch.setattr(_moves, step, refuse)
            left, right = both_errors({}, {})
        assert isinstance(left, pvl.VerbsOSError)
        assert f"{step} was made to fail" in str(left)
        assert isinstance(right, pvl.HandshakeError)
        assert f"{step} was made to fail" in str(right)


@pytest.mark.usefixtures("no_leaks")
def test_a_refused_port_and_a_silent_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(pvl.HandshakeTimeout, match=r"within 0.3 s \(waiting for its HELLO\)"):
            pvl.connect("127.0.0.1", port, timeout=0.3)
    with pytest.raises(ConnectionRefusedError, match=rf"cannot connect to 127\.0\.0\.1 port {port}"):
        pvl.connect("127.0.0.1", port)
    with pytest.raises(OSError, match=r"no-such-host|not known|resolution"):
        pvl.connect("no-such-host.invalid", 1)


@pytest.mark.usefixtures("no_leaks")
def test_thirty_connections_leave_nothing_behind() -> None:
    data = bytearray(100)
    with pvl.listen("127.0.0.1", 0, buffers={"data": data}, recv_depth=2, send_depth=2) as listener:
        good_round(listener)
        before = counts()
        for _ in range(30):
            good_round(listener)
        assert counts() == before
        for _ in range(30):
            accepted = in_thread(listener.accept, 5)
            with pytest.raises(pvl.GIDError):
                pvl.connect("127.0.0.1", listener.port, gid_index=99)
            with pytest.raises(pvl.HandshakeError):
                accepted(5)
        assert counts() == before


# ------------------------------------------------------------ the listener


def test_a_listener_ends_in_time_and_when_closed() -> None:
    listener = pvl.listen("127.0.0.1", 0)
    assert repr(listener) == f"<Listener on 127.0.0.1 port {listener.port}>"
    start = time.monotonic()
    with pytest.raises(pvl.WaitTimeout, match=r"nobody connected within 0.2 s"):
        listener.accept(0.2)
    with pytest.raises(pvl.WaitTimeout):
        listener.accept(0)
    assert 0.2 <= time.monotonic() - start < 1
    waiting = in_thread(listener.accept)
    short = in_thread(listener.accept, 0.2)  # each has its own time
    with pytest.raises(pvl.WaitTimeout):
        short(5)
    listener.close()
    with pytest.raises(pvl.ClosedError):
        waiting(5)
    with pytest.raises(pvl.ClosedError):
        listener.accept()
    listener.close()
    assert listener.closed


def test_several_threads_accept() -> None:
    with pvl.listen("127.0.0.1", 0) as listener:
        accepting = [in_thread(listener.accept, 10) for _ in range(3)]
        left = [pvl.connect("127.0.0.1", listener.port) for _ in range(3)]
        right = [accepted() for accepted in accepting]
        for i, conn in enumerate(left):
            conn.send(b"%d" % i)
        assert sorted(conn.recv(timeout=5) for conn in right) == [b"0", b"1", b"2"]
        for conn in (*left, *right):
            conn.close()


def test_bad_arguments_are_named() -> None:
    for call in (pvl.listen, pvl.connect):
        for arguments, error, text in (
            (("127.0.0.1", 65536), ValueError, "port must be .* 65536"),
            (("127.0.0.1", -1), ValueError, "port"),
            (("127.0.0.1", "5000"), TypeError, "port"),
            ((None, 5000), TypeError, "host"),
        ):
            with pytest.raises(error, match=text):
                call(*arguments)  # type: ignore[operator]
        for options, error, text in (
            ({"timeout": -1}, ValueError, "timeout"),
            ({"timeout": "1"}, TypeError, "timeout"),
            ({"device": 5}, TypeError, "device"),
            ({"port_num": 0}, ValueError, "port_num"),
            ({"port_num": 256}, ValueError, "port_num"),
            ({"gid_index": -1}, ValueError, "gid_index"),
            ({"gid_index": 256}, ValueError, "gid_index"),
            ({"gid_index": 1.0}, TypeError, "gid_index"),
            ({"gid_ip": "nowhere"}, ValueError, "nowhere"),
            ({"gid_netdev": 4}, TypeError, "gid_netdev"),
            ({"recv_depth": 0}, ValueError, "recv_depth"),
            ({"send_depth": 1.5}, TypeError, "send_depth"),
            ({"path_mtu": 1000}, ValueError, "1000"),
            ({"no_such_option": 1}, TypeError, "no_such_option"),
            ({"buffers": [1]}, TypeError, "buffers"),
            ({"buffers": {"b": b""}}, ValueError, "'b' is empty"),
            ({"buffers": {"b": "text"}}, TypeError, "'b'"),
            ({"buffers": {"b": memoryview(bytearray(8))[::2]}}, ValueError, "'b'.*contiguous"),
        ):
            with pytest.raises(error, match=text):
                call("127.0.0.1", 1, **options)  # type: ignore[operator]


# ------------------------------------------------------------ where the TCP connection runs (report 46)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "192.0.2.1", "2001:db8::1", "localhost", "link-local"])
def test_tcp_runs_over_any_address(host: str) -> None:
    if host == "link-local":
        words = subprocess.run(
            ["ip", "-6", "-o", "addr", "show", "dev", "veth0"], capture_output=True, text=True
        ).stdout
        host = next(word.partition("/")[0] for word in words.split() if word.startswith("fe80")) + "%veth0"
    with connected(host=host) as (left, right):
        left.send(b"hello")
        assert right.recv(timeout=5) == b"hello"
        if "%" in host:
            assert left._link.peer.control.local_address == host
            assert left.info.local_gid == IPv6Address(host.partition("%")[0])
            assert repr(right).startswith(f"<Connection with {host} port")
        if host == "2001:db8::1":
            assert left.info.local_gid == right.info.local_gid == IPv6Address(host)


def test_a_link_local_listener_tells_its_whole_address() -> None:
    words = subprocess.run(["ip", "-6", "-o", "addr", "show", "dev", "veth0"], capture_output=True, text=True).stdout
    host = next(word.partition("/")[0] for word in words.split() if word.startswith("fe80")) + "%veth0"
    with pvl.listen(host, 0) as listener:
        assert listener.host == host
        accepted = in_thread(listener.accept, 5)
        with pvl.connect(listener.host, listener.port) as left, accepted(5) as right:
            right.send(b"found")
            assert left.recv(timeout=5) == b"found"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "192.0.2.1", "2001:db8::1"])
def test_the_empty_host_is_every_address(host: str) -> None:
    with pvl.listen("", 0) as listener:
        accepted = in_thread(listener.accept, 5)
        with pvl.connect(host, listener.port) as left, accepted(5) as right:
            left.send(b"hello")
            assert right.recv(timeout=5) == b"hello"


@pytest.mark.parametrize(
    ("choice", "index"),
    [
        ({"gid_index": 2}, 2),
        ({"gid_index": 0}, 0),
        ({"gid_ip": "2001:db8::1"}, 2),
        ({"gid_ip": "192.0.2.1"}, 1),
        ({"gid_netdev": "veth0"}, 1),
        ({"gid_netdev": "veth0", "gid_index": 2}, 2),
        ({}, 1),
    ],
)
def test_the_gid_can_be_chosen(choice: dict[str, Any], index: int) -> None:
    with connected({}, choice) as (left, right):
        assert left.info.gid_index == index
        assert right.info.remote_gid == left.info.local_gid
        right.send(b"hello")
        assert left.recv(timeout=5) == b"hello"


def test_the_kernel_agrees_on_what_is_open() -> None:
    before = counts()
    with connected(), connected():
        now = counts()
    assert now["qp"] == before["qp"] + 4
    assert counts() == before

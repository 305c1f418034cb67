"""The ``Connection`` over librdmacm: all that one over TCP does, on RoCE and on iWARP, and what is its own."""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import support
import test_connection_rxe as over_tcp
from support import endpoint, in_thread
from test_connection_rxe import *  # noqa: F403 - its tests run here too, on the pairs of this module

import pyverbs_lite as pvl
from pyverbs_lite import cm, wire
from pyverbs_lite._cm import link as _cm_link
from pyverbs_lite._cm import private_data as _private_data
from pyverbs_lite.endpoint import Endpoint
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

RXE, RXE6, SIW = "192.0.2.1", "2001:db8::1", "198.51.100.1"
EVERY = [RXE, RXE6, SIW]


def connected(server: dict[str, Any] | None = None, client: dict[str, Any] | None = None, host: str = RXE) -> Any:
    return support.connected(server, client, host, via=cm)


@pytest.fixture(scope="module", params=[RXE, SIW], ids=["roce", "iwarp"])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(address: str) -> Iterator[over_tcp.Pair]:
    data, words = bytearray(3 << 20), bytearray(32)
    server = dict(over_tcp.SERVER, buffers={"data": data, "words": words, "constant": bytes(range(200))})
    client = dict(over_tcp.CLIENT, buffers={"back": bytearray(100)})
    with connected(server, client, address) as (left, right):
        yield over_tcp.Pair(left, right, data, words)


@pytest.fixture(autouse=True)
def through_the_connection_manager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests taken from the other module connect as those here do."""
    host = request.getfixturevalue("address") if "pair" in request.fixturenames else RXE
    monkeypatch.setattr(over_tcp, "connected", functools.partial(connected, host=host))


on_roce = pytest.mark.parametrize("address", [RXE], indirect=True, ids=["roce"], scope="module")


def only_on_roce(test: Callable[..., None]) -> Any:
    """Take a test whose subject iWARP lacks; what is there instead has a test of its own below."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        test(*args, **options)

    return on_roce(run)


test_atomics_return_what_was_there = only_on_roce(over_tcp.test_atomics_return_what_was_there)
test_bad_atomics_are_refused_here = only_on_roce(over_tcp.test_bad_atomics_are_refused_here)
test_buffers_are_there_from_the_start = only_on_roce(over_tcp.test_buffers_are_there_from_the_start)


@on_roce
def test_info_is_the_same_from_both_sides(pair: over_tcp.Pair) -> None:
    left, right = pair.left.info, pair.right.info
    for name in ("psn", "qp_num", "gid", "lid"):
        assert getattr(left, f"local_{name}") == getattr(right, f"remote_{name}")
        assert getattr(left, f"remote_{name}") == getattr(right, f"local_{name}")
    assert left.path_mtu == right.path_mtu
    assert (left.max_rd_atomic, left.max_dest_rd_atomic) == (6, 2)
    assert (right.max_rd_atomic, right.max_dest_rd_atomic) == (2, 6)
    assert (left.max_send_size, left.max_message_size) == (9000, 20000)
    assert (left.send_depth, left.recv_depth, right.send_depth, right.recv_depth) == (11, 9, 7, 5)
    states = (pvl.QPState.RESET, pvl.QPState.INIT, pvl.QPState.RTR, pvl.QPState.RTS)
    assert left.states == right.states == states
    assert repr(pair.left).startswith(f"<Connection with {RXE} port")


def test_prepared_operations_run_again_and_again(pair: over_tcp.Pair) -> None:
    left, right = pair.left, pair.right
    region = left.register(bytearray(b"abcdefgh" * 20))
    write = left.prepare_write(left.remote["data"][500:600], region[3:43])
    notice = left.prepare_write(left.remote["data"][700:900], region[1:34], imm=0x01020304)
    read, told = left.prepare_read(left.remote["constant"][7:57], region[60:130]), left.prepare_send(region[5:16])
    for turn in range(right.info.recv_depth * 3):  # more than there are receives
        region.view[3] = turn
        write.run(5)
        assert bytes(pair.data[500:540]) == bytes(region.view[3:43])
        notice.run(5)
        told.run(5)
        message = right.recv(timeout=5)
        assert (message.imm, message.byte_len, bytes(message)) == (0x01020304, 33, b"")
        assert bytes(pair.data[700:733]) == bytes(region.view[1:34])
        assert bytes(right.recv(timeout=5)) == bytes(region.view[5:16])
        region.view[60:110] = bytes(50)
        read.run(5)
        assert bytes(region.view[60:110]) == bytes(range(7, 57))
    pair.data[500:900] = bytes(400)
    region.close()


def test_prepared_lists_run_again_and_again(pair: over_tcp.Pair) -> None:
    left = pair.left
    region = left.register(bytearray(range(160)))
    write = left.prepare_write_many(left.remote["data"][500:600], region[3:103], [0, 40, 90], [50, 7, 0], [30, 20, 5])
    read = left.prepare_read_many(left.remote["constant"], region[110:], [40, 0], [3, 190], [10, 7])
    for turn in range(40):
        region.view[3] = turn
        write.run(5)
        expected = bytes(region.view[93:98]) + bytes(2) + bytes(region.view[43:63]) + bytes(23)
        assert bytes(pair.data[500:580]) == expected + bytes(region.view[3:33])
        region.view[110:] = bytes(50)
        read.run(5)
        assert bytes(region.view[110:]) == bytes(range(190, 197)) + bytes(33) + bytes(range(3, 13))
    pair.data[500:600] = bytes(100)
    region.close()


def test_what_is_different_on_iwarp() -> None:
    words = bytearray(16)
    with connected({"buffers": {"words": words}, "send_depth": 1}, host=SIW) as (left, right):
        assert left.info.states == (pvl.QPState.RESET, pvl.QPState.INIT, pvl.QPState.RTS)
        assert left._link.context.name == "siw0"
        remote = left.remote["words"]
        assert remote.access == pvl.AccessFlags.REMOTE_READ | pvl.AccessFlags.REMOTE_WRITE
        with pytest.raises(pvl.StateError, match="fetch_add needs REMOTE_ATOMIC"):
            left.fetch_add(remote[:8], 1)
        unchecked = pvl.RemoteBuffer(remote.addr, remote.rkey, 8)
        with pytest.raises(pvl.UnsupportedError, match="siw0 has no atomic operations"):
            left.compare_swap(unchecked, 0, 1)
        # The transport has no immediates: a message brings that of a write, in its place among the others.
        left.send(b"before", imm=1)
        left.write(left.remote["words"][3:], b"abcde", imm=0xFEDCBA98)
        left.start_write(left.remote["words"][9:], b"fg", imm=3).wait(5)
        left.send(b"after")
        found = [right.recv(timeout=5) for _ in range(4)]
        assert [(bytes(m), m.imm, m.byte_len) for m in found] == [
            (b"before", 1, 6),
            (b"", 0xFEDCBA98, 5),
            (b"", 3, 2),
            (b"after", None, 5),
        ]
        assert words == b"\0\0\0abcde\0fg" + bytes(5)
        right.send(b"x", imm=4)
        assert left.recv(timeout=5).imm == 4
        assert right.info.send_depth == 2  # a write with an immediate is two requests


# ------------------------------------------------------------ how it is made


@pytest.mark.parametrize("host", EVERY)
def test_every_family_and_transport(host: str) -> None:
    with connected({"buffers": {"b": bytearray(b"12345")}}, host=host) as (left, right):
        assert left.read(left.remote["b"]) == b"12345"
        right.send(b"back", imm=5)
        assert left.recv(timeout=5).imm == 5


def test_a_link_local_address_keeps_its_scope() -> None:
    with open("/proc/net/if_inet6") as lines:
        packed = next(line.split()[0] for line in lines if line.startswith("fe80") and line.split()[5] == "veth0")
    host = f"{socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))}%veth0"
    with connected(host=host) as (left, right):
        left.send(b"link-local")
        assert right.recv(timeout=5) == b"link-local"
        assert str(left.info.local_gid) == host.partition("%")[0]


@pytest.mark.parametrize("host", [RXE, RXE6, SIW])
def test_a_listener_on_every_address(host: str) -> None:
    with cm.listen("", 0) as listener:
        accepting = in_thread(listener.accept, 10)
        with cm.connect(host, listener.port) as left, accepting() as right:
            left.send(b"any")
            assert right.recv(timeout=5) == b"any"


def test_a_name_is_tried_address_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with cm.listen(RXE, 0) as listener:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, listener.port)) for ip in ("203.0.113.7", RXE)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        accepting = in_thread(listener.accept, 10)
        with cm.connect("server.example", listener.port) as left, accepting():
            assert left.info.device == "rxe0"


def test_the_options_reach_the_qp() -> None:
    client = {"ack_timeout_exp": 9, "retry_cnt": 5, "rnr_retry": 3, "min_rnr_timer_code": 20, "path_mtu": 1024}
    client |= {"traffic_class": 0x28}
    with connected({"path_mtu": 2048}, client) as (left, right):
        attr = left._link.qp.query()
        assert (attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer) == (9, 5, 3, 20)
        assert (left.info.path_mtu, right.info.path_mtu, attr.path_mtu) == (1024, 1024, pvl.MTU.MTU_1024)
        assert attr.ah_attr.grh.traffic_class == 0x28
        other = right._link.qp.query()
        assert (other.timeout, other.retry_cnt, other.rnr_retry) == (14, 7, 7)
        assert attr.dest_qp_num == right.info.local_qp_num
        assert 0 <= attr.rq_psn - right.info.local_psn < 10  # it counts on with what has come since


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device": "siw0"}, pvl.DeviceNotFoundError, "192.0.2.1 is an address of rxe0 port 1, not of siw0 port 1"),
        ({"port_num": 2}, pvl.DeviceNotFoundError, "rxe0 port 1, not of rxe0 port 2"),
        ({"gid_index": 0}, pvl.GIDError, "192.0.2.1 is GID index 1"),
        ({"gid_netdev": "veth1"}, pvl.GIDError, "gid_netdev 'veth1'"),
        ({"gid_ip": "10.9.9.9"}, pvl.VerbsOSError, "EADDRNOTAVAIL"),
        ({"gid_ip": "x"}, ValueError, "x"),
        ({"gid_index": 256}, ValueError, "gid_index"),
        ({"recv_depth": 0}, ValueError, "recv_depth"),
        ({"buffers": {"": b"x"}}, ValueError, "name"),
    ],
)
def test_what_does_not_fit_the_address_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with cm.listen(RXE, 0) as listener:
        with pytest.raises(error, match=text):
            cm.connect(RXE, listener.port, timeout=3, **options)
        # Nothing of it has reached the listener, or it was told why.
        accepting = in_thread(listener.accept, 10)
        with cm.connect(RXE, listener.port, device="rxe0", port_num=1, gid_index=1, gid_netdev="veth0", gid_ip=RXE):
            accepting().close()


def test_arguments_are_checked_first() -> None:
    for host, port, error in (("", 1, TypeError), (RXE, 0, ValueError), (RXE, 65536, ValueError), (7, 7, TypeError)):
        with pytest.raises(error):
            cm.connect(host, port)  # type: ignore[arg-type]
    with pytest.raises(pvl.DeviceNotFoundError, match="nosuch"):
        cm.listen(RXE, 0, device="nosuch")
    with pytest.raises(ValueError, match="backlog"):
        cm.listen(RXE, 0, backlog=-1)
    with pytest.raises(pvl.VerbsOSError, match="EADDRNOTAVAIL"):
        cm.listen("10.9.9.9", 0)
    with cm.listen(RXE, 0) as listener, pytest.raises(pvl.VerbsOSError, match="EADDRINUSE"):
        cm.listen(RXE, listener.port)


# ------------------------------------------------------------ when it is not made


@pytest.mark.parametrize("host", EVERY)
def test_nobody_listens(host: str) -> None:
    with pytest.raises(pvl.CMRejectedError, match="nobody listens on that port"):
        cm.connect(host, 9)


def test_nobody_has_the_address() -> None:
    start = time.monotonic()
    with pytest.raises(pvl.HandshakeTimeout, match="nobody answers for this address"):
        cm.connect("192.0.2.77", 7, timeout=0.3)
    assert time.monotonic() - start < 1.5


@pytest.mark.parametrize("host", [RXE, SIW])
def test_one_deadline_covers_a_listener_that_does_not_accept(host: str) -> None:
    with cm.listen(host, 0) as listener:
        start = time.monotonic()
        with pytest.raises(pvl.HandshakeTimeout, match="does not accept"):
            cm.connect(host, listener.port, timeout=0.4)
        assert time.monotonic() - start < 2
        # Who has given up meanwhile is noticed, and the next one is served.
        with pytest.raises(pvl.HandshakeError):
            listener.accept(2)
        accepting = in_thread(listener.accept, 10)
        with cm.connect(host, listener.port) as left, accepting() as right:
            left.send(b"the next")
            assert right.recv(timeout=5) == b"the next"


def test_accepting_has_its_own_deadline_and_an_end() -> None:
    with cm.listen(RXE, 0) as listener:
        with pytest.raises(pvl.WaitTimeout, match="nobody connected within 0.05 s"):
            listener.accept(timeout=0.05)
        waiting = in_thread(listener.accept)
        time.sleep(0.05)
        listener.close()
        with pytest.raises(pvl.ClosedError, match=r"cm\.Listener on 192.0.2.1 port \d+ \(closed\)"):
            waiting(5)
        listener.close()


@pytest.mark.parametrize("host", [RXE, SIW])
def test_who_accepts_and_cannot_says_why(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason travels as private data of a rejection."""
    with cm.listen(host, 0) as listener:
        agree = _cm_link.CMLink.agree

        def refuse(link: _cm_link.CMLink, remote: Endpoint) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise pvl.VerbsOSError(12, "ibv_create_qp", "no room for you")
            agree(link, remote)

        monkeypatch.setattr(_cm_link.CMLink, "agree", refuse)
        accepting = in_thread(listener.accept, 10)
        with pytest.raises(pvl.HandshakeError, match="refused the connection: ibv_create_qp failed: ENOMEM.*no room"):
            cm.connect(host, listener.port)
        with pytest.raises(pvl.VerbsOSError, match="no room for you"):
            accepting()


@pytest.mark.parametrize("host", [RXE, SIW])
def test_who_connects_and_cannot_go_on_says_why(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agree = _cm_link.CMLink.agree

    def refuse(link: _cm_link.CMLink, remote: Endpoint) -> None:
        if threading.current_thread() is threading.main_thread():
            raise pvl.HandshakeError("I do not like your record")
        agree(link, remote)

    with cm.listen(host, 0) as listener:
        monkeypatch.setattr(_cm_link.CMLink, "agree", refuse)
        accepting = in_thread(listener.accept, 10)
        with pytest.raises(pvl.HandshakeError, match="I do not like your record"):
            cm.connect(host, listener.port)
        with pytest.raises(pvl.HandshakeError):
            accepting()
        monkeypatch.undo()
        accepting = in_thread(listener.accept, 10)
        with cm.connect(host, listener.port), accepting():
            pass


HELLO = endpoint(0x4711, gid=pvl.gid.parse_gid(RXE), credit_depth=5)


def hello_data() -> bytes:
    channel = wire.Channel()
    channel.hello(HELLO)
    return _private_data.pack_hello(channel.data_to_send())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: b"", "are empty"),
        (lambda data: b"GET / HTTP/1.1\r\n".ljust(56), "begin with b'GET / HTTP"),
        (lambda data: data[:-1] if len(data) == 56 else data, None),
        (lambda data: data[:2] + bytes([9, 9]) + data[4:], "speaks versions 9 to 9"),
        (lambda data: data[:28] + struct.pack("!I", 0) + data[32:], "qp_num is 0"),
        (lambda data: data[:28] + struct.pack("!I", 1 << 24) + data[32:], "qp_num is 16777216"),
        (lambda data: data[:12] + bytes(16) + data[28:], "gid is ::"),
        (lambda data: data[:38] + struct.pack("!H", 9) + data[40:], "path MTU must be one of"),
        (lambda data: data[:43] + bytes([2]) + data[44:], "credit_depth is 2, outside 3"),
    ],
)
def test_a_stranger_is_refused_and_the_next_one_served(change: Callable[[bytes], bytes], text: str | None) -> None:
    with cm.listen(RXE, 0) as listener, cm.CMID() as stranger:
        stranger.resolve_addr((RXE, listener.port))
        stranger.resolve_route()
        accepting = in_thread(listener.accept, 10)
        calling = in_thread(stranger.connect, cm.ConnParam(private_data=change(hello_data()), qp_num=77), timeout=10)
        with pytest.raises(pvl.PeerProtocolError, match=text):
            accepting()
        with pytest.raises(pvl.CMRejectedError) as caught:
            calling()
        said = _private_data.read_refusal(caught.value.private_data)
        assert said is not None
        assert said.code == wire.RefuseCode.PROTOCOL
        accepting = in_thread(listener.accept, 10)
        with cm.connect(RXE, listener.port), accepting():
            pass


def test_a_server_of_another_protocol_is_told_apart() -> None:
    with cm.CMID() as server:
        server.bind_addr((RXE, 0))
        server.listen()
        connecting = in_thread(cm.connect, RXE, server.src_port)
        with server.get_request(timeout=5) as request:
            pd = request.context.alloc_pd()
            cq = request.context.create_cq(4)
            cap = pvl.QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
            request.create_qp(pd, pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap))
            with pytest.raises((pvl.CMError, pvl.PeerClosedError)):
                request.accept(timeout=5)
            with pytest.raises(pvl.PeerProtocolError, match="private data are empty.*another program"):
                connecting()
        cq.close()
        pd.close()


def test_a_message_without_a_header_ends_the_connection() -> None:
    with connected() as (left, right):
        # Past the engine, and unsignaled, so that it does not notice.
        sge, wr, bad = ffi.new("struct ibv_sge *"), ffi.new("struct ibv_send_wr *"), ffi.new("struct ibv_send_wr **")
        data = ffi.new("char[5]", b"short")
        sge.addr, sge.length = int(ffi.cast("uintptr_t", data)), 5
        wr.sg_list, wr.num_sge, wr.opcode = sge, 1, lib.IBV_WR_SEND
        wr.send_flags = lib.IBV_SEND_INLINE
        assert lib.ibv_post_send(left._link.qp._handle, wr, bad) == 0
        with pytest.raises(pvl.PeerProtocolError, match="without a header"):
            right.recv(timeout=5)


# ------------------------------------------------------------ receives are granted


@pytest.mark.parametrize("host", [RXE, SIW])
def test_messages_wait_for_a_receive_at_the_peer(host: str) -> None:
    """Nothing is retried, and nothing lost: iWARP would end the connection."""
    with connected({"recv_depth": 3}, {"rnr_retry": 0}, host=host) as (left, right):
        for i in range(3):
            left.send(b"%d" % i)
        with pytest.raises(
            pvl.WaitTimeout, match="has not taken the messages before it, within 0.1 s; nothing was sent"
        ):
            left.send(b"3", timeout=0.1)
        # News of buffers have receives of their own.
        region = left.register(bytearray(4), name="news")
        assert right.remote["news"].length == 4
        region.close()
        sending = in_thread(left.send, b"4")
        time.sleep(0.05)
        assert [bytes(right.recv(timeout=5)) for _ in range(4)] == [b"0", b"1", b"2", b"4"]
        sending()
        with pytest.raises(pvl.WaitTimeout):
            right.recv(timeout=0.05)


@pytest.mark.parametrize("host", [RXE, SIW])
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_a_stream_in_each_direction_at_once(host: str, depth: int) -> None:
    count = 400
    tuning = {"recv_depth": depth, "send_depth": 4, "max_message_size": 2000}
    with connected(dict(tuning), dict(tuning), host=host) as (left, right):

        def receive(conn: pvl.Connection) -> list[int]:
            return [struct.unpack("<I", conn.recv(timeout=20)[:4])[0] for _ in range(count)]

        def send(conn: pvl.Connection) -> None:
            for i in range(count):
                conn.send(struct.pack("<I", i) + bytes(i % 1900), timeout=20)

        calls = [in_thread(receive, left), in_thread(receive, right), in_thread(send, left), in_thread(send, right)]
        numbers = [call(60) for call in calls[:2]]
        assert numbers == [list(range(count))] * 2
        for call in calls[2:]:
            call(20)


def test_many_names_come_and_go_while_messages_flow() -> None:
    with connected({"recv_depth": 2}) as (left, right):
        stop = threading.Event()

        def chat() -> int:
            count = 0
            while not stop.is_set():
                left.send(b"chat")
                right.recv(timeout=5)
                count += 1
            return count

        chatting = in_thread(chat)
        for i in range(60):
            region = right.register(bytearray(i + 1), name=f"buffer {i}" + "x" * 100)
            deadline = time.monotonic() + 5
            while (name := f"buffer {i}" + "x" * 100) not in left.remote:
                assert time.monotonic() < deadline
            assert left.remote[name].length == i + 1
            region.close()
        stop.set()
        assert chatting() > 3


def test_batches_and_packed_arrays_work_as_over_tcp(pair: over_tcp.Pair) -> None:
    left, remote = pair.left, pair.left.remote["data"]
    region = left.register(bytearray(over_tcp.noise(4000)))
    left.write_many(remote, region, [0, 2000, 10], [5000, 100, 3], [1000, 2000, 7])
    assert pair.data[5000:6000] == over_tcp.noise(4000)[:1000]
    assert pair.data[100:2100] == over_tcp.noise(4000)[2000:4000]
    with left.batch() as batch:
        batch.write(remote[9000:9010], region[20:30])
        batch.read(remote[100:200], region[300:400])
    batch.work.wait(5)
    assert pair.data[9000:9010] == over_tcp.noise(4000)[20:30]
    assert region.view[300:400] == pair.data[100:200]
    region.close()


# ------------------------------------------------------------ the end


@pytest.mark.parametrize("host", [RXE, SIW])
def test_a_close_is_heard_after_the_last_message(host: str) -> None:
    with connected(host=host) as (left, right):
        waiting = in_thread(right.recv)
        left.send(b"first")
        assert waiting() == b"first"
        left.send(b"last", imm=3)
        left.close()
        assert right.recv(timeout=5).imm == 3
        with pytest.raises(pvl.PeerClosedError, match="closed the connection"):
            right.recv(timeout=5)
        with pytest.raises(pvl.PeerClosedError):
            right.send(b"too late")
        with pytest.raises(pvl.PeerClosedError):
            right.remote["anything"]
        with pytest.raises(pvl.ClosedError):
            left.send(b"x")
        left.close()


@pytest.mark.parametrize("host", [RXE, SIW])
def test_a_close_ends_waits_on_both_sides(host: str) -> None:
    with connected(host=host) as (left, right):
        mine, theirs = in_thread(left.recv), in_thread(right.recv)
        time.sleep(0.1)
        left.close()
        with pytest.raises(pvl.ClosedError):
            mine(5)
        with pytest.raises(pvl.PeerClosedError):
            theirs(5)


VICTIM = """
import sys, time
from pyverbs_lite import cm
conn = cm.connect(sys.argv[1], int(sys.argv[2]))
conn.send(b"alive")
time.sleep(60)
"""


@pytest.mark.parametrize("host", [RXE, SIW])
def test_a_peer_that_is_killed_ends_every_wait(host: str) -> None:
    with (
        cm.listen(host, 0) as listener,
        subprocess.Popen([sys.executable, "-c", VICTIM, host, str(listener.port)]) as victim,
    ):
        try:
            with listener.accept(timeout=15) as conn:
                assert conn.recv(timeout=10) == b"alive"
                waiting = in_thread(conn.recv)
                time.sleep(0.05)
                victim.send_signal(signal.SIGKILL)
                with pytest.raises(pvl.PeerClosedError, match="its process is gone"):
                    waiting(10)
                with pytest.raises(pvl.PeerClosedError):
                    conn.send(b"x")
        finally:
            victim.kill()


def test_a_peer_that_disconnects_past_the_library_is_gone() -> None:
    with connected() as (left, right):
        left._link.peer.control.id.disconnect()  # type: ignore[attr-defined]
        with pytest.raises(pvl.PeerClosedError, match="without a GOODBYE"):
            right.recv(timeout=5)


def test_a_failed_request_is_the_reason_and_not_the_disconnect() -> None:
    with connected({"buffers": {"b": bytearray(8)}}) as (left, _):
        remote = left.remote["b"]
        wrong = pvl.RemoteBuffer(remote.addr, remote.rkey ^ 0xFFFF, 8, "b", remote.access)
        with pytest.raises(pvl.RemoteAccessError):
            left.write(wrong, b"12345678")
        with pytest.raises(pvl.ClosedError, match="REM_ACCESS_ERR"):
            left.send(b"x")
        assert isinstance(left._engine.failure, pvl.RemoteAccessError)


def test_dropped_connections_are_closed_with_a_warning() -> None:
    def make(stack: ExitStack) -> tuple[pvl.Connection, pvl.Connection]:
        listener = stack.enter_context(cm.listen(RXE, 0))
        accepting = in_thread(listener.accept, 10)
        return cm.connect(RXE, listener.port), accepting()

    with ExitStack() as stack:
        left, right = make(stack)
        with pytest.warns(ResourceWarning, match="was never closed"):
            del left
            gc.collect()
        with right, pytest.raises(pvl.PeerClosedError):
            right.recv(timeout=5)


def test_a_forked_child_leaves_the_connection_alone() -> None:
    with connected() as (left, right):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                left.send(b"from the child")
            except pvl.ClosedError as error:
                os.write(writer, str(error).encode())
            left.close()
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert b"forked child" in os.read(reader, 500)
        os.close(reader)
        left.send(b"from the parent")
        assert right.recv(timeout=5) == b"from the parent"


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that descriptors and QPs are as many afterwards as they were before."""

    def held() -> tuple[int, int]:
        shown = subprocess.run(["rdma", "resource", "show", "qp"], capture_output=True, text=True, check=True).stdout
        return len(os.listdir("/proc/self/fd")), shown.count("pid")

    gc.collect()
    before = held()
    yield
    assert held() == before


@pytest.mark.parametrize("host", [RXE, SIW])
def test_a_loop_of_connections_leaves_nothing_behind(host: str) -> None:
    def once() -> None:
        with connected(host=host) as (left, right):
            left.send(b"x")
            right.recv(timeout=5)
        with pytest.raises(pvl.CMRejectedError):
            cm.connect(host, 9)

    once()
    with nothing_left():
        for _ in range(25):
            once()


def test_the_first_message_never_meets_an_empty_queue() -> None:
    with cm.listen(RXE, 0, rnr_retry=0) as listener:
        for i in range(30):
            accepting = in_thread(listener.accept, 10)
            with cm.connect(RXE, listener.port, rnr_retry=0) as left:
                left.send(b"%d" % i)
                with accepting() as right:
                    right.send(b"%d" % -i)
                    assert (right.recv(timeout=5), left.recv(timeout=5)) == (b"%d" % i, b"%d" % -i)


def test_ctrl_c_ends_a_wait_and_the_connection_goes_on() -> None:
    code = f"""
import os, signal, threading
from pyverbs_lite import cm
with cm.listen({RXE!r}, 0) as listener:
    got = []
    thread = threading.Thread(target=lambda: got.append(listener.accept(10))); thread.start()
    left = cm.connect({RXE!r}, listener.port); thread.join()
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        left.recv()
    except KeyboardInterrupt:
        got[0].send(b"still here")
        print(bytes(left.recv(timeout=5)))
    left.close(); got[0].close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'still here'\n", "")


# ------------------------------------------------------------ examples


EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("host", [RXE, SIW])
def test_the_hello_example(host: str) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "cm_hello.py"), host]
    # Two processes write to one pipe: each its lines as a whole, unless unbuffered.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "read back: b'one-sided'",
        "the answer: b'HELLO' 42",
        "written by RDMA: b'one-sided' 7",
    ]


@pytest.mark.parametrize("host", [RXE, SIW])
@pytest.mark.parametrize("roles", ["C serves", "C connects", "both are ours"])
def test_rping_speaks_with_that_of_c(host: str, roles: str) -> None:
    """All of it checked by the client, on a port of each case's own."""
    ours = [sys.executable, "-W", "error", str(EXAMPLES / "rping.py")]
    port = str(7300 + 10 * (host == SIW) + len(roles))
    server = [*(["rping"] if roles == "C serves" else ours), "-s", "-a", host, "-p", port, "-C", "3", "-v"]
    client = [*(["rping"] if roles == "C connects" else ours), "-c", "-a", host, "-p", port, "-C", "3", "-v", "-V"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        try:
            deadline = time.monotonic() + 20
            while (
                f":{port} "
                not in subprocess.run(
                    ["rdma", "resource", "show", "cm_id"], capture_output=True, text=True, check=True
                ).stdout
            ):
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.02)
            asking = subprocess.run(client, capture_output=True, text=True, timeout=20)
            answered = serving.communicate(timeout=10)[0]
        finally:
            serving.kill()
    assert asking.returncode == 0, asking.stderr
    for i in range(3):
        assert f"ping data: rdma-ping-{i}: {chr(65 + i)}" in asking.stdout
        assert f"server ping data: rdma-ping-{i}: {chr(65 + i)}" in answered

"""The connection manager's own objects: each step, each error event, ownership, datagrams and multicast."""

from __future__ import annotations

import errno
import gc
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import in_thread

import pyverbs_lite as pvl
from pyverbs_lite import cm

pytestmark = pytest.mark.rdma

RXE, RXE6, SIW = "192.0.2.1", "2001:db8::1", "198.51.100.1"
#: Addresses of this machine, and the device of each.
EVERY = [(RXE, "rxe0"), (RXE6, "rxe0"), (SIW, "siw0")]
SEND = pvl.SendFlags.SIGNALED
E = cm.CMEventType


def init_attr(context: pvl.Context, qp_type: pvl.QPType = pvl.QPType.RC) -> pvl.QPInitAttr:
    send_cq, recv_cq = (context.create_cq(depth, context.create_comp_channel()) for depth in (16, 32))
    cap = pvl.QPCap(max_send_wr=7, max_recv_wr=9, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
    return pvl.QPInitAttr(send_cq=send_cq, recv_cq=recv_cq, cap=cap, qp_type=qp_type)


@contextmanager
def end(cmid: cm.CMID, qp_type: pvl.QPType = pvl.QPType.RC) -> Iterator[tuple[cm.CMID, pvl.MR]]:
    """Give a CMID a QP and memory with two receives posted, and close all of it in the end."""
    with cmid, cmid.context.alloc_pd() as pd:
        attr = init_attr(cmid.context, qp_type)
        with attr.send_cq.channel, attr.recv_cq.channel, cmid.create_qp(pd, attr) as qp:
            memory = pd.alloc(4096)
            for slot in (0, 1):
                start = 1024 * (2 + slot)
                qp.post_recv(pvl.RecvWR(wr_id=slot, sg_list=[memory[start : start + 1024]]))
            yield cmid, memory


@contextmanager
def listening(ip: str, ps: cm.PortSpace = cm.PortSpace.TCP) -> Iterator[cm.CMID]:
    with cm.CMID(ps=ps) as listener:
        listener.bind_addr((ip, 0))
        listener.listen(7)
        yield listener


def resolved(ip: str, port: int, ps: cm.PortSpace = cm.PortSpace.TCP) -> cm.CMID:
    cmid = cm.CMID(ps=ps)
    try:
        cmid.resolve_addr((ip, port))
        cmid.resolve_route()
    except BaseException:
        cmid.close()
        raise
    return cmid


@contextmanager
def connected(
    ip: str, client: cm.ConnParam | None = None, server: cm.ConnParam | None = None
) -> Iterator[tuple[tuple[cm.CMID, pvl.MR], tuple[cm.CMID, pvl.MR]]]:
    """Yield a connected client and server of one process, each with its memory."""
    with ExitStack() as stack:
        listener = stack.enter_context(listening(ip))
        left = stack.enter_context(end(resolved(ip, listener.src_port)))
        connecting = in_thread(left[0].connect, client, timeout=10)
        right = stack.enter_context(end(listener.get_request(timeout=10)))
        right[0].accept(server)
        connecting()
        yield left, right


def send(qp: pvl.QP, memory: pvl.MR, data: bytes) -> None:
    memory.view[: len(data)] = data
    qp.post_send(pvl.SendWR(wr_id=77, opcode=pvl.WROpcode.SEND, sg_list=[memory[0 : len(data)]], send_flags=SEND))


def received(qp: pvl.QP, memory: pvl.MR) -> bytes:
    (wc,) = qp.recv_cq.wait(10, n=1)
    wc.raise_for_status()
    start = 1024 * (2 + wc.wr_id)
    return bytes(memory.view[start : start + wc.byte_len])


def run(code: str, timeout: float = 20.0) -> subprocess.CompletedProcess[str]:
    """Run a program that may hang."""
    head = "import pyverbs_lite as pvl, time, threading, os, signal\nfrom pyverbs_lite import cm\n"
    return subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=timeout)


# ------------------------------------------------------------ the whole way


@pytest.mark.parametrize(("ip", "device"), EVERY)
def test_bytes_flow_both_ways_and_the_end_is_told(ip: str, device: str) -> None:
    with connected(ip) as ((left, left_memory), (right, right_memory)):
        assert left.context.name == right.context.name == device
        assert left.context is right.context
        assert (left.qp.state, right.qp.state) == (pvl.QPState.RTS, pvl.QPState.RTS)
        send(left.qp, left_memory, b"to the server")
        assert received(right.qp, right_memory) == b"to the server"
        send(right.qp, right_memory, b"back")
        assert received(left.qp, left_memory) == b"back"
        left.disconnect()
        assert right.expect(E.DISCONNECTED, timeout=5).event == E.DISCONNECTED
        right.disconnect()
        assert left.expect(E.DISCONNECTED, timeout=5).event == E.DISCONNECTED
        assert (left.disconnected, right.disconnected) == (True, True)
        right.disconnect(timeout=5)  # nothing is left to do, and to wait for
        assert left.qp.query().qp_state == (pvl.QPState.ERR if device == "rxe0" else pvl.QPState.SQD)


@pytest.mark.parametrize(("ip", "device"), EVERY)
def test_addresses_and_ports_are_those_of_both_sides(ip: str, device: str) -> None:
    with connected(ip) as ((left, _), (right, _)):
        assert left.peer_address == right.local_address
        assert left.local_address == right.peer_address
        assert left.local_address[0] == ip
        assert (left.src_port, left.dst_port) == (right.dst_port, right.src_port)
        assert 0 < left.src_port != left.dst_port > 0
        assert (left.port_num, right.port_num) == (1, 1)
        if device == "rxe0":
            assert left.sgid == right.dgid == pvl.gid.parse_gid(ip)
        assert repr(left).startswith(f"<CMID TCP ('{ip}', {left.src_port}")


@pytest.mark.parametrize(("ip", "room"), [(RXE, (56, 196)), (RXE6, (56, 196)), (SIW, (251, 251))])
def test_private_data_fit_to_the_last_byte(ip: str, room: tuple[int, int]) -> None:
    asked, answered = bytes(range(1, room[0] + 1)), bytes(range(255, 255 - room[1], -1))
    padding = 0 if ip == SIW else None
    with listening(ip) as listener, end(resolved(ip, listener.src_port)) as (left, _):
        with pytest.raises(ValueError, match=rf"^{room[0] + 1} bytes.*connect.*at most {room[0]} do"):
            left.connect(cm.ConnParam(private_data=bytes(room[0] + 1)))
        connecting = in_thread(left.connect, cm.ConnParam(private_data=asked, initiator_depth=3, responder_resources=5))
        with end(listener.get_request(timeout=5)) as (right, _):
            event = right.event
            assert event is not None
            assert event.event == E.CONNECT_REQUEST
            assert (event.id, event.listen_id) == (right, listener)
            assert event.private_data == asked
            assert (event.conn.responder_resources, event.conn.initiator_depth) == (3, 5)  # seen from here
            if ip != SIW:
                assert event.conn.qp_num == left.qp.qp_num
            right.accept(cm.ConnParam(private_data=answered))
            answer = connecting()
            assert answer.private_data[: len(answered)] == answered
            assert padding is None or len(answer.private_data) == len(answered)


def test_short_private_data_are_filled_up_with_zeros() -> None:
    with connected(RXE, cm.ConnParam(private_data=b"short")) as (_, (right, _)):
        assert right.event.private_data == b"short" + bytes(51)


def test_two_connect_at_once_to_one_listener() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening(RXE))
        lefts = [stack.enter_context(end(resolved(RXE, listener.src_port)))[0] for _ in range(2)]
        waiting = [
            in_thread(left.connect, cm.ConnParam(private_data=b"%d" % number)) for number, left in enumerate(lefts)
        ]
        rights = {}
        for _ in range(2):
            right, memory = stack.enter_context(end(listener.get_request(timeout=5)))
            rights[int(right.event.private_data[:1])] = right, memory
        for number in (1, 0):  # accepted in the other order
            rights[number][0].accept(cm.ConnParam(private_data=b"%d" % (number + 10)))
        for number, connecting in enumerate(waiting):
            assert connecting().private_data[:2] == b"%d" % (number + 10)


def test_both_sides_connect_to_each_other_at_the_same_time() -> None:
    """Simultaneous open makes two connections; neither is stuck."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(listening(RXE)) for _ in range(2)]
        lefts = [stack.enter_context(end(resolved(RXE, listener.src_port)))[0] for listener in listeners]
        waiting = [in_thread(left.connect) for left in lefts]
        for listener in listeners:
            stack.enter_context(end(listener.get_request(timeout=5)))[0].accept()
        assert [connecting().event for connecting in waiting] == [E.ESTABLISHED] * 2


def test_link_local_addresses_need_their_scope() -> None:
    index = socket.if_nametoindex("veth0")
    lines = Path("/proc/net/if_inet6").read_text().split("\n")
    packed = next(line.split()[0] for line in lines if line.startswith("fe80") and line.endswith("veth0"))
    ip = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))
    with cm.CMID() as listener, pytest.raises(pvl.VerbsOSError):
        listener.bind_addr((ip, 0))
    with cm.CMID() as listener:
        listener.bind_addr((ip, 0, 0, index))
        assert listener.local_address == (ip, listener.src_port, 0, index)
        listener.listen()
        with end(resolved(f"{ip}%veth0", listener.src_port)) as (left, memory):
            connecting = in_thread(left.connect)
            with end(listener.get_request(timeout=5)) as (right, right_memory):
                right.accept()
                connecting()
                send(left.qp, memory, b"link-local")
                assert received(right.qp, right_memory) == b"link-local"


def test_a_qp_made_past_librdmacm_is_moved_with_its_attributes() -> None:
    """``init_qp_attr``, ``CONNECT_RESPONSE`` and ``establish``: the QPs are ours, on contexts of our own."""
    with ExitStack() as stack:
        listener = stack.enter_context(listening(RXE))
        left = stack.enter_context(resolved(RXE, listener.src_port))
        qps = []
        for _ in range(2):
            context = stack.enter_context(pvl.open_device("rxe0"))
            qps.append(context.alloc_pd().create_qp(init_attr(context)))
        for attr in (left.init_qp_attr(pvl.QPState.INIT),):
            assert (attr.port_num, attr.pkey_index, attr.qp_state) == (1, 0, pvl.QPState.INIT)
            assert attr.rq_psn is None
        connecting = in_thread(left.connect, cm.ConnParam(qp_num=qps[0].qp_num))
        right = stack.enter_context(listener.get_request(timeout=5))
        assert right.event.conn.qp_num == qps[0].qp_num
        for state in (pvl.QPState.INIT, pvl.QPState.RTR, pvl.QPState.RTS):
            qps[1].modify(right.init_qp_attr(state))
        with pytest.raises(pvl.StateError, match="no QP"):
            right.accept()
        accepting = in_thread(right.accept, cm.ConnParam(qp_num=qps[1].qp_num))
        assert connecting().event == E.CONNECT_RESPONSE
        for state in (pvl.QPState.INIT, pvl.QPState.RTR, pvl.QPState.RTS):
            qps[0].modify(left.init_qp_attr(state))
        left.establish()
        assert accepting().event == E.ESTABLISHED
        memory = qps[0].pd.alloc(64)
        qps[1].post_recv(pvl.RecvWR(wr_id=5, sg_list=[qps[1].pd.alloc(64)[0:64]]))
        send(qps[0], memory, b"by hand")
        assert [wc.byte_len for wc in qps[1].recv_cq.wait(5)] == [7]


# ------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("address", "error", "text"),
    [
        (("10.99.99.99", 7), pvl.VerbsOSError, "ENETUNREACH.*no route"),
        (("192.0.2.77", 7), pvl.HandshakeTimeout, "nobody answers for this address"),
        (("not an address", 7), ValueError, "no IP address"),
        (("192.0.2.1", 65536), ValueError, "port of dst"),
        (("192.0.2.1", -1), ValueError, "port of dst"),
        (("fe80::1%nosuchnetdev", 7), ValueError, "no network interface"),
        (("192.0.2.1", 7, 0, 0), ValueError, "IPv4 address is"),
        ("192.0.2.1", TypeError, "must be"),
        (("192.0.2.1",), TypeError, "must be"),
    ],
)
def test_what_cannot_be_resolved_says_why(address: Any, error: type[Exception], text: str) -> None:
    with cm.CMID() as cmid:
        start = time.monotonic()
        with pytest.raises(error, match=text):
            cmid.resolve_addr(address, timeout=0.4)
        assert time.monotonic() - start < 2


def test_an_address_of_no_rdma_device_is_an_address_error() -> None:
    """A plain interface: the kernel resolves the neighbour, and finds no RDMA device there."""
    subprocess.run(
        "ip link add pvl0 type veth peer name pvl1; ip addr add 203.0.113.1/24 dev pvl0;"
        "ip link set pvl0 up; ip link set pvl1 up",
        shell=True,
        check=True,
    )
    try:
        with cm.CMID() as cmid, pytest.raises(pvl.VerbsOSError, match=r"ENODEV.*203\.0\.113\.1.*no RDMA device"):
            cmid.bind_addr(("203.0.113.1", 0))
        mac = Path("/sys/class/net/pvl1/address").read_text().strip()
        subprocess.run(f"ip neigh add 203.0.113.9 lladdr {mac} dev pvl0", shell=True, check=True)
        with cm.CMID() as cmid:
            with pytest.raises(pvl.CMAddressError, match=r"ADDR_ERROR ENODEV.*no RDMA device") as caught:
                cmid.resolve_addr(("203.0.113.9", 7), timeout=3)
            assert (caught.value.event, caught.value.status) == (E.ADDR_ERROR, -errno.ENODEV)
            assert caught.value.operation == "rdma_resolve_addr"
            with pytest.raises(pvl.StateError, match="not bound to a device"):
                cmid.context  # noqa: B018
    finally:
        subprocess.run("ip link del pvl0", shell=True, check=True)


@pytest.mark.parametrize(("ip", "device"), EVERY)
def test_a_port_that_nobody_listens_on_is_rejected(ip: str, device: str) -> None:
    with end(resolved(ip, 9)) as (cmid, _):
        with pytest.raises(pvl.CMRejectedError, match="nobody listens on that port") as caught:
            cmid.connect(timeout=10)
        assert caught.value.status == (8 if device == "rxe0" else -errno.ECONNREFUSED)
        assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize(("ip", "device"), EVERY)
def test_who_rejects_says_why(ip: str, device: str) -> None:
    reason = bytes(range(1, 149))
    with listening(ip) as listener, end(resolved(ip, listener.src_port)) as (left, _):
        connecting = in_thread(left.connect, timeout=10)
        with listener.get_request(timeout=5) as right:
            right.reject(reason)
            with pytest.raises(pvl.CMRejectedError, match=r"REJECTED.*refused.*said b'\\x01") as caught:
                connecting()
            assert caught.value.private_data == reason
            if device == "rxe0":
                with pytest.raises(pvl.VerbsOSError, match="nobody waits to be refused"):
                    right.reject()
        if device == "rxe0":
            with pytest.raises(pvl.VerbsOSError, match="EINVAL"):
                left.connect()


@pytest.mark.parametrize(("ip", "device"), EVERY)
def test_closing_a_request_refuses_it(ip: str, device: str) -> None:
    with listening(ip) as listener, end(resolved(ip, listener.src_port)) as (left, _):
        connecting = in_thread(left.connect, timeout=10)
        listener.get_request(timeout=5).close()
        with pytest.raises((pvl.CMRejectedError, pvl.CMUnreachableError, pvl.CMConnectError, pvl.PeerClosedError)):
            connecting()


def test_one_deadline_covers_a_peer_that_never_answers() -> None:
    with listening(RXE) as listener, end(resolved(RXE, listener.src_port)) as (left, _):
        start = time.monotonic()
        with pytest.raises(pvl.HandshakeTimeout, match=r"rdma_connect: no ESTABLISHED.*0.3 s.*does not accept"):
            left.connect(timeout=0.3)
        assert 0.3 <= time.monotonic() - start < 1.5
    with listening(RXE) as listener:
        with pytest.raises(pvl.WaitTimeout):
            listener.get_request(timeout=0.05)
        with pytest.raises(pvl.WaitTimeout):
            listener.get_event(0)


def test_steps_in_the_wrong_order_are_refused() -> None:
    with cm.CMID() as cmid:
        for step in (cmid.resolve_route, cmid.connect, lambda: cmid.join_multicast(("239.1.2.3", 0))):
            with pytest.raises(pvl.StateError, match="not bound to a device"):
                step()
        cmid.resolve_addr((RXE, 7))
        with pytest.raises(pvl.StateError, match="create_qp first"):
            cmid.connect()
        with pytest.raises(TypeError, match="ConnParam"):
            cmid.connect({"private_data": b"x"})  # type: ignore[arg-type]
        with pytest.raises(pvl.VerbsOSError, match="EINVAL"):
            cmid.listen()
        with pytest.raises(pvl.VerbsOSError, match=r"EINVAL.*not connected"):
            cmid.disconnect()
    with pytest.raises(pvl.ClosedError):
        cmid.resolve_addr((RXE, 7))


def test_a_port_is_taken_once() -> None:
    with (
        listening(RXE) as listener,
        cm.CMID() as other,
        pytest.raises(pvl.VerbsOSError, match=r"EADDRINUSE.*port is taken"),
    ):
        other.bind_addr((RXE, listener.src_port))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"retry_count": 8}, ValueError),
        ({"rnr_retry_count": -1}, ValueError),
        ({"responder_resources": 256}, ValueError),
        ({"initiator_depth": True}, TypeError),
        ({"qp_num": 1 << 32}, ValueError),
        ({"private_data": "text"}, TypeError),
    ],
)
def test_parameters_are_checked(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        cm.ConnParam(**given)


def test_the_qp_is_of_the_right_device_and_kind() -> None:
    with resolved(RXE, 7) as cmid, pvl.open_device("rxe0") as context:
        with pytest.raises(ValueError, match="use its context"):
            cmid.create_qp(context.alloc_pd(), init_attr(context))
        with cmid.context.alloc_pd() as pd:
            with pytest.raises(ValueError, match="port space TCP has a QP of type RC, not UD"):
                cmid.create_qp(pd, init_attr(cmid.context, pvl.QPType.UD))
            qp = cmid.create_qp(pd, init_attr(cmid.context))
            with pytest.raises(pvl.StateError, match="has a QP already"):
                cmid.create_qp(pd, init_attr(cmid.context))
            qp.close()
            assert cmid.create_qp(pd, init_attr(cmid.context)).state == pvl.QPState.INIT
            for cq in cmid.context._children:
                cq.close()


# ------------------------------------------------------------ ownership


def test_handles_borrowed_from_librdmacm_are_destroyed_once() -> None:
    """The context stays librdmacm's, and a QP closed here is not destroyed by it again, in any order."""
    code = f"""
import gc, itertools
def make():
    cmid = cm.CMID(); cmid.resolve_addr(({RXE!r}, 7)); cmid.resolve_route()
    context = cmid.context
    pd = context.alloc_pd()
    cq = context.create_cq(16)
    cap = pvl.QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
    qp = cmid.create_qp(pd, pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap))
    return dict(cmid=cmid, pd=pd, cq=cq, qp=qp, channel=cmid.channel, context=context)
for order in itertools.permutations(("cmid", "pd", "cq", "qp", "channel", "context")):
    things = make()
    for name in order: things[name].close()
    for name in order: things[name].close()
    assert all(thing.closed for thing in things.values())
things = make()
things["context"].close()
assert not things["cmid"].closed and things["qp"].closed
again = things["cmid"].context
assert again is not things["context"] and again.query_device().max_qp > 0
things["cmid"].close()
print("fine")
"""
    done = run(code, 60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_what_is_dropped_is_destroyed_with_a_warning_and_no_hang() -> None:
    code = f"""
import gc, warnings
warnings.simplefilter("always")
def make():
    cmid = cm.CMID(); cmid.resolve_addr(({RXE!r}, 7))
    listener = cm.CMID(); listener.bind_addr(({RXE!r}, 0)); listener.listen()
make(); gc.collect()
fds = len(os.listdir("/proc/self/fd"))
for _ in range(5): make(); gc.collect()
assert len(os.listdir("/proc/self/fd")) == fds
kept = cm.CMID()
"""
    done = run(code)
    assert done.returncode == 0
    assert "CMID was never closed (it was destroyed now" in done.stderr
    assert "Traceback" not in done.stderr


#: Programs that destroy an identifier while events wait for it: in C each would wait for ever.
PENDING = {
    "in the kernel": "cmid.resolve_addr(DST); wait(channel); cmid.close()",
    "read, and not asked for": """
cmid.resolve_addr(DST); wait(channel)
with channel._lock: channel._fetch()
cmid.close()
""",
    "a request nobody asked for": """
listener = channel.create_id(); listener.bind_addr(("192.0.2.1", 0)); listener.listen()
client = cm.CMID(); client.resolve_addr(("192.0.2.1", listener.src_port)); client.resolve_route()
threading.Thread(target=lambda: tolerate(lambda: client.connect(cm.ConnParam(qp_num=99), timeout=5))).start()
wait(channel)
listener.close(); cmid.close()
""",
    "a request read and not asked for": """
listener = channel.create_id(); listener.bind_addr(("192.0.2.1", 0)); listener.listen()
client = cm.CMID(); client.resolve_addr(("192.0.2.1", listener.src_port)); client.resolve_route()
threading.Thread(target=lambda: tolerate(lambda: client.connect(cm.ConnParam(qp_num=99), timeout=5))).start()
wait(channel)
with channel._lock: channel._fetch()
listener.close(); cmid.close()
""",
    "the channel goes first": "cmid.resolve_addr(DST); wait(channel); channel.close(); assert cmid.closed",
    "another thread is waiting": """
other = threading.Thread(target=lambda: tolerate(lambda: cmid.get_event(20))); other.start()
time.sleep(0.1); cmid.resolve_addr(DST); cmid.close(); other.join(5); assert not other.is_alive()
""",
    "while resolving": "cmid.resolve_addr(('192.0.2.77', 7), timeout=60); time.sleep(0.1); cmid.close()",
}


@pytest.mark.parametrize("name", PENDING)
def test_an_identifier_with_events_pending_is_destroyed_without_a_hang(name: str) -> None:
    code = f"""
import select
DST = ({RXE!r}, 7)
def wait(channel): assert select.select([channel], [], [], 5)[0]
def tolerate(call):
    try: call()
    except pvl.VerbsError: pass
channel = cm.EventChannel(); cmid = channel.create_id()
{PENDING[name]}
channel.close()
print("fine")
"""
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_a_loop_of_connections_leaves_nothing_behind() -> None:
    def once() -> None:
        with connected(RXE) as ((left, _), _):
            left.disconnect()
        with end(resolved(RXE, 9)) as (left, _), pytest.raises(pvl.CMRejectedError):
            left.connect()

    def held() -> tuple[int, int]:
        shown = subprocess.run(["rdma", "resource", "show", "qp"], capture_output=True, text=True, check=True).stdout
        return len(os.listdir("/proc/self/fd")), shown.count("pid")

    once()
    gc.collect()
    before = held()
    for _ in range(30):
        once()
    assert held() == before


# ------------------------------------------------------------ waiting


def test_the_asynchronous_manner_over_one_channel() -> None:
    """Every call returns at once; one channel has the events of both sides, in their order."""
    seen = []
    with cm.EventChannel() as channel, ExitStack() as stack:
        listener, left = channel.create_id(), channel.create_id()
        listener.bind_addr((RXE, 0))
        listener.listen()
        assert left.resolve_addr((RXE, listener.src_port)) is None

        def next_event() -> cm.CMEvent:
            assert select.select([channel], [], [], 5)[0]
            event = channel.get_event(timeout=0)
            seen.append((event.name, event.id))
            return event

        assert next_event().event == E.ADDR_RESOLVED
        left.resolve_route()
        assert next_event().event == E.ROUTE_RESOLVED
        stack.enter_context(end(left))
        left.connect()
        right = next_event().id
        stack.enter_context(end(right))
        assert right not in (left, listener)
        right.accept()
        pairs = {next_event().id for _ in range(2)}
        assert pairs == {left, right}
        left.disconnect()
        assert next_event().id == right
        right.disconnect()
        assert next_event().id == left
        assert seen[-1][0] == seen[-2][0] == "DISCONNECTED"
        assert channel.get_events() == []
        with pytest.raises(pvl.WaitTimeout, match="no event of the connection manager"):
            channel.get_event(timeout=0.05)


def test_threads_share_a_channel_and_each_gets_its_own_events() -> None:
    with cm.EventChannel() as channel:
        cmids = [channel.create_id() for _ in range(4)]
        waits = [in_thread(cmid.expect, E.ADDR_RESOLVED, timeout=10) for cmid in cmids]
        for cmid in reversed(cmids):
            cmid.resolve_addr((RXE, 7))
        assert [wait().id for wait in waits] == cmids


@pytest.mark.parametrize("victim", ["cmid", "channel"])
def test_a_close_in_another_thread_ends_a_wait(victim: str) -> None:
    with cm.EventChannel() as channel:
        cmid = channel.create_id()
        waiting = in_thread(cmid.get_event)
        time.sleep(0.05)
        (cmid if victim == "cmid" else channel).close()
        with pytest.raises(pvl.ClosedError):
            waiting(3)


def test_a_wait_lets_others_run_and_ends_on_ctrl_c() -> None:
    code = """
count = 0
def tick():
    global count
    while True:
        count += 1
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
threading.Timer(0.4, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
cmid = cm.CMID()
start = time.monotonic()
try:
    cmid.resolve_addr(("192.0.2.77", 7), timeout=None)
except KeyboardInterrupt:
    assert time.monotonic() - start < 2 and count > 20, count
    cmid.close()
    print("interrupted")
"""
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_events_move_with_their_identifier() -> None:
    with cm.EventChannel() as first, cm.EventChannel() as second:
        cmid = first.create_id()
        cmid.resolve_addr((RXE, 7))
        assert select.select([first], [], [], 5)[0]
        cmid.migrate(second)
        assert second.get_event(5).event == E.ADDR_RESOLVED
        cmid.resolve_route()
        assert second.get_event(5).event == E.ROUTE_RESOLVED
        assert first.get_events() == []
        first.close()
        assert not cmid.closed
        cmid.migrate(None)  # synchronous from here on
        second.close()
        with pytest.raises(pvl.CMRejectedError):
            cmid.connect(cm.ConnParam(qp_num=1234))
        cmid.close()
        assert cmid.channel.closed


def test_a_forked_child_is_refused() -> None:
    with cm.CMID() as cmid:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                cmid.resolve_addr((RXE, 7))
            except pvl.ClosedError as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        assert b"forked child" in os.read(reader, 1000)
        os.close(reader)
        cmid.resolve_addr((RXE, 7))


# ------------------------------------------------------------ options and look-ups


def test_options_are_set_and_their_values_checked() -> None:
    with cm.CMID() as cmid:
        cmid.set_option(cm.IDOption.TOS, 0x28)
        cmid.set_option(cm.IDOption.REUSEADDR, 1)
        cmid.set_option(cm.IDOption.ACK_TIMEOUT, 17)
        for option, value in ((cm.IDOption.TOS, 256), (cm.IDOption.REUSEADDR, 2), (cm.IDOption.ACK_TIMEOUT, 32)):
            with pytest.raises(ValueError, match=option.name):
                cmid.set_option(option, value)
        with pytest.raises(TypeError, match="IDOption"):
            cmid.set_option(0, 1)  # type: ignore[arg-type]
        cmid.bind_addr(("::", 0))
        cmid.listen()
        with pytest.raises(pvl.VerbsOSError, match="AFONLY"):
            cmid.set_option(cm.IDOption.AFONLY, 1)


def test_the_ack_timeout_and_the_traffic_class_reach_the_qp() -> None:
    with listening(RXE) as listener, cm.CMID() as cmid:
        cmid.set_option(cm.IDOption.TOS, 0x28)
        cmid.set_option(cm.IDOption.ACK_TIMEOUT, 9)
        cmid.resolve_addr((RXE, listener.src_port))
        cmid.resolve_route()
        with end(cmid) as (left, _):
            connecting = in_thread(left.connect)
            with end(listener.get_request(timeout=5)) as (right, _):
                right.accept()
                connecting()
                attr = left.qp.query()
                assert attr.timeout == 9
                assert attr.ah_attr.grh.traffic_class == 0x28


def test_reuseaddr_lets_a_port_be_bound_again() -> None:
    with cm.CMID() as first, cm.CMID() as second:
        for cmid in (first, second):
            cmid.set_option(cm.IDOption.REUSEADDR, 1)
        first.bind_addr((RXE, 0))
        second.bind_addr((RXE, first.src_port))
        assert first.src_port == second.src_port


def test_a_listener_on_every_address_serves_every_device() -> None:
    with cm.CMID() as listener:
        listener.bind_addr(("", 0))
        listener.listen()
        with pytest.raises(pvl.StateError, match="not bound to a device"):
            listener.context  # noqa: B018
        for ip, device in ((RXE, "rxe0"), (SIW, "siw0")):
            with end(resolved(ip, listener.src_port)) as (left, _):
                connecting = in_thread(left.connect)
                with end(listener.get_request(timeout=5)) as (right, _):
                    right.accept()
                    connecting()
                    assert right.context.name == device


def test_getaddrinfo_resolves_both_families() -> None:
    (found,) = cm.getaddrinfo(RXE, 4711, flags=cm.AddrInfoFlags.NUMERICHOST, port_space=cm.PortSpace.TCP)
    assert found.ai_dst_addr == (RXE, 4711)
    assert (found.ai_port_space, found.ai_qp_type, found.ai_family) == (
        cm.PortSpace.TCP,
        pvl.QPType.RC,
        socket.AF_INET,
    )
    passive = cm.getaddrinfo(RXE6, "80", flags=cm.AddrInfoFlags.PASSIVE | cm.AddrInfoFlags.NUMERICHOST)
    assert passive[0].ai_src_addr == (RXE6, 80, 0, 0)
    with pytest.raises(pvl.VerbsOSError, match=r"no.such.host.*cannot be resolved"):
        cm.getaddrinfo("no.such.host.invalid", "80", flags=cm.AddrInfoFlags.NUMERICHOST)
    with pytest.raises(ValueError, match="AddrInfoFlags"):
        cm.getaddrinfo(RXE, flags=1 << 20)  # type: ignore[arg-type]


# ------------------------------------------------------------ datagrams and multicast


@pytest.mark.parametrize("ip", [RXE, RXE6])
def test_datagrams_through_the_connection_manager(ip: str) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening(ip, cm.PortSpace.UDP))
        caller = resolved(ip, listener.src_port, cm.PortSpace.UDP)
        with end(caller, pvl.QPType.UD) as (left, memory):
            connecting = in_thread(left.connect, cm.ConnParam(private_data=bytes(range(180))))
            with end(listener.get_request(timeout=5), pvl.QPType.UD) as (right, right_memory):
                assert right.event.private_data == bytes(range(180))
                assert right.event.conn is None
                assert right.accept(cm.ConnParam(private_data=b"here")) is None
                event = connecting()
                assert event.private_data[:4] == b"here"
                assert event.ud.qp_num == right.qp.qp_num
                assert event.ud.qkey == right.qp.query().qkey != 0
                with left.qp.pd.create_ah(event.ud.ah_attr) as ah:
                    memory.view[:5] = b"datum"
                    wr = pvl.SendWR(
                        wr_id=1, opcode=pvl.WROpcode.SEND, sg_list=[memory[0:5]], send_flags=SEND,
                        ah=ah, remote_qpn=event.ud.qp_num, remote_qkey=event.ud.qkey,
                    )  # fmt: skip
                    left.qp.post_send(wr)
                    left.qp.send_cq.wait(5)[0].raise_for_status()
                    assert received(right.qp, right_memory)[40:] == b"datum"


def test_who_refuses_datagrams_says_why() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening(RXE, cm.PortSpace.UDP))
        caller = resolved(RXE, listener.src_port, cm.PortSpace.UDP)
        with end(caller, pvl.QPType.UD) as (left, _):
            connecting = in_thread(left.connect, timeout=5)
            with listener.get_request(timeout=5) as right:
                with pytest.raises(ValueError, match="at most 136"):
                    right.reject(bytes(137))
                right.reject(b"no datagrams today")
            with pytest.raises((pvl.CMUnreachableError, pvl.CMRejectedError)) as caught:
                connecting()
            assert caught.value.private_data.rstrip(b"\0") in (b"no datagrams today", b"")


@contextmanager
def member(group: str, **options: Any) -> Iterator[tuple[cm.CMID, pvl.MR, cm.CMGroup]]:
    cmid = cm.CMID(ps=cm.PortSpace.UDP)
    cmid.bind_addr((RXE, 0))
    cmid.resolve_addr((group, 0))
    with end(cmid, pvl.QPType.UD) as (cmid, memory), cmid.join_multicast((group, 0), **options) as joined:
        yield cmid, memory, joined


def multicast(cmid: cm.CMID, memory: pvl.MR, group: cm.CMGroup, data: bytes) -> None:
    assert group.ud is not None
    with cmid.qp.pd.create_ah(group.ud.ah_attr) as ah:
        memory.view[: len(data)] = data
        wr = pvl.SendWR(
            wr_id=1, opcode=pvl.WROpcode.SEND, sg_list=[memory[0 : len(data)]], send_flags=SEND,
            ah=ah, remote_qpn=group.ud.qp_num, remote_qkey=group.ud.qkey,
        )  # fmt: skip
        cmid.qp.post_send(wr)
        cmid.qp.send_cq.wait(5, n=1)[0].raise_for_status()


def test_every_member_of_a_group_receives_what_one_sends() -> None:
    with member("239.7.8.9") as sender, member("239.7.8.9") as first, member("239.7.8.10") as stranger:
        assert sender[2].ud.qp_num == pvl.MULTICAST_QPN
        assert sender[2].ud.ah_attr.grh.dgid == pvl.multicast_gid("239.7.8.9")
        multicast(*sender, b"to all")
        for cmid, memory, _ in (first, sender):  # the sender is a member, too
            assert received(cmid.qp, memory)[40:] == b"to all"
        assert stranger[0].qp.recv_cq.poll() == []
        first[2].close()
        multicast(*sender, b"one has left")
        assert received(sender[0].qp, sender[1])[40:] == b"one has left"
        assert first[0].qp.recv_cq.poll() == []


def test_a_send_only_member_does_not_receive() -> None:
    with member("239.7.8.11") as full, member("239.7.8.11", join_flags=cm.MCJoinFlags.SENDONLY_FULLMEMBER) as sender:
        multicast(*sender, b"hello")
        assert received(full[0].qp, full[1])[40:] == b"hello"
        assert sender[0].qp.recv_cq.poll() == []


def test_multicast_between_processes() -> None:
    code = """
cmid = cm.CMID(ps=cm.PortSpace.UDP)
cmid.bind_addr(("192.0.2.1", 0)); cmid.resolve_addr(("239.7.8.12", 0))
context = cmid.context; pd = context.alloc_pd(); cq = context.create_cq(8, context.create_comp_channel())
cap = pvl.QPCap(max_send_wr=1, max_recv_wr=4, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
qp = cmid.create_qp(pd, pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, qp_type=pvl.QPType.UD))
memory = pd.alloc(4096)
qp.post_recv(pvl.RecvWR(wr_id=1, sg_list=[memory[0:2048]]))
group = cmid.join_multicast(("239.7.8.12", 0))
print("joined", flush=True)
wc = cq.wait(10)[0]
print(bytes(memory.view[40 : wc.byte_len]), flush=True)
group.close(); cmid.close(); pd.close(); context.close()
"""
    head = "import pyverbs_lite as pvl\nfrom pyverbs_lite import cm\n"
    with subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        try:
            assert receiver.stdout.readline() == "joined\n"
            with member("239.7.8.12") as sender:
                multicast(*sender, b"across")
                assert receiver.stdout.readline() == "b'across'\n"
            assert receiver.wait(10) == 0
        finally:
            receiver.kill()


def test_a_group_is_joined_once_and_left_with_its_qp() -> None:
    with member("239.7.8.13") as (cmid, _, group):
        with pytest.raises(pvl.StateError, match=r"in the group 239.7.8.13 already"):
            cmid.join_multicast(("239.7.8.13", 0))
        with cmid.join_multicast(("239.7.8.14", 0)) as second:
            assert second.ud.ah_attr.grh.dgid == pvl.multicast_gid("239.7.8.14")
        cmid.qp.close()  # which the kernel refuses as long as it is attached
        assert group.closed


def test_groups_that_cannot_be_are_refused() -> None:
    with cm.CMID(ps=cm.PortSpace.UDP) as cmid:
        cmid.bind_addr((RXE6, 0))
        with pytest.raises(pvl.UnsupportedError, match="no IPv6 groups on RoCE v2"):
            cmid.join_multicast(("ff0e::7:8", 0))
    with cm.CMID() as cmid:
        cmid.bind_addr((SIW, 0))
        with pytest.raises(pvl.VerbsOSError):
            cmid.join_multicast(("239.7.8.15", 0))


def tool(*command: str) -> Callable[[], str]:
    """Start a C tool of rdmacm-utils; the returned function waits for its end and returns what it wrote."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def result() -> str:
        try:
            return process.communicate(timeout=10)[0]
        finally:
            process.kill()
            process.wait()

    return result


def test_the_c_tool_receives_our_multicast() -> None:
    """C's mckey as the receiver; as a sender it destroys its QP before its unsignaled sends have left."""
    receiver = tool("mckey", "-m", "239.7.8.16", "-b", RXE, "-C", "2", "-S", "100")
    deadline = time.monotonic() + 5
    while "EF07080F" not in (groups := Path("/proc/net/igmp").read_text()) and "100807EF" not in groups:
        assert time.monotonic() < deadline, "mckey did not join"
        time.sleep(0.01)
    with member("239.7.8.16") as sender:
        for data in (b"a" * 100, b"b" * 100):
            multicast(*sender, data)
        assert "data transfers complete" in receiver()

"""What the connection manager's events mean, and socket addresses as its structs: no device is needed for it."""

from __future__ import annotations

import errno
import pickle
import socket
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyverbs_lite as pvl
from pyverbs_lite import cm, cm_channel
from pyverbs_lite._cm.sockaddr import from_sockaddr, to_sockaddr
from pyverbs_lite.cm_events import error_of, event_of, write_conn_param
from pyverbs_lite.ffi import ffi, lib

E = cm.CMEventType


@pytest.mark.parametrize(
    ("event", "status", "cls", "text"),
    [
        (E.ADDR_ERROR, -errno.ENODEV, pvl.CMAddressError, "ADDR_ERROR ENODEV.*no RDMA device has or reaches"),
        (E.ADDR_ERROR, -errno.ETIMEDOUT, pvl.CMAddressError, "ETIMEDOUT.*no neighbour answered"),
        (E.ADDR_ERROR, -errno.EIO, pvl.CMAddressError, "EIO.*cannot be resolved"),
        (E.ROUTE_ERROR, -errno.ETIMEDOUT, pvl.CMRouteError, "subnet manager did not answer"),
        (E.ROUTE_ERROR, -errno.EINVAL, pvl.CMRouteError, "no path to the address"),
        (E.UNREACHABLE, -errno.ETIMEDOUT, pvl.CMUnreachableError, "did not answer in time"),
        (E.UNREACHABLE, 6, pvl.CMUnreachableError, r"UNREACHABLE \(reason 6\): .*does not answer"),
        (E.REJECTED, 8, pvl.CMRejectedError, r"REJECTED \(reason 8\): nobody listens on that port"),
        (E.REJECTED, 28, pvl.CMRejectedError, "the peer's program refused, and said b'why'"),
        (E.REJECTED, 10, pvl.CMRejectedError, "still holds a connection"),
        (E.REJECTED, 77, pvl.CMRejectedError, "reason 77.*refused"),
        (E.REJECTED, -errno.ECONNREFUSED, pvl.CMRejectedError, "ECONNREFUSED.*nobody listens"),
        (E.CONNECT_ERROR, -errno.EINVAL, pvl.CMConnectError, "CONNECT_ERROR EINVAL"),
        (E.DEVICE_REMOVAL, 0, pvl.CMDeviceRemovedError, "DEVICE_REMOVAL: the device was removed"),
        (E.MULTICAST_ERROR, -errno.EIO, pvl.CMMulticastError, "MULTICAST_ERROR EIO"),
        (E.ESTABLISHED, -errno.ECONNABORTED, pvl.CMConnectError, "ESTABLISHED ECONNABORTED"),
        (E.ADDR_RESOLVED, -errno.EIO, pvl.CMConnectError, "ADDR_RESOLVED EIO"),
    ],
)
def test_each_error_event_has_its_own_error(event: E, status: int, cls: type[pvl.CMError], text: str) -> None:
    given_event = cm.CMEvent(event=event, status=status, conn=cm.ConnParam(private_data=b"why\0\0\0"))
    with pytest.raises(cls, match=rf"^rdma_step: .*{text}") as caught:
        given_event.raise_for_error("rdma_step")
    error = caught.value
    assert type(error) is cls
    assert (error.event, error.status, error.operation) == (event, status, "rdma_step")
    assert error.private_data == b"why\0\0\0"
    assert isinstance(error, pvl.HandshakeError)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.status) == (cls, str(error), status)


@pytest.mark.parametrize(
    "event", [E.ADDR_RESOLVED, E.ROUTE_RESOLVED, E.CONNECT_REQUEST, E.CONNECT_RESPONSE, E.ESTABLISHED, E.MULTICAST_JOIN]
)
def test_good_news_is_no_error(event: E) -> None:
    assert error_of(cm.CMEvent(event=event)) is None


@pytest.mark.parametrize("event", [E.ADDR_CHANGE, E.TIMEWAIT_EXIT])
def test_neutral_news_is_no_error(event: E) -> None:
    assert error_of(cm.CMEvent(event=event)) is None
    assert error_of(cm.CMEvent(event=E.TIMEWAIT_EXIT, status=-errno.EIO)) is None


def test_a_disconnect_is_that_the_peer_has_closed() -> None:
    error = error_of(cm.CMEvent(event=E.DISCONNECTED, status=-errno.ECONNRESET), "rping")
    assert isinstance(error, pvl.PeerClosedError)
    assert error.operation == "rping"


def test_events_are_values() -> None:
    event = cm.CMEvent(event=E.REJECTED, status=8, conn=cm.ConnParam(private_data=b"x"))
    assert (event.name, event.private_data, event.id) == ("REJECTED", b"x", None)
    with pytest.raises(AttributeError):
        event.status = 9  # type: ignore[misc]
    unknown = cm.CMEvent(event=99)  # type: ignore[arg-type]
    assert unknown.name == "99"
    assert error_of(unknown) is None


def test_an_event_is_copied_with_all_its_members() -> None:
    raw = ffi.new("struct pvl_cm_event *")
    raw.event, raw.status = E.CONNECT_REQUEST, -5
    raw.responder_resources, raw.initiator_depth, raw.flow_control = 3, 4, 1
    raw.retry_count, raw.rnr_retry_count, raw.srq, raw.qp_num = 5, 6, 1, 0xABCDEF
    raw.private_data_len = 5
    raw.private_data[0:5] = list(b"hello")
    event = event_of(raw, None, None, None)
    assert (event.event, event.status, event.ud) == (E.CONNECT_REQUEST, -5, None)
    assert event.conn == cm.ConnParam(
        private_data=b"hello",
        responder_resources=3,
        initiator_depth=4,
        flow_control=1,
        retry_count=5,
        rnr_retry_count=6,
        srq=1,
        qp_num=0xABCDEF,
    )
    raw.is_ud, raw.qkey = 1, 0x01234567
    raw.ah_attr.port_num, raw.ah_attr.dlid = 2, 0x4711
    event = event_of(raw, None, None, None)
    assert event.conn is None
    assert event.ud == cm.UDParam(
        private_data=b"hello", ah_attr=pvl.AHAttr(port_num=2, dlid=0x4711), qp_num=0xABCDEF, qkey=0x01234567
    )
    raw.event = E.ADDR_RESOLVED
    event = event_of(raw, None, None, None)
    assert (event.conn, event.ud, event.private_data) == (None, None, b"")


def test_parameters_reach_the_struct() -> None:
    param = cm.ConnParam(
        private_data=memoryview(b"abc"), responder_resources=1, initiator_depth=2, retry_count=3, rnr_retry_count=4
    )
    raw, kept = write_conn_param(param)
    assert bytes(ffi.buffer(raw.private_data, raw.private_data_len)) == b"abc"
    assert kept is not None
    assert (raw.responder_resources, raw.initiator_depth, raw.retry_count, raw.rnr_retry_count) == (1, 2, 3, 4)
    assert (cm.ConnParam().responder_resources, cm.ConnParam().initiator_depth) == (
        lib.RDMA_MAX_RESP_RES,
        lib.RDMA_MAX_INIT_DEPTH,
    )


# ------------------------------------------------------------ addresses


def struct_bytes(raw: object) -> bytes:
    return bytes(ffi.buffer(raw))  # type: ignore[arg-type]


def test_an_ipv4_address_is_what_the_kernel_reads() -> None:
    raw = to_sockaddr(("10.1.2.3", 0x1234))
    assert struct_bytes(raw)[:8] == socket.AF_INET.to_bytes(2, "little") + bytes([0x12, 0x34, 10, 1, 2, 3])
    assert from_sockaddr(ffi.cast("struct sockaddr *", raw)) == ("10.1.2.3", 0x1234)
    assert from_sockaddr(ffi.cast("struct sockaddr *", to_sockaddr(("", 7)))) == ("0.0.0.0", 7)


def test_an_ipv6_address_keeps_flow_and_scope() -> None:
    raw = to_sockaddr(("fe80::1:2", 0x1234, 0x54321, 7))
    data = struct_bytes(raw)
    assert data[2:8] == bytes([0x12, 0x34, 0, 5, 0x43, 0x21])
    assert data[8:24] == socket.inet_pton(socket.AF_INET6, "fe80::1:2")
    assert int.from_bytes(data[24:28], "little") == 7
    assert from_sockaddr(ffi.cast("struct sockaddr *", raw)) == ("fe80::1:2", 0x1234, 0x54321, 7)


def test_a_zone_is_a_scope() -> None:
    name, index = socket.if_nameindex()[0][1], socket.if_nameindex()[0][0]
    for zone in (name, str(index)):
        raw = to_sockaddr((f"fe80::9%{zone}", 5))
        assert from_sockaddr(ffi.cast("struct sockaddr *", raw)) == ("fe80::9", 5, 0, index)


@given(st.ip_addresses(v=6), st.integers(0, 0xFFFF), st.integers(0, (1 << 20) - 1), st.integers(0, (1 << 32) - 1))
def test_addresses_survive(ip: object, port: int, flow: int, scope: int) -> None:
    address = (str(ip).partition("%")[0], port, flow, scope)
    assert from_sockaddr(ffi.cast("struct sockaddr *", to_sockaddr(address))) == address


def test_other_families_are_no_address() -> None:
    raw = ffi.new("struct sockaddr_storage *")
    raw.ss_family = 27
    assert from_sockaddr(ffi.cast("struct sockaddr *", raw)) is None
    assert from_sockaddr(ffi.NULL) is None


@pytest.mark.parametrize(
    ("address", "error", "text"),
    [
        ("10.0.0.1", TypeError, "must be"),
        (("10.0.0.1",), TypeError, "must be"),
        ((b"10.0.0.1", 1), TypeError, "must be"),
        (("10.0.0.1", 65536), ValueError, "port of address"),
        (("10.0.0.1", "1"), TypeError, "port of address"),
        (("10.0.0.1", 1, 0, 0), ValueError, "IPv4 address is"),
        (("server.example", 1), ValueError, "no IP address; for a name"),
        (("::1", 1, 1 << 20, 0), ValueError, "flowinfo"),
        (("::1", 1, 0, 1 << 32), ValueError, "scope_id"),
        (("fe80::1%no-such-if", 1), ValueError, "no network interface is named"),
    ],
)
def test_what_is_no_address_is_refused(address: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        to_sockaddr(address)  # type: ignore[arg-type]


# ------------------------------------------------------------ without a connection manager


def test_a_machine_without_it_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> object:
        ffi.errno = errno.ENODEV
        return ffi.NULL

    monkeypatch.setattr(cm_channel, "lib", SimpleNamespace(rdma_create_event_channel=refuse))
    for make in (cm.EventChannel, cm.CMID, lambda: cm.listen("127.0.0.1", 0), lambda: cm.connect("127.0.0.1", 7)):
        with pytest.raises(pvl.VerbsOSError, match=r"rdma_create_event_channel failed: ENODEV.*rdma_ucm"):
            make()

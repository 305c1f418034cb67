"""The control channel through TLS, between two real sockets and no device."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import Any

import pytest
from certificates import dialling, serving
from support import endpoint, in_thread

import pyverbs_lite as pvl
from pyverbs_lite._base.args import Deadline
from pyverbs_lite._connection.settings import Settings
from pyverbs_lite._control.control import Control, Peer
from pyverbs_lite._control.tls import Tls
from pyverbs_lite.wire import HelloReceived, ReadyReceived

pytestmark = pytest.mark.timeout(30)

ENDPOINT = endpoint(0x11)
MANY = 3000


def buffer(name: str) -> pvl.RemoteBuffer:
    return pvl.RemoteBuffer(0x1000, 7, 64, name, pvl.AccessFlags.REMOTE_READ)


def side(sock: socket.socket, context: ssl.SSLContext | None, host: str | None, **options: Any) -> Control:
    control = Control.of(sock, Settings(ssl_context=context, **options), host)
    control.accepting = host is None
    return control


def shake(control: Control, *, many: int = 0, timeout: float = 10.0) -> Peer:
    """Say everything at once, and hear what the other says; who accepts hears first."""
    deadline, peer = Deadline(timeout), Peer(control)
    control.flush(deadline)
    if control.accepting:
        control.expect(HelloReceived, deadline, peer.note)
    control.channel.hello(ENDPOINT)
    for index in range(many):
        control.channel.buffer(buffer(f"{control.local_address} secret name {index}"))
    control.channel.ready()
    control.flush(deadline)
    if not control.accepting:
        control.expect(HelloReceived, deadline, peer.note)
    control.expect(ReadyReceived, deadline, peer.note)
    return peer


def failing(control: Control, timeout: float = 10.0) -> pvl.HandshakeError:
    """Try that, and return what comes of it; the control connection is closed, with time for an alert to be read."""
    try:
        shake(control, timeout=timeout)
    except pvl.HandshakeError as error:
        return error
    else:
        raise AssertionError("nothing was refused")
    finally:
        control.close(0.3)


def both(left: Control, right: Control) -> tuple[pvl.HandshakeError, pvl.HandshakeError]:
    theirs = in_thread(failing, right)
    return failing(left), theirs()


# ------------------------------------------------------------ what goes well


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("many", [0, MANY])
def test_both_sides_talk(sockets, version, many):
    context = dialling()
    context.maximum_version = version
    left, right = side(sockets[0], context, "127.0.0.1"), side(sockets[1], serving(), None)
    theirs = in_thread(shake, right, many=many)
    mine, yours = shake(left, many=many), theirs()
    assert len(mine.buffers) == len(yours.buffers) == many
    mine.say(lambda channel: channel.buffer(buffer("later")))
    left.flush(Deadline(5))
    limit = time.monotonic() + 5
    while "later" not in yours.buffers and time.monotonic() < limit:
        assert yours.read() is None
    mine.say(lambda channel: channel.goodbye())
    left.flush(Deadline(5))
    left.close()
    while yours.read() is None and time.monotonic() < limit:
        pass
    assert "closed the connection" in str(yours.read())
    right.close()


@pytest.mark.parametrize("tidy", [False, True])
def test_a_peer_that_is_gone_without_a_goodbye_shows(sockets, tidy):
    left, right = side(sockets[0], dialling(), "127.0.0.1"), side(sockets[1], serving(), None)
    theirs = in_thread(shake, right)
    mine, yours = shake(left), theirs()
    if tidy:  # TLS's own end is no goodbye
        with pytest.raises(ssl.SSLWantReadError):
            left._tls._object.unwrap()
        left.flush(Deadline(1))
    else:
        left.close()
    limit = time.monotonic() + 5
    while yours.read() is None and time.monotonic() < limit:
        pass
    assert "its process is gone" in str(yours.read())
    assert isinstance(mine.read(), pvl.PeerClosedError) or not left.socket.close()
    right.close()


def test_nothing_can_be_read_on_the_way(sockets):
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        near = socket.create_connection(between.getsockname())
        tap, _ = between.accept()

        def pump(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)

        for pair in ((tap, sockets[0]), (sockets[0], tap)):
            threading.Thread(target=pump, args=pair, daemon=True).start()
        left, right = side(near, dialling(), "localhost"), side(sockets[1], serving(), None)
        theirs = in_thread(shake, right, many=3)
        shake(left, many=3)
        theirs()
        assert len(seen) > 1000
        assert b"secret name" not in seen
        tap.shutdown(socket.SHUT_RDWR)
        sockets[0].shutdown(socket.SHUT_RDWR)
        left.close()
        right.close()
        tap.close()


def test_a_certificate_of_the_side_that_connects(sockets):
    left = side(sockets[0], dialling(show="the right one"), "127.0.0.1")
    right = side(sockets[1], serving(demand=True), None)
    theirs = in_thread(shake, right)
    shake(left)
    theirs()
    left.close()
    right.close()


def test_the_name_may_be_another_than_the_address(sockets):
    left = side(sockets[0], dialling(), "127.0.0.1", server_hostname="storage.example.org")
    right = side(sockets[1], serving(names=("storage.example.org",)), None)
    theirs = in_thread(shake, right)
    shake(left)
    theirs()
    left.close()
    right.close()


# ------------------------------------------------------------ what does not


@pytest.mark.parametrize(
    ("left", "right", "mine", "theirs"),
    [
        (
            {"trust": "another"},
            {},
            "not to be trusted: unable to get|not to be trusted: self",
            "does not trust this side",
        ),
        ({}, {"names": ("elsewhere.example.org",)}, "IP address mismatch", "does not trust this side"),
        (
            {},
            {"demand": True},
            "does not trust this side's certificate|or it demands a certificate",
            "showed no certificate",
        ),
        ({"show": "another"}, {"demand": True}, "does not trust this side's certificate", "not to be trusted"),
    ],
)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_certificate_that_is_no_good_is_an_authentication_error(sockets, left, right, mine, theirs, version):
    context = dialling(**left)
    context.maximum_version = version
    accepting = serving(**right)
    ours, others = both(side(sockets[0], context, "127.0.0.1"), side(sockets[1], accepting, None))
    for error, text in ((ours, mine), (others, theirs)):
        assert isinstance(error, pvl.HandshakeError)
        assert any(one in str(error) for one in text.split("|")), error
    # Only with TLS 1.2, and for the side that shows no certificate, that is not plain from what it hears.
    assert isinstance(others, pvl.AuthenticationError)
    assert isinstance(ours, pvl.AuthenticationError) or "or it demands a certificate" in str(ours)
    assert isinstance(others.__cause__, ssl.SSLError)


def test_tls_on_the_connecting_side_only(sockets):
    ours, others = both(side(sockets[0], dialling(), "127.0.0.1"), side(sockets[1], None, None))
    assert "within the TLS handshake: is ssl_context= given on both sides?" in str(ours)
    assert isinstance(others, pvl.PeerProtocolError)
    assert "does only one side use TLS?" in str(others)


def test_tls_on_the_accepting_side_only(sockets):
    ours, others = both(side(sockets[0], None, "127.0.0.1"), side(sockets[1], serving(), None))
    assert "it looks like a TLS alert (does only one side use TLS?)" in str(ours)
    assert isinstance(others, pvl.PeerProtocolError)
    assert "does not speak TLS: is ssl_context= given on both sides?" in str(others)


def test_no_version_in_common(sockets):
    old, new = dialling(), serving()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    new.minimum_version = ssl.TLSVersion.TLSv1_3
    for error in both(side(sockets[0], old, "127.0.0.1"), side(sockets[1], new, None)):
        assert type(error) is pvl.HandshakeError
        assert "TLS with the peer failed" in str(error)


@pytest.mark.parametrize("host", ["127.0.0.1", None])
def test_a_peer_that_says_nothing_costs_no_more_than_the_timeout(sockets, host):
    start = time.monotonic()
    control = side(sockets[0], dialling() if host else serving(), host)
    with pytest.raises(pvl.HandshakeTimeout):
        shake(control, timeout=0.3)
    assert time.monotonic() - start < 5
    control.close()


@pytest.mark.parametrize("host", ["127.0.0.1", None])
@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(100), bytes(1000), b"\x80"]
)
def test_garbage_is_an_error_and_no_more(sockets, garbage, host):
    sockets[1].sendall(garbage)
    sockets[1].shutdown(socket.SHUT_WR)
    assert isinstance(failing(side(sockets[0], dialling() if host else serving(), host)), pvl.HandshakeError)


def test_a_byte_that_was_changed_is_an_error(sockets):
    left, right = side(sockets[0], dialling(), "127.0.0.1"), side(sockets[1], serving(), None)
    theirs = in_thread(shake, right)
    shake(left)
    yours = theirs()
    left.channel.buffer(buffer("x"))
    left._tls.send(left.channel.data_to_send())
    record = bytearray(left._tls.data_to_send())
    record[-1] ^= 1
    sockets[0].sendall(record)
    limit = time.monotonic() + 5
    while yours.read() is None and time.monotonic() < limit:
        pass
    assert "TLS with the peer failed" in str(yours.read())
    left.close()
    right.close()


# ------------------------------------------------------------ the caller


def test_a_context_for_the_other_side_is_refused():
    with pytest.raises(ValueError, match="made for the other side: for one that accepts use .*CLIENT_AUTH"):
        pvl.listen("127.0.0.1", 0, ssl_context=dialling())
    with pytest.raises(ValueError, match="made for the other side: for one that connects use .*SERVER_AUTH"):
        pvl.connect("127.0.0.1", 1, ssl_context=serving())


@pytest.mark.parametrize("taker", [pvl.connect, pvl.listen])
def test_what_is_no_context_is_refused(taker):
    with pytest.raises(TypeError, match=r"ssl_context must be an ssl\.SSLContext, not True"):
        taker("127.0.0.1", 1, ssl_context=True)


def test_a_name_without_tls_or_for_a_listener_is_refused():
    with pytest.raises(ValueError, match="server_hostname .*without ssl_context"):
        pvl.connect("127.0.0.1", 1, server_hostname="x")
    with pytest.raises(ValueError, match="server_hostname is for the side that connects"):
        pvl.listen("127.0.0.1", 0, server_hostname="x", ssl_context=serving())
    with pytest.raises(TypeError, match="server_hostname"):
        pvl.connect("127.0.0.1", 1, server_hostname=5, ssl_context=dialling())
    with pytest.raises(ValueError, match="server_hostname"):
        pvl.connect("127.0.0.1", 1, server_hostname=".x", ssl_context=dialling())


@pytest.mark.parametrize("taker", [pvl.cm.connect, pvl.cm.listen])
def test_librdmacm_has_nothing_to_protect(taker):
    with pytest.raises(ValueError, match="librdmacm has none: use authkey="):
        taker("127.0.0.1", 1, ssl_context=dialling())


def test_a_session_that_waits_says_so():
    tls = Tls(dialling(), server_side=False, server_hostname="x")
    assert not tls.waiting
    tls.send(b"early")
    assert tls.waiting
    assert tls.data_to_send()[:2] == b"\x16\x03"


def test_a_bad_name_leaves_no_socket_open(sockets):
    with pytest.raises(ValueError, match="server_hostname"):
        side(sockets[0], dialling(), ".bad")
    assert sockets[0].fileno() < 0

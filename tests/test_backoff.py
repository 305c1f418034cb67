"""The pauses between attempts, and which errors are worth another."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
import time

import pytest

import pyverbs_lite as pvl
from pyverbs_lite._connection.dial import Attempt, passes
from pyverbs_lite.wire import RefuseCode


def test_pauses_double_up_to_the_longest():
    pauses = pvl.Backoff(first=0.5, most=3, jitter=0).pauses()
    assert list(itertools.islice(pauses, 5)) == [0.5, 1, 2, 3, 3]


def test_jitter_keeps_them_near_and_apart():
    backoff = pvl.Backoff(first=1, most=1, jitter=0.25)
    pauses = list(itertools.islice(backoff.pauses(), 200))
    assert all(0.75 <= pause <= 1.25 for pause in pauses)
    assert max(pauses) - min(pauses) > 0.2


def test_a_total_may_have_no_end():
    assert pvl.Backoff(total=None).total is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"first": 0}, ValueError),
        ({"first": 2, "most": 1}, ValueError),
        ({"jitter": 1.5}, ValueError),
        ({"total": -1}, ValueError),
        ({"first": "1"}, TypeError),
        ({"jitter": True}, TypeError),
        ({"most": None}, TypeError),
        ({"first": float("nan")}, ValueError),
    ],
)
def test_what_is_no_backoff_is_refused(options, error):
    with pytest.raises(error, match=f"{list(options)[-1]} of a Backoff|first of a Backoff"):
        pvl.Backoff(**options)


def refused(code: RefuseCode) -> pvl.HandshakeError:
    error = pvl.AuthenticationError("") if code is RefuseCode.AUTHENTICATION else pvl.HandshakeError("")
    error.code = code
    return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        ConnectionResetError(),
        OSError(errno.EHOSTUNREACH, "no route"),
        OSError(errno.ENETUNREACH, "no network"),
        TimeoutError(),
        socket.gaierror(socket.EAI_AGAIN, "not now"),
        pvl.HandshakeTimeout("late"),
        pvl.PeerClosedError("gone"),
        refused(RefuseCode.BUSY),
        refused(RefuseCode.RESOURCES),
    ],
)
def test_what_passes_is_tried_again(error):
    assert passes(error)


@pytest.mark.parametrize(
    "error",
    [
        pvl.AuthenticationError("key"),
        pvl.PeerProtocolError("HTTP"),
        pvl.HandshakeError("one side is InfiniBand"),
        pvl.RouteError(errno.EHOSTUNREACH, "to_rtr", "no path"),
        pvl.VerbsOSError(errno.ENOMEM, "reg_mr", "memory"),
        refused(RefuseCode.MISMATCH),
        refused(RefuseCode.AUTHENTICATION),
        refused(RefuseCode.PROTOCOL),
        socket.gaierror(socket.EAI_NONAME, "nobody of that name"),
        OSError(errno.EMFILE, "descriptors"),
        PermissionError(),
        pvl.DeviceNotFoundError("none"),
    ],
)
def test_what_does_not_pass_is_not(error):
    assert not passes(error)


def test_a_pause_can_be_put_an_end_to():
    attempt = Attempt()
    threading.Timer(0.05, attempt.abort).start()
    start = time.monotonic()
    with pytest.raises(pvl.ClosedError, match="given up"):
        attempt.pause(30)
    assert time.monotonic() - start < 10


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_it_is_given_up_in_the_end():
    start = time.monotonic()
    with pytest.raises(pvl.HandshakeTimeout, match=r"within 0.3 s \(\d+ attempts\); the last: .*refused") as caught:
        pvl.connect("127.0.0.1", free_port(), reconnect=pvl.Backoff(first=0.05, total=0.3))
    assert time.monotonic() - start < 10
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_once_is_once_without_it():
    with pytest.raises(ConnectionRefusedError):
        pvl.connect("127.0.0.1", free_port())


def test_only_who_connects_tries_again():
    with pytest.raises(ValueError, match="reconnect is for the side that connects"):
        pvl.listen("127.0.0.1", 0, reconnect=pvl.Backoff())
    with pytest.raises(TypeError, match="reconnect must be a Backoff"):
        pvl.connect("127.0.0.1", 1, reconnect=True)

"""A key on both sides, on one, and another: over TCP, over librdmacm, and in asyncio."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import connected, in_thread, nothing_left

import pyverbs_lite as pvl
from pyverbs_lite import wire

pytestmark = pytest.mark.rdma

KEY = b"\x00of all who may\xff"
DIFFERENT, ONLY_ONE = "different keys: check that authkey=", "only one of the two sides was given an authkey"
#: connect, listen, and an address of the device that both know.
WAYS: dict[str, tuple[Callable[..., pvl.Connection], Callable[..., Any], str]] = {
    "tcp": (pvl.connect, pvl.listen, "127.0.0.1"),
    "rxe": (pvl.cm.connect, pvl.cm.listen, "192.0.2.1"),
    "siw": (pvl.cm.connect, pvl.cm.listen, "198.51.100.1"),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[Callable[..., pvl.Connection], Callable[..., Any], str]:
    return WAYS[request.param]


@pytest.fixture
def no_leaks() -> Iterator[None]:
    with connected():
        pass
    for each in WAYS.values():  # librdmacm opens a device once and for all
        for conn in attempt(each, None, None):
            conn.close()
    with nothing_left():
        yield


def attempt(
    way: tuple[Callable[..., pvl.Connection], Callable[..., Any], str],
    left: bytes | str | None,
    right: bytes | str | None,
) -> tuple[Any, Any]:
    """Try to connect; return what each side got, a connection or an error."""
    connect, listen, host = way

    def outcome(call: Callable[..., pvl.Connection], *args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except pvl.VerbsError as error:
            return error

    buffers = {"seen": bytearray(8)}
    with listen(host, 0, authkey=right, buffers=buffers) as listener:
        accepted = in_thread(outcome, listener.accept, 10)
        return outcome(connect, host, listener.port, authkey=left, buffers=buffers), accepted()


@pytest.mark.parametrize(("left", "right"), [(KEY, KEY), ("schlüssel", "schlüssel".encode())])
def test_the_same_key_on_both_sides(way, left, right, no_leaks):
    one, other = attempt(way, left, right)
    with one, other:
        one.send(b"from one")
        assert other.recv(timeout=5) == b"from one"
        other.send(b"from the other")
        assert one.recv(timeout=5) == b"from the other"
        assert list(one.remote) == list(other.remote) == ["seen"]
        with one.register(bytearray(100), name="later"):
            limit = time.monotonic() + 5
            while "later" not in other.remote and time.monotonic() < limit:
                time.sleep(0.001)
            assert other.read(other.remote["later"]) == bytes(100)


@pytest.mark.parametrize(
    ("left", "right", "why"),
    [(KEY, KEY + b"\n", DIFFERENT), (b"a", b"b", DIFFERENT), (None, KEY, ONLY_ONE), (KEY, None, ONLY_ONE)],
)
def test_anything_else_is_told_on_both_sides(way, left, right, why, no_leaks):
    for error in attempt(way, left, right):
        assert isinstance(error, pvl.AuthenticationError)
        assert why in str(error)
        assert repr(KEY) not in str(error)


def test_a_listener_goes_on_after_who_has_no_key(no_leaks):
    with pvl.listen("127.0.0.1", 0, authkey=KEY) as listener:
        for key in (None, b"wrong"):
            accepted = in_thread(listener.accept, 10)
            with pytest.raises(pvl.AuthenticationError):
                pvl.connect("127.0.0.1", listener.port, authkey=key)
            with pytest.raises(pvl.AuthenticationError):
                accepted()
        accepted = in_thread(listener.accept, 10)
        with pvl.connect("127.0.0.1", listener.port, authkey=KEY) as left, accepted() as right:
            left.send(b"good")
            assert right.recv(timeout=5) == b"good"


def test_nothing_is_made_for_who_has_not_proved_the_key(monkeypatch):
    made = []
    monkeypatch.setattr(pvl.PD, "__init__", lambda *_: made.append(1))
    for error in attempt(WAYS["tcp"], KEY, b"other"):
        assert isinstance(error, pvl.AuthenticationError)
    assert not made


def test_who_listens_says_nothing_before_it_was_spoken_to():
    with pvl.listen("127.0.0.1", 0, authkey=KEY, timeout=0.5) as listener:
        accepted = in_thread(listener.accept, 10)
        with socket.create_connection((listener.host, listener.port)) as sock:
            sock.sendall(wire.preface())
            with pytest.raises(pvl.HandshakeTimeout, match="CHALLENGE"):
                accepted()
            said = b""
            while data := sock.recv(1000):
                said += data
        assert said.startswith(wire.MAGIC)  # the refusal, and nothing of the key
        assert len(said) < 300


class Between:
    """Somebody between two sides, who may change what goes through."""

    def __init__(self, port: int, change: Callable[[bytes], bytes]) -> None:
        self._change = change
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._far = port
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection(("127.0.0.1", self._far))
        pumps = [
            threading.Thread(target=self._pump, args=pair, daemon=True)
            for pair in ((near, far, self._change), (far, near, bytes))
        ]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        near.close()
        far.close()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(change(data))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def __enter__(self) -> Between:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._threads[0].join(5)


@pytest.mark.parametrize("keyed", [True, False])
def test_nobody_between_the_sides_can_put_in_another_rkey(keyed):
    """Without a key the lie is believed; that is what the key is for."""

    def change(data: bytes) -> bytes:
        at = data.find(b"secret")
        return data[: at - 8] + bytes([data[at - 8] ^ 1]) + data[at - 7 :] if at > 0 else data

    key = KEY if keyed else None
    with pvl.listen("127.0.0.1", 0, authkey=key) as listener, Between(listener.port, change) as between:
        accepted = in_thread(listener.accept, 10)
        dial = in_thread(pvl.connect, "127.0.0.1", between.port, authkey=key, buffers={"secret": bytearray(8)})
        if keyed:
            with pytest.raises(pvl.AuthenticationError, match="changed on its way"):
                accepted()
            with pytest.raises(pvl.AuthenticationError, match="changed on its way"):
                dial()
        else:
            with dial() as left, accepted() as right:
                assert right.remote["secret"].length == 8
                assert left.info.remote_qp_num == right.info.local_qp_num


def test_somebody_between_who_changes_nothing_is_not_noticed():
    with pvl.listen("127.0.0.1", 0, authkey=KEY) as listener, Between(listener.port, bytes) as between:
        accepted = in_thread(listener.accept, 10)
        with pvl.connect("127.0.0.1", between.port, authkey=KEY) as left, accepted() as right:
            left.send(b"through")
            assert right.recv(timeout=5) == b"through"


@pytest.mark.parametrize("cm", [False, True])
def test_in_asyncio(cm):
    listen, connect = (pvl.aio.cm_listen, pvl.aio.cm_connect) if cm else (pvl.aio.listen, pvl.aio.connect)
    host = "192.0.2.1"

    async def run() -> None:
        async with listen(host, 0, authkey=KEY) as listener:
            for key in (b"wrong", None):
                both = await asyncio.gather(
                    listener.accept(10), connect(host, listener.port, authkey=key), return_exceptions=True
                )
                assert [type(one) for one in both] == [pvl.AuthenticationError] * 2
            right, left = await asyncio.gather(listener.accept(10), _await(connect(host, listener.port, authkey=KEY)))
            async with left, right:
                await left.send(b"good")
                assert await right.recv(timeout=5) == b"good"

    async def _await(opening: Any) -> pvl.aio.Connection:
        return await opening

    asyncio.run(run())


@pytest.mark.parametrize("taker", [pvl.connect, pvl.listen, pvl.cm.connect, pvl.cm.listen])
def test_what_is_no_key_is_refused_at_once(taker):
    with pytest.raises(ValueError, match="authkey is empty"):
        taker("127.0.0.1", 1, authkey="")
    with pytest.raises(TypeError, match="authkey must be bytes"):
        taker("127.0.0.1", 1, authkey=5)

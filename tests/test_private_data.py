"""The handshake's records as private data: what fits, and that nothing of a peer's is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import endpoint

import pyverbs_lite as pvl
from pyverbs_lite import wire
from pyverbs_lite._cm.private_data import pack_hello, pack_refusal, read_hello, read_refusal

ENDPOINT = endpoint(0x00ABCDEF, max_rd_atomic=3, max_dest_rd_atomic=4, recv_depth=5)


def packed() -> bytes:
    channel = wire.Channel()
    channel.hello(ENDPOINT)
    return pack_hello(channel.data_to_send())


def test_the_record_fits_to_the_byte_where_room_is_least() -> None:
    data = packed()
    assert len(data) == 56
    assert data[:4] == b"\x89H\x01\x01"
    assert data[28:32] == bytes.fromhex("00abcdef")


@pytest.mark.parametrize("filling", [b"", bytes(140), b"whatever"])
def test_what_was_packed_is_what_is_read(filling: bytes) -> None:
    channel = wire.Channel()
    (event,) = channel.receive_data(read_hello(packed() + filling))
    assert event == wire.HelloReceived(ENDPOINT)
    assert channel.version == wire.VERSION
    channel.hello(ENDPOINT)
    channel.ready()
    (ready,) = channel.receive_data(wire.frame_header(wire.FrameType.READY, 0))  # the stream goes on behind it
    assert ready == wire.ReadyReceived()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "are empty"),
        (bytes(56), "are empty"),
        (b"\x89H", r"begin with b'\\x89H'"),
        (packed()[:-1], "begin with"),
        (b"GET /index.html HTTP/1.1" + bytes(32), "begin with b'GET /index.html '"),
        (b"\x89R" + packed()[2:], "begin with"),
    ],
)
def test_a_stranger_is_told_apart(data: bytes, text: str) -> None:
    with pytest.raises(pvl.PeerProtocolError, match=text):
        read_hello(data)


@given(st.binary(max_size=300))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    try:
        events = wire.Channel().receive_data(read_hello(b"\x89H" + data))
    except pvl.PeerProtocolError:
        return
    assert [type(event) for event in events] == [wire.HelloReceived]


@pytest.mark.parametrize("code", list(wire.RefuseCode))
def test_a_refusal_says_why(code: wire.RefuseCode) -> None:
    said = read_refusal(pack_refusal(code, "no room for you") + bytes(100))
    assert said == wire.Refused(code, "no room for you")


def test_a_long_reason_is_cut_between_characters() -> None:
    data = pack_refusal(wire.RefuseCode.OTHER, "é" * 100)
    assert len(data) == 148
    assert read_refusal(data) == wire.Refused(wire.RefuseCode.OTHER, "é" * 72)


@pytest.mark.parametrize("data", [b"", b"\x89", b"no", bytes(148), packed()])
def test_other_private_data_are_no_refusal(data: bytes) -> None:
    assert read_refusal(data) is None


def test_a_refusal_cannot_steer_a_terminal() -> None:
    assert read_refusal(b"\x89R\0\x05a\x1b[2Jb") == wire.Refused(wire.RefuseCode.ROUTE, "a [2Jb")
    assert read_refusal(b"\x89R") == wire.Refused(wire.RefuseCode.OTHER, "")

"""The handshake and control channel as bytes; no device, and sockets only where they cut the bytes up."""

import itertools
import re
import socket
import struct
import threading
import tracemalloc
from dataclasses import dataclass, replace
from ipaddress import IPv6Address
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pyverbs_lite import wire
from pyverbs_lite.endpoint import Endpoint
from pyverbs_lite.enums import MTU, AccessFlags, LinkLayer
from pyverbs_lite.errors import PeerClosedError, PeerProtocolError, StateError
from pyverbs_lite.remote import RemoteBuffer
from pyverbs_lite.wire import (
    BufferAdded,
    BufferWithdrawn,
    Channel,
    DomainNamed,
    GoodbyeReceived,
    HelloReceived,
    ReadyReceived,
    RefuseCode,
    Refused,
)

READ, WRITE, ATOMIC = AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_ATOMIC
ENDPOINT = Endpoint(
    qp_num=0x00ABCDEF,
    psn=0x00FEDCBA,
    lid=0x1234,
    gid=IPv6Address("fe80::1122:3344:5566:7788"),
    link_layer=LinkLayer.ETHERNET,
    mtu=MTU.MTU_1024,
    max_rd_atomic=0x10,
    max_dest_rd_atomic=0x07,
    max_message_size=0x00020304,
    recv_depth=0x00000506,
    credit_depth=0x2A,
    max_msg_sz=0x80000000,
    nonce=0x1020304050607080,
)
KV = RemoteBuffer(0x0102030405060708, 0xA1B2C3D4, 0x1112131415161718, "kv", READ)

PREFACE_BYTES = bytes.fromhex("8950564c0d0a1a0a 0001 0001")
HELLO_PAYLOAD = bytes.fromhex(
    "1020304050607080"  # nonce
    "fe80000000000000 1122334455667788"  # gid
    "00abcdef"  # qp_num
    "00fedcba"  # psn
    "1234"  # lid
    "0400"  # mtu in bytes
    "02"  # link_layer
    "10"  # max_rd_atomic
    "07"  # max_dest_rd_atomic
    "2a"  # credit_depth
    "00020304"  # max_message_size
    "00000506"  # recv_depth
    "80000000"  # max_msg_sz
)
DOMAIN_PAYLOAD = bytes.fromhex("d1d2d3d4d5d6d7d8")
BUFFER_PAYLOAD = bytes.fromhex("0102030405060708 1112131415161718 a1b2c3d4 00000001") + b"kv"


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, length: int | None = None) -> bytes:
    return struct.pack("!BBHI", kind, flags, 0, len(payload) if length is None else length) + payload


def put(payload: bytes, layout: str, field: str, value: int | bytes) -> bytes:
    """Overwrite one field of a payload, by the documented offset."""
    row = next(row for row in DOCUMENTED[layout] if row[2] == field)
    start, size = int(row[0]), int(row[1])
    raw = value if isinstance(value, bytes) else value.to_bytes(size, "big")
    return payload[:start] + raw + payload[start + size :]


HELLO = PREFACE_BYTES + frame(1, HELLO_PAYLOAD)
TALK = b"".join(
    [
        HELLO,
        frame(9, DOMAIN_PAYLOAD, flags=1),
        frame(3, BUFFER_PAYLOAD),
        frame(200, b"from a later version", flags=1),
        frame(2),
        frame(4, b"kv"),
        frame(3, BUFFER_PAYLOAD),
        frame(5),
    ]
)
EVENTS = [
    HelloReceived(ENDPOINT),
    DomainNamed(0xD1D2D3D4D5D6D7D8),
    BufferAdded(KV),
    ReadyReceived(),
    BufferWithdrawn("kv"),
    BufferAdded(KV),
    GoodbyeReceived(),
]


def hear(data: bytes, channel: Channel | None = None) -> list:
    channel = channel or Channel()
    events = channel.receive_data(data)
    if channel.error:
        raise channel.error
    return events


def feed(pieces: list[bytes]) -> tuple[list, str]:
    channel, events = Channel(), []
    try:
        for piece in pieces:
            events += channel.receive_data(piece)
        channel.receive_eof()
    except (PeerProtocolError, PeerClosedError) as error:
        return events, str(error)
    return events, ""


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[1] / "docs" / "handshake.md").read_text()


def tables(page: str) -> dict[str, list[list[list[str]]]]:
    """Return every table of the page under its heading, without its head."""
    found = {}
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        blocks = re.findall(r"(?:^\|.*\n)+", body, flags=re.M)
        found[title] = [
            [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()[2:]]
            for block in blocks
        ]
    return found


TABLES = tables(PAGE)
DOCUMENTED = {title: blocks[0] for title, blocks in TABLES.items() if blocks}


@pytest.mark.parametrize("layout", wire.LAYOUTS)
def test_the_page_has_the_offsets_and_sizes_of_the_code(layout):
    offset, rows = 0, []
    for code, field in (entry.split(":") for entry in wire.LAYOUTS[layout].split()):
        size = struct.calcsize(f"!{code}")
        rows.append([str(offset), str(size), field])
        offset += size
    documented = [row[:3] for row in DOCUMENTED[layout]]
    tail = documented[len(rows) :]
    assert documented[: len(rows)] == rows
    limits = {
        "BUFFER": [[str(offset), f"1–{wire.MAX_NAME}", "name"]],
        "REFUSE": [[str(offset), f"0–{wire.MAX_REASON}", "reason"]],
    }
    assert tail == limits.get(layout, [])


def test_the_page_has_the_frames_of_the_code():
    def lengths(least: int, most: int) -> str:
        return str(least) if least == most else f"{least}–{most}"

    assert [row[:3] for row in DOCUMENTED["Frames"]] == [
        [str(kind.value), kind.name, lengths(wire.FRAMES[kind].least, wire.FRAMES[kind].most)]
        for kind in wire.FrameType
    ]
    assert [row[:2] for row in TABLES["REFUSE"][1]] == [[str(code.value), code.name] for code in wire.RefuseCode]


def test_the_page_has_the_constants_of_the_code():
    assert DOCUMENTED["Preface"][0][3] == f"`{wire.MAGIC.hex(' ').upper()}`"
    assert DOCUMENTED["Preface"][1][3].endswith(f"now {wire.VERSION}")
    assert DOCUMENTED["Preface"][2][3].endswith(f"now {wire.MIN_VERSION}")
    assert f"at most {wire.MAX_FRAME} " in DOCUMENTED["Header"][3][3]
    assert f"may have {wire.MAX_BUFFERS} names" in PAGE


# -- bytes out, bytes in -----------------------------------------------------------------------------------------------


def test_the_bytes_are_the_documented_ones():
    channel = Channel()
    assert channel.data_to_send() == b""
    assert not channel.has_data  # a preface alone is not worth a packet
    channel.hello(ENDPOINT)
    assert channel.has_data
    assert channel.data_to_send() == HELLO
    assert not channel.has_data
    channel.domain(0xD1D2D3D4D5D6D7D8)
    assert channel.data_to_send() == frame(9, DOMAIN_PAYLOAD, flags=1)
    channel.buffer(KV)
    channel.ready()
    assert channel.data_to_send() == frame(3, BUFFER_PAYLOAD) + frame(2)
    channel.withdraw("kv")
    channel.goodbye()
    assert channel.parted == (True, False)
    assert channel.data_to_send() == frame(4, b"kv") + frame(5)
    assert channel.data_to_send() == b""


def test_a_refusal_may_be_all_that_is_said():
    channel = Channel()
    channel.refuse(RefuseCode.BUSY, "no more than 3 connections")
    data = channel.data_to_send()
    assert data == PREFACE_BYTES + frame(6, b"\x00\x06no more than 3 connections")
    listener = Channel()
    assert listener.receive_data(data) == [Refused(RefuseCode.BUSY, "no more than 3 connections")]
    assert listener.receive_eof() == []


@pytest.mark.parametrize("split", range(len(TALK) + 1))
def test_a_split_at_any_offset_gives_the_same_events(split):
    channel = Channel()
    assert channel.receive_data(TALK[:split]) + channel.receive_data(TALK[split:]) == EVENTS
    assert channel.receive_eof() == []


def test_one_byte_at_a_time_gives_the_same_events():
    channel = Channel()
    assert [event for byte in TALK for event in channel.receive_data(bytes([byte]))] == EVENTS
    assert channel.version == 1


def test_over_a_socket_that_sends_one_byte_at_a_time():
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def dribble() -> None:
            for byte in TALK:
                theirs.sendall(bytes([byte]))
            theirs.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=dribble)
        sender.start()
        channel, events = Channel(), []
        while data := ours.recv(7):
            events += channel.receive_data(data)
        sender.join()
    assert events + channel.receive_eof() == EVENTS


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview])
def test_any_buffer_is_taken_and_none_is_kept(convert):
    data = convert(TALK)
    channel = Channel()
    assert channel.receive_data(data) == EVENTS
    if isinstance(data, bytearray):
        data.clear()  # would raise, were it still exported


endpoints = st.builds(
    Endpoint,
    qp_num=st.integers(2, 0xFFFFFE),
    psn=st.integers(0, 0xFFFFFF),
    lid=st.integers(1, 0xBFFF),
    gid=st.integers(1, (0xFF << 120) - 1).map(IPv6Address).filter(lambda gid: not gid.is_multicast),
    link_layer=st.sampled_from([LinkLayer.INFINIBAND, LinkLayer.ETHERNET]),
    mtu=st.sampled_from(MTU),
    max_rd_atomic=st.integers(0, 255),
    max_dest_rd_atomic=st.integers(0, 255),
    max_message_size=st.integers(0, 1 << 31),
    recv_depth=st.integers(0, (1 << 31) - 1),
    max_msg_sz=st.integers(1, (1 << 32) - 1),
    nonce=st.integers(0, (1 << 64) - 1),
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=63)


@st.composite
def buffers(draw):
    addr = draw(st.integers(0, (1 << 64) - 1))
    access = draw(st.sampled_from([None, READ, WRITE, ATOMIC, READ | WRITE, READ | ATOMIC, READ | WRITE | ATOMIC]))
    length = draw(st.integers(0, min((1 << 64) - addr, (1 << 64) - 1)))
    return RemoteBuffer(addr, draw(st.integers(1, (1 << 32) - 1)), length, draw(names), access)


@given(endpoints, st.lists(buffers(), max_size=4), st.lists(st.integers(0, 400)))
def test_all_that_can_be_said_is_heard(endpoint, offered, cuts):
    sender, receiver = Channel(), Channel()
    sender.hello(endpoint)
    for buffer in offered:
        sender.buffer(buffer)
    sender.ready()
    data = sender.data_to_send()
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    events = [event for a, b in itertools.pairwise(marks) for event in receiver.receive_data(data[a:b])]
    assert events == [HelloReceived(endpoint), *map(BufferAdded, offered), ReadyReceived()]
    assert [type(event.buffer.access) for event in events[1:-1]] == [type(buffer.access) for buffer in offered]


@pytest.mark.parametrize(
    "buffer",
    [
        RemoteBuffer((1 << 64) - 1, (1 << 32) - 1, 1, "\U0001f511" * 63 + "abc", READ | WRITE | ATOMIC),
        RemoteBuffer(0, 1, (1 << 64) - 1, "k"),
        RemoteBuffer(0, 1, 0, "k", ATOMIC),
    ],
)
def test_the_extremes_round_trip(buffer):
    channel = Channel()
    channel.hello(ENDPOINT)
    channel.buffer(buffer)
    assert hear(channel.data_to_send())[1] == BufferAdded(buffer)


@dataclass
class FakeMR:
    addr: int = 0x7000
    length: int = 0x123
    lkey: int = 0x11111111
    rkey: int = 0x22222222


def test_only_the_rkey_travels():
    channel = Channel()
    channel.hello(ENDPOINT)
    channel.buffer(RemoteBuffer.of(FakeMR(), name="kv", access=WRITE))
    data = channel.data_to_send()
    assert data.count(bytes.fromhex("22222222")) == 1
    assert bytes.fromhex("11111111") not in data
    assert hear(data)[1].buffer.rkey == 0x22222222


def test_a_name_used_again_replaces_and_a_withdrawn_one_may_return():
    again = replace(KV, rkey=0x99)
    sender = Channel()
    sender.hello(ENDPOINT)
    for step in (sender.buffer, sender.buffer):
        step(KV)
    sender.buffer(again)
    sender.withdraw("kv")
    sender.buffer(KV)
    assert hear(sender.data_to_send())[2:] == [
        BufferAdded(KV),
        BufferAdded(again),
        BufferWithdrawn("kv"),
        BufferAdded(KV),
    ]


def test_a_buffer_may_end_before_its_domain():
    sender = Channel()
    sender.hello(ENDPOINT)
    sender.buffer(KV, passing=True)
    sender.buffer(replace(KV, name="other"))
    assert hear(sender.data_to_send())[1:] == [BufferAdded(KV, passing=True), BufferAdded(replace(KV, name="other"))]


# -- what a peer must not say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("qp_num", 0, "qp_num is 0, outside 2.."),
        ("qp_num", 1 << 24, "qp_num is 16777216 (0x1000000), outside 2..16777214 (0xfffffe)"),
        ("qp_num", 0xFFFFFF, "qp_num is 16777215"),
        ("psn", 1 << 24, "psn is 16777216 (0x1000000), outside 0..16777215 (0xffffff)"),
        ("mtu", 9, "256, 512, 1024, 2048, 4096] bytes, not 9"),
        ("mtu", 5, "bytes, not 5"),
        ("gid", bytes(16), "gid is ::, outside"),
        ("gid", b"\xff\x02" + bytes(14), "gid is ff02::, outside"),
        ("link_layer", 0, "link_layer is 0, outside 1..2"),
        ("link_layer", 3, "link_layer is 3, outside 1..2"),
        ("credit_depth", 2, "credit_depth is 2, outside 3..255"),
        ("max_message_size", (1 << 31) + 1, "max_message_size is 2147483649 (0x80000001), outside"),
        ("recv_depth", 1 << 31, "recv_depth is 2147483648 (0x80000000), outside"),
        ("max_msg_sz", 0, "max_msg_sz is 0, outside 1.."),
    ],
)
def test_a_hello_outside_its_ranges_is_refused(field, value, text):
    data = PREFACE_BYTES + frame(1, put(HELLO_PAYLOAD, "HELLO", field, value))
    with pytest.raises(PeerProtocolError, match="^the peer's HELLO: .*" + re.escape(text)):
        hear(data)


def test_a_zero_lid_is_refused_on_infiniband_only():
    for layer, lid, good in ((1, 0, False), (1, 0xC000, False), (1, 0xBFFF, True), (2, 0, True)):
        payload = put(put(HELLO_PAYLOAD, "HELLO", "lid", lid), "HELLO", "link_layer", layer)
        if good:
            assert hear(PREFACE_BYTES + frame(1, payload))[0].endpoint.lid == lid
        else:
            with pytest.raises(PeerProtocolError, match=r"HELLO: lid is .* a unicast LID on InfiniBand"):
                hear(PREFACE_BYTES + frame(1, payload))


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (put(BUFFER_PAYLOAD, "BUFFER", "rkey", 0), "rkey is 0, outside 1.."),
        (put(BUFFER_PAYLOAD, "BUFFER", "access", 16), "access is 16, outside 0..15"),
        (put(BUFFER_PAYLOAD, "BUFFER", "length", (1 << 64) - 1), "length is 18446744073709551615"),
        (BUFFER_PAYLOAD[:-2] + b"\xff\xfe", r"name is b'\xff\xfe', which is not UTF-8"),
        (BUFFER_PAYLOAD[:-2], "length is 24, outside 25..279"),
        (BUFFER_PAYLOAD[:-2] + b"k" * 256, "length is 280, outside 25..279"),
    ],
)
def test_a_buffer_outside_its_ranges_is_refused(payload, text):
    with pytest.raises(PeerProtocolError, match="^the peer's BUFFER: " + re.escape(text)):
        hear(HELLO + frame(3, payload))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (frame(2, b"", length=0xFFFFFFFF), "READY: length is 4294967295 (0xffffffff), outside 0..0"),
        (frame(3, b"", length=0xFFFFFFFF), "BUFFER: length is 4294967295 (0xffffffff), outside 25..279"),
        (frame(200, b"", flags=1, length=65537), "frame of type 200: length is 65537"),
        (frame(200), "frame of type 200: type 200 is unknown to version 1, and must not be ignored"),
        (frame(7), "frame of type 7: type 7 is unknown"),
        (frame(0), "frame of type 0: type 0 is unknown"),
        (frame(2, flags=2), "READY: flags is 2, outside 0..1"),
        (b"\x02\x00\x00\x01\x00\x00\x00\x00", "frame: reserved is 1, outside 0..0"),
        (frame(9, bytes(8)), "DOMAIN: domain is 0, outside 1..18446744073709551615"),
        (frame(9, bytes(7)), "DOMAIN: length is 7, outside 8..8"),
        (frame(4, b""), "WITHDRAW: length is 0, outside 1..255"),
        (frame(4, b"\xc0"), "WITHDRAW: name is b'\\xc0', which is not UTF-8"),
        (frame(6, b"\x00"), "REFUSE: length is 1, outside 2..1026"),
        (frame(5) + b"x", "frame: it came after GOODBYE, where nothing may come"),
        (frame(6, b"\x00\x00") + frame(5), "frame: it came after REFUSE"),
    ],
)
def test_a_bad_frame_is_refused_at_its_header(data, text):
    with pytest.raises(PeerProtocolError, match="^the peer's " + re.escape(text)):
        hear(HELLO + data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (PREFACE_BYTES + frame(2), "the peer sent READY before HELLO, where HELLO or REFUSE may come"),
        (PREFACE_BYTES + frame(200, flags=1), "the peer sent a frame of type 200 before HELLO"),
        (HELLO + frame(1, HELLO_PAYLOAD), "the peer sent HELLO after HELLO, where READY or BUFFER or"),
        (HELLO + 2 * frame(9, DOMAIN_PAYLOAD), "the peer sent DOMAIN again, or after a BUFFER"),
        (HELLO + frame(3, BUFFER_PAYLOAD) + frame(9, DOMAIN_PAYLOAD), "the peer sent DOMAIN again, or after a BUFFER"),
        (HELLO + frame(2) + frame(9, DOMAIN_PAYLOAD), "the peer sent DOMAIN after READY, where BUFFER or"),
        (HELLO + frame(2) + frame(2), "the peer sent READY after READY, where BUFFER or"),
        (HELLO + frame(4, b"kv"), "the peer withdrew 'kv', and no buffer has that name"),
    ],
)
def test_a_peer_that_breaks_the_order_is_refused(data, text):
    with pytest.raises(PeerProtocolError, match=re.escape(text)):
        hear(data)


def test_the_header_is_enough_for_a_refusal():
    # Nothing of the payload has come yet, and nothing of it is waited for.
    with pytest.raises(PeerProtocolError, match="HELLO: length is 53, outside 52"):
        hear(PREFACE_BYTES + frame(1, length=53))
    with pytest.raises(PeerProtocolError, match="sent HELLO after HELLO"):
        hear(HELLO + frame(1, length=52))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "begins with b'GET / HT', .* looks like an HTTP request"),
        (b"HTTP/1.1 400 Bad Request\r\n", "an HTTP answer"),
        (bytes.fromhex("16030100c8010000c4"), "a TLS ClientHello"),
        (bytes.fromhex("1503010002022800"), "a TLS alert"),
        (b"SSH-2.0-x\r\n", "an SSH greeting"),
        (b"\x89PVL\n\x1a\n\x00", "after a text filter"),
        (b"\tPVL\r\n\x1a\n", "eighth bits"),
        (bytes(64), "zeros"),
        (b"hello world", "no protocol known here"),
    ],
)
def test_a_stranger_is_described_and_gets_no_answer(data, text):
    channel = Channel()
    with pytest.raises(PeerProtocolError, match=text):
        channel.receive_data(data)
    assert channel.data_to_send() == b""
    told = {feed([data[:split], data[split:]])[1] for split in range(len(data) + 1)}
    assert len(told) == 1


@pytest.mark.parametrize(
    ("version", "oldest", "spoken"),
    [(1, 1, 1), (0xFFFF, 1, 1), (2, 2, None), (9, 3, None)],
)
def test_versions_meet_or_are_both_named(version, oldest, spoken):
    channel = Channel()
    preface = wire.MAGIC + struct.pack("!HH", version, oldest)
    if spoken:
        assert channel.receive_data(preface + frame(1, HELLO_PAYLOAD)) == [HelloReceived(ENDPOINT)]
        assert channel.version == spoken
        return
    text = f"it speaks versions {oldest} to {version} of the protocol, and this side 1 to 1"
    with pytest.raises(PeerProtocolError, match=text):
        channel.receive_data(preface)
    assert channel.version is None
    refusal = hear(channel.data_to_send())[0]
    assert refusal.code is RefuseCode.VERSION
    assert text in refusal.reason


def test_an_older_peer_than_this_side_can_speak(monkeypatch):
    monkeypatch.setattr(wire, "VERSION", 7)
    monkeypatch.setattr(wire, "MIN_VERSION", 5)
    with pytest.raises(PeerProtocolError, match="versions 1 to 4 of the protocol, and this side 5 to 7"):
        hear(wire.MAGIC + struct.pack("!HH", 4, 1))
    channel = Channel()
    channel.receive_data(wire.MAGIC + struct.pack("!HH", 6, 1))
    assert channel.version == 6


@pytest.mark.parametrize(
    ("version", "oldest", "text"),
    [(0, 0, "version is 0, outside 1.."), (3, 4, "min_version is 4, outside 1..3"), (3, 0, "min_version is 0")],
)
def test_a_preface_that_contradicts_itself(version, oldest, text):
    with pytest.raises(PeerProtocolError, match="the peer's first message: " + re.escape(text)):
        hear(wire.MAGIC + struct.pack("!HH", version, oldest))


def test_a_peer_may_not_fill_the_memory_with_names(monkeypatch):
    monkeypatch.setattr(wire, "MAX_BUFFERS", 3)

    def named(name: str) -> RemoteBuffer:
        return replace(KV, name=name)

    sender = Channel()
    sender.hello(ENDPOINT)
    for name in "abca":
        sender.buffer(named(name))
    sender.withdraw("b")
    sender.buffer(named("d"))
    with pytest.raises(StateError, match="this side named more than 3 buffers"):
        sender.buffer(named("e"))
    data = sender.data_to_send()
    assert len(hear(data)) == 7
    with pytest.raises(PeerProtocolError, match="the peer named more than 3 buffers"):
        hear(data + frame(3, BUFFER_PAYLOAD[:-2] + b"e"))


# -- errors stay, and are told to the peer -----------------------------------------------------------------------------


def test_events_before_an_error_are_not_lost():
    channel = Channel()
    assert channel.receive_data(HELLO + frame(2) + frame(99) + frame(5)) == [
        HelloReceived(ENDPOINT),
        ReadyReceived(),
    ]
    assert isinstance(channel.error, PeerProtocolError)
    with pytest.raises(PeerProtocolError) as caught:
        channel.receive_data(b"")
    assert caught.value is channel.error


def test_a_failed_channel_stays_failed_with_the_same_error():
    channel = Channel()
    channel.hello(ENDPOINT)
    with pytest.raises(PeerProtocolError) as first:
        channel.receive_data(PREFACE_BYTES + frame(99))
    calls = [
        lambda: channel.receive_data(HELLO),
        channel.receive_eof,
        channel.ready,
        channel.goodbye,
        lambda: channel.hello(ENDPOINT),
        lambda: channel.buffer(KV),
        lambda: channel.withdraw("kv"),
        lambda: channel.refuse(0, ""),
    ]
    for call in calls:
        with pytest.raises(PeerProtocolError) as again:
            call()
        assert again.value is first.value


def test_the_peer_is_told_what_it_did_wrong():
    channel = Channel()
    channel.hello(ENDPOINT)
    with pytest.raises(PeerProtocolError) as caught:
        channel.receive_data(PREFACE_BYTES + frame(1, put(HELLO_PAYLOAD, "HELLO", "psn", 1 << 24)))
    heard = hear(channel.data_to_send())
    assert heard == [HelloReceived(ENDPOINT), Refused(RefuseCode.PROTOCOL, str(caught.value))]
    assert channel.data_to_send() == b""


@pytest.mark.parametrize("end", ["goodbye", "refuse"])
def test_who_has_ended_already_says_nothing_about_an_error(end):
    channel = Channel()
    channel.hello(ENDPOINT)
    channel.goodbye() if end == "goodbye" else channel.refuse(RefuseCode.OTHER, "x")
    sent = channel.data_to_send()
    assert sent
    with pytest.raises(PeerProtocolError):
        channel.receive_data(PREFACE_BYTES + frame(99))
    assert channel.data_to_send() == b""


def test_a_reason_is_cut_between_characters_and_cannot_steer_a_terminal():
    channel = Channel()
    channel.refuse(RefuseCode.OTHER, "\x1b[2Ja\nb\ud800" + "€" * 1000)
    heard = hear(channel.data_to_send())[0]
    assert heard.reason == " [2Ja b " + "€" * 338
    raw = PREFACE_BYTES + frame(6, b"\x00\x2a\x1b[31mred\xff")
    assert hear(raw) == [Refused(42, " [31mred\ufffd")]
    assert type(hear(raw)[0].code) is int


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "before its HELLO: it gave up"),
        (b"GET", "before its HELLO: .*not this protocol.*unfinished: b'GET'"),
        (PREFACE_BYTES, "before its HELLO"),
        (HELLO[:-1], r"before its HELLO.*the last it sent is unfinished: b'\\x01\\x00"),
        (HELLO, "within the handshake, after HELLO and before READY"),
        (HELLO + frame(3, BUFFER_PAYLOAD)[:-1], "within the handshake.*unfinished"),
        (HELLO + frame(2), "without a GOODBYE: its process is gone$"),
        (HELLO + frame(2) + frame(5)[:3], "its process is gone; the last it sent is unfinished"),
    ],
)
def test_an_end_without_goodbye_tells_where_it_came(data, text):
    channel = Channel()
    channel.receive_data(data)
    with pytest.raises(PeerClosedError, match=text) as caught:
        channel.receive_eof()
    with pytest.raises(PeerClosedError) as again:
        channel.ready()
    assert again.value is caught.value is channel.error


def test_an_end_after_goodbye_is_none():
    said = Channel()
    said.hello(ENDPOINT)
    said.goodbye()
    said.receive_data(HELLO + b"\x03")
    assert said.receive_eof() == []
    heard = Channel()
    heard.receive_data(TALK)
    assert heard.receive_eof() == []
    heard.hello(ENDPOINT)  # the other direction may still be open
    with pytest.raises(StateError, match="after receive_eof"):
        heard.receive_data(b"")


# -- what this side must not say ---------------------------------------------------------------------------------------


def test_misuse_is_refused_and_leaves_the_channel_as_it_was():
    channel = Channel()
    for step, text in (
        (channel.ready, "this side sent READY before HELLO, where HELLO or REFUSE may come"),
        (channel.goodbye, "GOODBYE before HELLO"),
        (lambda: channel.buffer(KV), "BUFFER before HELLO"),
        (lambda: channel.withdraw("kv"), "WITHDRAW before HELLO"),
    ):
        with pytest.raises(StateError, match=text):
            step()
    channel.hello(ENDPOINT)
    with pytest.raises(StateError, match="HELLO after HELLO"):
        channel.hello(ENDPOINT)
    with pytest.raises(StateError, match="this side withdrew 'kv', and no buffer has that name"):
        channel.withdraw("kv")
    channel.buffer(KV)
    channel.ready()
    with pytest.raises(StateError, match="READY after READY"):
        channel.ready()
    channel.withdraw("kv")
    channel.goodbye()
    for step in (channel.goodbye, channel.ready, lambda: channel.buffer(KV), lambda: channel.refuse(0, "")):
        with pytest.raises(StateError, match="after GOODBYE, where nothing may come"):
            step()
    assert channel.error is None
    assert [type(event) for event in hear(channel.data_to_send())] == [
        HelloReceived,
        BufferAdded,
        ReadyReceived,
        BufferWithdrawn,
        GoodbyeReceived,
    ]


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (replace(KV, rkey=0), "buffer 'kv' has no remote access flag: the peer could never use it"),
        (replace(KV, access=AccessFlags(0)), "the peer could never use it"),
        (replace(KV, name=""), "the length of the buffer's name in UTF-8 is 0, outside 1..255"),
        (replace(KV, name="é" * 128), "name in UTF-8 is 256, outside 1..255"),
        (replace(KV, name="\ud800"), "surrogates not allowed"),
    ],
)
def test_a_useless_buffer_is_not_offered(buffer, text):
    channel = Channel()
    channel.hello(ENDPOINT)
    channel.data_to_send()
    with pytest.raises(ValueError, match=re.escape(text)):
        channel.buffer(buffer)
    assert channel.data_to_send() == b""


@pytest.mark.parametrize("code", [-1, 1 << 16])
def test_a_refusal_code_has_16_bits(code):
    with pytest.raises(ValueError, match="code is"):
        Channel().refuse(code, "")


# -- anything at all ---------------------------------------------------------------------------------------------------


@st.composite
def spoiled(draw):
    data = bytearray(TALK)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
        assume(data)
    return bytes(data)


frames = st.lists(
    st.builds(frame, st.integers(0, 20), st.binary(max_size=60), flags=st.integers(0, 2)), max_size=6
).map(lambda parts: HELLO + b"".join(parts))


@given(st.one_of(st.binary(max_size=300), spoiled(), frames), st.lists(st.integers(0, 300), max_size=6))
def test_any_bytes_give_the_same_however_they_are_split(data, cuts):
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(marks)]
    whole = feed([data])
    assert feed(pieces) == whole
    assert feed([data[i : i + 1] for i in range(len(data))]) == whole


@pytest.mark.parametrize("kind", range(256))
def test_no_memory_is_taken_for_a_claimed_length(kind):
    channel = Channel()
    channel.receive_data(HELLO)
    tracemalloc.start()
    try:
        with pytest.raises(PeerProtocolError):
            channel.receive_data(frame(kind, flags=1, length=0xFFFFFFFF))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_skipped_frame_is_not_kept():
    channel = Channel()
    channel.receive_data(HELLO)
    piece = frame(255, bytes(60_000), flags=1)
    tracemalloc.start()
    try:
        for _ in range(200):
            assert channel.receive_data(piece) == []
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()

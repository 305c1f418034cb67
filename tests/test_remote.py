"""RemoteBuffer, Endpoint and what is negotiated: values only, no device."""

import copy
import itertools
import os
import pickle
import re
from dataclasses import FrozenInstanceError, dataclass, replace
from ipaddress import IPv6Address

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyverbs_lite.endpoint import Endpoint, negotiate, random_bits
from pyverbs_lite.enums import MTU, AccessFlags, LinkLayer
from pyverbs_lite.errors import HandshakeError, StateError
from pyverbs_lite.remote import RemoteBuffer, checked_int, slice_range

READ, WRITE, ATOMIC = AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_ATOMIC
KV = RemoteBuffer(0x0102030405060708, 0xA1B2C3D4, 4096, "kv", READ)
THEIRS = replace(KV, domain=0xD1D2D3D4D5D6D7D8, owner="192.0.2.1 port 7")
LEFT = Endpoint(
    qp_num=0x00ABCDEF,
    psn=0x00FEDCBA,
    lid=0x1234,
    gid=IPv6Address("fe80::11"),
    link_layer=LinkLayer.ETHERNET,
    mtu=MTU.MTU_4096,
    max_rd_atomic=16,
    max_dest_rd_atomic=3,
    max_message_size=8192,
    recv_depth=64,
    max_msg_sz=1 << 31,
    nonce=1,
)
RIGHT = Endpoint(
    qp_num=0x000012,
    psn=0x000034,
    lid=0x0056,
    gid=IPv6Address("::ffff:10.1.2.3"),
    link_layer=LinkLayer.ETHERNET,
    mtu=MTU.MTU_1024,
    max_rd_atomic=5,
    max_dest_rd_atomic=7,
    max_message_size=4096,
    recv_depth=32,
    max_msg_sz=1 << 23,
    nonce=2,
)


def test_a_remote_buffer_is_a_plain_value():
    assert (KV.addr, KV.rkey, KV.length, KV.name, KV.access) == (
        0x0102030405060708,
        0xA1B2C3D4,
        4096,
        "kv",
        READ,
    )
    assert len(KV) == 4096
    assert RemoteBuffer(KV.addr, KV.rkey, 4096, "kv", READ) == KV
    assert len({KV, KV[:], KV[1:], replace(KV, rkey=1)}) == 3
    with pytest.raises(FrozenInstanceError):
        KV.rkey = 1
    with pytest.raises((AttributeError, TypeError)):
        KV.lkey = 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("buffer", [KV, KV[100:200], THEIRS, THEIRS[7:8], RemoteBuffer(0, 0, (1 << 64) - 1)], ids=str)
def test_it_pickles_under_every_protocol(buffer, protocol):
    again = pickle.loads(pickle.dumps(buffer, protocol))
    assert again == buffer
    for name in ("offset", "extent", "domain", "owner"):
        assert getattr(again, name) == getattr(buffer, name)
    assert type(again.access) is type(buffer.access)
    assert copy.copy(buffer) == copy.deepcopy(buffer) == buffer


def test_a_forged_pickle_is_range_checked():
    forged = pickle.dumps(KV, 0).replace(str(KV.rkey).encode(), str(1 << 32).encode())
    with pytest.raises(ValueError, match="rkey is 4294967296"):
        pickle.loads(forged)


@pytest.mark.parametrize(
    "fields",
    [(0, 0, 0), (0, 0, (1 << 64) - 1), (1, 0, (1 << 64) - 1), ((1 << 64) - 1, (1 << 32) - 1, 1), (1 << 63, 1, 1 << 63)],
)
def test_extremes_are_allowed(fields):
    buffer = RemoteBuffer(*fields)
    assert (buffer.addr, buffer.rkey, buffer.length) == fields


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((-1, 1, 1), r"addr is -1, outside 0\.\."),
        ((1 << 64, 1, 0), r"addr is 18446744073709551616 \(0x10000000000000000\), outside"),
        ((0, -1, 1), "rkey is -1"),
        ((0, 1 << 32, 1), r"rkey is 4294967296 \(0x100000000\), outside 0\.\.4294967295 .*32 bits"),
        ((0, 1, -1), "length is -1"),
        ((0, 1, 1 << 64), "length is"),
        ((0xFFFFFFFFFFFFFFFF, 1, 2), r"length is 2, outside 0\.\.1: addr \+ length is at most 2\*\*64"),
    ],
)
def test_out_of_range_fields_are_named(fields, text):
    with pytest.raises(ValueError, match=text):
        RemoteBuffer(*fields)


@pytest.mark.parametrize("bad", [True, False, 1.0, None, "1", b"1"])
@pytest.mark.parametrize("position", range(3))
def test_what_is_no_integer_is_refused(position, bad):
    fields = [1, 2, 3]
    fields[position] = bad
    with pytest.raises(TypeError, match=f"{('addr', 'rkey', 'length')[position]} must be an integer, not"):
        RemoteBuffer(*fields)


def test_numpy_integers_become_plain_ones():
    buffer = RemoteBuffer(np.uint64(2**64 - 2), np.uint32(0xA1B2C3D4), np.int16(2))
    assert [type(value) for value in (buffer.addr, buffer.rkey, buffer.length)] == [int] * 3
    assert buffer[np.int32(1) :].addr == 2**64 - 1


def test_name_access_and_place_are_checked():
    with pytest.raises(TypeError, match="name must be a str, not bytes"):
        RemoteBuffer(0, 1, 1, b"kv")
    with pytest.raises(TypeError, match="owner must be a str, not NoneType"):
        RemoteBuffer(0, 1, 1, owner=None)
    with pytest.raises(ValueError, match="domain is 18446744073709551616"):
        RemoteBuffer(0, 1, 1, domain=1 << 64)
    with pytest.raises(TypeError, match="domain must be an integer"):
        RemoteBuffer(0, 1, 1, domain=None)
    with pytest.raises(TypeError, match="access must be AccessFlags or None"):
        RemoteBuffer(0, 1, 1, "kv", 4)
    with pytest.raises(ValueError, match=r"offset is 9, outside 0\.\.8"):
        RemoteBuffer(8, 1, 1, offset=9)
    with pytest.raises(ValueError, match=r"extent is 3, outside 4\.\."):
        RemoteBuffer(8, 1, 2, offset=2, extent=3)
    assert RemoteBuffer(0, 1, 1, "kv", AccessFlags.LOCAL_WRITE | WRITE).access == WRITE
    assert RemoteBuffer(0, 1, 1, "kv", AccessFlags.LOCAL_WRITE).access == AccessFlags(0)


@dataclass
class FakeMR:
    addr: int = 0x7000
    length: int = 0x123
    lkey: int = 0x11111111
    rkey: int = 0x22222222


def test_an_mr_gives_its_rkey_never_its_lkey():
    buffer = RemoteBuffer.of(FakeMR(), name="kv", access=WRITE)
    assert buffer == RemoteBuffer(0x7000, 0x22222222, 0x123, "kv", WRITE)
    assert "11111111" not in repr(buffer)


def test_texts():
    assert str(KV) == "buffer 'kv'"
    assert str(KV[16:][16:32]) == "buffer 'kv'[32:48]"
    assert str(RemoteBuffer(0x7000, 1, 16)[4:8]) == "remote buffer 0x7000[4:8]"
    assert str(THEIRS) == "buffer 'kv' at 192.0.2.1 port 7"
    assert str(THEIRS[4:9]) == "buffer 'kv'[4:9] at 192.0.2.1 port 7"
    with pytest.raises(IndexError, match=r"^buffer 'kv'\[4:9\] at 192.0.2.1 port 7 \(5 bytes\): range 1:6 is outside$"):
        THEIRS[4:9][1:6]
    assert (
        repr(KV) == "RemoteBuffer(addr=0x102030405060708, rkey=0xa1b2c3d4, length=4096, name='kv', access=REMOTE_READ)"
    )
    assert repr(RemoteBuffer(16, 1, 2)) == "RemoteBuffer(addr=0x10, rkey=0x1, length=2)"
    assert repr(RemoteBuffer(16, 1, 2, "", AccessFlags(0))).endswith("length=2, access=none)")


# -- ranges ------------------------------------------------------------------------------------------------------------

BOUNDS = [None, *range(-9, 10)]


@pytest.mark.parametrize("length", [0, 1, 5, 8])
def test_ranges_are_pythons_wherever_nothing_is_clamped(length):
    for start, stop in itertools.product(BOUNDS, BOUNDS):
        inside = all(bound is None or -length <= bound <= length for bound in (start, stop))
        first, last, _ = slice(start, stop).indices(length)
        if not inside:
            with pytest.raises(IndexError, match=rf"^it \({length} bytes\): range .*:.* is outside$"):
                slice_range(slice(start, stop), length, "it")
        elif last < first:
            with pytest.raises(ValueError, match="ends before it starts"):
                slice_range(slice(start, stop), length, "it")
        else:
            assert slice_range(slice(start, stop), length, "it") == (first, last)


def test_the_same_numbers_in_another_domain_are_another_buffer():
    assert replace(THEIRS, domain=1) != THEIRS != KV
    assert replace(THEIRS, owner="elsewhere") == THEIRS
    part = THEIRS[5:6]
    assert (part.domain, part.owner) == (THEIRS.domain, THEIRS.owner)


def test_a_slice_is_as_good_as_one_made_from_its_numbers():
    class Mine(RemoteBuffer):
        __slots__ = ()

    whole = Mine(*(getattr(KV, name) for name in ("addr", "rkey", "length", "name", "access")), domain=9, owner="x")
    part = whole[1000:2000][5:]
    assert type(part) is Mine
    made = Mine(KV.addr + 1005, KV.rkey, 995, "kv", READ, offset=1005, extent=4096, domain=9, owner="x")
    assert [getattr(part, name) for name in RemoteBuffer.__slots__] == [
        getattr(made, name) for name in RemoteBuffer.__slots__
    ]


def test_the_slices_of_what_a_connection_shows_stand_and_fall_with_it():
    peer = object()
    for access, standing in (
        (READ, (peer, None)),
        (WRITE, (None, peer)),
        (ATOMIC, (None, None)),
        (None, (peer, peer)),
    ):
        shown = replace(KV, access=access).of_peer(peer, 7, "192.0.2.1 port 9")
        part = shown[16:32][1:]
        assert (shown.domain, shown.owner, part.domain) == (7, "192.0.2.1 port 9", 7)
        assert (part._standing.reads, part._standing.writes) == standing
        assert shown == replace(KV, access=access, domain=7)
        for value in (copy.copy(part), pickle.loads(pickle.dumps(part)), replace(part, length=2)):
            assert (value._standing.reads, value._standing.writes) == (None, None)  # plain values
        shown._standing.end()
        assert (part._standing.reads, part._standing.writes) == (None, None)


def test_a_slice_remembers_where_it_lies():
    part = KV[1000:2000][-900:500]
    assert (part.addr, part.rkey, part.length) == (KV.addr + 1100, KV.rkey, 400)
    assert (part.name, part.access, part.offset, part.extent) == ("kv", READ, 1100, 4096)
    assert KV[::1] == KV
    assert len(KV[4096:]) == 0


@pytest.mark.parametrize(
    ("take", "error", "text"),
    [
        (lambda b: b[4000:5000], IndexError, "buffer 'kv' (4096 bytes): range 4000:5000 is outside"),
        (lambda b: b[-5000:], IndexError, "buffer 'kv' (4096 bytes): range -5000: is outside"),
        (
            lambda b: b[8:16][4:12],
            IndexError,
            "buffer 'kv'[8:16] (8 bytes): range 4:12 is outside",
        ),
        (lambda b: b[9:8], ValueError, "buffer 'kv' (4096 bytes): range 9:8 ends before it starts"),
        (lambda b: b[::2], ValueError, "buffer 'kv': a range is contiguous, so its step must be 1, not 2"),
        (lambda b: b[::-1], ValueError, "its step must be 1, not -1"),
        (lambda b: b[5], TypeError, "buffer 'kv' takes ranges only, one byte is [5:6]; not [5]"),
        (lambda b: b[-1], TypeError, "such as [0:8]; not [-1]"),
        (lambda b: b["a"], TypeError, "not ['a']"),
        (lambda b: b[True], TypeError, "not [True]"),
        (lambda b: b[0.0:4], TypeError, "the bound of a range must be an integer, not float"),
        (lambda b: b[:True], TypeError, "the bound of a range must be an integer, not bool"),
        (lambda b: b[::1.0], TypeError, "the step of a range must be an integer, not float"),
        (list, TypeError, "takes ranges only"),
    ],
)
def test_a_bad_range_says_what_is_wrong(take, error, text):
    with pytest.raises(error, match=re.escape(text)):
        take(KV)


# -- what the owner allows ---------------------------------------------------------------------------------------------


def test_an_operation_the_owner_does_not_allow_is_refused():
    KV.require(READ, "read")
    RemoteBuffer(0, 1, 1).require(WRITE | ATOMIC, "anything: not known")
    with pytest.raises(
        StateError, match=r"^write needs REMOTE_WRITE, but the owner of buffer 'kv'\[4:8\] allows only REMOTE_READ$"
    ) as caught:
        KV[4:8].require(WRITE, "write")
    assert caught.value.operation == "write"
    with pytest.raises(StateError, match=r"needs REMOTE_READ and REMOTE_ATOMIC, but .* only REMOTE_READ$"):
        KV.require(READ | ATOMIC, "both")
    with pytest.raises(StateError, match="allows no remote access"):
        replace(KV, access=AccessFlags(0)).require(READ, "read")


# -- endpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "bad", "text"),
    [
        ("qp_num", 0, "qp_num is 0, outside 2.."),
        ("qp_num", 1, "qp_num is 1, outside"),
        ("qp_num", 0xFFFFFF, "qp_num is 16777215 (0xffffff), outside"),
        ("qp_num", 1 << 24, "qp_num is 16777216 (0x1000000), outside"),
        ("psn", -1, "psn is -1, outside 0..16777215 (0xffffff)"),
        ("psn", 1 << 24, "psn is 16777216"),
        ("lid", 1 << 16, "lid is 65536"),
        ("max_rd_atomic", 256, "max_rd_atomic is 256, outside 0..255"),
        ("max_dest_rd_atomic", -1, "max_dest_rd_atomic is -1"),
        ("max_message_size", (1 << 31) + 1, "max_message_size is 2147483649"),
        ("recv_depth", 1 << 31, "recv_depth is 2147483648"),
        ("max_msg_sz", 0, "max_msg_sz is 0, outside 1.."),
        ("nonce", 1 << 64, "nonce is"),
        ("gid", IPv6Address("::"), "gid is ::"),
        ("gid", IPv6Address("ff02::1"), "gid is ff02::1"),
        ("link_layer", LinkLayer.UNSPECIFIED, "link_layer is UNSPECIFIED"),
    ],
)
def test_an_endpoint_outside_its_ranges_is_refused(field, bad, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        replace(LEFT, **{field: bad})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("qp_num", True),
        ("psn", 1.0),
        ("psn", None),
        ("mtu", 4096),
        ("mtu", 5),
        ("gid", "fe80::1"),
        ("link_layer", 2),
    ],
)
def test_an_endpoint_of_wrong_types_is_refused(field, bad):
    with pytest.raises(TypeError, match=f"{field} must be"):
        replace(LEFT, **{field: bad})


@pytest.mark.parametrize(("lid", "good"), [(0, False), (1, True), (0xBFFF, True), (0xC000, False)])
def test_infiniband_needs_a_unicast_lid_and_no_gid(lid, good):
    change = {"link_layer": LinkLayer.INFINIBAND, "gid": IPv6Address("::"), "lid": lid}
    if good:
        assert replace(LEFT, **change).lid == lid
    else:
        with pytest.raises(ValueError, match=rf"lid is {lid}.*outside 1\.\."):
            replace(LEFT, **change)


def test_nonces_differ_by_themselves():
    fields = {name: getattr(LEFT, name) for name in LEFT.__slots__ if name != "nonce"}
    assert Endpoint(**fields).nonce != Endpoint(**fields).nonce


def test_numbers_of_other_kinds_become_plain_ones():
    record = replace(LEFT, psn=np.uint32(0xABCDEF), recv_depth=np.int64(7))
    assert (record.psn, type(record.psn), record.recv_depth, type(record.recv_depth)) == (0xABCDEF, int, 7, int)
    assert record == replace(LEFT, psn=0xABCDEF, recv_depth=7)


def test_random_numbers_are_no_two_the_same_and_a_forked_child_draws_its_own():
    numbers = [random_bits(64) for _ in range(500)]
    assert len(set(numbers)) == 500
    assert max(random_bits(24) for _ in range(100)) < 1 << 24
    # Bits that never change, or always do, would show in so many: each is 1 in about half of them.
    assert all(150 < sum(number >> bit & 1 for number in numbers) < 350 for bit in range(64))
    random_bits(64)  # some more are there now
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, random_bits(64).to_bytes(8, "big"))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 8) != random_bits(64).to_bytes(8, "big")
    os.close(reading)
    os.close(writing)


def test_both_sides_negotiate_the_same():
    left, right = negotiate(LEFT, RIGHT), negotiate(RIGHT, LEFT)
    assert (left.path_mtu, left.max_rd_atomic, left.max_dest_rd_atomic) == (MTU.MTU_1024, 7, 3)
    assert (left.max_send_size, left.max_rdma_size, left.send_depth_limit) == (4096, 1 << 23, 32)
    assert (right.path_mtu, right.max_rd_atomic, right.max_dest_rd_atomic) == (MTU.MTU_1024, 3, 7)
    assert (right.max_send_size, right.max_rdma_size, right.send_depth_limit) == (8192, 1 << 23, 64)


def test_a_send_is_never_larger_than_a_port_allows():
    assert negotiate(LEFT, replace(RIGHT, max_msg_sz=100)).max_send_size == 100
    assert negotiate(replace(LEFT, max_msg_sz=99), RIGHT).max_send_size == 99


def test_what_cannot_be_connected_is_said():
    other = replace(RIGHT, link_layer=LinkLayer.INFINIBAND)
    with pytest.raises(HandshakeError, match="one side is InfiniBand, the other Ethernet: this side is InfiniBand"):
        negotiate(other, LEFT)
    with pytest.raises(HandshakeError, match="this side is Ethernet"):
        negotiate(LEFT, other)
    with pytest.raises(HandshakeError, match="own record back"):
        negotiate(LEFT, replace(LEFT))


@given(st.integers(-(2**70), 2**70), st.integers(-10, 2**65), st.integers(0, 2**65))
def test_checked_int(value, low, span):
    high = low + span
    if low <= value <= high:
        assert checked_int(value, low, high, "it") == value
    else:
        with pytest.raises(ValueError, match=r"it is .* outside"):
            checked_int(value, low, high, "it")

"""What a connection moves: every operation, at every size that matters, from and to every kind of memory."""

from __future__ import annotations

import array
import ctypes
import importlib.util
import mmap
import pickle
import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from support import connected

import pyverbs_lite as pvl
from pyverbs_lite._base import args as _args

pytestmark = pytest.mark.rdma

A = pvl.AccessFlags
#: Different on the two sides, so that a swap shows.
SERVER = {"max_message_size": 9000, "recv_depth": 5, "send_depth": 7, "max_rd_atomic": 3, "max_dest_rd_atomic": 6}
CLIENT = {"max_message_size": 20000, "recv_depth": 9, "send_depth": 11, "max_rd_atomic": 8, "max_dest_rd_atomic": 2}
SIZES = [0, 1, 7, 64, 65, 4095, 4096, 4097, 8999, 9000]


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(size * 1000 + seed).randbytes(size)


class FakeTensor:
    """What the library asks of a torch CPU tensor."""

    def __init__(self, data: bytes, *, device: str = "cpu", contiguous: bool = True) -> None:
        self.memory = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        self.nbytes = len(data)
        self.device = type("Device", (), {"type": device})()
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def is_contiguous(self) -> bool:
        return self._contiguous


class Pair:
    """Both ends of one connection, and two buffers of the server's."""

    def __init__(self, left: pvl.Connection, right: pvl.Connection, data: bytearray, words: bytearray) -> None:
        self.left, self.right, self.data, self.words = left, right, data, words


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    data, words = bytearray(3 << 20), bytearray(32)
    server = dict(SERVER, buffers={"data": data, "words": words, "constant": bytes(range(200))})
    client = dict(CLIENT, buffers={"back": bytearray(100)})
    with connected(server, client) as (left, right):
        yield Pair(left, right, data, words)


# ------------------------------------------------------------ two-sided


@pytest.mark.parametrize("timeout", [10, 10.0, None, 0])
def test_what_has_arrived_is_taken_without_a_look_at_the_clock(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    pair.left.send(b"there")
    with monkeypatch.context() as patched:
        patched.setattr(_args, "time", None)
        assert pair.right.recv(timeout=timeout) == b"there"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["bytes", "region", "slice"])
def test_a_message_arrives_whole(pair: Pair, size: int, how: str) -> None:
    expected = noise(size)
    if how == "bytes":
        pair.left.send(expected)
    else:
        region = pair.left.register(bytearray(b"<<" + expected + b">>"))
        if how == "region":
            pair.left.send(region[2:-2])
        else:
            pair.left.send(region[1:-1][1:-1])
        region.close()
    message = pair.right.recv(timeout=10)
    assert message == expected
    assert (len(message), message.byte_len, message.imm, message.opcode) == (size, size, None, pvl.WCOpcode.RECV)


def test_a_whole_region_is_a_message(pair: Pair) -> None:
    region = pair.right.register(bytearray(noise(5000)))
    pair.right.send(region)
    assert pair.left.recv(timeout=10) == noise(5000)
    region.close()


@pytest.mark.parametrize("extra", [1, 5000, 1 << 20])
def test_a_message_longer_than_the_peer_receives_is_refused_here(pair: Pair, extra: int) -> None:
    size = pair.left.info.max_send_size + extra
    with pytest.raises(ValueError, match=rf"{size} bytes is longer than the peer receives.*max_message_size.* 9000"):
        pair.left.send(bytes(size))
    pair.left.send(b"still usable")
    assert pair.right.recv(timeout=10) == b"still usable"


def test_the_other_direction_has_its_own_limit(pair: Pair) -> None:
    pair.right.send(noise(20000))
    assert pair.left.recv(timeout=10) == noise(20000)
    with pytest.raises(ValueError, match=r"20001 .* 20000"):
        pair.right.send(bytes(20001))


@pytest.mark.parametrize("imm", [0, 1, 0x89ABCDEF, 0xFFFFFFFF, None])
@pytest.mark.parametrize("size", [0, 3, 5000])
def test_an_immediate_travels_in_host_order(pair: Pair, imm: int | None, size: int) -> None:
    pair.left.send(noise(size), imm=imm)
    message = pair.right.recv(timeout=10)
    assert (message, message.imm) == (noise(size), imm)
    if imm is not None:
        remote = pair.left.remote["data"][10:]
        pair.left.write(remote, noise(size), imm=imm)
        notice = pair.right.recv(timeout=10)
        assert (notice, notice.imm, notice.byte_len) == (b"", imm, size)
        assert notice.opcode == pvl.WCOpcode.RECV_RDMA_WITH_IMM
        assert pair.data[10 : 10 + size] == noise(size)


@pytest.mark.parametrize(
    ("imm", "error"), [(-1, ValueError), (1 << 32, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)]
)
def test_what_is_no_immediate_is_refused(pair: Pair, imm: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="imm"):
        pair.left.send(b"x", imm=imm)  # type: ignore[arg-type]
    with pytest.raises(error, match="imm"):
        pair.left.write(pair.left.remote["data"], b"x", imm=imm)  # type: ignore[arg-type]


def test_messages_come_in_order_and_are_plain_values(pair: Pair) -> None:
    for i in range(5):
        pair.left.send(b"%d" % i, imm=i)
    messages = [pair.right.recv(timeout=10) for _ in range(5)]
    assert [(bytes(m), m.imm) for m in messages] == [(b"%d" % i, i) for i in range(5)]
    copy = pickle.loads(pickle.dumps(messages[3]))
    assert (copy, copy.imm, copy.byte_len, copy.opcode) == (b"3", 3, 1, pvl.WCOpcode.RECV)


def test_a_message_is_taken_into_a_buffer(pair: Pair) -> None:
    target = bytearray(b"." * 12)
    pair.left.send(b"seven b")
    assert pair.right.recv_into(target, timeout=10) == 7
    assert target == b"seven b....."
    region = pair.right.register(target)
    pair.left.send(b"two")
    assert pair.right.recv_into(region[4:8], timeout=10) == 3
    region.close()
    assert target == b"sevetwo....."
    numbers = np.zeros(3, "<u4")
    pair.left.send(struct.pack("<3I", 1, 2, 3))
    assert pair.right.recv_into(numbers, timeout=10) == 12
    assert numbers.tolist() == [1, 2, 3]


def test_a_buffer_too_small_leaves_the_message(pair: Pair) -> None:
    pair.left.send(b"ten bytes!", imm=9)
    for size in (9, 0):
        with pytest.raises(ValueError, match=rf"10 bytes and the buffer only {size}"):
            pair.right.recv_into(bytearray(size), timeout=10)
    message = pair.right.recv(timeout=10)
    assert (message, message.imm) == (b"ten bytes!", 9)


def test_a_timeout_of_zero_takes_what_is_there(pair: Pair) -> None:
    with pytest.raises(pvl.WaitTimeout, match="no message"):
        pair.right.recv(timeout=0)
    pair.left.send(b"acknowledged, so it is there")
    assert pair.right.recv(timeout=0) == b"acknowledged, so it is there"


# ------------------------------------------------------------ one-sided


@pytest.mark.parametrize("size", [*SIZES, 9001, 1 << 20, (3 << 20) - 5])
@pytest.mark.parametrize("registered", [False, True])
def test_what_is_written_is_read(pair: Pair, size: int, registered: bool) -> None:
    expected = noise(size, 2)
    pair.data[:] = bytes(len(pair.data))
    remote = pair.left.remote["data"]
    source = pair.left.register(bytearray(expected)) if registered and size else expected
    pair.left.write(remote[5:], source)
    assert pair.data[5 : 5 + size] == expected
    assert not any(pair.data[:5])
    assert not any(pair.data[5 + size : 5 + size + 64])
    assert pair.left.read(remote[5 : 5 + size]) == expected
    target = bytearray(size + 3)
    into = pair.left.register(target) if registered else target
    assert pair.left.read(remote[5 : 5 + size], into) == size
    assert target == expected + bytes(3)
    for region in (source, into):
        if isinstance(region, pvl.MR):
            region.close()


def test_long_transfers_are_cut_into_pieces(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.left, "_max_piece", 4096)
    remote = pair.left.remote["data"]
    for size in (4096 * 9 - 1, 4096 * 9, 4096 * 9 + 1, 300_001):
        expected = noise(size, 3)
        pair.left.write(remote[1:], expected, imm=size)
        notice = pair.right.recv(timeout=10)
        assert (notice.imm, notice) == (size, b"")
        assert pair.data[1 : 1 + size] == expected
        assert pair.left.read(remote[1 : 1 + size]) == expected
        with pytest.raises(pvl.WaitTimeout):  # one immediate, and not one for each piece
            pair.right.recv(timeout=0)


def test_a_port_whose_messages_are_short_still_moves_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of both ports' ``max_msg_sz`` is the largest piece, and of a message its header is a part."""
    found = pvl.Context.query_port

    def query_port(context: pvl.Context, number: int) -> pvl.PortAttr:
        port = found(context, number)
        object.__setattr__(port, "max_msg_sz", 5000)
        return port

    monkeypatch.setattr(pvl.Context, "query_port", query_port)
    data = bytearray(40_000)
    with connected({"buffers": {"data": data}}) as (left, right):
        assert (left.info.max_send_size, left._max_piece) == (4984, 5000)
        left.write(left.remote["data"], noise(40_000))
        assert data == noise(40_000)
        left.send(noise(4984))
        assert right.recv(timeout=5) == noise(4984)


def test_ranges_are_checked_before_anything_moves(pair: Pair) -> None:
    left, remote = pair.left, pair.left.remote["data"][100:200]
    before = bytes(pair.data)
    text = r"101 bytes do not fit into buffer 'data'\[100:200\] at \S+ port \d+, which has 100$"
    with pytest.raises(ValueError, match=text):
        left.write(remote, bytes(101))
    with pytest.raises(ValueError, match=r"has 100 bytes, which do not fit into a buffer of 99"):
        left.read(remote, bytearray(99))
    with pytest.raises(IndexError, match="0:101"):
        remote[0:101]
    with pytest.raises(ValueError, match="step"):
        remote[::2]
    with pytest.raises(ValueError, match="ends before"):
        remote[50:10]
    region = left.register(bytearray(50))
    with pytest.raises(IndexError):
        region[0:51]
    with pytest.raises(ValueError, match="do not fit"):
        left.read(remote, region[10:20])
    region.close()
    assert pair.data == before
    assert left.read(left.remote["data"][0:0]) == b""
    assert left.read(left.remote["data"][3:3], bytearray(2)) == 0


def test_a_remote_buffer_is_a_remote_buffer(pair: Pair) -> None:
    for wrong in ("data", None, (1, 2, 3), pair.data):
        with pytest.raises(TypeError, match="RemoteBuffer"):
            pair.left.write(wrong, b"x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="RemoteBuffer"):
            pair.left.read(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="RemoteBuffer"):
            pair.left.fetch_add(wrong, 1)  # type: ignore[arg-type]


def test_what_the_owner_does_not_allow_is_refused_here(pair: Pair) -> None:
    constant = pair.left.remote["constant"]
    assert pair.left.read(constant) == bytes(range(200))
    with pytest.raises(pvl.StateError, match=r"write needs REMOTE_WRITE.*'constant'.*REMOTE_READ"):
        pair.left.write(constant, b"x")
    with pytest.raises(pvl.StateError, match="REMOTE_ATOMIC"):
        pair.left.fetch_add(constant[:8], 1)
    sink = pair.right.register(bytearray(8), name="sink", access=A.LOCAL_WRITE | A.REMOTE_WRITE)
    with pytest.raises(pvl.StateError, match="read needs REMOTE_READ"):
        pair.left.read(pair.left.remote["sink"])
    sink.close()


# ------------------------------------------------------------ atomics


def word(memory: bytearray, index: int = 0) -> int:
    return int(struct.unpack_from("=Q", memory, 8 * index)[0])


def test_atomics_return_what_was_there(pair: Pair) -> None:
    words = pair.left.remote["words"]
    first, second = words[:8], words[8:16]
    struct.pack_into("=4Q", pair.words, 0, 5, 2**64 - 1, 77, 88)
    assert pair.left.fetch_add(first, 3) == 5
    assert word(pair.words) == 8
    assert pair.left.fetch_add(first, -9) == 8
    assert word(pair.words) == 2**64 - 1
    assert pair.left.fetch_add(second, 1) == 2**64 - 1
    assert word(pair.words, 1) == 0
    assert pair.left.compare_swap(second, 1, 6) == 0
    assert word(pair.words, 1) == 0
    assert pair.left.compare_swap(second, 0, -2) == 0
    assert word(pair.words, 1) == 2**64 - 2
    assert pair.left.compare_swap(second, -2, 9) == 2**64 - 2
    assert [word(pair.words, i) for i in (1, 2, 3)] == [9, 77, 88]
    assert pair.left.fetch_add(first, 2**64 - 1) == 2**64 - 1


def test_bad_atomics_are_refused_here(pair: Pair) -> None:
    words = pair.left.remote["words"]
    for part in (words[:16], words[:4], words[1:9], words[0:0]):
        with pytest.raises(ValueError, match="8 bytes at an address that is a multiple of 8"):
            pair.left.fetch_add(part, 1)
        with pytest.raises(ValueError, match="8 bytes at an address"):
            pair.left.compare_swap(part, 1, 1)
    for value, error in ((2**64, ValueError), (-(2**63) - 1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="operand"):
            pair.left.fetch_add(words[:8], value)  # type: ignore[arg-type]
        with pytest.raises(error, match="operand"):
            pair.left.compare_swap(words[:8], 0, value)  # type: ignore[arg-type]


# ------------------------------------------------------------ kinds of memory


def buffers_of(data: bytes) -> Iterator[object]:
    """Yield the same bytes as every kind of writable memory."""
    yield bytearray(data)
    yield memoryview(bytearray(data))
    yield memoryview(bytearray(b"xx" + data + b"x"))[2:-1]
    yield array.array("I", data)
    mapped = mmap.mmap(-1, len(data))
    mapped[:] = data
    yield mapped
    yield np.frombuffer(bytearray(data), "<u2")
    yield np.frombuffer(bytearray(data), "u1").reshape(4, -1)
    yield (ctypes.c_char * len(data)).from_buffer_copy(data)
    yield FakeTensor(data)


def bytes_of(buffer: object) -> bytes:
    return bytes(buffer.memory) if isinstance(buffer, FakeTensor) else bytes(memoryview(buffer))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [24, 8008])
@pytest.mark.parametrize("kind", range(9))
def test_every_kind_of_memory_can_be_sent_and_filled(pair: Pair, kind: int, size: int) -> None:
    content, reply = noise(size, kind), noise(size, kind + 100)
    remote = pair.left.remote["data"][:size]
    buffer = list(buffers_of(content))[kind]
    pair.left.send(buffer)
    assert pair.right.recv(timeout=10) == content
    pair.left.write(remote, buffer)
    assert pair.data[:size] == content
    pair.data[:size] = reply
    assert pair.left.read(remote, buffer) == size
    assert bytes_of(buffer) == reply
    pair.right.send(content)
    assert pair.left.recv_into(buffer, timeout=10) == size
    assert bytes_of(buffer) == content
    with pair.left.register(buffer) as region:
        pair.left.write(remote, region)
        assert pair.data[:size] == content


@pytest.mark.parametrize("data", [b"bytes", memoryview(b"bytes"), np.frombuffer(b"bytes", "u1")])
def test_read_only_memory_is_sent_and_never_filled(pair: Pair, data: object) -> None:
    remote = pair.left.remote["data"][:5]
    pair.left.send(data)
    assert pair.right.recv(timeout=10) == b"bytes"
    pair.left.write(remote, data)
    pair.right.send(b"left")
    with pytest.raises(BufferError, match="read-only"):
        pair.left.read(remote, data)
    with pytest.raises(BufferError, match="read-only"):
        pair.left.recv_into(data, timeout=10)
    assert pair.left.recv(timeout=10) == b"left"
    for flags in (A.LOCAL_WRITE, A.LOCAL_WRITE | A.REMOTE_WRITE, A.LOCAL_WRITE | A.REMOTE_ATOMIC):
        with pytest.raises(BufferError, match="read-only"):
            pair.left.register(data, access=flags)
    with pair.left.register(data) as region:
        assert region.access == A.REMOTE_READ
        with pytest.raises(BufferError, match="LOCAL_WRITE"):
            pair.left.read(remote, region)
        pair.right.send(b"right")
        with pytest.raises(BufferError, match="read-only"):
            pair.left.recv_into(region, timeout=10)
        assert pair.left.recv(timeout=10) == b"right"


GRID = np.arange(20000, dtype="<i4").reshape(100, 200)
WRONG = [
    (GRID[:, ::2], ValueError),
    (GRID.T, ValueError),
    (GRID[::-1], ValueError),
    (memoryview(bytearray(9000))[::2], ValueError),
    (FakeTensor(bytes(64), contiguous=False), ValueError),
    (np.array([1, "a"], dtype=object), TypeError),
    ("text", TypeError),
    (object(), TypeError),
    (5, TypeError),
    ([1, 2], TypeError),
]


@pytest.mark.parametrize(("wrong", "error"), WRONG)
def test_memory_of_a_wrong_shape_is_refused_before_anything_is_registered(
    pair: Pair, wrong: object, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = pair.left.remote["data"]
    with monkeypatch.context() as patch:
        # Whoever registers, or posts, has not refused in time.
        patch.setattr(pvl.MR, "_own", lambda *_, **__: pytest.fail("it was registered"))
        patch.setattr(pair.left._engine, "register", lambda *_: pytest.fail("it was registered"))
        patch.setattr(pair.left._engine, "run", lambda *_, **__: pytest.fail("it was posted"))
        for call in (
            lambda: pair.left.send(wrong),
            lambda: pair.left.write(remote, wrong),
            lambda: pair.left.read(remote[:4], wrong),
            lambda: pair.left.recv_into(wrong, timeout=5),
            lambda: pair.left.register(wrong),
            lambda: pair.left.register(wrong, name="wrong"),
        ):
            with pytest.raises(error):
                call()
    pair.left.send(b"usable")
    assert pair.right.recv(timeout=10) == b"usable"


def test_the_length_is_in_bytes(pair: Pair) -> None:
    numbers = np.arange(100, dtype="<i8")
    pair.left.send(numbers)
    assert len(pair.right.recv(timeout=10)) == numbers.nbytes == 800
    pair.left.send(np.float32(1.5))  # no dimension at all
    assert pair.right.recv(timeout=10) == struct.pack("=f", 1.5)


if importlib.util.find_spec("torch"):

    def test_a_real_tensor_moves(pair: Pair) -> None:
        import torch

        tensor = torch.arange(3000, dtype=torch.int32)
        pair.left.write(pair.left.remote["data"], tensor)
        assert pair.data[:12000] == tensor.numpy().tobytes()
        assert pair.left.read(pair.left.remote["words"], tensor[:8]) == 32
        assert tensor[:8].numpy().tobytes() == pair.words


# ------------------------------------------------------------ registered memory and names


def test_buffers_are_there_from_the_start(pair: Pair) -> None:
    assert set(pair.left.remote) == {"data", "words", "constant"}
    assert set(pair.right.remote) == {"back"}
    data = pair.left.remote["data"]
    assert (data.length, data.name) == (len(pair.data), "data")
    assert data.access == A.REMOTE_READ | A.REMOTE_WRITE | A.REMOTE_ATOMIC
    assert pair.left.remote["constant"].access == A.REMOTE_READ
    assert "data" in pair.left.remote
    assert len(pair.left.remote) == 3


def test_a_name_comes_and_goes(pair: Pair) -> None:
    memory = bytearray(b"now you see me")
    region = pair.right.register(memory, name="guest")
    remote = pair.left.remote["guest"]
    assert (remote.addr, remote.rkey, remote.length) == (region.addr, region.rkey, 14)
    assert pair.left.read(remote) == memory
    with pytest.raises(pvl.StateError, match="'guest' is taken"):
        pair.right.register(bytearray(4), name="guest")
    assert pair.left.read(pair.left.remote["guest"]) == memory
    region.close()
    with pytest.raises(KeyError, match=r"no buffer named 'guest'; it has 'constant', 'data', 'words'"):
        pair.left.remote["guest"]
    again = pair.right.register(bytearray(3), name="guest")
    assert pair.left.remote["guest"].length == 3
    again.close()
    again.close()


def test_both_sides_may_use_one_name(pair: Pair) -> None:
    with pair.left.register(bytearray(b"left's"), name="same"), pair.right.register(b"right's!", name="same"):
        assert pair.left.read(pair.left.remote["same"]) == b"right's!"
        assert pair.right.read(pair.right.remote["same"]) == b"left's"


@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128, "\ud800", 5, b"name"])
def test_what_is_no_name_is_refused(pair: Pair, name: object) -> None:
    with pytest.raises((ValueError, TypeError), match="name"):
        pair.left.register(bytearray(8), name=name)  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError), match="name"):
        pvl.listen("127.0.0.1", 0, buffers={name: bytearray(8)})  # type: ignore[dict-item]


def test_a_name_of_any_script(pair: Pair) -> None:
    name = "Ключ 鍵 🔑"
    with pair.right.register(b"value", name=name):
        assert pair.left.read(pair.left.remote[name]) == b"value"


def test_a_name_without_remote_access_is_of_no_use(pair: Pair) -> None:
    for flags in (A(0), A.LOCAL_WRITE):
        with pytest.raises(ValueError, match="of no use to the peer"):
            pair.left.register(bytearray(8), name="useless", access=flags)
    assert "useless" not in pair.right.remote


def test_a_registered_buffer_cannot_move(pair: Pair) -> None:
    memory = bytearray(10)
    region = pair.left.register(memory)
    with pytest.raises(BufferError):
        memory.append(1)
    region.close()
    memory.append(1)


def test_a_closed_region_is_refused(pair: Pair) -> None:
    region = pair.left.register(bytearray(10))
    part = region[2:5]
    region.close()
    for data in (region, part):
        with pytest.raises(pvl.ClosedError):
            pair.left.send(data)
        with pytest.raises(pvl.ClosedError):
            pair.left.write(pair.left.remote["data"], data)
        with pytest.raises(pvl.ClosedError):
            pair.left.read(pair.left.remote["data"][:2], data)
        with pytest.raises(pvl.ClosedError):
            pair.left.recv_into(data, timeout=1)
    pair.left.send(b"fine")
    assert pair.right.recv(timeout=5) == b"fine"


def test_a_region_of_another_connection_is_refused(pair: Pair) -> None:
    region = pair.right.register(bytearray(10))
    with pytest.raises(ValueError, match="not registered with this connection"):
        pair.left.send(region)
    with pytest.raises(ValueError, match="not registered with this connection"):
        pair.left.read(pair.left.remote["data"][:2], region[:2])
    region.close()


def test_only_the_remote_key_leaves(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this driver both keys are equal, which would hide a swap: so they are made to differ."""
    made = pvl.MR.__init__

    def make(region: pvl.MR, *args: object) -> None:
        made(region, *args)  # type: ignore[arg-type]
        region.lkey ^= 0x5A5A5A5A

    with monkeypatch.context() as patch:
        patch.setattr(pvl.MR, "__init__", make)
        region = pair.right.register(bytearray(16), name="keys")
    remote = pair.left.remote["keys"]
    assert (remote.addr, remote.rkey, remote.length) == (region.addr, region.rkey, 16)
    assert remote.rkey != region.lkey
    region.close()


def test_a_handle_is_no_value(pair: Pair) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(pair.left)
    remote = pair.left.remote["data"][5:9]
    assert pickle.loads(pickle.dumps(remote)) == remote


def test_info_is_the_same_from_both_sides(pair: Pair) -> None:
    left, right = pair.left.info, pair.right.info
    assert (left.local_psn, left.remote_psn) == (right.remote_psn, right.local_psn)
    assert (left.local_qp_num, left.remote_qp_num) == (right.remote_qp_num, right.local_qp_num)
    assert (left.local_gid, left.remote_gid) == (right.remote_gid, right.local_gid)
    assert (left.local_lid, left.remote_lid) == (right.remote_lid, right.local_lid)
    assert left.path_mtu == right.path_mtu
    # min(own max_rd_atomic, the other's max_dest_rd_atomic), both ways.
    assert (left.max_rd_atomic, left.max_dest_rd_atomic) == (6, 2)
    assert (right.max_rd_atomic, right.max_dest_rd_atomic) == (2, 6)
    assert (left.max_send_size, left.max_message_size) == (9000, 20000)
    assert (right.max_send_size, right.max_message_size) == (20000, 9000)
    assert (left.send_depth, left.recv_depth, right.send_depth, right.recv_depth) == (11, 9, 7, 5)
    states = (pvl.QPState.RESET, pvl.QPState.INIT, pvl.QPState.RTR, pvl.QPState.RTS)
    assert left.states == right.states == states
    assert repr(pair.left).startswith("<Connection with 127.0.0.1 port")


def test_two_connections_do_not_mix(pair: Pair) -> None:
    with connected(dict(SERVER), dict(CLIENT)) as (left, right):
        left.send(b"second", imm=2)
        pair.left.send(b"first", imm=1)
        assert (pair.right.recv(timeout=5), right.recv(timeout=5)) == (b"first", b"second")
        with pytest.raises(KeyError, match="it has none"):
            left.remote["data"]


def test_connections_share_a_context() -> None:
    with pvl.open_device() as context:
        with connected({"device": context}, {"device": context}) as (left, right):
            left.send(b"shared")
            assert right.recv(timeout=5) == b"shared"
        assert not context.closed
        with connected({"device": context.name}, {"device": context, "port_num": 1}) as (left, right):
            right.send(b"by name")
            assert left.recv(timeout=5) == b"by name"
        context.query_port(1)

"""Buffers of every shape: what is memory for a device, what is refused, and who holds what."""

import array
import ctypes
import gc
import importlib.util
import mmap
import subprocess
import sys
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyverbs_lite._memory.buffer import Pinned, as_bytes_view
from pyverbs_lite.errors import UnsupportedError
from pyverbs_lite.ffi import ffi


def address(buffer):
    return int(ffi.cast("uintptr_t", ffi.from_buffer(buffer)))


class Device:
    def __init__(self, kind):
        self.type = kind


class FakeTensor:
    """Answers as a torch tensor does; its memory is that of a ctypes array."""

    def __init__(self, raw, *, device="cpu", contiguous=True, conj=False, neg=False):
        self.storage = (ctypes.c_ubyte * len(raw)).from_buffer_copy(raw) if raw else None
        self.device = Device(device)
        self.nbytes = len(raw)
        self._contiguous = contiguous
        self._conj = conj
        self._neg = neg

    def data_ptr(self):
        return ctypes.addressof(self.storage) if self.storage is not None else 0

    def is_contiguous(self):
        return self._contiguous

    def is_conj(self):
        return self._conj

    def is_neg(self):
        return self._neg

    def untyped_storage(self):
        return self.storage

    def raw(self):
        return bytes(self.storage)


class BareTensor:
    """The least that is asked of a tensor."""

    def __init__(self, raw):
        self.storage = (ctypes.c_ubyte * len(raw)).from_buffer_copy(raw)
        self.device = Device("cpu")
        self.nbytes = len(raw)

    def data_ptr(self):
        return ctypes.addressof(self.storage)

    def is_contiguous(self):
        return True

    def raw(self):
        return bytes(self.storage)


TENSORS = [FakeTensor, BareTensor]
if importlib.util.find_spec("torch"):
    import torch

    class TorchTensor:
        """Makes real tensors, of a type that numpy does not have."""

        def __new__(cls, raw):
            tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(torch.bfloat16)
            tensor.raw = lambda: bytes(tensor.view(torch.uint8).tolist())
            return tensor

    TENSORS.append(TorchTensor)


# What is memory


@pytest.mark.parametrize(
    ("buffer", "nbytes"),
    [
        (b"abc", 3),
        (bytearray(7), 7),
        (memoryview(array.array("I", range(8))), 32),  # its len() is 8
        (array.array("d", [1.0, 2.0]), 16),
        (np.arange(10, dtype=np.int32), 40),
        (np.arange(12.0).reshape(3, 4), 96),
        (np.arange(100)[10:20], 80),
        (np.array(5, dtype=np.int64), 8),
        (np.float32(1.5), 4),
        (np.arange(3, dtype=">i4"), 12),
        (np.zeros(2, dtype=[("O", "i4"), ("Ob", "f8")]), 24),
        (np.zeros(2, complex), 32),
        (np.zeros(2, "f2"), 4),
        (np.array(["ab"]), 8),
        ((ctypes.c_int * 3)(), 12),
        (mmap.mmap(-1, 4096), 4096),
    ],
    ids=lambda value: type(value).__name__,
)
def test_length_is_bytes_and_memory_is_the_caller_s(buffer, nbytes):
    view = as_bytes_view(buffer)
    assert (view.format, view.ndim, view.itemsize) == ("B", 1, 1)
    assert len(view) == view.nbytes == nbytes
    assert bytes(view) == memoryview(buffer).tobytes()
    pinned = Pinned(buffer)
    assert pinned.nbytes == nbytes
    assert pinned.addr == address(buffer) == address(pinned.view)
    assert pinned.readonly is view.readonly
    pinned.release()


@pytest.mark.parametrize(
    "make", [bytearray, lambda raw: array.array("B", raw), lambda raw: np.frombuffer(raw, "B").copy()]
)
def test_writes_arrive(make):
    target = make(b"....")
    as_bytes_view(target, writable=True)[1:3] = b"ab"
    assert bytes(target) == b".ab."


@given(st.binary(max_size=64), st.sampled_from("BHIQ"))
def test_any_item_size(raw, code):
    items = array.array(code)
    items.frombytes(raw[: len(raw) // items.itemsize * items.itemsize])
    assert bytes(as_bytes_view(items)) == items.tobytes()


# What is not


@pytest.mark.parametrize(
    "buffer",
    [
        np.arange(100)[::2],
        np.arange(100)[::-1],
        np.asfortranarray(np.zeros((3, 4))),
        np.zeros((4, 4))[:, 1:3],
        np.zeros((3, 4)).T,
        np.broadcast_to(np.zeros(1), (8,)),
        memoryview(bytearray(10))[::2],
        memoryview(bytearray(10))[::-1],
    ],
)
@pytest.mark.parametrize("writable", [False, True])
def test_no_hidden_copy(buffer, writable):
    with pytest.raises(ValueError, match="not C-contiguous"):
        Pinned(buffer, writable=writable)


def _read_only_array():
    values = np.arange(4)
    values.flags.writeable = False
    return values


@pytest.mark.parametrize("buffer", [b"abc", memoryview(bytearray(4)).toreadonly(), _read_only_array(), b""])
def test_read_only_is_no_target(buffer):
    with pytest.raises(BufferError, match="receive buffer is read-only"):
        Pinned(buffer, writable=True, what="receive buffer")
    pinned = Pinned(buffer)
    assert pinned.readonly
    with pytest.raises(TypeError):
        pinned.view[:1] = b"x"
    pinned.release()


class Storage:
    """Has an address, as torch's storages do, and is no tensor."""

    def data_ptr(self):
        return 0


@pytest.mark.parametrize("buffer", [None, 5, "text", [1, 2], object(), Storage()])
def test_no_buffer_at_all(buffer):
    with pytest.raises(TypeError, match=r"buffer protocol.*torch CPU tensor, or speak DLPack, not"):
        as_bytes_view(buffer)


@pytest.mark.parametrize(
    "buffer",
    [np.array([object()]), np.zeros(2, dtype=[("a", "i4"), ("b", "O")]), (ctypes.py_object * 2)(1, 2)],
)
def test_references_to_objects_are_not_data(buffer):
    with pytest.raises(TypeError, match="references to Python objects"):
        as_bytes_view(buffer)


@pytest.mark.parametrize(
    "buffer", [b"", bytearray(), np.zeros((0, 3)), np.zeros((3, 0), ">i4"), memoryview(b""), array.array("I")]
)
def test_empty(buffer):
    pinned = Pinned(buffer)
    assert pinned.nbytes == len(pinned.view) == 0
    assert pinned.view.format == "B"
    assert isinstance(pinned.addr, int)
    pinned.release()


def test_empty_target():
    assert not Pinned(bytearray(), writable=True).readonly
    assert not as_bytes_view(np.zeros((0, 3)), writable=True).readonly


# Holding still


def test_a_bytearray_cannot_move_until_released():
    data = bytearray(b"0123456789")
    pinned = Pinned(data)
    with pytest.raises(BufferError):
        data.extend(bytes(1 << 16))
    assert pinned.addr == address(data)
    pinned.release()
    data.extend(bytes(1 << 16))


def test_dropping_it_releases_as_well():
    data = bytearray(4)
    pinned = Pinned(data)
    del pinned
    gc.collect()
    data.append(1)


def test_an_mmap_cannot_be_closed_until_released():
    area = mmap.mmap(-1, 4096)
    pinned = Pinned(area, writable=True)
    with pytest.raises(BufferError):
        area.close()
    pinned.release()
    area.close()


def test_release_again():
    pinned = Pinned(bytearray(4))
    pinned.release()
    pinned.release()
    with pytest.raises(ValueError, match="released"):
        pinned.view[0]


@pytest.mark.parametrize("over", [np.frombuffer, memoryview, lambda view: view[1:]])
def test_release_never_fails_and_never_pulls_memory_from_under_a_view(over):
    data = bytearray(b"0123456789")
    pinned = Pinned(data)
    mine = over(pinned.view) if over is not np.frombuffer else over(pinned.view, dtype=np.uint8)
    pinned.release()
    pinned.release()
    with pytest.raises(BufferError):
        data.extend(bytes(1 << 16))
    assert bytes(mine)[-1:] == b"9"
    del mine, pinned
    gc.collect()
    data.extend(bytes(1 << 16))


def test_somebody_who_releases_the_view_lets_nothing_go():
    data = bytearray(b"0123456789")
    pinned = Pinned(data)
    with pinned.view as view:
        assert bytes(view) == b"0123456789"
    with pytest.raises(BufferError):
        data.extend(bytes(1 << 16))
    pinned.release()
    data.extend(bytes(1 << 16))


_LOOP = """
import gc
from types import SimpleNamespace
from pyverbs_lite._memory.buffer import Pinned
from pyverbs_lite._connection.lent import LentMessage
from pyverbs_lite._connection.operation import Operation

class Loop:
    pass

for _ in range(300):
    view = memoryview(bytearray(64))
    arrival = SimpleNamespace(view=memoryview(bytearray(64)), imm=None, opcode=0, byte_len=64, loan=1)
    lent = LentMessage(SimpleNamespace(give_back=id), arrival)
    held = Pinned(bytearray(64)), Operation((), view), lent
    loop = Loop()  # the youngest is cleared last
    loop.me, loop.view, loop.held = loop, view, held
    del view, held, loop, arrival, lent
    gc.collect(0)
print("alive")
"""


def test_a_reference_loop_is_collected_without_a_crash():
    # CPython up to 3.13 clears a memoryview in a loop although cffi still has it, and crashes when that lets go.
    done = subprocess.run([sys.executable, "-c", _LOOP], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_the_exporter_lives_as_long_as_it_is_pinned():
    values = np.arange(1000)
    expected = values.tobytes()
    pinned = Pinned(values)
    del values
    gc.collect()
    assert bytes(pinned.view) == expected


# Tensors


@pytest.mark.parametrize("make", TENSORS)
@pytest.mark.parametrize("writable", [False, True])
def test_cpu_tensor(make, writable):
    tensor = make(b"01234567")
    pinned = Pinned(tensor, writable=writable)
    assert (pinned.addr, pinned.nbytes, pinned.readonly) == (tensor.data_ptr(), 8, False)
    assert bytes(pinned.view) == b"01234567"
    pinned.view[:2] = b"ab"
    assert tensor.raw() == b"ab234567"
    pinned.release()
    pinned.release()


@pytest.mark.parametrize("make", TENSORS)
def test_a_tensor_lives_as_long_as_its_view(make):
    pinned = Pinned(make(b"01234567"))
    view = as_bytes_view(make(b"89abcdef"))[2:]
    gc.collect()
    noise = [bytearray(b"\x5a" * 8) for _ in range(100)]
    assert bytes(pinned.view) == b"01234567"
    assert bytes(view) == b"abcdef"
    assert len(noise) == 100


def test_the_tensor_is_let_go_after_release():
    tensor = FakeTensor(b"0123")
    alive = weakref.ref(tensor)
    pinned = Pinned(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    pinned.release()
    del pinned
    gc.collect()
    assert alive() is None


def test_the_storage_is_held_when_the_tensor_takes_another():
    tensor = FakeTensor(b"0123")
    view = as_bytes_view(tensor)
    storage = weakref.ref(tensor.storage)
    tensor.storage = None
    gc.collect()
    assert storage() is not None
    assert bytes(view) == b"0123"


def test_empty_tensor():
    pinned = Pinned(FakeTensor(b""), writable=True)
    assert (pinned.nbytes, pinned.readonly) == (0, False)


@pytest.mark.parametrize("device", ["cuda", "meta", "xpu"])
def test_device_tensor(device):
    with pytest.raises(UnsupportedError, match=rf"FakeTensor on '{device}' in the memory of an accelerator"):
        as_bytes_view(FakeTensor(b"0123", device=device))


def test_device_array_without_data_ptr():
    class DeviceArray:
        __cuda_array_interface__ = {"version": 3}  # noqa: RUF012

    with pytest.raises(UnsupportedError, match=r"a DeviceArray in the memory of an accelerator"):
        as_bytes_view(DeviceArray())


def test_strided_tensor():
    with pytest.raises(ValueError, match="source is a FakeTensor that is not contiguous"):
        as_bytes_view(FakeTensor(b"0123", contiguous=False), what="source")


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_tensor_whose_memory_does_not_hold_its_values(lazy):
    with pytest.raises(ValueError, match=f"is_{lazy}"):
        as_bytes_view(FakeTensor(b"0123", **{lazy: True}))

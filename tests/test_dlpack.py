"""Tensors through DLPack, and memory of accelerators: what is taken, what is refused, and what is given back."""

import ctypes
import gc
import mmap
import os
import weakref

import numpy as np
import pytest
from tensors import Bare, CUDAArray, FakeCUDA, Made

from pyverbs_lite._memory import accelerator as _accelerator
from pyverbs_lite._memory import dlpack as _dlpack
from pyverbs_lite._memory.buffer import Pinned, as_bytes_view, look_at
from pyverbs_lite.errors import UnsupportedError

KNOWN = [("max_version", "copy"), ("max_version",), ()]  # newer and older libraries
FAR = 0x7F00_0000_0000


# Tensors of the host: real capsules of numpy's


@pytest.mark.parametrize("known", KNOWN, ids=["1.1", "1.0", "0"])
@pytest.mark.parametrize(
    "array", [np.arange(12.0).reshape(3, 4), np.arange(5, dtype=np.uint16), np.array(7.5), np.zeros(3, complex)]
)
def test_the_memory_is_the_tensor_s_own(known, array):
    array = array.copy()
    tensor = Bare(array, known)
    view = as_bytes_view(tensor)
    assert (view.format, view.ndim, view.readonly) == ("B", 1, False)
    assert bytes(view) == array.tobytes()
    assert Pinned(tensor).addr == array.ctypes.data
    view[0] = 0x77
    assert array.tobytes()[0] == 0x77
    assert len(tensor.asked) == 2 * (1 + KNOWN.index(known))


@pytest.mark.parametrize("known", KNOWN)
def test_the_tensor_is_held_and_given_back(known):
    array = np.arange(100)
    alive = weakref.ref(array)
    pinned = Pinned(Bare(array, known))
    del array
    gc.collect()
    assert alive() is not None
    pinned.release()
    assert alive() is None


def test_a_part_keeps_it_too():
    array = np.arange(100, dtype=np.uint8)
    alive = weakref.ref(array)
    part = as_bytes_view(Bare(array))[10:20]
    del array
    assert bytes(part) == bytes(range(10, 20))
    del part
    assert alive() is None


def test_read_only_memory_stays_so():
    array = np.arange(4, dtype=np.uint8)
    array.flags.writeable = False
    view = as_bytes_view(Bare(array))
    assert view.readonly
    assert bytes(view) == b"\x00\x01\x02\x03"
    with pytest.raises(BufferError, match="into is read-only"):
        as_bytes_view(Bare(array), writable=True, what="into")
    with pytest.raises(BufferError):
        as_bytes_view(Bare(array, ()))  # a capsule without a version cannot say that, so numpy refuses


def test_a_copy_is_not_the_memory():
    with pytest.raises(BufferError, match="Bare exports a copy of its memory"):
        as_bytes_view(Bare(np.arange(4), copy=True))


@pytest.mark.parametrize("array", [np.arange(12).reshape(3, 4).T, np.arange(10)[::2], np.arange(10)[::-1]])
@pytest.mark.parametrize("known", KNOWN)
def test_strided(array, known):
    with pytest.raises(ValueError, match="is not C-contiguous"):
        as_bytes_view(Bare(array, known), what="data")


def test_a_length_of_one_has_any_stride():
    assert len(as_bytes_view(Bare(np.arange(8, dtype=np.uint8).reshape(8, 1)[::8]))) == 1


@pytest.mark.parametrize("readonly", [False, True])
def test_empty(readonly):
    array = np.zeros((0, 3))
    array.flags.writeable = not readonly
    view = as_bytes_view(Bare(array))
    assert len(view) == 0
    assert Pinned(Bare(array)).nbytes == 0


def test_what_has_some_of_torch_s_words_comes_through_dlpack():
    """As tensors of tvm do."""

    class Similar(Bare):
        device = "cpu:0"

        def data_ptr(self):
            return self.array.ctypes.data

        def is_contiguous(self):
            return True

    array = np.arange(5.0)
    assert bytes(as_bytes_view(Similar(array))) == array.tobytes()


# Capsules written by hand: what no library here does


@pytest.mark.parametrize("version", [None, (1, 0), (1, 9)])
def test_what_a_capsule_says(version):
    memory = (ctypes.c_ubyte * 64)(*range(64))
    made = Made(addr=ctypes.addressof(memory), shape=(3, 5), bits=16, offset=8, device=1, version=version)
    view = as_bytes_view(made)
    assert bytes(view) == bytes(range(8, 38))
    assert not made.deleted
    del view
    assert made.deleted == [ctypes.addressof(made.managed)]


@pytest.mark.parametrize("device", [1, 3, 11])
def test_memory_of_the_host_that_an_accelerator_reaches_is_the_host_s(device):
    memory = (ctypes.c_ubyte * 64)(*range(64))
    assert bytes(as_bytes_view(Made(addr=ctypes.addressof(memory), device=device))) == bytes(range(64))


def test_elements_smaller_than_a_byte():
    memory = (ctypes.c_ubyte * 64)(*range(64))
    made = Made(addr=ctypes.addressof(memory), shape=(5,), bits=4, device=1)
    assert bytes(as_bytes_view(made)) == b"\x00\x01\x02"


def test_a_version_that_is_not_known_is_given_back_untouched():
    made = Made(device=1, version=(2, 0))
    with pytest.raises(BufferError, match=r"speaks DLPack 2\.0"):
        as_bytes_view(made)
    assert len(made.deleted) == 1


def test_without_a_deleter_there_is_nothing_to_call():
    memory = (ctypes.c_ubyte * 64)()
    made = Made(addr=ctypes.addressof(memory), device=1, deleter=False)
    view = as_bytes_view(made)
    del view
    assert not made.deleted


def test_what_is_no_capsule():
    class Liar(Made):
        def __dlpack__(self, **_):
            return "capsule"

    with pytest.raises(TypeError, match="__dlpack__ of Liar returned no DLPack capsule, but 'capsule'"):
        as_bytes_view(Liar(device=1))
    made = Made(device=1)
    capsule = made.__dlpack__()
    _dlpack._rename(capsule, b"used_dltensor_versioned")

    class Used(Made):
        def __dlpack__(self, **_):
            return capsule

    with pytest.raises(TypeError, match="no DLPack capsule"):
        as_bytes_view(Used(device=1))


# What is in an accelerator's memory


class TorchTensor:
    """Answers as a tensor of torch does that is not on the CPU."""

    def __init__(self, addr, nbytes, *, device="cuda", dlpack=None, contiguous=True):
        self.device = type("Device", (), {"type": device})()
        self.nbytes = nbytes
        self._addr, self._contiguous = addr, contiguous
        if dlpack is not None:
            self.__dlpack__ = None
            self.__dlpack_device__ = lambda: (dlpack, 0)

    def data_ptr(self):
        return self._addr

    def is_contiguous(self):
        return self._contiguous


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (Made(addr=FAR, shape=(2, 4), bits=16), "CUDA"),
        (Made(addr=FAR, shape=(2, 4), bits=16, device=10), "ROCm"),
        (Made(addr=FAR, shape=(2, 4), bits=16, device=13), "CUDAManaged"),
        (Made(addr=FAR, shape=(2, 4), bits=16, device=99), "device 99"),
        (CUDAArray(FAR, 4, shape=(2, 2), typestr="<f4"), "CUDA"),
        (CUDAArray(FAR, 4, shape=(2, 2), typestr="<f4", strides=(8, 4)), "CUDA"),
        (CUDAArray(FAR, 4, shape=(2, 1, 2), typestr="<f4", strides=(8, 999, 4)), "CUDA"),
        (TorchTensor(FAR, 16), "cuda"),
        (TorchTensor(FAR, 16, dlpack=10), "ROCm"),
        (TorchTensor(FAR, 16, device="xpu", dlpack=14), "oneAPI"),
        (TorchTensor(FAR, 16, device="meta", dlpack=1), "meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_it_has_an_address_and_no_view(data, kind):
    with pytest.raises(UnsupportedError, match=r"in the memory of an accelerator, which the CPU must not touch"):
        as_bytes_view(data)
    memory = look_at(data, "data")
    assert (memory.addr, memory.nbytes, len(memory), memory.readonly, memory.kind) == (FAR, 16, 16, False, kind)
    part = memory[4:]
    assert (part.addr, part.nbytes, part.owner) == (FAR + 4, 12, memory.owner)
    memory.release()


def test_read_only_memory_of_an_accelerator():
    assert look_at(CUDAArray(FAR, 16, readonly=True), "data").readonly
    assert look_at(Made(addr=FAR, flags=1), "data").readonly


def test_it_is_given_back_with_the_last_that_holds_it():
    made = Made(addr=FAR)
    part = look_at(made, "data")[8:]
    assert not made.deleted
    del part
    assert len(made.deleted) == 1


@pytest.mark.parametrize(
    "data",
    [
        Made(addr=FAR, shape=(4, 4), strides=(1, 4)),
        CUDAArray(FAR, 16, shape=(4, 4), strides=(1, 4)),
        TorchTensor(FAR, 16, contiguous=False),
    ],
)
def test_strided_memory_of_an_accelerator(data):
    with pytest.raises(ValueError, match="contiguous"):
        look_at(data, "data")


@pytest.mark.parametrize("lazy", ["is_conj", "is_neg"])
def test_a_tensor_of_an_accelerator_that_does_not_hold_its_values(lazy):
    tensor = TorchTensor(FAR, 16)
    setattr(tensor, lazy, lambda: True)
    with pytest.raises(ValueError, match=lazy):
        look_at(tensor, "data")


@pytest.mark.parametrize("readonly", [False, True])
def test_nothing_in_an_accelerator_is_nothing(readonly):
    view = look_at(CUDAArray(0, 0, readonly=readonly), "data")
    assert isinstance(view, memoryview)
    assert (len(view), view.readonly) == (0, readonly)


def test_what_is_no_accelerator_s_memory():
    assert look_at(b"abc", "data") == b"abc"
    assert _accelerator.find(object()) is None
    assert _accelerator.find(Bare(np.arange(3))) is None
    assert _accelerator.find(TorchTensor(1, 1, device="cpu")) is None
    with pytest.raises(TypeError):
        look_at("text", "data")


def test_who_changes_its_mind_is_looked_at_again():
    memory = (ctypes.c_ubyte * 64)(*range(64))

    class Changes(Made):
        answers = [2, 1, 1, 1]  # noqa: RUF012

        def __dlpack_device__(self):
            return self.answers.pop(0), 0

    view = look_at(Changes(addr=ctypes.addressof(memory), device=1), "data")
    assert bytes(view) == bytes(range(64))


# Its dma-buf


def memory_of(kind="CUDA", addr=FAR + 100, nbytes=5000):
    return _accelerator.DeviceMemory(addr, nbytes, False, kind, None)


def with_driver(monkeypatch, driver):
    loaded = []

    def load(name):
        loaded.append(name)
        return driver

    monkeypatch.setattr(_accelerator.ctypes, "CDLL", load)
    return loaded


@pytest.mark.parametrize("kind", ["CUDA", "cuda"])
def test_cuda_exports_whole_pages_in_the_context_of_the_memory(monkeypatch, kind):
    driver = FakeCUDA()
    assert (loaded := with_driver(monkeypatch, driver)) == []
    fd, offset = _accelerator.export_dmabuf(memory_of(kind))
    assert (fd, offset) == (driver.fds[0], 100)
    os.close(fd)
    assert loaded == ["libcuda.so.1"]
    assert driver.calls == [
        ("context of", 1, FAR + 100),
        ("push", 0xC0),
        ("export", FAR, 2 * mmap.PAGESIZE, 1, 0),
        ("pop",),
    ]


@pytest.mark.parametrize("options", [{"context": 0}, {"push": 201}])
def test_without_a_context_of_its_own_the_current_one_does(monkeypatch, options):
    driver = FakeCUDA(**options)
    with_driver(monkeypatch, driver)
    os.close(_accelerator.export_dmabuf(memory_of())[0])
    assert ("pop",) not in driver.calls


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init": 100}, "cuInit gave error 100"),
        ({"export": 801}, "cuMemGetHandleForAddressRange gave CUDA_ERROR_NOT_SUPPORTED: .*expandable segments"),
    ],
)
def test_the_error_of_the_cuda_driver_is_named(monkeypatch, options, match):
    driver = FakeCUDA(**options)
    with_driver(monkeypatch, driver)
    with pytest.raises(UnsupportedError, match=rf"registering 5000 bytes of CUDA memory.*{match}"):
        _accelerator.export_dmabuf(memory_of())
    assert driver.calls.count(("push", 0xC0)) == driver.calls.count(("pop",))


def test_an_old_cuda_driver(monkeypatch):
    driver = FakeCUDA()
    driver.cuMemGetHandleForAddressRange = None
    with_driver(monkeypatch, driver)
    with pytest.raises(UnsupportedError, match=r"older than 11\.7"):
        _accelerator.export_dmabuf(memory_of())


class FakeROCm:
    def __init__(self, status=0):
        self.status, self.asked = status, []

    def hsa_amd_portable_export_dmabuf(self, pointer, size, fd, offset):
        self.asked.append((pointer.value, size.value))
        fd._obj.value, offset._obj.value = 77, 0x300
        return self.status


def test_rocm_says_the_offset_itself(monkeypatch):
    runtime = FakeROCm()
    loaded = with_driver(monkeypatch, runtime)
    assert _accelerator.export_dmabuf(memory_of("ROCm")) == (77, 0x300)
    assert (loaded, runtime.asked) == (["libhsa-runtime64.so.1"], [(FAR + 100, 5000)])
    with_driver(monkeypatch, FakeROCm(0x1000))
    with pytest.raises(UnsupportedError, match="status 0x1000"):
        _accelerator.export_dmabuf(memory_of("ROCm"))
    with_driver(monkeypatch, object())
    with pytest.raises(UnsupportedError, match=r"older than 5\.6"):
        _accelerator.export_dmabuf(memory_of("ROCm"))


@pytest.mark.parametrize(
    ("kind", "match"), [("CUDA", r"libcuda\.so\.1 is not there"), ("ROCm", r"libhsa-runtime64\.so\.1 is not there")]
)
def test_without_a_driver_that_is_what_lacks(monkeypatch, kind, match):
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_accelerator.ctypes, "CDLL", load)
    with pytest.raises(UnsupportedError, match=match) as caught:
        _accelerator.export_dmabuf(memory_of(kind))
    assert caught.value.errno == 95


def test_an_accelerator_of_another_kind():
    with pytest.raises(UnsupportedError, match="no way is known to get a dma-buf of Metal memory"):
        _accelerator.export_dmabuf(memory_of("Metal"))

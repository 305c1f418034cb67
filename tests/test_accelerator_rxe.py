"""Tensors as data and as targets of a connection; and memory of an accelerator, which no CPU touches on the way."""

import ctypes
import gc
import mmap
import os
import weakref

import numpy as np
import pytest
from support import A, connected, counts
from tensors import Bare, CUDAArray, FakeCUDA, Made

import pyverbs_lite as pvl
from pyverbs_lite._memory import accelerator as _accelerator
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

#: Nothing is there: a CPU that reads or writes it crashes.
FAR = 0x0000_5500_0000_0000
SIZE = 20_000


@pytest.fixture
def pair():
    with connected({"buffers": {"target": Bare(np.zeros(SIZE, np.uint8))}}) as (left, right):
        yield left, right


@pytest.fixture
def cuda(monkeypatch):
    driver = FakeCUDA()
    monkeypatch.setattr(_accelerator.ctypes, "CDLL", lambda name: driver)
    return driver


class FakeLib:
    def __init__(self, **fakes):
        self.__dict__.update(fakes)

    def __getattr__(self, name):
        return getattr(lib, name)


# Of the host


@pytest.mark.parametrize("nbytes", [100, SIZE])
def test_a_tensor_is_data_and_target(pair, nbytes):
    left, right = pair
    data = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    remote = left.remote["target"][:nbytes]
    left.write(remote, Bare(data))
    back = np.zeros(nbytes, np.uint8)
    assert left.read(remote, Bare(back)) == nbytes
    assert (back == data).all()
    back[:] = 0
    left.start_read(remote, Bare(back, ())).wait(10)
    assert (back == data).all()
    left.send(Bare(data))
    got = np.zeros(nbytes, np.uint8)
    assert right.recv_into(Bare(got), timeout=10) == nbytes
    assert (got == data).all()


def test_a_tensor_is_registered_and_held(pair):
    left, right = pair
    array = np.arange(100, dtype=np.float32)
    alive = weakref.ref(array)
    region = right.register(Bare(array), name="weights")
    del array
    gc.collect()
    remote = left.remote.wait("weights", 10)
    left.write(remote[4:8], np.float32(7.5).tobytes())
    assert np.frombuffer(region.view, np.float32)[1] == 7.5
    region.close()
    assert alive() is None
    frozen = np.arange(100, dtype=np.float32)
    frozen.flags.writeable = False
    assert right.register(Bare(frozen)).access == A.REMOTE_READ


# Of an accelerator


def things():
    return [CUDAArray(FAR + 64, 5000), CUDAArray(FAR + 64, 8), Made(addr=FAR, shape=(5000,))]


@pytest.mark.parametrize("data", things(), ids=["array", "small", "tensor"])
def test_a_device_without_dma_buf_says_so_and_the_connection_goes_on(pair, cuda, data):
    """The driver rxe has no ``reg_user_mr_dmabuf``."""
    left, right = pair
    remote, before = left.remote["target"], counts()
    for use in (
        lambda: left.send(data),
        lambda: left.write(remote, data),
        lambda: left.read(remote[:8], data),
        lambda: left.start_send(data),
        lambda: left.start_write(remote, data),
        lambda: left.start_read(remote[:8], data),
        lambda: left.write_many(remote, data, [0], [0], [8]),
        lambda: left.read_many(remote, data, [0], [0], [8]),
        lambda: left.register(data, name="gpu"),
        lambda: left._link.pd.reg_mr(data),
    ):
        with pytest.raises(pvl.UnsupportedError) as caught:
            use()
        assert caught.value.operation == "ibv_reg_dmabuf_mr"
    assert counts() == before
    assert len(cuda.fds) == 10
    left.send(b"it goes on")
    assert bytes(right.recv(timeout=10)) == b"it goes on"


def test_what_the_cpu_would_have_to_touch_is_refused(pair, cuda):
    left, right = pair
    right.send(b"message")
    for use in (
        lambda: left.recv_into(CUDAArray(FAR, 100), timeout=10),
        lambda: left.registration_cache.get(CUDAArray(FAR, 100)),
    ):
        with pytest.raises(pvl.UnsupportedError, match="which the CPU must not touch"):
            use()
    assert bytes(left.recv(timeout=10)) == b"message"
    assert not cuda.fds


def test_arguments_are_looked_at_first(pair, cuda):
    left, _ = pair
    remote = left.remote["target"]
    with pytest.raises(ValueError, match="do not fit"):
        left.write(remote[:10], CUDAArray(FAR, 11))
    with pytest.raises(ValueError, match="do not fit"):
        left.read(remote[:12], CUDAArray(FAR, 11))
    with pytest.raises(BufferError, match="read-only CUDA memory"):
        left.read(remote[:8], CUDAArray(FAR, 8, readonly=True))
    with pytest.raises(BufferError, match="read-only"):
        left.register(CUDAArray(FAR, 8, readonly=True), access=A.LOCAL_WRITE)
    with pytest.raises(ValueError, match="empty"):
        left.register(CUDAArray(FAR, 0))
    with pytest.raises(ValueError, match="longer than the peer receives"):
        left.send(CUDAArray(FAR, 1 << 20))
    left.write(remote, CUDAArray(0, 0))
    assert not cuda.fds


def test_buffers_of_a_connection_may_be_an_accelerator_s(cuda):
    with pytest.raises(pvl.UnsupportedError) as caught:
        with connected({}, {"buffers": {"gpu": CUDAArray(FAR, 4096)}}):
            pass
    assert caught.value.operation == "ibv_reg_dmabuf_mr"


def test_a_region_of_an_accelerator_s_memory(pd, cuda, monkeypatch):
    seen, page = [], mmap.mmap(-1, 4096)

    def register(handle, *arguments):
        seen.append((*arguments[:3], os.fstat(arguments[3]).st_size, arguments[4]))
        return lib.ibv_reg_mr(handle, ffi.from_buffer(page), 4096, lib.IBV_ACCESS_LOCAL_WRITE)

    monkeypatch.setattr("pyverbs_lite.mr.lib", FakeLib(ibv_reg_dmabuf_mr=register))
    made = Made(addr=FAR + 4096 * 3 + 100, shape=(1000,), bits=32)
    before = len(os.listdir("/proc/self/fd"))
    with pd.reg_mr(made, A.LOCAL_WRITE | A.REMOTE_READ) as region:
        assert seen == [(100, 4000, FAR + 4096 * 3 + 100, 0, A.LOCAL_WRITE | A.REMOTE_READ)]
        assert (region.addr, region.length, region[8:16].addr) == (FAR + 12388, 4000, FAR + 12396)
        with pytest.raises(pvl.StateError, match="no memory of this process"):
            region.view  # noqa: B018
        assert len(os.listdir("/proc/self/fd")) == before
        gc.collect()
        assert not made.deleted
    assert len(made.deleted) == 1
    with pd.reg_mr(CUDAArray(FAR, 8, readonly=True)) as region:
        assert region.access == A(0)
    with pd.reg_mr(CUDAArray(FAR, 8)) as region:
        assert region.access == A.LOCAL_WRITE


def test_it_moves_without_a_copy(pair, cuda, monkeypatch):
    """Host memory in the place of an accelerator's; whatever is said to the driver, the bytes go straight to it."""
    left, right = pair
    owner = (ctypes.c_ubyte * SIZE)(*(i % 251 for i in range(SIZE)))
    registered = []

    def register(engine, region, pd, offset, length, iova, fd, access):
        registered.append((length, access))
        return lib.pvl_register(engine, region, pd, iova, length, access)

    monkeypatch.setattr("pyverbs_lite._connection.operation.lib", FakeLib(pvl_register_dmabuf=register))
    before = counts()
    data = CUDAArray(ctypes.addressof(owner), SIZE)
    remote = left.remote["target"]
    left.write(remote, data)
    assert left.read(remote) == bytes(owner)
    left.send(CUDAArray(ctypes.addressof(owner) + 10, 5))  # small, and not copied either
    assert bytes(right.recv(timeout=10)) == bytes(owner[10:15])
    left.write(remote[100:200], b"\x99" * 100)
    left.read(remote[100:150], data)
    assert bytes(owner[:50]) == b"\x99" * 50
    left.start_read(remote[150:160], data).wait(10)
    left.read_many(remote, data, [1000], [100], [7])
    assert bytes(owner[1000:1007]) == b"\x99" * 7
    assert registered == [(SIZE, 0), (5, 0), (50, 1), (10, 1), (SIZE, 1)]
    assert counts() == before


def test_it_is_held_while_it_is_in_flight(pair, cuda, monkeypatch):
    left, _ = pair
    owner = (ctypes.c_ubyte * SIZE)()

    def register(engine, region, pd, offset, length, iova, fd, access):
        return lib.pvl_register(engine, region, pd, iova, length, access)

    monkeypatch.setattr("pyverbs_lite._connection.operation.lib", FakeLib(pvl_register_dmabuf=register))
    made = Made(addr=ctypes.addressof(owner), shape=(SIZE,))
    work = left.start_write(left.remote["target"], made)
    gc.collect()
    if not work._op.ended:
        assert not made.deleted
    work.wait(10)
    del work
    gc.collect()
    assert len(made.deleted) == 1

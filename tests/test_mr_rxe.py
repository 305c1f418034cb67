"""Memory regions on a real driver: what can be registered, and what a registration keeps in place."""

from __future__ import annotations

import array
import copy
import gc
import mmap
import pickle
import resource
import weakref

import numpy as np
import pytest
from support import ALL_ACCESS, completions, connect_qps, make_qp

import pyverbs_lite as pvl
from pyverbs_lite.ffi import lib

pytestmark = pytest.mark.rdma

A = pvl.AccessFlags


@pytest.fixture
def cq(context):
    return context.create_cq(100)


@pytest.fixture
def pair(pd, cq):
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right, timeout=10, retry_cnt=2, rnr_retry=1)
    return left, right


# ---------------------------------------------------------------- which buffers


@pytest.mark.parametrize(
    ("buffer", "nbytes"),
    [
        (bytearray(17), 17),
        (memoryview(bytearray(100))[10:33], 23),
        (array.array("I", range(8)), 32),
        (memoryview(array.array("I", range(8))), 32),
        (np.arange(100, dtype=np.int32), 400),
        (np.zeros((3, 5)), 120),
        (np.arange(100)[10:20], 80),
        (np.array(7.0), 8),
        (mmap.mmap(-1, 4096), 4096),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_length_is_in_bytes(pd, buffer, nbytes):
    with pd.reg_mr(buffer) as mr:
        assert (mr.length, len(mr), mr.view.nbytes) == (nbytes, nbytes, nbytes)
        assert mr.access == A.LOCAL_WRITE
        address = np.frombuffer(buffer, np.uint8).ctypes.data if nbytes else 0
        assert mr.addr == address


@pytest.mark.parametrize(
    "buffer",
    [
        np.arange(100)[::2],
        np.arange(100)[::-1],
        np.zeros((4, 6)).T,
        np.asfortranarray(np.zeros((4, 6))),
        memoryview(bytearray(10))[::2],
    ],
    ids=["step", "reversed", "transposed", "F-order", "memoryview step"],
)
def test_what_is_not_one_range_is_refused_and_never_copied(pd, buffer):
    with pytest.raises(ValueError, match="not C-contiguous"):
        pd.reg_mr(buffer)


@pytest.mark.parametrize("access", [A.LOCAL_WRITE, A.LOCAL_WRITE | A.REMOTE_WRITE, ALL_ACCESS])
@pytest.mark.parametrize("make", [lambda: b"constant", lambda: memoryview(b"constant"), lambda: frozen()])
def test_read_only_memory_cannot_be_a_target(pd, make, access):
    with pytest.raises(BufferError, match="read-only"):
        pd.reg_mr(make(), access)


def frozen():
    values = np.arange(10)
    values.flags.writeable = False
    return values


@pytest.mark.parametrize("access", [None, A(0), A.REMOTE_READ])
def test_read_only_memory_can_be_a_source(pd, access):
    with pd.reg_mr(b"constant", access) as mr:
        assert mr.access == (access or A(0))
        assert mr.view.readonly
        assert bytes(mr.view) == b"constant"


@pytest.mark.parametrize("buffer", [bytearray(), b"", np.zeros(0), memoryview(b"")])
def test_nothing_cannot_be_registered(pd, buffer):
    with pytest.raises(ValueError, match="empty"):
        pd.reg_mr(buffer)


@pytest.mark.parametrize("buffer", ["text", 5, None, [1, 2], object()])
def test_what_has_no_memory(pd, buffer):
    with pytest.raises(TypeError, match="buffer protocol"):
        pd.reg_mr(buffer)


def test_references_to_python_objects_are_not_data(pd):
    with pytest.raises((TypeError, ValueError)):
        pd.reg_mr(np.array([[], {}], dtype=object))


# ---------------------------------------------------------------- access flags


@pytest.mark.parametrize("access", [A.REMOTE_WRITE, A.REMOTE_ATOMIC, A.REMOTE_WRITE | A.REMOTE_READ])
def test_remote_write_needs_local_write_and_the_error_says_so(pd, access):
    with pytest.raises(ValueError, match="needs LOCAL_WRITE as well"):
        pd.reg_mr(bytearray(8), access)


def test_the_kernel_says_the_same_but_not_why(pd):
    buffer = bytearray(8)
    address = pvl.ffi.ffi.from_buffer(buffer)
    assert not lib.ibv_reg_mr(pd._handle, address, 8, A.REMOTE_WRITE)
    assert pvl.ffi.ffi.errno == 22


@pytest.mark.parametrize("access", [-1, 1 << 31, 1 << 40])
def test_flags_outside_an_int(pd, access):
    with pytest.raises(ValueError, match="access must be"):
        pd.reg_mr(bytearray(8), access)


@pytest.mark.parametrize("access", ["rw", 1.0, True, pvl.SendFlags.FENCE])
def test_flags_of_another_kind(pd, access):
    with pytest.raises(TypeError, match="access must be"):
        pd.reg_mr(bytearray(8), access)


def test_flags_that_the_device_does_not_have(pd):
    buffer = bytearray(64)
    with pytest.raises(pvl.VerbsOSError, match="ibv_reg_mr failed") as caught:
        pd.reg_mr(buffer, 1 << 19)
    assert caught.value.errno > 0
    assert "Success" not in str(caught.value)
    buffer.extend(b"it is free to move again")


# ---------------------------------------------------------------- what it keeps in place


def test_a_bytearray_cannot_be_resized_while_registered(pd):
    buffer = bytearray(64)
    mr = pd.reg_mr(buffer)
    with pytest.raises(BufferError):
        buffer.append(1)
    with pytest.raises(BufferError):
        buffer.clear()
    mr.close()
    buffer.append(1)
    assert len(buffer) == 65


def test_an_array_cannot_be_resized_nor_a_mapping_closed(pd):
    values = np.zeros(8)
    mapping = mmap.mmap(-1, 4096)
    with pd.reg_mr(values), pd.reg_mr(mapping):
        with pytest.raises(ValueError, match="resize"):
            values.resize(16)
        with pytest.raises(BufferError):
            mapping.close()
    mapping.close()


class Owned(bytearray):
    """A buffer that can be watched."""


def test_the_region_keeps_its_buffer_alive(pd):
    buffer = Owned(b"x" * 64)
    watch = weakref.ref(buffer)
    mr = pd.reg_mr(buffer)
    del buffer
    gc.collect()
    assert watch() is not None
    mr.close()
    gc.collect()
    assert watch() is None


def test_a_request_in_flight_keeps_region_and_buffer_alive(pd, cq, pair):
    left, right = pair
    buffer = Owned(b"\x5a" * 64)
    mr = pd.reg_mr(buffer)
    watch = weakref.ref(buffer), weakref.ref(mr)
    right.post_recv(pvl.RecvWR(sg_list=[mr[8:24]], wr_id=3))
    address = mr.addr
    del buffer, mr
    gc.collect()
    assert all(reference() is not None for reference in watch)
    others = [bytearray(b"\x5a" * 64) for _ in range(200)]
    assert address not in {np.frombuffer(other, np.uint8).ctypes.data for other in others}
    with pd.reg_mr(b"late arrival 16B") as source:
        left.post_send(pvl.SendWR(sg_list=[source]))
        with pytest.warns(ResourceWarning, match="MR of 64 bytes was never closed"):  # nobody has it any more
            done = completions(cq, 2)
    assert {wc.status for wc in done} == {pvl.WCStatus.SUCCESS}
    assert all(other == b"\x5a" * 64 for other in others)
    gc.collect()
    assert [reference() for reference in watch] == [None, None]


def test_a_region_in_flight_is_not_deregistered(pd, cq, pair):
    left, right = pair
    target, source = pd.reg_mr(bytearray(64)), pd.reg_mr(bytearray(b"0123456789"))
    right.post_recv(pvl.RecvWR(sg_list=[target[:20], target[32:]], wr_id=1), pvl.RecvWR(sg_list=[target], wr_id=2))
    with pytest.raises(pvl.BusyError, match=r"the MR of 64 bytes is used by 2 request\(s\) in flight"):
        target.close()
    assert not target.closed
    left.post_send(pvl.SendWR(sg_list=[source]))
    completions(cq, 2)
    with pytest.raises(pvl.BusyError, match=r"used by 1 request\(s\)"):
        target.close()
    assert bytes(target.view[:10]) == b"0123456789"  # still usable
    source.close()
    right.to_error()
    assert [wc.status for wc in completions(cq, 1)] == [pvl.WCStatus.WR_FLUSH_ERR]
    target.close()
    assert target.closed


@pytest.mark.parametrize("how", ["close", "to_reset", "modify to RESET", "drop"])
def test_whatever_ends_the_qp_frees_the_region(pd, cq, how):
    qp = make_qp(pd, cq)
    qp.to_init()
    target = pd.reg_mr(bytearray(64))
    qp.post_recv(pvl.RecvWR(sg_list=[target]), pvl.RecvWR(sg_list=[target[1:2]]))
    with pytest.raises(pvl.BusyError):
        target.close()
    if how == "close":
        qp.close()
    elif how == "to_reset":
        qp.to_reset()
    elif how == "modify to RESET":
        qp.modify(pvl.QPAttr(qp_state=pvl.QPState.RESET))
    else:
        with pytest.warns(ResourceWarning, match=r"QP 0x.* was never closed"):
            del qp
    target.close()


def test_closing_the_pd_closes_a_region_in_flight(context, cq):
    pd = context.alloc_pd()
    qp = make_qp(pd, cq)
    qp.to_init()
    mr = pd.reg_mr(bytearray(64))
    qp.post_recv(pvl.RecvWR(sg_list=[mr]))
    pd.close()
    assert (qp.closed, mr.closed, pd.closed, cq.closed) == (True, True, True, False)


def test_a_qp_in_one_pd_and_a_region_in_another(context, cq, pair):
    with context.alloc_pd() as other, other.reg_mr(bytearray(64)) as mr:
        with pytest.raises(ValueError, match="belongs to another PD"):
            pair[0].post_send(pvl.SendWR(sg_list=[mr]))
        with pytest.raises(ValueError, match="belongs to another PD"):
            pair[0].post_recv(pvl.RecvWR(sg_list=[mr]))


# ---------------------------------------------------------------- slices and views


def test_slices_are_checked_and_nest(pd):
    with pd.reg_mr(bytearray(range(100))) as mr:
        part = mr[10:50]
        assert (part.addr, part.length, part.lkey, part.rkey) == (mr.addr + 10, 40, mr.lkey, mr.rkey)
        assert bytes(part[5:-30].view) == bytes(range(15, 20))
        assert len(mr[100:]) == 0
        for bad in (slice(0, 101), slice(-101, None), slice(60, 50), slice(0, 10, 2)):
            with pytest.raises((IndexError, ValueError)):
                mr[bad]
        with pytest.raises(IndexError):
            part[0:41]
        with pytest.raises(TypeError, match="ranges only"):
            mr[3]


def test_a_slice_becomes_a_remote_buffer(pd):
    with pd.reg_mr(bytearray(100), A.REMOTE_READ) as mr:
        remote = pvl.RemoteBuffer.of(mr[25:75])
        assert (remote.addr, remote.rkey, remote.length) == (mr.addr + 25, mr.rkey, 50)


def test_a_view_writes_through(pd):
    buffer = bytearray(10)
    with pd.reg_mr(buffer) as mr:
        mr.view[2:4] = b"ab"
        mr[5:7].view[:] = b"cd"
    assert buffer == b"\0\0ab\0cd\0\0\0"


def test_a_view_that_outlives_its_region_keeps_the_buffer_and_nothing_else(pd):
    buffer = bytearray(b"0123456789")
    mr = pd.reg_mr(buffer)
    part = mr.view[3:6]
    mr.close()
    assert bytes(part) == b"345"
    part.release()


def test_after_close(pd):
    mr = pd.reg_mr(bytearray(10))
    part = mr[2:5]
    mr.close()
    mr.close()
    for use in (lambda: mr.view, lambda: part.view):
        with pytest.raises(pvl.ClosedError, match="MR is closed"):
            use()
    assert repr(mr) == "<MR of 10 bytes (closed)>"


# ---------------------------------------------------------------- allocation


def test_allocated_memory_is_zero_and_page_aligned(pd):
    with pd.alloc(5000) as mr:
        assert (mr.length, mr.addr % mmap.PAGESIZE, mr.access) == (5000, 0, A.LOCAL_WRITE)
        assert bytes(mr.view) == bytes(5000)
        mr.view[4999] = 7


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 63])
def test_an_impossible_amount(pd, nbytes):
    with pytest.raises(ValueError, match="nbytes"):
        pd.alloc(nbytes)


@pytest.mark.parametrize("nbytes", [1.5, "4096", None, True])
def test_an_amount_that_is_no_number(pd, nbytes):
    with pytest.raises(TypeError, match="nbytes"):
        pd.alloc(nbytes)


def test_keys_differ_between_regions(pd):
    regions = [pd.alloc(4096, ALL_ACCESS) for _ in range(20)]
    assert len({mr.rkey for mr in regions}) == len({mr.lkey for mr in regions}) == 20


def test_many_registrations_leave_nothing_behind(pd):
    buffer = bytearray(1 << 16)
    pd.reg_mr(buffer).close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(500):
        pd.reg_mr(buffer).close()
    buffer.append(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8192  # kilobytes


# ---------------------------------------------------------------- not to be copied


def test_handles_are_not_pickled_or_copied(context, pd, cq, pair):
    mr = pd.alloc(64)
    channel = context.create_comp_channel()
    for live in (context, pd, cq, channel, mr, pair[0], mr[:8]):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                pickle.dumps(live, protocol)
    for live in (context, pd, cq, channel, mr, pair[0], mr[:8]):
        for duplicate in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="RemoteBuffer"):
                duplicate(live)


def test_what_describes_a_region_is(pd):
    with pd.alloc(64, ALL_ACCESS) as mr:
        remote = pvl.RemoteBuffer.of(mr)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(remote, protocol)) == remote
        assert copy.copy(remote) == copy.deepcopy(remote) == remote

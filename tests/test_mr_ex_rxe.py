"""Memory regions of other kinds, and changing one in place."""

from __future__ import annotations

import errno
import mmap
import os

import pytest
from support import ALL_ACCESS, completions, connect_qps, make_qp

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

A, OP, S = pvl.AccessFlags, pvl.WROpcode, pvl.WCStatus
PAGE = mmap.PAGESIZE
#: Where nothing of this process is mapped.
FAR = 0x1234_5678_9000


@pytest.fixture
def siw_pd():
    with pvl.Context("siw0") as context, context.alloc_pd() as pd:
        yield pd


@pytest.fixture
def cq(context):
    return context.create_cq(100)


@pytest.fixture
def pair(pd, cq):
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right, timeout=10, retry_cnt=2, rnr_retry=1)
    return left, right


class FakeLib:
    """The real ``lib``, but for what is replaced."""

    def __init__(self, **replaced):
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(lib, name)


def done(cq, count=1):
    return [wc.status for wc in completions(cq, count)]


# ---------------------------------------------------------------- an address of choice


@pytest.mark.parametrize("iova", [0, PAGE, FAR, (1 << 64) - PAGE])
def test_a_region_is_reached_by_its_iova(pd, cq, pair, iova):
    left, right = pair
    source, target = mmap.mmap(-1, PAGE), mmap.mmap(-1, PAGE)
    source[10:20] = b"0123456789"
    with pd.reg_mr_iova(source, iova) as mine, pd.reg_mr_iova(target, iova, ALL_ACCESS) as theirs:
        assert (mine.addr, mine.length, mine[10:20].addr) == (iova, PAGE, iova + 10)
        remote = pvl.RemoteBuffer.of(theirs)
        assert remote.addr == iova
        left.post_send(pvl.SendWR(opcode=OP.RDMA_WRITE, sg_list=[mine[10:20]], remote=remote[100:110]))
        assert done(cq) == [S.SUCCESS]
        assert bytes(theirs.view[98:112]) == b"\0\0" + b"0123456789" + b"\0\0"
        right.post_recv(pvl.RecvWR(sg_list=[theirs[200:300]]))
        left.post_send(pvl.SendWR(sg_list=[mine[15:20]]))
        assert done(cq, 2) == [S.SUCCESS] * 2
    assert target[200:205] == b"56789"


def test_inline_data_is_read_where_it_is(pd, cq, pair):
    left, right = pair
    source = mmap.mmap(-1, PAGE)
    source[10:20] = b"0123456789"
    target = pd.alloc(PAGE)
    with pd.reg_mr_iova(source, FAR) as mine:
        right.post_recv(pvl.RecvWR(sg_list=[target]))
        flags = pvl.SendFlags.SIGNALED | pvl.SendFlags.INLINE
        left.post_send(pvl.SendWR(sg_list=[mine[10:14], mine[18:20]], send_flags=flags))
        source[10:20] = bytes(10)
        assert done(cq, 2) == [S.SUCCESS] * 2
    assert bytes(target.view[:7]) == b"012389\0"


def test_an_iova_with_an_unaligned_buffer(pd):
    mapping = mmap.mmap(-1, 2 * PAGE)
    part = memoryview(mapping)[100:200]
    with pytest.raises(ValueError, match=r"must have the same place within a page of 4096 bytes: .* plus 0x64"):
        pd.reg_mr_iova(part, FAR)
    with pd.reg_mr_iova(part, FAR + 100) as mr:
        assert (mr.addr, mr.length) == (FAR + 100, 100)


@pytest.mark.parametrize(
    ("iova", "error"), [(-1, ValueError), (1 << 64, ValueError), ((1 << 64) - PAGE, ValueError), (None, TypeError)]
)
def test_what_is_no_iova(pd, iova, error):
    buffer = mmap.mmap(-1, 2 * PAGE)
    with pytest.raises(error, match="iova"):
        pd.reg_mr_iova(buffer, iova)
    buffer.close()  # it is not held


def test_an_iova_checks_the_buffer_as_reg_mr_does(pd):
    with pytest.raises(BufferError, match="read-only"):
        pd.reg_mr_iova(b"constant", 0, A.LOCAL_WRITE)
    with pytest.raises(ValueError, match="needs LOCAL_WRITE"):
        pd.reg_mr_iova(bytearray(8), 0, A.REMOTE_WRITE)
    with pytest.raises(ValueError, match="empty"):
        pd.reg_mr_iova(bytearray(), 0)
    with pytest.raises(ValueError, match="contradict"):
        pd.reg_mr_iova(mmap.mmap(-1, PAGE), 0, A.ZERO_BASED)


def test_a_region_by_iova_holds_its_buffer(pd):
    buffer = mmap.mmap(-1, PAGE)
    with pd.reg_mr_iova(buffer, 0), pytest.raises(BufferError):
        buffer.close()
    buffer.close()


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("flag", [A.ZERO_BASED, A.ON_DEMAND, A.HUGETLB])
def test_flags_that_soft_roce_does_not_take(pd, flag):
    buffer = bytearray(64)
    with pytest.raises(pvl.UnsupportedError, match="ibv_reg_mr"):
        pd.reg_mr(buffer, A.LOCAL_WRITE | flag)
    buffer.append(0)


def test_relaxed_ordering_is_a_wish_that_every_device_takes(pd):
    pd.reg_mr(bytearray(64), A.LOCAL_WRITE | A.RELAXED_ORDERING).close()


def test_the_addresses_of_a_zero_based_region_count_from_0(pd, monkeypatch):
    buffer = bytearray(64)
    address = pvl.MR(pd, buffer).addr

    def reg_mr(handle, start, length, access):
        assert access & lib.IBV_ACCESS_ZERO_BASED
        return lib.ibv_reg_mr(handle, start, length, access & ~lib.IBV_ACCESS_ZERO_BASED)

    monkeypatch.setattr("pyverbs_lite.mr.lib", FakeLib(ibv_reg_mr=reg_mr))
    with pd.reg_mr(buffer, A.LOCAL_WRITE | A.ZERO_BASED) as mr:
        assert (mr.addr, mr[5:9].addr, mr[5:9]._host_addr) == (0, 5, address + 5)


# ---------------------------------------------------------------- kinds that no device here has


@pytest.mark.parametrize("device", ["rxe0", "siw0"])
def test_what_soft_devices_lack(device):
    with pvl.Context(device) as context:
        pd = context.alloc_pd()
        for make in (
            pd.alloc_null_mr,
            pd.reg_implicit_mr,
            lambda: pd.reg_dmabuf_mr(os.dup(0), PAGE),
            lambda: pd.advise_mr(pvl.AdviseMRAdvice.PREFETCH, [pd.alloc(PAGE)]),
        ):
            with pytest.raises(pvl.UnsupportedError):
                make()


def some_mr(pd, seen):
    """Return a function that stands in for a registering verb: it notes what it is given and registers a page."""
    page = ffi.from_buffer(mmap.mmap(-1, PAGE))

    def register(handle, *arguments):
        seen.append(arguments)
        return lib.ibv_reg_mr(handle, page, PAGE, lib.IBV_ACCESS_LOCAL_WRITE)

    return register


def test_a_dmabuf_is_registered_as_asked(pd, monkeypatch):
    seen = []
    monkeypatch.setattr("pyverbs_lite.mr_ex.lib", FakeLib(ibv_reg_dmabuf_mr=some_mr(pd, seen)))
    with pd.reg_dmabuf_mr(3, 4096, offset=8192, iova=FAR, access=A.LOCAL_WRITE | A.REMOTE_READ) as mr:
        assert seen == [(8192, 4096, FAR, 3, lib.IBV_ACCESS_LOCAL_WRITE | lib.IBV_ACCESS_REMOTE_READ)]
        assert (mr.addr, mr.length, mr.offset, mr[16:32].addr) == (FAR, 4096, 8192, FAR + 16)
        with pytest.raises(pvl.StateError, match="no memory of this process"):
            mr.view  # noqa: B018
        with pytest.raises(pvl.StateError, match="only a registered buffer"):
            mr.rereg(access=A(0))
    with pd.reg_dmabuf_mr(3, 100, offset=8192) as mr:
        assert seen[1] == (8192, 100, 8192, 3, lib.IBV_ACCESS_LOCAL_WRITE)
        assert mr.addr == 8192


def test_nothing_of_another_devices_memory_goes_inline(pd, pair, monkeypatch):
    monkeypatch.setattr("pyverbs_lite.mr_ex.lib", FakeLib(ibv_reg_dmabuf_mr=some_mr(pd, [])))
    mr = pd.reg_dmabuf_mr(3, 100)
    with pytest.raises(ValueError, match="nothing of it can go inline"):
        pair[0].post_send(pvl.SendWR(sg_list=[mr[:8]], send_flags=pvl.SendFlags.INLINE))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"fd": -1, "length": 8}, ValueError),
        ({"fd": "3", "length": 8}, TypeError),
        ({"fd": 3, "length": 0}, ValueError),
        ({"fd": 3, "length": 8, "offset": -1}, ValueError),
        ({"fd": 3, "length": 8, "iova": 1 << 64}, ValueError),
        ({"fd": 3, "length": 8, "access": A.REMOTE_WRITE}, ValueError),
    ],
)
def test_what_is_no_range_of_a_dmabuf(pd, arguments, error):
    with pytest.raises(error):
        pd.reg_dmabuf_mr(**arguments)


def test_the_whole_address_space(pd, monkeypatch):
    seen = []
    monkeypatch.setattr("pyverbs_lite.mr_ex.lib", FakeLib(ibv_reg_mr=some_mr(pd, seen)))
    with pd.reg_implicit_mr(A.LOCAL_WRITE | A.REMOTE_READ) as mr:
        assert seen == [(ffi.NULL, (1 << 64) - 1, A.LOCAL_WRITE | A.REMOTE_READ | A.ON_DEMAND)]
        assert (mr[FAR : FAR + 8].addr, mr[FAR : FAR + 8]._host_addr) == (FAR, FAR)
        with pytest.raises(pvl.StateError):
            mr.view  # noqa: B018


def test_a_region_of_nothing(pd, monkeypatch):
    seen = []
    monkeypatch.setattr("pyverbs_lite.mr_ex.lib", FakeLib(ibv_alloc_null_mr=some_mr(pd, seen)))
    with pd.alloc_null_mr() as mr:
        assert seen == [()]
        assert (mr[:64].addr, mr[:64].length, mr.access) == (0, 64, A.LOCAL_WRITE)
        assert mr[100:164].addr == 100


def test_advice_as_the_verb_takes_it(pd, monkeypatch):
    seen = []

    def advise(handle, advice, flags, sges, count):
        seen.append((handle, advice, flags, [(sges[i].addr, sges[i].length, sges[i].lkey) for i in range(count)]))
        return 0

    monkeypatch.setattr("pyverbs_lite._objects.factories.lib", FakeLib(ibv_advise_mr=advise))
    mr = pd.alloc(PAGE)
    pd.advise_mr(pvl.AdviseMRAdvice.PREFETCH_WRITE, [mr[8:24], pvl.SGE(1, 2, 3)], flush=True)
    mr.advise(pvl.AdviseMRAdvice.PREFETCH)
    assert seen == [
        (pd._handle, 1, lib.IBV_ADVISE_MR_FLAG_FLUSH, [(mr.addr + 8, 16, mr.lkey), (1, 2, 3)]),
        (pd._handle, 0, 0, [(mr.addr, PAGE, mr.lkey)]),
    ]


def test_advice_that_cannot_be_right(context, pd):
    mr = pd.alloc(PAGE)
    with pytest.raises(ValueError, match="at least one range"):
        pd.advise_mr(pvl.AdviseMRAdvice.PREFETCH, [])
    with pytest.raises(ValueError, match="AdviseMRAdvice"):
        pd.advise_mr(77, [mr])
    with context.alloc_pd() as other, pytest.raises(ValueError, match="another PD"):
        other.advise_mr(pvl.AdviseMRAdvice.PREFETCH, [mr[:8]])


# ---------------------------------------------------------------- changed in place


def test_soft_roce_of_this_library_changes_nothing_and_says_so(pd, cq, pair):
    left, _ = pair
    buffer, new = bytearray(b"0123456789"), bytearray(20)
    target = pd.alloc(64, ALL_ACCESS)
    mr = pd.reg_mr(buffer)
    before = (mr.addr, mr.length, mr.lkey, mr.access, mr.pd)
    other = pd.context.alloc_pd()
    for change in ({"access": A(0)}, {"buffer": new}, {"pd": other}, {"buffer": new, "access": A(0), "pd": other}):
        with pytest.raises(pvl.UnsupportedError, match="the region is as it was"):
            mr.rereg(**change)
        assert (mr.addr, mr.length, mr.lkey, mr.access, mr.pd) == before
    new.append(0)  # it is not held
    with pytest.raises(BufferError):
        buffer.append(0)
    left.post_send(pvl.SendWR(opcode=OP.RDMA_WRITE, sg_list=[mr[2:5]], remote=pvl.RemoteBuffer.of(target)))
    assert done(cq) == [S.SUCCESS]
    assert bytes(target.view[:4]) == b"234\0"
    mr.close()
    other.close()


def rereg_as(monkeypatch, rc, number=0, *, lkey=None, seen=None):
    """Let ``ibv_rereg_mr`` end as asked."""

    def rereg(mr, flags, pd, addr, length, access):
        if seen is not None:
            seen.append((flags, pd, int(ffi.cast("uintptr_t", addr)), length, access))
        if lkey is not None:
            mr.lkey, mr.rkey = lkey, lkey + 1
        ffi.errno = number
        return rc

    class WithErrno(FakeLib):
        pass

    monkeypatch.setattr("pyverbs_lite._memory.rereg.lib", WithErrno(ibv_rereg_mr=rereg))


def address_of(buffer):
    return int(ffi.cast("uintptr_t", ffi.from_buffer(buffer)))


def test_other_rights(pd, monkeypatch):
    seen = []
    mr = pd.reg_mr(bytearray(64))
    rereg_as(monkeypatch, 0, lkey=0x777, seen=seen)
    mr.rereg(access=A.LOCAL_WRITE | A.REMOTE_READ)
    assert seen == [(lib.IBV_REREG_MR_CHANGE_ACCESS, ffi.NULL, 0, 0, A.LOCAL_WRITE | A.REMOTE_READ)]
    assert (mr.access, mr.lkey, mr.rkey, mr.length) == (A.LOCAL_WRITE | A.REMOTE_READ, 0x777, 0x778, 64)


def test_another_range(pd, monkeypatch):
    seen, old, new = [], bytearray(64), bytearray(b"the new range")
    address = address_of(new)
    mr = pd.reg_mr(old)
    rereg_as(monkeypatch, 0, seen=seen)
    mr.rereg(buffer=new)
    assert seen == [(lib.IBV_REREG_MR_CHANGE_TRANSLATION, ffi.NULL, address, 13, 0)]
    assert (mr.addr, mr.length, bytes(mr.view)) == (address, 13, b"the new range")
    assert (mr._c.addr, mr._c.here, mr._c.length) == (address, address, 13)  # what short messages are copied out of
    old.append(0)  # free to move
    with pytest.raises(BufferError):
        new.append(0)
    mr.close()
    new.append(0)


def test_another_pd(context, pd, monkeypatch):
    seen = []
    other = context.alloc_pd()
    mr = pd.reg_mr(bytearray(64))
    rereg_as(monkeypatch, 0, seen=seen)
    mr.rereg(pd=other)
    assert seen == [(lib.IBV_REREG_MR_CHANGE_PD, other._handle, 0, 0, 0)]
    assert mr.pd is other
    rereg_as(monkeypatch, 0)
    monkeypatch.undo()
    assert not mr.closed
    other.close()  # it goes with its new PD
    assert mr.closed
    assert not pd.closed


def test_everything_at_once(context, pd, monkeypatch):
    seen, new = [], bytearray(33)
    other = context.alloc_pd()
    mr = pd.reg_mr(bytearray(64))
    rereg_as(monkeypatch, 0, seen=seen)
    mr.rereg(buffer=new, access=ALL_ACCESS, pd=other)
    assert seen == [(lib.IBV_REREG_MR_FLAGS_SUPPORTED, other._handle, address_of(new), 33, ALL_ACCESS)]
    assert (mr.length, mr.access, mr.pd) == (33, ALL_ACCESS, other)


@pytest.mark.parametrize("code", [pvl.ReregMRErrCode.INPUT, pvl.ReregMRErrCode.DONT_FORK_NEW])
def test_failures_that_leave_the_region_as_it_was(pd, monkeypatch, code):
    old, new = bytearray(64), bytearray(33)
    mr = pd.reg_mr(old)
    before = (mr.addr, mr.length, mr.access)
    rereg_as(monkeypatch, int(code), errno.EINVAL)
    with pytest.raises(pvl.VerbsOSError, match="the region is as it was") as caught:
        mr.rereg(buffer=new)
    assert caught.value.errno == errno.EINVAL
    assert (mr.addr, mr.length, mr.access) == before
    new.append(0)
    assert bytes(mr.view) == bytes(64)
    mr.close()


def test_a_failure_that_came_after_the_change(pd, monkeypatch):
    old, new = bytearray(64), bytearray(33)
    mr = pd.reg_mr(old)
    rereg_as(monkeypatch, int(pvl.ReregMRErrCode.DO_FORK_OLD), errno.ENOMEM)
    with pytest.raises(pvl.VerbsOSError, match="was changed as asked") as caught:
        mr.rereg(buffer=new)
    assert caught.value.errno == errno.ENOMEM
    assert mr.length == 33
    old.append(0)
    with pytest.raises(BufferError):
        new.append(0)


@pytest.mark.parametrize("code", [pvl.ReregMRErrCode.CMD, pvl.ReregMRErrCode.CMD_AND_DO_FORK_NEW, 22])
def test_failures_that_spoil_the_region(pd, pair, monkeypatch, code):
    old, new = bytearray(64), bytearray(33)
    mr = pd.reg_mr(old)
    rereg_as(monkeypatch, int(code), errno.ENOMEM)
    with pytest.raises(pvl.VerbsOSError, match="can only be closed now") as caught:
        mr.rereg(buffer=new)
    assert caught.value.errno == errno.ENOMEM
    for buffer in (old, new):  # nobody knows which of them the device uses
        with pytest.raises(BufferError):
            buffer.append(0)
    with pytest.raises(pvl.StateError, match="was spoiled"):
        pair[0].post_send(pvl.SendWR(sg_list=[mr]))
    with pytest.raises(pvl.StateError, match="was spoiled"):
        pair[1].post_recv(pvl.RecvWR(sg_list=[mr[1:2]]))
    with pytest.raises(pvl.StateError, match="can only be closed"):
        mr.rereg(access=A(0))
    mr.close()
    old.append(0)
    new.append(0)


def test_an_error_without_a_number(pd, monkeypatch):
    mr = pd.reg_mr(bytearray(64))
    rereg_as(monkeypatch, -1, 0)
    with pytest.raises(pvl.VerbsOSError) as caught:
        mr.rereg(access=A(0))
    assert caught.value.errno == errno.EIO


def test_changes_that_are_refused_before_the_verb(context, pd, cq):
    mr = pd.reg_mr(bytearray(64))
    constant = pd.reg_mr(b"constant")
    with pytest.raises(ValueError, match="nothing is to be changed"):
        mr.rereg()
    with pytest.raises(ValueError, match="needs LOCAL_WRITE"):
        mr.rereg(access=A.REMOTE_WRITE)
    with pytest.raises(BufferError, match="read-only"):
        constant.rereg(access=A.LOCAL_WRITE)
    with pytest.raises(BufferError, match="read-only"):
        mr.rereg(buffer=b"constant")  # it stays writable
    with pytest.raises(ValueError, match="empty"):
        mr.rereg(buffer=b"", access=A(0))
    with pytest.raises(TypeError, match="buffer protocol"):
        mr.rereg(buffer=5)
    with pvl.Context("siw0") as elsewhere, pytest.raises(ValueError, match="new PD belongs to"):
        mr.rereg(pd=elsewhere.alloc_pd())


def test_a_region_in_use_is_not_changed(pd, cq, pair):
    mr = pd.alloc(64, ALL_ACCESS | A.MW_BIND)
    pair[1].post_recv(pvl.RecvWR(sg_list=[mr]))
    with pytest.raises(pvl.BusyError, match=r"used by 1 request\(s\)"):
        mr.rereg(access=A.LOCAL_WRITE)
    pair[1].to_error()
    assert done(cq) == [S.WR_FLUSH_ERR]
    other_left, other = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(other_left, other)
    mw = pd.alloc_mw()
    other.bind_mw(mw, mr, A.REMOTE_READ)
    assert done(cq) == [S.SUCCESS]
    with pytest.raises(pvl.BusyError, match=r"1 memory window\(s\)"):
        mr.rereg(access=A.LOCAL_WRITE)


def test_handles_are_the_kernels(pd):
    mr, other = pd.alloc(64), pd.alloc(64)
    assert mr.handle == mr._handle.handle != other.handle
    assert pd.handle == pd._handle.handle
    mr.close()
    with pytest.raises(pvl.ClosedError):
        mr.handle  # noqa: B018

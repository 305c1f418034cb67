"""Memory windows until their end, and regions registered by the verbs that came with rdma-core 59 and 64."""

from __future__ import annotations

import ctypes
import errno

import pytest
from support import ALL_ACCESS, completions, connect_qps, make_qp

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

A, Op, S = pvl.AccessFlags, pvl.WROpcode, pvl.WCStatus
TYPE_1, TYPE_2 = pvl.MWType.TYPE_1, pvl.MWType.TYPE_2


@pytest.fixture
def cq(context):
    return context.create_cq(64)


@pytest.fixture
def pairs(pd, cq):
    """Return a function that connects two QPs; one that has failed is of no more use."""

    def make():
        left, right = make_qp(pd, cq), make_qp(pd, cq)
        connect_qps(left, right, timeout=10, retry_cnt=2, rnr_retry=1)
        return left, right

    return make


def one(cq):
    return completions(cq, 1)[0].status


def write(cq, qp, source, remote):
    qp.post_send(pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[source], remote=remote))
    return one(cq)


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("access", [A.REMOTE_WRITE, A.REMOTE_ATOMIC, A.REMOTE_WRITE | A.REMOTE_ATOMIC])
@pytest.mark.parametrize("device", ["rxe0", "siw0"])
def test_who_lets_others_write_has_to_write_itself(device, access):
    with pvl.open_device(device) as context:
        pd = context.alloc_pd()
        memory = ffi.new("char[4096]")
        with pytest.raises(ValueError, match="LOCAL_WRITE"):
            pd.reg_mr(bytearray(64), access)
        assert not lib.ibv_reg_mr(pd._handle, memory, 4096, access)  # the verb says so without saying why
        assert ffi.errno == errno.EINVAL


# ---------------------------------------------------------------- windows, to their end


@pytest.mark.parametrize("mw_type", [TYPE_1, TYPE_2])
def test_both_sides_write_through_each_others_windows(pd, cq, pairs, mw_type):
    left, right = pairs()
    regions = [pd.alloc(1024, A.LOCAL_WRITE | A.MW_BIND) for _ in range(2)]  # nothing is allowed but by the windows
    windows = [pd.alloc_mw(mw_type) for _ in range(2)]
    source = pd.alloc(1024)
    for qp, region, window in zip((left, right), regions, windows, strict=True):
        qp.bind_mw(window, region, A.REMOTE_WRITE)
        assert one(cq) == S.SUCCESS
    for i in range(10):
        for qp, region, window, letter in ((left, regions[1], windows[1], b"c"), (right, regions[0], windows[0], b"s")):
            source.view[:] = letter * 1024
            remote = pvl.RemoteBuffer(region.addr, window.rkey, 1024)
            assert write(cq, qp, source[: 100 * i], remote[: 100 * i] if i else remote) == S.SUCCESS
            assert bytes(region.view[: 100 * i]) == letter * (100 * i)


ENDS = {
    "unbound": lambda window, left, right, cq: (right.bind_mw(window, None), one(cq)),
    "bound elsewhere": lambda window, left, right, cq: (
        right.bind_mw(window, right.pd.alloc(64, ALL_ACCESS | A.MW_BIND), A.REMOTE_READ),
        one(cq),
    ),
    "invalidated here": lambda window, left, right, cq: (
        right.post_send(pvl.SendWR(opcode=Op.LOCAL_INV, invalidate_rkey=window.rkey)),
        one(cq),
    ),
    "invalidated there": lambda window, left, right, cq: (
        right.post_recv(pvl.RecvWR()),
        left.post_send(pvl.SendWR(opcode=Op.SEND_WITH_INV, invalidate_rkey=window.rkey)),
        completions(cq, 2),
    ),
    "closed": lambda window, left, right, cq: window.close(),
}


@pytest.mark.parametrize(
    ("mw_type", "end"),
    [
        (TYPE_1, "unbound"),
        (TYPE_1, "bound elsewhere"),
        (TYPE_1, "closed"),
        (TYPE_2, "invalidated here"),
        (TYPE_2, "invalidated there"),
        (TYPE_2, "closed"),
    ],
)
def test_after_its_end_a_window_lets_nobody_through(pd, cq, pairs, mw_type, end):
    left, right = pairs()
    region, source = pd.alloc(256, ALL_ACCESS | A.MW_BIND), pd.alloc(16)
    window = pd.alloc_mw(mw_type)
    right.bind_mw(window, region[64:128], A.REMOTE_WRITE)
    assert one(cq) == S.SUCCESS
    remote = pvl.RemoteBuffer(region.addr + 64, window.rkey, 16)
    source.view[:] = b"through a window"
    assert write(cq, left, source, remote) == S.SUCCESS
    ENDS[end](window, left, right, cq)
    source.view[:] = b"to no window now"
    assert write(cq, left, source, remote) == S.REM_ACCESS_ERR
    assert bytes(region.view[64:80]) == b"through a window"
    # The region's own key still leads there.
    left, right = pairs()
    assert write(cq, left, source, pvl.RemoteBuffer.of(region)[64:80]) == S.SUCCESS
    assert bytes(region.view[64:80]) == b"to no window now"


@pytest.mark.parametrize("mw_type", [0, 3, 255])
def test_there_are_two_types_of_windows(pd, mw_type):
    with pytest.raises(ValueError, match="MWType"):
        pd.alloc_mw(mw_type)
    assert not lib.ibv_alloc_mw(pd._handle, mw_type)
    assert ffi.errno in (errno.EINVAL, errno.EOPNOTSUPP)


# ---------------------------------------------------------------- ibv_reg_mr_ex, and buffers that libibverbs allocates


def test_newer_registrations_are_there_from_their_version_on():
    names = {"REG_MR_EX": ("ibv_reg_mr_ex",), "ALLOC_BUF": ("ibv_alloc_buf", "ibv_reg_buf_mr", "ibv_free_buf")}
    for feature, functions in names.items():
        there = getattr(lib, f"PVL_HAS_{feature}") > 0
        assert [hasattr(lib, name) for name in functions] == [there] * len(functions)


@pytest.mark.parametrize("device", ["rxe0", "siw0"])
def test_dma_handles_are_not_for_soft_devices(device):
    if lib.PVL_HAS_DMAH < 0:
        assert not hasattr(lib, "ibv_alloc_dmah")
        return
    with pvl.open_device(device) as context:
        assert not lib.ibv_alloc_dmah(context._handle, ffi.new("struct ibv_dmah_init_attr *"))
        assert ffi.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize("device", ["rxe0", "siw0"])
def test_a_domain_for_confidential_guests_is_not_for_soft_devices(device):
    with pvl.open_device(device) as context:
        pd = context.alloc_pd()
        with pytest.raises(pvl.UnsupportedError, match=r"parent_domain|PARENT_DOMAIN"):
            pd.alloc_parent_domain(allow_cc_unprotected_alloc=True)
        if lib.PVL_HAS_CC_DMA_BOUNCE > 0:
            assert pvl.DeviceCapFlags.CC_DMA_BOUNCE not in context.query_device_ex().device_cap_flags_ex


if lib.PVL_HAS_ALLOC_BUF > 0:  # from here on soft-RoCE takes both; the test above is all there is before
    MASK_ADDR, MASK_FD, MASK_BUF = lib.IBV_REG_MR_MASK_ADDR, lib.IBV_REG_MR_MASK_FD, lib.IBV_REG_MR_MASK_BUF
    PAGE = 4096

    def reg_mr_ex(pd, addr, length, access, *, mask=0, **members):
        attr = ffi.new("struct ibv_mr_init_attr *", {"length": length, "access": access, **members})
        attr.comp_mask = mask
        if addr is not None:
            attr.comp_mask |= MASK_ADDR
            attr.addr = ffi.cast("void *", addr)
        return lib.ibv_reg_mr_ex(pd._handle, attr)

    class Extended:
        """``lib``, but every region is registered by ``ibv_reg_mr_ex``."""

        def __getattr__(self, name):
            return getattr(lib, name)

        def ibv_reg_mr(self, pd, addr, length, access):
            attr = ffi.new("struct ibv_mr_init_attr *", {"length": length, "access": access, "comp_mask": MASK_ADDR})
            attr.addr = addr
            return lib.ibv_reg_mr_ex(pd, attr)

    class Buf:
        """A buffer of ``ibv_alloc_buf``, and the regions on it."""

        def __init__(self, pd, size):
            out = ffi.new("struct ibv_buf **")
            self.pd, self.size = pd, size
            self.addr = int(ffi.cast("uintptr_t", lib.ibv_alloc_buf(pd._handle, size, out)))
            assert self.addr
            self.handle, self.regions = out[0], []

        def reg(self, length, offset=0, *, pd=None, access=A.LOCAL_WRITE, ex=False):
            pd = pd or self.pd
            if ex:
                mr = reg_mr_ex(pd, self.addr + offset, length, access, mask=MASK_BUF, buf=self.handle)
            else:
                start = ffi.cast("void *", self.addr + offset)
                mr = lib.ibv_reg_buf_mr(pd._handle, self.handle, start, length, access)
            if mr:
                self.regions.append(mr)
            return mr

        def view(self):
            return ffi.buffer(ffi.cast("char *", self.addr), self.size)

    @pytest.fixture
    def alloc_buf(pd):
        made = []

        def make(size):
            made.append(Buf(pd, size))
            return made[-1]

        yield make
        for buf in made:
            for mr in buf.regions:
                assert lib.ibv_dereg_mr(mr) == 0
            lib.ibv_free_buf(buf.handle)

    def test_flags_that_the_extended_verb_refuses_as_well(pd):
        memory = ffi.new("char[]", PAGE)
        addr = int(ffi.cast("uintptr_t", memory))
        for access in (A.REMOTE_WRITE, A.REMOTE_ATOMIC):
            assert not reg_mr_ex(pd, addr, PAGE, access)
            assert ffi.errno == errno.EINVAL

    def test_memory_by_its_address_or_by_a_descriptor_and_not_both(pd):
        memory = ffi.new("char[]", PAGE)
        addr = int(ffi.cast("uintptr_t", memory))
        assert not reg_mr_ex(pd, addr, PAGE, A.LOCAL_WRITE, mask=MASK_FD, fd=0)
        assert ffi.errno == errno.EINVAL
        assert not reg_mr_ex(pd, None, PAGE, A.LOCAL_WRITE)
        assert ffi.errno == errno.EINVAL

    @pytest.mark.parametrize("relaxed", [A(0), A.RELAXED_ORDERING])
    def test_writes_into_a_region_of_the_extended_verb(pd, cq, pairs, monkeypatch, relaxed):
        monkeypatch.setattr("pyverbs_lite.mr.lib", Extended())
        left, right = pairs()
        regions = [pd.alloc(1024, A.LOCAL_WRITE | A.REMOTE_WRITE | relaxed) for _ in range(2)]
        for qp, near, far, letter in ((left, *regions, b"c"), (right, *regions[::-1], b"s")) * 3:
            near.view[:] = letter * 1024
            assert write(cq, qp, near, pvl.RemoteBuffer.of(far)) == S.SUCCESS
            assert bytes(far.view) == letter * 1024

    def test_a_window_of_type_1_on_a_region_of_the_extended_verb(pd, cq, pairs, monkeypatch):
        monkeypatch.setattr("pyverbs_lite.mr.lib", Extended())
        left, right = pairs()
        region, source, window = pd.alloc(64, A.LOCAL_WRITE | A.MW_BIND), pd.alloc(8), pd.alloc_mw(TYPE_1)
        right.bind_mw(window, region, A.REMOTE_WRITE)
        assert one(cq) == S.SUCCESS
        source.view[:] = b"extended"
        assert write(cq, left, source, pvl.RemoteBuffer(region.addr + 8, window.rkey, 8)) == S.SUCCESS
        assert bytes(region.view[:24]) == bytes(8) + b"extended" + bytes(8)

    def test_an_ordinary_buffer_has_no_descriptor(alloc_buf):
        buf = alloc_buf(PAGE)
        libibverbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)  # the headers of 64 do not declare it
        export = getattr(libibverbs, "ibv_export_buf_dmabuf_fd", None)
        if export is not None:
            assert export(ctypes.c_void_p(int(ffi.cast("uintptr_t", buf.handle)))) == -1
            assert ctypes.get_errno() == errno.ENODATA

    @pytest.mark.parametrize("ex", [False, True], ids=["reg_buf_mr", "reg_mr_ex"])
    def test_two_regions_of_one_buffer(alloc_buf, ex):
        buf = alloc_buf(2 * PAGE)
        first, second = buf.reg(PAGE, ex=ex), buf.reg(PAGE, PAGE, ex=ex)
        assert first.lkey != second.lkey
        assert [int(ffi.cast("uintptr_t", mr.addr)) - buf.addr for mr in (first, second)] == [0, PAGE]
        ffi.buffer(first.addr, PAGE)[:] = b"a" * PAGE
        ffi.buffer(second.addr, PAGE)[:] = b"b" * PAGE
        assert buf.view()[:] == b"a" * PAGE + b"b" * PAGE

    def test_a_buffer_belongs_to_its_domain(context, alloc_buf):
        buf = alloc_buf(PAGE)
        with context.alloc_pd() as other:
            assert not buf.reg(PAGE, pd=other)
        assert ffi.errno == errno.EINVAL

    @pytest.mark.parametrize(("length", "offset"), [(2 * PAGE, 0), (PAGE, PAGE), (PAGE, 1), (1, -1)])
    @pytest.mark.parametrize("ex", [False, True], ids=["reg_buf_mr", "reg_mr_ex"])
    def test_no_region_reaches_out_of_its_buffer(alloc_buf, length, offset, ex):
        buf = alloc_buf(PAGE)
        assert not buf.reg(length, offset, ex=ex)
        assert ffi.errno == errno.EINVAL

    @pytest.mark.parametrize("ex", [False, True], ids=["reg_buf_mr", "reg_mr_ex"])
    def test_messages_in_buffers_of_libibverbs(context, pd, alloc_buf, ex):
        cq = context.create_cq_ex(32)
        left, right = make_qp(pd, cq), make_qp(pd, cq)
        connect_qps(left, right)
        buf = alloc_buf(2 * PAGE)
        near, far = buf.reg(PAGE, ex=ex), buf.reg(PAGE, PAGE, ex=ex)
        for i, (sender, receiver) in enumerate(((left, right), (right, left)) * 5, start=1):
            buf.view()[:] = bytes([i]) * PAGE + bytes(PAGE)
            receiver.post_recv(pvl.RecvWR(sg_list=[pvl.SGE(buf.addr + PAGE, PAGE, far.lkey)]))
            sender.post_send(pvl.SendWR(sg_list=[pvl.SGE(buf.addr, 100 * i, near.lkey)]))
            assert {wc.status for wc in completions(cq, 2)} == {S.SUCCESS}
            assert buf.view()[PAGE:] == bytes([i]) * (100 * i) + bytes(PAGE - 100 * i)

"""Device memory, which no device here has: the errors, and the rest against memory that stands in for it."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from support import ALL_ACCESS

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

A = pvl.AccessFlags


class FakeDevice:
    """Stands in for ``lib``: device memory that is this process's."""

    def __init__(self):
        self.memory = {}
        self.registered = []
        self.allocated = []
        self.refuse = 0

    def __getattr__(self, name):
        return getattr(lib, name)

    def ibv_alloc_dm(self, context, attr):
        self.allocated.append((attr.length, attr.log_align_req, attr.comp_mask))
        dm = ffi.new("struct ibv_dm *")
        self.memory[dm] = ffi.new("char[]", attr.length)
        return dm

    def ibv_free_dm(self, dm):
        if self.refuse:
            return self.refuse
        del self.memory[dm]
        return 0

    def ibv_memcpy_to_dm(self, dm, offset, source, length):
        ffi.memmove(self.memory[dm] + offset, source, length)
        return self.refuse

    def ibv_memcpy_from_dm(self, target, dm, offset, length):
        ffi.memmove(target, self.memory[dm] + offset, length)
        return self.refuse

    def ibv_reg_dm_mr(self, pd, dm, offset, length, access):
        self.registered.append((pd, dm, offset, length, access))
        return lib.ibv_reg_mr(pd, self.memory[dm] + offset, length, access & ~lib.IBV_ACCESS_ZERO_BASED)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr("pyverbs_lite.dm.lib", fake)
    return fake


@pytest.mark.parametrize("device", ["rxe0", "siw0"])
def test_soft_devices_have_none(device):
    with pvl.Context(device) as context, pytest.raises(pvl.UnsupportedError, match="ibv_alloc_dm"):
        context.alloc_dm(64)


@pytest.mark.parametrize(
    ("length", "align", "error"),
    [(0, 0, ValueError), (-1, 0, ValueError), (1 << 63, 0, ValueError), (1.0, 0, TypeError), (8, 64, ValueError)],
)
def test_what_is_no_size(context, fake, length, align, error):
    with pytest.raises(error):
        context.alloc_dm(length, log_align_req=align)
    assert fake.allocated == []


def test_what_the_verb_is_given(context, fake):
    with context.alloc_dm(100, log_align_req=12) as dm:
        assert fake.allocated == [(100, 12, 0)]
        assert (dm.length, len(dm)) == (100, 100)
    assert fake.memory == {}


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("data", [b"\x01\x02\x03\x04", bytearray([1, 2, 3, 4]), np.array([0x04030201], "<u4")])
def test_copies_there_and_back(context, fake, data):
    with context.alloc_dm(16) as dm:
        dm.copy_to(data, 5)
        assert dm.copy_from() == bytes(5) + b"\x01\x02\x03\x04" + bytes(7)
        assert dm.copy_from(3, 6) == b"\x02\x03\x04"
        assert dm.copy_from(offset=8) == b"\x04" + bytes(7)
        assert dm.copy_from(0, 16) == dm.copy_from(offset=16) == b""


def test_a_copy_into_a_buffer(context, fake):
    with context.alloc_dm(16) as dm:
        dm.copy_to(bytes(range(16)))
        target = bytearray(b"-" * 6)
        assert dm.copy_from(into=target, offset=2) == b""
        assert target == bytes(range(2, 8))
        assert dm.copy_from(3, 10, into=target) == b""
        assert target == bytes([10, 11, 12, 5, 6, 7])
        target.append(0)  # it is free again
        with pytest.raises(ValueError, match="4 bytes do not fit into a buffer of 3"):
            dm.copy_from(4, into=bytearray(3))
        with pytest.raises(BufferError, match="read-only"):
            dm.copy_from(into=bytes(3))


@pytest.mark.parametrize(
    "use",
    [
        lambda dm: dm.copy_to(bytes(17)),
        lambda dm: dm.copy_to(b"x", 16),
        lambda dm: dm.copy_to(b"x", -1),
        lambda dm: dm.copy_from(17),
        lambda dm: dm.copy_from(1, 16),
        lambda dm: dm.copy_from(-1),
        lambda dm: dm.copy_from(offset=17),
        lambda dm: dm.copy_from(into=bytearray(9), offset=8),
        lambda dm: dm.copy_from(1 << 62, 1),
    ],
)
def test_a_copy_that_reaches_outside(context, fake, use):
    with context.alloc_dm(16) as dm, pytest.raises(ValueError, match=r"beyond|must be"):
        use(dm)


def test_a_copy_that_the_device_refuses(context, fake):
    with context.alloc_dm(16) as dm:
        fake.refuse = errno.EIO
        target = bytearray(4)
        for use in (lambda: dm.copy_to(b"x"), lambda: dm.copy_from(into=target)):
            with pytest.raises(pvl.VerbsOSError, match="memcpy") as caught:
                use()
            assert caught.value.errno == errno.EIO
        target.append(0)
        fake.refuse = 0


def test_after_close(context, fake):
    dm = context.alloc_dm(16)
    dm.close()
    for use in (lambda: dm.copy_to(b"x"), dm.copy_from):
        with pytest.raises(pvl.ClosedError):
            use()


def test_an_export_needs_a_newer_library_and_a_device_that_can(context, fake):
    with context.alloc_dm(16) as dm:
        if lib.PVL_HAS_DM_EXPORT_DMABUF < 0:
            with pytest.raises(pvl.UnsupportedError, match="needs rdma-core 62"):
                dm.export_dmabuf_fd()
        else:
            fake.ibv_dm_export_dmabuf_fd = lambda handle: -errno.EOPNOTSUPP
            with pytest.raises(pvl.UnsupportedError):
                dm.export_dmabuf_fd()


# ---------------------------------------------------------------- registered


def test_a_range_is_registered(context, pd, fake):
    with context.alloc_dm(4096) as dm:
        mr = pd.reg_dm_mr(dm, 1024, 512, ALL_ACCESS)
        assert fake.registered == [(pd._handle, dm._handle, 1024, 512, ALL_ACCESS | A.ZERO_BASED)]
        assert (mr.addr, mr.length, mr[16:32].addr, mr.dm) == (0, 512, 16, dm)
        assert mr.access == ALL_ACCESS | A.ZERO_BASED
        assert pvl.RemoteBuffer.of(mr[8:16]).addr == 8
        with pytest.raises(pvl.StateError, match="no memory of this process"):
            mr.view  # noqa: B018
        rest = pd.reg_dm_mr(dm, 4000)
        assert rest.length == 96
        assert fake.registered[-1][4] == A.LOCAL_WRITE | A.ZERO_BASED


@pytest.mark.parametrize(
    ("offset", "length", "match"),
    [(0, 0, "no bytes"), (4096, None, "no bytes"), (4000, 97, "beyond"), (-1, 8, "offset")],
)
def test_a_range_that_is_none(context, pd, fake, offset, length, match):
    with context.alloc_dm(4096) as dm, pytest.raises(ValueError, match=match):
        pd.reg_dm_mr(dm, offset, length)
    assert fake.registered == []


def test_what_cannot_be_registered(context, pd, fake):
    with context.alloc_dm(4096) as dm:
        with pytest.raises(ValueError, match="needs LOCAL_WRITE"):
            pd.reg_dm_mr(dm, access=A.REMOTE_WRITE)
        with pytest.raises(TypeError, match="registers a DM"):
            pd.reg_dm_mr(bytearray(8))
        with pvl.Context("siw0") as other, pytest.raises(ValueError, match="device memory belongs to"):
            other.alloc_pd().reg_dm_mr(dm)


def test_memory_closes_after_its_regions(context, pd, fake):
    dm = context.alloc_dm(4096)
    mr = pd.reg_dm_mr(dm)
    fake.refuse = errno.EBUSY
    with pytest.raises(pvl.VerbsOSError, match="ibv_free_dm"):
        dm.close()
    assert (mr.closed, dm.closed) == (True, False)
    fake.refuse = 0
    dm.close()
    assert dm.closed
    other = context.alloc_dm(64)
    region = pd.reg_dm_mr(other)
    pd.close()
    assert (region.closed, other.closed) == (True, False)
    other.close()

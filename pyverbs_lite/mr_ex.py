"""Memory regions of other kinds: under an address of choice, of a dma-buf, of everything, of nothing."""

from __future__ import annotations

import mmap

from ._base.access import check_access, pin
from ._base.args import check_int
from ._base.check import check_ptr, require
from ._memory.buffer import Memory
from .enums import AccessFlags
from .ffi import ffi, lib
from .mr import MR
from .pd import PD

__all__ = ["DmaBufMR", "ImplicitMR", "IovaMR", "NullMR"]

_U64 = (1 << 64) - 1


class IovaMR(MR):
    """A registered buffer under an address of the caller's choice; make it with ``PD.reg_mr_iova``.

    Attributes:
        addr: that address, by which SGEs and the peer name the first byte.

    Verb: ibv_reg_mr_iova
    """

    def __init__(self, pd: PD, buffer: Memory, iova: int, access: AccessFlags | None = None) -> None:
        check_int("iova", iova, 0, _U64)
        pinned, access = pin(buffer, access)
        try:
            if access & AccessFlags.ZERO_BASED:
                raise ValueError("ZERO_BASED and an iova contradict each other: iova=0 counts from 0")
            if (iova - pinned.addr) % mmap.PAGESIZE:
                raise ValueError(
                    f"iova {iova:#x} and the buffer at {pinned.addr:#x} must have the same place within a page of"
                    f" {mmap.PAGESIZE} bytes: a multiple of it plus {pinned.addr % mmap.PAGESIZE:#x}"
                )
            if iova + pinned.nbytes > _U64 + 1:
                raise ValueError(f"{pinned.nbytes} bytes from iova {iova:#x} on do not fit into 64 bits")
            address = ffi.cast("void *", pinned.addr)
            raw = lib.ibv_reg_mr_iova(pd._handle, address, pinned.nbytes, iova, access)
            handle = check_ptr("ibv_reg_mr_iova", raw)
        except BaseException:
            pinned.release()
            raise
        self._adopt(pd, handle, iova, pinned.nbytes, access, pinned=pinned)


class DmaBufMR(MR):
    """A registered range of a dma-buf; make it with ``PD.reg_dmabuf_mr``. It has no view.

    Attributes:
        addr: the iova, by which SGEs and the peer name the first byte.
        offset: where the range starts in the dma-buf.

    Verb: ibv_reg_dmabuf_mr
    """

    def __init__(
        self,
        pd: PD,
        fd: int,
        length: int,
        *,
        offset: int = 0,
        iova: int | None = None,
        access: AccessFlags | None = None,
    ) -> None:
        require("DMABUF_MR", "ibv_reg_dmabuf_mr")
        check_int("fd", fd, 0, (1 << 31) - 1)
        check_int("length", length, 1, (1 << 63) - 1)
        self.offset = check_int("offset", offset, 0, _U64)
        iova = offset if iova is None else check_int("iova", iova, 0, _U64)
        access = check_access(AccessFlags.LOCAL_WRITE if access is None else access)
        raw = lib.ibv_reg_dmabuf_mr(pd._handle, offset, length, iova, fd, access)
        self._adopt(pd, check_ptr("ibv_reg_dmabuf_mr", raw), iova, length, access)


class ImplicitMR(MR):
    """The whole address space of this process, paged in on demand; make it with ``PD.reg_implicit_mr``.

    ``mr[addr:addr + n]`` is a range. It has no view, and holds no memory in place.

    Verb: ibv_reg_mr
    """

    def __init__(self, pd: PD, access: AccessFlags | None = None) -> None:
        access = check_access(AccessFlags.LOCAL_WRITE if access is None else access) | AccessFlags.ON_DEMAND
        everything = int(ffi.cast("size_t", -1))
        handle = check_ptr("ibv_reg_mr", lib.ibv_reg_mr(pd._handle, ffi.NULL, everything, access))
        self._adopt(pd, handle, 0, _U64, access)

    @property
    def _host_addr(self) -> int | None:
        return 0  # the addresses are this process's own


class NullMR(MR):
    """A region that reads as zeros and swallows what is written; make it with ``PD.alloc_null_mr``. It has no view.

    ``mr[0:n]`` is an SGE of n bytes: to skip a part of an incoming message, or to send zeros.

    Verb: ibv_alloc_null_mr
    """

    def __init__(self, pd: PD) -> None:
        handle = check_ptr("ibv_alloc_null_mr", lib.ibv_alloc_null_mr(pd._handle))
        self._adopt(pd, handle, 0, _U64, AccessFlags.LOCAL_WRITE)

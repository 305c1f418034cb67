"""Device memory: a little fast memory on the device itself, reached with copies and by RDMA."""

from __future__ import annotations

from ._base.access import check_access
from ._base.args import check_int
from ._base.check import check_ptr, check_rc, require
from ._base.resource import Resource
from ._memory.buffer import Memory, Pinned
from .device import Context
from .enums import AccessFlags
from .ffi import CData, ffi, lib
from .mr import MR
from .pd import PD

__all__ = ["DM", "DMMR"]


class DM(Resource):
    """Memory on the device; registered with ``PD.reg_dm_mr``.

    Args:
        length: bytes, at most the device's ``max_dm_size``.
        log_align_req: the alignment as a power of two: 12 aligns to 4096 bytes.

    Attributes:
        length: the same.

    Raises:
        ValueError: a number cannot be right.
        UnsupportedError: the device has no such memory.

    Verb: ibv_alloc_dm
    """

    def __init__(self, context: Context, length: int, *, log_align_req: int = 0) -> None:
        self.context = context
        self.length = check_int("length of device memory", length, 1, (1 << 63) - 1)
        raw = ffi.new("struct ibv_alloc_dm_attr *")
        raw.length = self.length
        raw.log_align_req = check_int("log_align_req", log_align_req, 0, 63)
        handle = check_ptr("ibv_alloc_dm", lib.ibv_alloc_dm(context._handle, raw))
        self._own(handle, _free_dm, context, label=f"DM of {length} bytes")

    @property
    def handle(self) -> int:
        """The kernel's number of the memory, by which another process imports it (see ``import_device``).

        Raises:
            UnsupportedError: this libibverbs is older than 35.
        """
        require("IMPORT_DM", "ibv_dm.handle")
        return int(self._handle.handle)

    def __len__(self) -> int:
        return self.length

    def copy_to(self, data: Memory, offset: int = 0) -> None:
        """Copy a buffer's bytes to the device memory, from ``offset`` on.

        Raises:
            ValueError: it reaches beyond the end.

        Verb: ibv_memcpy_to_dm
        """
        handle = self._handle
        pinned = Pinned(data, what="data")
        try:
            self._check_range(offset, pinned.nbytes)
            if pinned.nbytes:
                source = ffi.cast("void *", pinned.addr)
                check_rc("ibv_memcpy_to_dm", lib.ibv_memcpy_to_dm(handle, offset, source, pinned.nbytes))
        finally:
            pinned.release()

    def copy_from(self, length: int | None = None, offset: int = 0, *, into: Memory | None = None) -> bytes:
        """Copy bytes from the device memory and return them, or fill a writable buffer ``into`` and return ``b""``.

        Args:
            length: how many bytes; by default the size of ``into``, or all from ``offset`` on.

        Raises:
            ValueError: it reaches beyond the end, or ``into`` is smaller.
            BufferError: ``into`` is read-only.

        Verb: ibv_memcpy_from_dm
        """
        handle = self._handle
        given = into is not None
        if into is None:
            into = bytearray(max(0, self.length - offset) if length is None else self._check_range(offset, length))
        pinned = Pinned(into, writable=True, what="into")
        try:
            nbytes = self._check_range(offset, pinned.nbytes if length is None else length)
            if nbytes > pinned.nbytes:
                raise ValueError(f"{nbytes} bytes do not fit into a buffer of {pinned.nbytes}")
            if nbytes:
                target = ffi.cast("void *", pinned.addr)
                check_rc("ibv_memcpy_from_dm", lib.ibv_memcpy_from_dm(target, handle, offset, nbytes))
            return b"" if given else bytes(pinned.view)
        finally:
            pinned.release()

    def export_dmabuf_fd(self) -> int:
        """Return a new dma-buf descriptor of this memory, for another device; the caller closes it.

        Raises:
            UnsupportedError: the device cannot, or this libibverbs is older than 62.

        Verb: ibv_dm_export_dmabuf_fd
        """
        require("DM_EXPORT_DMABUF", "ibv_dm_export_dmabuf_fd")
        fd = int(lib.ibv_dm_export_dmabuf_fd(self._handle))
        check_rc("ibv_dm_export_dmabuf_fd", fd if fd < 0 else 0)
        return fd

    def _check_range(self, offset: int, length: int) -> int:
        check_int("offset", offset, 0, self.length)
        check_int("length", length, 0, (1 << 63) - 1)
        if offset + length > self.length:
            raise ValueError(f"bytes {offset} to {offset + length} reach beyond the device memory's {self.length}")
        return length


class DMMR(MR):
    """A region of device memory; its addresses count from 0, and it has no view: use ``DM.copy_to`` and ``copy_from``.

    Verb: ibv_reg_dm_mr
    """

    def __init__(
        self, pd: PD, dm: DM, offset: int = 0, length: int | None = None, access: AccessFlags | None = None
    ) -> None:
        if not isinstance(dm, DM):
            raise TypeError(f"reg_dm_mr registers a DM, not {dm!r}")
        if dm.context is not pd.context:
            raise ValueError(f"the device memory belongs to {dm.context!r}, and the PD to {pd.context!r}")
        access = check_access(AccessFlags.LOCAL_WRITE if access is None else access) | AccessFlags.ZERO_BASED
        if length is None:
            length = dm.length - check_int("offset", offset, 0, dm.length)
        if not dm._check_range(offset, length):
            raise ValueError("no bytes cannot be registered")
        raw = lib.ibv_reg_dm_mr(pd._handle, dm._handle, offset, length, access)
        self.dm = dm
        self._adopt(pd, check_ptr("ibv_reg_dm_mr", raw), 0, length, access, parents=(pd, dm))


def _free_dm(handle: CData) -> None:
    check_rc("ibv_free_dm", lib.ibv_free_dm(handle))

"""Methods by which a parent makes children of classes whose modules import the parent's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from .._base.check import check_rc
from .._base.resource import Resource
from .._memory.buffer import Memory
from ..enums import AccessFlags, AdviseMRAdvice, AdviseMRFlags, MWType
from ..ffi import ffi, lib

if TYPE_CHECKING:
    from ..dm import DM, DMMR
    from ..domains import TD, ParentDomain
    from ..mr_ex import DmaBufMR, ImplicitMR, IovaMR, NullMR
    from ..mw import MW
    from ..pd import PD
    from ..pool import Pool
    from ..sharing import ImportedDM, ImportedMR, ImportedPD
    from ..wr import LocalMemory

__all__ = ["ContextFactories", "PDFactories"]


class ContextFactories(Resource):
    """The part of a ``Context`` that makes domains and device memory, and what another process made."""

    def alloc_td(self) -> TD:
        """Make a thread domain.

        Verb: ibv_alloc_td
        """
        return cast("TD", self._make("TD"))

    def alloc_dm(self, length: int, *, log_align_req: int = 0) -> DM:
        """Take memory on the device; ``log_align_req`` is its alignment as a power of two.

        Raises:
            UnsupportedError: the device has none.

        Verb: ibv_alloc_dm
        """
        return cast("DM", self._make("DM", length, log_align_req=log_align_req))

    def export_fd(self) -> int:
        """Return a duplicate of the command descriptor, for ``import_device`` in another process; the caller closes it.

        Send it over a Unix socket (``socket.send_fds``), with the ``handle`` of what the other side is to import.
        """
        return os.dup(self._handle.cmd_fd)

    def import_pd(self, handle: int) -> ImportedPD:
        """Make a ``PD`` of the one that has this ``PD.handle`` in the process that this context was imported from.

        Verb: ibv_import_pd
        """
        return cast("ImportedPD", self._make("ImportedPD", handle))

    def import_dm(self, handle: int, length: int) -> ImportedDM:
        """Make a ``DM`` of the one with this ``DM.handle`` and length in the other process.

        Verb: ibv_import_dm
        """
        return cast("ImportedDM", self._make("ImportedDM", handle, length))


class PDFactories(Resource):
    """The part of a ``PD`` that makes special memory regions, memory windows and parent domains."""

    @property
    def handle(self) -> int:
        """The kernel's number of the domain, by which another process imports it (see ``import_device``)."""
        return int(self._handle.handle)

    @property
    def root(self) -> PD:
        """The domain that decides what may touch which memory: this one, or what a parent domain is around."""
        return cast("PD", self)

    def alloc_parent_domain(self, td: TD | None = None, *, allow_cc_unprotected_alloc: bool = False) -> ParentDomain:
        """Make a parent domain around this one.

        Verb: ibv_alloc_parent_domain
        """
        kind = "ParentDomain"
        return cast("ParentDomain", self._make(kind, td, allow_cc_unprotected_alloc=allow_cc_unprotected_alloc))

    def reg_mr_iova(self, buffer: Memory, iova: int, access: AccessFlags | None = None) -> IovaMR:
        """Register a buffer under an address of the caller's choice, by which SGEs and the peer name its first byte.

        Args:
            iova: 64 bits; its place within a page must be that of the buffer.

        Raises:
            As ``reg_mr``.

        Verb: ibv_reg_mr_iova
        """
        return cast("IovaMR", self._make("IovaMR", buffer, iova, access))

    def reg_dmabuf_mr(
        self, fd: int, length: int, *, offset: int = 0, iova: int | None = None, access: AccessFlags | None = None
    ) -> DmaBufMR:
        """Register a range of a dma-buf: memory of another device, such as a GPU's.

        Args:
            fd: its descriptor, which may be closed afterwards.
            offset: where the range starts in the dma-buf, in bytes.
            iova: the address that SGEs and the peer use; by default ``offset``.
            access: by default ``LOCAL_WRITE``.

        Raises:
            UnsupportedError: the driver cannot, or this libibverbs is older than 34.

        Verb: ibv_reg_dmabuf_mr
        """
        return cast("DmaBufMR", self._make("DmaBufMR", fd, length, offset=offset, iova=iova, access=access))

    def reg_implicit_mr(self, access: AccessFlags | None = None) -> ImplicitMR:
        """Register the whole address space, to be paged in on demand; ``mr[addr:addr + n]`` is a range of it.

        The memory is the caller's to keep in place: nothing is held.

        Raises:
            UnsupportedError: the device has no implicit on-demand paging (``ODPGeneralCaps.SUPPORT_IMPLICIT``).

        Verb: ibv_reg_mr
        """
        return cast("ImplicitMR", self._make("ImplicitMR", access))

    def pool(
        self,
        *,
        max_bytes: int = 64 << 20,
        chunk_bytes: int | None = None,
        access: AccessFlags | None = None,
        huge: bool = False,
    ) -> Pool:
        """Make a pool of registered memory for small payloads: ``pool.alloc(n)`` is a slice that goes back by itself.

        Args:
            max_bytes: the most that it registers.
            chunk_bytes: how much at a time, a power of two: no slice is longer. By default 2 MiB, or what fits.
            access: by default ``LOCAL_WRITE``.
            huge: as for ``alloc``; ``Pool.huge_pages`` says what it became.

        Raises:
            ValueError: the sizes do not fit together.
            VerbsOSError: the first chunk could not be registered.

        Verb: ibv_reg_mr
        """
        options = {"max_bytes": max_bytes, "chunk_bytes": chunk_bytes, "access": access, "huge": huge}
        return cast("Pool", self._make("Pool", **options))

    def alloc_null_mr(self) -> NullMR:
        """Make a region that reads as zeros and swallows what is written; ``mr[0:n]`` is an SGE of n bytes.

        Verb: ibv_alloc_null_mr
        """
        return cast("NullMR", self._make("NullMR"))

    def reg_dm_mr(self, dm: DM, offset: int = 0, length: int | None = None, access: AccessFlags | None = None) -> DMMR:
        """Register a range of device memory; its addresses count from 0.

        Args:
            length: by default all from ``offset`` on.
            access: by default ``LOCAL_WRITE``; ``ZERO_BASED`` is added.

        Verb: ibv_reg_dm_mr
        """
        return cast("DMMR", self._make("DMMR", dm, offset, length, access))

    def import_mr(self, handle: int, *, addr: int, access: AccessFlags) -> ImportedMR:
        """Make an ``MR`` of the one with this ``MR.handle`` in the process that this domain was imported from.

        The kernel tells length and keys, but not the other two.

        Args:
            addr, access: those of the original.

        Verb: ibv_import_mr
        """
        return cast("ImportedMR", self._make("ImportedMR", handle, addr=addr, access=access))

    def alloc_mw(self, mw_type: MWType = MWType.TYPE_2) -> MW:
        """Make a memory window: access to a part of a region that can be given and taken without the kernel.

        Raises:
            UnsupportedError: the device has no windows of this type.

        Verb: ibv_alloc_mw
        """
        return cast("MW", self._make("MW", mw_type))

    def advise_mr(self, advice: AdviseMRAdvice, sg_list: Sequence[LocalMemory], *, flush: bool = False) -> None:
        """Tell the device how ranges of on-demand regions will be used, so that it need not fault later.

        Args:
            sg_list: MRs of this domain, slices of them, or SGEs.
            flush: whether to return only when the advice was followed.

        Raises:
            UnsupportedError: the driver takes no advice.

        Verb: ibv_advise_mr
        """
        if not sg_list:
            raise ValueError("advice is about at least one range, and sg_list is empty")
        advice = AdviseMRAdvice(advice)
        for memory in sg_list:
            region = getattr(memory, "mr", memory)
            if getattr(region, "pd", self).root is not self.root:
                raise ValueError(f"{region!r} belongs to another PD")
        raw = ffi.new("struct ibv_sge[]", len(sg_list))
        for sge, memory in zip(raw, sg_list, strict=True):
            # What an SGE has no room for is cut to the most that it has.
            sge.addr, sge.length, sge.lkey = memory.addr, min(memory.length, (1 << 32) - 1), memory.lkey
        flags = AdviseMRFlags.FLUSH if flush else 0
        check_rc("ibv_advise_mr", lib.ibv_advise_mr(self._handle, advice, flags, raw, len(sg_list)))

"""Protection domains: what may touch which memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ._base.args import check_int
from ._base.check import check_ptr, check_rc
from ._base.random import random_64
from ._memory.buffer import Memory
from ._memory.pages import map_huge, map_pages
from ._objects.factories import PDFactories
from .device import Context
from .enums import AccessFlags
from .ffi import CData, lib

if TYPE_CHECKING:
    from .ah import AH
    from .attr import AHAttr
    from .mr import MR
    from .qp import QP, QPInitAttr
    from .srq import SRQ, SRQInitAttr

__all__ = ["PD"]


class PD(PDFactories):
    """A protection domain: QPs reach only memory regions of their own.

    Verb: ibv_alloc_pd
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        handle = check_ptr("ibv_alloc_pd", lib.ibv_alloc_pd(context._handle))
        self._own(handle, dealloc_pd, context, label=f"PD of {context.name}")

    @property
    def domain(self) -> int:
        """64 random bits, never 0, that tell this protection domain from every other; a ``RemoteBuffer`` has them."""
        found: int = self.__dict__.get("_domain") or self.__dict__.setdefault("_domain", random_64() or 1)
        return found

    def reg_mr(self, buffer: Memory, access: AccessFlags | None = None) -> MR:
        """Register a buffer's own memory, which then cannot move until the region is closed.

        Args:
            buffer: anything C-contiguous with the buffer protocol, or a torch CPU tensor; never copied.
            access: by default ``LOCAL_WRITE`` for writable memory and nothing for read-only memory.

        Raises:
            TypeError: it has no memory to register.
            ValueError: not contiguous, empty, or the flags need ``LOCAL_WRITE`` as well.
            BufferError: the flags allow writing, and the memory is read-only.
            VerbsOSError: the verb refused, for example for want of RLIMIT_MEMLOCK.

        Verb: ibv_reg_mr
        """
        return cast("MR", self._make("MR", buffer, access))

    def alloc(self, nbytes: int, access: AccessFlags | None = None, *, huge: bool = False) -> MR:
        """Make page-aligned, zeroed memory and register it; ``MR.view`` is its memoryview.

        Args:
            huge: take huge pages if there are enough, and else what there is; ``MR.huge_pages`` says which it became.

        Verb: ibv_reg_mr
        """
        check_int("nbytes", nbytes, 1, 1 << 62)
        if huge and (pages := map_huge(nbytes)) is not None:
            region = self.reg_mr(memoryview(pages)[:nbytes], access)
            region.huge_pages = True
            return region
        return self.reg_mr(map_pages(nbytes), access)

    def create_qp(self, init_attr: QPInitAttr) -> QP:
        """Make a queue pair, in RESET.

        Raises:
            ValueError: a depth or a count is outside what the device allows.
            VerbsOSError: the verb refused.

        Verb: ibv_create_qp, ibv_create_qp_ex
        """
        return cast("QP", self._make("QP", init_attr))

    def create_srq(self, init_attr: SRQInitAttr) -> SRQ:
        """Make a shared receive queue, which several QPs take their receives from.

        Raises:
            ValueError: a size is outside what the device allows, or what the type needs is missing.
            UnsupportedError: the device has no SRQ of this type.

        Verb: ibv_create_srq, ibv_create_srq_ex
        """
        return cast("SRQ", self._make("SRQ", init_attr))

    def create_ah(self, attr: AHAttr) -> AH:
        """Make an address handle, which a datagram is sent by; ``AH.from_wc`` makes one to answer with.

        Raises:
            ValueError: a member is out of range, or missing for this port.
            VerbsOSError: the verb refused, on RoCE also where no route leads to the address.

        Verb: ibv_create_ah
        """
        return cast("AH", self._make("AH", attr))


def dealloc_pd(handle: CData) -> None:
    """Destroy a protection domain."""
    check_rc("ibv_dealloc_pd", lib.ibv_dealloc_pd(handle))

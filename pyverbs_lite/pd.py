"""Protection domains: what may touch which memory."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, cast

from ._args import check_int
from ._buffer import Memory
from ._check import check_ptr, check_rc
from ._resource import Resource
from .device import Context
from .enums import AccessFlags
from .ffi import CData, lib

if TYPE_CHECKING:
    from .mr import MR
    from .qp import QP, QPInitAttr

__all__ = ["PD"]


class PD(Resource):
    """A protection domain: QPs reach only memory regions of their own.

    Verb: ibv_alloc_pd
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        handle = check_ptr("ibv_alloc_pd", lib.ibv_alloc_pd(context._handle))
        self._own(handle, _dealloc_pd, context, label=f"PD of {context.name}")

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

    def alloc(self, nbytes: int, access: AccessFlags | None = None) -> MR:
        """Make page-aligned, zeroed memory and register it; ``MR.view`` is its memoryview.

        Verb: ibv_reg_mr
        """
        return self.reg_mr(mmap.mmap(-1, check_int("nbytes", nbytes, 1, 1 << 62)), access)

    def create_qp(self, init_attr: QPInitAttr) -> QP:
        """Make a queue pair, in RESET.

        Raises:
            ValueError: a depth or a count is outside what the device allows.
            VerbsOSError: the verb refused.

        Verb: ibv_create_qp
        """
        return cast("QP", self._make("QP", init_attr))


def _dealloc_pd(handle: CData) -> None:
    check_rc("ibv_dealloc_pd", lib.ibv_dealloc_pd(handle))

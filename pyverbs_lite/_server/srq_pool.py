"""Receives that the connections of a server share: one SRQ, and memory that grows with the connections."""

from __future__ import annotations

import errno
import mmap
import threading

from .._connection.receives import Receives
from ..enums import AccessFlags
from ..errors import VerbsOSError
from ..ffi import ffi, lib
from ..mr import MR
from ..pd import PD
from ..srq import SRQ, SRQInitAttr

__all__ = ["SRQPool", "Share"]

#: At least so many bytes are registered at a time.
_BLOCK = 1 << 20
_NORESERVE = 0x4000  # of Linux; the mmap module does not have it in every version


class SRQPool:
    """The slots of an SRQ (``ffi/src/receives.c`` has the books), and their memory.

    Address space is reserved for as many shares as there may ever be; memory is registered, and so taken, a block at a
    time when connections come that need it, and serves those that come after them.

    Args:
        size, stride: bytes that one receive takes, and from one slot to the next.
        share: slots that one connection may use.
        shares: how many connections there may be; the device may allow less.

    Attributes:
        shares: how many connections there is room for.

    Raises:
        VerbsOSError: the device has no SRQ, or one too small for a single connection.
    """

    def __init__(self, pd: PD, size: int, stride: int, share: int, shares: int) -> None:
        limits = pd.context.query_device()
        most = min(limits.max_srq_wr, (1 << 63) // stride)
        self.shares = min(shares, most // share)
        if not self.shares:
            raise VerbsOSError(
                errno.ENOMEM,
                "ibv_create_srq",
                f"one connection needs {share} receives (recv_depth), and an SRQ of {pd.context.name} has no more than"
                f" {limits.max_srq_wr}",
            )
        slots = min(most, self.shares * share + lib.PVL_POOL_LOST)
        block = max(share, _BLOCK // stride, 1)
        self._pd, self._share, self._stride = pd, share, stride
        self._lock = threading.Lock()
        self._users = 0
        self._regions: list[MR] = []
        try:
            self._map = mmap.mmap(-1, slots * stride, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, OverflowError) as error:
            text = f"recv_depth × max_message_size of {self.shares} connections come to {slots} × {stride} bytes"
            raise VerbsOSError(errno.ENOMEM, "mmap", text) from error
        self._memory = memoryview(self._map)
        self._lkeys = ffi.new("uint32_t[]", -(-slots // block))
        self.c = ffi.new("struct pvl_receives *")
        lib.pvl_pool_init(self.c)
        self.c.addr = int(ffi.cast("uintptr_t", ffi.from_buffer(self._memory)))
        self.c.size, self.c.stride, self.c.slots = size, stride, slots
        self.c.lkeys, self.c.block = self._lkeys, block
        self._srq = self._make_srq()

    def _make_srq(self) -> SRQ:
        srq = self._pd.create_srq(SRQInitAttr(max_wr=self.c.slots))
        lib.pvl_pool_reset(self.c, srq._handle)
        return srq

    def take(self) -> Share:
        """Return what one connection receives by; it is to be closed when the QP is gone."""
        with self._lock:
            if not self._users and (self._srq.closed or (self.c.lost and not self.c.lent)):
                # Nobody is there, so what was lost with QPs can be made good. Closed it is where that failed before.
                lib.pvl_pool_reset(self.c, ffi.NULL)
                self._srq.close()
                self._srq = self._make_srq()
            self._users += 1
        return Share(self, self._srq, self._share)

    def give_back(self) -> None:
        """Take note that the QP of one connection is gone."""
        with self._lock:
            self._users -= 1

    def grow(self) -> None:
        """Register one block more."""
        with self._lock:
            c = self.c
            if c.ready >= min(c.slots, c.shares + self._share + c.lost):
                return  # another thread has done it
            start = len(self._regions) * c.block
            stop = min(start + c.block, c.slots)
            part = self._memory[start * self._stride : stop * self._stride]
            region = self._pd.reg_mr(part, AccessFlags.LOCAL_WRITE)
            self._lkeys[len(self._regions)] = region.lkey
            self._regions.append(region)
            c.ready = stop

    def view(self, slot: int, start: int, length: int) -> memoryview:
        """View a part of a slot."""
        start += slot * self._stride
        return self._memory[start : start + length]

    @property
    def pinned(self) -> int:
        """How many bytes are registered."""
        return int(self.c.ready) * self._stride

    def close(self) -> None:
        """Destroy the SRQ and let the memory go; no QP may use it any more. May be tried again."""
        lib.pvl_pool_reset(self.c, ffi.NULL)
        self._srq.close()
        for region in self._regions:
            region.close()


class Share(Receives):
    """The receives that one QP may use of a pool.

    Attributes:
        srq: what to make the QP with.
    """

    def __init__(self, pool: SRQPool, srq: SRQ, slots: int) -> None:
        self._pool, self.srq, self.slots = pool, srq, slots
        self.c = pool.c
        self._open = True

    def grow(self) -> bool:
        """Register more slots; say that there are some now."""
        self._pool.grow()
        return True

    def view(self, slot: int, start: int, length: int) -> memoryview:
        """View a part of a slot."""
        return self._pool.view(slot, start, length)

    def close(self) -> None:
        """Give it back; safe to call again."""
        if self._open:
            self._open = False
            self._pool.give_back()

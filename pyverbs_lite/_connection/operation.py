"""What an engine works on: requests, the operations they belong to, and what arrives."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .._base.check import check_rc, os_error
from .._memory.buffer import Pinned
from .._memory.registrations import Store
from ..enums import AccessFlags
from ..errors import ClosedError, CompletionError, VerbsError
from ..ffi import CData, ffi, lib
from ..mr import MR, MRSlice
from ..wr import completion_error

if TYPE_CHECKING:
    from .._memory.accelerator import DeviceMemory

__all__ = ["CachedRegion", "DeviceRegion", "Operation", "Region", "Request", "Source", "TemporaryMR", "repeated"]

_serials = itertools.count(1)
_OP = ffi.typeof("struct pvl_op *")


class TemporaryMR:
    """Memory registered for one operation.

    No ``MR``, for an interrupt between the verb and the line after it would lose the handle, and registering a lot of
    memory takes long enough for Ctrl-C to fall into it often. Here the handle is in C before the verb returns.

    Args:
        engine, pd: the ``struct pvl_engine *`` and the ``struct ibv_pd *``.
        owner: where this enters itself, to be found there as long as it may have to be closed.
    """

    def __init__(
        self, engine: CData, pd: CData, memory: memoryview, access: AccessFlags, owner: dict[TemporaryMR, None]
    ) -> None:
        self._c: CData = ffi.new("struct pvl_region *")
        self._owner = owner
        self._pinned = Pinned(memory)
        self.addr, self.length = self._pinned.addr, self._pinned.nbytes
        owner[self] = None
        if rc := lib.pvl_register(engine, self._c, pd, self.addr, self.length, access):
            self.close()
            if rc == lib.PVL_STOPPED:
                raise ClosedError("this connection was closed")
            raise os_error("ibv_reg_mr", rc)

    @property
    def lkey(self) -> int:
        """The local key."""
        return int(self._c.lkey)

    @property
    def closed(self) -> bool:
        """Whether it is not registered, or not any more."""
        return not self._c.mr

    def close(self) -> None:
        """Deregister it and let the memory go; safe to call again, and from any thread."""
        check_rc("ibv_dereg_mr", lib.pvl_deregister(self._c))
        self._pinned.release()
        self._owner.pop(self, None)


class CachedRegion(TemporaryMR):
    """Memory that is registered for one operation, or was before and stays so."""

    def __init__(self, engine: CData, pd: CData, memory: memoryview, access: AccessFlags, cache: Store) -> None:
        def register(region: CData, addr: int, length: int, wide: int) -> int:
            return int(lib.pvl_register(engine, region, pd, addr, length, wide))

        self.addr, self.length = int(ffi.cast("uintptr_t", ffi.from_buffer(memory))), memory.nbytes
        self._entry, self._use = cache.take(memory, self.addr, access._value_, register)
        self._c = self._entry.c

    @property
    def closed(self) -> bool:
        """Whether its use has ended, or it is not registered any more."""
        return self._use not in self._entry.users or not self._c.mr

    def close(self) -> None:
        """End its use; safe to call again, and from any thread."""
        self._entry.leave(self._use)


class DeviceRegion(TemporaryMR):
    """Memory of an accelerator that is registered for one operation."""

    def __init__(
        self, engine: CData, pd: CData, memory: DeviceMemory, access: AccessFlags, owner: dict[TemporaryMR, None]
    ) -> None:
        from .._memory.accelerator import export_dmabuf

        self._c = ffi.new("struct pvl_region *")
        self._owner = owner
        self._memory: DeviceMemory | None = memory
        self.addr, self.length = memory.addr, memory.nbytes
        fd, offset = export_dmabuf(memory)
        try:
            owner[self] = None
            rc = lib.pvl_register_dmabuf(engine, self._c, pd, offset, self.length, self.addr, fd, access)
        finally:
            os.close(fd)
        if rc:
            self.close()
            raise (
                ClosedError("this connection was closed")
                if rc == lib.PVL_STOPPED
                else os_error("ibv_reg_dmabuf_mr", rc)
            )

    def close(self) -> None:
        """Deregister it and let the memory go; safe to call again, and from any thread."""
        check_rc("ibv_dereg_mr", lib.pvl_deregister(self._c))
        self._memory = None
        self._owner.pop(self, None)


Region: TypeAlias = MR | TemporaryMR

#: A caller's data, looked at: a view of a buffer, or a range of registered memory.
Source: TypeAlias = "memoryview | MRSlice | DeviceMemory"


@dataclass(slots=True)
class Request:
    """One work request to post: see ``pvl_post`` in C.

    Without a region it is staged: ``source`` is what to copy into a cell of the engine, None what to fetch into one.
    """

    opcode: int
    length: int
    remote_addr: int = 0
    rkey: int = 0
    imm: int = 0
    argument: int = 0
    swap: int = 0
    source: memoryview | None = None
    addr: int = 0
    lkey: int = 0

    @classmethod
    def of(cls, opcode: int, source: Source, remote_addr: int, rkey: int, imm: int) -> Request:
        """Return a request for data."""
        if isinstance(source, MRSlice):
            return cls(opcode, source.length, remote_addr, rkey, imm, addr=source.addr, lkey=source.lkey)
        assert isinstance(source, memoryview)  # an accelerator's memory is registered first
        return cls(opcode, len(source), remote_addr, rkey, imm, source=source)


class Operation:
    """The requests of one call, counted in C, and what they keep in place.

    Attributes:
        running: whether its call has not ended: it may post more.
        notify: called once it has ended, where nobody waits for it.
    """

    __slots__ = ("c", "fetch", "keep", "list", "notify", "regions", "running", "serial")

    def __init__(
        self, regions: tuple[Region, ...], fetch: memoryview | None, *, keep: object = None, c: CData | None = None
    ) -> None:
        self.c: CData = ffi.new(_OP) if c is None else c
        self.regions = regions
        self.keep = keep
        self.list: CData | None = None
        # The view and not what cffi makes of it: up to Python 3.13 the garbage collector crashes on a loop with both.
        self.fetch = fetch
        if fetch is not None:
            self.c.fetch = ffi.cast("char *", ffi.from_buffer(fetch, require_writable=True))
        self.serial = next(_serials)
        self.running = True
        self.notify: Callable[[], None] | None = None

    @classmethod
    def around(cls, c: CData, *regions: Region) -> Operation:
        """Return one whose requests are posted by single calls of C."""
        op = cls(regions, None, c=c)
        op.running = False
        return op

    @staticmethod
    def reusable(engine: CData) -> CData:
        """Return what C knows of one that is used over and over, by calls of C that find the engine by it."""
        c: CData = ffi.new(_OP)
        c.engine = engine
        return c

    @property
    def ended(self) -> bool:
        """Whether nothing of it is in flight, and nothing left to post."""
        c = self.c
        # In this order: another thread may post what is left in between, and with nothing left ``posted`` is final.
        return not self.running and not c.left and bool(c.posted == c.done)

    def accepted(self, count: int) -> int:
        """Return how many of its entries were handed to the device."""
        return int(self.list.next) if self.list is not None else min(count, int(self.c.posted))

    @property
    def failed_index(self) -> int:
        """The entry that failed, or the first that was never posted."""
        if self.list is not None and self.list.error and not self.c.status:
            return int(self.list.next)
        return int(self.c.index)

    def hold(self) -> None:
        """Keep the regions from being closed.

        Raises:
            ClosedError: one is closed already.
        """
        for region in self.regions:
            if isinstance(region, TemporaryMR):
                continue  # nobody else can close it
            region._holders.add(self.serial)
            if region.closed:  # looked at after the entry: whoever closes it looks for entries afterwards
                region._raise_closed()

    def let_go(self) -> None:
        """Release the regions; again is the same as once."""
        for region in self.regions:
            if isinstance(region, TemporaryMR):
                region.close()
            else:
                region._holders.discard(self.serial)


def repeated(cause: VerbsError, operation: str = "") -> VerbsError:
    """Return an error of the same meaning for one more caller: a raised one belongs to the thread that raised it."""
    if isinstance(cause, CompletionError):
        return completion_error(
            cause.status,  # type: ignore[arg-type]
            wr_id=cause.wr_id,
            qp_num=cause.qp_num,
            vendor_err=cause.vendor_err,
            operation=f"{operation or 'this connection'}: {cause.operation}",
        )
    error = copy.copy(cause)
    error.operation = operation or cause.operation
    return error

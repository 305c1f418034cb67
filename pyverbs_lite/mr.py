"""Memory regions: buffers that a device may read and write."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NoReturn

from ._base.access import WRITERS, check_access, pin
from ._base.check import check_ptr, check_rc
from ._base.resource import Resource
from ._memory.buffer import Memory, Pinned, look_at
from ._memory.rereg import Reregistration
from .enums import AccessFlags
from .errors import BusyError, StateError, UnsupportedError, VerbsOSError
from .ffi import CData, ffi, lib
from .pd import PD
from .remote import slice_range

if TYPE_CHECKING:
    from ._memory.accelerator import DeviceMemory

__all__ = ["MR", "MRSlice"]


class MRSlice:
    """A range of a memory region: usable as SGE, as data to send and as a target."""

    __slots__ = ("length", "mr", "nbytes", "offset")
    #: Whether the range may be used for something else while the region stays: then each request is entered in
    #: ``MR._holders`` by its number, for it to be known which of them are the older ones.
    _recycled: ClassVar[bool] = False

    def __init__(self, mr: MR, offset: int, length: int) -> None:
        self.mr = mr
        self.offset = offset
        self.length = length
        self.nbytes = length  # as a memoryview calls it

    @property
    def addr(self) -> int:
        """The address of the first byte."""
        return self.mr.addr + self.offset

    @property
    def lkey(self) -> int:
        """The local key of the region."""
        return self.mr.lkey

    @property
    def rkey(self) -> int:
        """The remote key of the region."""
        return self.mr.rkey

    @property
    def _host_addr(self) -> int | None:
        return None if self.mr._host_addr is None else self.mr._host_addr + self.offset

    @property
    def view(self) -> memoryview:
        """The range's bytes."""
        return self.mr.view[self.offset : self.offset + self.length]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> MRSlice:
        start, stop = slice_range(key, self.length, "this slice of a memory region")
        return MRSlice(self.mr, self.offset + start, stop - start)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.mr.__reduce_ex__(protocol)  # says why not, and what to send instead

    def __repr__(self) -> str:
        return f"<{self.length} bytes at offset {self.offset} of {self.mr!r}>"


class MR(Reregistration):
    """A registered buffer; it exports the buffer until closed, so a ``bytearray`` cannot be resized under it.

    ``mr[a:b]`` is a bounds-checked ``MRSlice``. Make one with ``PD.reg_mr`` or ``PD.alloc``.

    Attributes:
        addr, length: the range as SGEs and the peer name it, in bytes.
        lkey, rkey: the keys; only the rkey is ever for the peer.
        access: the flags it was registered with.
        huge_pages: whether it is memory that ``PD.alloc`` found on huge pages.

    Verb: ibv_reg_mr
    """

    huge_pages = False

    def __init__(self, pd: PD, buffer: Memory, access: AccessFlags | None = None) -> None:
        pinned: Pinned | None
        try:
            pinned, allowed = pin(buffer, access)
        except UnsupportedError:
            pinned = None
        if pinned is None:
            self._register_device(pd, buffer, access)
            return
        try:
            address = ffi.cast("void *", pinned.addr)
            raw = lib.ibv_reg_mr(pd._handle, address, pinned.nbytes, allowed)
            if not raw and _relieved(ffi.errno):
                raw = lib.ibv_reg_mr(pd._handle, address, pinned.nbytes, allowed)
            handle = check_ptr("ibv_reg_mr", raw)
        except BaseException:
            pinned.release()
            raise
        addr = 0 if allowed & AccessFlags.ZERO_BASED else pinned.addr
        self._adopt(pd, handle, addr, pinned.nbytes, allowed, pinned=pinned)

    def _register_device(self, pd: PD, buffer: Memory, access: AccessFlags | None) -> None:
        """Register what is in the memory of an accelerator: it has no view, and the accelerator's addresses."""
        memory = look_at(buffer, "a buffer to register")
        if isinstance(memory, memoryview):
            raise ValueError("an empty buffer cannot be registered: it has no memory")
        from ._memory.accelerator import export_dmabuf

        if access is None:
            access = AccessFlags(0) if memory.readonly else AccessFlags.LOCAL_WRITE
        allowed = check_access(access)
        if allowed & WRITERS and memory.readonly:
            raise BufferError(f"{memory.kind} memory to register is read-only, and {allowed!r} allows to write")
        fd, offset = export_dmabuf(memory)
        try:
            raw = lib.ibv_reg_dmabuf_mr(pd._handle, offset, memory.nbytes, memory.addr, fd, allowed)
            handle = check_ptr("ibv_reg_dmabuf_mr", raw)
        finally:
            os.close(fd)
        self._adopt(pd, handle, memory.addr, memory.nbytes, allowed)
        self._destroy.pinned.append(memory)

    def _adopt(
        self,
        pd: PD,
        handle: CData,
        addr: int,
        length: int,
        access: AccessFlags,
        *,
        pinned: Pinned | None = None,
        parents: tuple[Resource, ...] = (),
        destroy: Callable[[CData], None] | None = None,
    ) -> None:
        """Become the owner of a registration; what it covers need not be memory of this process."""
        self.pd = pd
        self.access = access
        self.addr = addr
        self.length = length
        self.lkey: int = handle.lkey
        self.rkey: int = handle.rkey
        self._pinned = pinned
        #: Requests that use this region: numbers of those that Python knows, and a count of those that only C does.
        self._holders: set[int] = set()
        memory = lib.pvl_memory_new(handle.pd, addr, self.lkey, access)
        self._c: CData = ffi.gc(check_ptr("calloc", memory), lib.pvl_memory_put)
        if pinned is not None:
            self._c.length, self._c.here = length, pinned.addr
        #: Memory windows that may be bound to it: their serial numbers, in a dictionary for the memory it takes empty.
        self._windows: dict[int, None] = {}
        self._destroy = _Deregister(self, destroy or _dereg_mr)
        self._own(handle, self._destroy, *(parents or (pd,)), label=f"{type(self).__name__} of {length} bytes")

    @property
    def view(self) -> memoryview:
        """The memory as a flat memoryview of bytes.

        Raises:
            StateError: it is no memory of this process: device memory, a dma-buf, another process's.
        """
        self._handle  # noqa: B018 - a closed region has no view
        if self._pinned is None:
            raise StateError(f"{self!r} is no memory of this process, so there is nothing to view")
        return self._pinned.view

    @property
    def _host_addr(self) -> int | None:
        """Where the memory is in this process, which need not be what SGEs call it; None where it is not."""
        return None if self._pinned is None else self._pinned.addr

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> MRSlice:
        start, stop = slice_range(key, self.length, "this memory region")
        return MRSlice(self, start, stop - start)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.length} bytes{' (closed)' if self.closed else ''}>"

    @property
    def _in_flight(self) -> int:
        return lib.pvl_memory_used(self._c)

    def _before_destroy(self) -> None:
        if used := self._in_flight + len(self._holders):
            raise _busy(self.length, used)


def _relieved(number: int) -> bool:
    """After a registration has failed: say whether there was memory pinned that need not be."""
    from ._memory.registrations import OUT_OF_MEMORY, relieve

    if number in OUT_OF_MEMORY and relieve():
        return True
    ffi.errno = number
    return False


def _busy(length: int, used: int) -> BusyError:
    return BusyError(
        f"the MR of {length} bytes is used by {used} request(s) in flight: wait for their completions, or close their"
        " QP, before deregistering it"
    )


class _Deregister:
    """Destroys the handle and lets the buffer go; holds no reference to the MR, so that it can be a finaliser's."""

    __slots__ = ("c", "call", "holders", "length", "pinned", "windows")

    def __init__(self, mr: MR, call: Callable[[CData], None]) -> None:
        self.call = call
        self.pinned: list[Pinned | DeviceMemory] = [mr._pinned] if mr._pinned is not None else []
        self.length = mr.length
        self.holders = mr._holders
        self.c = mr._c
        self.windows = mr._windows

    def __call__(self, handle: CData) -> None:
        # Asked again now that the region counts as closed: a thread that posts enters itself first, and then looks
        # whether the region is open, so one of the two gives way.
        used = lib.pvl_memory_close(self.c, 1) + len(self.holders)
        if used:
            lib.pvl_memory_close(self.c, 0)
            raise _busy(self.length, used)
        try:
            self.call(handle)
        except VerbsOSError as error:
            lib.pvl_memory_close(self.c, 0)
            if not self.windows:
                raise
            raise BusyError(
                f"the MR of {self.length} bytes cannot be deregistered ({error}), and {len(self.windows)} memory"
                " window(s) may be bound to it: invalidate, unbind or close them first"
            ) from error
        while self.pinned:
            self.pinned.pop().release()


def _dereg_mr(handle: CData) -> None:
    check_rc("ibv_dereg_mr", lib.ibv_dereg_mr(handle))

"""Memory regions: buffers that a device may read and write."""

from __future__ import annotations

from ._buffer import Memory, Pinned
from ._check import check_ptr, check_rc
from ._resource import Resource
from .enums import AccessFlags
from .errors import BusyError
from .ffi import CData, ffi, lib
from .pd import PD
from .remote import slice_range

__all__ = ["MR", "MRSlice"]

_REMOTE_WRITERS = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_WRITERS = AccessFlags.LOCAL_WRITE | _REMOTE_WRITERS


class MRSlice:
    """A range of a memory region: usable as SGE, as data to send and as a target."""

    __slots__ = ("length", "mr", "offset")

    def __init__(self, mr: MR, offset: int, length: int) -> None:
        self.mr = mr
        self.offset = offset
        self.length = length

    @property
    def addr(self) -> int:
        """The address of the first byte."""
        return self.mr.addr + self.offset

    @property
    def lkey(self) -> int:
        """The local key of the region."""
        return self.mr.lkey

    @property
    def view(self) -> memoryview:
        """The range's bytes."""
        return self.mr.view[self.offset : self.offset + self.length]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> MRSlice:
        start, stop = slice_range(key, self.length, "this slice of a memory region")
        return MRSlice(self.mr, self.offset + start, stop - start)

    def __repr__(self) -> str:
        return f"<{self.length} bytes at offset {self.offset} of {self.mr!r}>"


class MR(Resource):
    """A registered buffer; it exports the buffer until closed, so a ``bytearray`` cannot be resized under it.

    ``mr[a:b]`` is a bounds-checked ``MRSlice``. Make one with ``PD.reg_mr`` or ``PD.alloc``.

    Attributes:
        addr, length: the range, in bytes.
        lkey, rkey: the keys; only the rkey is ever for the peer.
        access: the flags it was registered with.

    Verb: ibv_reg_mr
    """

    def __init__(self, pd: PD, buffer: Memory, access: AccessFlags | None = None) -> None:
        pinned = Pinned(buffer, writable=bool(access and access & _WRITERS), what="a buffer to register")
        try:
            if not pinned.nbytes:
                raise ValueError("an empty buffer cannot be registered: it has no memory")
            if access is None:
                access = AccessFlags(0) if pinned.readonly else AccessFlags.LOCAL_WRITE
            access = AccessFlags(access)
            if access & _REMOTE_WRITERS and not access & AccessFlags.LOCAL_WRITE:
                raise ValueError(f"{access!r} needs LOCAL_WRITE as well: who lets the peer write must be able to write")
            address = ffi.cast("void *", pinned.addr)
            handle = check_ptr("ibv_reg_mr", lib.ibv_reg_mr(pd._handle, address, pinned.nbytes, access))
        except BaseException:
            pinned.release()
            raise
        self.pd = pd
        self.access = access
        self.addr = pinned.addr
        self.length = pinned.nbytes
        self.lkey: int = handle.lkey
        self.rkey: int = handle.rkey
        self._pinned = pinned
        self._in_flight = 0
        self._own(handle, _Deregister(pinned), pd, label=f"MR of {pinned.nbytes} bytes")

    @property
    def view(self) -> memoryview:
        """The memory as a flat memoryview of bytes."""
        self._handle  # noqa: B018 - a closed region has no view
        return self._pinned.view

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> MRSlice:
        start, stop = slice_range(key, self.length, "this memory region")
        return MRSlice(self, start, stop - start)

    def __repr__(self) -> str:
        return f"<MR of {self.length} bytes{' (closed)' if self.closed else ''}>"

    def _before_destroy(self) -> None:
        if self._in_flight:
            raise BusyError(
                f"{self!r} is used by {self._in_flight} request(s) in flight: wait for their completions, or close"
                " their QP, before deregistering it"
            )


class _Deregister:
    """Destroys the handle and lets the buffer go; holds no reference to the MR, so that it can be a finaliser's."""

    __slots__ = ("pinned",)

    def __init__(self, pinned: Pinned) -> None:
        self.pinned = pinned

    def __call__(self, handle: CData) -> None:
        check_rc("ibv_dereg_mr", lib.ibv_dereg_mr(handle))
        self.pinned.release()

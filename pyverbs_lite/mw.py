"""Memory windows: access to a part of a memory region that is given and taken by requests, without the kernel."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ._base.args import check_int
from ._base.check import check_ptr, check_rc
from ._base.resource import Resource
from .enums import AccessFlags, MWType, SendFlags
from .errors import BusyError, StateError
from .ffi import CData, lib
from .mr import MR, MRSlice
from .pd import PD

if TYPE_CHECKING:
    from ._objects.mw_request import WindowRequest
    from .qp import QP

__all__ = ["MW", "MWBindInfo", "State", "window_invalidated", "window_of"]

_A = AccessFlags
_ALLOWED = _A.REMOTE_READ | _A.REMOTE_WRITE | _A.REMOTE_ATOMIC | _A.ZERO_BASED
_U32 = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class MWBindInfo:
    """What a memory window is bound to (``struct ibv_mw_bind_info``); ``of`` makes one of a region or a slice.

    Attributes:
        mr: the region; it needs ``MW_BIND``, and ``LOCAL_WRITE`` where the window lets the peer write.
        addr, length: the range, in bytes; a length of 0 unbinds a window of type 1.
        mw_access_flags: what the peer may do: ``REMOTE_READ``, ``REMOTE_WRITE``, ``REMOTE_ATOMIC``; with
            ``ZERO_BASED`` (type 2 only) its addresses count from the start of the window.
    """

    mr: MR
    addr: int
    length: int
    mw_access_flags: AccessFlags

    @classmethod
    def of(cls, memory: MR | MRSlice, access: AccessFlags) -> MWBindInfo:
        """Bind to a region, or to ``mr[a:b]``."""
        if not isinstance(memory, (MR, MRSlice)):
            raise TypeError(f"a window is bound to an MR or a slice of one, not to {memory!r}")
        if not memory.length:
            raise ValueError("a window is bound to at least one byte; QP.bind_mw(mw, None) unbinds one of type 1")
        return cls(memory if isinstance(memory, MR) else memory.mr, memory.addr, memory.length, access)


class State(NamedTuple):
    """What a window is, or will be once the requests in flight have been carried out."""

    rkey: int
    mr: MR | None = None
    qp: QP | None = None  # what a window of type 2 belongs to while it is bound
    free: bool = True  # whether a window of type 2 can be bound


class MW(Resource):
    """A memory window; made by ``PD.alloc_mw``.

    Type 1 is bound, and bound elsewhere or unbound, by ``QP.bind_mw``; any QP of the PD reaches it. Type 2 is bound by
    ``QP.bind_mw`` or a ``BIND_MW`` request, and belongs to that QP until it is invalidated: by a ``LOCAL_INV`` request,
    or by the peer with ``SEND_WITH_INV``. A device may not be able to close a QP with a window bound, so closing the QP
    closes its windows of type 2.

    A bound window keeps its region alive. While a request that binds or invalidates it is in flight, it does not close.

    Attributes:
        mw_type: its type.

    Verb: ibv_alloc_mw
    """

    # A region cannot be closed before the windows on it.
    _closes_early = True

    def __init__(self, pd: PD, mw_type: MWType = MWType.TYPE_2) -> None:
        self.mw_type = MWType(mw_type)
        handle = check_ptr("ibv_alloc_mw", lib.ibv_alloc_mw(pd._handle, self.mw_type))
        self.pd = pd
        self.context = pd.context
        self._lock = threading.RLock()
        self._state = State(handle.rkey)
        self._holders: set[int] = set()
        #: Requests in flight and the state before each, oldest first.
        self._pending: list[tuple[WindowRequest, State]] = []
        destroy = _DeallocMW()
        self._own(handle, destroy, pd, label=f"MW of {pd.context.name}")
        destroy.serial = self._serial
        self._destroy = destroy
        _windows[self.context._serial, self._state.rkey] = self

    def __repr__(self) -> str:
        state = "closed" if self.closed else "free" if self._state.mr is None else f"bound to {self._state.mr!r}"
        return f"<MW of {self.mw_type.name} {self._state.rkey:#x}, {state}>"

    @property
    def rkey(self) -> int:
        """The key for the peer: that of the last binding that was posted, and of the one before if that failed."""
        self._handle  # noqa: B018 - a closed window has no key
        return self._state.rkey

    @property
    def mr(self) -> MR | None:
        """The region that it is, or is about to be, bound to; None if to none."""
        return self._state.mr

    def next_rkey(self) -> int:
        """Return the key for the next binding of a window of type 2: another low byte, so that the old key is void.

        Verb: ibv_inc_rkey
        """
        return int(lib.ibv_inc_rkey(self.rkey))

    def bind(
        self,
        qp: QP,
        memory: MR | MRSlice,
        access: AccessFlags,
        *,
        wr_id: int = 0,
        send_flags: SendFlags = SendFlags.SIGNALED,
    ) -> None:
        """Bind the window by a request on a QP: ``QP.bind_mw`` seen from here."""
        qp.bind_mw(self, memory, access, wr_id=wr_id, send_flags=send_flags)

    def assume_invalidated(self) -> None:
        """Take the window for free: the peer has invalidated it, and the library could not see that.

        It sees the receive that an invalidation comes with, unless that is polled through the C interface.
        """
        window_invalidated(self.context, self.rkey)

    # ------------------------------------------------------------ requests in flight

    def _check_bind(self, info: MWBindInfo, pd: PD) -> None:
        region, access = info.mr, AccessFlags(info.mw_access_flags)
        region._handle  # noqa: B018 - a closed region is refused here
        region._require_sound()
        for owner in (pd, region.pd):
            if owner.root is not self.pd.root:
                raise ValueError(f"{self!r}, {region!r} and the QP must all belong to one PD")
        if unknown := access & ~_ALLOWED:
            raise ValueError(f"a window takes remote access and ZERO_BASED only, not {unknown!r}")
        if access & _A.ZERO_BASED and self.mw_type == MWType.TYPE_1:
            raise ValueError("ZERO_BASED is for windows of type 2 only")
        if info.length == 0:
            if self.mw_type == MWType.TYPE_2:
                raise ValueError("a window of type 2 is freed by LOCAL_INV, not by binding it to nothing")
            return
        if not region.access & _A.MW_BIND:
            raise ValueError(f"{region!r} was registered without MW_BIND, so no window can be bound to it")
        if region.access & _A.ZERO_BASED:
            raise ValueError(f"no window can be bound to {region!r}, whose addresses count from 0")
        if access & (_A.REMOTE_WRITE | _A.REMOTE_ATOMIC) and not region.access & _A.LOCAL_WRITE:
            raise ValueError(f"{access!r} lets the peer write, and {region!r} was registered without LOCAL_WRITE")
        if info.addr < region.addr or info.addr + info.length > region.addr + region.length:
            raise ValueError(f"{info.length} bytes at {info.addr:#x} are not within {region!r} at {region.addr:#x}")

    def _check_bind_2(self, rkey: int) -> None:
        if self.mw_type != MWType.TYPE_2:
            raise ValueError("a window of type 1 is bound by QP.bind_mw, not by a request")
        check_int("rkey", rkey, 0, _U32)
        if (rkey ^ self.rkey) >> 8:
            raise ValueError(f"the new rkey {rkey:#x} may differ from {self.rkey:#x} in its low byte only: next_rkey()")
        if not self._state.free:
            raise StateError(f"{self!r} cannot be bound again before it was invalidated (LOCAL_INV, SEND_WITH_INV)")

    def _become(self, new: State) -> None:
        old, self._state = self._state, new
        if new.mr is not old.mr:
            if old.mr is not None:
                old.mr._windows.pop(self._serial, None)
                self._detach(old.mr)
            if new.mr is not None:
                new.mr._windows[self._serial] = None
                self._attach(new.mr, closed_with=False)
            self._destroy.bound = None if new.mr is None else new.mr._windows
        if new.qp is not old.qp:
            if old.qp is not None:
                self._detach(old.qp)
            if new.qp is not None:
                self._attach(new.qp)
        _windows[self.context._serial, new.rkey] = self

    def _begin(self, request: WindowRequest) -> None:
        with self._lock:
            if self._index(request) is not None:
                return
            # What the driver takes for the present key; some drivers keep it current, and some do not.
            if (handle := self._owned.cdata) is not None:
                handle.rkey = self._state.rkey
            self._pending.append((request, self._state))
            self._become(request.target(self._state))

    def _end(self, request: WindowRequest) -> None:
        """Take note that a request was carried out, and with it those before."""
        with self._lock:
            index = self._index(request)
            if index is None:
                return
            del self._pending[: index + 1]
            if request.info is None and not self._pending:
                self._become(State(self._state.rkey))

    def _revert(self, request: WindowRequest) -> None:
        """Take note that a request was not carried out, nor what came after it."""
        with self._lock:
            index = self._index(request)
            if index is None:
                return
            state = self._pending[index][1]
            del self._pending[index:]
            self._become(state)
            if (handle := self._owned.cdata) is not None:
                handle.rkey = state.rkey

    def _index(self, request: WindowRequest) -> int | None:
        return next((i for i, (other, _) in enumerate(self._pending) if other is request), None)

    def _bound_by_driver(self) -> None:
        """Read the key that ``ibv_bind_mw`` chose for a window of type 1."""
        with self._lock:
            self._become(self._state._replace(rkey=int(self._handle.rkey)))

    def _before_destroy(self) -> None:
        owners = (self.pd, self._state.qp)
        if self._holders and not any(owner._owned.closing for owner in owners if owner is not None):
            raise BusyError(
                f"{self!r} is used by {len(self._holders)} request(s) in flight: wait for their completions, or close"
                " their QP, before closing it"
            )

    def _after_destroy(self) -> None:
        with self._lock:
            self._pending.clear()
            self._become(State(self._state.rkey))


#: (serial number of the context, rkey) -> window, to find the one that an invalidation is for.
_windows: weakref.WeakValueDictionary[tuple[int, int], MW] = weakref.WeakValueDictionary()


def window_of(context: Resource, rkey: int) -> MW | None:
    """Find the open window that has a key now."""
    mw = _windows.get((context._serial, rkey))
    return None if mw is None or mw.closed or mw._state.rkey != rkey else mw


def window_invalidated(context: Resource, rkey: int) -> None:
    """Take note that the peer has invalidated a window."""
    if (mw := window_of(context, rkey)) is not None:
        with mw._lock:
            mw._become(State(rkey))


class _DeallocMW:
    """Destroys the handle, and the note at the region that a window may be bound to it."""

    __slots__ = ("bound", "serial")

    def __init__(self) -> None:
        self.bound: dict[int, None] | None = None
        self.serial = -1

    def __call__(self, handle: CData) -> None:
        check_rc("ibv_dealloc_mw", lib.ibv_dealloc_mw(handle))
        if self.bound is not None:
            self.bound.pop(self.serial, None)

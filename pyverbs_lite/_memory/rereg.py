"""Changing a memory region in place: other rights, another range, another protection domain."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from .._base.access import WRITERS, check_access, pin
from .._base.check import os_error
from .._base.resource import Resource
from ..enums import AccessFlags, AdviseMRAdvice, ReregMRErrCode, ReregMRFlags
from ..errors import BusyError, StateError, VerbsOSError
from ..ffi import CData, ffi, lib
from .buffer import Memory, Pinned

if TYPE_CHECKING:
    from ..mr import _Deregister
    from ..pd import PD

__all__ = ["Reregistration"]

#: What an error code says about the region.
_OUTCOMES: dict[int, str] = {
    ReregMRErrCode.INPUT: "the library refused a value; the region is as it was",
    ReregMRErrCode.DONT_FORK_NEW: (
        "the new memory could not be kept out of forked children (ibv_fork_init); the region is as it was"
    ),
    ReregMRErrCode.DO_FORK_OLD: (
        "the region was changed as asked; only its old memory stays out of forked children (ibv_fork_init)"
    ),
    ReregMRErrCode.CMD: "the device or its driver failed in the middle; the region can only be closed now",
    ReregMRErrCode.CMD_AND_DO_FORK_NEW: (
        "the device or its driver failed in the middle; the region can only be closed now, and its new memory stays"
        " out of forked children"
    ),
}
_SPOILED = (ReregMRErrCode.CMD, ReregMRErrCode.CMD_AND_DO_FORK_NEW)


class Reregistration(Resource):
    """The part of an ``MR`` that changes it after it was registered."""

    pd: PD
    access: AccessFlags
    addr: int
    length: int
    lkey: int
    rkey: int
    _pinned: Pinned | None
    _holders: set[int]
    _c: CData

    if TYPE_CHECKING:  # from MR

        @property
        def _in_flight(self) -> int: ...

    _windows: dict[int, None]
    _destroy: _Deregister
    #: Whether changing it failed so that it can only be closed.
    _spoiled: bool = False

    @property
    def handle(self) -> int:
        """The kernel's number of the region, by which another process imports it (see ``import_device``)."""
        return int(self._handle.handle)

    def rereg(
        self, *, buffer: Memory | None = None, access: AccessFlags | int | None = None, pd: PD | None = None
    ) -> None:
        """Change what the region covers, what it allows, whose it is, or several of these at once.

        What is left out stays. The keys may change. A region that requests or memory windows use is refused.

        Args:
            buffer: other memory; the old buffer is free to move afterwards.

        Raises:
            TypeError, ValueError, BufferError: as ``PD.reg_mr``, and where nothing is to be changed.
            BusyError: requests in flight use it, or memory windows may be bound to it.
            UnsupportedError: the driver cannot, and the region is as it was.
            VerbsOSError: its text says which state the region is in; if it is spoiled, it can only be closed.

        Verb: ibv_rereg_mr
        """
        handle = self._handle
        self._require_idle()
        access = self._check_change(buffer, access, pd)
        pinned = None
        if buffer is not None:
            pinned, access = pin(buffer, access)
        changes = {
            ReregMRFlags.CHANGE_TRANSLATION: pinned is not None,
            ReregMRFlags.CHANGE_ACCESS: access != self.access,
            ReregMRFlags.CHANGE_PD: pd is not None,
        }
        flags = sum(flag for flag, asked in changes.items() if asked)
        raw_pd = ffi.NULL if pd is None else pd._handle
        address, length = (ffi.NULL, 0) if pinned is None else (ffi.cast("void *", pinned.addr), pinned.nbytes)
        if pinned is not None:  # held even if an interrupt comes right after the verb
            self._destroy.pinned.append(pinned)
        ffi.errno = 0
        self._c.here = 0  # until it is settled, short messages are not copied out of it here
        # The verb takes no flags that it is not told to change.
        told = access if changes[ReregMRFlags.CHANGE_ACCESS] else 0
        rc = lib.ibv_rereg_mr(handle, flags, raw_pd, address, length, told)
        self._settle(rc, pinned, access, pd)

    def advise(self, advice: AdviseMRAdvice, *, flush: bool = False) -> None:
        """Tell the device how an on-demand region will be used; see ``PD.advise_mr``.

        Verb: ibv_advise_mr
        """
        self.pd.advise_mr(advice, [self], flush=flush)  # type: ignore[list-item]  # this is part of an MR

    def _require_sound(self) -> None:
        if self._spoiled:
            raise StateError(f"{self!r} was spoiled when it was changed (ibv_rereg_mr): it can only be closed")

    def _require_idle(self) -> None:
        self._require_sound()
        if used := self._in_flight + len(self._holders):
            raise BusyError(f"{self!r} is used by {used} request(s) in flight: wait for their completions first")
        if self._windows:
            raise BusyError(
                f"{len(self._windows)} memory window(s) may be bound to {self!r}: invalidate, unbind or close them"
            )

    def _check_change(self, buffer: Memory | None, access: AccessFlags | int | None, pd: PD | None) -> AccessFlags:
        if self._pinned is None:
            raise StateError(f"only a registered buffer can be registered anew, and {self!r} is none")
        if buffer is None and access is None and pd is None:
            raise ValueError("nothing is to be changed: give buffer, access or pd")
        if pd is not None and pd.context is not self.pd.context:
            raise ValueError(f"the new PD belongs to {pd.context!r}, and the region to {self.pd.context!r}")
        access = self.access if access is None else check_access(access)
        if buffer is None and access & WRITERS and self._pinned.readonly:
            raise BufferError(f"the memory of {self!r} is read-only, and {access!r} allows to write")
        return access

    def _settle(self, rc: int, pinned: Pinned | None, access: AccessFlags, pd: PD | None) -> None:
        """Make of this object what the return code says that the region is now."""
        code = None if rc == 0 else ReregMRErrCode(rc) if rc in _OUTCOMES else ReregMRErrCode.CMD
        error: VerbsOSError | None = None
        if code is not None:
            # A verb that the driver lacks has touched nothing.
            untouched = code in _SPOILED and ffi.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
            hint = "the driver cannot do it; the region is as it was" if untouched else _OUTCOMES[code]
            error = os_error("ibv_rereg_mr", ffi.errno or max(rc, 0), hint)
            if not untouched and code in _SPOILED:
                self._spoiled = True  # old and new memory stay held: nobody knows which the device uses
                raise error
            if code != ReregMRErrCode.DO_FORK_OLD:
                if pinned is not None:
                    self._destroy.pinned.remove(pinned)
                    pinned.release()
                raise error
        self._commit(pinned, access, pd)
        if error is not None:
            raise error

    def _commit(self, pinned: Pinned | None, access: AccessFlags, pd: PD | None) -> None:
        handle = self._handle
        self.lkey, self.rkey, self.access = handle.lkey, handle.rkey, access
        self._c.lkey, self._c.access = self.lkey, access
        if pinned is not None:
            old, self._pinned = self._pinned, pinned
            self.addr = 0 if access & AccessFlags.ZERO_BASED else pinned.addr
            self._c.addr = self.addr
            self.length = self._destroy.length = pinned.nbytes
            if old is not None:
                self._destroy.pinned.remove(old)
                old.release()
        if self._pinned is not None:
            self._c.length, self._c.here = self.length, self._pinned.addr
        if pd is not None and pd is not self.pd:
            self._attach(pd)
            self._detach(self.pd)
            self.pd = pd
            self._c.pd = pd._handle
        self._c.changes = (self._c.changes + 1) & 0xFFFFFFFF  # whoever has checked it does so again

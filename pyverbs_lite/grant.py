"""Access of the peer to a part of registered memory that can be taken back: a memory window bound by the connection."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, cast

from typing_extensions import Self

from ._base.args import Deadline
from ._base.check import os_error
from ._connection.operation import Operation, Region
from ._connection.settings import check_name
from ._objects.mw_request import WindowRequest, invalidation, window_request
from .enums import AccessFlags
from .errors import ClosedError, QueueFullError, VerbsError
from .ffi import CData, ffi, lib
from .mr import MR, MRSlice
from .mw import MWBindInfo
from .remote import REMOTE, RemoteBuffer

if TYPE_CHECKING:
    from ._connection.engine import Engine
    from ._connection.link import Link

__all__ = ["Grant", "make_grant"]


class _Change:
    """A request that binds or invalidates a window, as what an operation holds."""

    def __init__(self, request: WindowRequest) -> None:
        self._request = request
        self.op = Operation((cast("Region", self),), None)

    @property
    def _holders(self) -> _Change:
        return self  # has what is called on a set

    @property
    def closed(self) -> bool:
        return self._request.mw.closed or any(region.closed for region in self._request.kept)

    def _raise_closed(self) -> None:
        raise ClosedError("the window or its memory region is closed")

    def add(self, serial: int) -> None:
        self._request.add(serial)

    def discard(self, serial: int) -> None:
        if self.op.c.status or not self.op.c.posted:
            self._request.revert()
        self._request.discard(serial)


class Grant:
    """The peer's access to a part of registered memory until ``revoke()``; made by ``Connection.grant``.

    A context manager that revokes. It lasts until then or until the connection is closed, also where nobody keeps it,
    and only the peer of this connection can use it. Until then the region cannot be closed; it stays valid afterwards.

    **What revoking means.** When it returns, the peer cannot reach the memory any more. An access of the peer that is
    under way or comes later ends in a remote access error there (``RemoteAccessError``), and by that the connection
    ends on both sides, as with every access that is not allowed. So agree with the peer first, or mean it.

    Attributes:
        remote: what to give to the peer: a ``RemoteBuffer``; with a name the peer finds it in its ``remote``.
        name: that name, or None.
        memory: the slice that it is for.
        access: what the peer may do.

    Verb: ibv_post_send (BIND_MW, LOCAL_INV)
    """

    def __init__(self, link: Link, memory: MRSlice, access: AccessFlags, deadline: Deadline) -> None:
        self._link = link
        self._lock = threading.RLock()
        self._revoking: Operation | None = None
        self.memory, self.access = memory, access
        self.addr, self.length = memory.addr, memory.length
        self.name: str | None = None
        link.registry.makers.append(None)
        try:
            with link.registry.naming:
                link.registry.check_open("grant")
                self._mw = mw = link.pd.alloc_mw()
        finally:
            link.registry.makers.pop()
        try:
            info = MWBindInfo.of(memory, access)
            self.rkey = mw.next_rkey()
            change = _Change(window_request(mw, self.rkey, info, link.pd, link.qp))

            def post(engine: CData, op: CData) -> int:
                window, region = mw._handle, memory.mr._handle
                return int(
                    lib.pvl_post_window(engine, op, window, self.rkey, region, info.addr, info.length, int(access))
                )

            _run(link, "grant", change, post, deadline)
        except BaseException:
            try:
                mw.close()
            except VerbsError:  # a request still in flight holds it
                link.registry.keep(mw)
            raise
        self.remote = RemoteBuffer(self.addr, self.rkey, self.length, "", access, domain=link.told_domain)

    @property
    def closed(self) -> bool:
        """Whether it was revoked, or ended with the connection."""
        return self._mw.closed

    def revoke(self, *, timeout: float | None = 10.0) -> None:
        """Take the access back; safe to call again, and after the connection is over.

        Raises:
            WaitTimeout: not known to be done within ``timeout`` seconds, because of what is in front of it in the send
                queue: call it again.
        """
        deadline = Deadline(timeout)
        with self._lock:
            if self.name is not None:
                self._link.registry.withdraw(self.name, self)
                self.name = None
            if self._mw.closed:
                return
            engine = self._link.engine
            if engine.failure is None:
                with suppress(ClosedError):  # the QP is gone, and the window is of no use without it
                    self._invalidate(engine, deadline)
            self._mw.close()

    def close(self) -> None:
        """End with the connection, whose QP is gone."""
        self._mw.close()

    def _invalidate(self, engine: Engine, deadline: Deadline) -> None:
        try:
            if self._revoking is None:
                request = invalidation(self._link.pd, self.rkey)
                assert request is not None  # the window is open
                change = _Change(request)

                def post(table: CData, op: CData) -> int:
                    return int(lib.pvl_post_window(table, op, ffi.NULL, self.rkey, ffi.NULL, 0, 0, 0))

                self._revoking = change.op
                try:
                    _run(self._link, "revoke", change, post, deadline)
                except BaseException:
                    if not change.op.c.posted:
                        self._revoking = None
                    raise
            else:  # never twice: a device may not look whether the window is bound
                engine.finish(self._revoking, "revoke", deadline)
        except VerbsError:
            if engine.failure is None:
                raise
            # With the connection the access is over, too.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revoke()

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<Grant{name} of {self.length} bytes{' (revoked)' if self.closed else ''}>"


def make_grant(link: Link, memory: MR | MRSlice, access: AccessFlags, name: str | None, deadline: Deadline) -> Grant:
    """Check what is to be granted, bind a window to it, and tell the peer if it has a name.

    Raises:
        As ``Connection.grant``.
    """
    if name is not None:
        check_name(name)
    if not isinstance(memory, (MR, MRSlice)):
        raise TypeError(f"a grant is for registered memory, conn.register(buffer, access=…) or a slice, not {memory!r}")
    access = AccessFlags(access)
    if not access & REMOTE or access & ~REMOTE:
        raise ValueError(f"a grant is for REMOTE_READ, REMOTE_WRITE or REMOTE_ATOMIC, or several, not {access!r}")
    if link.engine.failure is not None:
        link.engine.refuse_late("grant")
    part = MRSlice(memory, 0, memory.length) if isinstance(memory, MR) else memory
    grant = Grant(link, part, access, deadline)
    link.registry.keep(grant)
    if name is not None:
        try:
            link.registry.announce(grant, name, deadline)
        except BaseException:
            with suppress(VerbsError):  # the first error counts, and nobody has heard the key
                grant.revoke()
            raise
        grant.remote = RemoteBuffer(grant.addr, grant.rkey, grant.length, name, access, domain=link.told_domain)
    return grant


def _run(link: Link, operation: str, change: _Change, post: Callable[[CData, CData], int], deadline: Deadline) -> None:
    """Post a request for a window, and wait for it; errors as ``Engine.run``."""
    engine, op = link.engine, change.op
    try:
        engine._begin(op, operation)
        while True:
            # Against a thread that closes: the window must not go between here and its use in C.
            link.registry.makers.append(None)
            try:
                with link.registry.naming:
                    link.registry.check_open(operation)
                    rc = post(engine._c, op.c)
            finally:
                link.registry.makers.pop()
            if not rc:
                break
            if rc == lib.PVL_STOPPED or engine.failure is not None:
                engine.refuse_late(operation)
            if rc != lib.PVL_NO_SLOT:
                raise os_error("ibv_post_send", rc)
            if not engine._progress(lib.PVL_UNTIL_SLOT, None, 0, deadline) and deadline.expired:
                raise QueueFullError(errno.EAGAIN, operation, f"no place became free in {deadline.seconds} s")
        engine.finish(op, operation, deadline)
    finally:
        op.running = False
        engine._reap()

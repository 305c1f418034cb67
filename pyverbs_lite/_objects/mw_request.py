"""Requests that change a memory window: what they hold while they are in flight, and what they do to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ffi import CData
from ..mr import MR
from ..mw import MW, MWBindInfo, State, window_of
from ..pd import PD

if TYPE_CHECKING:
    from ..qp import QP

__all__ = ["WindowRequest", "bind_1_request", "invalidation", "window_request"]


class WindowRequest:
    """A request that changes a window, as what it holds while it is in flight (see ``_inflight.Held``).

    Args:
        info: what the window is bound to, or None if it is invalidated or unbound.
    """

    __slots__ = ("info", "kept", "mw", "qp", "rkey")

    def __init__(self, mw: MW, rkey: int, info: MWBindInfo | None, qp: QP | None) -> None:
        self.mw = mw
        self.rkey = rkey
        self.info = info
        self.qp = qp
        # The old region too: until the request is carried out, the window is still on it.
        self.kept: list[MR] = [region for region in (info.mr if info else None, mw.mr) if region is not None]

    @property
    def _handle(self) -> CData:
        for region in self.kept:
            region._handle  # noqa: B018 - raises if it was closed meanwhile
        return self.mw._handle

    @property
    def _holders(self) -> WindowRequest:
        return self  # has what is called on a set

    def target(self, now: State) -> State:
        """Return the state after it was carried out; a region that is let go of stays the window's until then."""
        if self.info is None:
            return now._replace(free=True)
        return State(self.rkey, self.info.mr, self.qp, free=False)

    def add(self, serial: int) -> None:
        """Hold window and regions, and expect the change."""
        for holders in (self.mw._holders, *(region._holders for region in self.kept)):
            holders.add(serial)
        self.mw._begin(self)

    def discard(self, serial: int) -> None:
        """Let go; unless it was reverted, the change has happened."""
        for holders in (self.mw._holders, *(region._holders for region in self.kept)):
            holders.discard(serial)
        self.mw._end(self)

    def revert(self) -> None:
        """Take the change back: it was refused, or failed."""
        self.mw._revert(self)

    def lost(self) -> None:
        """Expect the worse, as nobody knows whether it was carried out: the window is still bound."""
        if self.info is None:
            self.mw._revert(self)


def window_request(mw: object, rkey: int, info: object, pd: PD, qp: QP | None) -> WindowRequest:
    """Check a ``BIND_MW`` request; return what it holds.

    Raises:
        TypeError, ValueError, StateError: the window cannot be bound so.
    """
    if not isinstance(mw, MW):
        raise TypeError(f"mw must be an MW, not {mw!r}")
    if not isinstance(info, MWBindInfo):
        raise TypeError(f"bind_info must be an MWBindInfo, not {info!r}")
    mw._check_bind_2(rkey)
    mw._check_bind(info, pd)
    return WindowRequest(mw, rkey, info, qp)


def bind_1_request(mw: MW, info: MWBindInfo, pd: PD) -> WindowRequest:
    """Check what ``ibv_bind_mw`` is to do with a window of type 1; return what it holds."""
    mw._check_bind(info, pd)
    return WindowRequest(mw, mw.rkey, info if info.length else None, None)


def invalidation(pd: PD, rkey: int) -> WindowRequest | None:
    """Return what a ``LOCAL_INV`` request holds, if its key is that of a window of the library's."""
    mw = window_of(pd.context, rkey)
    return None if mw is None else WindowRequest(mw, rkey, None, None)

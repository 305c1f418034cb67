"""Memory windows seen from a QP: bound, and told what becomes of the requests that change them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .._base.args import check_int
from .._objects.inflight import Held, Hold, Ledger
from .._objects.mw_request import bind_1_request, invalidation, window_request
from .._objects.posting import hold_and_run
from .._objects.qp_features import Features
from ..enums import AccessFlags, MWType, SendFlags, WROpcode
from ..ffi import CData, ffi, lib
from ..mr import MR, MRSlice
from ..mw import MW, MWBindInfo
from ..pd import PD
from ..wr import SendWR

if TYPE_CHECKING:
    from ..qp import QP

__all__ = ["Windows"]

_NO_ACCESS = AccessFlags(0)
_U64 = (1 << 64) - 1


class Windows(Features):
    """The part of a QP that binds memory windows."""

    pd: PD
    _ledger: Ledger

    if TYPE_CHECKING:  # from QP

        def post_send(self, *requests: SendWR) -> None: ...
        def _ready_to_send(self) -> CData: ...

    def bind_mw(
        self,
        mw: MW,
        memory: MR | MRSlice | None,
        access: AccessFlags = _NO_ACCESS,
        *,
        wr_id: int = 0,
        send_flags: SendFlags = SendFlags.SIGNALED,
    ) -> None:
        """Bind a memory window to a range, by a request on the send queue; its ``rkey`` is another from now on.

        The binding holds once the request has completed. A window of type 1 may be bound already; one of type 2 must
        have been invalidated.

        Args:
            memory: an MR that was registered with ``MW_BIND``, or a slice of one; None unbinds a window of type 1.
            access: what the peer may do: ``REMOTE_READ``, ``REMOTE_WRITE``, ``REMOTE_ATOMIC``.

        Raises:
            TypeError, ValueError, StateError: the window cannot be bound so. Nothing was posted.
            QueueFullError: no free slot.

        Verb: ibv_bind_mw
        """
        if not isinstance(mw, MW):
            raise TypeError(f"bind_mw binds an MW, not {mw!r}")
        if mw.mw_type == MWType.TYPE_2:
            if memory is None:
                raise ValueError("a window of type 2 is freed by LOCAL_INV, not by binding it to nothing")
            info = MWBindInfo.of(memory, access)
            self.post_send(
                SendWR(
                    opcode=WROpcode.BIND_MW,
                    mw=mw,
                    rkey=mw.next_rkey(),
                    bind_info=info,
                    wr_id=wr_id,
                    send_flags=send_flags,
                )
            )
            return
        check_int("wr_id", wr_id, 0, _U64)
        if memory is not None:
            info = MWBindInfo.of(memory, access)
        elif mw.mr is None:
            raise ValueError(f"{mw!r} is bound to nothing")
        else:
            info = MWBindInfo(mw.mr, 0, 0, access)  # some drivers read the region's key in this case, too
        self._bind_1(mw, info, wr_id, send_flags)

    def _bind_1(self, mw: MW, info: MWBindInfo, wr_id: int, send_flags: SendFlags) -> None:
        request = bind_1_request(mw, info, self.pd)
        raw = ffi.new("struct ibv_mw_bind *")
        hold = Hold.of(wr_id, [cast("Held", request)])
        raw.wr_id, raw.send_flags = hold.serial, int(send_flags)
        raw.bind_info.mr, raw.bind_info.addr, raw.bind_info.length = info.mr._handle, info.addr, info.length
        raw.bind_info.mw_access_flags = int(info.mw_access_flags)
        with self._lock:
            handle = self._ready_to_send()

            def run() -> tuple[int, int]:
                rc = lib.ibv_bind_mw(handle, mw._handle, raw)
                if rc == 0:
                    mw._bound_by_driver()
                return rc, int(rc == 0)

            hold_and_run("ibv_bind_mw", run, [hold], self._ledger.sends)

    def _with_window(self, wr: SendWR, kept: list[Held]) -> list[Held]:
        """Return what a checked request holds; one that changes a window holds that change as well."""
        if wr.opcode == WROpcode.BIND_MW:
            assert wr.rkey is not None
            return [cast("Held", window_request(wr.mw, wr.rkey, wr.bind_info, self.pd, cast("QP", self)))]
        if wr.opcode == WROpcode.LOCAL_INV:
            assert wr.invalidate_rkey is not None
            request = invalidation(self.pd, wr.invalidate_rkey)
            return kept if request is None else [cast("Held", request)]
        return kept

"""XRC domains: processes that let each other's peers reach their SRQs through one QP.

One XRC_RECV QP receives for all processes that opened the domain. Each request that a peer posts to its XRC_SEND QP
names the SRQ that it is for, by ``SendWR.remote_srqn``.
"""

from __future__ import annotations

import os
import threading

from ._base.args import check_int
from ._base.check import check_ptr, check_rc
from ._base.resource import Resource
from ._objects.inflight import Ledger
from ._objects.transitions import Transitions
from .device import Context
from .enums import QPOpenAttrMask, QPType, XRCDInitAttrMask
from .ffi import CData, ffi, lib

__all__ = ["XRCD", "OpenedQP"]

_MAX_FD = (1 << 31) - 1


class XRCD(Resource):
    """An XRC domain; make one with ``Context.open_xrcd``.

    Args:
        fd: a descriptor of the file that processes share the domain by, as they would a name; None makes one that is
            this process's own. It may be closed afterwards.
        oflags: ``os.O_CREAT`` makes the domain if it is not there; ``os.O_EXCL`` with it refuses if it is.

    Raises:
        UnsupportedError: the device has no XRC (``DeviceCapFlags.XRC``).
        VerbsOSError: the verb refused, for example because the domain is not there (ENOENT) or is (EEXIST).

    Verb: ibv_open_xrcd
    """

    def __init__(self, context: Context, fd: int | None = None, oflags: int = os.O_CREAT) -> None:
        raw = ffi.new("struct ibv_xrcd_init_attr *")
        raw.comp_mask = int(XRCDInitAttrMask.FD | XRCDInitAttrMask.OFLAGS)
        raw.fd = -1 if fd is None else check_int("fd", fd, 0, _MAX_FD)
        raw.oflags = check_int("oflags", oflags, 0, _MAX_FD)
        if raw.oflags & ~(os.O_CREAT | os.O_EXCL):
            raise ValueError(f"oflags are os.O_CREAT and os.O_EXCL, not {oflags:#x}")
        if fd is None and not raw.oflags & os.O_CREAT:
            raise ValueError(
                "a domain without a file is this process's own: it cannot be there yet, so give os.O_CREAT"
            )
        handle = check_ptr("ibv_open_xrcd", lib.ibv_open_xrcd(context._handle, raw))
        self.context = context
        self._own(handle, _close_xrcd, context, label=f"XRCD of {context.name}")

    def open_qp(self, qp_num: int) -> OpenedQP:
        """Open the XRC_RECV QP that another process made in this domain; closing it leaves that one alone.

        Args:
            qp_num: its number, 24 bits.

        Raises:
            UnsupportedError: the device cannot.
            VerbsOSError: the verb refused, for example because the domain has no such QP.

        Verb: ibv_open_qp
        """
        return OpenedQP(self, qp_num)


class OpenedQP(Transitions):
    """Another process's XRC_RECV QP, opened by ``XRCD.open_qp``: it can be asked and moved, but not posted to.

    Verb: ibv_open_qp
    """

    _closes_early = True

    def __init__(self, xrcd: XRCD, qp_num: int) -> None:
        raw = ffi.new("struct ibv_qp_open_attr *")
        raw.comp_mask = int(QPOpenAttrMask.NUM | QPOpenAttrMask.XRCD | QPOpenAttrMask.TYPE)
        raw.qp_num = check_int("qp_num", qp_num, 0, (1 << 24) - 1)
        raw.xrcd, raw.qp_type = xrcd._handle, QPType.XRC_RECV
        handle = check_ptr("ibv_open_qp", lib.ibv_open_qp(xrcd.context._handle, raw))
        self.context = xrcd.context
        self.xrcd = xrcd
        self.qp_type = QPType.XRC_RECV
        self.qp_num: int = handle.qp_num
        self.send_cq = self.recv_cq = None
        self._lock = threading.RLock()
        self._ledger = Ledger(self.qp_type)
        self._own(handle, _close_qp, xrcd, label=f"QP {self.qp_num:#x}, opened")
        self.query()  # it may be in any state


def _close_qp(handle: CData) -> None:
    check_rc("ibv_destroy_qp", lib.ibv_destroy_qp(handle))


def _close_xrcd(handle: CData) -> None:
    check_rc("ibv_close_xrcd", lib.ibv_close_xrcd(handle))

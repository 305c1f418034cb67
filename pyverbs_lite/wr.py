"""Work requests and work completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ._base.args import check_int
from ._base.resource import Resource
from ._objects.device_attr import known
from .ah import AH
from .enums import SendFlags, WCFlags, WCOpcode, WCStatus, WROpcode
from .errors import CompletionError
from .ffi import CData, ffi
from .mr import MR, MRSlice
from .remote import RemoteBuffer

__all__ = ["SGE", "WC", "RecvWR", "SendWR"]

_MAX32 = (1 << 32) - 1
_NO_FLAGS = WCFlags(0)
#: What completes without saying how long it was.
_NO_LENGTH = (WCOpcode.SEND, WCOpcode.RDMA_WRITE, WCOpcode.BIND_MW, WCOpcode.LOCAL_INV)


@dataclass(frozen=True, slots=True)
class SGE:
    """A scatter/gather element by hand (``struct ibv_sge``); an ``MR`` or ``mr[a:b]`` does too, and holds its memory.

    Attributes:
        addr, length: the local range, in bytes.
        lkey: the local key of the region that covers it.
    """

    addr: int
    length: int
    lkey: int

    def __post_init__(self) -> None:
        check_int("addr of an SGE", self.addr, 0, (1 << 64) - 1)
        check_int("length of an SGE", self.length, 0, _MAX32)
        check_int("lkey of an SGE", self.lkey, 0, _MAX32)


LocalMemory = SGE | MR | MRSlice


class BindInfo(Protocol):
    """What a memory window is bound to (``struct ibv_mw_bind_info``)."""

    @property
    def mr(self) -> MR: ...
    @property
    def addr(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def mw_access_flags(self) -> int: ...


@dataclass(slots=True, kw_only=True)
class SendWR:
    """A request for the send queue (``struct ibv_send_wr``).

    Attributes:
        wr_id: any 64-bit number; comes back in the completion.
        imm_data: 32 bits, in host order here; the verb's big-endian member is filled for you.
        remote: the peer's memory, for RDMA and atomics.
        compare_add, swap: the operands of an atomic, 64 bits each.
        ah, remote_qpn, remote_qkey: where a datagram goes: a port, its QP (24 bits; ``MULTICAST_QPN`` for a group),
            and that QP's key. All three, and on UD only.
        remote_srqn: the peer's SRQ that the request is for; on XRC_SEND only.
        invalidate_rkey: for SEND_WITH_INV a key of the peer's, for LOCAL_INV one of ours.
        mw, rkey, bind_info: for BIND_MW the window of type 2, its new key, and what it is bound to.
    """

    opcode: WROpcode = WROpcode.SEND
    sg_list: Sequence[LocalMemory] = ()
    wr_id: int = 0
    send_flags: SendFlags = SendFlags.SIGNALED
    imm_data: int | None = None
    remote: RemoteBuffer | None = None
    compare_add: int = 0
    swap: int = 0
    ah: AH | None = None
    remote_qpn: int | None = None
    remote_qkey: int | None = None
    remote_srqn: int | None = None
    invalidate_rkey: int | None = None
    mw: Resource | None = None
    rkey: int | None = None
    bind_info: BindInfo | None = None


@dataclass(slots=True, kw_only=True)
class RecvWR:
    """A request for a receive queue (``struct ibv_recv_wr``).

    On a UD QP the first 40 bytes are not the sender's: see ``QP.grh_room`` and ``split_grh``.
    """

    sg_list: Sequence[LocalMemory] = ()
    wr_id: int = 0


@dataclass(frozen=True, slots=True)
class WC:
    """A work completion (``struct ibv_wc``).

    Of one whose status is not ``SUCCESS`` only ``status``, ``wr_id``, ``qp_num``, ``vendor_err`` and ``is_recv`` mean
    anything; the other members are None or 0 then.

    Attributes:
        wr_id: the number that the request was posted with.
        status, opcode: a plain number where the driver gives one that has no name here.
        byte_len: bytes received or read, of an atomic 8; 0 for sends and writes, where the verb says nothing. On a UD
            QP the 40 bytes in front of the payload count: see ``split_grh``.
        src_qp: the sender's QP number, of a datagram only.
        imm_data: the immediate in host order, or None where the message carried none.
        is_recv: whether a receive completed. A failed completion does not say it, but the library remembers what it
            posted; None only for a failed request that was posted past it, through the C interface.
    """

    wr_id: int
    status: WCStatus
    qp_num: int
    vendor_err: int
    opcode: WCOpcode | None = None
    byte_len: int = 0
    imm_data: int | None = None
    invalidated_rkey: int | None = None
    src_qp: int = 0
    wc_flags: WCFlags = _NO_FLAGS
    pkey_index: int = 0
    slid: int = 0
    sl: int = 0
    dlid_path_bits: int = 0
    is_recv: bool | None = None

    def raise_for_status(self) -> None:
        """Raise unless the status is ``SUCCESS``.

        Raises:
            CompletionError: the subclass for the status.
        """
        if self.status != WCStatus.SUCCESS:
            raise completion_error(self.status, wr_id=self.wr_id, qp_num=self.qp_num, vendor_err=self.vendor_err)


def completion_error(status: int, *, wr_id: int, qp_num: int, vendor_err: int, operation: str = "") -> CompletionError:
    """Make the exception for a completion status."""
    status = known(WCStatus, status)
    cls = CompletionError.by_status.get(getattr(status, "name", ""), CompletionError)
    return cls(status, wr_id=wr_id, qp_num=qp_num, vendor_err=vendor_err, operation=operation)


def wc_from_c(raw: CData, wr_id: int, is_recv: bool | None = None) -> WC:
    """Read a ``struct ibv_wc``, and of a failed one only what is valid.

    Args:
        wr_id: the caller's, which need not be the one in the struct.
        is_recv: whether it was a receive, where that is known.
    """
    status = known(WCStatus, raw.status)
    if status != WCStatus.SUCCESS:
        return WC(wr_id, status, raw.qp_num, raw.vendor_err, is_recv=is_recv)
    opcode, flags = known(WCOpcode, raw.opcode), WCFlags(raw.wc_flags)
    is_recv = bool(opcode & WCOpcode.RECV)
    # Some drivers flag the sender's own completion too, where the member holds nothing.
    has_imm = is_recv and flags & WCFlags.WITH_IMM
    return WC(
        wr_id,
        status,
        raw.qp_num,
        raw.vendor_err,
        opcode,
        0 if opcode in _NO_LENGTH else raw.byte_len,
        int.from_bytes(ffi.buffer(ffi.addressof(raw, "imm_data"))[:], "big") if has_imm else None,
        raw.invalidated_rkey if flags & WCFlags.WITH_INV else None,
        raw.src_qp,
        flags,
        raw.pkey_index,
        raw.slid,
        raw.sl,
        raw.dlid_path_bits,
        is_recv,
    )


def relabel_inv(wc: WC, raw: CData) -> WC:
    """Read a completion again that says ``IP_CSUM_OK`` and means ``WITH_INV``."""
    flags = wc.wc_flags & ~WCFlags.IP_CSUM_OK | WCFlags.WITH_INV
    return replace(wc, wc_flags=flags, invalidated_rkey=raw.invalidated_rkey)


def immediate(value: int | None, what: str = "imm_data") -> int:
    """Check an immediate: 32 bits, unsigned, host order.

    Raises:
        TypeError, ValueError: it is none.
    """
    return check_int(f"{what} (32 bits, unsigned)", value, 0, _MAX32)

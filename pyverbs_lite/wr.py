"""Work requests and work completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .enums import SendFlags, WCFlags, WCOpcode, WCStatus, WROpcode
from .errors import CompletionError
from .ffi import CData, ffi
from .mr import MR, MRSlice
from .remote import RemoteBuffer

__all__ = ["SGE", "WC", "RecvWR", "SendWR"]

_MAX32 = (1 << 32) - 1
_NO_FLAGS = WCFlags(0)


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


Memory = SGE | MR | MRSlice


@dataclass(slots=True, kw_only=True)
class SendWR:
    """A request for the send queue (``struct ibv_send_wr``).

    Attributes:
        wr_id: any 64-bit number; comes back in the completion.
        imm_data: 32 bits, in host order here; the verb's big-endian member is filled for you.
        remote: the peer's memory, for RDMA and atomics.
        compare_add, swap: the operands of an atomic, 64 bits each.
    """

    opcode: WROpcode = WROpcode.SEND
    sg_list: Sequence[Memory] = ()
    wr_id: int = 0
    send_flags: SendFlags = SendFlags.SIGNALED
    imm_data: int | None = None
    remote: RemoteBuffer | None = None
    compare_add: int = 0
    swap: int = 0


@dataclass(slots=True, kw_only=True)
class RecvWR:
    """A request for the receive queue (``struct ibv_recv_wr``)."""

    sg_list: Sequence[Memory] = ()
    wr_id: int = 0


@dataclass(frozen=True, slots=True)
class WC:
    """A work completion (``struct ibv_wc``).

    Of one whose status is not ``SUCCESS`` only ``status``, ``wr_id``, ``qp_num`` and ``vendor_err`` mean anything; the
    other members are None or 0 then.

    Attributes:
        imm_data: the immediate in host order, or None where the message carried none.
        byte_len: bytes received, or read; not set for sends and writes.
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

    def raise_for_status(self) -> None:
        """Raise unless the status is ``SUCCESS``.

        Raises:
            CompletionError: the subclass for the status.
        """
        if self.status != WCStatus.SUCCESS:
            raise completion_error(self.status, wr_id=self.wr_id, qp_num=self.qp_num, vendor_err=self.vendor_err)

    @property
    def is_recv(self) -> bool | None:
        """Whether a receive completed; None where a failed completion does not say."""
        return None if self.opcode is None else bool(self.opcode & WCOpcode.RECV)


def completion_error(status: int, *, wr_id: int, qp_num: int, vendor_err: int, operation: str = "") -> CompletionError:
    """Make the exception for a completion status."""
    status = WCStatus(status)
    cls = CompletionError.by_status.get(status.name, CompletionError)
    return cls(status, wr_id=wr_id, qp_num=qp_num, vendor_err=vendor_err, operation=operation)


def wc_from_c(raw: CData) -> WC:
    """Read a ``struct ibv_wc``, and of a failed one only what is valid."""
    status = WCStatus(raw.status)
    if status != WCStatus.SUCCESS:
        return WC(raw.wr_id, status, raw.qp_num, raw.vendor_err)
    opcode, flags = WCOpcode(raw.opcode), WCFlags(raw.wc_flags)
    # Some drivers flag the sender's own completion too, where the member holds nothing.
    has_imm = flags & WCFlags.WITH_IMM and opcode & WCOpcode.RECV
    return WC(
        raw.wr_id,
        status,
        raw.qp_num,
        raw.vendor_err,
        opcode,
        raw.byte_len,
        int.from_bytes(ffi.buffer(ffi.addressof(raw, "imm_data"))[:], "big") if has_imm else None,
        raw.invalidated_rkey if flags & WCFlags.WITH_INV else None,
        raw.src_qp,
        flags,
        raw.pkey_index,
        raw.slid,
        raw.sl,
        raw.dlid_path_bits,
    )


def immediate(value: int | None, what: str = "imm_data") -> int:
    """Check an immediate: 32 bits, unsigned, host order."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an integer of 32 bits, not {value!r}")
    if not 0 <= value <= _MAX32:
        raise ValueError(f"{what} must be 0 to {_MAX32:#x} (32 bits, unsigned), not {value}")
    return value

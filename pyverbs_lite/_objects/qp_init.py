"""What a QP is created with: checked, and handed to ``ibv_create_qp`` or ``ibv_create_qp_ex``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._base.args import check_int
from .._base.check import check_neg, check_ptr
from .._base.resource import Resource
from ..attr import QPCap
from ..cq import CQ
from ..enums import QPCreateFlags, QPInitAttrMask, QPType, SendOpsFlags, SRQType
from ..ffi import CData, ffi, lib
from ..srq import SRQ
from ..xrcd import XRCD
from .attr_c import read_cap, write_cap

if TYPE_CHECKING:
    from ..pd import PD

__all__ = ["QPInitAttr", "check_init", "create"]

#: Device limits that bound what a QP is created with.
_CAP_LIMITS = {
    "max_send_wr": "max_qp_wr",
    "max_recv_wr": "max_qp_wr",
    "max_send_sge": "max_sge",
    "max_recv_sge": "max_sge",
}
_T = QPType
_NO_CREATE_FLAGS, _NO_OPS = QPCreateFlags(0), SendOpsFlags(0)
#: The CQs that a type needs; what is not listed needs both.
_CQS: dict[QPType, tuple[str, ...]] = {_T.XRC_SEND: ("send_cq",), _T.XRC_RECV: ()}
#: Member -> the types of QP that take it; the others refuse it.
_TAKERS: dict[str, tuple[QPType, ...]] = {
    "srq": (_T.RC, _T.UC, _T.UD),
    "xrcd": (_T.XRC_RECV,),
    "send_ops_flags": (_T.RC, _T.UC, _T.UD, _T.XRC_SEND, _T.RAW_PACKET, _T.DRIVER),
    "source_qpn": (_T.UD,),
    "max_tso_header": (_T.UD, _T.RAW_PACKET),
    "ind_table": (_T.UD, _T.RAW_PACKET),
    "rx_hash": (_T.UD, _T.RAW_PACKET),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QPInitAttr:
    """What a QP is created with (``struct ibv_qp_init_attr_ex``).

    Attributes:
        send_cq, recv_cq: where requests complete; an XRC_SEND QP has no receives, an XRC_RECV QP has neither.
        cap: the sizes of its queues; the receive sizes are not used with an SRQ.
        sq_sig_all: whether every send request completes visibly, not only those with ``SendFlags.SIGNALED``.
        srq: where its receives come from, instead of a queue of its own.
        xrcd: the domain that an XRC_RECV QP is in.
        create_flags: see ``QPCreateFlags``.
        send_ops_flags: what will be posted with ``QP.wr_batch``; without it there is only ``post_send``.
        source_qpn: the QP number that its datagrams carry, 24 bits; sets ``QPCreateFlags.SOURCE_QPN``.
        max_tso_header: the longest header of ``send_tso``, in bytes.
        ind_table, rx_hash: the work queues that what arrives is spread over, and by which hash. Such a QP has no
            receives of its own.
    """

    send_cq: CQ | None = None
    recv_cq: CQ | None = None
    cap: QPCap
    qp_type: QPType = QPType.RC
    sq_sig_all: bool = False
    srq: SRQ | None = None
    xrcd: XRCD | None = None
    create_flags: QPCreateFlags = _NO_CREATE_FLAGS
    send_ops_flags: SendOpsFlags = _NO_OPS
    source_qpn: int | None = None
    max_tso_header: int | None = None
    ind_table: Resource | None = None
    rx_hash: Any = None


#: Members that only the extended struct has; to give one is to call ``ibv_create_qp_ex``.
_EXTENDED = ("xrcd", "create_flags", "send_ops_flags", "source_qpn", "max_tso_header", "ind_table", "rx_hash")


def check_init(pd: PD, init_attr: QPInitAttr) -> None:
    """Check what a QP is asked to be; the device would say no more than EINVAL.

    Raises:
        TypeError, ValueError: it cannot be; the text says which member.
    """
    if not isinstance(init_attr, QPInitAttr):
        raise TypeError(f"a QP is made from a QPInitAttr, not {init_attr!r}")
    kind = QPType(init_attr.qp_type)
    needed = _CQS.get(kind, ("send_cq", "recv_cq")) if init_attr.ind_table is None else ()
    for member, cls in (("send_cq", CQ), ("recv_cq", CQ), ("srq", SRQ), ("xrcd", XRCD)):
        thing = getattr(init_attr, member)
        if thing is None and member not in needed:
            continue
        if not isinstance(thing, cls):
            raise TypeError(f"{member} must be {'an' if cls is not CQ else 'a'} {cls.__name__}, not {thing!r}")
        if thing.context is not pd.context:
            raise ValueError(f"{member} belongs to {thing.context!r}, and the PD to {pd.context!r}")
    for member, takers in _TAKERS.items():
        if getattr(init_attr, member) and kind not in takers:
            raise ValueError(f"a {kind.name} QP takes no {member}: {', '.join(taker.name for taker in takers)} do")
    if kind == QPType.XRC_RECV and init_attr.xrcd is None:
        raise ValueError("an XRC_RECV QP needs xrcd=, the domain that it receives for")
    if init_attr.srq is not None and init_attr.srq.srq_type == SRQType.XRC:
        raise ValueError("an XRC SRQ is named by each request's remote_srqn; a QP is not made with one")
    if (init_attr.ind_table is None) != (init_attr.rx_hash is None):
        raise ValueError("ind_table and rx_hash go together: work queues, and the hash that picks one")
    _check_sizes(pd, init_attr)


def _check_sizes(pd: PD, init_attr: QPInitAttr) -> None:
    if not isinstance(init_attr.cap, QPCap):
        raise TypeError(f"cap must be a QPCap, not {init_attr.cap!r}")
    limits = pd.context.query_device()
    for member in QPCap.__slots__:
        limit = getattr(limits, _CAP_LIMITS[member]) if member in _CAP_LIMITS else (1 << 31) - 1
        check_int(f"cap.{member}", getattr(init_attr.cap, member), 0, limit)
    if init_attr.source_qpn is not None:
        check_int("source_qpn", init_attr.source_qpn, 0, (1 << 24) - 1)
    if init_attr.max_tso_header is not None:
        check_int("max_tso_header", init_attr.max_tso_header, 0, 0xFFFF)


def create(pd: PD, init_attr: QPInitAttr, cm_id: CData | None = None) -> tuple[CData, QPCap]:
    """Make the QP; return its handle and the sizes that it got.

    Args:
        cm_id: the identifier of librdmacm that it is made for.

    Verb: ibv_create_qp, ibv_create_qp_ex, rdma_create_qp_ex
    """
    extended = cm_id is not None or any(getattr(init_attr, member) not in (None, 0) for member in _EXTENDED)
    raw = ffi.new("struct ibv_qp_init_attr_ex *" if extended else "struct ibv_qp_init_attr *")
    raw.qp_type, raw.sq_sig_all = QPType(init_attr.qp_type), int(init_attr.sq_sig_all)
    write_cap(raw.cap, init_attr.cap)
    for member in ("send_cq", "recv_cq", "srq"):
        thing = getattr(init_attr, member)
        if thing is not None:
            setattr(raw, member, thing._handle)
    if not extended:
        handle = check_ptr("ibv_create_qp", lib.ibv_create_qp(pd._handle, raw))
        return handle, read_cap(raw.cap)
    kept = _extend(raw, pd, init_attr)
    if cm_id is not None:
        check_neg("rdma_create_qp_ex", lib.rdma_create_qp_ex(cm_id, raw), _HINT)
        del kept
        return cm_id.qp, read_cap(raw.cap)
    handle = check_ptr("ibv_create_qp_ex", lib.ibv_create_qp_ex(pd.context._handle, raw), _HINT)
    del kept  # only now: the struct points to it
    return handle, read_cap(raw.cap)


_HINT = "this device or its driver has not all that was asked for: create_flags, send_ops_flags, XRC, TSO or RSS"


def _extend(raw: CData, pd: PD, init_attr: QPInitAttr) -> CData:
    """Fill what only the extended struct has; return the memory that it points to."""
    mask = QPInitAttrMask.PD
    raw.pd = pd._handle
    flags = QPCreateFlags(init_attr.create_flags)
    if init_attr.xrcd is not None:
        # The receives, and what RDMA may reach, belong to the PD of the SRQ: the QP itself has none.
        mask = QPInitAttrMask.XRCD
        raw.pd, raw.xrcd = ffi.NULL, init_attr.xrcd._handle
    if init_attr.source_qpn is not None:
        flags |= QPCreateFlags.SOURCE_QPN
        raw.source_qpn = init_attr.source_qpn
    if flags:
        mask |= QPInitAttrMask.CREATE_FLAGS
        raw.create_flags = int(flags)
    if init_attr.send_ops_flags:
        mask |= QPInitAttrMask.SEND_OPS_FLAGS
        raw.send_ops_flags = int(SendOpsFlags(init_attr.send_ops_flags))
    if init_attr.max_tso_header is not None:
        mask |= QPInitAttrMask.MAX_TSO_HEADER
        raw.max_tso_header = init_attr.max_tso_header
    kept = ffi.NULL
    if init_attr.ind_table is not None:
        mask |= QPInitAttrMask.IND_TABLE | QPInitAttrMask.RX_HASH
        raw.rwq_ind_tbl = init_attr.ind_table._handle
        key = bytes(init_attr.rx_hash.rx_hash_key)
        kept = ffi.new("uint8_t[]", key)
        conf = raw.rx_hash_conf
        conf.rx_hash_function, conf.rx_hash_key_len = int(init_attr.rx_hash.rx_hash_function), len(key)
        conf.rx_hash_key, conf.rx_hash_fields_mask = kept, int(init_attr.rx_hash.rx_hash_fields_mask)
    raw.comp_mask = int(mask)
    return kept

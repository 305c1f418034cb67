"""The states of a connection's QP, set by what is known to be right: without the checks that a caller's values need.

Each function says whether the verb took it. Where it did not, the method of the same name of ``QP`` knows why not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import qp_fsm
from ..enums import AccessFlags, QPAttrMask, QPState, QPType
from ..ffi import CData, ffi, lib

if TYPE_CHECKING:
    from ..endpoint import Endpoint, Negotiated
    from ..qp import QP
    from .options import Options

__all__ = ["to_init", "to_rtr", "to_rts"]

_S = QPState


def _mask(current: QPState, target: QPState) -> int:
    return int(qp_fsm.required(QPType.RC, current, target) | QPAttrMask.STATE)


_INIT, _RTR, _RTS = int(_S.INIT), int(_S.RTR), int(_S.RTS)
_TO_INIT, _TO_RTR, _TO_RTS = _mask(_S.RESET, _S.INIT), _mask(_S.INIT, _S.RTR), _mask(_S.RTR, _S.RTS)
_modify = lib.pvl_modify


def to_init(engine: CData, qp: QP, port_num: int, options: Options, access: AccessFlags) -> bool:
    """Move from RESET to INIT."""
    attr = ffi.new("struct ibv_qp_attr *")
    attr.qp_state, attr.port_num, attr.pkey_index, attr.qp_access_flags = _INIT, port_num, options.pkey_index, access
    if _modify(engine, attr, _TO_INIT):
        return False
    qp._moved(_S.INIT, port_num=port_num)
    return True


def to_rtr(
    engine: CData, qp: QP, port_num: int, sgid_index: int | None, options: Options, remote: Endpoint, agreed: Negotiated
) -> bool:
    """Move from INIT to RTR; with a row of the GID table by a global route."""
    attr = ffi.new("struct ibv_qp_attr *")
    attr.qp_state, attr.dest_qp_num, attr.rq_psn = _RTR, remote.qp_num, remote.psn
    attr.path_mtu, attr.max_dest_rd_atomic = agreed.path_mtu, agreed.max_dest_rd_atomic
    attr.min_rnr_timer = options.min_rnr_timer_code
    path = attr.ah_attr
    path.port_num, path.dlid, path.sl = port_num, remote.lid, options.sl
    if sgid_index is not None:
        path.is_global, grh = 1, path.grh
        grh.dgid.raw, grh.sgid_index = remote.gid.packed, sgid_index
        grh.hop_limit, grh.traffic_class = options.hop_limit, options.traffic_class
    if _modify(engine, attr, _TO_RTR):
        return False
    qp._moved(_S.RTR)
    return True


def to_rts(engine: CData, qp: QP, options: Options, sq_psn: int, agreed: Negotiated) -> bool:
    """Move from RTR to RTS."""
    attr = ffi.new("struct ibv_qp_attr *")
    attr.qp_state, attr.sq_psn, attr.max_rd_atomic = _RTS, sq_psn, agreed.max_rd_atomic
    attr.timeout, attr.retry_cnt, attr.rnr_retry = options.ack_timeout_exp, options.retry_cnt, options.rnr_retry
    if _modify(engine, attr, _TO_RTS):
        return False
    qp._moved(_S.RTS, read_depth=agreed.max_rd_atomic)
    return True

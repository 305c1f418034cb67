"""Work requests checked against the queue they are for: what no driver would refuse, or not say why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from .._base.args import check_int
from ..ah import AH
from ..attr import QPCap
from ..enums import AccessFlags, QPType, SendFlags, WROpcode
from ..grh import GRH_BYTES
from ..mr import MR, MRSlice
from ..pd import PD
from ..wr import SGE, LocalMemory, RecvWR, SendWR, immediate
from .inflight import Held

__all__ = ["ATOMICS", "Rules", "check_recv"]

_O, _T = WROpcode, QPType
ATOMICS = (_O.ATOMIC_CMP_AND_SWP, _O.ATOMIC_FETCH_AND_ADD)
_WRITES = (_O.RDMA_WRITE, _O.RDMA_WRITE_WITH_IMM)
_SENDS = (_O.SEND, _O.SEND_WITH_IMM)
_WITH_IMM = (_O.SEND_WITH_IMM, _O.RDMA_WRITE_WITH_IMM)
_WITH_KEY = (_O.SEND_WITH_INV, _O.LOCAL_INV)
#: What fetches from the peer: it needs a depth of max_rd_atomic, and writes into local memory.
_FETCHES = (_O.RDMA_READ, *ATOMICS)
#: What moves no data.
_BARE = (_O.LOCAL_INV, _O.BIND_MW)
_CONNECTED = (*_SENDS, *_WRITES, _O.SEND_WITH_INV, *_BARE)
_RELIABLE = (*_CONNECTED, *_FETCHES)
#: What can be posted with a ``SendWR``. Anything else has members that it lacks, and a driver would follow their zeros.
_OPCODES: dict[QPType, tuple[WROpcode, ...]] = {
    _T.RC: _RELIABLE,
    _T.XRC_SEND: _RELIABLE,
    _T.UC: _CONNECTED,
    _T.UD: _SENDS,
    _T.RAW_PACKET: (_O.SEND,),
}
#: 8 bytes written as one; newer than the oldest headers.
_ATOMIC_WRITE: int | None = getattr(_O, "ATOMIC_WRITE", None)
#: What the work request API has beyond that; it fills in the rest itself.
_BATCH_ONLY: dict[QPType, tuple[int | None, ...]] = {
    _T.RC: (_ATOMIC_WRITE, getattr(_O, "FLUSH", None)),
    _T.XRC_SEND: (_ATOMIC_WRITE, getattr(_O, "FLUSH", None)),
    _T.UD: (_O.TSO,),
    _T.RAW_PACKET: (_O.TSO,),
}
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_QPN = (1 << 24) - 1
#: Members that go with a QP type, or an opcode, and with no other: name -> largest value, or None for an object.
_UD_MEMBERS: dict[str, int | None] = {"ah": None, "remote_qpn": _QPN, "remote_qkey": _U32}
_XRC_MEMBERS: dict[str, int | None] = {"remote_srqn": _U32}
_KEY_MEMBERS: dict[str, int | None] = {"invalidate_rkey": _U32}
_BIND_MEMBERS: dict[str, int | None] = {"mw": None, "rkey": _U32, "bind_info": None}
#: The specification's limit for one message; it also keeps drivers from adding lengths up past 32 bits.
_MAX_MESSAGE = 1 << 31


class Rules(NamedTuple):
    """What the requests of a QP must fit.

    Every ``check`` returns what has to stay in place while the request is in flight.
    """

    qp_type: QPType
    cap: QPCap
    pd: PD

    def check_recv(self, wr: RecvWR) -> list[Held]:
        """Raise unless the request can be posted as a receive."""
        room = GRH_BYTES if self.qp_type == QPType.UD else 0
        return check_recv(wr, self.pd, self.cap.max_recv_sge, "this QP's max_recv_sge", grh_room=room)

    def check_send(
        self,
        wr: SendWR,
        read_depth: int | None,
        max_datagram: Callable[[int], int] | None = None,
        *,
        batch: bool = False,
    ) -> list[Held]:
        """Raise unless the request can be posted as a send.

        Args:
            read_depth: the QP's ``max_rd_atomic``, or None if that is not known.
            max_datagram: for a length, says how long a datagram may be, in bytes.
            batch: whether it is for the work request API.
        """
        if not isinstance(wr, SendWR):
            raise TypeError(f"post_send takes SendWR, one or several, not {wr!r}")
        check_int("wr_id", wr.wr_id, 0, _U64)
        opcode = WROpcode(wr.opcode)
        self._check_opcode(opcode, batch)
        kept = check_regions(wr.sg_list, self.pd, self.cap.max_send_sge, "this QP's max_send_sge")
        total = sum(memory.length for memory in wr.sg_list)
        if total > _MAX_MESSAGE:
            raise ValueError(f"one request moves at most {_MAX_MESSAGE} bytes, not {total}")
        if opcode in _WITH_IMM:
            immediate(wr.imm_data)
        elif wr.imm_data is not None:
            raise ValueError(f"{opcode.name} carries no immediate: use its _WITH_IMM opcode")
        held: list[Held] = list(self._check_members(wr, opcode))
        if opcode in _BARE and wr.sg_list:
            raise ValueError(f"{opcode.name} moves no data: sg_list must be empty")
        if opcode not in (*_SENDS, *_WITH_KEY, _O.BIND_MW, _O.TSO):
            _check_remote(wr, opcode, total)
        if opcode in _FETCHES:
            check_writable(kept, opcode.name)
            if read_depth == 0:
                raise ValueError(f"{opcode.name} would never start: this QP's max_rd_atomic is 0")
        if max_datagram is not None and opcode != _O.TSO and total > (limit := max_datagram(total)):
            raise ValueError(
                f"a datagram of {total} bytes is longer than the port's active_mtu, {limit}: it would vanish without an"
                " error, as the specification demands"
            )
        if wr.send_flags & SendFlags.INLINE:
            self._check_inline(opcode, total)
            for region in kept:
                if region._host_addr is None:
                    raise ValueError(f"{region!r} is no memory of this process, so nothing of it can go inline")
            return held  # the bytes are taken while the verb runs
        return [*kept, *held]

    def _check_opcode(self, opcode: WROpcode, batch: bool) -> None:
        allowed = [*_OPCODES.get(self.qp_type, ()), *(_BATCH_ONLY.get(self.qp_type, ()) if batch else ())]
        if opcode not in allowed:
            names = ", ".join(WROpcode(known).name for known in allowed if known is not None) or "none"
            raise ValueError(f"{opcode.name} cannot be posted to a {self.qp_type.name} QP; its opcodes here: {names}")

    def _check_members(self, wr: SendWR, opcode: WROpcode) -> list[Held]:
        """Check what only one type of QP or one opcode takes; without it a driver would follow a zero."""
        is_ud, is_xrc = self.qp_type == QPType.UD, self.qp_type == QPType.XRC_SEND
        _check_given(wr, _UD_MEMBERS, is_ud, f"a request on a {self.qp_type.name} QP")
        _check_given(wr, _XRC_MEMBERS, is_xrc and opcode not in _BARE, f"a request on a {self.qp_type.name} QP")
        _check_given(wr, _KEY_MEMBERS, opcode in _WITH_KEY, opcode.name)
        _check_given(wr, _BIND_MEMBERS, opcode == _O.BIND_MW, opcode.name)
        if wr.ah is not None and not isinstance(wr.ah, AH):
            raise TypeError(f"ah must be an AH, not {wr.ah!r}")
        region = None if wr.bind_info is None else wr.bind_info.mr
        used = [thing for thing in (wr.ah, wr.mw, region) if thing is not None]
        for thing in used:
            thing._handle  # noqa: B018 - a closed one is refused here, not by a failed completion
            if _root(getattr(thing, "pd", self.pd)) is not _root(self.pd):
                raise ValueError(f"{thing!r} belongs to another PD than the QP, which therefore cannot use it")
        return [cast("Held", thing) for thing in used if hasattr(thing, "_holders")]

    def _check_inline(self, opcode: WROpcode, total: int) -> None:
        if opcode in _FETCHES:
            raise ValueError(f"{opcode.name} brings data and sends none: nothing can go inline")
        if total > self.cap.max_inline_data:
            raise ValueError(
                f"{total} bytes do not fit inline: this QP's max_inline_data is {self.cap.max_inline_data}"
            )


def _check_given(wr: SendWR, members: dict[str, int | None], needed: bool, what: str) -> None:
    for name, high in members.items():
        value = getattr(wr, name)
        if not needed:
            if value is not None:
                raise ValueError(f"{what} takes no {name}")
        elif value is None:
            raise ValueError(f"{what} needs {', '.join(f'{member}=' for member in members)}; {name} is missing")
        elif high is not None:
            check_int(name, value, 0, high)


def check_recv(wr: RecvWR, pd: PD, max_sge: int, member: str, *, grh_room: int = 0) -> list[Held]:
    """Raise unless a request can be posted as a receive; return what it has to keep in place.

    Args:
        max_sge, member: the limit for its SGEs, and what to call that.
        grh_room: bytes that come in front of the payload.
    """
    if not isinstance(wr, RecvWR):
        raise TypeError(f"post_recv takes RecvWR, one or several, not {wr!r}")
    check_int("wr_id", wr.wr_id, 0, _U64)
    regions = check_regions(wr.sg_list, pd, max_sge, member)
    check_writable(regions, "a receive")
    total = sum(memory.length for memory in wr.sg_list)
    if total < grh_room:
        raise ValueError(
            f"a UD receive needs room for the GRH: {grh_room} bytes in front of the payload (QP.grh_room), and this one"
            f" has {total} in all; every datagram would be dropped"
        )
    return list(regions)


def check_regions(sg_list: Sequence[LocalMemory], pd: PD, limit: int, member: str) -> list[MR]:
    """Raise unless SGEs can be posted; return the regions they are of."""
    if isinstance(sg_list, (SGE, MR, MRSlice)):  # these have a length, too: in bytes
        raise TypeError(f"sg_list is a list of SGEs: [{sg_list!r}]")
    if len(sg_list) > limit:
        raise ValueError(f"{len(sg_list)} SGEs are more than {member}, {limit}")
    regions = []
    for memory in sg_list:
        if isinstance(memory, SGE):
            continue  # checked when it was made; its memory is the caller's to hold
        if not isinstance(memory, (MR, MRSlice)):
            raise TypeError(f"an SGE is an MR, a slice of one, or an SGE, not {memory!r}")
        check_int("the length of an SGE", memory.length, 0, _U32)
        region = memory if isinstance(memory, MR) else memory.mr
        region._handle  # noqa: B018 - a deregistered region is refused here, not by a failed completion
        if region._spoiled:
            region._require_sound()
        if _root(region.pd) is not _root(pd):
            raise ValueError(f"{region!r} belongs to another PD than the QP, which therefore cannot reach it")
        regions.append(region)
    return regions


def _root(pd: PD | None) -> PD | None:
    """Return the domain that decides: a parent domain is around another."""
    return None if pd is None else pd.root


def check_writable(regions: Sequence[MR], what: str) -> None:
    """Raise unless a device may write into all of the regions."""
    for region in regions:
        if not region.access & AccessFlags.LOCAL_WRITE:
            raise ValueError(f"{what} writes into {region!r}, which was registered without LOCAL_WRITE")


def _check_remote(wr: SendWR, opcode: WROpcode, total: int) -> None:
    if wr.remote is None:
        raise ValueError(f"{opcode.name} needs remote=, the peer's memory")
    if opcode in (*ATOMICS, _ATOMIC_WRITE):
        if total != 8 or wr.remote.addr % 8:
            raise ValueError(
                f"an atomic works on 8 bytes at an address that is a multiple of 8, not on {total} bytes at"
                f" {wr.remote.addr:#x}"
            )
        check_int("compare_add", wr.compare_add, 0, _U64)
        check_int("swap", wr.swap, 0, _U64)
    if total > wr.remote.length:
        raise ValueError(f"{opcode.name} of {total} bytes reaches beyond {wr.remote!r}")

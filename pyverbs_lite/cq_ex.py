"""Extended completion queues: completions with the fields that were asked for, and no others."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from ._base.args import check_flags, check_int
from ._base.check import check_ptr, require
from ._objects.inflight import Ledger
from .cq import _BATCH, CQ, CompChannel
from .device import Context
from .enums import CQInitAttrMask, CreateCQAttrFlags, CreateCQWCFlags, WCFlags, WCOpcode, WCStatus
from .errors import StateError
from .ffi import CData, ffi, lib
from .pd import PD
from .wr import WC

__all__ = ["CQEx", "PollBatch", "TMInfo", "WCEx", "WCView"]

_F = CreateCQWCFlags
_NO_FIELDS = CreateCQWCFlags(0)


class TMInfo(NamedTuple):
    """What the header of a tag-matched message carried (``struct ibv_wc_tm_info``): 64 and 32 bits, host order."""

    tag: int
    priv: int


@dataclass(frozen=True, slots=True)
class WCEx(WC):
    """A completion of an extended CQ: what was not asked for, or means nothing in this completion, is None or 0.

    Attributes:
        completion_ts: when it completed, in ticks of the device's clock (``hca_core_clock``).
        completion_wallclock_ns: the same in nanoseconds since 1970.
        cvlan: the VLAN tag that the device stripped off, host order.
        flow_tag: the tag of the flow rule that it came by, 24 bits.
        tm_info: of a tag-matched message.
    """

    completion_ts: int | None = None
    completion_wallclock_ns: int | None = None
    cvlan: int | None = None
    flow_tag: int | None = None
    tm_info: TMInfo | None = None


#: Field -> what to ask for at creation. Those that are missing here are always there.
_ASKED_FOR = {
    "byte_len": _F.WITH_BYTE_LEN,
    "imm_data": _F.WITH_IMM,
    "invalidated_rkey": _F.WITH_IMM,
    "qp_num": _F.WITH_QP_NUM,
    "src_qp": _F.WITH_SRC_QP,
    "slid": _F.WITH_SLID,
    "sl": _F.WITH_SL,
    "dlid_path_bits": _F.WITH_DLID_PATH_BITS,
    "completion_ts": _F.WITH_COMPLETION_TIMESTAMP,
    "completion_wallclock_ns": _F.WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
    "cvlan": _F.WITH_CVLAN,
    "flow_tag": _F.WITH_FLOW_TAG,
    "tm_info": _F.WITH_TM_INFO,
}
#: What a failed completion says.
_OF_A_FAILED_ONE = ("wr_id", "status", "vendor_err", "qp_num", "is_recv")


class WCView:
    """A completion inside of its batch; a field that cannot be right raises ``StateError``, and names what is missing.

    Fields are those of ``WCEx``. Refused are: one that the CQ was not created for, one that a failed completion does
    not have (it has ``status``, ``wr_id``, ``vendor_err``, ``is_recv`` and ``qp_num``), and any after the batch ended;
    ``snapshot()`` gives a value that may be kept.
    """

    __slots__ = ("_batch", "_wc")

    #: For type checkers and readers; ``__getattr__`` answers.
    wr_id: int
    status: WCStatus
    opcode: WCOpcode
    vendor_err: int
    wc_flags: WCFlags
    is_recv: bool | None
    byte_len: int
    imm_data: int | None
    invalidated_rkey: int | None
    qp_num: int
    src_qp: int
    slid: int
    sl: int
    dlid_path_bits: int
    completion_ts: int
    completion_wallclock_ns: int
    cvlan: int
    flow_tag: int
    tm_info: TMInfo

    def __init__(self, batch: PollBatch, wc: WCEx) -> None:
        self._batch = batch
        self._wc = wc

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in _FIELDS:
            raise AttributeError(f"a completion has no field {name!r}; it has {', '.join(_FIELDS)}")
        wc = self.snapshot()
        flag = _ASKED_FOR.get(name, _NO_FIELDS)
        if flag not in self._batch.wc_flags:
            raise StateError(f"{name} was not asked for: create the CQ with wc_flags that have {flag.name}")
        if wc.status != WCStatus.SUCCESS and name not in _OF_A_FAILED_ONE:
            raise StateError(f"{name} means nothing in a completion that failed with {wc.status!r}")
        return getattr(wc, name)

    def snapshot(self) -> WCEx:
        """Return the completion as a value, which outlives the batch."""
        if self._batch.ended:
            raise StateError("the batch that this completion belongs to has ended: keep wc.snapshot() instead")
        return self._wc

    def raise_for_status(self) -> None:
        """Raise unless the status is ``SUCCESS``.

        Raises:
            CompletionError: the subclass for the status.
        """
        self.snapshot().raise_for_status()

    def __repr__(self) -> str:
        return f"<WCView {'of a batch that ended' if self._batch.ended else self._wc!r}>"


_FIELDS = tuple(WCView.__annotations__)


class PollBatch:
    """Iterates over the completions that are there now; made by ``CQEx.poll_batch``.

    Attributes:
        wc_flags: the fields that can be read.
        ended: whether its ``with`` block was left.
    """

    def __init__(self, cq: CQEx, n: int | None) -> None:
        self._cq = cq
        self._left = n
        self.wc_flags = cq.wc_flags
        self.ended = False

    def __iter__(self) -> Iterator[WCView]:
        return self

    def __next__(self) -> WCView:
        if self.ended:
            raise StateError("the batch has ended: poll_batch() starts another")
        found = [] if self._left == 0 else self._cq.poll(1)
        if not found:
            raise StopIteration
        try:
            view = WCView(self, cast("WCEx", found[0]))
        except BaseException:  # an interrupt: nobody has seen it yet
            with self._cq._lock:
                self._cq._ready[:0] = found
            raise
        if self._left is not None:
            self._left -= 1
        return view


class CQEx(CQ):
    """A completion queue whose completions carry what was asked for; made by ``Context.create_cq_ex``.

    It is a ``CQ`` in all else: QPs are made with it, threads wait for it, and it holds what is in flight.

    Attributes:
        wc_flags: which fields a completion has.
        parent_domain: the domain that it allocates from, or None.

    Verb: ibv_create_cq_ex
    """

    def __init__(
        self,
        context: Context,
        cqe: int,
        channel: CompChannel | None = None,
        *,
        comp_vector: int = 0,
        wc_flags: CreateCQWCFlags = CreateCQWCFlags.STANDARD_FLAGS,
        flags: CreateCQAttrFlags | None = None,
        parent_domain: PD | None = None,
    ) -> None:
        self.wc_flags = check_flags("wc_flags", wc_flags, CreateCQWCFlags)
        # What the library itself must know: whose request it was, and which window the peer invalidated.
        self._fields = int(self.wc_flags | _F.WITH_QP_NUM | _F.WITH_IMM)
        self.flags = check_flags("flags", flags or 0, CreateCQAttrFlags)
        self.parent_domain = parent_domain
        if parent_domain is not None:
            self._needs = (_check_domain(context, parent_domain),)
        self._extras = ffi.new("struct pvl_wc_extra[]", _BATCH)
        super().__init__(context, cqe, channel, comp_vector=comp_vector)

    def _create(self, cqe: int, channel: CData, comp_vector: int) -> CData:
        attr = ffi.new("struct ibv_cq_init_attr_ex *")
        attr.cqe, attr.channel, attr.comp_vector, attr.wc_flags = cqe, channel, comp_vector, self._fields
        if self.flags:
            attr.comp_mask |= CQInitAttrMask.FLAGS
            attr.flags = int(self.flags)
        if self.parent_domain is not None:
            attr.comp_mask |= CQInitAttrMask.PD
            attr.parent_domain = self.parent_domain._handle
        pointer = lib.ibv_create_cq_ex(self.context._handle, attr)
        hint = f"the device or its driver does not have all of wc_flags {self.wc_flags!r} and flags {self.flags!r}"
        refused = not pointer and ffi.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
        return lib.ibv_cq_ex_to_cq(check_ptr("ibv_create_cq_ex", pointer, hint if refused else ""))

    @contextmanager
    def poll_batch(self, n: int | None = None) -> Iterator[PollBatch]:
        """Iterate over the completions that are there, at most ``n``, each as a ``WCView``.

        ::

            with cq.poll_batch() as batch:
                for wc in batch:
                    print(wc.wr_id, wc.status, wc.byte_len)

        Inside of the block everything is allowed that is allowed outside, such as to close a QP or to poll. Completions
        that were not iterated over, after ``break`` or an exception, are there for the next poll. ``poll`` and
        ``wait`` give ``WCEx`` values instead, in which a field that was not asked for is None or 0.

        Verb: ibv_start_poll, ibv_end_poll
        """
        batch = PollBatch(self, None if n is None else check_int("n", n, 0, 1 << 30))
        try:
            yield batch
        finally:
            batch.ended = True

    def _look(self, handle: CData, spin_ns: int) -> int:
        extended = ffi.cast("struct ibv_cq_ex *", handle)
        return lib.pvl_poll_ex(extended, self._fields, self._raw, self._extras, _BATCH, spin_ns, self._got)

    def _read(self, raw: CData, index: int) -> tuple[WC, Ledger | None]:
        wc, ledger = super()._read(raw, index)
        values: dict[str, Any] = {name: getattr(wc, name) for name in WC.__slots__}
        if wc.status == WCStatus.SUCCESS:
            if _F.WITH_IMM not in self.wc_flags:
                values |= {"imm_data": None, "invalidated_rkey": None}
            extra = self._extras[index]
            values |= {name: read(extra) for name, read in _EXTRAS.items() if _ASKED_FOR[name] in self.wc_flags}
        return WCEx(**values), ledger


#: How to read what ``struct ibv_wc`` does not have, or has with fewer bits.
_EXTRAS: dict[str, Callable[[CData], object]] = {
    "slid": lambda extra: extra.slid,
    "completion_ts": lambda extra: extra.completion_ts,
    "completion_wallclock_ns": lambda extra: extra.completion_wallclock_ns,
    "cvlan": lambda extra: extra.cvlan,
    "flow_tag": lambda extra: extra.flow_tag,
    "tm_info": lambda extra: TMInfo(extra.tm_tag, extra.tm_priv),
}


def _check_domain(context: Context, domain: PD) -> PD:
    if not isinstance(domain, PD):
        raise TypeError(f"parent_domain must be a parent domain or a PD, not {domain!r}")
    if domain.context is not context:
        raise ValueError(f"parent_domain belongs to {domain.context!r}, and the CQ is made on {context!r}")
    require("CQ_PARENT_DOMAIN", "the parent domain of a CQ")
    return domain

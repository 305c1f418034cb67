"""The work request API (``ibv_wr_*``): requests of one QP that are posted together, or not at all."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import Self, TypedDict, Unpack

from ._base.args import check_int
from ._base.check import require
from ._memory.buffer import Memory, Pinned, as_bytes_view
from ._objects.inflight import Held, Hold
from ._objects.posting import hold_and_run, lay_out
from .enums import SendFlags, SendOpsFlags, WROpcode
from .errors import StateError
from .ffi import CData, ffi, lib
from .wr import SGE, BindInfo, LocalMemory, SendWR

if TYPE_CHECKING:
    from ._base.resource import Resource
    from .ah import AH
    from .qp import QP
    from .remote import RemoteBuffer

__all__ = ["WRBatch", "WROptions"]

_O, _F = WROpcode, SendFlags
#: Option -> the flag that it stands for.
_FLAGS = {"signaled": _F.SIGNALED, "solicited": _F.SOLICITED, "fence": _F.FENCE, "ip_csum": _F.IP_CSUM}
#: The vendor_id of soft-RoCE, whose provider before rdma-core 64 takes every SGE of a list to be as long as the first.
_SOFT_ROCE = 0xFFFFFF
_SOFT_ROCE_FIXED = "ALLOC_BUF"  # a feature of the same release


class WROptions(TypedDict, total=False):
    """What every request of a batch takes.

    Attributes:
        sg_list: local memory: what is sent, or where it goes.
        inline: instead, a buffer or a list of buffers whose bytes are copied here and now; they may change at once.
        wr_id: any 64-bit number; comes back in the completion.
        signaled: whether there is a completion; True where not given.
        solicited, fence, ip_csum: the flags of ``SendFlags``.
        ah, remote_qpn, remote_qkey: where a datagram goes; on UD, and always there.
        remote_srqn: the peer's SRQ; on XRC_SEND, and always there.
    """

    sg_list: Sequence[LocalMemory]
    inline: Memory | Sequence[Memory]
    wr_id: int
    signaled: bool
    solicited: bool
    fence: bool
    ip_csum: bool
    ah: AH
    remote_qpn: int
    remote_qkey: int
    remote_srqn: int


class WRBatch:
    """Requests that a ``with qp.wr_batch() as wr:`` block collects, and posts behind one doorbell at its end.

    Each method checks its request there and then, and copies what goes inline. If the block is left by an exception
    nothing was posted; if it ends, either all requests are posted or none is. The verbs' own critical section, from
    ``ibv_wr_start`` to ``ibv_wr_complete``, runs in one piece at the end, with the QP's lock held, so nothing (an
    exception, Ctrl-C, another thread) can get in between and leave it half-started.

    Verb: ibv_wr_start, ibv_wr_complete
    """

    def __init__(self, qp: QP, ops: SendOpsFlags) -> None:
        self._qp = qp
        self._ops = ops
        self._requests: list[SendWR] = []
        self._kept: list[list[Held]] = []
        #: Request -> (header, size, mss) of send_tso, and (length, type and level) of flush.
        self._tso: dict[int, tuple[CData, int, int]] = {}
        self._flush: dict[int, tuple[int, int]] = {}
        self._memory: list[Pinned] = []
        self._thread: int | None = None

    def __enter__(self) -> Self:
        thread = threading.get_ident()
        other = self._qp._batches.get(thread)
        if other is not None and other._thread == thread:
            raise StateError(f"a batch of {self._qp!r} is open in this thread already: they cannot be nested")
        if self._thread is not None:
            raise StateError("this batch was used already: wr_batch() starts another")
        self._thread = thread
        vars(self._qp).setdefault("_batches", weakref.WeakValueDictionary())[thread] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._qp._batches.pop(self._thread or 0, None)
        self._thread = -1
        if error is None and self._requests:
            self._qp._post_batch(self)

    def __len__(self) -> int:
        return len(self._requests)

    # ------------------------------------------------------------ requests

    def send(self, *, imm: int | None = None, **options: Unpack[WROptions]) -> None:
        """Send a message.

        Args:
            imm: 32 bits that arrive in its completion, host order.
            options: see ``WROptions``.

        Raises:
            TypeError, ValueError: the request cannot be right, or the QP was not created for it.
            StateError: the ``with`` block has ended, or is another thread's.

        Verb: ibv_wr_send, ibv_wr_send_imm
        """
        self._add(_O.SEND if imm is None else _O.SEND_WITH_IMM, options, imm_data=imm)

    def send_inv(self, invalidate_rkey: int, **options: Unpack[WROptions]) -> None:
        """Send a message that takes one of the peer's keys away from us as it arrives.

        Raises:
            As ``send``.

        Verb: ibv_wr_send_inv
        """
        self._add(_O.SEND_WITH_INV, options, invalidate_rkey=invalidate_rkey)

    def send_tso(self, hdr: Memory, mss: int, **options: Unpack[WROptions]) -> None:
        """Send a stream in segments, each behind a copy of the header; on UD and raw packet QPs.

        Args:
            hdr: the packet's header up to and with TCP's, copied; at most ``QPInitAttr.max_tso_header`` bytes.
            mss: bytes of payload in a segment, 16 bits.

        Raises:
            As ``send``.

        Verb: ibv_wr_send_tso
        """
        header = bytes(as_bytes_view(hdr, what="hdr"))
        check_int("bytes of hdr", len(header), 1, self._qp._max_tso_header or 0)
        check_int("mss", mss, 1, 0xFFFF)
        self._add(_O.TSO, options)
        self._tso[len(self._requests) - 1] = ffi.new("char[]", header), len(header), mss

    def rdma_write(self, remote: RemoteBuffer, *, imm: int | None = None, **options: Unpack[WROptions]) -> None:
        """Write into the peer's memory; with ``imm`` it learns of it by a receive that completes.

        Raises:
            As ``send``.

        Verb: ibv_wr_rdma_write, ibv_wr_rdma_write_imm
        """
        self._add(_O.RDMA_WRITE if imm is None else _O.RDMA_WRITE_WITH_IMM, options, remote=remote, imm_data=imm)

    def rdma_read(self, remote: RemoteBuffer, **options: Unpack[WROptions]) -> None:
        """Read the peer's memory into ``sg_list``.

        Raises:
            As ``send``.

        Verb: ibv_wr_rdma_read
        """
        self._add(_O.RDMA_READ, options, remote=remote)

    def atomic_cmp_swp(self, remote: RemoteBuffer, compare: int, swap: int, **options: Unpack[WROptions]) -> None:
        """Write ``swap`` if 8 bytes of the peer's are ``compare``; what they were goes into ``sg_list``.

        Raises:
            As ``send``.

        Verb: ibv_wr_atomic_cmp_swp
        """
        self._add(_O.ATOMIC_CMP_AND_SWP, options, remote=remote, compare_add=compare, swap=swap)

    def atomic_fetch_add(self, remote: RemoteBuffer, add: int, **options: Unpack[WROptions]) -> None:
        """Add to 8 bytes of the peer's; what they were goes into ``sg_list``.

        Raises:
            As ``send``.

        Verb: ibv_wr_atomic_fetch_add
        """
        self._add(_O.ATOMIC_FETCH_AND_ADD, options, remote=remote, compare_add=add)

    def atomic_write(self, remote: RemoteBuffer, data: Memory, **options: Unpack[WROptions]) -> None:
        """Write 8 bytes, copied here and now, so that no reader sees a part of them.

        Raises:
            UnsupportedError: this build's rdma-core is too old.
            As ``send``.

        Verb: ibv_wr_atomic_write
        """
        require("ATOMIC_WRITE", "ibv_wr_atomic_write")
        self._refuse(options, "sg_list", "inline")
        self._add(_O.ATOMIC_WRITE, {**options, "sg_list": [self._copy(data)]}, remote=remote)

    def flush(self, remote: RemoteBuffer, placement: int, level: int, **options: Unpack[WROptions]) -> None:
        """Complete only when what was written into the peer's memory is where it is to be.

        Args:
            placement: ``PlacementType`` flags.
            level: a ``SelectivityLevel``.

        Raises:
            UnsupportedError: this build's rdma-core is too old.
            As ``send``.

        Verb: ibv_wr_flush
        """
        require("FLUSH", "ibv_wr_flush")
        self._refuse(options, "sg_list", "inline")
        kind = check_int("placement", int(placement), 1, 0xFF) | check_int("level", int(level), 0, 0xFF) << 8
        self._add(_O.FLUSH, options, remote=remote)
        self._flush[len(self._requests) - 1] = remote.length, kind

    def local_inv(self, invalidate_rkey: int, **options: Unpack[WROptions]) -> None:
        """Take one of our keys, of a memory window of type 2, away from the peer.

        Raises:
            As ``send``.

        Verb: ibv_wr_local_inv
        """
        self._add(_O.LOCAL_INV, options, invalidate_rkey=invalidate_rkey)

    def bind_mw(self, mw: Resource, rkey: int, bind_info: BindInfo, **options: Unpack[WROptions]) -> None:
        """Bind a memory window of type 2.

        Args:
            rkey: its new key.
            bind_info: the region, range and access.

        Raises:
            As ``send``.

        Verb: ibv_wr_bind_mw
        """
        self._add(_O.BIND_MW, options, mw=mw, rkey=rkey, bind_info=bind_info)

    # ------------------------------------------------------------ how

    def _add(self, opcode: WROpcode, options: WROptions, **members: Any) -> None:
        if self._thread != threading.get_ident():
            raise StateError("requests are added inside of the batch's own with block, by its own thread")
        needed = _OPS[opcode]
        if not self._ops & needed:
            raise ValueError(f"the QP was not created for {opcode.name}: give {needed.name} in its send_ops_flags")
        given: dict[str, Any] = {"signaled": True, **options}
        flags = SendFlags(sum(flag for name, flag in _FLAGS.items() if given.pop(name, False)))
        if "inline" in given:
            self._refuse(options, "sg_list")
            given["sg_list"] = [self._copy(given.pop("inline"))]
            flags |= SendFlags.INLINE
        wr = SendWR(opcode=opcode, send_flags=flags, **given, **members)
        kept = self._qp._check_send(wr, batch=True)
        self._check_list(wr)
        if len(self._requests) >= self._qp.cap.max_send_wr:
            raise ValueError(f"a batch is posted whole, and this QP's max_send_wr is {self._qp.cap.max_send_wr}")
        self._requests.append(wr)
        self._kept.append(kept)

    def _refuse(self, options: WROptions, *names: str) -> None:
        for name in names:
            if name in options:
                raise ValueError(f"{name} cannot be given here: the bytes are named another way, or there are none")

    def _copy(self, data: Memory | Sequence[Memory]) -> SGE:
        """Copy bytes that go inline into memory of the batch's, as one piece: providers are wrong about several."""
        parts = cast("Sequence[Memory]", data if isinstance(data, (list, tuple)) else [data])
        joined = b"".join(as_bytes_view(part, what="inline data") for part in parts)
        owned = Pinned(joined, what="inline data")
        self._memory.append(owned)
        return SGE(owned.addr, owned.nbytes, 0)

    def _check_list(self, wr: SendWR) -> None:
        lengths = {memory.length for memory in wr.sg_list}
        if len(lengths) < 2 or self._qp.context.query_device().vendor_id != _SOFT_ROCE:
            return
        require(_SOFT_ROCE_FIXED, "ibv_wr_set_sge_list with SGEs of different lengths on soft-RoCE")

    def _run(self, qp_ex: CData, holds: Sequence[Hold]) -> int:
        """Start, build and complete; the holds are those of the requests, in their order."""
        wrs, _sges, _bad = lay_out("struct ibv_send_wr", self._requests, holds)
        for index, (header, size, mss) in self._tso.items():
            wrs[index].tso.hdr, wrs[index].tso.hdr_sz, wrs[index].tso.mss = header, size, mss
        for index, (length, kind) in self._flush.items():
            remote = self._requests[index].remote
            assert remote is not None
            atomic = wrs[index].wr.atomic
            atomic.remote_addr, atomic.rkey, atomic.compare_add, atomic.swap = remote.addr, remote.rkey, length, kind
        return lib.pvl_wr_post(qp_ex, wrs)


def post_batch(batch: WRBatch, qp: QP) -> None:
    """Post a batch; the QP's lock is held."""
    holds = [Hold.of(wr.wr_id, kept) for wr, kept in zip(batch._requests, batch._kept, strict=True)]
    qp_ex = lib.ibv_qp_to_qp_ex(qp._handle)

    def run() -> tuple[int, int]:
        rc = batch._run(qp_ex, holds)
        return rc, 0 if rc else len(holds)

    hold_and_run("ibv_wr_complete", run, holds, qp._ledger.sends)


#: What a QP must have been created for.
_OPS: dict[int, SendOpsFlags] = {
    int(WROpcode[name.removeprefix("WITH_")]): flag for name, flag in SendOpsFlags.__members__.items()
}

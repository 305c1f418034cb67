"""Address handles: where a datagram goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import qp_fsm
from ._base.args import check_int
from ._base.check import check_ptr, check_rc, os_error
from ._base.resource import Resource
from ._objects.attr_c import read_ah_attr, write_ah_attr
from .attr import AHAttr
from .device import Context
from .enums import WCFlags
from .errors import BusyError
from .ffi import CData, ffi, lib
from .grh import GRH, GRH_BYTES
from .pd import PD

if TYPE_CHECKING:
    from ._memory.buffer import Memory
    from .wr import WC

__all__ = ["AH", "ah_attr_from_wc"]

_FROM_WC = ("pkey_index", "slid", "sl", "dlid_path_bits", "src_qp")


class AH(Resource):
    """An address handle; give it to ``SendWR.ah``. It cannot be closed while a request in flight goes to it.

    Make one with ``PD.create_ah`` from the address of a port or a multicast group, or with ``from_wc`` to answer.

    Attributes:
        attr: the address.

    Raises:
        ValueError: the port does not exist, the port's GIDs need a global route, a member is out of range.
        VerbsOSError: the verb refused, on RoCE also where no route leads to the address.

    Verb: ibv_create_ah
    """

    def __init__(self, pd: PD, attr: AHAttr) -> None:
        qp_fsm.check_values({"ah_attr": attr})
        port = pd.context.query_port(attr.port_num)
        if attr.grh is None and port.grh_required:
            raise ValueError(
                f"{pd.context.name} port {attr.port_num} is {port.link_layer.name}: its address handles need a global"
                " route (grh with dgid and sgid_index), a LID does not do"
            )
        if attr.grh is not None:
            check_int("sgid_index", attr.grh.sgid_index, 0, port.gid_tbl_len - 1)
        raw = ffi.new("struct ibv_ah_attr *")
        write_ah_attr(raw, attr)
        where = f"port {attr.port_num}, {'LID ' + hex(attr.dlid) if attr.grh is None else attr.grh}"
        handle = check_ptr("ibv_create_ah", lib.ibv_create_ah(pd._handle, raw), f"no address handle for {where}")
        self.pd = pd
        self.attr = attr
        #: Numbers of the requests in flight that go to it.
        self._holders: set[int] = set()
        self._own(handle, _DestroyAH(self._holders), pd, label=f"AH of {pd.context.name}")

    @classmethod
    def from_wc(cls, pd: PD, wc: WC, grh: GRH | Memory | None = None, port_num: int = 1) -> AH:
        """Make the handle that leads back to the sender of a datagram; answer to QP ``wc.src_qp``.

        Args:
            wc: the completion of the receive.
            grh: its header: a ``GRH``, or the receive's first 40 bytes; not needed if ``wc`` says there was none.
            port_num: the port that the receiving QP is on.

        Raises:
            ValueError: the completion says that there was a header, and none is given.
            VerbsOSError: no GID of the port is the one that the datagram was sent to, or the verb refused.

        Verb: ibv_init_ah_from_wc, ibv_create_ah
        """
        return cls(pd, ah_attr_from_wc(pd.context, wc, grh, port_num))

    def _before_destroy(self) -> None:
        if self._holders:
            raise _busy(len(self._holders))


def ah_attr_from_wc(context: Context, wc: WC, grh: GRH | Memory | None = None, port_num: int = 1) -> AHAttr:
    """Read the address of a datagram's sender off its completion and header, as ``AH.from_wc`` does.

    Raises:
        As ``AH.from_wc``.

    Verb: ibv_init_ah_from_wc
    """
    wc.raise_for_status()
    context.check_port(port_num)
    raw_wc, raw_grh, raw = ffi.new("struct ibv_wc *"), ffi.new("struct ibv_grh *"), ffi.new("struct ibv_ah_attr *")
    raw_wc.wc_flags = int(wc.wc_flags)
    for name in _FROM_WC:
        setattr(raw_wc, name, getattr(wc, name))
    if wc.wc_flags & WCFlags.GRH:
        if grh is None:
            raise ValueError("the completion says that the datagram had a GRH: give the receive's first 40 bytes")
        header = grh if isinstance(grh, GRH) else GRH.from_bytes(grh)
        ffi.buffer(raw_grh)[:] = header.to_bytes()[:GRH_BYTES]
    # -1 comes with an errno from some of its steps, and with a stale one from others.
    ffi.errno = 0
    if lib.ibv_init_ah_from_wc(context._handle, port_num, raw_wc, raw_grh, raw):
        sent_to = f"the GID that the datagram was sent to, {header.dgid}" if wc.wc_flags & WCFlags.GRH else "the sender"
        raise os_error("ibv_init_ah_from_wc", ffi.errno, f"{sent_to}, is no GID of {context.name} port {port_num}")
    return read_ah_attr(raw)


def _busy(used: int) -> BusyError:
    return BusyError(
        f"the AH is used by {used} request(s) in flight: wait for their completions, or close their QP, before closing"
        " the AH"
    )


class _DestroyAH:
    """Destroys the handle; holds no reference to the AH, so that it can be a finaliser's."""

    __slots__ = ("holders",)

    def __init__(self, holders: set[int]) -> None:
        self.holders = holders

    def __call__(self, handle: CData) -> None:
        # Asked again now that the handle counts as closed: a thread that posts enters itself first, and then looks.
        if self.holders:
            raise _busy(len(self.holders))
        check_rc("ibv_destroy_ah", lib.ibv_destroy_ah(handle))

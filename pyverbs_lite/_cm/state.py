"""What an ``rdma_cm_id`` is bound to, its options, and the attributes of its QP."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address
from typing import TYPE_CHECKING

from .._base.args import check_int
from .._base.check import require
from .._base.resource import Resource
from .._memory.buffer import as_bytes_view
from .._objects.attr_c import read_qp_attr
from .._objects.device_attr import known
from .._objects.qp_features import ECE
from ..attr import QPAttr
from ..cm_context import CMContext, borrow_context
from ..enums import MTU, AccessFlags, EventType, QPState, QPType
from ..enums.cm import IBOption, IDOption, OptionLevel, PortSpace
from ..errors import StateError
from ..ffi import ffi, lib
from ..gid import parse_gid
from ..qp_fsm import mask_of
from . import calls
from .sockaddr import Address, from_sockaddr

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ..cm_channel import Place

__all__ = ["CMState"]

#: Option -> the C type of its value, and the most that it may be.
_OPTIONS: dict[IDOption, tuple[str, int]] = {
    IDOption.TOS: ("uint8_t", 255),
    IDOption.REUSEADDR: ("int", 1),
    IDOption.AFONLY: ("int", 1),
    IDOption.ACK_TIMEOUT: ("uint8_t", 31),
}


class CMState(Resource):
    """The part of a ``CMID`` that can be asked and set."""

    ps: PortSpace
    qp_type: QPType
    _place: Place

    @property
    def local_address(self) -> Address | None:
        """The local socket address, as the ``socket`` module has it; None where it is not an IP address.

        Verb: rdma_get_local_addr
        """
        return from_sockaddr(lib.rdma_get_local_addr(self._handle))

    @property
    def peer_address(self) -> Address | None:
        """The peer's socket address; None where there is none yet.

        Verb: rdma_get_peer_addr
        """
        return from_sockaddr(lib.rdma_get_peer_addr(self._handle))

    @property
    def src_port(self) -> int:
        """The local port; 0 before it is bound.

        Verb: rdma_get_src_port
        """
        return socket.ntohs(lib.rdma_get_src_port(self._handle))

    @property
    def dst_port(self) -> int:
        """The peer's port.

        Verb: rdma_get_dst_port
        """
        return socket.ntohs(lib.rdma_get_dst_port(self._handle))

    @property
    def context(self) -> CMContext:
        """The device that it is bound to: make the PD and the CQs of its QP from this.

        Raises:
            StateError: it is not bound to a device yet: resolve an address, or bind to one of a device.
        """
        self._require_device("context")
        return borrow_context(self._handle.verbs)

    def _require_device(self, what: str) -> None:
        if not self._handle.verbs:
            raise StateError(
                f"{what}: this CMID is not bound to a device: call resolve_addr, or bind_addr with a device's address"
            )

    @property
    def port_num(self) -> int:
        """The port of the device, from 1; 0 before it is bound to one."""
        return int(self._handle.port_num)

    @property
    def sgid(self) -> IPv6Address:
        """The local GID, all zero before it is bound to a device and on iWARP."""
        return parse_gid(bytes(self._handle.route.addr.addr.ibaddr.sgid.raw))

    @property
    def dgid(self) -> IPv6Address:
        """The peer's GID, all zero before the address is resolved and on iWARP."""
        return parse_gid(bytes(self._handle.route.addr.addr.ibaddr.dgid.raw))

    @property
    def pkey(self) -> int:
        """The P_Key as a host integer."""
        return socket.ntohs(self._handle.route.addr.addr.ibaddr.pkey)

    @property
    def path_mtu(self) -> MTU | None:
        """The MTU of the resolved path; None where there is no path: before ``resolve_route``, and on iWARP.

        RoCE paths have the MTU of the network interface, so the port's may be less.
        """
        route = self._handle.route
        return known(MTU, route.path_rec[0].mtu) if route.num_paths else None

    # ------------------------------------------------------------ options

    def set_option(self, option: IDOption | IBOption, value: int | Buffer) -> None:
        """Set an option.

        Args:
            option: ``TOS``, 8 bits for the IP header; ``REUSEADDR`` and ``AFONLY`` (IPv6 only), 0 or 1, before it is
                bound; ``ACK_TIMEOUT``, the 5-bit code of the QP's timeout; ``IBOption.PATH``, path records as bytes.

        Raises:
            TypeError, ValueError: no such option, or not a value of it.
            VerbsOSError: it is too late, or this kernel does not have it.

        Verb: rdma_set_option
        """
        if isinstance(option, IDOption) and option in _OPTIONS:
            kind, most = _OPTIONS[option]
            raw, level = ffi.new(f"{kind} *", check_int(option.name, value, 0, most)), OptionLevel.ID
            length = ffi.sizeof(kind)
        elif isinstance(option, IBOption):
            data = bytes(as_bytes_view(value, what=option.name))  # type: ignore[arg-type]
            raw, level, length = ffi.new("char[]", data), OptionLevel.IB, len(data)
        else:
            raise TypeError(f"option must be an IDOption or an IBOption, not {option!r}")
        with self._place.lock:
            rc = lib.rdma_set_option(self._handle, level, option, ffi.cast("void *", raw), length)
            calls.check("rdma_set_option", rc, hint=f"{option.name} = {value!r} was refused, or comes too late")

    def notify(self, event: EventType = EventType.COMM_EST) -> None:
        """Tell the connection manager of an event of the QP: a message came before the connection was confirmed.

        Verb: rdma_notify
        """
        with self._place.lock:
            calls.check("rdma_notify", lib.rdma_notify(self._handle, EventType(event)))

    # ------------------------------------------------------------ a QP that librdmacm does not move

    def init_qp_attr(self, qp_state: QPState) -> QPAttr:
        """Return what a QP has to be given to reach a state on this connection, for ``QP.modify``.

        On iWARP the kernel connects the QP by itself, and there is nothing to be given beyond INIT.

        Raises:
            VerbsOSError: the connection is not that far.

        Verb: rdma_init_qp_attr
        """
        raw, mask = ffi.new("struct ibv_qp_attr *"), ffi.new("int *")
        raw.qp_state = QPState(qp_state)
        with self._place.lock:
            calls.check("rdma_init_qp_attr", lib.rdma_init_qp_attr(self._handle, raw, mask))
        raw.qp_access_flags &= sum(AccessFlags)  # the kernel may know more than this build of libibverbs
        attr = read_qp_attr(raw)
        given = {name: value for name, value in attr.given().items() if mask_of({name: value}) & mask[0]}
        return QPAttr(**given)  # type: ignore[arg-type]

    def set_local_ece(self, ece: ECE) -> None:
        """Offer options of the device's vendor to the peer; before ``connect`` or ``accept``.

        Verb: rdma_set_local_ece
        """
        require("ECE", "rdma_set_local_ece")
        raw = ffi.new("struct ibv_ece *")
        raw.vendor_id = check_int("vendor_id", ece.vendor_id, 0, (1 << 32) - 1)
        raw.options = check_int("options", ece.options, 0, (1 << 32) - 1)
        with self._place.lock:
            calls.check("rdma_set_local_ece", lib.rdma_set_local_ece(self._handle, raw))

    def get_remote_ece(self) -> ECE:
        """Return the options that the peer offered; all zero if it offered none.

        Verb: rdma_get_remote_ece
        """
        require("ECE", "rdma_get_remote_ece")
        raw = ffi.new("struct ibv_ece *")
        with self._place.lock:
            calls.check("rdma_get_remote_ece", lib.rdma_get_remote_ece(self._handle, raw))
        return ECE(raw.vendor_id, raw.options, raw.comp_mask)

"""What some QPs or some devices can do beyond their states and queues."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, cast

from .._base.args import check_int
from .._base.check import check_rc, require
from ..enums import DataInOrderCaps, DataInOrderFlags, QPType, WROpcode
from ..ffi import ffi, lib
from ..grh import GRH_BYTES
from .transitions import Transitions

if TYPE_CHECKING:
    from ..mcast import Multicast

__all__ = ["ECE", "Features"]

_U16, _U32 = (1 << 16) - 1, (1 << 32) - 1
_NO_FLAGS = DataInOrderFlags(0)


@dataclass(frozen=True, slots=True)
class ECE:
    """Options of a vendor that both sides of a connection have to agree on (``struct ibv_ece``).

    Attributes:
        vendor_id: whose options they are: 24 bits, an IEEE number.
        options: 32 bits, of the vendor's own meaning.
        comp_mask: reserved, 0.
    """

    vendor_id: int
    options: int
    comp_mask: int = 0


class Features(Transitions):
    """The part of a QP that is not its life and not its queues; see ``QP``."""

    @property
    def grh_room(self) -> int:
        """How many bytes of every receive come in front of the payload: 40 on a UD QP, else 0.

        They are there whether the datagram had a header or not, and ``WC.byte_len`` counts them; ``split_grh`` takes
        the two apart.
        """
        return GRH_BYTES if self.qp_type == QPType.UD else 0

    def attach_mcast(self, gid: str | bytes | IPv4Address | IPv6Address, lid: int = 0) -> Multicast:
        """Receive what is sent to a multicast group, too, until the object returned is closed; UD only.

        Args:
            gid: the group's; ``multicast_gid`` makes it of an IP address.
            lid: the group's, on InfiniBand.

        Raises:
            ValueError: the QP is not UD, or the GID is no multicast GID.
            StateError: the QP is in the group already.
            VerbsOSError: the verb refused.

        Verb: ibv_attach_mcast
        """
        return cast("Multicast", self._make("Multicast", gid, lid))

    def query_ece(self) -> ECE:
        """Return the options that the device offers, for the peer; on RTS those that are in use.

        Raises:
            UnsupportedError: the device has none.

        Verb: ibv_query_ece
        """
        require("ECE", "ibv_query_ece")
        raw = ffi.new("struct ibv_ece *")
        with self._lock:
            check_rc("ibv_query_ece", lib.ibv_query_ece(self._handle, raw))
        return ECE(raw.vendor_id, raw.options, raw.comp_mask)

    def set_ece(self, ece: ECE) -> None:
        """Take the options that the peer asked for; before the QP goes to RTR.

        Raises:
            UnsupportedError: the device has none, or they are another vendor's.

        Verb: ibv_set_ece
        """
        require("ECE", "ibv_set_ece")
        raw = ffi.new("struct ibv_ece *")
        for name in ECE.__slots__:
            setattr(raw, name, check_int(name, getattr(ece, name), 0, _U32))
        with self._lock:
            check_rc("ibv_set_ece", lib.ibv_set_ece(self._handle, raw))

    def modify_rate_limit(self, rate_limit: int, *, max_burst_sz: int = 0, typical_pkt_sz: int = 0) -> None:
        """Limit the rate of sending; the QP must be in RTS.

        Args:
            rate_limit: kilobits per second; 0 is no limit.
            max_burst_sz: bytes that may go at once; 0 leaves it to the device.
            typical_pkt_sz: bytes of a packet, as a hint; 0 gives none.

        Raises:
            UnsupportedError: the device cannot.

        Verb: ibv_modify_qp_rate_limit
        """
        raw = ffi.new("struct ibv_qp_rate_limit_attr *")
        raw.rate_limit = check_int("rate_limit", rate_limit, 0, _U32)
        raw.max_burst_sz = check_int("max_burst_sz", max_burst_sz, 0, _U32)
        raw.typical_pkt_sz = check_int("typical_pkt_sz", typical_pkt_sz, 0, _U16)
        with self._lock:
            check_rc("ibv_modify_qp_rate_limit", lib.ibv_modify_qp_rate_limit(self._handle, raw))

    def query_data_in_order(self, opcode: WROpcode, flags: DataInOrderFlags = _NO_FLAGS) -> bool | DataInOrderCaps:
        """Ask whether the bytes of an operation arrive in memory from first to last, so that one may poll the last.

        Args:
            opcode: the operation, as seen from the side that posts it.
            flags: with ``RETURN_CAPS`` the answer is a ``DataInOrderCaps``, and otherwise a bool.

        Raises:
            UnsupportedError: this libibverbs cannot tell.

        Verb: ibv_query_qp_data_in_order
        """
        require("DATA_IN_ORDER", "ibv_query_qp_data_in_order")
        flags = DataInOrderFlags(flags)
        with self._lock:
            answer = lib.ibv_query_qp_data_in_order(self._handle, WROpcode(opcode), int(flags))
        caps = lib.PVL_HAS_DATA_IN_ORDER_CAPS > 0 and flags & DataInOrderFlags.RETURN_CAPS
        return DataInOrderCaps(answer) if caps else bool(answer)

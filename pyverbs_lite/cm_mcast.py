"""Multicast groups joined through librdmacm."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from ._base.resource import Resource
from ._cm import calls
from ._cm.sockaddr import Address, to_sockaddr
from .cm_channel import Place, groups, serials
from .cm_events import CMEvent, UDParam
from .enums.cm import JoinMCAttrMask, MCJoinFlags
from .errors import StateError, VerbsOSError
from .ffi import CData, ffi, lib

if TYPE_CHECKING:
    from .cmid import CMID

__all__ = ["CMGroup"]


class CMGroup(Resource):
    """A ``CMID``'s place in a multicast group; closing it leaves the group. Made by ``CMID.join_multicast``.

    Attributes:
        id: the ``CMID``.
        address: the group's address.
        ud: where datagrams to the group go, once ``MULTICAST_JOIN`` has come: ``ah_attr`` for ``PD.create_ah``, and
            ``qp_num`` and ``qkey`` for ``SendWR``.

    Verb: rdma_join_multicast_ex, rdma_leave_multicast
    """

    _closes_early = True

    def __init__(self, owner: CMID, address: Address, join_flags: MCJoinFlags = MCJoinFlags.FULLMEMBER) -> None:
        raw = to_sockaddr(address, "the group's address")
        attr = ffi.new("struct rdma_cm_join_mc_attr_ex *")
        attr.comp_mask = JoinMCAttrMask.ADDRESS | JoinMCAttrMask.JOIN_FLAGS
        attr.join_flags = MCJoinFlags(join_flags)
        attr.addr = ffi.cast("struct sockaddr *", raw)
        serial = next(serials)
        self.id = owner
        self.address = address
        self.ud: UDParam | None = None
        with owner._place.lock:
            handle = owner._handle
            owner._require_device("join_multicast")
            for other in owner._children:
                if isinstance(other, CMGroup) and other.address[0] == address[0] and not other.closed:
                    raise StateError(f"it is in the group {address[0]} already")
            groups[serial] = self  # before the event can come
            rc = lib.rdma_join_multicast_ex(handle, attr, ffi.cast("void *", serial))
            calls.check("rdma_join_multicast_ex", rc, address)
            parents: tuple[Resource, ...] = (owner,)
            if owner.qp is not None and not owner.qp.closed:
                parents += (owner.qp,)  # which cannot be destroyed while it is attached
            self._own(raw, _Leave(handle, owner._place), *parents, label=f"CMGroup {address[0]}")

    def __repr__(self) -> str:
        return f"<CMGroup {self.address[0]}{' (left)' if self.closed else ''}>"

    def _notice(self, event: CMEvent) -> None:
        self.ud = event.ud


class _Leave:
    __slots__ = ("id", "place")

    def __init__(self, handle: CData, place: Place) -> None:
        self.id = handle
        self.place = place

    def __call__(self, address: CData) -> None:
        with self.place.lock:
            rc = lib.rdma_leave_multicast(self.id, ffi.cast("struct sockaddr *", address))
            try:
                calls.check("rdma_leave_multicast", rc)
            except VerbsOSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # it never was in the group
                    raise

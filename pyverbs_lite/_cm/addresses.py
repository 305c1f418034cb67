"""From an address to a device and a path: the first steps of a connection."""

from __future__ import annotations

from .._base.args import Deadline
from ..cm_events import CMEvent
from ..enums.cm import CMEventType
from ..ffi import ffi, lib
from . import calls
from .sockaddr import Address, to_sockaddr
from .waits import CMWaits

__all__ = ["CMAddresses"]

_E = CMEventType


class CMAddresses(CMWaits):
    """The part of a ``CMID`` that resolves."""

    def bind_addr(self, address: Address) -> None:
        """Bind to a local IP address, and so to its device; ``("", port)`` and ``("::", port)`` are all addresses.

        Args:
            address: as the ``socket`` module has it, with the scope of a link-local one; port 0 takes a free one.

        Raises:
            VerbsOSError: no RDMA device has the address, or the port is taken.

        Verb: rdma_bind_addr
        """
        raw = to_sockaddr(address)
        with self._place.lock:
            rc = lib.rdma_bind_addr(self._handle, ffi.cast("struct sockaddr *", raw))
            calls.check("rdma_bind_addr", rc, address)

    def resolve_addr(
        self, dst: Address, *, src: Address | None = None, timeout: float | Deadline | None = 10.0
    ) -> CMEvent | None:
        """Find the device that reaches an address, and the address of the neighbour that does.

        Args:
            dst: an IP address and port.
            src: the local address to use, where it is not bound to one.

        Raises:
            CMAddressError: no RDMA device reaches it, or nobody answers for it.
            HandshakeTimeout: not done in time.

        Verb: rdma_resolve_addr
        """
        limit = calls.deadline(timeout)
        raw = to_sockaddr(dst, "dst")
        raw_src = ffi.NULL if src is None else to_sockaddr(src, "src")
        with self._place.lock:
            rc = lib.rdma_resolve_addr(
                self._handle,
                ffi.cast("struct sockaddr *", raw_src),
                ffi.cast("struct sockaddr *", raw),
                calls.milliseconds(limit, self._sync),
            )
            calls.check("rdma_resolve_addr", rc, dst)
        return self._done(limit, "rdma_resolve_addr", _E.ADDR_RESOLVED)

    def resolve_route(self, *, timeout: float | Deadline | None = 10.0) -> CMEvent | None:
        """Find the path to the address that was resolved.

        Raises:
            CMRouteError: there is none.
            HandshakeTimeout: not done in time.

        Verb: rdma_resolve_route
        """
        limit = calls.deadline(timeout)
        with self._place.lock:
            self._require_device("resolve_route")
            rc = lib.rdma_resolve_route(self._handle, calls.milliseconds(limit, self._sync))
            calls.check("rdma_resolve_route", rc)
        return self._done(limit, "rdma_resolve_route", _E.ROUTE_RESOLVED)

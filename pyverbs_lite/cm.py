"""Connections through librdmacm: the ``Connection`` over it, and the objects of its C flow.

``cm.connect`` and ``cm.listen`` are ``pyverbs_lite.connect`` and ``listen`` without a TCP socket, and over iWARP too.
``CMID`` is for those who want each step.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import cast

from typing_extensions import Unpack

from ._base.args import Deadline, check_int
from ._cm.establish import establish_connecting
from ._cm.sockaddr import Address
from ._connection.dial import Attempt, Dial
from ._connection.link import Link
from ._connection.settings import ConnectOptions, Settings, spelled
from .cm_addrinfo import AddrInfo, getaddrinfo
from .cm_channel import EventChannel
from .cm_context import CMContext
from .cm_events import CMEvent, ConnParam, UDParam
from .cm_listener import Listener, listening
from .cm_mcast import CMGroup
from .cm_qp import CMQP
from .cmid import CMID
from .connection import Connection
from .enums.cm import AddrInfoFlags, CMEventType, IBOption, IDOption, MCJoinFlags, PortSpace
from .errors import HandshakeTimeout, VerbsError

__all__ = [
    "CMID",
    "CMQP",
    "AddrInfo",
    "AddrInfoFlags",
    "CMContext",
    "CMEvent",
    "CMEventType",
    "CMGroup",
    "ConnParam",
    "EventChannel",
    "IBOption",
    "IDOption",
    "Listener",
    "MCJoinFlags",
    "PortSpace",
    "UDParam",
    "connect",
    "getaddrinfo",
    "listen",
]


@spelled
def connect(host: str, port: int, **options: Unpack[ConnectOptions]) -> Connection:
    """Connect to a ``cm.listen`` listener, and return a connection in RTS.

    Args:
        host, port: an IP address of the peer's RDMA device, or a name of it, and the port it listens on.
        device: an open ``Context`` to share, or a name; librdmacm finds the device by the address, and another is an
            error, as is another ``port_num``, ``gid_index`` or ``gid_netdev``.
        gid_ip: the local IP address to connect from.
        buffers: name -> buffer: registered before the connection is made, so the peer has them from the start.
        timeout: seconds for all of it.
        authkey, reconnect: as for ``pyverbs_lite.connect``. Its ``ssl_context`` needs a TCP connection, and is refused.
        keep_alive: seconds until a peer's adapter that does not answer ends the connection, with what the QP's own
            retries take on top; by default nobody asks.
        The others tune the connection: see ``Options``. The path is the connection manager's, changed by ``sl``,
        ``hop_limit`` and ``traffic_class`` where they are given.

    Raises:
        CMAddressError, CMRouteError: no RDMA device reaches the address.
        CMRejectedError: nobody listens there.
        CMUnreachableError: the peer's host does not answer.
        HandshakeTimeout: not done in time.
        AuthenticationError: the peer has another key, or only one side has one.
        HandshakeError: the peer refused, closed, or spoke another protocol.
        DeviceNotFoundError, GIDError: what was asked for is not what the address leads to.
        OSError: the name is unknown, or a verb was refused.
    """
    return Connection._dialled(dial(host, port, options))


def dial(host: str, port: int, options: ConnectOptions) -> Dial:
    """Judge the arguments of ``connect``, and return how to do it."""
    return Dial(_once, host, port, _settings(options))


def _once(dial: Dial, attempt: Attempt | None, deadline: Deadline) -> Link:
    settings = dial.settings
    return establish_connecting(_resolve(dial.host, dial.port, settings, deadline), settings, deadline)


@spelled
def listen(host: str, port: int, *, backlog: int = 128, **options: Unpack[ConnectOptions]) -> Listener:
    """Listen through librdmacm for peers that call ``cm.connect``.

    Args:
        host: the address to bind, one of an RDMA device; ``""`` is every address of every device, IPv4 and IPv6.
        port: of the TCP port space of RDMA, which the TCP sockets of the host do not share (iWARP's do); 0 takes a free
            one, see ``Listener.port``.
        timeout: seconds for one peer's handshake.
        buffers: name -> buffer: every peer has them from the start.
        backlog: how many may be waiting for ``accept``.

    The others are those of ``connect``.

    Raises:
        VerbsOSError: no RDMA device has the address, or the port is taken.
        OSError: the name is unknown.
        TypeError, ValueError, BufferError: an option or a buffer is not what it must be.
    """
    settings = _settings(options)
    if not isinstance(host, str):
        raise TypeError(f"host must be a name or an IP address as text, not {host!r}")
    check_int("port", port, 0, 65535)
    check_int("backlog", backlog, 0, (1 << 31) - 1)
    settings.check_accepting()
    channel = EventChannel()
    try:
        return Listener(channel, listening(channel, host, port, backlog), settings)
    except BaseException:
        channel.close()
        raise


def _settings(options: ConnectOptions) -> Settings:
    settings = Settings.of(options)
    if settings.ssl_context is not None:
        raise ValueError(
            "ssl_context protects a TCP socket, and a connection through librdmacm has none: use authkey=, or"
            " pyverbs_lite.connect and listen"
        )
    # Only where it is asked for: what costs nothing over TCP takes a thread and a request here.
    return settings if "keep_alive" in options else replace(settings, keep_alive=None)


def _resolve(host: str, port: int, settings: Settings, deadline: Deadline) -> CMID:
    """Resolve address and route; every address of a name is tried, and their scope ids are kept."""
    if not isinstance(host, str) or not host:
        raise TypeError(f"host must be a name or an IP address as text, not {host!r}")
    check_int("port", port, 1, 65535)
    source: Address | None = None if settings.gid_ip is None else (settings.gid_ip, 0)
    failure: VerbsError | None = None
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        cmid = CMID()
        try:
            if settings.options.traffic_class:
                cmid.set_option(IDOption.TOS, settings.options.traffic_class)
            cmid.resolve_addr(cast("Address", address), src=source, timeout=deadline)
            cmid.resolve_route(timeout=deadline)
        except HandshakeTimeout:
            cmid.close()
            raise
        except VerbsError as error:
            cmid.close()
            failure = failure or error
        except BaseException:
            cmid.close()
            raise
        else:
            return cmid
    assert failure is not None  # getaddrinfo returns at least one address, or raises
    raise failure

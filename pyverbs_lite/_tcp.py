"""TCP sockets by name and port: connecting, listening, and addresses as text."""

from __future__ import annotations

import socket

from ._args import Deadline, check_int
from .errors import HandshakeTimeout

__all__ = ["address_text", "bind_tcp", "connect_tcp", "set_keep_alive"]


def address_text(address: tuple[object, ...]) -> str:
    """Return the IP address of a socket address, with the scope that a link-local one needs."""
    text, scope = str(address[0]), address[3] if len(address) == 4 else 0
    if not isinstance(scope, int) or not scope or "%" in text:
        return text
    try:
        return f"{text}%{socket.if_indextoname(scope)}"
    except OSError:  # the interface is gone meanwhile
        return f"{text}%{scope}"


def set_keep_alive(sock: socket.socket, seconds: float) -> None:
    """Let the kernel give up a peer whose host has not answered for so long.

    The hosts' kernels do this among themselves: a process that is busy, or stopped, is not taken for gone.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The questions begin at half time, and then come often enough for one more to be due soon after the time is up.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 10)))
    # How long counts for them too, rather than how many; and for what was sent and is not acknowledged.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(seconds * 1000)))


def connect_tcp(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Open a TCP connection; every address of the name is tried, and their scope ids are kept.

    Raises:
        TypeError, ValueError: not a host name, or not a port.
        HandshakeTimeout: nobody answered in time.
        OSError: the name is unknown, or every address refused.
    """
    if not isinstance(host, str) or not host:
        raise TypeError(f"host must be a name or an IP address as text, not {host!r}")
    check_int("port", port, 1, 65535)
    refusal: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(None if deadline.seconds is None else max(deadline.left, 1e-3))
            sock.connect(address)
        except OSError as error:
            sock.close()
            if deadline.expired:
                raise HandshakeTimeout(f"no TCP answer from {host} port {port} within {deadline.seconds} s") from error
            refusal = refusal or error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    assert refusal is not None  # getaddrinfo returns at least one address, or raises
    # OSError picks the subclass from the number: ConnectionRefusedError and so on.
    raise OSError(refusal.errno, f"cannot connect to {host} port {port}: {refusal.strerror or refusal}") from refusal


def bind_tcp(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on an address; ``""`` is every address of both families.

    Raises:
        TypeError, ValueError: not a host name, or not a port.
        OSError: the address cannot be bound.
    """
    if not isinstance(host, str):
        raise TypeError(f"host must be a name or an IP address as text, not {host!r}")
    check_int("port", port, 0, 65535)
    check_int("backlog", backlog, 0, (1 << 31) - 1)
    if not host:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Not create_server(), which drops the scope of a link-local address.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    return sock

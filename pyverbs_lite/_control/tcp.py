"""TCP sockets by name and port: connecting, listening, and addresses as text."""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import Any

from .._base.args import Deadline, check_int
from ..errors import HandshakeTimeout
from ..ffi import lib

__all__ = ["address_text", "await_fd", "bind_tcp", "connect_tcp", "own_address", "tune"]

#: Addresses that stand for all that there are.
_EVERY = ("0.0.0.0", "::", "::ffff:0.0.0.0")
_ON_ITS_WAY = (errno.EINPROGRESS, errno.EALREADY)
#: One wait for an answer, in seconds.
_SLICE = 1.0


def address_text(address: tuple[object, ...]) -> str:
    """Return the IP address of a socket address, with the scope that a link-local one needs."""
    text, scope = str(address[0]), address[3] if len(address) == 4 else 0
    if not isinstance(scope, int) or not scope or "%" in text:
        return text
    try:
        return f"{text}%{socket.if_indextoname(scope)}"
    except OSError:  # the interface is gone meanwhile
        return f"{text}%{scope}"


def own_address(listening: socket.socket) -> str:
    """Return the address of those that a socket accepts, or ``""`` where it listens on several."""
    address = address_text(listening.getsockname())
    return "" if address in _EVERY else address


def tune(sock: socket.socket, keep_alive: float | None) -> None:
    """Set what a control connection needs; what a listening socket accepts has the same.

    Args:
        keep_alive: let the kernel give up a peer whose host has not answered for so many seconds; 0 or None for never.
            The hosts' kernels do this among themselves: a process that is busy, or stopped, is not taken for gone.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not keep_alive:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The questions begin at half time, and then come often enough for one more to be due soon after the time is up.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(keep_alive / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(keep_alive / 10)))
    # How long counts for them too, rather than how many; and for what was sent and is not acknowledged.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(keep_alive * 1000)))


def connect_tcp(host: str, port: int, deadline: Deadline) -> tuple[socket.socket, tuple[Any, ...]]:
    """Open a TCP connection; every address of the name is tried, and their scope ids are kept.

    Returns:
        The socket, which never blocks, and the address that it is connected to.

    Raises:
        TypeError, ValueError: not a host name, or not a port.
        HandshakeTimeout: nobody answered in time.
        OSError: the name is unknown, or every address refused.
    """
    if not isinstance(host, str) or not host:
        raise TypeError(f"host must be a name or an IP address as text, not {host!r}")
    check_int("port", port, 1, 65535)
    refusal: OSError | None = None
    for family, address in _addresses(host, port):
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            _connect(sock, address, deadline)
        except OSError as error:
            sock.close()
            if deadline.expired:
                raise HandshakeTimeout(f"no TCP answer from {host} port {port} within {deadline.seconds} s") from error
            refusal = refusal or error
        except BaseException:
            sock.close()
            raise
        else:
            return sock, address
    assert refusal is not None  # getaddrinfo returns at least one address, or raises
    # OSError picks the subclass from the number: ConnectionRefusedError and so on.
    raise OSError(refusal.errno, f"cannot connect to {host} port {port}: {refusal.strerror or refusal}") from refusal


def await_fd(fd: int, events: int, seconds: float) -> bool:
    """Wait until a descriptor is ready for something, of ``select.POLLIN`` and such, or has failed; say whether it is.

    A signal ends it as well, so that whoever waits looks how much time is left.

    Raises:
        OSError: the descriptor cannot be waited for.
    """
    if (n := lib.pvl_await_fd(fd, events, int(seconds * 1e9))) < 0:
        raise OSError(-n, os.strerror(-n))
    return n > 0


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return the addresses of a name, each with its family."""
    try:
        socket.inet_pton(socket.AF_INET, host)
    except (OSError, ValueError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]
    return [(socket.AF_INET, (host, port))]  # a number, of which nobody need be asked


def _connect(sock: socket.socket, address: tuple[Any, ...], deadline: Deadline) -> None:
    code = sock.connect_ex(address)
    if code in _ON_ITS_WAY:
        code = sock.connect_ex(address)  # of this host's own listeners the answer is there by now
    while code in _ON_ITS_WAY:
        if await_fd(sock.fileno(), select.POLLOUT, deadline.at_most(_SLICE)):
            code = sock.connect_ex(address)
        elif deadline.expired:
            code = errno.ETIMEDOUT
    if code:
        raise OSError(code, os.strerror(code))


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

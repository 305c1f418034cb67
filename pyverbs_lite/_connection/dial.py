"""Connecting, once or until it works, in a way that another thread can put an end to, and that can be gone again."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .._base.args import Deadline, LateDeadline
from .._control.control import Control
from .._control.tcp import connect_tcp
from .._memory.buffer import Memory
from ..enums import AccessFlags
from ..errors import (
    ClosedError,
    CMAddressError,
    CMRejectedError,
    CMRouteError,
    CMUnreachableError,
    HandshakeError,
    HandshakeTimeout,
    PeerClosedError,
)
from ..wire import RefuseCode
from .establish import establish
from .link import Link
from .settings import Settings

__all__ = ["Attempt", "Dial", "over_tcp", "passes"]

#: What the peer's host, or the way to it, may have got over by the next attempt.
_ERRNOS = {
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EPIPE,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EADDRNOTAVAIL,
}
_NOT_THERE = (HandshakeTimeout, PeerClosedError, CMAddressError, CMRejectedError, CMRouteError, CMUnreachableError)
_LATER = (RefuseCode.BUSY, RefuseCode.RESOURCES, RefuseCode.TIMEOUT)


def passes(error: BaseException) -> bool:
    """Say whether the same attempt may go well later: nobody is there yet, or there is no room."""
    if isinstance(error, HandshakeError):
        return error.code in _LATER if error.code is not None else isinstance(error, _NOT_THERE)
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    return isinstance(error, ConnectionError | TimeoutError) or (type(error) is OSError and error.errno in _ERRNOS)


class Attempt:
    """One call of ``connect`` on its way; any thread may put an end to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: Control | None = None
        self._deadline: Deadline | None = None
        self._aborted = threading.Event()

    def began(self, control: Control) -> None:
        """Take note of the control connection in the making."""
        with self._lock:
            self._control = control
            aborted = self._aborted.is_set()
        if aborted:
            control.close()

    def limited(self, deadline: Deadline) -> Deadline:
        """Return the deadline of what is about to be done, which ends if an end is put to this."""
        with self._lock:
            self._deadline = deadline
        if self._aborted.is_set():
            deadline.end()
        return deadline

    def pause(self, seconds: float) -> None:
        """Sleep.

        Raises:
            ClosedError: it was put an end to.
        """
        if self._aborted.wait(seconds):
            raise ClosedError("connect was given up")

    def abort(self) -> None:
        """Put an end to it."""
        with self._lock:
            self._aborted.set()
            control, deadline = self._control, self._deadline
        if deadline is not None:
            deadline.end()
        if control is not None:
            control.close()


@dataclass(frozen=True, slots=True)
class Dial:
    """Whom to connect to, and how.

    Attributes:
        once: makes one attempt.
    """

    once: Callable[[Dial, Attempt | None, Deadline], Link]
    host: str
    port: int
    settings: Settings

    def again(self, buffers: Mapping[str, Memory], access: Mapping[str, AccessFlags], timeout: float | None) -> Dial:
        """Return the same with these buffers, and another ``timeout`` if there is one."""
        old = self.settings
        timeout = old.timeout if timeout is None else timeout
        return replace(self, settings=replace(old, buffers=buffers, access=access, timeout=timeout))

    def link(self, attempt: Attempt | None = None) -> Link:
        """Connect; with ``reconnect=`` until it works, or its time is over.

        Args:
            attempt: where another thread may put an end to it.

        Raises:
            HandshakeTimeout: its time is over; the cause is what the last attempt met.
            ClosedError: the attempt was put an end to.
            As one attempt, for what will not pass.
        """
        backoff, settings = self.settings.reconnect, self.settings
        if backoff is None:
            deadline = LateDeadline(settings.timeout)
            return self.once(self, attempt, deadline if attempt is None else attempt.limited(deadline))
        attempt, total = attempt or Attempt(), Deadline(backoff.total)
        for number, pause in enumerate(backoff.pauses(), 1):
            try:
                return self.once(self, attempt, attempt.limited(total.sooner(settings.timeout)))
            except OSError as error:
                if not passes(error):
                    raise
                if total.left <= pause:
                    raise HandshakeTimeout(
                        f"{self.host} port {self.port} could not be connected to within {backoff.total} s"
                        f" ({number} attempts); the last: {error}"
                    ) from error
            attempt.pause(pause)
        raise AssertionError("the pauses have no end")


def over_tcp(dial: Dial, attempt: Attempt | None, deadline: Deadline) -> Link:
    """Make one attempt over TCP."""
    sock, address = connect_tcp(dial.host, dial.port, deadline)
    control = Control.of(sock, dial.settings, dial.host, address=address)
    if attempt is not None:
        attempt.began(control)
    return establish(control, dial.settings, deadline, accepting=False, alone=attempt is None)

"""From a connected TCP socket to a QP in RTS on both sides.

The order is the same on both sides: create QP → INIT → post receives → swap records → RTR → RTS → swap "ready". So
the first message never meets an empty receive queue. The side that accepted reads the other's record before it
makes anything, so a stranger costs it nothing, and it can pick a GID of the same kind.
"""

from __future__ import annotations

from contextlib import suppress

from ._args import Deadline
from ._control import Control, Peer
from ._control_base import ControlBase
from ._link import Link
from ._settings import Settings
from .errors import (
    DeviceNotFoundError,
    GIDError,
    HandshakeError,
    HandshakeTimeout,
    PeerClosedError,
    PeerProtocolError,
    RouteError,
    StateError,
)
from .wire import HelloReceived, ReadyReceived, RefuseCode

__all__ = ["LAST_WORD", "establish", "reason_for", "tell_why"]

#: How long a peer that is told why may take to read that, in seconds.
LAST_WORD = 0.3
_CODES: tuple[tuple[type[BaseException], RefuseCode], ...] = (
    (RouteError, RefuseCode.ROUTE),
    (HandshakeTimeout, RefuseCode.TIMEOUT),
    (PeerProtocolError, RefuseCode.PROTOCOL),
    (HandshakeError, RefuseCode.MISMATCH),
    (DeviceNotFoundError, RefuseCode.RESOURCES),
    (GIDError, RefuseCode.RESOURCES),
    (OSError, RefuseCode.RESOURCES),
)


def establish(control: Control, settings: Settings, deadline: Deadline, *, accepting: bool) -> Link:
    """Run the handshake; on any failure the peer is told why, and everything is closed again, ``control`` too.

    Raises:
        HandshakeError: or the subclass that says what the peer did, or did not do in time.
        As ``Link``, for what this side lacks.
    """
    channel, peer = control.channel, Peer(control)
    link: Link | None = None
    try:
        hello = control.expect(HelloReceived, deadline, peer.note) if accepting else None
        link = Link(settings, control, peer, hello.endpoint.gid if hello else None)
        if control.has(ReadyReceived):  # the order rules of the channel look at one direction only
            raise PeerProtocolError("the peer sent READY before it can know this side's record")
        channel.hello(link.endpoint)
        for name, buffer in settings.buffers.items():
            link.register(buffer, None, name, deadline)
        control.flush(deadline)
        hello = hello or control.expect(HelloReceived, deadline, peer.note)
        link.to_rts(hello.endpoint)
        channel.ready()
        control.flush(deadline)
        control.expect(ReadyReceived, deadline, peer.note)
        link.engine.watch_peer()
    except BaseException as error:
        with suppress(HandshakeError, StateError):
            tell_why(control, error)
        try:
            if link is not None:
                link.close()
        finally:
            # Only who speaks this protocol, and in time, is given time to hear why.
            told = channel.version is not None and isinstance(error, Exception)
            control.close(LAST_WORD if told and not isinstance(error, HandshakeTimeout) else 0.0)
        raise
    return link


def reason_for(error: BaseException) -> tuple[RefuseCode, str]:
    """Return the code and the text by which the peer is told of an error of this side's."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), RefuseCode.OTHER)
    return code, str(error) if isinstance(error, Exception) else "it was interrupted"


def tell_why(control: ControlBase, error: BaseException) -> None:
    """Let the peer's error say what went wrong here, if it is still there to hear it."""
    if isinstance(error, PeerClosedError):
        return
    if control.channel.error is None:  # else the channel has queued its own refusal
        control.channel.refuse(*reason_for(error))
    control.flush(Deadline(LAST_WORD))

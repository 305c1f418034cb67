"""From a connected TCP socket to a QP in RTS on both sides.

The order is the same on both sides: create QP → INIT → post receives → swap records → RTR → RTS → swap "ready". So
the first message never meets an empty receive queue. The side that accepted reads the other's record before it
makes anything, so a stranger costs it nothing, and it can pick a GID of the same kind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from ipaddress import IPv6Address
from typing import TypeAlias, TypeVar

from .._base.args import Deadline
from .._control.auth import Auth, Role, key_bytes
from .._control.base import ControlBase
from .._control.control import Control, Peer
from ..errors import (
    AuthenticationError,
    DeviceNotFoundError,
    GIDError,
    HandshakeError,
    HandshakeTimeout,
    PeerClosedError,
    PeerProtocolError,
    RouteError,
    StateError,
)
from ..wire import ChallengeReceived, Event, HelloReceived, ProofReceived, ReadyReceived, RefuseCode
from .link import Link
from .settings import Settings

__all__ = [
    "LAST_WORD",
    "Steps",
    "demand_key",
    "drive",
    "establish",
    "handshake",
    "reason_for",
    "swap_proofs",
    "tell_why",
]

_T = TypeVar("_T")

#: How long a peer that is told why may take to read that, in seconds.
LAST_WORD = 0.3
_CODES: tuple[tuple[type[BaseException], RefuseCode], ...] = (
    (RouteError, RefuseCode.ROUTE),
    (HandshakeTimeout, RefuseCode.TIMEOUT),
    (PeerProtocolError, RefuseCode.PROTOCOL),
    (AuthenticationError, RefuseCode.AUTHENTICATION),
    (HandshakeError, RefuseCode.MISMATCH),
    (DeviceNotFoundError, RefuseCode.RESOURCES),
    (GIDError, RefuseCode.RESOURCES),
    (OSError, RefuseCode.RESOURCES),
)


#: A conversation with the peer, step by step: it yields which event of the peer's it waits for, once what is queued was
#: handed to the carrier.
_Talk: TypeAlias = Generator[type[Event], Event, _T]
#: The handshake of one side; it returns the link.
Steps: TypeAlias = _Talk[Link]


def handshake(
    control: ControlBase,
    make_link: Callable[[IPv6Address | None], Link],
    settings: Settings,
    deadline: Deadline,
    *,
    accepting: bool,
) -> Steps:
    """Go through the handshake without waiting; whoever runs it sends what is queued, and waits as it likes.

    If it fails, or is closed before its end, the link is closed again.

    Args:
        make_link: makes the verbs objects; it is told the peer's GID, if that is known.
        settings: the key, and which buffers the peer is to have from the start.
        deadline: for what this side tells the peer in between.

    Raises:
        PeerProtocolError: the peer is ahead of what it can know.
        AuthenticationError: it does not know the key.
        As ``make_link``, ``Link.introduce`` and ``Link.to_rts``.
    """
    link: Link | None = None
    try:
        if demand_key(control, settings, accepting=accepting):
            yield from swap_proofs(control, accepting=accepting)
        hello = (yield HelloReceived) if accepting else None
        link = make_link(hello.endpoint.gid if isinstance(hello, HelloReceived) else None)
        if control.has(ReadyReceived):  # the order rules of the channel look at one direction only
            raise PeerProtocolError("the peer sent READY before it can know this side's record")
        link.introduce(settings, deadline)
        if hello is None:
            hello = yield HelloReceived
        # Who accepts, and names no buffers, is in RTS before it says a word: so the peer, which has to wait for both,
        # is woken once.
        assert isinstance(hello, HelloReceived)
        link.to_rts(hello.endpoint)
        control.channel.ready()
        yield ReadyReceived
        link.engine.watch_peer()
    except BaseException:
        if link is not None:
            link.close()
        raise
    return link


def establish(control: Control, settings: Settings, deadline: Deadline, *, accepting: bool, alone: bool) -> Link:
    """Run the handshake; on any failure the peer is told why, and everything is closed again, ``control`` too.

    Args:
        alone: whether no other thread knows ``control``. Then it has no lock until the end: to ask for one takes time.

    Raises:
        HandshakeError: or the subclass that says what the peer did, or did not do in time.
        As ``Link``, for what this side lacks.
    """
    if not alone:
        return _establish(control, settings, deadline, accepting)
    control.lock = nullcontext()
    link = _establish(control, settings, deadline, accepting)
    control.lock = threading.RLock()
    return link


def _establish(control: Control, settings: Settings, deadline: Deadline, accepting: bool) -> Link:
    peer = Peer(control)

    def make_link(remote_gid: IPv6Address | None) -> Link:
        return Link(settings, control, peer, remote_gid)

    steps = handshake(control, make_link, settings, deadline, accepting=accepting)
    try:
        return drive(control, steps, peer, deadline)
    except BaseException as error:
        try:
            steps.close()
        finally:
            with suppress(HandshakeError, StateError):
                tell_why(control, error)
            # Only who speaks this protocol, and in time, is given time to hear why.
            heard = control.channel.version is not None or isinstance(error, AuthenticationError)  # of TLS's
            told = heard and isinstance(error, Exception)
            control.close(LAST_WORD if told and not isinstance(error, HandshakeTimeout) else 0.0)
        raise


def demand_key(control: ControlBase, settings: Settings, *, accepting: bool, hello_first: bool = False) -> bool:
    """Let the peer be believed nothing before it has proved the key, if there is one; before it is listened to."""
    if settings.authkey is None:
        return False
    role = Role.ACCEPTS if accepting else Role.CONNECTS
    control.channel.demand(Auth(key_bytes(settings.authkey), role, hello_first=hello_first))
    return True


def swap_proofs(control: ControlBase, *, accepting: bool) -> _Talk[None]:
    """Prove the key to the peer, and see it proved; who accepts tells nothing to who has not proved it."""
    channel = control.channel
    if accepting:
        yield ChallengeReceived
        channel.challenge()
        yield ProofReceived
        channel.prove()
    else:
        channel.challenge()
        yield ChallengeReceived
        channel.prove()
        yield ProofReceived


def drive(control: ControlBase, talk: _Talk[_T], peer: Peer, deadline: Deadline) -> _T:
    """Go through a conversation, and wait for each step; return what it returns."""
    try:
        wanted = next(talk)
        while True:
            if control.channel.has_data:
                control.flush(deadline)
            wanted = talk.send(control.expect(wanted, deadline, peer.note))
    except StopIteration as end:
        outcome: _T = end.value
        return outcome


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

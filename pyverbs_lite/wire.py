"""The TCP handshake and control channel as a codec: no sockets, no threads, no verbs.

Bytes in, events out; method calls in, bytes out. Rules of this file:

* Both sides are equal: one table of order rules, used for what is sent and for what is heard.
* Nothing of a peer's is believed before it was range-checked (``_control/frames.py``), and no memory is taken on the
  word of a length.
* However the bytes are split or glued, the events are the same.

The layout and the order are in ``docs/handshake.md``.
"""

from __future__ import annotations

from enum import Enum

from typing_extensions import Buffer

from ._control.auth import MECHANISM, SEAL_SIZE, Auth
from ._control.frames import (
    CHALLENGE,
    DOMAIN,
    FRAMES,
    HEADER,
    LAYOUTS,
    MAGIC,
    MAX_BUFFERS,
    MAX_FRAME,
    MAX_NAME,
    MAX_REASON,
    MAY_IGNORE,
    MIN_VERSION,
    PREFACE,
    REFUSE,
    VERSION,
    BufferAdded,
    BufferWithdrawn,
    ChallengeReceived,
    DomainNamed,
    Event,
    Frame,
    FrameType,
    GoodbyeReceived,
    HelloReceived,
    ProofReceived,
    ReadyReceived,
    RefuseCode,
    Refused,
    frame_header,
    pack_buffer,
    pack_endpoint,
    plain,
    preface,
)
from .endpoint import Endpoint
from .errors import AuthenticationError, HandshakeError, PeerClosedError, PeerProtocolError, StateError
from .remote import RemoteBuffer, checked_int

__all__ = [
    "LAYOUTS",
    "MAGIC",
    "MAX_BUFFERS",
    "MAX_FRAME",
    "MAX_NAME",
    "MAX_REASON",
    "MAY_IGNORE",
    "MIN_VERSION",
    "VERSION",
    "BufferAdded",
    "BufferWithdrawn",
    "ChallengeReceived",
    "Channel",
    "DomainNamed",
    "Event",
    "FrameType",
    "GoodbyeReceived",
    "HelloReceived",
    "ProofReceived",
    "ReadyReceived",
    "RefuseCode",
    "Refused",
    "frame_header",
    "preface",
]


class _Phase(Enum):
    __hash__ = object.__hash__  # by identity, without a call of Python

    OPENING = "before"
    GREETED = "after HELLO"
    READY = "after READY"
    CLOSED = "after GOODBYE"
    REFUSED = "after REFUSE"


_OPEN = {_Phase.GREETED: _Phase.GREETED, _Phase.READY: _Phase.READY}
_CLOSING = dict.fromkeys(_OPEN, _Phase.CLOSED)
_REFUSING = dict.fromkeys((_Phase.OPENING, *_OPEN), _Phase.REFUSED)
_ENDED = (_Phase.CLOSED, _Phase.REFUSED)


#: The phases that a frame may come in, with those it leads to.
_NEXT: dict[int, dict[_Phase, _Phase]] = {
    FrameType.HELLO: {},
    FrameType.READY: {_Phase.GREETED: _Phase.READY},
    FrameType.BUFFER: _OPEN,
    FrameType.WITHDRAW: _OPEN,
    FrameType.GOODBYE: _CLOSING,
    FrameType.REFUSE: _REFUSING,
    FrameType.DOMAIN: {_Phase.GREETED: _Phase.GREETED},
    FrameType.CHALLENGE: {},
    FrameType.PROOF: {},
}
_HEADER_SIZE, _read_header = HEADER.size, HEADER.unpack_from
#: What a frame of a later version may be like.
_UNKNOWN = (0, MAX_FRAME, None)
#: What is said of memory.
_TELLING = frozenset({FrameType.DOMAIN, FrameType.BUFFER, FrameType.WITHDRAW})
_PROVING = frozenset({FrameType.CHALLENGE, FrameType.PROOF})
#: What a side says first, in this order: without a key, with one, and with one that comes after the records.
_OPENING = (FrameType.HELLO,)
_OPENING_PROVED = (FrameType.CHALLENGE, FrameType.PROOF, FrameType.HELLO)
_OPENING_PROVED_LATER = (FrameType.HELLO, FrameType.CHALLENGE, FrameType.PROOF)


class _Side:
    """What one side has said so far, and the rules for what it may say next."""

    def __init__(self, who: str, error: type[StateError | PeerProtocolError]) -> None:
        self.who = who
        self.error = error
        self.domain = 0
        self.phase = _Phase.OPENING
        self.opening: tuple[FrameType, ...] = _OPENING  # what is still to come of it
        self.names: dict[str, None] = {}  # a set, and an empty one takes a third of a set's memory

    @property
    def may(self) -> list[FrameType]:
        """What may come next."""
        return [*self.opening[:1], *(FrameType(kind) for kind, phases in _NEXT.items() if self.phase in phases)]

    @property
    def place(self) -> str:
        return f"before {self.opening[0].name}" if self.phase is _Phase.OPENING else self.phase.value

    def check_order(self, kind: int) -> None:
        # A frame of a later version, to be skipped, may stand wherever BUFFER may.
        phases = _NEXT.get(kind)
        if self.phase not in (_OPEN if phases is None else phases) and not (self.opening and self.opening[0] == kind):
            name = FrameType(kind).name if phases is not None else f"a frame of type {kind}"
            may = " or ".join(other.name for other in self.may) or "nothing"
            raise self.error(f"{self.who} sent {name} {self.place}, where {may} may come")

    def step(self, kind: int, event: Event) -> None:
        """Take note of what it says, which comes in order."""
        if kind in _TELLING:
            self._note(event)
        if not self.opening:
            self.phase = _NEXT[kind][self.phase]
        elif self.opening[0] == kind:
            self.opening = self.opening[1:]
            if not self.opening:
                self.phase = _Phase.GREETED
        else:  # a refusal
            self.opening, self.phase = (), _NEXT[kind][self.phase]

    def _note(self, event: Event) -> None:
        if isinstance(event, DomainNamed):
            if self.domain or self.names:
                raise self.error(f"{self.who} sent DOMAIN again, or after a BUFFER")
            self.domain = event.domain
        elif isinstance(event, BufferAdded):
            if len(self.names) == MAX_BUFFERS and event.buffer.name not in self.names:
                raise self.error(f"{self.who} named more than {MAX_BUFFERS} buffers")
            self.names[event.buffer.name] = None
        else:
            assert isinstance(event, BufferWithdrawn)
            if event.name not in self.names:
                raise self.error(f"{self.who} withdrew {event.name!r}, and no buffer has that name")
            del self.names[event.name]


#: First bytes -> what speaks there.
_STRANGERS: tuple[tuple[bytes, str], ...] = (
    *((verb, "an HTTP request") for verb in (b"GET ", b"POST ", b"HEAD ", b"PUT ", b"OPTIONS ", b"PRI * ")),
    (b"HTTP/", "an HTTP answer"),
    (b"\x16\x03", "a TLS ClientHello (does only one side use TLS?)"),
    (b"\x15\x03", "a TLS alert (does only one side use TLS?)"),
    (b"SSH-", "an SSH greeting"),
    (b"\x89PVL", "this protocol after a text filter changed its bytes"),
    (b"\x09PVL", "this protocol after its eighth bits were lost"),
    (bytes(4), "zeros"),
)
_EOF_TEXTS = {
    _Phase.OPENING: ": it gave up, or it is not this protocol that is there",
    _Phase.GREETED: "within the handshake, after HELLO and before READY: it gave up or its process ended",
    _Phase.READY: "without a GOODBYE: its process is gone",
}


def _stranger(first: bytes | bytearray) -> str | None:
    return next((what for start, what in _STRANGERS if first.startswith(start)), None)


def _check_magic(first: bytes) -> None:
    if first != MAGIC:
        looks = _stranger(first) or "no protocol known here"
        raise ValueError(f"it begins with {first!r}, not with this protocol's magic; it looks like {looks}")


class Channel:
    """Both directions of one TCP connection; knows no role and does no I/O.

    What is to be said is queued by ``hello()``, ``ready()`` and so on, and taken with ``data_to_send()``. What the
    peer says goes into ``receive_data()``, which returns the events in it. A failed channel stays failed: every
    method but ``data_to_send()`` raises the same error again.

    Attributes:
        version: the protocol version that both sides speak, or None before the peer's first bytes.
        error: what the channel failed of, or None. Events that came before the error in the same bytes are returned
            first, and the error is raised by the next call: look here before waiting for more bytes.

    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.error: HandshakeError | None = None
        self._inbox = bytearray()
        self._outbox = bytearray(preface())
        self._local = _Side("this side", StateError)
        self._remote = _Side("the peer", PeerProtocolError)
        self._auth: Auth | None = None
        self._silent = True  # nothing was said yet
        self._recognised = False
        self._eof = False

    def demand(self, auth: Auth) -> None:
        """From the start: believe the peer nothing before it has proved that it knows the key, and prove it too."""
        self._auth = auth
        opening = _OPENING_PROVED_LATER if auth.hello_first else _OPENING_PROVED
        self._local.opening = self._remote.opening = opening
        auth.note(auth.role, self._outbox)

    def challenge(self) -> None:
        """Queue what the peer is to prove its key with."""
        event = ChallengeReceived(self._keyed.role, self._keyed.nonce)
        self._say(FrameType.CHALLENGE, event, CHALLENGE.pack(MECHANISM, event.role, 0, event.nonce))

    def prove(self) -> None:
        """Queue the proof that this side knows the key; after the peer's challenge, and who accepts after its proof.

        What is said next is sealed.
        """
        self._local.check_order(FrameType.PROOF)
        mac = self._keyed.proof()
        self._say(FrameType.PROOF, ProofReceived(mac), mac)
        self._keyed.proved()

    @property
    def _keyed(self) -> Auth:
        if self._auth is None:
            raise StateError("this channel has no key")
        return self._auth

    def hello(self, endpoint: Endpoint) -> None:
        """Queue the first frame: this side's QP and what it can do."""
        self._say(FrameType.HELLO, HelloReceived(endpoint), pack_endpoint(endpoint))

    def ready(self) -> None:
        """Queue that this side's QP is in RTS and its receives are posted."""
        self._say(FrameType.READY, ReadyReceived())

    def domain(self, domain: int) -> None:
        """Queue which protection domain this side registers its memory in, before the first buffer: 64 bits, not 0."""
        self._say(FrameType.DOMAIN, DomainNamed(domain), DOMAIN.pack(domain))

    def buffer(self, buffer: RemoteBuffer, *, passing: bool = False) -> None:
        """Queue a named buffer that the peer may use; a name used before is replaced.

        Args:
            passing: whether it ends with the connection, where others of the domain do not.

        Raises:
            ValueError: the peer could never use it, or its name does not fit.

        """
        added = BufferAdded(buffer, passing)
        self._say(FrameType.BUFFER, added, pack_buffer(added))

    def withdraw(self, name: str) -> None:
        """Queue that a named buffer goes away."""
        self._say(FrameType.WITHDRAW, BufferWithdrawn(name), name.encode())

    def goodbye(self) -> None:
        """Queue the orderly end; nothing may follow."""
        self._say(FrameType.GOODBYE, GoodbyeReceived())

    def refuse(self, code: int, text: str) -> None:
        """Queue why this side does not go on; nothing may follow. A long text is cut."""
        head = REFUSE.pack(checked_int(code, 0, 0xFFFF, "code"))
        # Cut between characters, not within one.
        tail = plain(text).encode()[:MAX_REASON].decode(errors="ignore").encode()
        self._say(FrameType.REFUSE, Refused(code, text), head + tail)

    @property
    def parted(self) -> tuple[bool, bool]:
        """Whether this side, and whether the peer, has said its last word."""
        return self._local.phase in _ENDED, self._remote.phase in _ENDED

    @property
    def has_data(self) -> bool:
        """Whether there is something to send."""
        return bool(self._outbox) and not self._silent

    def data_to_send(self) -> bytes:
        """Return the queued bytes and forget them; never raises, so that a refusal leaves also after an error."""
        if self._silent:
            return b""
        data = bytes(self._outbox)
        self._outbox.clear()
        return data

    def receive_data(self, data: Buffer) -> list[Event]:
        """Return the events that these bytes complete.

        After an error the reason is queued for the peer, if it speaks this protocol.

        Raises:
            PeerProtocolError: the peer broke the protocol; see ``error`` for when events came before it.
            AuthenticationError: it does not know the key, or only one side has one, or a frame was changed.
            StateError: the peer's end was reported already.

        """
        self._raise_failure()
        if self._eof:
            raise StateError("receive_data() after receive_eof()")
        self._inbox += data
        events: list[Event] = []
        try:
            self._parse(events)
        except (PeerProtocolError, AuthenticationError) as error:
            if self._recognised and self._local.phase not in _ENDED:
                code = RefuseCode.PROTOCOL if self.version else RefuseCode.VERSION
                self.refuse(RefuseCode.AUTHENTICATION if isinstance(error, AuthenticationError) else code, str(error))
            self._fail(error)
            if not events:
                raise
        return events

    def receive_eof(self) -> list[Event]:
        """Take note that the peer sends no more; there are no events in it.

        Raises:
            PeerClosedError: neither side had said GOODBYE or REFUSE; the text tells where the peer left.

        """
        self._raise_failure()
        self._eof = True
        if self._local.phase in _ENDED or self._remote.phase in _ENDED:
            return []
        where = f"before its {self._remote.opening[0].name}" if self._remote.opening else ""
        text = f"the peer closed the connection {where}{_EOF_TEXTS[self._remote.phase]}"
        if self._inbox:
            text += f"; the last it sent is unfinished: {bytes(self._inbox[:16])!r}"
            if not self._recognised and (looks := _stranger(self._inbox)):
                text += f"; it looks like {looks}"
        error = PeerClosedError(text)
        self._fail(error)
        raise error

    def fail(self, error: HandshakeError) -> None:
        """Take note of what became of that which carries the bytes; the first error stays."""
        if self.error is None:
            self._fail(error)

    def _fail(self, error: HandshakeError) -> None:
        self.error = error
        self._inbox.clear()

    def _raise_failure(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _say(self, kind: FrameType, event: Event, payload: bytes = b"") -> None:
        self._raise_failure()
        self._local.check_order(kind)
        self._local.step(kind, event)
        frame = frame_header(kind, len(payload)) + payload
        self._silent = False
        self._outbox += frame
        if self._auth is not None:
            if kind is not FrameType.PROOF:
                self._auth.note(self._auth.role, frame)
            self._outbox += self._auth.seal(frame)

    def _parse(self, events: list[Event]) -> None:
        kind: int | None = None
        what = "first message"
        inbox, remote, auth = self._inbox, self._remote, self._auth
        try:
            if self.version is None and not self._read_preface():
                return
            what = "frame"
            while len(inbox) >= _HEADER_SIZE and remote.phase not in _ENDED:
                head, flags, reserved, length = _read_header(inbox)
                if reserved:
                    checked_int(reserved, 0, 0, "reserved")
                kind, end = head, _HEADER_SIZE + length
                known = FRAMES.get(head)
                self._check_header(head, flags, length, known)
                whole = end if auth is None or not auth.sealed(auth.role.other) else end + SEAL_SIZE
                if len(inbox) < whole:
                    return
                if whole != end:
                    self._keyed.check_seal(bytes(inbox[:end]), bytes(inbox[end:whole]))
                if known is not None:
                    event = known.decode(bytes(inbox[_HEADER_SIZE:end]))
                    if auth is not None:
                        self._judge(auth, bytes(inbox[:end]), event)
                    remote.step(head, event)
                    events.append(event)
                del inbox[:whole]
                kind = None
            if inbox and remote.phase in _ENDED:
                raise ValueError(f"it came {remote.phase.value}, where nothing may come")
        except ValueError as error:
            if kind is not None:
                what = FrameType(kind).name if kind in FRAMES else f"frame of type {kind}"
            raise PeerProtocolError(f"the peer's {what}: {error}") from error

    @staticmethod
    def _judge(auth: Auth, frame: bytes, event: Event) -> None:
        """Let the keeper of the key see what the peer says."""
        if isinstance(event, ProofReceived):
            auth.check_proof(event.mac)
            return
        auth.note(auth.role.other, frame)
        if isinstance(event, ChallengeReceived):
            auth.check_challenge(event.role, event.nonce)

    def _check_header(self, type: int, flags: int, length: int, known: Frame | None) -> None:
        # All that a header can tell is checked before the payload is waited for.
        # A PROOF is covered by nothing but what it proves, so nothing else of it may have a choice.
        if flags:
            checked_int(flags, 0, 0 if type in _PROVING else MAY_IGNORE, "flags")
        least, most, _ = known or _UNKNOWN
        if not least <= length <= most:
            checked_int(length, least, most, "length")
        if known is None and not flags & MAY_IGNORE:
            raise ValueError(f"type {type} is unknown to version {VERSION}, and must not be ignored")
        if self._auth is None:
            keyless = type == FrameType.CHALLENGE
        else:
            due = _PROVING.intersection(self._remote.opening)
            keyless = known is not None and bool(due) and type not in {*_PROVING, *self._remote.may}
        if keyless:
            raise AuthenticationError("only one of the two sides was given an authkey: give both the same one")
        self._remote.check_order(type)

    def _read_preface(self) -> bool:
        if len(self._inbox) < len(MAGIC):
            return False
        _check_magic(bytes(self._inbox[: len(MAGIC)]))
        self._recognised = True
        if len(self._inbox) < PREFACE.size:
            return False
        _, newest, oldest = PREFACE.unpack_from(self._inbox)
        checked_int(newest, 1, 0xFFFF, "version")
        checked_int(oldest, 1, newest, "min_version")
        if oldest > VERSION or newest < MIN_VERSION:
            raise ValueError(
                f"it speaks versions {oldest} to {newest} of the protocol, and this side {MIN_VERSION} to {VERSION}"
            )
        if self._auth is not None:
            self._auth.note(self._auth.role.other, self._inbox[: PREFACE.size])
        del self._inbox[: PREFACE.size]
        self.version = min(newest, VERSION)
        return True

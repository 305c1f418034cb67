"""The TCP handshake and control channel as a codec: no sockets, no threads, no verbs.

Bytes in, events out; method calls in, bytes out. Rules of this file:

* Both sides are equal: one table of order rules, used for what is sent and for what is heard.
* Nothing of a peer's is believed before it was range-checked, and no memory is taken on the word of a length.
* However the bytes are split or glued, the events are the same.

The layout is in ``docs/handshake.md``, and a test compares that page with ``LAYOUTS`` below.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import reduce
from ipaddress import IPv6Address
from typing import Any, NamedTuple, TypeAlias

from typing_extensions import Buffer

from ._auth import MAC_SIZE, MECHANISM, NONCE_SIZE, SEAL_SIZE, Auth, Role
from .endpoint import Endpoint
from .enums import MTU, AccessFlags, LinkLayer
from .errors import AuthenticationError, HandshakeError, PeerClosedError, PeerProtocolError, StateError
from .remote import RemoteBuffer, checked_int

__all__ = [
    "BufferAdded",
    "BufferWithdrawn",
    "ChallengeReceived",
    "Channel",
    "DomainNamed",
    "Event",
    "GoodbyeReceived",
    "HelloReceived",
    "ProofReceived",
    "ReadyReceived",
    "RefuseCode",
    "Refused",
]

#: A byte that is not ASCII, the name, and both kinds of line end: what a text filter changes, shows at once.
MAGIC = b"\x89PVL\r\n\x1a\n"
VERSION = 1
MIN_VERSION = 1
MAX_FRAME = 64 * 1024
MAX_BUFFERS = 65536
MAX_NAME = 255
MAX_REASON = 1024
#: Header flag: a receiver that does not know the frame's type skips it.
MAY_IGNORE = 0x01


class FrameType(IntEnum):
    """The frames that this version knows; docs/handshake.md lists the numbers that are set aside."""

    HELLO = 1
    READY = 2
    BUFFER = 3
    WITHDRAW = 4
    GOODBYE = 5
    REFUSE = 6
    DOMAIN = 9
    CHALLENGE = 16
    PROOF = 17


#: What a peer that does not know it can do without.
_EXTRAS = (FrameType.DOMAIN,)


class RefuseCode(IntEnum):
    """Why a side does not go on."""

    OTHER = 0
    PROTOCOL = 1
    VERSION = 2
    MISMATCH = 3
    RESOURCES = 4
    ROUTE = 5
    BUSY = 6
    AUTHENTICATION = 7
    TIMEOUT = 8


#: Every fixed layout as ``struct code:field``, big-endian and without padding.
LAYOUTS = {
    "Preface": "8s:magic H:version H:min_version",
    "Header": "B:type B:flags H:reserved I:length",
    "HELLO": (
        "Q:nonce 16s:gid I:qp_num I:psn H:lid H:mtu B:link_layer B:max_rd_atomic B:max_dest_rd_atomic B:credit_depth"
        " I:max_message_size I:recv_depth I:max_msg_sz"
    ),
    "BUFFER": "Q:addr Q:length I:rkey I:access",
    "REFUSE": "H:code",
    "DOMAIN": "Q:domain",
    "CHALLENGE": f"B:mechanism B:role H:reserved {NONCE_SIZE}s:nonce",
    "PROOF": f"{MAC_SIZE}s:mac",
}
_FIELDS = {layout: re.findall(r":(\w+)", text) for layout, text in LAYOUTS.items()}
_STRUCTS = {layout: struct.Struct("!" + re.sub(r":\w+", "", text)) for layout, text in LAYOUTS.items()}
_PREFACE, _HEADER, _HELLO, _BUFFER, _REFUSE, _DOMAIN, _CHALLENGE, _PROOF = _STRUCTS.values()


def preface(version: int = VERSION, min_version: int = MIN_VERSION) -> bytes:
    """Return what a side sends once, before its first frame."""
    return _PREFACE.pack(MAGIC, version, min_version)


def frame_header(kind: FrameType, length: int) -> bytes:
    """Return what a frame starts with."""
    return _HEADER.pack(kind, MAY_IGNORE if kind in _EXTRAS else 0, 0, length)


def _unpack(layout: str, payload: bytes | bytearray) -> dict[str, Any]:
    record = dict(zip(_FIELDS[layout], _STRUCTS[layout].unpack_from(payload), strict=True))
    checked_int(record.pop("reserved", 0), 0, 0, "reserved")
    return record


# The wire has its own codes, so that it does not change where a C enum does.
_LINK_LAYERS = {LinkLayer.INFINIBAND: 1, LinkLayer.ETHERNET: 2}
_ACCESS = {AccessFlags.REMOTE_READ: 1, AccessFlags.REMOTE_WRITE: 2, AccessFlags.REMOTE_ATOMIC: 4}


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """The peer's QP and what it can do."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class DomainNamed:
    """Which protection domain the peer registers its memory in: an identity, and nothing of the device's."""

    domain: int


@dataclass(frozen=True, slots=True)
class BufferAdded:
    """The peer named a buffer, or registered a named one anew: drop what was known under that name."""

    buffer: RemoteBuffer


@dataclass(frozen=True, slots=True)
class BufferWithdrawn:
    """The peer takes a buffer back: its rkey is about to be invalid."""

    name: str


@dataclass(frozen=True, slots=True)
class ReadyReceived:
    """The peer's QP is in RTS and its receives are posted."""


@dataclass(frozen=True, slots=True)
class GoodbyeReceived:
    """The peer closes in good order; it says nothing more."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The peer does not go on; ``code`` is a ``RefuseCode`` where this version knows it."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChallengeReceived:
    """The peer wants to see that this side knows the key."""

    role: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class ProofReceived:
    """The peer knows the key: what it says next is sealed."""

    mac: bytes


Event: TypeAlias = (
    HelloReceived
    | DomainNamed
    | BufferAdded
    | BufferWithdrawn
    | ReadyReceived
    | GoodbyeReceived
    | Refused
    | ChallengeReceived
    | ProofReceived
)


def _pack_endpoint(endpoint: Endpoint) -> bytes:
    record = {name: getattr(endpoint, name, 0) for name in _FIELDS["HELLO"]}
    record.update(gid=endpoint.gid.packed, mtu=endpoint.mtu.bytes, link_layer=_LINK_LAYERS[endpoint.link_layer])
    return _HELLO.pack(*record.values())


def _unpack_hello(payload: bytes) -> HelloReceived:
    record = _unpack("HELLO", payload)
    code = checked_int(record["link_layer"], 1, len(_LINK_LAYERS), "link_layer")
    record["link_layer"] = next(layer for layer, wire in _LINK_LAYERS.items() if wire == code)
    record["gid"] = IPv6Address(record["gid"])
    record["mtu"] = MTU.from_bytes_size(record["mtu"])
    return HelloReceived(Endpoint(**record))


def _pack_buffer(buffer: RemoteBuffer) -> bytes:
    if buffer.rkey == 0 or buffer.access == AccessFlags(0):
        raise ValueError(
            f"{buffer} has no remote access flag: the peer could never use it (register it with REMOTE_READ,"
            " REMOTE_WRITE or REMOTE_ATOMIC)"
        )
    name = buffer.name.encode()
    checked_int(len(name), 1, MAX_NAME, "the length of the buffer's name in UTF-8")
    # No bit means "not known": a buffer that allows nothing was refused above.
    access = sum(bit for flag, bit in _ACCESS.items() if flag in (buffer.access or AccessFlags(0)))
    return _BUFFER.pack(buffer.addr, buffer.length, buffer.rkey, access) + name


def _unpack_buffer(payload: bytes) -> BufferAdded:
    record = _unpack("BUFFER", payload)
    checked_int(record["rkey"], 1, 2**32 - 1, "rkey", "0 is the rkey of memory without remote access")
    bits = checked_int(record["access"], 0, sum(_ACCESS.values()), "access")
    flags = [flag for flag, bit in _ACCESS.items() if bits & bit]
    record["access"] = reduce(operator.or_, flags) if flags else None
    return BufferAdded(RemoteBuffer(**record, name=_text("name", payload[_BUFFER.size :])))


def _unpack_domain(payload: bytes) -> DomainNamed:
    return DomainNamed(checked_int(_unpack("DOMAIN", payload)["domain"], 1, 2**64 - 1, "domain", "0 is no domain"))


def _unpack_withdraw(payload: bytes) -> BufferWithdrawn:
    return BufferWithdrawn(_text("name", payload))


def unpack_refusal(payload: bytes) -> Refused:
    """Read a REFUSE."""
    code = int(_unpack("REFUSE", payload)["code"])
    known = {int(member): member for member in RefuseCode}
    return Refused(known.get(code, code), _plain(payload[_REFUSE.size :].decode(errors="replace")))


def _unpack_challenge(payload: bytes) -> ChallengeReceived:
    record = _unpack("CHALLENGE", payload)
    checked_int(record["mechanism"], MECHANISM, MECHANISM, "mechanism", "HMAC with SHA-256 is the only one")
    return ChallengeReceived(checked_int(record["role"], min(Role), max(Role), "role"), record["nonce"])


def _text(what: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is {raw[:32]!r}, which is not UTF-8") from error


def _plain(text: str) -> str:
    # A reason ends up in somebody's terminal, so nothing in it may steer one.
    return "".join(char if char.isprintable() else " " for char in text)


class _Phase(Enum):
    OPENING = "before"
    GREETED = "after HELLO"
    READY = "after READY"
    CLOSED = "after GOODBYE"
    REFUSED = "after REFUSE"


_OPEN = {_Phase.GREETED: _Phase.GREETED, _Phase.READY: _Phase.READY}
_CLOSING = dict.fromkeys(_OPEN, _Phase.CLOSED)
_REFUSING = dict.fromkeys((_Phase.OPENING, *_OPEN), _Phase.REFUSED)
_ENDED = (_Phase.CLOSED, _Phase.REFUSED)


class _Frame(NamedTuple):
    """The lengths a frame may have, the phases it may come in with those it leads to, and what it decodes to."""

    least: int
    most: int
    next: dict[_Phase, _Phase]
    decode: Callable[[bytes], Event]


_FRAMES: dict[int, _Frame] = {
    FrameType.HELLO: _Frame(_HELLO.size, _HELLO.size, {}, _unpack_hello),
    FrameType.READY: _Frame(0, 0, {_Phase.GREETED: _Phase.READY}, lambda _: ReadyReceived()),
    FrameType.BUFFER: _Frame(_BUFFER.size + 1, _BUFFER.size + MAX_NAME, _OPEN, _unpack_buffer),
    FrameType.WITHDRAW: _Frame(1, MAX_NAME, _OPEN, _unpack_withdraw),
    FrameType.GOODBYE: _Frame(0, 0, _CLOSING, lambda _: GoodbyeReceived()),
    FrameType.REFUSE: _Frame(_REFUSE.size, _REFUSE.size + MAX_REASON, _REFUSING, unpack_refusal),
    FrameType.DOMAIN: _Frame(_DOMAIN.size, _DOMAIN.size, {_Phase.GREETED: _Phase.GREETED}, _unpack_domain),
    FrameType.CHALLENGE: _Frame(_CHALLENGE.size, _CHALLENGE.size, {}, _unpack_challenge),
    FrameType.PROOF: _Frame(_PROOF.size, _PROOF.size, {}, ProofReceived),
}
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
        return [*self.opening[:1], *(FrameType(kind) for kind, frame in _FRAMES.items() if self.phase in frame.next)]

    @property
    def place(self) -> str:
        return f"before {self.opening[0].name}" if self.phase is _Phase.OPENING else self.phase.value

    def check_order(self, kind: int) -> None:
        # A frame of a later version, to be skipped, may stand wherever BUFFER may.
        frame = _FRAMES.get(kind)
        fits = self.phase in _OPEN if frame is None else self.opening[:1] == (kind,) or self.phase in frame.next
        if not fits:
            name = FrameType(kind).name if frame is not None else f"a frame of type {kind}"
            may = " or ".join(other.name for other in self.may) or "nothing"
            raise self.error(f"{self.who} sent {name} {self.place}, where {may} may come")

    def step(self, kind: int, event: Event) -> None:
        self.check_order(kind)
        match event:
            case DomainNamed(domain):
                if self.domain or self.names:
                    raise self.error(f"{self.who} sent DOMAIN again, or after a BUFFER")
                self.domain = domain
            case BufferAdded(buffer):
                if len(self.names) == MAX_BUFFERS and buffer.name not in self.names:
                    raise self.error(f"{self.who} named more than {MAX_BUFFERS} buffers")
                self.names[buffer.name] = None
            case BufferWithdrawn(name):
                if name not in self.names:
                    raise self.error(f"{self.who} withdrew {name!r}, and no buffer has that name")
                del self.names[name]
        if self.opening[:1] == (kind,):
            self.opening = self.opening[1:]
            self.phase = self.phase if self.opening else _Phase.GREETED
        else:
            self.opening = ()
            self.phase = _FRAMES[kind].next[self.phase]


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
        self._say(FrameType.CHALLENGE, event, _CHALLENGE.pack(MECHANISM, event.role, 0, event.nonce))

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
        self._say(FrameType.HELLO, HelloReceived(endpoint), _pack_endpoint(endpoint))

    def ready(self) -> None:
        """Queue that this side's QP is in RTS and its receives are posted."""
        self._say(FrameType.READY, ReadyReceived())

    def domain(self, domain: int) -> None:
        """Queue which protection domain this side registers its memory in, before the first buffer: 64 bits, not 0."""
        self._say(FrameType.DOMAIN, DomainNamed(domain), _DOMAIN.pack(domain))

    def buffer(self, buffer: RemoteBuffer) -> None:
        """Queue a named buffer that the peer may use; a name used before is replaced.

        Raises:
            ValueError: the peer could never use it, or its name does not fit.

        """
        self._say(FrameType.BUFFER, BufferAdded(buffer), _pack_buffer(buffer))

    def withdraw(self, name: str) -> None:
        """Queue that a named buffer goes away."""
        self._say(FrameType.WITHDRAW, BufferWithdrawn(name), name.encode())

    def goodbye(self) -> None:
        """Queue the orderly end; nothing may follow."""
        self._say(FrameType.GOODBYE, GoodbyeReceived())

    def refuse(self, code: int, text: str) -> None:
        """Queue why this side does not go on; nothing may follow. A long text is cut."""
        head = _REFUSE.pack(checked_int(code, 0, 0xFFFF, "code"))
        # Cut between characters, not within one.
        tail = _plain(text).encode()[:MAX_REASON].decode(errors="ignore").encode()
        self._say(FrameType.REFUSE, Refused(code, text), head + tail)

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
        self._local.step(kind, event)
        frame = frame_header(kind, len(payload)) + payload
        self._silent = False
        self._outbox += frame
        if self._auth is not None:
            if kind is not FrameType.PROOF:
                self._auth.note(self._auth.role, frame)
            self._outbox += self._auth.seal(frame)

    def _parse(self, events: list[Event]) -> None:
        what = "first message"
        try:
            if self.version is None and not self._read_preface():
                return
            while self._inbox:
                what = "frame"
                if self._remote.phase in _ENDED:
                    raise ValueError(f"it came {self._remote.phase.value}, where nothing may come")
                if len(self._inbox) < _HEADER.size:
                    return
                header = _unpack("Header", self._inbox)
                kind, end = header["type"], _HEADER.size + header["length"]
                what = FrameType(kind).name if kind in _FRAMES else f"frame of type {kind}"
                self._check_header(**header)
                whole = end + (SEAL_SIZE if self._auth is not None and self._auth.sealed(self._auth.role.other) else 0)
                if len(self._inbox) < whole:
                    return
                frame, seal = bytes(self._inbox[:end]), bytes(self._inbox[end:whole])
                del self._inbox[:whole]
                if seal:
                    self._keyed.check_seal(frame, seal)
                if kind in _FRAMES:
                    event = _FRAMES[kind].decode(frame[_HEADER.size :])
                    self._judge(frame, event)
                    self._remote.step(kind, event)
                    events.append(event)
        except ValueError as error:
            raise PeerProtocolError(f"the peer's {what}: {error}") from error

    def _judge(self, frame: bytes, event: Event) -> None:
        """Let the keeper of the key see what the peer says."""
        if self._auth is None:
            return
        if isinstance(event, ProofReceived):
            self._auth.check_proof(event.mac)
            return
        self._auth.note(self._auth.role.other, frame)
        if isinstance(event, ChallengeReceived):
            self._auth.check_challenge(event.role, event.nonce)

    def _check_header(self, type: int, flags: int, length: int) -> None:
        # All that a header can tell is checked before the payload is waited for.
        checked_int(flags, 0, MAY_IGNORE, "flags")
        known = _FRAMES.get(type)
        least, most = (known.least, known.most) if known else (0, MAX_FRAME)
        checked_int(length, least, most, "length")
        if not known and not flags & MAY_IGNORE:
            raise ValueError(f"type {type} is unknown to version {VERSION}, and must not be ignored")
        proofs = {FrameType.CHALLENGE, FrameType.PROOF}
        keyless = proofs.intersection(self._remote.opening) and type not in {*proofs, *self._remote.may}
        if (known and keyless) or (type == FrameType.CHALLENGE and self._auth is None):
            raise AuthenticationError("only one of the two sides was given an authkey: give both the same one")
        self._remote.check_order(type)

    def _read_preface(self) -> bool:
        if len(self._inbox) < len(MAGIC):
            return False
        _check_magic(bytes(self._inbox[: len(MAGIC)]))
        self._recognised = True
        if len(self._inbox) < _PREFACE.size:
            return False
        preface = _unpack("Preface", self._inbox)
        newest = checked_int(preface["version"], 1, 0xFFFF, "version")
        oldest = checked_int(preface["min_version"], 1, newest, "min_version")
        if oldest > VERSION or newest < MIN_VERSION:
            raise ValueError(
                f"it speaks versions {oldest} to {newest} of the protocol, and this side {MIN_VERSION} to {VERSION}"
            )
        if self._auth is not None:
            self._auth.note(self._auth.role.other, self._inbox[: _PREFACE.size])
        del self._inbox[: _PREFACE.size]
        self.version = min(newest, VERSION)
        return True

"""The frames of the handshake and the control channel: their layouts, what they decode to, and the range of each value.

The layout is in ``docs/handshake.md``, and a test compares that page with ``LAYOUTS`` below.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce
from ipaddress import IPv6Address
from typing import Any, NamedTuple, TypeAlias

from ..endpoint import Endpoint
from ..enums import MTU, AccessFlags, LinkLayer
from ..remote import RemoteBuffer, checked_int
from .auth import MAC_SIZE, MECHANISM, NONCE_SIZE, Role

__all__ = [
    "CHALLENGE",
    "DOMAIN",
    "FRAMES",
    "HEADER",
    "LAYOUTS",
    "MAGIC",
    "MAX_BUFFERS",
    "MAX_FRAME",
    "MAX_NAME",
    "MAX_REASON",
    "MAY_IGNORE",
    "MIN_VERSION",
    "PREFACE",
    "REFUSE",
    "VERSION",
    "BufferAdded",
    "BufferWithdrawn",
    "ChallengeReceived",
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
    "pack_buffer",
    "pack_endpoint",
    "plain",
    "preface",
    "unpack",
    "unpack_refusal",
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
_hello_fields = operator.attrgetter(*_FIELDS["HELLO"])
PREFACE, HEADER, _HELLO, _BUFFER, REFUSE, DOMAIN, CHALLENGE, _PROOF = _STRUCTS.values()


def preface(version: int = VERSION, min_version: int = MIN_VERSION) -> bytes:
    """Return what a side sends once, before its first frame."""
    return PREFACE.pack(MAGIC, version, min_version)


def frame_header(kind: FrameType, length: int) -> bytes:
    """Return what a frame starts with."""
    return HEADER.pack(kind, MAY_IGNORE if kind in _EXTRAS else 0, 0, length)


def unpack(layout: str, payload: bytes | bytearray) -> dict[str, Any]:
    """Read a layout's fields from the start of some bytes; what is reserved must be 0."""
    record = dict(zip(_FIELDS[layout], _STRUCTS[layout].unpack_from(payload), strict=True))
    if reserved := record.pop("reserved", 0):
        checked_int(reserved, 0, 0, "reserved")
    return record


# The wire has its own codes, so that it does not change where a C enum does.
_LINK_LAYERS = {LinkLayer.INFINIBAND: 1, LinkLayer.ETHERNET: 2}
_LINK_LAYER_OF = {code: layer for layer, code in _LINK_LAYERS.items()}
_ACCESS = {AccessFlags.REMOTE_READ: 1, AccessFlags.REMOTE_WRITE: 2, AccessFlags.REMOTE_ATOMIC: 4}
#: Beside those: the buffer ends with the connection, though the domain goes on.
_PASSING = 8


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
    passing: bool = False  # it ends with the connection, and is not of all in the domain


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


def pack_endpoint(endpoint: Endpoint) -> bytes:
    """Return the payload of a HELLO."""
    record = dict(zip(_FIELDS["HELLO"], _hello_fields(endpoint), strict=True))
    record.update(gid=endpoint.gid.packed, mtu=endpoint.mtu.bytes, link_layer=_LINK_LAYERS[endpoint.link_layer])
    return _HELLO.pack(*record.values())


def _unpack_hello(payload: bytes) -> HelloReceived:
    record = unpack("HELLO", payload)
    code = checked_int(record["link_layer"], 1, len(_LINK_LAYERS), "link_layer")
    record["link_layer"] = _LINK_LAYER_OF[code]
    record["gid"] = IPv6Address(record["gid"])
    record["mtu"] = MTU.from_bytes_size(record["mtu"])
    return HelloReceived(Endpoint(**record))


def pack_buffer(added: BufferAdded) -> bytes:
    """Return the payload of a BUFFER.

    Raises:
        ValueError: the peer could never use it, or its name does not fit.
    """
    buffer = added.buffer
    if buffer.rkey == 0 or buffer.access == AccessFlags(0):
        raise ValueError(
            f"{buffer} has no remote access flag: the peer could never use it (register it with REMOTE_READ,"
            " REMOTE_WRITE or REMOTE_ATOMIC)"
        )
    name = buffer.name.encode()
    checked_int(len(name), 1, MAX_NAME, "the length of the buffer's name in UTF-8")
    # No bit means "not known": a buffer that allows nothing was refused above.
    access = sum(bit for flag, bit in _ACCESS.items() if flag in (buffer.access or AccessFlags(0)))
    return _BUFFER.pack(buffer.addr, buffer.length, buffer.rkey, access | _PASSING * added.passing) + name


def _unpack_buffer(payload: bytes) -> BufferAdded:
    record = unpack("BUFFER", payload)
    checked_int(record["rkey"], 1, 2**32 - 1, "rkey", "0 is the rkey of memory without remote access")
    bits = checked_int(record["access"], 0, sum(_ACCESS.values()) | _PASSING, "access")
    flags = [flag for flag, bit in _ACCESS.items() if bits & bit]
    record["access"] = reduce(operator.or_, flags) if flags else None
    return BufferAdded(RemoteBuffer(**record, name=_text("name", payload[_BUFFER.size :])), bool(bits & _PASSING))


def _unpack_domain(payload: bytes) -> DomainNamed:
    return DomainNamed(checked_int(unpack("DOMAIN", payload)["domain"], 1, 2**64 - 1, "domain", "0 is no domain"))


def _unpack_withdraw(payload: bytes) -> BufferWithdrawn:
    return BufferWithdrawn(_text("name", payload))


def unpack_refusal(payload: bytes) -> Refused:
    """Read a REFUSE."""
    code = int(unpack("REFUSE", payload)["code"])
    known = {int(member): member for member in RefuseCode}
    return Refused(known.get(code, code), plain(payload[REFUSE.size :].decode(errors="replace")))


def _unpack_challenge(payload: bytes) -> ChallengeReceived:
    record = unpack("CHALLENGE", payload)
    checked_int(record["mechanism"], MECHANISM, MECHANISM, "mechanism", "HMAC with SHA-256 is the only one")
    return ChallengeReceived(checked_int(record["role"], min(Role), max(Role), "role"), record["nonce"])


def _text(what: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is {raw[:32]!r}, which is not UTF-8") from error


def plain(text: str) -> str:
    """Return a text without what cannot be printed."""
    # A reason ends up in somebody's terminal, so nothing in it may steer one.
    return "".join(char if char.isprintable() else " " for char in text)


class Frame(NamedTuple):
    """The lengths that a frame may have, and what it decodes to."""

    least: int
    most: int
    decode: Callable[[bytes], Event]


FRAMES: dict[int, Frame] = {
    FrameType.HELLO: Frame(_HELLO.size, _HELLO.size, _unpack_hello),
    FrameType.READY: Frame(0, 0, lambda _: ReadyReceived()),
    FrameType.BUFFER: Frame(_BUFFER.size + 1, _BUFFER.size + MAX_NAME, _unpack_buffer),
    FrameType.WITHDRAW: Frame(1, MAX_NAME, _unpack_withdraw),
    FrameType.GOODBYE: Frame(0, 0, lambda _: GoodbyeReceived()),
    FrameType.REFUSE: Frame(REFUSE.size, REFUSE.size + MAX_REASON, unpack_refusal),
    FrameType.DOMAIN: Frame(DOMAIN.size, DOMAIN.size, _unpack_domain),
    FrameType.CHALLENGE: Frame(CHALLENGE.size, CHALLENGE.size, _unpack_challenge),
    FrameType.PROOF: Frame(_PROOF.size, _PROOF.size, ProofReceived),
}

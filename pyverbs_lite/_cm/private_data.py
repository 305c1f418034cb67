"""The handshake's HELLO and REFUSE as private data of the connection manager, which has little room.

Four bytes stand for the preface, and the frame follows without its header. What is read becomes the stream that
``wire.Channel`` judges, so a peer's values are believed here no more than there.
"""

from __future__ import annotations

import struct

from .._control.frames import MAGIC, MAX_REASON, FrameType, RefuseCode, Refused, frame_header, preface, unpack_refusal
from ..errors import PeerProtocolError

__all__ = ["pack_hello", "pack_refusal", "read_hello", "read_refusal"]

#: ``HELLO`` or ``REFUSE``, then version and min_version, of which both have room for 255.
_HEAD = struct.Struct("!2sBB")
_HELLO, _REFUSE = MAGIC[:1] + b"H", MAGIC[:1] + b"R"
_PREFACE = struct.Struct("!8sHH")
_FRAME_HEADER = 8
HELLO_LENGTH = 52
#: What a refusal has room for on InfiniBand and RoCE.
_REFUSAL_ROOM = 148


def pack_hello(stream: bytes) -> bytes:
    """Return the private data for what a channel says first, its preface and its HELLO: 56 bytes."""
    _, version, min_version = _PREFACE.unpack_from(stream)
    return _HEAD.pack(_HELLO, version, min_version) + stream[_PREFACE.size + _FRAME_HEADER :]


def read_hello(data: bytes) -> bytes:
    """Return the stream that private data stand for; what follows the record is filling.

    Raises:
        PeerProtocolError: they are not this protocol's; the text shows how they begin.
    """
    if len(data) < _HEAD.size + HELLO_LENGTH or data[:2] != _HELLO:
        begin = data[:16].rstrip(b"\0")
        what = f"begin with {begin!r}" if begin else "are empty"
        raise PeerProtocolError(
            f"the peer's private data {what}, and not with this protocol's record: is another program at the port?"
        )
    _, version, min_version = _HEAD.unpack_from(data)
    payload = data[_HEAD.size : _HEAD.size + HELLO_LENGTH]
    return preface(version, min_version) + frame_header(FrameType.HELLO, len(payload)) + payload


def pack_refusal(code: RefuseCode, reason: str) -> bytes:
    """Return the private data that say why a side does not go on; a long reason is cut between characters."""
    head = _HEAD.pack(_REFUSE, 0, 0)[:2] + struct.pack("!H", code)
    return head + reason.encode()[: min(MAX_REASON, _REFUSAL_ROOM - len(head))].decode(errors="ignore").encode()


def read_refusal(data: bytes) -> Refused | None:
    """Return what private data say of a refusal; None if they are not this protocol's."""
    return unpack_refusal(data[2:].rstrip(b"\0").ljust(2, b"\0")) if data[:2] == _REFUSE else None

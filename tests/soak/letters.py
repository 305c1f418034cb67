"""What the peers and the server say to each other, and what every byte of it must be."""

from __future__ import annotations

import random
import struct
import zlib
from enum import IntEnum, auto
from typing import NamedTuple

__all__ = ["Letter", "Said", "Wrong", "pattern"]

_PRIME = 65521
_BLOCK = random.Random("the same in every process").randbytes(_PRIME + (64 << 10))
#: Kind, wanted size of the reply, sequence number, how many before it may be missing, argument, checksum of the rest.
_HEADER = struct.Struct("<BxHIIQI")


class Wrong(AssertionError):
    """A byte, a count or an order is not what it must be."""


class Said(IntEnum):
    """What a letter asks for; all but a note are answered."""

    HELLO = auto()
    NOTE = auto()
    ECHO = auto()
    CHECK = auto()
    ADD = auto()
    CHECK_ADDED = auto()
    DROP = auto()
    PULL = auto()
    PUSH = auto()
    FIN = auto()
    CLOSE = auto()
    ANSWER = auto()


def pattern(key: int, size: int) -> bytes:
    """Return the bytes that belong to a key."""
    start = (key * 0x9E3779B97F4A7C15 >> 16) % _PRIME
    return _BLOCK[start : start + size]


class Letter(NamedTuple):
    """One message."""

    kind: Said
    seq: int
    uncertain: int = 0
    argument: int = 0
    reply: int = 0
    body: bytes = b""

    def pack(self) -> bytes:
        """Lay it out."""
        crc = zlib.crc32(self.body)
        return _HEADER.pack(self.kind, self.reply, self.seq, self.uncertain, self.argument, crc) + self.body

    @classmethod
    def read(cls, data: bytes) -> Letter:
        """Read one.

        Raises:
            Wrong: it is none, or was changed on its way.
        """
        if len(data) < _HEADER.size:
            raise Wrong(f"a message of {len(data)} bytes has no header: {data!r}")
        kind, reply, seq, uncertain, argument, crc = _HEADER.unpack_from(data)
        body = bytes(data[_HEADER.size :])
        if zlib.crc32(body) != crc:
            raise Wrong(f"message {seq} has a wrong checksum")
        return cls(Said(kind), seq, uncertain, argument, reply, body)

    def expect(self, key: int, size: int | None = None) -> None:
        """Check its body against the pattern.

        Raises:
            Wrong: it is another.
        """
        if (size is not None and len(self.body) != size) or self.body != pattern(key, len(self.body)):
            raise Wrong(f"the body of {self.kind.name} {self.seq} ({len(self.body)} bytes) is not that of key {key:#x}")

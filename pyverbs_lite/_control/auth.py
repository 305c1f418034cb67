"""The proof that both sides know one key, which never travels, and the seal on every frame that follows.

Bytes in, bytes out; the layout and the order are in ``docs/handshake.md``. Each proof covers its sender's role and all
that both sides had said by then, so it is good for one side of one connection only: neither sent back, nor replayed,
nor carried over into another conversation does it help anybody.
"""

from __future__ import annotations

import os
from enum import IntEnum

from ..errors import AuthenticationError

__all__ = ["MAC_SIZE", "MECHANISM", "NONCE_SIZE", "SEAL_SIZE", "Auth", "Role", "key_bytes"]

#: HMAC with SHA-256; another would have another number.
MECHANISM = 1
NONCE_SIZE = 32
MAC_SIZE = 32
#: Of the seal of one frame: half a MAC, which leaves 2^-128 to luck.
SEAL_SIZE = 16
_PROOF, _SEAL = b"pyverbs_lite proof", b"pyverbs_lite seal"


class Role(IntEnum):
    """Which side of a connection one is."""

    CONNECTS = 1
    ACCEPTS = 2

    @property
    def other(self) -> Role:
        """The peer's."""
        return Role.ACCEPTS if self is Role.CONNECTS else Role.CONNECTS


def key_bytes(key: bytes | bytearray | str) -> bytes:
    """Return a key as bytes; text is taken as UTF-8.

    Raises:
        TypeError: it is neither; the text does not show it.
        ValueError: it is empty, or text that UTF-8 cannot carry.
    """
    if not isinstance(key, bytes | bytearray | str):
        raise TypeError(f"authkey must be bytes or a str, not a {type(key).__name__}")
    try:
        raw = key.encode() if isinstance(key, str) else bytes(key)
    except UnicodeEncodeError:
        raise ValueError("authkey must be text that UTF-8 can carry") from None
    if not raw:
        raise ValueError("authkey is empty, which would let everybody in; make one with secrets.token_bytes(32)")
    return raw


def _hmac(key: bytes, data: bytes) -> bytes:
    from hmac import digest

    return digest(key, data, "sha256")


def _same(one: bytes, other: bytes) -> bool:
    """Compare in a time that tells nothing."""
    from hmac import compare_digest

    return compare_digest(one, other)


class Auth:
    """One side's part in the proof, for one connection.

    Args:
        key: what both sides know.
        role: which side this one is.
        hello_first: whether the records are swapped before the proofs, which then cover them; else they follow, sealed.
    """

    def __init__(self, key: bytes, role: Role, *, hello_first: bool = False) -> None:
        from hashlib import sha256  # OpenSSL takes long to import, and only who has a key needs it

        self.role = role
        self.hello_first = hello_first
        self.nonce = os.urandom(NONCE_SIZE)
        self._key = key
        self._spoken = {role: sha256(), role.other: sha256()}
        self._agreed: bytes | None = None  # what both had said before the first proof
        self._seals: dict[Role, _Seals] = {}

    def note(self, speaker: Role, data: bytes | bytearray) -> None:
        """Take in what a side says before its proof."""
        self._spoken[speaker].update(data)

    def check_challenge(self, role: int, nonce: bytes) -> None:
        """Judge the peer's challenge.

        Raises:
            AuthenticationError: it is this side's own, or that of another on this side.
        """
        if nonce == self.nonce or role != self.role.other:
            raise AuthenticationError(
                "the peer challenged as if it were on this side: is it an echo service, or somebody who sends back what"
                " was said to another?"
            )

    def proof(self) -> bytes:
        """Return this side's proof; after it has been sent, ``seal``."""
        return self._proof(self.role)

    def check_proof(self, mac: bytes) -> None:
        """Judge the peer's proof; what it says next is sealed.

        Raises:
            AuthenticationError: it does not know the key.
        """
        if not _same(mac, self._proof(self.role.other)):
            raise AuthenticationError(
                "the two sides have different keys: check that authkey= is the same bytes on both (a str is taken as"
                " UTF-8; mind a line end that was read from a file)"
            )
        self._begin_seals(self.role.other)

    def proved(self) -> None:
        """Take note that this side's proof was sent: what it says next is sealed."""
        self._begin_seals(self.role)

    def sealed(self, speaker: Role) -> bool:
        """Say whether a side's frames have seals by now."""
        return speaker in self._seals

    def seal(self, frame: bytes) -> bytes:
        """Return the seal of the next frame of this side's, if it has one by now."""
        return self._seals[self.role].next(frame) if self.role in self._seals else b""

    def check_seal(self, frame: bytes, seal: bytes) -> None:
        """Judge the seal of the peer's next frame.

        Raises:
            AuthenticationError: the frame is not what the peer sent, or not in its place.
        """
        if not _same(seal, self._seals[self.role.other].next(frame)):
            raise AuthenticationError(
                "what the peer said was changed on its way: the seal does not fit, so somebody between the two sides"
                " alters the control channel"
            )

    def _proof(self, role: Role) -> bytes:
        return self._mac(_PROOF, role)

    def _begin_seals(self, role: Role) -> None:
        self._seals[role] = _Seals(self._mac(_SEAL, role))

    def _mac(self, purpose: bytes, role: Role) -> bytes:
        if self._agreed is None:
            self._agreed = b"".join(self._spoken[one].digest() for one in Role)
        return _hmac(self._key, b"%s %d %s" % (purpose, role, self._agreed))


class _Seals:
    """The seals of one direction: each covers its frame and how many came before it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, frame: bytes) -> bytes:
        count, self._count = self._count, self._count + 1
        return _hmac(self._key, count.to_bytes(8, "big") + frame)[:SEAL_SIZE]

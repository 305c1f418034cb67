"""TLS for the control channel, as bytes in and bytes out; whoever has the socket moves them."""

from __future__ import annotations

import ssl

from ..errors import AuthenticationError, HandshakeError, PeerClosedError, PeerProtocolError

__all__ = ["Tls"]

_CHUNK = 65536
#: In the name of an alert: it is about who this side is.
_ABOUT_IDENTITY = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "PSK")
#: What OpenSSL says of bytes that are no TLS at all.
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
#: What it does not tell the peer then: alert, fatal, protocol_version. So that may see why.
_FAREWELL = bytes.fromhex("15 0301 0002 02 46")


class Tls:
    """One side of a TLS session.

    Args:
        context: what is to be believed, and shown.
        server_side: whether this side accepts.
        server_hostname: what the peer's certificate must be for, where ``context`` checks that.

    Attributes:
        ended: whether the peer has ended the session, or the connection.

    Raises:
        TypeError: ``context`` is no ``ssl.SSLContext``.
        ValueError: it is made for the other side only, or checks a name and there is none.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool, server_hostname: str | None = None) -> None:
        if not isinstance(context, ssl.SSLContext):
            raise TypeError(f"ssl_context must be an ssl.SSLContext, not {context!r}")
        wrong = ssl.PROTOCOL_TLS_CLIENT if server_side else ssl.PROTOCOL_TLS_SERVER
        if context.protocol == wrong:
            does, purpose = ("accepts", "CLIENT_AUTH") if server_side else ("connects", "SERVER_AUTH")
            raise ValueError(
                f"ssl_context is made for the other side: for one that {does} use"
                f" ssl.create_default_context(ssl.Purpose.{purpose})"
            )
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            self._object = context.wrap_bio(
                self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
            )
        except ValueError as error:
            raise ValueError(f"server_hostname {server_hostname!r} is no name for TLS: {error}") from error
        self._plain = bytearray()  # what waits until the session is there
        self._established = False
        self._farewell = b""
        self._failed = False
        self.ended = False

    @property
    def waiting(self) -> bool:
        """Whether something cannot be sent before the peer has said more."""
        return bool(self._plain) and not self._failed

    def send(self, data: bytes) -> None:
        """Take what is to be said; ``data_to_send`` has what became of it.

        Raises:
            As ``receive``.
        """
        self._plain += data
        if not self._failed:
            self._advance()

    def data_to_send(self) -> bytes:
        """Return the bytes for the peer, and forget them; after an error too, for they say why."""
        data, self._farewell = self._outgoing.read() or self._farewell, b""
        return data

    def receive(self, data: bytes) -> bytes:
        """Return what the bytes of the peer's come to; none are the end.

        Raises:
            AuthenticationError: one side does not trust the other's certificate, or misses it.
            PeerProtocolError: the peer does not speak TLS.
            PeerClosedError: it left before the session was there.
            HandshakeError: the two have no TLS version or cipher in common, or what came was changed on its way.
        """
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        self._advance()
        plain = bytearray()
        try:
            while self._established and not self.ended:
                chunk = self._object.read(_CHUNK)
                plain += chunk
                self.ended = not chunk
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self.ended = True
        except ssl.SSLError as error:
            raise _meaning(error, self._established) from error
        return bytes(plain)

    def _advance(self) -> None:
        try:
            if not self._established:
                self._object.do_handshake()
                self._established = True
            while self._plain:
                del self._plain[: self._object.write(self._plain)]
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError) as error:
            raise PeerClosedError(
                "the peer closed the connection within the TLS handshake: is ssl_context= given on both sides?"
            ) from error
        except ssl.SSLError as error:
            why, self._failed = _meaning(error, self._established), True
            self._farewell = _FAREWELL if isinstance(why, PeerProtocolError) else b""
            raise why from error


def _meaning(error: ssl.SSLError, established: bool) -> HandshakeError:
    """Return the exception that says what an error of OpenSSL's means, before or after the session is there."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(
            f"the peer's certificate is not to be trusted: {error.verify_message}; check the authorities of"
            " ssl_context= (load_verify_locations), and server_hostname="
        )
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return AuthenticationError("the peer showed no certificate, and ssl_context= demands one (load_cert_chain)")
    if "ALERT" in reason and any(word in reason for word in _ABOUT_IDENTITY):
        return AuthenticationError(f"the peer does not trust this side's certificate: {reason}")
    if not established and any(word in reason for word in _NO_TLS):
        return PeerProtocolError(f"the peer does not speak TLS: is ssl_context= given on both sides? ({reason})")
    if "ALERT_HANDSHAKE_FAILURE" in reason:
        return HandshakeError(f"TLS with the peer failed: no cipher is common, or it demands a certificate ({reason})")
    return HandshakeError(f"TLS with the peer failed: {error}")

"""The control channel of a connection over librdmacm: its bytes travel between the messages."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from .._base.args import Deadline
from .._control.base import ControlBase
from .._control.framed import FramedEngine
from .._control.tcp import address_text
from ..cmid import CMID
from ..enums.cm import CMEventType
from ..errors import (
    ClosedError,
    HandshakeError,
    HandshakeTimeout,
    PeerClosedError,
    QueueFullError,
    VerbsError,
    WaitTimeout,
)
from .private_data import pack_hello, read_hello

__all__ = ["CONTROL_CHUNK", "CMControl"]

#: The most control bytes that one message carries; a receive takes at least as many.
CONTROL_CHUNK = 512
#: How long a look waits for another thread that may just be entering what has arrived.
_GLANCE = 0.005
_LATE = (WaitTimeout, QueueFullError)


class CMControl(ControlBase):
    """The channel of a ``CMID``: its HELLO is private data, all that follows stands in messages of the engine.

    Owns the ``CMID``. The descriptor is that of its events: what the peer says shows at the engine, and there it is
    noticed; that the peer is gone shows here.
    """

    def __init__(self, cmid: CMID) -> None:
        super().__init__()
        self.id = cmid
        self._fd = cmid.channel.fileno()
        self._engine: FramedEngine | None = None
        self._sending = threading.RLock()
        self._gone = False
        self._half_sent = False  # an interrupt came between posting bytes and taking note of it
        local, peer = cmid.local_address, cmid.peer_address
        self.local_address = address_text(local) if local else ""
        self.peer = f"{address_text(peer)} port {peer[1]}" if peer else "the peer"

    def attach(self, engine: FramedEngine) -> None:
        """Let the bytes travel with the messages of an engine from now on."""
        self._engine = engine
        engine.listen_to(self._fd)

    def hello_data(self) -> bytes:
        """Return the private data that say what the channel says first."""
        with self.lock:
            return pack_hello(self.channel.data_to_send())

    def take_hello(self, private_data: bytes) -> None:
        """Take in the peer's private data.

        Raises:
            PeerProtocolError: they are not this protocol's, or break its rules.
        """
        with self.lock:
            self._events.extend(self.channel.receive_data(read_hello(private_data)))
            if self.channel.error is not None:
                raise self.channel.error

    def fileno(self) -> int:
        """Return the descriptor of the events; -1 once it is closed."""
        return -1 if self.id.closed else self._fd

    def flush(self, deadline: Deadline) -> None:
        """Send what the channel has queued, in pieces; as ``ControlBase.flush``."""
        engine = self._engine
        if engine is None:
            raise ClosedError(f"the control connection with {self.peer} is closed")
        if not self._sending.acquire(timeout=min(deadline.left, threading.TIMEOUT_MAX)):
            raise self._late(deadline)
        try:
            while True:
                with self.lock:
                    self._check_whole()
                    if self._half_sent:
                        raise PeerClosedError(f"what {self.peer} was to be told was interrupted within a message")
                    self._unsent += self.channel.data_to_send()
                    chunk = bytes(self._unsent[:CONTROL_CHUNK])
                if not chunk:
                    return
                self._send(engine, chunk, deadline)
        finally:
            self._sending.release()

    def _send(self, engine: FramedEngine, chunk: bytes, deadline: Deadline) -> None:
        try:
            engine.await_control_credit(deadline)
            self._half_sent = True
            try:
                op = engine.start_control(chunk, deadline)
            except VerbsError:  # nothing was posted
                self._half_sent = False
                raise
            del self._unsent[: len(chunk)]
            self._half_sent = False
            engine.finish(op, "control", deadline)
        except _LATE as error:
            raise self._late(deadline) from error
        except HandshakeError:
            raise
        except VerbsError as error:
            self._unsent.clear()
            if said := self._last_word():
                raise said from error
            raise PeerClosedError(f"{self.peer} cannot be told any more: {error}") from error

    def _late(self, deadline: Deadline) -> HandshakeTimeout:
        return HandshakeTimeout(f"{self.peer} did not read what it was sent within {deadline.seconds} s")

    def _read(self) -> bytes | None:
        with self.lock:
            engine = self._engine
            if engine is not None and (data := self._take(engine)):
                return data
            if not self._gone and self._look_for_the_end():
                self._gone = True
                # What the peer said before it left was there before the news that it has.
                if engine is not None and (data := self._take(engine)):
                    return data
            if self._gone or (engine is not None and engine.left):
                self._ended = True
                return b""
            return None

    @staticmethod
    def _take(engine: FramedEngine) -> bytes:
        engine.wait_control(Deadline(_GLANCE if engine.polled_elsewhere else 0.0))
        return b"".join(engine.take_control())

    def _look_for_the_end(self) -> bool:
        """Take the events that there are; say whether the connection has ended."""
        if self.id.closed:
            return True
        with suppress(WaitTimeout):
            while True:
                event = self.id.get_event(0)
                if event.event == CMEventType.DISCONNECTED:
                    return True
                event.raise_for_error("rdma_cm")
        return False

    def _await_input(self, deadline: Deadline) -> bool:
        while not deadline.expired:
            if self._engine is None or self.id.closed:
                raise ClosedError(f"the control connection with {self.peer} is closed")
            if self._engine.wait_control(deadline):
                return True
        return False

    def close(self, linger: float = 0.0) -> None:
        """Disconnect and destroy the ``CMID``; safe to call again."""
        with self.lock:
            if not self.id.closed:
                with suppress(VerbsError):
                    self.id.disconnect()
                self.id.close()

    def drop(self) -> None:
        """Let go of the descriptor in a forked child; the connection belongs to the parent."""
        with suppress(OSError):
            os.close(self._fd)

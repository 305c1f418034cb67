"""The control channel of a connection, whatever its bytes travel over: events in, and the errors they mean."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

from .._base.args import Deadline
from ..errors import AuthenticationError, HandshakeError, HandshakeTimeout, PeerClosedError
from ..wire import BufferAdded, BufferWithdrawn, Channel, DomainNamed, Event, GoodbyeReceived, RefuseCode, Refused

__all__ = ["LAST_WORDS", "ControlBase", "News", "refusal"]

_E = TypeVar("_E", bound=Event)
#: How much is read in one go, so that a peer that never stops talking cannot keep a caller beyond its deadline.
MOST_CHUNKS = 16
#: After these the peer says nothing more.
LAST_WORDS = (GoodbyeReceived, Refused)


#: What is told of memory.
News: TypeAlias = DomainNamed | BufferAdded | BufferWithdrawn


class ControlBase(ABC):
    """A ``wire.Channel`` and what carries its bytes.

    Threads may share it: ``lock`` is held while the channel or the carrier is touched, and never during a wait.

    Attributes:
        local_address: this side's IP address, scope included.
        peer: who is on the other side, for the texts of errors.
    """

    local_address: str
    peer: str

    def __init__(self) -> None:
        self.channel = Channel()
        # Reentrant, for a signal handler may close what it interrupted.
        self.lock: AbstractContextManager[object] = threading.RLock()
        self._events: list[Event] = []  # never many, and an empty deque takes ten times the memory
        self._unsent = bytearray()
        self._torn = False  # an interrupt came between moving bytes and taking note of it
        self._ended = False
        self._more = True  # the last read may have left something

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that is readable when the peer has said something, or is gone; -1 once it is closed."""

    @abstractmethod
    def flush(self, deadline: Deadline) -> None:
        """Send what the channel has queued; what could not be sent in time goes with the next flush.

        Raises:
            PeerClosedError: the peer has closed the connection.
            HandshakeTimeout: the peer does not read.
            ClosedError: another thread closed it.
        """

    def send_now(self) -> bool:
        """Send what can be sent without waiting; say whether that is all, so that ``flush`` has nothing left to do."""
        return False

    @abstractmethod
    def close(self, linger: float = 0.0) -> None:
        """Close it; safe to call again.

        Args:
            linger: seconds to wait for the peer to have read what was sent.
        """

    @abstractmethod
    def drop(self) -> None:
        """Let go of the descriptor in a forked child; everything else belongs to the parent."""

    @abstractmethod
    def _read(self) -> bytes | None:
        """Return what has arrived, empty at the end, or None if nothing has."""

    @abstractmethod
    def _await_input(self, deadline: Deadline) -> bool:
        """Wait until there may be something to read; False once the deadline has passed."""

    def receive_now(self) -> list[Event]:
        """Return the events of what has arrived, without waiting; an error waits until what came before it was taken.

        Raises:
            PeerProtocolError, PeerClosedError: what the peer sent, or that it went away.
        """
        with self.lock:
            try:
                self._events.extend(self._receive())
            except HandshakeError:
                if not self._events:
                    raise
            events = list(self._events)
            self._events.clear()
            return events

    def read_some(self) -> None:
        """Take in one piece of what has arrived, without waiting; ``take`` has the events.

        Raises:
            PeerProtocolError, PeerClosedError: what the peer sent, or that it went away.
        """
        with self.lock:
            self._events.extend(self._receive(1))

    def _receive(self, chunks: int = MOST_CHUNKS) -> list[Event]:
        events: list[Event] = []
        with self.lock:
            self._check_whole()
            for _ in range(chunks):
                known = events or self._events
                if self._ended or self.channel.error is not None or (known and isinstance(known[-1], LAST_WORDS)):
                    break
                self._torn = True
                data = self._read()
                try:
                    if data is not None:
                        events += self.channel.receive_data(data) if data else self.channel.receive_eof()
                except HandshakeError:
                    pass  # the channel keeps it, for after the events before it
                self._torn = False
                if data is None or not self._more:
                    break
            if not events and self.channel.error is not None:
                raise self.channel.error
            return events

    @property
    def has_news(self) -> bool:
        """Whether something was read that nobody has taken: events, or an error."""
        return bool(self._events) or self.channel.error is not None

    def _last_word(self) -> HandshakeError | None:
        """Return why the peer has refused, where nothing can be sent to it: it may have left, and said why before."""
        try:
            self._events.extend(self._receive())
        except AuthenticationError as error:
            return error
        except HandshakeError:
            pass
        last = self._events[-1] if self._events else None
        return refusal(self.peer, last) if isinstance(last, Refused) else None

    def _check_whole(self) -> None:
        if self._torn:
            raise PeerClosedError(f"the control connection with {self.peer} was interrupted within a message")

    def expect(self, kind: type[_E], deadline: Deadline, note: Callable[[News], None]) -> _E:
        """Wait for an event of one kind; news of buffers on the way go to ``note``.

        Raises:
            HandshakeTimeout: it did not come in time.
            HandshakeError: the peer refused; the text says why.
            PeerProtocolError, PeerClosedError: what the peer sent instead, or that it went away.
        """
        while (event := self.take(kind, note)) is None:
            if not self._await_input(deadline):
                name = kind.__name__.removesuffix("Received").upper()
                raise HandshakeTimeout(
                    f"{self.peer} did not get through the handshake within {deadline.seconds} s (waiting for its"
                    f" {name})"
                )
            self._events.extend(self._receive())
        return event

    def take(self, kind: type[_E], note: Callable[[News], None]) -> _E | None:
        """Return an event of one kind, if it is next among those that have arrived; else as ``expect``."""
        while self._events:
            event = self._events.pop(0)
            if isinstance(event, kind):
                return event
            if isinstance(event, Refused):
                raise refusal(self.peer, event)
            if not isinstance(event, (DomainNamed, BufferAdded, BufferWithdrawn)):
                raise PeerClosedError(f"{self.peer} closed in the middle of the handshake")
            note(event)
        return None

    def has(self, kind: type[Event]) -> bool:
        """Say whether such an event was read and not taken yet."""
        return any(isinstance(event, kind) for event in self._events)


def refusal(peer: str, event: Refused) -> HandshakeError:
    """Make the exception for a peer's refusal."""
    cls = AuthenticationError if event.code == RefuseCode.AUTHENTICATION else HandshakeError
    error = cls(f"{peer} refused the connection: {event.reason}")
    error.code = event.code
    return error

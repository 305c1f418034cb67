"""Who may come in: one thread that accepts, and does the waiting of every handshake.

A peer that says nothing, or little, or too much, costs a place in a list and no thread. What takes this side's own
time, which is making a QP and connecting it, runs in a few worker threads. Each handshake has one deadline.
"""

from __future__ import annotations

import errno
import functools
import heapq
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from .._base.args import Deadline
from .._connection.establish import LAST_WORD, Steps, reason_for
from .._connection.link import Link
from .._connection.settings import Settings
from .._control.control import CHUNK, Control, Peer
from .._control.tcp import own_address, tune
from ..errors import (
    AuthenticationError,
    ClosedError,
    HandshakeError,
    HandshakeTimeout,
    PeerClosedError,
    StateError,
    VerbsError,
)
from ..wire import Event, HelloReceived, RefuseCode

__all__ = ["Gate", "Guest", "House"]

#: How much of what a peer says is looked at in one go, so that one that never stops leaves time for the others.
_CHUNK = 4096
#: How many are accepted in one go.
_ACCEPTS = 64
#: How long to accept nobody where this process has no descriptor left, in seconds.
_PAUSE = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_INPUT = select.EPOLLIN | select.EPOLLRDHUP


class Guest:
    """A peer on its way in.

    Attributes:
        control, peer: its control connection, and what is known of it.
        steps: the handshake.
        wanted: the event that this waits for, None while a worker has it.
        placed: whether it has one of the places for connections.
        leaving: whether it was turned away, and has only to read why.
    """

    def __init__(self, control: Control, deadline: Deadline) -> None:
        self.control = control
        self.peer = Peer(control)
        self.deadline = deadline
        self.steps: Steps
        self.wanted: type[Event] | None = None
        self.placed = self.leaving = False
        self.number = control.fileno()


class House(Protocol):
    """Whoever the gate lets peers in for. The methods are called in threads of the gate's, and must not wait."""

    def begin(self, guest: Guest) -> Steps:
        """Return the handshake with a peer."""

    def admit(self) -> bool:
        """Take a place for a connection, if there is one."""

    def vacate(self) -> None:
        """Give a place back that came to nothing."""

    def arrived(self, guest: Guest, link: Link) -> None:
        """Take over a connection, which has a place."""

    def failed(self, guest: Guest, error: BaseException, busy: bool) -> None:
        """Take note of a peer that did not get in; ``busy`` says that this was for want of a place."""

    @property
    def full(self) -> str:
        """Why there is no place."""


class Gate:
    """Accepts and runs handshakes until ``stop``.

    Args:
        sock: listens; owned from now on.
        house: who the peers come to.
        settings: how a control connection is made, and how long one handshake may take.
        workers: how many QPs are made at a time.
        waiting: how many may have connected and said nothing yet; one more, and the first of them has to go.
    """

    def __init__(self, sock: socket.socket, house: House, settings: Settings, workers: int, waiting: int) -> None:
        self._socket, self._house, self._settings, self._most_waiting = sock, house, settings, waiting
        self._timeout = settings.timeout
        self._guests: dict[int, Guest] = {}
        self._unread: dict[int, Control] = {}  # of connections: what they were told and do not read
        self._alarms: list[tuple[float, int, Guest | None]] = []
        self._serials = itertools.count()
        self._inbox: deque[Callable[[], None]] = deque()  # what other threads want done in this one
        self._busy = 0  # how many guests workers have
        self._stopping: Deadline | None = None
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Around the wake descriptor's end; reentrant, for a signal handler may stop what it interrupted.
        self._lock = threading.RLock()
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="pyverbs_lite handshake")
        self._thread = threading.Thread(target=self._run, name="pyverbs_lite gate", daemon=True)
        sock.setblocking(False)
        tune(sock, settings.keep_alive)
        self._own_address = own_address(sock)
        self._epoll.register(sock, select.EPOLLIN)
        self._epoll.register(self._wake_fd, select.EPOLLIN)

    def start(self) -> None:
        """Begin to accept.

        Raises:
            RuntimeError: no thread can be had.
        """
        self._workers.submit(int)  # so that there is a worker, whatever becomes of other threads
        self._thread.start()

    def flush_later(self, control: Control) -> None:
        """Send what a connection's peer has not read yet, whenever it does; from any thread."""
        self._call(lambda: self._watch_output(control))

    def stop(self, wait: bool = True) -> None:
        """Accept nobody any more, and turn away who is on the way in; safe to call again, from any thread."""
        if not self._thread.ident:  # it was never started
            self._workers.shutdown(wait=False)
            self._end()
            return
        self._call(self._begin_to_stop)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def drop(self) -> None:
        """Let go of the listening socket in a forked child; everything else belongs to the parent."""
        self._socket.close()

    # ------------------------------------------------------------ the thread

    def _call(self, what: Callable[[], None]) -> None:
        self._inbox.append(what)
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while self._stopping is None or self._guests or self._busy:
                for fd, events in self._epoll.poll(self._until_alarm()):
                    self._handle(fd, events)
                while self._inbox:
                    self._inbox.popleft()()
                self._sound_alarms()
        finally:
            self._workers.shutdown()
            self._end()

    def _handle(self, fd: int, events: int) -> None:
        if fd == self._wake_fd:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
        elif fd == self._socket.fileno():
            self._accept()
        elif (guest := self._guests.get(fd)) is not None:
            self._attend(guest)
        elif (control := self._unread.get(fd)) is not None:
            self._watch_output(control)

    def _end(self) -> None:
        self._socket.close()
        with self._lock:
            fd, self._wake_fd = self._wake_fd, -1
        if fd >= 0:
            os.close(fd)
            self._epoll.close()

    def _begin_to_stop(self) -> None:
        if self._stopping is None:
            self._stopping = Deadline(None)
            self._forget(self._socket.fileno())
            self._socket.close()
            for guest in tuple(self._guests.values()):
                if guest.wanted is not None:  # others are with a worker, or have been turned away
                    self._turn_away(guest, ClosedError("the server is stopping"), RefuseCode.BUSY)

    # ------------------------------------------------------------ time

    def _alarm(self, seconds: float, guest: Guest | None) -> None:
        if len(self._alarms) > 4 * len(self._guests) + 64:  # most are for guests that have left
            self._alarms = [alarm for alarm in self._alarms if alarm[2] is None or self._here(alarm[2])]
            heapq.heapify(self._alarms)
        if seconds != float("inf"):
            heapq.heappush(self._alarms, (time.monotonic() + seconds, next(self._serials), guest))

    def _until_alarm(self) -> float | None:
        return max(0.0, self._alarms[0][0] - time.monotonic()) + 1e-3 if self._alarms else None

    def _sound_alarms(self) -> None:
        while self._alarms and self._alarms[0][0] <= time.monotonic():
            guest = heapq.heappop(self._alarms)[2]
            if guest is None:
                if self._stopping is None:
                    self._epoll.modify(self._socket, select.EPOLLIN)
            elif self._here(guest):
                if not guest.deadline.expired:
                    self._alarm(guest.deadline.left, guest)
                elif guest.leaving:
                    self._see_off(guest)
                elif guest.wanted is not None:
                    waits = guest.wanted.__name__.removesuffix("Received").upper()
                    self._turn_away(
                        guest,
                        HandshakeTimeout(
                            f"{guest.control.peer} did not get through the handshake within {self._timeout} s (waiting"
                            f" for its {waits})"
                        ),
                    )

    # ------------------------------------------------------------ coming in

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                control = Control.accepted(self._socket, self._settings, self._own_address)
            except BlockingIOError:
                return
            except (ConnectionAbortedError, PeerClosedError):
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    continue  # a network error that was on its way to that one peer
                if not self._make_room():
                    self._epoll.modify(self._socket, 0)
                    self._alarm(_PAUSE, None)
                    return
                continue
            control.chunk = _CHUNK
            guest = Guest(control, Deadline(self._timeout))
            guest.steps = self._house.begin(guest)
            if len(self._guests) - self._busy >= self._most_waiting:
                self._make_room()
            self._guests[guest.number] = guest
            self._alarm(guest.deadline.left, guest)
            guest.wanted = next(guest.steps)  # it does nothing yet but say what it waits for
            self._epoll.register(guest.number, _INPUT)

    def _make_room(self) -> bool:
        """Turn away who has been waited for the longest; say whether there was one."""
        for guest in self._guests.values():
            if guest.leaving:
                self._see_off(guest)
                return True
            if guest.wanted is not None and not guest.placed:
                self._turn_away(guest, HandshakeTimeout(f"{guest.control.peer} said nothing while others came"))
                return True
        return False

    def _attend(self, guest: Guest) -> None:
        """Take what a peer has sent, and send what it has to read."""
        control = guest.control
        if guest.leaving:
            if control.discard_some():
                self._see_off(guest)
            return
        if guest.wanted is None:
            return
        try:
            if not control.send_now():
                self._epoll.modify(guest.number, _INPUT | select.EPOLLOUT)
            else:
                self._epoll.modify(guest.number, _INPUT)
            control.read_some()
            event = control.take(guest.wanted, guest.peer.note)
        except VerbsError as error:
            self._turn_away(guest, error)
            return
        if event is None:
            return
        if isinstance(event, HelloReceived):
            if not self._house.admit():
                self._turn_away(guest, HandshakeError(self._house.full), RefuseCode.BUSY)
                return
            guest.placed = True
            guest.wanted = None
            self._forget(guest.number)
            self._busy += 1
            self._submit(functools.partial(self._work, guest, event))
        else:
            self._step(guest, event)

    def _submit(self, what: Callable[[], object]) -> None:
        try:
            self._workers.submit(what)
        except RuntimeError as error:
            if "shutdown" in str(error):  # the interpreter ends
                raise
            # No thread can be had: a worker that is there takes it in its turn.

    def _work(self, guest: Guest, event: Event) -> None:
        """Make a QP and connect it, in a worker."""
        try:
            wanted = guest.steps.send(event)
        except BaseException as error:
            self._call(functools.partial(self._back, guest, error))
        else:
            self._call(functools.partial(self._back, guest, wanted))

    def _back(self, guest: Guest, outcome: type[Event] | BaseException) -> None:
        """Go on with a guest that a worker had."""
        self._busy -= 1
        self._epoll.register(guest.number, _INPUT)
        if isinstance(outcome, BaseException):
            self._turn_away(guest, outcome)
        elif self._stopping is not None:
            self._turn_away(guest, ClosedError("the server is stopping"), RefuseCode.BUSY)
        else:
            guest.wanted = outcome
            self._alarm(guest.deadline.left, guest)
            self._attend(guest)  # what it waits for may be there already

    def _step(self, guest: Guest, event: Event) -> None:
        """Go one short step on."""
        try:
            guest.wanted = guest.steps.send(event)
        except StopIteration as end:
            self._leave_list(guest)
            guest.control.chunk = CHUNK
            self._house.arrived(guest, end.value)
        except Exception as error:
            self._turn_away(guest, error)
        else:
            self._attend(guest)

    # ------------------------------------------------------------ going away

    def _turn_away(self, guest: Guest, error: BaseException, code: RefuseCode | None = None) -> None:
        """End a handshake; the peer is told why if it speaks this protocol and is there to hear it."""
        self._house.failed(guest, error, code == RefuseCode.BUSY)
        if guest.placed:
            guest.placed = False
            self._house.vacate()
        guest.wanted = None
        # A QP that was made has to go, which takes its time.
        self._submit(guest.steps.close)
        control = guest.control
        stranger = control.channel.version is None and not isinstance(error, AuthenticationError)  # which is TLS's then
        if stranger or isinstance(error, (PeerClosedError, HandshakeTimeout)):
            with suppress(VerbsError):
                if isinstance(error, HandshakeTimeout) and control.channel.version is not None:
                    control.channel.refuse(*reason_for(error))
                control.send_now()
            self._see_off(guest)
            return
        try:
            if control.channel.error is None:  # else the channel has queued its own refusal
                known, text = reason_for(error)
                control.channel.refuse(known if code is None else code, text)
            control.send_now()
            control.socket.shutdown(socket.SHUT_WR)
        except (VerbsError, StateError, OSError):
            self._see_off(guest)
            return
        self._epoll.modify(guest.number, _INPUT)  # to write is always possible now
        guest.leaving = True
        guest.deadline = Deadline(LAST_WORD)
        self._alarm(LAST_WORD, guest)

    def _see_off(self, guest: Guest) -> None:
        self._leave_list(guest)
        guest.control.close()

    def _here(self, guest: Guest) -> bool:
        return self._guests.get(guest.number) is guest

    def _leave_list(self, guest: Guest) -> None:
        if self._here(guest):
            del self._guests[guest.number]
            self._forget(guest.number)

    def _forget(self, fd: int) -> None:
        with suppress(OSError, ValueError):  # it is not there
            self._epoll.unregister(fd)

    # ------------------------------------------------------------ connections that do not read

    def _watch_output(self, control: Control) -> None:
        self._unread = {number: other for number, other in self._unread.items() if other.fileno() == number}
        with control.lock:  # so that nobody closes it meanwhile, and its number becomes another's
            fd = control.fileno()
            try:
                done = fd < 0 or control.send_now()
            except VerbsError:
                done = True
            if done:
                if self._unread.pop(fd, None) is not None:
                    self._forget(fd)
            elif fd not in self._unread and self._stopping is None:
                self._unread[fd] = control
                self._epoll.register(fd, select.EPOLLOUT)

"""What has arrived on a connection, and who gets it: messages are taken, lent, or go to those who asked before."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar, cast

from .._base.args import Deadline, check_seconds
from .._base.check import os_error
from ..enums import WCOpcode
from ..errors import StateError, WaitTimeout
from ..ffi import CData, ffi, lib
from .operation import Operation, repeated
from .work import Work

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Arrival", "Box", "Inbox", "ReceiveWork"]

_T = TypeVar("_T")
#: Bytes in front of every two-sided message.
_HEADER: int = lib.PVL_HEADER_BYTES
_recv, _recv_now, _recv_within = lib.pvl_recv, lib.pvl_recv_now, lib.pvl_recv_within
_MORE, _NOTHING, _LONG, _NOW = lib.PVL_MORE, lib.PVL_NOTHING, lib.PVL_LONG, lib.PVL_NOW
#: Bytes of the boxes of a connection, until a longer message comes; and from then on.
_ROOM, _MORE_ROOM = 256, 4096
#: The number of what was kept, in the box or the loan that it was taken by.
_KEPT = (1 << 64) - 1


class Arrival(NamedTuple):
    """What came in: a message, or the immediate of an RDMA write.

    Attributes:
        number: how many came before it on its connection.
        loan: its receive slot, where that is lent, as ``struct pvl_loan *``.
    """

    view: memoryview
    byte_len: int
    imm: int | None
    opcode: WCOpcode
    number: int
    loan: CData | None = None


def _number_of(arrival: Arrival) -> int:
    return arrival.number


def _of_view(plain: Callable[[bytes | memoryview], _T]) -> Callable[[Arrival], _T]:
    return lambda arrival: plain(arrival.view)


class Box:
    """Room for a short message, which C copies into it.

    Attributes:
        c: the ``struct pvl_box *``; C knows by it whose messages are meant.
        data: its bytes.
        live: what the engine has in flight, which the same call of C may have completed.
    """

    __slots__ = ("c", "data", "live")

    def __init__(self, engine: Engine, room: int) -> None:
        self.c: CData = ffi.new("struct pvl_box *", {"data": room})
        self.c.engine, self.c.room = engine._c, room
        self.data = ffi.buffer(self.c.data, room)
        self.live = engine._live


class _Receiving:
    """One who has asked for a message and does not wait for it; stands in for the ``Operation`` of a ``Work``."""

    def __init__(self, inbox: Inbox, make: Callable[[Arrival], Any]) -> None:
        self.inbox = inbox
        self.make = make
        self.loan: CData = ffi.new("struct pvl_loan *")
        self.arrival: Arrival | None = None
        self.value: Any = None
        self.cancelled = self.claimed = False
        self.notify: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        return self.arrival is not None or self.cancelled or self.inbox.over


class Inbox:
    """The messages of one engine.

    Whoever asked by ``start`` is served first, in the order of asking; ``receive`` takes what is left. A message that
    nobody made use of comes before all that arrived later. As long as there is one or the other, ``reserved`` in C says
    so, and the short way, on which a message is copied into a box by one call of C, takes nothing.

    Attributes:
        boxes: those that are not in use, and places for some: a list that becomes empty is allocated anew each time.
        left: the boxes and loans of messages that C has taken and nobody has made use of. They are entered here without
            a call, after which the next interrupt might come.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._c = engine._c
        self.boxes: list[Box | None] = [None] * 4
        self.left: list[Box | CData] = []
        self._room = _ROOM
        self._taking = threading.RLock()  # reentrant, for a signal handler may use the connection that it interrupted
        # Lists, for a deque takes ten times the memory while it is empty, and there may be thousands of connections.
        self._asked: list[_Receiving] = []
        self._returned: list[Arrival] = []  # taken out of the ring, and not made use of
        # Filled from wherever the garbage collector runs, so hardly anything else happens there.
        self._dropped: list[_Receiving] = []

    @property
    def waiting(self) -> int:
        """How many messages are there for ``receive``."""
        c = self._c
        return max(0, int(c.arrived - c.taken) + len(self.left) + len(self._returned) - len(self._asked))

    @property
    def over(self) -> bool:
        """Whether no message is there, and none will come."""
        engine = self._engine
        if engine.closed or engine.foreign:
            return True
        # Looked at before the messages are: the last of them and the last flush may come in between.
        ended = engine.failure is not None and (not self._c.recv_posted or engine._flush_limit.expired)
        return ended and self._c.arrived == self._c.taken and not (self.left or self._returned)

    # ------------------------------------------------------------ taking

    def receive(
        self,
        operation: str,
        timeout: float | None,
        plain: Callable[[bytes | memoryview], _T],
        take: Callable[[Arrival], _T] | None = None,
    ) -> _T:
        """Wait for a message, and return what is made of it; if that raises, the message stays the next one.

        What has arrived is taken without a look at the clock.

        Args:
            plain: makes it of the bytes of a message that has nothing else.
            take: makes it of any message; None: ``plain`` does.

        Raises:
            WaitTimeout: none came in time.
            VerbsError: the connection's failure, once all that had arrived was taken.
        """
        if timeout is not None and not (type(timeout) is float and timeout >= 0):
            timeout = check_seconds(timeout)  # or that refuses it, and without a look at the clock
        boxes, deadline = self.boxes, None
        try:
            box = boxes.pop() or self.box()
        except IndexError:
            box = self.box()
        try:
            rc = _recv(box.c) if timeout is None else _recv_now(box.c)
            if rc == _NOTHING and timeout:
                deadline = Deadline(timeout)
                rc = _recv_within(box.c, self._engine._slice(deadline))
            if rc >= 0:
                if box.live:  # C may have entered what others wait for, or nobody
                    self._engine._reap()
                made = plain(box.data[:rc])
                boxes += (box,)  # no call: after one an interrupt may come, and with it the message would be lost
                return made
            if rc == _MORE:
                arrival = self.opened(box)
                made = take(arrival) if take else plain(arrival.view)
                boxes += (box,)
                return made
        except BaseException:
            if box.c.length >= 0:
                self.left += (box,)
                self._c.reserved = 1
            raise
        return self.go_on(rc, box, operation, deadline or Deadline(timeout), take or _of_view(plain))

    def go_on(self, rc: int, box: Box, operation: str, deadline: Deadline, take: Callable[[Arrival], _T]) -> _T:
        """Finish what one call of C did not, whose result this was, and which has left the box empty."""
        # If it was over before the call began, that is not news.
        late = rc in (lib.PVL_TURN, lib.PVL_STOPPED) and self._engine.failure is not None
        if rc == _LONG:
            self._room = _MORE_ROOM  # the next ones are likely to be as long
        self.boxes.append(box if box.c.room == self._room else self.box())
        if box.live:
            self._engine._reap()
        return self._receive(operation, deadline, take, late, False)

    def lend(self, timeout: float | None, take: Callable[[Arrival], _T]) -> _T:
        """Wait for a message, and do not post its slot again: ``give_back`` does; else as ``receive``.

        Raises:
            StateError: as many are lent as can be.
        """
        deadline, engine, c = Deadline(timeout), self._engine, self._c
        late = engine.failure is not None
        if not (c.reserved or c.over or c.stopped):
            found = self._take(take, True)
            if found is not None:
                return found[0]
        return self._receive("recv", deadline, take, late, True)

    def box(self) -> Box:
        """Return one more box."""
        return Box(self._engine, self._room)

    def receive_now(self, make: Callable[[bytes], _T]) -> _T | None:
        """Return what ``make`` makes of a short message, if one is there that has nothing else; for an event loop.

        Where this is None there may be a message all the same, for ``receive``.
        """
        boxes = self.boxes
        try:
            box = boxes.pop() or self.box()
        except IndexError:
            box = self.box()
        try:
            rc = _recv_within(box.c, _NOW)
            made = make(box.data[:rc]) if rc >= 0 else None
            if rc != _MORE:
                boxes += (box,)
                return made
        except BaseException:
            if box.c.length >= 0:  # as in ``receive``
                self.left += (box,)
                self._c.reserved = 1
            raise
        self.left += (box,)
        self._c.reserved = 1
        return None

    def _receive(self, operation: str, deadline: Deadline, take: Callable[[Arrival], _T], late: bool, lend: bool) -> _T:
        engine = self._engine
        while True:
            if engine.closed or engine.foreign:
                engine.refuse_late(operation)
            over = self.over
            self.serve()
            taken = None
            try:
                with self._taking:
                    if not self._asked and self._returned:
                        first = self._returned[0]
                        made = take(first)
                        del self._returned[0]
                        taken = first
                        self._open()
                        return made
            except BaseException:
                if taken is not None:  # the interrupt came at the end of the block
                    self._returned[:0] = (taken,)
                    self._c.reserved = 1
                raise
            if not self._asked and self._c.arrived != self._c.taken:
                found = self._take(take, lend)
                if found is not None:
                    return found[0]
                continue  # another thread was faster
            if over:
                self._refuse(operation, late)
            if not engine._progress(lib.PVL_UNTIL_ARRIVAL, None, 0, deadline) and deadline.expired:
                raise WaitTimeout(f"no message arrived within {deadline.seconds} s", operation)

    def _refuse(self, operation: str, late: bool) -> NoReturn:
        engine = self._engine
        if engine.failure is not None and not late:
            raise repeated(engine.failure, operation)
        engine.refuse_late(operation)

    def _take(self, take: Callable[[Arrival], _T], lend: bool) -> tuple[_T] | None:
        loan = ffi.new("struct pvl_loan *")
        # To be unpacked and not called: after a call an interrupt may come, and with it the message would be lost.
        giving = map(lib.pvl_give_back, (self._c,), (loan,))
        try:
            rc = lib.pvl_lend(self._c, loan, lend)
            if self._engine._live:  # C may have entered what others wait for, or nobody
                self._engine._reap()
            if rc > 0:
                raise StateError(self._all_lent())
            if rc:
                return None
            made = take(self._lent(loan))
        except BaseException:
            if loan.lent:
                self.left += (loan,)
                self._c.reserved = 1
                self._keep_left()
            raise
        if not lend:
            (rc,) = giving
            if rc:
                self._engine.fail(os_error("ibv_post_recv", rc))  # the next one's problem: this message is good
        return (made,)

    def _lent(self, loan: CData) -> Arrival:
        raw = loan.arrival
        opcode = WCOpcode(raw.opcode)
        length = raw.byte_len if opcode == WCOpcode.RECV else 0  # an RDMA write went elsewhere
        view = self._engine._receives.view(raw.slot, _HEADER, length)
        return Arrival(view, raw.byte_len, raw.imm if raw.has_imm else None, opcode, loan.number, loan)

    def opened(self, box: Box) -> Arrival:
        """Look into a box whose message has more to it than its bytes."""
        c = box.c
        if c.error:
            self._engine.fail(os_error("ibv_post_recv", c.error))  # the next one's problem: this message is good
        imm = c.imm if c.has_imm else None
        return Arrival(memoryview(box.data[: c.length]), c.byte_len, imm, WCOpcode(c.opcode), c.number)

    def _keep_left(self) -> None:
        """Keep copies of the messages that were taken and not made use of: they are the next ones."""
        with self._taking:
            while self.left:
                self._keep(self.left[0])
                del self.left[0]

    def _keep(self, left: Box | CData) -> None:
        """Keep a copy of one; again is the same as once."""
        if isinstance(left, Box):
            if left.c.number != _KEPT:
                self._enter(self.opened(left), left.c)
        else:
            if left.number != _KEPT:
                self._enter(self._lent(left), left)
            self.give_back(left)

    def _enter(self, arrival: Arrival, taken: CData | None = None) -> None:
        kept = arrival._replace(view=memoryview(bytes(arrival.view)), loan=None)
        with self._taking:
            self._c.reserved = 1
            at = bisect.bisect(self._returned, kept.number, key=_number_of)
            if taken is None or taken.number != _KEPT:
                self._returned[at:at] = (kept,)  # from here on no call: after one an interrupt may come
                if taken is not None:
                    taken.number = _KEPT

    def _all_lent(self) -> str:
        if not self._c.lendable:
            return "no message can be lent with a recv_depth of 1, for the peer could send no more: raise recv_depth"
        return (
            f"all {self._c.lendable} messages that can be lent at a time (recv_depth less 1) are: release one first, or"
            " raise recv_depth; the message stays the next one"
        )

    def give_back(self, loan: CData) -> None:
        """Post a slot again that was lent, if it was not yet; safe to call from a finaliser."""
        engine = self._engine
        if not engine.foreign and (rc := lib.pvl_give_back(self._c, loan)):
            engine.fail(os_error("ibv_post_recv", rc))  # the next one's problem: this message is good

    # ------------------------------------------------------------ asking

    def start(self, make: Callable[[Arrival], _T]) -> ReceiveWork[_T]:
        """Ask for the next message that nobody has asked for; ``make`` copies it.

        Raises:
            VerbsError: the connection is over, and no message is there.
        """
        engine = self._engine
        if self.over:
            engine.refuse_late("start_recv")
        receiving = _Receiving(self, make)
        work = ReceiveWork(engine, cast("Operation", receiving), "recv", lambda _: cast("_T", receiving.value))
        weakref.finalize(work, self._drop, receiving).atexit = False
        with self._taking:
            self._c.reserved = 1
            self._asked.append(receiving)
        self.serve()
        return work

    def serve(self) -> None:
        """Give what is there to those who asked; an interrupt at any point is made good by the next call."""
        while self.left or self._dropped or self._asked:
            with self._taking:
                more, served = self._serve_one()
            if served is not None and (notify := served.notify) is not None:
                notify()
            if not more:
                return
        if self._c.reserved:
            with self._taking:
                self._open()

    def _open(self) -> None:
        """Open the short way again, if nobody comes first."""
        if not (self._asked or self._returned):
            self._c.reserved = 0
            if self.left or self._dropped:  # since then
                self._c.reserved = 1

    def _drop(self, receiving: _Receiving) -> None:
        """Note that nobody wants a result; called from wherever the garbage collector runs."""
        self._c.reserved = 1  # first, for after a call an interrupt may come
        self._dropped.append(receiving)
        self._c.reserved = 1  # and last, for another thread may have opened the short way in between

    def _serve_one(self) -> tuple[bool, _Receiving | None]:
        if self.left:
            self._keep_left()
            return True, None
        if self._dropped:
            self._let_go(self._dropped[0])
            del self._dropped[0]
            return True, None
        if not self._asked:
            return False, None
        first = self._asked[0]
        if first.arrival is None:
            if first.loan.lent:
                self._give(first, self._lent(first.loan))
            elif self._returned:
                self._give(first, self._returned[0])
            elif self._c.arrived == self._c.taken or lib.pvl_lend(self._c, first.loan, 0):
                return False, None
            else:
                self._give(first, self._lent(first.loan))
        # What was given is not there any more, also where an interrupt came in between.
        number = first.arrival.number if first.arrival is not None else 0
        self._returned[:] = [kept for kept in self._returned if kept.number != number]
        self.give_back(first.loan)
        del self._asked[0]
        return True, first

    def _give(self, receiving: _Receiving, arrival: Arrival) -> None:
        receiving.value = value = receiving.make(arrival)
        receiving.arrival = arrival._replace(view=memoryview(value), loan=None)

    def _let_go(self, receiving: _Receiving) -> None:
        """Whoever asked wants no message any more: one that was given and not made use of is the next one."""
        if receiving in self._asked:
            self._asked.remove(receiving)
        if receiving.claimed:
            return
        receiving.claimed = True
        if receiving.arrival is not None:
            self._returned[:] = [kept for kept in self._returned if kept.number != receiving.arrival.number]
            self._enter(receiving.arrival)
            self.give_back(receiving.loan)
        elif receiving.loan.lent:
            self._keep(receiving.loan)

    def cancel(self, receiving: _Receiving) -> bool:
        """Take back an asking that was not served."""
        self.serve()
        with self._taking:
            if receiving.arrival is None and receiving in self._asked:
                receiving.cancelled = True
                self._let_go(receiving)
        return receiving.cancelled

    def finish(self, receiving: _Receiving, operation: str, deadline: Deadline) -> None:
        """Wait until somebody who asked has a message.

        Raises:
            CancelledError: the asking was taken back.
            As ``receive``.
        """
        engine, late = self._engine, self._engine.failure is not None
        while True:
            over = self.over
            if not engine.foreign:
                self.serve()
            if receiving.arrival is not None:
                return
            if receiving.cancelled:
                from concurrent.futures import CancelledError  # seldom, and takes long to import

                raise CancelledError(operation)
            if over:
                self._refuse(operation, late)
            if not engine._progress(lib.PVL_UNTIL_ARRIVAL, None, 0, deadline) and deadline.expired:
                raise WaitTimeout(f"no message arrived within {deadline.seconds} s; it is still asked for", operation)

    @property
    def due(self) -> bool:
        """Whether one of those who asked has a callback."""
        return any(receiving.notify is not None for receiving in tuple(self._asked))

    def notify_ended(self) -> None:
        """Once no message will come: call back whoever asked."""
        for receiving in tuple(self._asked):
            if receiving.ended and (notify := receiving.notify) is not None:
                notify()


class ReceiveWork(Work[_T], Generic[_T]):
    """A message that was asked for; made by ``Connection.start_recv``.

    One that is dropped, or whose result nobody asked for, loses no message: it is the next one for others.
    """

    @property
    def _receiving(self) -> _Receiving:
        return cast("_Receiving", self._op)

    @property
    def posted(self) -> int:
        """1: the receives are posted in advance."""
        return 1

    def __repr__(self) -> str:
        receiving = self._receiving
        state = "cancelled" if receiving.cancelled else "ended" if receiving.ended else "waiting"
        return f"<Work: {self.operation}, {state}>"

    def wait(self, timeout: float | None = None) -> None:
        """Wait until a message is there, and raise if none will come.

        Raises:
            WaitTimeout: none within ``timeout`` seconds; it is still asked for.
            CancelledError: this was cancelled (``concurrent.futures``).
            VerbsError: the connection's failure, where that is why.
        """
        try:
            self._receiving.inbox.finish(self._receiving, self.operation, Deadline(timeout))
        finally:
            if self._receiving.ended:
                self._call_back()

    def result(self, timeout: float | None = None) -> _T:
        """Wait, and return the message; each time the same one.

        Raises:
            As ``wait``.
        """
        self.wait(timeout)
        self._receiving.claimed = True
        return self._convert(self._op)

    def cancel(self) -> bool:
        """Take the asking back; False if it has a message, or was ended by the connection's end."""
        cancelled = self._receiving.inbox.cancel(self._receiving)
        if cancelled:
            self._call_back()
        return cancelled

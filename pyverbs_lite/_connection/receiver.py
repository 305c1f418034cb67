"""How a connection takes messages: copied, into a buffer, lent, or when they come."""

from __future__ import annotations

from typing import Literal, overload

from .._base.args import Deadline
from .._memory.buffer import Memory
from ..ffi import lib
from ..mr import MR, MRSlice
from .lent import LentMessage
from .link import Link
from .requests import Mover, as_target
from .views import Message
from .work import Work

__all__ = ["Receiver"]

_recv, _MORE = lib.pvl_recv, lib.PVL_MORE


class Receiver(Mover):
    """The part of a connection that receives.

    Messages go to those who asked by ``start_recv``, in the order of asking; the other methods take what is left. A
    message is one's or another's, never lost: one that a method fails with, or that nobody made use of, stays the next.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._boxes = link.engine.inbox.boxes

    @overload
    def recv(self, *, lend: Literal[False] = False, timeout: float | None = None) -> Message: ...

    @overload
    def recv(self, *, lend: Literal[True], timeout: float | None = None) -> LentMessage: ...

    def recv(self, *, lend: bool = False, timeout: float | None = None) -> Message | LentMessage:
        """Return the next message.

        Args:
            lend: leave it where it arrived, without a copy, until it is released:
                ``with conn.recv(lend=True) as message``. Up to ``recv_depth`` less 1 may be lent at a time; what is
                lent the peer cannot use.

        Raises:
            WaitTimeout: none came in time.
            StateError: as many messages are lent as can be; it stays the next one.
            PeerClosedError: the peer has closed, or its process is gone, and all that it sent was taken.
            ClosedError: this connection was closed meanwhile.

        Verb: ibv_post_recv
        """
        if lend:
            return self._recv_lent(timeout)
        if timeout is not None:
            return self._engine.inbox.receive("recv", timeout, Message, Message._of)
        # Most calls: as ``Inbox.receive``, but that this is one call of Python, and one of C with one pointer.
        boxes = self._boxes
        try:
            box = boxes.pop() or self._engine.inbox.box()
        except IndexError:
            box = self._engine.inbox.box()
        try:
            rc = _recv(box.c)
            if rc >= 0:
                if box.live:  # C may have entered what others wait for, or nobody
                    self._engine._reap()
                message = Message(box.data[:rc])
                boxes += (box,)  # no call: after one an interrupt may come, and with it the message would be lost
                return message
            if rc == _MORE:
                message = Message._of(self._engine.inbox.opened(box))
                boxes += (box,)
                return message
        except BaseException:
            if box.c.length >= 0:  # C has taken it, and this call has not
                self._engine.inbox.left += (box,)
                self._engine._c.reserved = 1
            raise
        return self._engine.inbox.go_on(rc, box, "recv", Deadline(None), Message._of)

    def _recv_lent(self, timeout: float | None) -> LentMessage:
        inbox = self._engine.inbox
        return inbox.lend(timeout, lambda arrival: LentMessage(inbox, arrival))

    def recv_into(self, buffer: Memory | MR | MRSlice, *, timeout: float | None = None) -> int:
        """Copy the next message into a buffer, and return its length; its immediate, if it has one, is dropped.

        Raises:
            BufferError: the buffer is read-only.
            ValueError: the message is longer than the buffer; it stays the next one.
            As ``recv``.

        Verb: ibv_post_recv
        """
        target = memoryview(buffer) if type(buffer) is bytearray else as_target(buffer)

        def fill(message: bytes | memoryview) -> int:
            length = len(message)
            if length > len(target):
                raise ValueError(
                    f"the next message has {length} bytes and the buffer only {len(target)}; it was left where it is"
                )
            target[:length] = message
            return length

        return self._engine.inbox.receive("recv_into", timeout, fill)

    def start_recv(self) -> Work[Message]:
        """Ask for the next message without waiting for it; several may be asked for, and are served in that order.

        ``Work.cancel`` takes the asking back. A work that is dropped, or whose result nobody takes, leaves its message
        to whoever asks next.

        Raises:
            VerbsError: the connection is over, and all that had arrived was taken.

        Verb: ibv_post_recv
        """
        return self._engine.inbox.start(Message._of)

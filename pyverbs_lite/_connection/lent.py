"""Messages that stay in their receive slot while somebody looks at them."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from sys import is_finalizing
from types import TracebackType
from typing import NoReturn

from typing_extensions import Self

from ..errors import ClosedError, StateError
from ..ffi import CData, ffi
from .inbox import Arrival, Inbox

__all__ = ["LentMessage"]

_cast, _from_buffer = ffi.cast, ffi.from_buffer


class LentMessage:
    """A received message in the memory it arrived in, without a copy: ``with conn.recv(lend=True) as message``.

    The end of the block, or ``release``, gives the slot back for the peer's next message. Where something is left that
    shows the memory (a slice of ``view``, an array over it), that happens when the last of it is gone: nobody ever sees
    a message change.

    Attributes:
        imm: the 32-bit immediate in host order, or None.
        opcode: ``RECV``, or ``RECV_RDMA_WITH_IMM`` for the notice of an RDMA write, which itself has no bytes.
        byte_len: the length of the message, or of that write.
    """

    def __init__(self, inbox: Inbox, arrival: Arrival) -> None:
        self.imm, self.opcode, self.byte_len = arrival.imm, arrival.opcode, arrival.byte_len
        self._length = len(arrival.view)
        self._inbox = inbox
        # All that shows the memory refers to this pointer, and by its end the slot is not looked at any more.
        # It refers to the ring's view by a destructor: cffi's own hold on a memoryview is no good, see Pinned.
        place = ffi.gc(_cast("char *", _from_buffer(arrival.view)), partial(_let_go, inbox, arrival.loan, arrival.view))
        self._view: memoryview | None = memoryview(ffi.buffer(place, self._length)).toreadonly()

    def __repr__(self) -> str:
        return f"<LentMessage of {self._length} bytes{', released' if self._view is None else ''}>"

    @property
    def view(self) -> memoryview:
        """The message's bytes, read-only.

        Raises:
            StateError: it was released.
            ClosedError: its connection was closed; a view that was taken before stays good.
        """
        if self._view is None:
            raise StateError("this message was released: its slot is the peer's again")
        if self._inbox._engine.closed:
            raise ClosedError("the connection of this message was closed")
        return self._view

    @property
    def released(self) -> bool:
        """Whether ``release`` was called."""
        return self._view is None

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    def release(self) -> None:
        """Give the slot back; safe to call again, and after the connection was closed."""
        view, self._view = self._view, None
        if view is not None:
            with suppress(BufferError):  # an array over it: the slot goes back with that
                view.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if getattr(self, "_view", None) is None or is_finalizing():
            return
        # Where warnings are errors this raises, and a finaliser has nobody to raise to.
        with suppress(Exception):
            text = f"{self!r} was never released; its slot goes back now: use release() or a with block"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a LentMessage shows memory of one connection and cannot be pickled or copied: use bytes(message)"
        )


def _let_go(inbox: Inbox, loan: CData | None, view: memoryview, _: CData) -> None:
    """Give a slot back; until what points into its memory is gone, this also holds the view."""
    if loan is not None:
        inbox.give_back(loan)

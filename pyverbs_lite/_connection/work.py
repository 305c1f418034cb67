"""What goes on without a waiter: ``Work``, in the manner of ``concurrent.futures``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from .._base.args import Deadline
from ..errors import VerbsError
from .operation import Operation

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Work"]

_T = TypeVar("_T")


class Work(Generic[_T]):
    """An operation that was started and not waited for; it holds its memory until it has ended.

    Attributes:
        operation: what it is, for the texts of errors.
        count: how many entries a batch or a list has; 1 for a single operation.
    """

    def __init__(
        self, engine: Engine, op: Operation, operation: str, convert: Callable[[Operation], _T], count: int = 1
    ) -> None:
        self._engine = engine
        self._op = op
        self._convert = convert
        self._callbacks: list[Callable[[Work[_T]], object]] = []
        self.operation = operation
        self.count = count

    def __repr__(self) -> str:
        state = (
            "ended" if self._op.ended else f"{self.posted} of {self.count} posted" if self.count > 1 else "in flight"
        )
        return f"<Work: {self.operation}, {state}>"

    @property
    def posted(self) -> int:
        """How many entries of a list have been handed to the device so far; those after them were never started."""
        return self._op.accepted(self.count)

    def done(self) -> bool:
        """Say whether it has ended, well or badly; looks at the completion queue, and never waits."""
        if not self._op.ended:
            self._engine.look()
        elif self._engine._live:
            self._engine._reap()
        return self._op.ended

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended, and raise if it ended badly.

        Raises:
            WaitTimeout: not within ``timeout`` seconds; it is still in flight, and may be waited for again.
            CompletionError: the first entry that failed; ``failed_index`` says which of the list, and ``Work.posted``
                how many were accepted.
            VerbsError: the connection's failure, where that is why.
        """
        try:
            self._engine.finish(self._op, self.operation, Deadline(timeout))
        except VerbsError as error:
            if self._op.ended and self.count > 1:
                error.failed_index = self._op.failed_index
            raise
        finally:
            if self._callbacks and self._op.ended:
                self._call_back()

    def result(self, timeout: float | None = None) -> _T:
        """Wait, and return what the operation returns.

        Raises:
            As ``wait``.
        """
        self.wait(timeout)
        return self._convert(self._op)

    def exception(self, timeout: float | None = None) -> VerbsError | None:
        """Wait, and return how it failed, or None.

        Raises:
            WaitTimeout: not within ``timeout`` seconds.
        """
        try:
            self.wait(timeout)
        except VerbsError as error:
            if not self._op.ended:
                raise
            return error
        return None

    def cancel(self) -> bool:
        """Take it back, if that can be: only a receive that was not served. Else this is False, and it goes on."""
        return False

    def add_done_callback(self, call: Callable[[Work[_T]], object]) -> None:
        """Call a function with this work once it has ended: at once if it has, else from whichever thread notices.

        A thread of the connection's own sees to it that one does. What the function raises is logged and ignored.
        """
        self._callbacks.append(call)
        self._op.notify = self._call_back
        if self._op.ended:
            self._call_back()
        else:
            self._engine.keep_looking()

    def _call_back(self) -> None:
        if not self._callbacks:
            return
        self._op.notify = None  # which refers to this object
        with suppress(IndexError):
            while True:  # whichever threads do this, each function is taken out by one
                self._call(self._callbacks.pop(0))

    def _call(self, call: Callable[[Work[_T]], object]) -> None:
        try:
            call(self)
        except Exception:
            import logging  # a program without a failure need not wait for its import

            logging.getLogger("pyverbs_lite").exception("a callback of %r failed", self)

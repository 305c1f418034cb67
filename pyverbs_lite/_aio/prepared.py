"""Prepared operations, awaitable: one call of C with one pointer, and the loop only where that takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._base.args import Deadline
from .._connection import prepared as _prepared
from .._connection.packed import Integers
from ..ffi import lib
from ..mr import MR, MRSlice
from .run import Runner
from .turns import BURST, Turns

if TYPE_CHECKING:
    from ..remote import RemoteBuffer

__all__ = ["Prepared", "Preparer"]

_again, _NOW = lib.pvl_again_within, lib.PVL_NOW
_BUSY, _CHECK, _LATE, _PENDING = lib.PVL_BUSY, lib.PVL_CHECK, lib.PVL_LATE, lib.PVL_PENDING


class Prepared:
    """An operation that was checked once; ``prepare_write`` of an event loop's connection and its like make one.

    ::

        tick = conn.prepare_write(conn.remote["state"], region[:64])
        while True:
            fill(region.view)
            await tick()

    It belongs to one task at a time. A run that was cancelled or timed out is still in flight and holds its memory; the
    next one waits for it first.

    Attributes:
        operation: ``"write"``, ``"read"``, ``"send"``, ``"write_many"`` or ``"read_many"``, as errors call it.
        part: the registered memory that it moves.
    """

    __slots__ = ("__weakref__", "_inner", "_runner", "_running", "_turns", "operation", "part")

    def __init__(self, runner: Runner, turns: Turns | None, inner: _prepared.Prepared) -> None:
        self._runner, self._turns, self._inner = runner, turns, inner
        self._running = False
        self.operation, self.part = inner.operation, inner.part

    async def run(self, timeout: float | None = None) -> None:
        """Post it, and wait until it is complete; so often as is wanted, also by calling the object.

        Raises:
            BusyError: another task or thread is in it.
            As ``pyverbs_lite.Prepared.run``.

        Verb: ibv_post_send
        """
        deadline = None if timeout is None else Deadline(timeout)
        watch, turns = self._runner._watch, self._turns
        if self._running:
            self._inner._refuse_busy()
        if watch.closed or watch.burst >= BURST or (turns is not None and turns.waiting):
            await self._take_turn(deadline or Deadline(None))
            return
        watch.burst += 1
        rc = self._again()
        if rc or watch.turns or self._runner._engine._live:  # C may have entered what others wait for
            await self._go_on(rc, deadline or Deadline(None))

    __call__ = run

    def _again(self) -> int:
        inner = self._inner
        try:
            if not inner._recycled:
                return int(_again(inner._c, _NOW))
            holders = inner.part.mr._holders  # of a pool's slice only as long as that was not given back
            holders.add(inner._op.serial)
            if (rc := int(_again(inner._c, _NOW))) == 0:
                holders.discard(inner._op.serial)
            return rc
        except BaseException:
            inner._leave()
            raise

    async def _go_on(self, rc: int, deadline: Deadline) -> None:
        """Finish what one call of C did not."""
        inner, watch = self._inner, self._runner._watch
        watch.see_to()
        if rc == 0:
            return
        self._running = True
        try:
            while rc in (_LATE, _CHECK):
                if rc == _LATE:
                    await self._finish(deadline)
                else:
                    inner._examine()
                rc = self._again()
            if rc == _PENDING:
                await self._finish(deadline)
            elif rc == _BUSY:
                inner._refuse_busy()
            elif rc:  # nothing was posted
                await self._start(deadline)
        finally:
            self._running = False
            inner._leave()
            watch.note_failure()

    async def _take_turn(self, deadline: Deadline) -> None:
        self._running = True
        try:
            if not self._inner._op.ended:
                await self._finish(deadline)
            self._inner._examine()
            await self._start(deadline)
        finally:
            self._running = False

    async def _finish(self, deadline: Deadline) -> None:
        inner, runner = self._inner, self._runner
        runner._engine._live[inner._op] = None
        await runner._finish(inner._op, self.operation, deadline)
        inner._finish(Deadline(0))  # which says how it has ended

    async def _start(self, deadline: Deadline) -> None:
        await self._runner._do(self.operation, self._turns, self._inner._start, deadline)

    def __repr__(self) -> str:
        return repr(self._inner).replace("<", f"<{self._runner._face} ", 1)


class Preparer(Runner):
    """The part of a connection that prepares operations; nothing is awaited, for nothing is posted."""

    def prepare_write(self, remote: RemoteBuffer, data: MR | MRSlice, *, imm: int | None = None) -> Prepared:
        """Check a write of registered memory once; as ``pyverbs_lite.Connection.prepare_write``."""
        turns = self._transfers if imm is None else self._messages
        return Prepared(self, turns, self._conn.prepare_write(remote, data, imm=imm))

    def prepare_read(self, remote: RemoteBuffer, into: MR | MRSlice) -> Prepared:
        """Check a read of the whole of ``remote`` once; as ``pyverbs_lite.Connection.prepare_read``."""
        return Prepared(self, self._transfers, self._conn.prepare_read(remote, into))

    def prepare_send(self, data: MR | MRSlice, *, imm: int | None = None) -> Prepared:
        """Check a message in registered memory once; as ``pyverbs_lite.Connection.prepare_send``."""
        return Prepared(self, self._messages, self._conn.prepare_send(data, imm=imm))

    def prepare_write_many(
        self,
        remote: RemoteBuffer,
        data: MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
    ) -> Prepared:
        """Check a ``write_many`` once; as ``pyverbs_lite.Connection.prepare_write_many``."""
        return Prepared(self, None, self._conn.prepare_write_many(remote, data, offsets, remote_offsets, lengths))

    def prepare_read_many(
        self,
        remote: RemoteBuffer,
        into: MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
    ) -> Prepared:
        """Check a ``read_many`` once; as ``pyverbs_lite.Connection.prepare_read_many``."""
        return Prepared(self, None, self._conn.prepare_read_many(remote, into, offsets, remote_offsets, lengths))

"""The asyncio face of a connection."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, cast, overload

from typing_extensions import Self

from .. import connection
from .._base.args import Deadline, check_seconds
from .._connection.dial import Attempt, Dial
from .._connection.lent import LentMessage
from .._connection.packed import Integers
from .._connection.requests import as_target
from .._connection.starter import Batch as _Batch
from .._connection.views import Message
from .._connection.work import Work
from .._memory.buffer import Memory
from ..enums import AccessFlags, WROpcode
from ..errors import PeerClosedError
from ..ffi import lib
from ..grant import Grant
from ..mr import MR, MRSlice
from ..regcache import RegistrationCache
from ..remote import RemoteBuffer
from .prepared import Preparer
from .run import LARGE, is_large
from .turns import BURST

if TYPE_CHECKING:
    from ..pool import Pool

__all__ = ["Batch", "Connection"]

_SEND, _SEND_WITH_IMM, _WRITE, _WRITE_WITH_IMM, _READ = map(
    int,
    (
        WROpcode.SEND,
        WROpcode.SEND_WITH_IMM,
        WROpcode.RDMA_WRITE,
        WROpcode.RDMA_WRITE_WITH_IMM,
        WROpcode.RDMA_READ,
    ),
)
_REMOTE_WRITE = int(AccessFlags.REMOTE_WRITE)
_send, _send_copy, _write, _write_copy = lib.pvl_send, lib.pvl_send_copy, lib.pvl_write, lib.pvl_write_copy


class Connection(Preparer):
    """An RC connection of an event loop; made by ``aio.connect`` or ``Listener.accept``.

    The methods are those of ``pyverbs_lite.Connection``, awaitable; ``asyncio.timeout`` and ``wait_for`` limit them, as
    does ``timeout=``. An operation whose waiting ended early, by a timeout or because its task was cancelled, is still
    in flight and holds its memory until it ends; a ``recv`` that was cancelled has taken no message. Tasks may share a
    connection: messages and places in the send queue go to those who wait, first come, first served.

    ``async for message in conn`` ends when the peer closes the connection, and raises when it was lost.

    Attributes:
        remote, info: as of ``pyverbs_lite.Connection``.
    """

    @classmethod
    async def _make(
        cls, making: Callable[[], connection.Connection], name: str, abort: Callable[[], object] | None = None
    ) -> Self:
        """Make a connection in a thread; one that nobody waits for any more is closed."""
        conn = await cls._in_thread(making, name, abort=abort, late=connection.Connection.close)
        try:
            return cls(conn)
        except BaseException:
            await cls._in_thread(conn.close, "close")
            raise

    @classmethod
    async def _dial(cls, dial: Dial, name: str) -> Self:
        attempt = Attempt()
        return await cls._make(lambda: connection.Connection._dialled(dial, attempt), name, attempt.abort)

    def __repr__(self) -> str:
        return f"<{self._face}.{repr(self._conn)[1:]}"

    # ------------------------------------------------------------ two-sided

    async def send(self, data: Memory | MR | MRSlice, *, imm: int | None = None, timeout: float | None = None) -> None:
        """Send one message; as ``pyverbs_lite.Connection.send``."""
        deadline = None if timeout is None else Deadline(timeout)
        turns, conn = self._messages, self._conn
        begun = (imm is None and self._quick(turns, data, _send, _send_copy)) or self._begin(
            turns, _SEND if imm is None else _SEND_WITH_IMM, conn._to_send(data), 0, 0, imm
        )
        if begun is True:
            return
        if begun:
            await self._await(begun, "send", deadline or Deadline(None))
        else:
            await self._do("send", turns, lambda: conn.start_send(data, imm=imm, timeout=0), timeout, is_large(data))

    @overload
    async def recv(self, *, lend: Literal[False] = False, timeout: float | None = None) -> Message: ...

    @overload
    async def recv(self, *, lend: Literal[True], timeout: float | None = None) -> LentMessage: ...

    async def recv(self, *, lend: bool = False, timeout: float | None = None) -> Message | LentMessage:
        """Return the next message; as ``pyverbs_lite.Connection.recv``.

        Lent: ``with await conn.recv(lend=True) as message``.
        """
        if lend:
            return await self._receive("recv", lambda: self._conn.recv(lend=True, timeout=0.0), timeout)
        if timeout is not None:
            check_seconds(timeout)
        watch, looked = self._watch, False
        if not (self._receivers.waiting or watch.closed or watch.burst >= BURST):
            if watch.turns or self._engine._live:
                watch.glance()  # first, for a message that was taken has to be returned
            if (message := self._engine.inbox.receive_now(Message)) is not None:
                watch.burst += 1
                return message
            looked = True
        return await self._receive("recv", self._next_message, timeout, looked=looked)

    def _next_message(self) -> Message:
        message = self._engine.inbox.receive_now(Message)
        return self._conn.recv(timeout=0.0) if message is None else message

    async def recv_into(self, buffer: Memory | MR | MRSlice, *, timeout: float | None = None) -> int:
        """Copy the next message into a buffer; as ``pyverbs_lite.Connection.recv_into``."""
        target = as_target(buffer)
        return await self._receive("recv_into", lambda: self._conn.recv_into(target, timeout=0), timeout)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        try:
            return await self.recv()
        except PeerClosedError:
            if self._conn._link.peer.control.channel.error is None:  # it said goodbye
                raise StopAsyncIteration from None
            raise

    # ------------------------------------------------------------ one-sided

    async def register(
        self, buffer: Memory, *, name: str | None = None, access: AccessFlags | None = None, timeout: float = 10.0
    ) -> MR:
        """Register a buffer, in a thread; as ``pyverbs_lite.Connection.register``."""
        self._check_open("register")
        region: MR = await self._in_thread(
            lambda: self._conn.register(buffer, name=name, access=access, timeout=timeout), "register", late=MR.close
        )
        return region

    async def pool(
        self,
        *,
        max_bytes: int = 64 << 20,
        chunk_bytes: int | None = None,
        access: AccessFlags | None = None,
        huge: bool = False,
    ) -> Pool:
        """Make a pool of registered memory, in a thread; as ``pyverbs_lite.Connection.pool``."""
        self._check_open("pool")
        pool: Pool = await self._in_thread(
            lambda: self._conn.pool(max_bytes=max_bytes, chunk_bytes=chunk_bytes, access=access, huge=huge),
            "pool",
            late=lambda made: made.close(),
        )
        return pool

    @property
    def registration_cache(self) -> RegistrationCache | None:
        """What keeps memory registered between operations; as of ``pyverbs_lite.Connection``."""
        return self._conn.registration_cache

    async def grant(
        self,
        memory: MR | MRSlice,
        *,
        access: AccessFlags = AccessFlags.REMOTE_READ,
        name: str | None = None,
        timeout: float | None = 10.0,
    ) -> Grant:
        """Let the peer reach memory until that is revoked, in a thread; as ``pyverbs_lite.Connection.grant``.

        ``Grant.revoke`` is no coroutine: it waits for one short request.
        """
        self._check_open("grant")
        grant: Grant = await self._in_thread(
            lambda: self._conn.grant(memory, access=access, name=name, timeout=timeout), "grant", late=Grant.revoke
        )
        return grant

    async def write(
        self,
        remote: RemoteBuffer,
        data: Memory | MR | MRSlice,
        *,
        imm: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Write into the peer's memory; as ``pyverbs_lite.Connection.write``."""
        deadline = None if timeout is None else Deadline(timeout)
        turns, conn = self._transfers if imm is None else self._messages, self._conn
        begun = (
            imm is None
            and type(remote) is RemoteBuffer
            and (remote._standing.writes is conn._token or conn._known(remote, _REMOTE_WRITE))
            and self._quick(turns, data, _write, _write_copy, remote.addr, remote.rkey, remote.length)
        ) or self._begin(
            turns,
            _WRITE if imm is None else _WRITE_WITH_IMM,
            conn._to_write(remote, data),
            remote.addr,
            remote.rkey,
            imm,
        )
        if begun is True:
            return
        if begun:
            await self._await(begun, "write", deadline or Deadline(None))
        else:
            await self._do(
                "write",
                turns,
                lambda: conn.start_write(remote, data, imm=imm, timeout=0),
                timeout,
                is_large(data),
            )

    @overload
    async def read(self, remote: RemoteBuffer, into: None = None, *, timeout: float | None = None) -> bytes: ...

    @overload
    async def read(self, remote: RemoteBuffer, into: Memory | MR | MRSlice, *, timeout: float | None = None) -> int: ...

    async def read(
        self, remote: RemoteBuffer, into: Memory | MR | MRSlice | None = None, *, timeout: float | None = None
    ) -> bytes | int:
        """Read the whole of ``remote``; as ``pyverbs_lite.Connection.read``."""
        deadline = None if timeout is None else Deadline(timeout)
        if isinstance(into, (MR, MRSlice)):
            target = self._conn._to_read(remote, into)
            begun = self._begin(self._transfers, _READ, target[: remote.length], remote.addr, remote.rkey, None)
            if begun is True:
                return remote.length
            if begun:
                await self._await(begun, "read", deadline or Deadline(None))
                return remote.length
        large = is_large(into) if into is not None else getattr(remote, "length", 0) > LARGE

        def start() -> Work[bytes | int]:
            return cast("Work[bytes | int]", self._conn.start_read(remote, into, timeout=0))

        return await self._do("read", self._transfers, start, timeout, large)

    async def fetch_add(self, remote: RemoteBuffer, value: int, *, timeout: float | None = None) -> int:
        """Add to the peer's 8 bytes; as ``pyverbs_lite.Connection.fetch_add``."""
        return await self._do(
            "fetch_add", self._transfers, lambda: self._conn.start_fetch_add(remote, value, timeout=0), timeout
        )

    async def compare_swap(
        self, remote: RemoteBuffer, expected: int, desired: int, *, timeout: float | None = None
    ) -> int:
        """Replace the peer's 8 bytes if they equal ``expected``; as ``pyverbs_lite.Connection.compare_swap``."""
        return await self._do(
            "compare_swap",
            self._transfers,
            lambda: self._conn.start_compare_swap(remote, expected, desired, timeout=0),
            timeout,
        )

    # ------------------------------------------------------------ many at a time

    def batch(self, *, timeout: float | None = None) -> Batch:
        """Gather writes and reads; the end of the ``async with`` block starts them and waits for them."""
        return Batch(self, timeout)

    async def write_many(
        self,
        remote: RemoteBuffer,
        data: Memory | MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
        *,
        timeout: float | None = None,
    ) -> None:
        """Write many pieces; as ``pyverbs_lite.Connection.write_many``."""
        await self._do(
            "write_many",
            None,
            lambda: self._conn.start_write_many(remote, data, offsets, remote_offsets, lengths),
            timeout,
            is_large(data),
        )

    async def read_many(
        self,
        remote: RemoteBuffer,
        into: Memory | MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
        *,
        timeout: float | None = None,
    ) -> None:
        """Read many pieces; as ``pyverbs_lite.Connection.read_many``."""
        await self._do(
            "read_many",
            None,
            lambda: self._conn.start_read_many(remote, into, offsets, remote_offsets, lengths),
            timeout,
            is_large(into),
        )

    # ------------------------------------------------------------ the end

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._watch.closed

    async def close(self, *, timeout: float = 5.0) -> None:
        """Say goodbye, end every request, and destroy everything, in a thread; safe to call again.

        Other tasks that wait get ``ClosedError``. If this is cancelled, the thread goes on.
        """
        Deadline(timeout)
        over = self._watch.loop_is_over
        self._watch.stop()
        if self._conn._destroyed:
            return
        if over:
            self._conn.close(timeout=timeout)
        else:
            await self._in_thread(lambda: self._conn.close(timeout=timeout), "close")

    async def reconnect(self, *, timeout: float | None = None) -> Self:
        """Connect to the same listener anew, as ``pyverbs_lite.Connection.reconnect``; this connection is closed."""
        dial = self._conn._to_dial_again(timeout)
        await self.close()
        return await self._dial(dial, "reconnect")

    @property
    def local(self) -> dict[str, MR]:
        """Of this side, the buffers that have a name, as of now: name -> ``MR``."""
        return self._conn.local

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Connection lives in one process and cannot be pickled or copied; a RemoteBuffer can")


class Batch:
    """Writes and reads gathered by ``Connection.batch``."""

    def __init__(self, conn: Connection, timeout: float | None) -> None:
        self._conn = conn
        self._deadline = timeout
        self._batch: _Batch = conn._conn.batch()

    def write(self, remote: RemoteBuffer, data: MR | MRSlice) -> None:
        """Gather a write of registered memory; checked as ``Connection.write``."""
        self._batch.write(remote, data)

    def read(self, remote: RemoteBuffer, into: MR | MRSlice) -> None:
        """Gather a read into registered memory; checked as ``Connection.read``."""
        self._batch.read(remote, into)

    async def __aenter__(self) -> Self:
        self._conn._check_open("batch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return

        def start() -> Work[None]:
            self._batch.__exit__(None, None, None)
            return self._batch.work

        await self._conn._do("batch", None, start, self._deadline)

"""Registered memory for small payloads, taken and given back without a registration."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Self

from ._base.args import check_int
from ._base.resource import Resource
from ._memory.buddy import Buddy, block_size
from .enums import AccessFlags
from .errors import ClosedError, VerbsOSError
from .ffi import CData, ffi
from .mr import MR, MRSlice
from .pd import PD
from .remote import slice_range

__all__ = ["Pool", "PoolSlice", "PoolStats"]

_CHUNK = 2 << 20
_LIMIT = 64 << 20
_SMALLEST_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool has done so far, and holds now.

    Attributes:
        hits: slices that came from memory that was registered already.
        misses: slices for which a chunk had to be registered.
        in_use: bytes of the blocks that are out, or that requests in flight still use.
        registered: bytes of the chunks.
        chunks: how many there are.
    """

    hits: int
    misses: int
    in_use: int
    registered: int
    chunks: int


class PoolSlice(MRSlice):
    """Memory of a pool: an ``MRSlice`` that goes back by ``close()``, at the end of a ``with`` block, or when dropped.

    Its parts and views hold it. Once it is closed it is refused everywhere; views taken before show memory that may be
    somebody else's by then.
    """

    __slots__ = ("__weakref__", "_give_back", "_pool", "_region")
    _recycled = True

    def __init__(self, pool: Pool, region: MR, offset: int, length: int, give_back: list[Callable[[], None]]) -> None:
        self._pool = pool
        self._region = region
        self._give_back = give_back  # taken out by whoever does it, so that it happens once
        self.offset = offset
        self.length = self.nbytes = length

    @property
    def mr(self) -> MR:  # type: ignore[override]  # an attribute there
        """The region that it is a part of."""
        if not self._give_back:
            raise ClosedError("this slice was given back to its pool: take another")
        return self._region

    @property
    def closed(self) -> bool:
        """Whether it was given back, or its pool was closed."""
        return not self._give_back or self._region.closed

    @property
    def view(self) -> memoryview:
        """The slice's bytes: as long as a view of them lives, the slice is not dropped."""
        import ctypes  # takes a while, and not every program has a pool

        memory = (ctypes.c_ubyte * self.length).from_buffer(self.mr.view, self.offset)
        memory._owner = self  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def __getitem__(self, key: slice) -> MRSlice:
        start, stop = slice_range(key, self.length, "this slice of a pool")
        return _Part(self, self.mr, self.offset + start, stop - start)

    def __repr__(self) -> str:
        return f"<PoolSlice of {self.length} bytes{' (closed)' if self.closed else ''}>"

    def close(self) -> None:
        """Give it back; safe to call again. Requests in flight that use it keep others from getting it."""
        while self._give_back:
            self._give_back.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # No lock is taken here: this runs wherever the garbage collector does.
        if getattr(self, "_give_back", None):
            self.close()


class _Part(MRSlice):
    """A range of a pool's slice, which it holds."""

    __slots__ = ("_whole",)
    _recycled = True

    def __init__(self, whole: PoolSlice, mr: MR, offset: int, length: int) -> None:
        self._whole = whole
        self.offset = offset
        self.length = self.nbytes = length

    @property
    def mr(self) -> MR:  # type: ignore[override]
        """The region that it is a part of."""
        return self._whole.mr

    @property
    def view(self) -> memoryview:
        """The range's bytes."""
        start = self.offset - self._whole.offset
        return self._whole.view[start : start + self.length]

    def __getitem__(self, key: slice) -> MRSlice:
        start, stop = slice_range(key, self.length, "this slice of a pool")
        return _Part(self._whole, self.mr, self.offset + start, stop - start)


class Pool(Resource):
    """Registered, page-aligned memory for small payloads; make one with ``PD.pool``.

    ::

        with pool.alloc(4000) as part:
            part.view[:5] = b"hello"
            conn.write(remote, part[:5])

    Memory is registered a chunk at a time, up to a limit, and cut into blocks of powers of two from 64 bytes on; a
    block starts at a multiple of its size, or of a page if that is less. A block that was given back while requests
    were in flight on its chunk is not handed out before those have ended, so a dropped slice of a request that timed
    out does no harm. Threads may share a pool.

    Attributes:
        chunk_bytes, max_bytes: the size of a chunk, and the most of all chunks together.
        huge_pages: whether all chunks lie on huge pages.

    Verb: ibv_reg_mr
    """

    def __init__(
        self,
        pd: PD,
        *,
        max_bytes: int = _LIMIT,
        chunk_bytes: int | None = None,
        access: AccessFlags | None = None,
        huge: bool = False,
    ) -> None:
        check_int("max_bytes", max_bytes, _SMALLEST_CHUNK, 1 << 62)
        if chunk_bytes is None:
            chunk_bytes = min(_CHUNK, 1 << (max_bytes.bit_length() - 1))
        check_int("chunk_bytes", chunk_bytes, _SMALLEST_CHUNK, max_bytes)
        if chunk_bytes & (chunk_bytes - 1):
            raise ValueError(f"chunk_bytes must be a power of two, not {chunk_bytes}")
        self.pd, self.chunk_bytes, self.max_bytes = pd, chunk_bytes, max_bytes
        self._access, self._huge = access, huge
        self._lock = threading.RLock()
        self._chunks: list[_Chunk] = []
        self._returned: deque[_Block] = deque()
        self._waiting: list[_Block] = []
        self._hits = self._misses = 0
        self._own(ffi.new("char *"), _CloseChunks(self._chunks), pd, label=f"Pool of {pd.context.name}")
        try:
            self._grow()
        except BaseException:
            self.close()
            raise

    def alloc(self, nbytes: int) -> PoolSlice:
        """Take a slice; its bytes are whatever they were.

        Args:
            nbytes: 1 to ``chunk_bytes``.

        Raises:
            ValueError: more than a chunk: ``PD.alloc`` registers memory of its own.
            VerbsOSError: ENOMEM, because ``max_bytes`` are in use, or why no chunk could be registered.
        """
        self._handle  # noqa: B018 - a closed pool is refused here
        check_int("nbytes", nbytes, 1, self.chunk_bytes)
        size, returned = block_size(nbytes), self._returned
        give_back: list[Callable[[], None]] = []
        try:
            with self._lock:
                block = self._take(size)
                give_back += (lambda: returned.append(block),)
            return PoolSlice(self, block.chunk.region, block.offset, nbytes, give_back)
        except BaseException:  # an interrupt, with a block in hand
            while give_back:
                give_back.pop()()
            raise

    def _take(self, size: int) -> _Block:
        """Take a free block, or register a chunk for it; lock held."""
        self._take_back()
        if (block := self._find(size)) is not None:
            self._hits += 1
            return block
        if (len(self._chunks) + 1) * self.chunk_bytes > self.max_bytes:
            raise VerbsOSError(
                errno.ENOMEM,
                "Pool.alloc",
                f"no {size} bytes are free of the {self.max_bytes} (max_bytes) that this pool may have: give"
                " slices back, or make the pool larger",
            )
        self._grow()
        block = self._find(size)
        assert block is not None
        self._misses += 1
        return block

    @property
    def huge_pages(self) -> bool:
        """Whether all chunks lie on huge pages."""
        return all(chunk.region.huge_pages for chunk in self._chunks)

    @property
    def stats(self) -> PoolStats:
        """What it has done so far, and holds now."""
        with self._lock:
            self._take_back()
            used = sum(chunk.blocks.used for chunk in self._chunks)
            chunks = len(self._chunks)
            return PoolStats(self._hits, self._misses, used, chunks * self.chunk_bytes, chunks)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._chunks)} × {self.chunk_bytes} bytes"
        return f"<Pool of {self.pd.context.name}, {state}>"

    def _find(self, size: int) -> _Block | None:
        for chunk in self._chunks:
            if (offset := chunk.blocks.take(size)) is not None:
                return _Block(chunk, offset, size)
        return None

    def _grow(self) -> None:
        region = self.pd.alloc(self.chunk_bytes, self._access, huge=self._huge)
        self._chunks.append(_Chunk(region, Buddy(self.chunk_bytes)))

    def _take_back(self) -> None:
        """Make free what was given back and is not in use any more; lock held."""
        while self._returned:
            block = self._returned.popleft()
            # No request that is posted from now on can use it; of those in flight on this chunk, any may.
            block.users = frozenset(block.chunk.region._holders)
            self._waiting.append(block)
        waiting, self._waiting = self._waiting, []
        used = []
        try:
            while waiting:
                block = waiting.pop()  # before it is free, for an interrupt must not make it so twice
                if block.users.isdisjoint(block.chunk.region._holders):
                    block.chunk.blocks.give_back(block.offset, block.size)
                else:
                    used.append(block)
        finally:
            self._waiting += waiting + used


@dataclass(frozen=True, slots=True)
class _Chunk:
    region: MR
    blocks: Buddy


@dataclass(slots=True, eq=False)
class _Block:
    chunk: _Chunk
    offset: int
    size: int
    users: frozenset[int] = frozenset()


class _CloseChunks:
    """Deregisters the chunks; holds no reference to the pool, so that it can be a finaliser's."""

    __slots__ = ("chunks",)

    def __init__(self, chunks: list[_Chunk]) -> None:
        self.chunks = chunks

    def __call__(self, _: CData) -> None:
        for chunk in self.chunks:
            chunk.region.close()

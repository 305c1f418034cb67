"""A cache of registrations, so that memory which is used again and again is registered once."""

from __future__ import annotations

from dataclasses import dataclass

from ._base.access import pin
from ._base.args import check_int
from ._base.resource import Resource
from ._memory.buffer import Memory, as_bytes_view
from ._memory.registrations import Store
from .enums import AccessFlags
from .errors import BusyError, StateError
from .ffi import CData, ffi, lib
from .mr import MR
from .pd import PD

__all__ = ["CachedMR", "RegistrationCache", "RegistrationCacheStats"]

_NOT_HERE = AccessFlags.MW_BIND | AccessFlags.ZERO_BASED


@dataclass(frozen=True, slots=True)
class RegistrationCacheStats:
    """What a cache has done so far, and holds now.

    Attributes:
        hits: uses that found their memory registered.
        misses: uses that registered it, and left it registered.
        uncached: uses that registered it for themselves alone: what the cache does not keep, or had no room for.
        evictions: ranges that made room for others.
        invalidations: ranges whose memory went away, or that were discarded, cleared or replaced.
        entries, bytes: what is kept registered now.
        in_use: how many uses have not ended.
    """

    hits: int
    misses: int
    uncached: int
    evictions: int
    invalidations: int
    entries: int
    bytes: int
    in_use: int


class RegistrationCache(Resource):
    """Keeps memory registered from one use to the next, for as long as it certainly stays where it is.

    A connection has one of its own (``Connection.registration_cache``) and asks it for whatever ``send``, ``write`` and
    ``read`` are given that is neither small nor registered. By itself::

        with cache.get(array) as region:  # an MR
            qp.post_send(SendWR(sg_list=[region]))
            ...  # until the completion was polled

    **What is kept.** The arrays of numpy that own their memory, or have it from ``numpy.frombuffer`` of no ``mmap``, by
    any of their views and slices; and tensors of torch whose storage cannot be resized. Those are referenced weakly:
    the cache keeps none alive, and the range is deregistered before the memory is freed, so that whatever gets the same
    address afterwards is registered anew. While an array is in the cache its ``resize`` refuses, as it does for any
    weakly referenced array.

    **What is not.** A ``bytearray``, an ``array.array``, an ``mmap`` and ``bytes`` can be kept in place only by an
    export, which keeps them alive, unresizable and unclosable: they are kept with ``hold`` only, until evicted or
    discarded. (Nothing refuses to ``madvise`` the pages of a held ``mmap`` away; discard it first.) All else is
    registered for each use: memory whose owner may move it without a word (a tensor of torch's own, ``ctypes``,
    ``ndarray(buffer=…)``), and any use with remote access, whose key must be void afterwards.

    Kept ranges are pinned, and count against RLIMIT_MEMLOCK; where any registration of this library fails for want of
    that, every cache lets go of all that is not in use, and it is tried again. What is in use is never evicted. Before
    a fork everything is let go of. Threads may share a cache.

    Args:
        max_bytes: the most to keep registered; the least recently used makes room.
        hold: whether to keep what only an export keeps in place, too; an attribute, which may be changed.

    Verb: ibv_reg_mr
    """

    def __init__(self, pd: PD, *, max_bytes: int = 64 << 20, hold: bool = False) -> None:
        self.pd = pd
        self._store = Store(check_int("max_bytes", max_bytes, 1, 1 << 62), hold=hold)
        #: Whether nothing can be in flight any more when this is closed.
        self._quiet = False
        self._own(ffi.new("char *"), _CloseStore(self._store), pd, label=f"RegistrationCache of {pd.context.name}")

    def get(self, buffer: Memory, access: AccessFlags | None = None) -> CachedMR:
        """Return a buffer's memory registered, to be closed after use: a hit costs no verb.

        Args:
            access: by default ``LOCAL_WRITE`` for writable memory and nothing for read-only memory.

        Raises:
            As ``PD.reg_mr``.
        """
        self._handle  # noqa: B018 - a closed cache is refused here
        return CachedMR(self, buffer, access)

    def discard(self, buffer: Memory) -> int:
        """Forget what is kept of a buffer, so that it can be resized again; return how many ranges that were.

        Those in use go when that ends.
        """
        return self._store.discard(as_bytes_view(buffer))

    def clear(self) -> int:
        """Forget everything; return how many ranges that were. Those in use go when that ends."""
        return self._store.clear()

    @property
    def max_bytes(self) -> int:
        """The most that it keeps registered."""
        return self._store.max_bytes

    @property
    def hold(self) -> bool:
        """Whether it keeps what only an export keeps in place, too."""
        return self._store.hold

    @hold.setter
    def hold(self, value: bool) -> None:
        self._store.hold = value

    @property
    def stats(self) -> RegistrationCacheStats:
        """What it has done so far, and holds now."""
        store = self._store
        with store.lock:
            return RegistrationCacheStats(
                store.hits,
                store.misses,
                store.uncached,
                store.evictions,
                store.invalidations,
                len(store.entries),
                store.bytes,
                store.in_use,
            )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._store.bytes} of {self.max_bytes} bytes"
        return f"<RegistrationCache of {self.pd.context.name}, {state}>"

    def _before_destroy(self) -> None:
        if not self._quiet and (used := self._store.in_use):
            raise BusyError(f"{used} region(s) of {self!r} are in use: close those first")


class _CloseStore:
    """Deregisters everything; holds no reference to the cache, so that it can be a finaliser's."""

    __slots__ = ("store",)

    def __init__(self, store: Store) -> None:
        self.store = store

    def __call__(self, _: CData) -> None:
        self.store.close()


class CachedMR(MR):
    """Registered memory that a ``RegistrationCache`` lends: an ``MR``, which ``close()`` gives back.

    It exports the buffer until then. It cannot be changed (``rereg``), and no window can be bound to it.
    """

    def __init__(self, cache: RegistrationCache, buffer: Memory, access: AccessFlags | None) -> None:
        if access is not None and access & _NOT_HERE:
            raise ValueError(f"{access!r}: a region of the cache is shared; use PD.reg_mr for one with {_NOT_HERE!r}")
        pinned, access = pin(buffer, access)
        raw = cache.pd._handle

        def register(region: CData, addr: int, length: int, wide: int) -> int:
            return int(lib.pvl_register_alone(region, raw, addr, length, wide))

        try:
            entry, use = cache._store.take(pinned.view, pinned.addr, int(access), register)
        except BaseException:
            pinned.release()
            raise

        def give_back(_: CData | None) -> None:
            entry.leave(use)

        raw, parents, length = entry.c.mr, (cache,), pinned.nbytes
        try:
            self._adopt(cache.pd, raw, pinned.addr, length, access, pinned=pinned, parents=parents, destroy=give_back)
        except BaseException:
            give_back(None)
            pinned.release()
            raise

    def rereg(self, **changes: object) -> None:
        """Refuse: others use the region, too."""
        raise StateError(f"{self!r} is shared with others through a cache, and cannot be changed")

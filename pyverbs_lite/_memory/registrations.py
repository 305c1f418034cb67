"""Registrations that are kept from one use to the next: which, how long, and when one must go.

A weak reference's callback, a finaliser and a signal handler may come between any two lines here, and each may be one
that uses this same store. So the lock is reentrant, whoever ends a use takes no lock at all, and nothing is destroyed
while the lock is held.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from .._base.check import check_rc, os_error
from .._objects.spares import relieve_spares
from ..enums import AccessFlags
from ..errors import ClosedError, VerbsError
from ..ffi import CData, ffi, lib
from ..remote import REMOTE
from .keeper import EXPORTERS, Keeper, keeper_of

__all__ = ["OUT_OF_MEMORY", "Entry", "Register", "Store", "relieve"]

#: Registers a range in C: (struct pvl_region *, address, length, access) -> 0, an errno, or PVL_STOPPED.
Register: TypeAlias = Callable[[CData, int, int, int], int]
_Key: TypeAlias = tuple[int, int, int]

_serials = itertools.count(1)
#: How many of a buffer's other ranges are looked at for one that contains what is asked for.
_MOST_LOOKS = 8
#: How a verb says that there is no more memory to be pinned.
OUT_OF_MEMORY = (errno.ENOMEM, errno.EAGAIN)
# As plain numbers, for the operators of an IntFlag are written in Python.
_LOCAL_WRITE = int(AccessFlags.LOCAL_WRITE)
_REMOTE = int(REMOTE)


class Entry:
    """One registered range.

    Attributes:
        users: serial number of a use -> a view, which holds the memory meanwhile.
        retired: whether it goes as soon as nobody uses it: it is not, or not any more, in the store.
    """

    __slots__ = ("__weakref__", "access", "addr", "c", "kept", "key", "length", "owner", "retired", "store", "users")

    def __init__(self, store: Store, addr: int, length: int, access: int) -> None:
        self.store, self.addr, self.length, self.access = store, addr, length, access
        self.c: CData = ffi.new("struct pvl_region *")
        self.users: dict[int, memoryview] = {}
        self.retired = True
        self.key: _Key = (0, 0, 0)
        self.owner: weakref.ref[object] | None = None
        self.kept: object = None

    def covers(self, addr: int, length: int, access: int) -> bool:
        """Say whether it can serve for a range."""
        return self.addr <= addr and addr + length <= self.addr + self.length and self.access & access == access

    def serves(self, owner: object, addr: int, length: int, access: int) -> bool:
        """Say whether it is of this owner, and not of one that had its id before, and covers a range."""
        return self.covers(addr, length, access) and (self.owner is None or self.owner() is owner)

    def leave(self, serial: int) -> None:
        """End a use; again is the same as once."""
        held = self.users.pop(serial, None)
        if self.retired and not self.users:
            self.close()
        del held  # not before the range is deregistered: the memory may be freed with it

    def close(self) -> None:
        """Deregister the range, and only then let go of what was held; safe to call again, and from any thread."""
        if self.store.foreign:  # a forked child's copy: the region is the parent's
            return
        check_rc("ibv_dereg_mr", lib.pvl_deregister(self.c))
        self.kept = None
        self.store.registered.discard(self)


class Store:
    """The entries of a cache, the least recently used first."""

    def __init__(self, max_bytes: int, *, hold: bool) -> None:
        self.max_bytes, self.hold = max_bytes, hold
        self.lock = threading.RLock()
        self.closed = False
        self.foreign = False
        self.bytes = 0
        self.entries: OrderedDict[_Key, Entry] = OrderedDict()
        self._ranges: dict[int, list[Entry]] = {}  # id of the owner -> its entries
        #: All that may be registered, so that an interrupt loses none.
        self.registered: set[Entry] = set()
        self.hits = self.misses = self.evictions = self.invalidations = self.uncached = 0
        _stores.add(self)

    @property
    def in_use(self) -> int:
        """How many uses have not ended."""
        return sum(len(entry.users) for entry in tuple(self.registered))

    def take(self, view: memoryview, addr: int, access: int, register: Register) -> tuple[Entry, int]:
        """Return an entry that covers a view, in use, and the number of that use.

        Raises:
            VerbsOSError: the verb refused.
            ClosedError: the connection was closed.
        """
        serial = next(_serials)
        try:
            return self._take(view, addr, access, register, serial), serial
        except BaseException:  # an interrupt may have come when it was in use already
            for entry in tuple(self.registered):
                entry.leave(serial)
            raise

    def _take(self, view: memoryview, addr: int, access: int, register: Register, serial: int) -> Entry:
        length = view.nbytes
        # A key that the peer may know must be void when the use has ended.
        keeper = None if access & _REMOTE else self._keeper(view)
        if keeper is not None:
            with self.lock:
                if (entry := self._find(keeper.owner, addr, length, access)) is not None:
                    entry.users[serial] = view[:]
                    self.entries.move_to_end(entry.key)
                    self.hits += 1
                    return entry
        # What can be written to is registered so, that reading into it finds it too.
        entry = Entry(self, addr, length, access if view.readonly else access | _LOCAL_WRITE)
        entry.users[serial] = view[:]  # an export of its own, for anybody may release the other
        self.registered.add(entry)
        rc = register(entry.c, addr, length, entry.access)
        if rc in OUT_OF_MEMORY and relieve():
            rc = register(entry.c, addr, length, entry.access)
        if rc:
            self.registered.discard(entry)
            raise ClosedError("this connection was closed") if rc == lib.PVL_STOPPED else os_error("ibv_reg_mr", rc)
        with self.lock:
            gone = [] if keeper is None else self._insert(entry, keeper)
            self.misses += not entry.retired
            self.uncached += entry.retired
        self._close(gone)
        return entry

    def _keeper(self, view: memoryview) -> Keeper | None:
        keeper = keeper_of(view)
        if keeper is None and self.hold and isinstance(view.obj, EXPORTERS):
            return Keeper(view.obj, view[:])
        return keeper

    def _find(self, owner: object, addr: int, length: int, access: int) -> Entry | None:
        exact = self.entries.get((id(owner), addr, length))
        if exact is not None and exact.serves(owner, addr, length, access):
            return exact
        for entry in self._ranges.get(id(owner), ())[: -_MOST_LOOKS - 1 : -1]:
            if entry.serves(owner, addr, length, access):
                return entry
        return None

    def _insert(self, entry: Entry, keeper: Keeper) -> list[Entry]:
        """Keep an entry if there is room, or can be; return those that have to be closed for it; lock held."""
        key = (id(keeper.owner), entry.addr, entry.length)
        old = self.entries.get(key)
        if self.closed or (old is not None and old.covers(entry.addr, entry.length, entry.access)):
            return []  # or another thread was faster
        gone = [] if old is None else [old]
        excess = self.bytes + entry.length - self.max_bytes - sum(other.length for other in gone)
        victims = []
        for other in list(self.entries.values()):
            if excess <= 0:
                break
            if other is not old and not other.users:
                victims.append(other)
                excess -= other.length
        if excess > 0:
            return []  # what is in use takes up too much
        self.evictions += len(victims)
        self.invalidations += len(gone)
        closing = self._retire(gone + victims)
        entry.key, entry.kept = key, keeper.beside
        if not isinstance(keeper.owner, EXPORTERS):  # those are held by their export
            entry.owner = weakref.ref(keeper.owner, partial(_owner_gone, weakref.ref(self), weakref.ref(entry)))
        self.entries[key] = entry
        self._ranges.setdefault(key[0], []).append(entry)
        self.bytes += entry.length
        entry.retired = False
        return closing

    def _retire(self, entries: Iterable[Entry]) -> list[Entry]:
        """Take entries out; return those that nobody uses, which are to be closed; lock held."""
        idle = []
        for entry in entries:
            if entry.retired:
                continue
            self.entries.pop(entry.key, None)
            ranges = self._ranges.get(entry.key[0], [])
            if entry in ranges:
                ranges.remove(entry)
            if not ranges:
                self._ranges.pop(entry.key[0], None)
            self.bytes -= entry.length
            entry.retired = True
            if not entry.users:
                idle.append(entry)
        return idle

    def owner_gone(self, entry: Entry) -> None:
        """Forget an entry whose memory is about to be freed; it is deregistered when this returns."""
        with self.lock:
            self.invalidations += not entry.retired
            idle = self._retire([entry])
        self._close(idle)

    def discard(self, view: memoryview) -> int:
        """Forget what is kept of a buffer; return how many ranges."""
        if (keeper := self._keeper(view)) is None:
            return 0
        return self._forget(lambda: self._ranges.get(id(keeper.owner), []))

    def clear(self) -> int:
        """Forget everything; return how many ranges. What is in use goes when that ends."""
        return self._forget(self.entries.values)

    def _forget(self, which: Callable[[], Iterable[Entry]]) -> int:
        with self.lock:
            entries = list(which())
            self.invalidations += len(entries)
            idle = self._retire(entries)
        self._close(idle)
        return len(entries)

    def _close(self, entries: list[Entry]) -> None:
        for entry in entries:
            # A refusal is nobody's here: close() tries again.
            with suppress(VerbsError):
                entry.close()

    def close(self) -> None:
        """Deregister everything, also what somebody still uses."""
        self.closed = True
        self.clear()
        for entry in tuple(self.registered):
            entry.close()


def _owner_gone(store: weakref.ref[Store], entry: weakref.ref[Entry], _: object) -> None:
    if (alive := store()) is not None and (dead := entry()) is not None and not alive.foreign:
        alive.owner_gone(dead)


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def relieve() -> int:
    """Let go of what the caches have and nobody uses, for pinned memory is limited; return how many ranges that was."""
    return relieve_spares() + sum(store.clear() for store in tuple(_stores) if not store.foreign)


def _before_fork() -> None:
    # What is registered is either withheld from the child (ibv_fork_init: it faults there, and numpy's arrays are
    # meant to be there), or on older kernels moves away from under the registration when the parent writes.
    for store in tuple(_stores):
        store.clear()


def _after_fork() -> None:
    for store in tuple(_stores):
        store.foreign = True
        store.lock = threading.RLock()  # the old one may be held by a thread that is not there


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)

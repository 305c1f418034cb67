"""Page-aligned memory that is used again: making it and having it zeroed is most of what a connection would cost.

What was used before is in it still; it was this process's. Nobody gives it back: that happens by itself when nobody can
see it any more, neither a registration nor a view of a message.
"""

from __future__ import annotations

import mmap
import os

from ..ffi import ffi
from .pages import map_pages

__all__ = ["arena"]

#: Bytes that may lie unused; what comes back beyond them is unmapped.
BUDGET = 16 << 20
#: Length -> what lies unused. A list of its own in each process: a forked child shares the pages with its parent.
_unused: dict[int, list[mmap.mmap]] = {}


def arena(nbytes: int) -> memoryview:
    """Return memory, page-aligned and with anything in it, as bytes.

    Raises:
        OSError, OverflowError: there is not that much.
    """
    try:
        memory = _unused[nbytes].pop()
    except (KeyError, IndexError):
        memory = map_pages(nbytes)
    return memoryview(ffi.buffer(ffi.gc(ffi.from_buffer(memory), _GiveBack(memory, _unused)), nbytes))


class _GiveBack:
    """Lays memory back when the last view of it is gone."""

    __slots__ = ("memory", "unused")

    def __init__(self, memory: mmap.mmap, unused: dict[int, list[mmap.mmap]]) -> None:
        self.memory = memory
        self.unused = unused

    def __call__(self, _: object) -> None:
        # Called by whatever thread drops the last view, also within the collector: no lock, and nothing that raises.
        nbytes, unused = len(self.memory), self.unused
        if unused is _unused and sum(size * len(found) for size, found in tuple(unused.items())) + nbytes <= BUDGET:
            unused.setdefault(nbytes, []).append(self.memory)


def _forget() -> None:
    global _unused
    _unused = {}


os.register_at_fork(after_in_child=_forget)

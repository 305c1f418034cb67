"""One range of memory cut into blocks of powers of two, which grow together again when they come back."""

from __future__ import annotations

__all__ = ["Buddy", "block_size"]

#: The smallest block: what a device and a CPU transfer at a time, and enough for the alignment of an atomic.
SMALLEST = 64


def block_size(nbytes: int) -> int:
    """Return the size of the block that so many bytes come in: a power of two, at least 64."""
    return max(SMALLEST, 1 << (nbytes - 1).bit_length())


class Buddy:
    """Offsets into a range of ``size`` bytes, a power of two; a block starts at a multiple of its own size."""

    __slots__ = ("_free", "size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        #: Size of a block -> the offsets of free ones.
        self._free: dict[int, set[int]] = {size: {0}}

    def take(self, size: int) -> int | None:
        """Take a block of a size from ``block_size``; return its offset, or None if there is none."""
        found = size
        while not self._free.get(found):
            if found >= self.size:
                return None
            found *= 2
        offset = self._free[found].pop()
        while found > size:  # the upper halves stay
            found //= 2
            self._free.setdefault(found, set()).add(offset + found)
        self.used += size
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Make a block free, and join it with its other half as long as that is free too."""
        self.used -= size
        while size < self.size and (offset ^ size) in self._free.get(size, ()):
            self._free[size].discard(offset ^ size)
            offset &= ~size
            size *= 2
        self._free.setdefault(size, set()).add(offset)

"""Where messages arrive: memory cut into slots; C posts them and finds them (``ffi/src/receives.c``)."""

from __future__ import annotations

from ..ffi import CData, ffi
from ..mr import MRSlice
from ..qp import QP

__all__ = ["Receives"]


class Receives:
    """The receives of one QP: a ring of slots.

    Args:
        memory: for all slots.
        size: bytes that one receive takes.
        slots: how many there are.
    """

    def __init__(self, memory: MRSlice, size: int, slots: int, qp: QP) -> None:
        self.c: CData = ffi.new("struct pvl_receives *")
        self.c.addr, self.c.lkey = memory.addr, memory.lkey
        self.c.size, self.c.stride, self.c.slots = size, memory.length // slots, slots
        self.c.qp = qp._handle
        self.slots = slots
        self._stride = memory.length // slots
        self._region, self._start = memory.mr, memory.offset

    def grow(self) -> bool:
        """Make more slots ready, where there are not enough; say whether that helped."""
        return False

    def view(self, slot: int, start: int, length: int) -> memoryview:
        """View a part of a slot."""
        start += self._start + slot * self._stride
        return self._region.view[start : start + length]

"""Who keeps a buffer's memory where it is: what a registration that outlasts one operation may rely on."""

from __future__ import annotations

import mmap
import sys
from array import array
from typing import NamedTuple

__all__ = ["EXPORTERS", "Keeper", "keeper_of"]

#: What neither moves nor frees its memory while that is exported, and says so to whoever tries. Of a map that is true
#: for the addresses only: ``madvise`` and a truncated file take pages away.
_FIRM = (bytes, bytearray, array)
EXPORTERS = (*_FIRM, mmap.mmap)


class Keeper(NamedTuple):
    """An object with which memory stays where it is as long as it lives, and what has to be held beside it."""

    owner: object
    beside: object = None


def keeper_of(view: memoryview) -> Keeper | None:
    """Return the object whose life the memory under a view lasts for, without a hold on it; None if there is none.

    That is an array of numpy that owns its memory, or that has it from an exporter which cannot take it back: a weak
    reference, as is kept of it, makes ``ndarray.resize`` refuse, too. Of views and slices it is the array they are of.
    And it is a tensor of torch whose storage cannot be resized, which is one that torch did not allocate itself. All
    else can free or move its memory and live on: ``bytearray.extend``, ``mmap.madvise``, ``ctypes.resize``,
    ``Tensor.resize_``; or it cannot be referenced weakly.
    """
    owner = view.obj
    ndarray = getattr(sys.modules.get("numpy"), "ndarray", None)
    if ndarray is not None and isinstance(owner, ndarray):
        while isinstance(base := owner.base, ndarray):
            owner = base
        if base is None:
            return Keeper(owner) if owner.flags.owndata else None
        # numpy.frombuffer keeps a memoryview; ndarray(buffer=…) only the exporter, which is free to resize.
        held = base.obj if isinstance(base, memoryview) else base if isinstance(base, bytes) else None
        return Keeper(owner) if isinstance(held, _FIRM) else None
    tensor, storage = getattr(owner, "_owners", (None, None))  # see _buffer
    resizable = getattr(storage, "resizable", None)
    return None if resizable is None or resizable() else Keeper(tensor, storage)

"""Packed arrays of offsets and lengths, as callers have them and as C takes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import calcsize
from typing import TypeAlias

from typing_extensions import Buffer

from .ffi import CData, ffi, lib
from .remote import RemoteBuffer

__all__ = ["U64S", "Integers", "Rows", "alike", "pack", "pointers"]

#: Offsets or lengths in bytes: 64-bit integers in one piece of memory (numpy, array, memoryview), or a sequence.
Integers: TypeAlias = Buffer | Sequence[int]

#: The three of a list, of one length.
Rows: TypeAlias = "tuple[memoryview, memoryview, memoryview]"
_ROWS = ("offsets", "remote_offsets", "lengths")
U64S = ffi.typeof("uint64_t[]")
#: What a memoryview calls 64-bit integers in the order of this machine.
_FORMATS = frozenset(
    order + letter
    for order in ("", "@", "=", "<")
    for letter in ("q", "Q", "l", "L", "n", "N")
    if (letter not in "nN" or order in ("", "@")) and calcsize(order + letter) == 8
)


def _packed(values: Integers, what: str) -> memoryview:
    """Return non-negative 64-bit integers as C sees them: where they are, if that is a buffer.

    A view and not what cffi makes of it, which must not be held: see ``Operation``.
    """
    try:
        view = memoryview(values)  # type: ignore[arg-type]
    except TypeError:
        try:
            view = memoryview(array("Q", values))  # type: ignore[arg-type]
        except OverflowError as error:
            raise ValueError(f"{what} must be 0 to 2**64 - 1: {error}") from error
    if view.format not in _FORMATS or view.ndim != 1 or not view.c_contiguous:
        raise TypeError(
            f"{what} must be one contiguous row of 64-bit integers, not format {view.format!r} of shape {view.shape}"
        )
    # A negative number is far outside of any range, and refused as that.
    return view


def alike(operation: str, offsets: Integers, remote_offsets: Integers, lengths: Integers) -> Rows:
    """Return the three rows of a list, which must be of one length."""
    rows = _packed(offsets, "offsets"), _packed(remote_offsets, "remote_offsets"), _packed(lengths, "lengths")
    if not len(rows[0]) == len(rows[1]) == len(rows[2]):
        counts = dict(zip(_ROWS, map(len, rows), strict=True))
        raise ValueError(f"{operation} needs as many offsets as lengths, not {counts}")
    return rows


def pointers(rows: Rows) -> tuple[CData, CData, CData]:
    first, second, third = rows
    return ffi.from_buffer(U64S, first), ffi.from_buffer(U64S, second), ffi.from_buffer(U64S, third)


def pack(
    operation: str,
    entries: CData,
    opcode: int,
    most: int,
    count: int,
    rows: tuple[CData, CData, CData],
    size: int,
    remote: RemoteBuffer,
) -> None:
    """Make a ``struct pvl_list`` of packed arrays, but for the local memory.

    Raises:
        ValueError: an entry reaches outside.
    """
    bad = lib.pvl_list_pack(entries, opcode, most, count, *rows, size, remote.addr, remote.rkey, remote.length)
    if bad != count:
        values = {name: int(row[bad]) for name, row in zip(_ROWS, rows, strict=True)}
        raise ValueError(
            f"entry {bad} of {operation} reaches outside: {values}, with {size} bytes here and {remote.length} in"
            f" {remote}"
        )

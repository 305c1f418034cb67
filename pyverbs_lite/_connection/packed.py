"""Packed arrays of offsets and lengths, as callers have them and as C takes them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import calcsize
from typing import TypeAlias

from typing_extensions import Buffer

from ..ffi import CData, ffi, lib
from ..remote import RemoteBuffer

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


def _in_memory(values: Integers, what: str) -> memoryview:
    try:
        return memoryview(values)  # type: ignore[arg-type]
    except TypeError:
        try:
            return memoryview(array("Q", values))  # type: ignore[arg-type]
        except OverflowError as error:
            raise ValueError(f"{what} must be 0 to 2**64 - 1: {error}") from error


def alike(operation: str, offsets: Integers, remote_offsets: Integers, lengths: Integers) -> Rows:
    """Return the three rows of a list as C sees them, non-negative 64-bit integers: where they are, if in buffers.

    Views and not what cffi makes of them, which must not be held: see ``Operation``. A negative number is far outside
    of any range, and refused as that.

    Raises:
        TypeError: one has other numbers, or is not in one piece.
        ValueError: they are not of one length.
    """
    try:
        rows = memoryview(offsets), memoryview(remote_offsets), memoryview(lengths)  # type: ignore[arg-type]
    except TypeError:
        rows = (
            _in_memory(offsets, "offsets"),
            _in_memory(remote_offsets, "remote_offsets"),
            _in_memory(lengths, "lengths"),
        )
    for row in rows:
        if row.format not in _FORMATS or row.ndim != 1 or not row.c_contiguous:
            what = next(name for name, each in zip(_ROWS, rows, strict=True) if each is row)
            raise TypeError(
                f"{what} must be one contiguous row of 64-bit integers, not format {row.format!r} of shape {row.shape}"
            )
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

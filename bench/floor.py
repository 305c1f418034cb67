"""The C loops of ``floor/floor.c``, over the objects of a connection or of anybody else."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from .build import BUILD

SPIN, YIELD, EVENTS = range(3)
WRITE, SEND, READ = 0, 2, 4
INLINE = 8


class Path(ctypes.Structure):
    """``struct floor_path``."""

    _fields_ = (
        ("qp", ctypes.c_void_p),
        ("cq", ctypes.c_void_p),
        ("channel", ctypes.c_void_p),
        ("addr", ctypes.c_uint64),
        ("remote_addr", ctypes.c_uint64),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
        ("ring_addr", ctypes.c_uint64),
        ("ring_flag", ctypes.c_uint64),
        ("ring_size", ctypes.c_uint32),
        ("ring_lkey", ctypes.c_uint32),
    )


class FloorError(Exception):
    """A C loop failed: a completion's status, or a verb's errno."""


class Floor:
    """The loops; each returns the nanoseconds of all its turns."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(str(BUILD / "libfloor.so"))
        for name in ("one", "window", "lists", "pingpong", "life"):
            getattr(self._lib, f"floor_{name}").restype = ctypes.c_int64

    def one(
        self,
        path: Path,
        opcode: int,
        length: int,
        how: int,
        turns: int,
        *,
        flags: int = 0,
        each: list[int] | None = None,
    ) -> int:
        """Post one request and wait for it, so often; ``each`` receives the nanoseconds of every turn."""
        return self._run("one", each, turns, ctypes.byref(path), opcode, length, flags, how, ctypes.c_int64(turns))

    def window(self, path: Path, opcode: int, length: int, how: int, turns: int, window: int) -> int:
        """Keep so many requests in flight."""
        args = (ctypes.byref(path), opcode, ctypes.c_uint32(length), how, ctypes.c_int64(turns), ctypes.c_int64(window))
        return self._checked(self._lib.floor_window(*args))

    def lists(self, path: Path, opcode: int, length: int, how: int, turns: int, batch: int) -> int:
        """Post lists of requests, the last of each signalled."""
        return self._checked(
            self._lib.floor_lists(ctypes.byref(path), opcode, length, how, ctypes.c_int64(turns), batch)
        )

    def pingpong(
        self,
        left: Path,
        right: Path,
        length: int,
        how: int,
        turns: int,
        *,
        flags: int = 0,
        each: list[int] | None = None,
    ) -> int:
        """Send a message there and back, so often."""
        pair = ctypes.byref(left), ctypes.byref(right)
        return self._run("pingpong", each, turns, *pair, length, flags, how, ctypes.c_int64(turns))

    def life(self, context: Any, gid_index: int, turns: int, *, kept: bool) -> int:
        """Go through the verbs of one end of a connection, with objects made each time or ``kept`` ones."""
        from pyverbs_lite.ffi import ffi

        raw = ctypes.c_void_p(int(ffi.cast("uintptr_t", context._handle)))
        return self._checked(self._lib.floor_life(raw, gid_index, int(kept), ctypes.c_int64(turns)))

    def _run(self, name: str, each: list[int] | None, turns: int, *args: Any) -> int:
        out = array("q", bytes(8 * turns)) if each is not None else None
        pointer = ctypes.c_void_p(out.buffer_info()[0] if out is not None else None)
        total = self._checked(getattr(self._lib, f"floor_{name}")(*args, pointer))
        if each is not None and out is not None:
            each += out
        return total

    def _checked(self, total: int) -> int:
        if total < 0:
            raise FloorError(f"status {-1 - total}" if total > -1000 else f"errno {-1000 - total}")
        return total


def path_of(conn: Any, part: Any, remote: Any) -> Path:
    """Describe a connection of ours: the very QP, CQ and channel that its own operations use."""
    from pyverbs_lite.ffi import ffi

    def number(pointer: Any) -> int:
        return int(ffi.cast("uintptr_t", pointer))

    engine = conn._engine
    raw, table = engine._qp._handle, engine._c
    return Path(
        number(raw),
        number(raw.send_cq),
        number(raw.send_cq.channel),
        part.addr,
        remote.addr,
        part.lkey,
        remote.rkey,
        table.receives.addr,
        1 << 63,
        table.receives.stride,
        table.receives.lkey,
    )


def paths(left: Any, right: Any, size: int) -> tuple[Path, Path]:
    """Describe both ends of a pair that nobody else uses: what one would wait for, the other might take."""
    own, mirror = left.register(bytearray(size)), right.register(bytearray(size))
    remote = left.remote["target"][:size]
    return path_of(left, own, remote), path_of(right, mirror, remote)

"""What a memory region may be asked to allow, and the buffer that it is made of."""

from __future__ import annotations

from .._memory.buffer import Memory, Pinned
from ..enums import AccessFlags
from .args import check_int

__all__ = ["REMOTE_WRITERS", "WRITERS", "check_access", "pin"]

#: What lets a peer write, which needs LOCAL_WRITE as well; and all that writes.
REMOTE_WRITERS = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
WRITERS = AccessFlags.LOCAL_WRITE | REMOTE_WRITERS
#: The verb takes an int; bits that have no name here are for the device to judge.
_MAX = (1 << 31) - 1


def check_access(access: AccessFlags | int) -> AccessFlags:
    """Return access flags that can go together.

    Raises:
        TypeError, ValueError: they are none, or need ``LOCAL_WRITE`` as well.
    """
    access = AccessFlags(check_int("access", int(access) if isinstance(access, AccessFlags) else access, 0, _MAX))
    if access & REMOTE_WRITERS and not access & AccessFlags.LOCAL_WRITE:
        raise ValueError(f"{access!r} needs LOCAL_WRITE as well: who lets the peer write must be able to write")
    return access


def pin(buffer: Memory, access: AccessFlags | int | None) -> tuple[Pinned, AccessFlags]:
    """Hold a buffer that is to be registered, and choose or check its access flags.

    Raises:
        As ``PD.reg_mr``.
    """
    given = None if access is None else check_access(access)
    pinned = Pinned(buffer, writable=given is not None and bool(given & WRITERS), what="a buffer to register")
    if not pinned.nbytes:
        pinned.release()
        raise ValueError("an empty buffer cannot be registered: it has no memory")
    if given is None:
        given = AccessFlags(0) if pinned.readonly else AccessFlags.LOCAL_WRITE
    return pinned, given

"""Random numbers that nobody can guess, asked of the kernel many at a time: each question is a system call."""

from __future__ import annotations

import os

__all__ = ["random_64"]

#: Bytes of one question.
_MANY = 256
#: Those that nobody has had yet. A forked child must not have the same.
_left: list[int] = []


def random_64() -> int:
    """Return 64 random bits."""
    try:
        return _left.pop()
    except IndexError:
        fresh = os.urandom(_MANY)
        first, *rest = (int.from_bytes(fresh[i : i + 8], "big") for i in range(0, _MANY, 8))
        _left.extend(rest)
        return first


os.register_at_fork(after_in_child=_left.clear)

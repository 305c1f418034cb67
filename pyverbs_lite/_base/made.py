"""What is closed together: an ``ExitStack`` of open objects that takes little memory, for there may be thousands."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeVar

from .resource import Resource

__all__ = ["Made"]

_R = TypeVar("_R", bound=Resource)


class Made:
    """What one connection has made for itself, which goes when it does."""

    __slots__ = ("things",)

    def __init__(self) -> None:
        self.things: list[Resource] = []

    def keep(self, thing: _R) -> _R:
        """Take note of one thing more."""
        self.things.append(thing)
        return thing

    def close(self) -> None:
        """Close all of it, the youngest first, each whatever becomes of the others; may be tried again."""
        with ExitStack() as stack:
            for thing in self.things:
                stack.callback(thing.close)

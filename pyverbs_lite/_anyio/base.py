"""What every way of sleeping in a loop that anyio knows has in common."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from .._aio.turns import WatchBase

__all__ = ["AnyioWatch"]


class AnyioWatch(WatchBase):
    """The part of a watch that asks anyio, whoever reads the completion channel."""

    async def give_way(self) -> None:
        """Let the other tasks run."""
        await anyio.lowlevel.checkpoint()

    @property
    def loop_is_over(self) -> bool:
        """Whether nothing can be awaited here any more."""
        try:
            anyio.get_current_task()
        except Exception:
            return True
        return False

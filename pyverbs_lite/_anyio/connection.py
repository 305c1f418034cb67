"""The anyio face of a connection."""

from __future__ import annotations

from types import TracebackType
from typing import ClassVar

import anyio

from .._aio import connection as _aio_connection
from .watch import in_thread, watch

__all__ = ["Connection"]


class Connection(_aio_connection.Connection):
    """An RC connection of an event loop of anyio's; everything as of ``pyverbs_lite.aio.Connection``."""

    _face: ClassVar[str] = "anyio"
    _make_watch = staticmethod(watch)
    _in_thread = staticmethod(in_thread)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch.loop_is_over:
            await self.close()
            return
        with anyio.CancelScope(shield=True):
            await self.close()

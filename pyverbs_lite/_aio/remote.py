"""The peer's buffers, waited for in an event loop."""

from __future__ import annotations

from typing import Any

from .._base.args import Deadline
from .._connection.settings import check_name
from .._connection.views import RemoteBuffers as _RemoteBuffers
from .._connection.views import RemoteNames
from ..errors import ClosedError
from ..remote import RemoteBuffer
from .turns import WatchBase

__all__ = ["RemoteBuffers"]


class RemoteBuffers(RemoteNames):
    """The peer's named buffers, current at each look; as ``conn.remote`` of ``pyverbs_lite.Connection``."""

    def __init__(self, inner: _RemoteBuffers, watch: WatchBase) -> None:
        super().__init__(inner._link)
        self._watch = watch
        self._waiting: set[Any] = set()
        self._heard = 0

    async def wait(self, name: str, timeout: float | None = None) -> RemoteBuffer:
        """Return a buffer as soon as the peer has named it; as of ``pyverbs_lite.Connection``."""
        check_name(name)
        deadline, watch = Deadline(timeout), self._watch
        while not watch.closed:
            if (found := self._find(name)) is not None:
                return found
            if deadline.expired:
                raise self._too_late(name, deadline)
            place = watch.place()
            if not self._waiting:
                self._heard = self._link.engine.heard
                watch.turns.append(self)
            self._waiting.add(place)
            try:
                await watch.sleep(place, deadline)
            finally:
                self._waiting.discard(place)
                if not self._waiting:
                    watch.turns.remove(self)
        raise ClosedError(f"conn.remote.wait: this connection was closed; no buffer {name!r} was named before that")

    def wake(self) -> None:
        """Wake those who wait, if there were news since the last time, or nothing more will come."""
        engine = self._link.engine
        if engine.heard != self._heard or engine.failure is not None or self._watch.over:
            self._heard = engine.heard
            for place in self._waiting:
                self._watch.rouse(place)

"""Asking now and then whether the peer's adapter still answers, where there is no socket over which kernels do that.

A write of no bytes needs no memory of the peer's and none of its time: its adapter acknowledges it. Where nothing
answers, the QP's retries run out, and the connection fails as it does by any other request.
"""

from __future__ import annotations

import threading
import weakref

from .._base.args import Deadline
from .._connection.engine import Engine
from .._connection.operation import Operation, Request
from ..enums import WROpcode
from ..errors import QueueFullError, VerbsError

__all__ = ["keep_asking"]


def keep_asking(engine: Engine, seconds: float) -> threading.Event:
    """Ask twice within so many seconds, in a thread, until the returned event is set or the connection is over."""
    stop = threading.Event()
    arguments = weakref.ref(engine), seconds / 2, stop
    threading.Thread(target=_ask, args=arguments, name="pyverbs_lite keep-alive", daemon=True).start()
    return stop


def _ask(reference: weakref.ref[Engine], pause: float, stop: threading.Event) -> None:
    asked: Operation | None = None
    while not stop.wait(pause):
        engine = reference()
        if engine is None or engine.closed or engine.failure is not None:
            return
        try:
            engine.look()  # what has ended, also where nobody waits
            if asked is None or asked.ended:
                question = Request(WROpcode.RDMA_WRITE, 0, source=memoryview(b""))
                asked = engine.start("keep_alive", question, Deadline(0))
        except QueueFullError:
            pass  # what is in flight asks as well
        except VerbsError:
            return  # it is over
        del engine

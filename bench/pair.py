"""Two connections of this process to each other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pyverbs_lite as pvl


@contextmanager
def pairs(
    count: int, size: int, *, listen: dict[str, Any] | None = None, **options: Any
) -> Iterator[list[tuple[pvl.Connection, pvl.Connection]]]:
    """Yield so many pairs; each right end shows its peer a buffer named "target" of ``size`` bytes, with 0 none."""
    with ExitStack() as stack:
        shown = {"target": bytearray(size)} if size else {}
        listener = stack.enter_context(pvl.listen("127.0.0.1", 0, buffers=shown, **{**options, **(listen or {})}))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        made = []
        for _ in range(count):
            accepting = pool.submit(listener.accept, 20)
            left = stack.enter_context(pvl.connect("127.0.0.1", listener.port, **options))
            made.append((left, stack.enter_context(accepting.result(20))))
        yield made

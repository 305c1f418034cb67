"""A process that is timed: it makes its objects, then runs the cases that it is told, one line each.

A line of input names a case and how many operations; the answer is the nanoseconds of all of them. So several
libraries, each with the environment that it needs, are timed in turns.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable

#: A case: does so many operations, and returns the nanoseconds that they took.
Case = Callable[[int], int]
#: Requests in flight where a case keeps a window of them.
WINDOW = 64
#: Requests that are posted as one list.
LISTS = (1, 8, 64)


def device() -> tuple[str, int]:
    """Return the name of the device to use, and the row of its GID table."""
    return os.environ.get("BENCH_DEVICE", "null0"), int(os.environ.get("BENCH_GID_INDEX", "0"))


def repeated(operation: Callable[[], object]) -> Case:
    """Return a case that calls a function in a loop; what the loop itself costs is part of the figure."""

    def run(count: int) -> int:
        start = time.perf_counter_ns()
        for _ in range(count):
            operation()
        return time.perf_counter_ns() - start

    return run


def listed(operation: Callable[[], object], size: int) -> Case:
    """Return a case that does a number of operations in lists of one size."""
    lists = repeated(operation)
    return lambda count: lists(max(1, count // size))


def windowed(post: Callable[[], object], reap: Callable[[], int]) -> Case:
    """Return a case that keeps a window of requests in flight."""

    def run(count: int) -> int:
        start = time.perf_counter_ns()
        posted = done = 0
        while done < count:
            while posted < count and posted - done < WINDOW:
                post()
                posted += 1
            if not (found := reap()):
                os.sched_yield()
            done += found
        return time.perf_counter_ns() - start

    return run


def serve(cases: dict[str, Case]) -> None:
    """Answer until the input ends."""
    answer(sorted(cases))
    for line in sys.stdin:
        name, count = json.loads(line)
        answer(cases[name](count))


def answer(value: object) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    importlib.import_module(sys.argv[1]).main()

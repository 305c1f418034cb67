"""The cases of this library and of C on the null provider; runs in a worker with ``libnull.so`` preloaded."""

from __future__ import annotations

import time
from array import array
from functools import partial
from itertools import cycle, islice
from typing import Any

from pyverbs_lite.ffi import lib

from .floor import SPIN, WRITE, Floor, paths
from .pair import pairs
from .worker import LISTS, Case, repeated, serve

SIZE = 64
#: Operations of one packed batch.
BATCHES = (8, 64, 1024, 16384, 262144, 1000000)
#: QPs that operations go to in turns.
QPS = (1, 8, 64)


def main() -> None:
    """Make the connections and serve."""
    floor = Floor()
    with pairs(max(QPS) + 1, 1 << 16, device="null0") as made:
        left, right = made[0]
        region = left.register(bytearray(1 << 16))
        part, remote = region[:SIZE], left.remote["target"][:SIZE]
        path, back = paths(*made.pop(), SIZE)
        message = bytearray(SIZE)

        cases: dict[str, Case] = {
            "c write": lambda n: floor.one(path, WRITE, SIZE, SPIN, n),
            "c two-sided": lambda n: floor.pingpong(path, back, SIZE, SPIN, n // 2),
            "write": writes(left, remote, part),
            "write bytes": writes(left, remote, message),
            "start_write": _started(partial(left.start_write, remote, part)),
            "prepared": runs(left.prepare_write(remote, part)),
            "fused": fused(left, part, remote),
            "two-sided": _messages(left.prepare_send(part).run, right),
            "two-sided send": _messages(partial(left.send, part), right),
        }
        for count in LISTS:
            cases[f"c list {count}"] = partial(_lists, floor, path, count)
        for count in BATCHES:
            cases[f"write_many {count}"] = _many(left, left.remote["target"], region, count)
            cases[f"prepared write_many {count}"] = _prepared_many(left, left.remote["target"], region, count)
        regions = [end.register(bytearray(SIZE)) for end, _ in made]
        by_turns = [(end, end.remote["target"][:SIZE], own[:SIZE]) for (end, _), own in zip(made, regions, strict=True)]
        for count in QPS:
            cases[f"qps {count}"] = _turns(by_turns[:count])
        serve(cases)


def _lists(floor: Floor, path: Any, size: int, count: int) -> int:
    return floor.lists(path, WRITE, SIZE, SPIN, count, size)


def writes(conn, remote, data) -> Case:  # type: ignore[no-untyped-def]
    """Time writes as a caller spells them."""

    def run(count: int) -> int:
        start = time.perf_counter_ns()
        for _ in range(count):
            conn.write(remote, data)
        return time.perf_counter_ns() - start

    return run


def runs(prepared) -> Case:  # type: ignore[no-untyped-def]
    """Time a prepared operation as a caller spells it."""

    def run(count: int) -> int:
        start = time.perf_counter_ns()
        for _ in range(count):
            prepared.run()
        return time.perf_counter_ns() - start

    return run


def fused(conn, part, remote) -> Case:  # type: ignore[no-untyped-def]
    """Time the one C call that posts, waits and tells the status, with nothing around it."""
    prepared = conn.prepare_write(remote, part)
    raw, post = prepared._c, lib.pvl_again

    def one(prepared=prepared) -> None:  # type: ignore[no-untyped-def]  # it owns what the pointer leads to
        if post(raw):
            raise RuntimeError("the null provider refused a write")

    return repeated(one)


def _started(start) -> Case:  # type: ignore[no-untyped-def]
    """Time starts and waits apart from each other's call: 32 in flight."""

    def run(count: int) -> int:
        before = time.perf_counter_ns()
        for _ in range(0, count, 32):
            for work in [start() for _ in range(32)]:
                work.wait()
        return time.perf_counter_ns() - before

    return run


def _messages(send, right) -> Case:  # type: ignore[no-untyped-def]
    def one() -> None:
        send()
        right.recv()

    return repeated(one)


def _rows(count: int) -> tuple[array[int], array[int], array[int]]:
    """Return so many pieces, which do not continue each other."""
    where = array("Q", [(2 * i * SIZE) % (1 << 16) for i in range(count)])
    return where, where, array("Q", [SIZE]) * count


def _many(conn, remote, region, count: int) -> Case:  # type: ignore[no-untyped-def]
    """Time packed batches of so many pieces."""
    rows = _rows(count)

    def run(n: int) -> int:
        some = min(n, count)  # fewer than a batch: a run that only looks whether all works
        return _batches(partial(conn.write_many, remote, region, *(row[:some] for row in rows)), some, n)

    return run


def _prepared_many(conn, remote, region, count: int) -> Case:  # type: ignore[no-untyped-def]
    """Time the same, prepared: what peers do, whose lists are built before the clock runs."""
    prepared = conn.prepare_write_many(remote, region, *_rows(count))
    return lambda n: _batches(prepared.run, count, n)


def _batches(run, count: int, n: int) -> int:  # type: ignore[no-untyped-def]
    """Time whole batches; return what so many operations have their share of it."""
    batches = max(1, n // count)
    return repeated(run)(batches) * n // (batches * count)


def _turns(ends) -> Case:  # type: ignore[no-untyped-def]
    """Time writes that go to several QPs in turns, by the same loop for one."""

    def run(count: int) -> int:
        turns = islice(cycle(ends), count)
        start = time.perf_counter_ns()
        for conn, remote, data in turns:
            conn.write(remote, data)
        return time.perf_counter_ns() - start

    return run

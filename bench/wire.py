"""What is measured on a real device: run as ``python -m bench.wire`` where there is one (``rxe/run`` gives one).

Writes one JSON object a line: ``{"done": name}`` after each timing, and ``{"figures": {...}}`` at the end of a group.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pyverbs_lite as pvl
from pyverbs_lite import gid

from .floor import EVENTS, READ, WRITE, YIELD, Floor, path_of, paths
from .layer import Worker, peer_workers
from .life import ENOUGH
from .ours import runs, writes
from .pair import pairs
from .rounds import Timed, Unmeasured, Whole, measure

#: Sizes of the plots, in bytes; those of the goals are among them.
SIZES = (8, 64, 512, 4096, 1 << 15, 1 << 16, 1 << 18, 1 << 20, 1 << 23)
GOAL_SIZES = (1 << 16, 1 << 20)
WINDOW = 64
_TARGET = 1 << 23


def say(**what: Any) -> None:
    """Write one line of the answer."""
    print(json.dumps(what), flush=True)


def report(cases: dict[str, Timed], rounds: int, seconds: float) -> None:
    """Measure a group and write its figures."""
    figures = measure(cases, rounds, seconds, lambda name: say(done=name))
    say(figures={name: figure.record() for name, figure in figures.items()})


def sleeping(case: Timed, *ends: pvl.Connection) -> Timed:
    """Return a case in which the waits of connections go straight to sleep on events, as the C loop beside it does."""

    def run(count: int) -> float:
        engines = [end._engine._c for end in ends]
        usual = engines[0].spin_ns
        try:
            for engine in engines:
                engine.spin_ns = 0
            return case(count)
        finally:
            for engine in engines:
                engine.spin_ns = usual

    return run


def loop(operation: Callable[[], object]) -> Timed:
    """Return a case that calls a function in a loop."""

    def run(count: int) -> float:
        start = time.perf_counter_ns()
        for _ in range(count):
            operation()
        return time.perf_counter_ns() - start

    return run


# ------------------------------------------------------------ the groups


def latency(floor: Floor, peers: dict[str, Worker], rounds: int, seconds: float) -> None:
    """One request and its wait; and a message there and back."""
    beside = {
        f"write 64 yield: {name}{more}": partial(worker.run, case)
        for name, worker in peers.items()
        for case, more in (("prepared", ""), ("built", " built"))
    }
    with pairs(2, _TARGET, device="rxe0") as made:
        left, right = made[0]
        part, mirror = left.register(bytearray(64))[:], right.register(bytearray(64))[:]
        remote = left.remote["target"][:64]
        path, back = paths(*made[1], 64)
        prepared, write = runs(left.prepare_write(remote, part)), writes(left, remote, part)

        ping, pong = left.prepare_send(part).run, right.prepare_send(mirror).run

        def there_and_back() -> None:
            ping()
            right.recv()
            pong()
            left.recv()

        def sent_there_and_back() -> None:
            left.send(part)
            right.recv()
            right.send(mirror)
            left.recv()

        report(
            {
                "write 64 yield: c": lambda n: floor.one(path, WRITE, 64, YIELD, n),
                "write 64 yield: pvl": prepared,
                "write 64 yield: pvl write": write,
                **beside,
                "write 64 events: c": lambda n: floor.one(path, WRITE, 64, EVENTS, n),
                "write 64 events: pvl": sleeping(prepared, left),
                "write 64 events: pvl write": sleeping(write, left),
            },
            rounds * 4,
            seconds / 4,
        )
        ours, plain = loop(there_and_back), loop(sent_there_and_back)
        report(
            {
                "ping-pong 64 events: c": lambda n: floor.pingpong(path, back, 64, EVENTS, n),
                "ping-pong 64 events: pvl": sleeping(ours, left, right),
                "ping-pong 64 events: pvl send": sleeping(plain, left, right),
                "ping-pong 64 yield: c": lambda n: floor.pingpong(path, back, 64, YIELD, n),
                "ping-pong 64 yield: pvl": ours,
                "ping-pong 64 yield: pvl send": plain,
            },
            rounds * 4,
            seconds / 4,
        )


def asynchronous(rounds: int, seconds: float) -> None:
    """Send a message there and back, awaited and waited for."""

    async def make() -> list[Any]:
        listener = await pvl.aio.listen("127.0.0.1", 0, device="rxe0")
        accepting = asyncio.ensure_future(listener.accept(20))
        return [await pvl.aio.connect("127.0.0.1", listener.port, device="rxe0"), await accepting, listener]

    async def turns(ends: list[Any], count: int) -> float:
        left, right, _ = ends
        start = time.perf_counter_ns()
        for _ in range(count):
            await left.send(message)
            await right.recv()
            await right.send(message)
            await left.recv()
        return time.perf_counter_ns() - start

    async def close(ends: list[Any]) -> None:
        for end in ends:
            await end.close()

    message = bytes(64)
    with closing(asyncio.new_event_loop()) as events, pairs(1, 64, device="rxe0") as made:
        left, right = made[0]
        ends = events.run_until_complete(make())

        def waited() -> None:
            left.send(message)
            right.recv()
            right.send(message)
            left.recv()

        cases: dict[str, Timed] = {
            "round trip 64: blocking": loop(waited),
            "round trip 64: asyncio": lambda n: events.run_until_complete(turns(ends, n)),
        }
        try:
            report(cases, rounds * 4, seconds / 4)
        finally:
            events.run_until_complete(close(ends))


def latencies(floor: Floor, rounds: int, seconds: float, sizes: tuple[int, ...]) -> None:
    """Measure one request and its wait at a time, with requests of every size."""
    with pairs(1, _TARGET, device="rxe0") as made:
        left = made[0][0]
        region, remote = left.register(bytearray(_TARGET)), left.remote["target"]
        for size in sizes:
            path, part, place = path_of(left, region, remote), region[:size], remote[:size]
            report(
                {
                    f"write {size} one: c": partial(_one, floor, path, WRITE, size),
                    f"write {size} one: pvl": writes(left, place, part),
                    f"read {size} one: c": partial(_one, floor, path, READ, size),
                    f"read {size} one: pvl": loop(partial(left.read, place, part)),
                    f"read {size} one: perftest": Whole(partial(_perftest_lat, size)),
                },
                rounds,
                seconds,
            )


def _one(floor: Floor, path: Any, opcode: int, size: int, count: int) -> float:
    return floor.one(path, opcode, size, YIELD, count)


def bandwidth(
    floor: Floor,
    peers: dict[str, Worker],
    rounds: int,
    seconds: float,
    sizes: tuple[int, ...],
) -> None:
    """Measure writes and reads with a window, ours as packed batches."""
    with pairs(1, _TARGET, device="rxe0", send_depth=2 * WINDOW) as made:
        left = made[0][0]
        region, remote = left.register(bytearray(_TARGET)), left.remote["target"]
        for size in sizes:
            cases: dict[str, Timed] = {}
            path = path_of(left, region, remote)
            for word, opcode, many in (("write", WRITE, left.write_many), ("read", READ, left.read_many)):
                name = f"{word} {size} window"
                cases[f"{name}: c"] = partial(_window, floor, path, opcode, size)
                cases[f"{name}: pvl"] = partial(_many, many, remote, region, size)
                cases[f"{name}: perftest"] = Whole(partial(_perftest_bw, f"ib_{word}_bw", size))
                for peer, worker in peers.items():
                    if word == "write" and f"window {size}" in worker.names:
                        cases[f"{name}: {peer}"] = partial(worker.run, f"window {size}")
            report(cases, rounds, seconds)


def _window(floor: Floor, path: Any, opcode: int, size: int, count: int) -> float:
    return floor.window(path, opcode, size, YIELD, count, WINDOW)


def _many(many: Callable[..., None], remote: pvl.RemoteBuffer, region: pvl.MR, size: int, count: int) -> float:
    # All to one place, as the C loop does: pieces that continued each other would travel as one.
    nowhere, lengths = array("Q", bytes(8 * count)), array("Q", [size]) * count
    start = time.perf_counter_ns()
    many(remote, region, nowhere, nowhere, lengths)
    return time.perf_counter_ns() - start


def _perftest_bw(tool: str, size: int) -> float:
    """Run a bandwidth test; its own average decides, so that its start is not part of the figure.

    Both ends are on one CPU. There, reads fare best with events, which ib_write_bw refuses.
    """
    turns = min(max(_turns(0.2, 5000, size), 2 * WINDOW), 20000)
    more = ["-e", "-o", "16"] if "read" in tool else []
    average = _perftest(tool, size, [*more, "-n", str(turns), "-t", str(WINDOW)], r"[\d.]+ +([\d.]+)")
    return size / (average * (1 << 20)) * 1e9


def _perftest_lat(size: int) -> float:
    """Run ib_read_lat, whose typical time decides.

    Its sisters for writes and for messages spin at both ends: on one CPU they measure the scheduler.
    """
    turns = str(min(max(_turns(0.1, 17000, size), 20), 1000))
    return _perftest("ib_read_lat", size, ["-n", turns], r"[\d.]+ +[\d.]+ +([\d.]+)") * 1e3


def _turns(seconds: float, nanoseconds: int, size: int) -> int:
    """Return about how many operations take so long, of which each costs so much and 1.6 ns more for every byte."""
    return int(seconds * 1e9 / (nanoseconds + 1.6 * size))


def _perftest(tool: str, size: int, more: list[str], wanted: str) -> float:
    """Run both ends of a perftest tool, and return the wanted column.

    Raises:
        Unmeasured: its measurement of the CPU's clock failed again and again, without which its figures mean nothing.
    """
    command = [tool, "-d", "rxe0", "-x", "1", "-s", str(size), *more, "-p", "19100", "-F"]
    said = ""
    for _ in range(6):
        said = _perftest_pair(command)
        found = re.search(rf"^ *{size} +\d+ +{wanted}", said, re.MULTILINE)
        if found and float(found[1]) and "Correlation coefficient" not in said:
            return float(found[1])
    raise Unmeasured(said)


def _perftest_pair(command: list[str]) -> str:
    """Run both ends, and return what the client says, whose start may come before the server's."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for _ in range(50):
            client = subprocess.run([*command, "192.0.2.1"], capture_output=True, text=True, timeout=60, check=False)
            if client.returncode == 0:
                break
            time.sleep(0.02)
        server.communicate(timeout=10)
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()
    return client.stdout + client.stderr


def lives(rounds: int, count: int) -> None:
    """Measure a connection from nothing to its end, with one byte through it; beside ``cmtime``."""
    words = [sys.executable, "-m", "bench.life", "rxe0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server, pvl.open_device("rxe0") as context:
        assert server.stdout is not None
        port = int(server.stdout.readline())

        def live(message: bytes) -> None:
            with pvl.connect("127.0.0.1", port, device=context) as conn:
                conn.send(message)

        live(b"x")  # what is made once
        life = loop(partial(live, b"x"))
        row, floor = own_gid_index("rxe0"), Floor()
        cases = {
            "life: cmtime": lambda _: _cmtime(count) * 1.0,
            "life: pvl": lambda _: life(count) / count,
            "life: one end's verbs in C, made anew": lambda _: floor.life(context, row, count, kept=False) / count,
            "life: one end's verbs in C, kept": lambda _: floor.life(context, row, count, kept=True) / count,
        }
        try:
            report(cases, 2 * rounds, 0)
        finally:
            live(ENOUGH)


def _cmtime(count: int) -> float:
    """Return the nanoseconds of one connection: the sum of cmtime's steps."""
    common = ["cmtime", "-b", "192.0.2.1", "-p", "19200"]
    server = subprocess.Popen(common, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.2)
        command = [*common, "-s", "192.0.2.1", "-c", str(count)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    finally:
        server.terminate()
        server.wait()
    steps = re.findall(r"^[a-z ]+: +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)$", shown, re.MULTILINE)
    if len(steps) < 8:
        raise RuntimeError(f"cmtime said: {shown}")
    return sum(map(float, steps)) * 1000


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--sizes", action="store_true", help="all sizes of the plots")
    options = parser.parse_args()
    floor = Floor()
    with ExitStack() as stack:
        peers = peer_workers(stack, "rxe0", own_gid_index("rxe0"))
        latency(floor, peers, options.rounds, options.seconds)
        asynchronous(options.rounds, options.seconds)
        lives(options.rounds, 25)
        bandwidth(floor, peers, options.rounds, options.seconds, GOAL_SIZES)
        if options.sizes:
            others = tuple(size for size in SIZES if size not in GOAL_SIZES)
            bandwidth(floor, {}, 2, options.seconds, others)
            latencies(floor, 2, options.seconds / 2, SIZES)


def own_gid_index(device: str) -> int:
    """Return the row of the GID that the library itself chooses on a device."""
    with pvl.open_device(device) as context:
        port = context.query_port(1)
        return gid.choose(context.gid_table(1), link_layer=port.link_layer, device=device).gid_index


if __name__ == "__main__":
    main()

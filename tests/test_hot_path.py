"""The hot path: its C under sanitizers, how many instructions it takes, and how much Python runs around it.

The numbers have some slack, for compilers differ. A change that needs more raises them here, where it is seen.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.build import build  # noqa: E402
from build_verbs import FFI_DIR, SOURCES  # noqa: E402

C = ROOT / "tests" / "c"

#: Instructions of one operation in C on the null provider, beyond those of a write in plain C, which are about 300.
#: "list" and "again list" are one entry of 64, and compared with nothing.
INSTRUCTIONS = {
    "move": 225,
    "write": 240,
    "again": 265,
    "copy": 230,
    "send": 490,
    "recv": 190,
    "list": 108,
    "again list": 97,
}

#: Calls of Python functions and of C functions, and bytecodes, of one operation that is complete at once.
PYTHON = {
    "write": (1, 3, 72),
    "write of a plain remote": (2, 4, 99),
    "write bytes": (1, 4, 88),
    "write, with a timeout": (3, 5, 136),
    "prepared write": (1, 1, 24),
    "write_many": (3, 12, 275),
    "prepared write_many": (1, 1, 25),
    "batch of 8 writes": (65, 60, 1800),
    "read": (1, 3, 70),
    "send": (1, 2, 54),
    "send bytes": (1, 4, 69),
    "awaited prepared write": (3, 3, 105),
    "recv": (1, 2, 55),
    "recv, with a timeout": (2, 3, 95),
    "recv_into": (3, 5, 120),
    "recv, lent": (23, 14, 450),
    "awaited write": (3, 3, 175),
    "awaited write bytes": (3, 5, 190),
    "awaited read": (10, 14, 450),
    "awaited send": (3, 3, 155),
    "awaited recv": (3, 3, 125),
}

#: Python functions that one end of a connection calls, on a context that it is not the first on, with one message sent.
LIFE = 345


def compiled(target: Path, source: str, *options: str) -> Path:
    """Compile a program of ``tests/c`` with everything in ``ffi/src``; warnings are errors."""
    included = "".join(f'#include "{ROOT / FFI_DIR / "src" / name}.c"\n' for name in SOURCES)
    (target / "sources.h").write_text(included)
    program = target / source
    # A build of the module has uses for every function that is static here.
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-pthread"]
    command = ["cc", *flags, *options, f"-I{target}", "-o", str(program), str(C / f"{source}.c")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_engine_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    options = ["-O1", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    program = compiled(tmp_path, "engine_test", *options)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, f"in {done.stdout.splitlines()[-1:]}:\n{done.stderr}"
    assert len(done.stdout.splitlines()) >= 30


def instructions(program: Path, case: str, function: str, times: int = 400) -> float:
    """Count with callgrind, per call of one function."""
    options = ["--tool=callgrind", "--callgrind-out-file=/dev/null", f"--toggle-collect=count_{function}"]
    command = ["valgrind", *options, str(program), case, str(times)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    found = re.search(r"Collected : (\d+)", said)
    assert found, said
    return int(found[1]) / times


def test_instructions_in_c(tmp_path: Path) -> None:
    program = compiled(tmp_path, "count", "-O2")
    floor = instructions(program, "floor", "floor")
    assert 150 < floor < 450, "the yardstick itself has changed"
    counted = {
        "move": instructions(program, "move", "move") - floor,
        "write": instructions(program, "write", "write") - floor,
        "again": instructions(program, "again", "again") - floor,
        "copy": instructions(program, "copy", "copy") - floor,
        "send": instructions(program, "message", "send") - floor,
        "recv": instructions(program, "message", "recv") - floor,
        "list": instructions(program, "list", "list") / 64,
        "again list": instructions(program, "again_list", "again_list") / 64,
    }
    assert {name: count for name, count in counted.items() if count > INSTRUCTIONS[name]} == {}, counted


PROGRAM = """
    import asyncio, json, sys
    from array import array
    import pyverbs_lite as pvl
    from bench.pair import pairs

    def counted(before, call):
        for _ in range(3):
            before(), call()
        calls, bytecodes = {"call": 0, "c_call": 0}, 0

        def profile(frame, event, arg):
            if event in calls:
                calls[event] += 1

        def trace(frame, event, arg):
            nonlocal bytecodes
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            bytecodes += event == "opcode"
            return trace

        before()
        sys.setprofile(profile)
        call()
        sys.setprofile(None)
        before()
        sys.settrace(trace)
        call()
        sys.settrace(None)
        return calls["call"] - 1, calls["c_call"] - 1, bytecodes  # without the lambda, and what ends the counting

    def nothing():
        pass

    def batch():
        with left.batch() as gathered:
            for _ in range(8):
                gathered.write(remote, part)
        gathered.work.wait()

    def at_once(coroutine):
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("it was not complete at once")

    async def awaited():
        async with pvl.aio.listen("127.0.0.1", 0, device="null0", buffers={"target": bytearray(4096)}) as listener:
            accepting = asyncio.ensure_future(listener.accept(20))
            async with pvl.aio.connect("127.0.0.1", listener.port, device="null0") as left, await accepting as right:
                part, remote = (await left.register(bytearray(4096)))[:64], left.remote["target"][:64]
                data, send, recv = bytes(64), lambda: at_once(left.send(part)), lambda: at_once(right.recv())
                tick = left.prepare_write(remote, part)
                return {
                    "awaited prepared write": counted(nothing, lambda: at_once(tick())),
                    "awaited write": counted(nothing, lambda: at_once(left.write(remote, part))),
                    "awaited write bytes": counted(nothing, lambda: at_once(left.write(remote, data))),
                    "awaited read": counted(nothing, lambda: at_once(left.read(remote, part))),
                    "awaited send": counted(nothing, lambda: (at_once(left.send(part)), at_once(right.recv()))[0]),
                    "awaited recv": counted(send, lambda: at_once(right.recv())),
                }

    loop = asyncio.run(awaited())
    with pairs(1, 4096, device="null0") as made:
        left, right = made[0]
        part, remote, data = left.register(bytearray(4096))[:64], left.remote["target"][:64], bytes(64)
        rows = array("Q", range(0, 64 * 32, 64)), array("Q", range(0, 64 * 64, 128)), array("Q", [64] * 32)
        many, whole = left.prepare_write_many(left.remote["target"], part.mr, *rows), left.remote["target"]
        plain = pvl.RemoteBuffer(remote.addr, remote.rkey, remote.length)
        print(json.dumps({
            "write": counted(nothing, lambda: left.write(remote, part)),
            "write bytes": counted(nothing, lambda: left.write(remote, data)),
            "write, with a timeout": counted(nothing, lambda: left.write(remote, part, timeout=1.0)),
            "write of a plain remote": counted(nothing, lambda: left.write(plain, part)),
            "read": counted(nothing, lambda: left.read(remote, part)),
            "prepared write": counted(nothing, lambda run=left.prepare_write(remote, part).run: run()),
            "write_many": counted(nothing, lambda: left.write_many(whole, part.mr, *rows)),
            "batch of 8 writes": counted(nothing, batch),
            "prepared write_many": counted(nothing, lambda run=many.run: run()),
            "send": counted(nothing, lambda: (left.send(part), right.recv())[0]),
            "send bytes": counted(nothing, lambda: (left.send(data), right.recv())[0]),
            "recv": counted(lambda: left.send(part), lambda: right.recv()),
            "recv, with a timeout": counted(lambda: left.send(part), lambda: right.recv(timeout=1.0)),
            "recv_into": counted(lambda: left.send(part), lambda into=bytearray(64): right.recv_into(into)),
            "recv, lent": counted(lambda: left.send(part), lambda: right.recv(lend=True).release()),
            **loop,
        }))
"""


def test_python_around_one_operation() -> None:
    code = "\n".join(line[4:] for line in PROGRAM.splitlines())
    environment = {**os.environ, "LD_PRELOAD": str(build() / "libnull.so"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    for send, receive in (("send", "recv"), ("send bytes", "recv"), ("awaited send", "awaited recv")):
        counted[send] = [both - one for both, one in zip(counted[send], counted[receive], strict=True)]
    too_much = {
        name: (found, PYTHON[name])
        for name, found in counted.items()
        if any(count > most for count, most in zip(found, PYTHON[name], strict=True))
    }
    assert not too_much, counted


def test_python_of_a_connections_life() -> None:
    environment = {**os.environ, "LD_PRELOAD": str(build() / "libnull.so"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from bench.process import calls_of_a_life; print(calls_of_a_life())"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert 100 < int(done.stdout) < LIFE

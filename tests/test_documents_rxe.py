"""The examples of the README and of examples/ run as they stand, as two processes where they are two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import connected

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = dict(
    re.findall(r"```python\n# (?:server|client): (\w+\.py)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
)
#: Example -> what its client prints, and what its server prints.
EXPECTED = {
    "two_sided": ("b'HELLO' 42\n", ""),
    "one_sided": ("0 b'\\x05\\x00\\x00\\x00'\n", "written by RDMA 7\n"),
}


def test_every_readme_example_is_run_here() -> None:
    assert set(BLOCKS) == {f"{name}_{side}.py" for name in EXPECTED for side in ("server", "client")}


@pytest.mark.rdma
@pytest.mark.parametrize("name", EXPECTED)
def test_readme_example(name: str, tmp_path: Path) -> None:
    waiting = tmp_path / "waiting"
    for side in ("server", "client"):
        code = BLOCKS[f"{name}_{side}.py"].replace("server.example", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
        (tmp_path / f"{side}.py").write_text(code)
    # The client must not dial before the server listens; the example itself has no reason to say when it does.
    (tmp_path / "run_server.py").write_text(
        "import pyverbs_lite, pathlib, runpy\n"
        "listen = pyverbs_lite.listen\n"
        "def announce(*args, **options):\n"
        "    listener = listen(*args, **options)\n"
        f"    pathlib.Path({str(waiting)!r}).touch()\n"
        "    return listener\n"
        "pyverbs_lite.listen = announce\n"
        f"runpy.run_path({str(tmp_path / 'server.py')!r})\n"
    )
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "run_server.py")], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            deadline = 200
            while not waiting.exists() and deadline:
                deadline -= 1
                with pytest.raises(subprocess.TimeoutExpired):
                    server.wait(0.05)
            client = subprocess.run(
                [sys.executable, str(tmp_path / "client.py")], capture_output=True, text=True, timeout=30, check=False
            )
            printed = server.communicate(timeout=30)[0]
        finally:
            server.kill()
    assert (client.stderr, client.returncode, server.returncode) == ("", 0, 0)
    assert (client.stdout, printed) == EXPECTED[name]


@pytest.mark.rdma
def test_quickstart() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "quickstart.py")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (run.stderr, run.returncode) == ("", 0)
    for word in ("device", "GID", "MTU", "RESET → INIT → RTR → RTS", "compare and swap", "MB/s", "all right"):
        assert word in run.stdout


@pytest.mark.rdma
def test_many_requests_of_the_readme() -> None:
    (block,) = re.findall(r"```python\n(work = .*?)```", (ROOT / "README.md").read_text(), re.S)
    served = bytearray(b"before" + bytes((1 << 20) - 6))
    with connected({"buffers": {"cache": served}}) as (conn, _):
        places = {"offsets": [0, 100], "remote_offsets": [20_000, 30_000], "lengths": [40, 7]}
        filled = block.replace("bytearray(1 << 20)", "bytearray(b'rows' * (1 << 18))")
        scope: dict[str, Any] = {"conn": conn, "cache": conn.remote["cache"], **places}
        exec(filled, scope)
        assert scope["first"] == b"before" + bytes(4090)
        assert scope["rows"].view[8192:8256] == b"before" + bytes(58)
        assert (served[4096:8192], served[20_000:20_041], served[30_000:30_008]) == (
            b"rows" * 1024,
            b"rows" * 10 + b"\0",
            b"rowsrow\0",
        )

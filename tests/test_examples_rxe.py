"""The short examples, each run as its user would: they check their own bytes, and say so in one line."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PYTHON = [sys.executable, "-W", "error"]
#: Example -> what it prints.
ALONE = {
    "anyio_echo.py": "6 answers, each to its question\n",
    "parameter_server.py": "40 steps by 3 workers: [390.0, -5135.0, 120.0], each added once\n",
    "broadcast.py": "840000 bytes of float32 to each of 3 peers, whose SHA-256 is right\n",
    "reply_server.py": "8 clients, 5860 in all, 52 pieces sold\n",
    "kv_cache.py": "300 values are right, read while their owner was stopped\n",
}
SHORT = ("aio_echo.py", "cm_hello.py", "file_copy.py", *ALONE)


@pytest.mark.parametrize("name", SHORT)
def test_a_short_example_is_short_and_is_listed(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 40
    assert f"`{name}`" in (ROOT / "README.md").read_text()


@pytest.mark.rdma
@pytest.mark.parametrize("name", ALONE)
def test_an_example_that_starts_its_peers(name: str) -> None:
    done = subprocess.run(
        [*PYTHON, str(EXAMPLES / name)], capture_output=True, text=True, timeout=100, check=False, cwd="/"
    )
    assert (done.stdout, done.stderr, done.returncode) == (ALONE[name], "", 0)


@pytest.mark.rdma
@pytest.mark.parametrize(
    ("host", "options", "size"),
    [("127.0.0.1", [], (2 << 20) + 4321), ("192.0.2.1", ["--cm"], 5), ("198.51.100.1", ["--cm"], 1 << 20)],
)
def test_a_file_is_copied(host: str, options: list[str], size: int, tmp_path: Path) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.write_bytes(content[:size])
    command = [*PYTHON, str(EXAMPLES / "file_copy.py")]
    with subprocess.Popen(
        [*command, "serve", str(original), host, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            client = subprocess.run(
                [*command, host, port, str(copy), *options], capture_output=True, text=True, timeout=60, check=False
            )
            printed, errors = server.communicate(timeout=30)
        finally:
            server.kill()
    assert (client.stderr, client.returncode, printed, errors, server.returncode) == ("", 0, "", "", 0)
    digest = hashlib.sha256(content[:size]).hexdigest()[:16]
    assert re.fullmatch(rf"{size} bytes copied, SHA-256 {digest}… on both sides\n", client.stdout)
    assert copy.read_bytes() == content[:size]

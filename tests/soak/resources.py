"""What must not pile up: of a process, and of the kernel for all devices."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pyverbs_lite as pvl

__all__ = ["address", "changes", "kernel", "of_process", "process", "settled", "warm"]

_KINDS = ("ctx", "pd", "cq", "qp", "mr", "srq", "cm_id")


def _rdma(*words: str) -> list[dict[str, object]]:
    shown = subprocess.run(["rdma", "-j", "resource", "show", *words], capture_output=True, text=True, check=True)
    found: list[dict[str, object]] = json.loads(shown.stdout or "[]")
    return found


def kernel() -> dict[str, int]:
    """Count the kernel's objects of all devices, and the bytes of their memory regions."""
    devices = _rdma()
    counts = {kind: sum(int(str(row.get(kind, 0))) for row in devices) for kind in _KINDS}
    return {**counts, "mrlen": sum(int(str(row.get("mrlen", 0))) for row in _rdma("mr"))}


def process(pid: int | str = "self") -> dict[str, int]:
    """Count a process's descriptors, threads, and KiB of pinned and of resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(value) for name, value in re.findall(r"^(VmPin|VmLck|VmRSS|Threads):\s+(\d+)", status, re.M)}
    return {"fd": len(os.listdir(f"/proc/{pid}/fd")), **found}


def of_process() -> dict[str, int]:
    """Count what this process must give back."""
    gc.collect()
    found = process()
    del found["VmRSS"]
    return {**found, "python threads": threading.active_count()}


def address(context: pvl.Context) -> str | None:
    """Return an IPv4 address of a device, if it has one."""
    port_num = context.active_port() or 1
    return next((str(row.gid.ipv4_mapped) for row in context.gid_table(port_num) if row.gid.ipv4_mapped), None)


def warm(host: str) -> None:
    """Let librdmacm open what it keeps for as long as the process lives."""
    with pvl.cm.listen(host, 0) as listener:
        closed = listener.port
    with suppress(pvl.HandshakeError):
        pvl.cm.connect(host, closed, timeout=10).close()


def changes(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what is not as it was."""
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def settled(before: dict[str, int], take: object, seconds: float = 10.0) -> dict[str, tuple[int, int]]:
    """Wait until all is as it was; return what is not."""
    from .tally import until

    assert callable(take)
    until(lambda: not changes(before, take()), seconds)
    return changes(before, take())

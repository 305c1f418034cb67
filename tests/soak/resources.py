"""What must not pile up: of a process, and of the kernel for all devices."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import threading
from pathlib import Path

__all__ = ["changes", "kernel", "of_process", "process", "settled"]

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


def changes(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what is not as it was."""
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def settled(before: dict[str, int], take: object, seconds: float = 10.0) -> dict[str, tuple[int, int]]:
    """Wait until all is as it was; return what is not."""
    from .tally import until

    assert callable(take)
    until(lambda: not changes(before, take()), seconds)
    return changes(before, take())

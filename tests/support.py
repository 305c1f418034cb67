"""Helpers for tests that talk to a device: pairs of QPs and of connections, in one process."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv6Address
from typing import Any

import pyverbs_lite as pvl
from pyverbs_lite import gid
from pyverbs_lite.endpoint import Endpoint

A = pvl.AccessFlags
ALL_ACCESS = A.LOCAL_WRITE | A.REMOTE_WRITE | A.REMOTE_READ | A.REMOTE_ATOMIC
#: Different on the two sides, so that a swap shows.
LEFT_PSN, RIGHT_PSN = 0x00ABCD, 0xFEDC01


def endpoint(qp_num: int, **changes: Any) -> Endpoint:
    """Return a record of a QP that is not there; no two of its numbers are the same."""
    record: dict[str, Any] = {
        "psn": 0x123000 + qp_num,
        "lid": 0,
        "gid": IPv6Address(f"::ffff:10.0.{qp_num >> 8 & 0xFF}.{qp_num & 0xFF}"),
        "link_layer": pvl.LinkLayer.ETHERNET,
        "mtu": pvl.MTU.MTU_1024,
        "max_rd_atomic": 1,
        "max_dest_rd_atomic": 2,
        "max_message_size": 300,
        "recv_depth": 4,
        "max_msg_sz": 5000,
    }
    return Endpoint(qp_num=qp_num, **{**record, **changes})


def own_gid(context: pvl.Context, port_num: int = 1) -> pvl.GidEntry:
    """Return the GID that the library itself would choose."""
    port = context.query_port(port_num)
    return gid.choose(context.gid_table(port_num), link_layer=port.link_layer, device=context.name)


def make_qp(
    pd: pvl.PD, cq: pvl.CQ, *, qp_type: pvl.QPType = pvl.QPType.RC, depth: int = 16, sge: int = 2, inline: int = 40
) -> pvl.QP:
    cap = pvl.QPCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=sge, max_recv_sge=sge, max_inline_data=inline)
    return pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, qp_type=qp_type))


def path_to(context: pvl.Context, row: pvl.GidEntry) -> pvl.AHAttr:
    return pvl.AHAttr(port_num=1, grh=pvl.GlobalRoute(dgid=row.gid, sgid_index=row.gid_index))


def connect_qps(
    left: pvl.QP, right: pvl.QP, *, access: pvl.AccessFlags = ALL_ACCESS, depth: int = 4, **rts: Any
) -> None:
    """Bring two RC QPs of one device to RTS, each other's peer, with unequal PSNs."""
    row = own_gid(left.context)
    for mine, other, my_psn, its_psn in ((left, right, LEFT_PSN, RIGHT_PSN), (right, left, RIGHT_PSN, LEFT_PSN)):
        mine.to_init(qp_access_flags=access)
        mine.to_rtr(
            ah_attr=path_to(mine.context, row),
            dest_qp_num=other.qp_num,
            rq_psn=its_psn,
            max_dest_rd_atomic=depth,
        )
        mine.to_rts(sq_psn=my_psn, max_rd_atomic=depth, **rts)


def completions(cq: pvl.CQ, count: int, timeout: float = 10.0) -> list[pvl.WC]:
    """Wait for exactly so many completions."""
    found: list[pvl.WC] = []
    while len(found) < count:
        found += cq.wait(timeout, n=count - len(found))
    return found


@contextmanager
def connected(
    server: dict[str, Any] | None = None,
    client: dict[str, Any] | None = None,
    host: str = "127.0.0.1",
    *,
    via: Any = pvl,
) -> Iterator[tuple[pvl.Connection, pvl.Connection]]:
    """Yield the client's and the server's end of one connection over the loopback address, both in this process.

    They are made by ``pvl``, or via ``pvl.cm``.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(via.listen(host, 0, **(server or {})))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        accepting = pool.submit(listener.accept, 20)
        left = stack.enter_context(via.connect(host, listener.port, **(client or {})))
        right = stack.enter_context(accepting.result(20))
        yield left, right


def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[float], Any]:
    """Start a call in a thread of its own; the returned function waits for its result or raises its exception."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = call(*args, **kwargs)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result(timeout: float = 20.0) -> Any:
        thread.join(timeout)
        assert not thread.is_alive(), f"{call} is still running"
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    return result


def counts() -> dict[str, int]:
    """Count what must not pile up: this process's descriptors, and the kernel's objects of the device."""
    shown = subprocess.run(["rdma", "resource", "show", "rxe0"], capture_output=True, text=True, check=True).stdout
    words = shown.split()
    kernel = {kind: int(words[words.index(kind) + 1]) for kind in ("pd", "cq", "qp", "mr", "ctx")}
    return {**kernel, "fd": len(os.listdir("/proc/self/fd"))}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that what a block makes goes with it, without waiting for the garbage collector."""
    before = counts()
    yield
    limit = time.monotonic() + 5
    while counts() != before and time.monotonic() < limit:  # iWARP ends a refused connection in a thread
        time.sleep(0.02)
    assert counts() == before


def descriptors() -> Counter[str]:
    """Count this process's descriptors by what they are of."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{fd}"))] += 1
    return found


def settle_threads() -> None:
    """Wait until the library's threads have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("pyverbs_lite"):
            thread.join(20)
            assert not thread.is_alive(), f"{thread.name} is still running"

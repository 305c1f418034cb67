"""The three return-code conventions of libibverbs and librdmacm, in one place.

* ``check_rc``: the function returns 0 or an errno (some drivers return it negated). ``ibv_modify_qp`` and most.
* ``check_ptr``: the function returns a pointer, or NULL and sets errno. ``ibv_create_qp`` and the like.
* ``check_neg``: the function returns a value, or -1 and sets errno. ``ibv_query_gid``, ``rdma_*``.

``require`` is for what the headers of this build may be too old for: it is asked before the verb is.

``ffi.errno`` is read only where the convention says that it was set: anywhere else it is stale.
"""

from __future__ import annotations

import errno
import resource

from ..errors import QueueFullError, RouteError, UnsupportedError, VerbsOSError
from ..ffi import CData, ffi, lib

__all__ = ["check_neg", "check_ptr", "check_rc", "os_error", "require"]

#: Verbs whose memory the kernel pins.
_PINNING = ("ibv_reg_", "ibv_create_qp", "ibv_create_cq", "ibv_create_srq")
_UNSUPPORTED = "this device, its driver or this libibverbs does not have it"
_CLASSES: dict[int, type[VerbsOSError]] = {
    errno.EOPNOTSUPP: UnsupportedError,
    errno.ENOSYS: UnsupportedError,
    errno.EPROTONOSUPPORT: UnsupportedError,
}
#: (operation, errno) -> class, where the operation changes what an errno means.
_CLASSES_BY_OPERATION: dict[tuple[str, int], type[VerbsOSError]] = {
    ("ibv_post_send", errno.ENOMEM): QueueFullError,
    ("ibv_post_recv", errno.ENOMEM): QueueFullError,
    ("ibv_bind_mw", errno.ENOMEM): QueueFullError,
    ("ibv_post_srq_recv", errno.ENOMEM): QueueFullError,
    ("ibv_wr_complete", errno.ENOMEM): QueueFullError,
    ("ibv_wr_complete", errno.ENOSPC): QueueFullError,
    ("ibv_modify_qp", errno.ETIMEDOUT): RouteError,
    ("ibv_modify_qp", errno.ENETUNREACH): RouteError,
    ("ibv_modify_qp", errno.EHOSTUNREACH): RouteError,
}
_NO_ROUTE = "no route from the local GID to the remote one: check the GID index, its type and the remote GID"
_QUEUE_FULL = (
    "the queue is full, or the request has more SGEs or inline bytes than the QP was made for;"
    " poll completions and post again"
)
_HINTS: dict[tuple[str, int], str] = {
    (
        "ibv_open_device",
        errno.EACCES,
    ): "no permission on the uverbs device node: join its group or run as root",
    (
        "ibv_open_device",
        errno.ENOENT,
    ): "the uverbs device node is missing: is ib_uverbs loaded, is /dev mounted?",
    ("ibv_reg_mr", errno.EINVAL): (
        "the access flags or the range are not valid (remote write and atomic need LOCAL_WRITE)"
    ),
    ("ibv_reg_mr", errno.EFAULT): "the range is not mapped, or is read-only and LOCAL_WRITE was asked for",
    ("ibv_create_qp", errno.EINVAL): "a depth, SGE count or inline size is above what the device allows",
    ("ibv_create_qp", errno.ENOMEM): "the device has no room for another QP, or not for one this large",
    ("ibv_create_cq", errno.EINVAL): "cqe must be 1 to the device's max_cqe",
    ("ibv_modify_qp", errno.EINVAL): "the kernel or the device refused an attribute's value",
    ("ibv_modify_qp", errno.ETIMEDOUT): _NO_ROUTE,
    ("ibv_modify_qp", errno.ENETUNREACH): _NO_ROUTE,
    ("ibv_modify_qp", errno.EHOSTUNREACH): _NO_ROUTE,
    ("ibv_post_send", errno.ENOMEM): _QUEUE_FULL,
    ("ibv_post_recv", errno.ENOMEM): _QUEUE_FULL,
    ("ibv_post_srq_recv", errno.ENOMEM): _QUEUE_FULL,
    ("ibv_wr_complete", errno.ENOMEM): _QUEUE_FULL,
    ("ibv_wr_complete", errno.ENOSPC): _QUEUE_FULL,
    ("ibv_post_send", errno.EINVAL): (
        "the QP is not in RTS, or opcode, SGE count, inline size or atomic alignment is not valid for it"
    ),
    ("ibv_post_recv", errno.EINVAL): "the QP is in RESET, or the request has more SGEs than max_recv_sge",
}
#: What an errno of a verb mostly means, where the operation says no more.
_GENERAL_HINTS = {
    errno.EINVAL: "the kernel or the device refused a value, or the object is not in a state for this",
    errno.EPERM: "the process may not do this: it may need a capability (CAP_NET_RAW, CAP_IPC_LOCK)",
    errno.EACCES: "the process may not do this: check the permissions of /dev/infiniband",
    errno.ENOMEM: "the device, its driver or the kernel is out of memory or of objects of this kind",
    errno.EBUSY: "something still uses the object: close what was made from it first",
    errno.ENODEV: "the device is gone: it was unplugged or its driver was unloaded",
    errno.EIO: "the device or its driver failed, or gave no reason",
    errno.EFAULT: "an address is not mapped in this process",
    errno.EMFILE: "the process has too many open files (ulimit -n)",
    errno.ETIMEDOUT: "the device or the fabric did not answer in time",
}


def _memlock_hint() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    return (
        f"registered memory is pinned and counts against RLIMIT_MEMLOCK, now {shown}, as queues do on most devices;"
        " raise it (ulimit -l), or ask for less"
    )


def os_error(operation: str, number: int, hint: str = "") -> VerbsOSError:
    """Make the exception for an errno that a verb gave; 0 becomes EIO, never "Success"."""
    number = abs(number) or errno.EIO
    key = (operation, number)
    cls = _CLASSES_BY_OPERATION.get(key) or _CLASSES.get(number, VerbsOSError)
    if not hint:
        hint = _HINTS.get(key) or (_UNSUPPORTED if cls is UnsupportedError else _GENERAL_HINTS.get(number, ""))
        if operation.startswith(_PINNING) and number in (errno.ENOMEM, errno.EAGAIN):
            hint = f"{hint}; {_memlock_hint()}" if hint else _memlock_hint()
    return cls(number, operation, hint)


def check_rc(operation: str, rc: int, hint: str = "") -> None:
    """Raise unless a verb that returns an errno returned 0.

    Raises:
        VerbsOSError: or the subclass that fits; ``errno`` is positive also where the driver returned it negated.

    """
    if rc == 0:
        return
    # -1 is ambiguous: EPERM negated, or the "-1 and errno" convention of older code paths.
    raise os_error(operation, (ffi.errno or errno.EPERM) if rc == -1 else rc, hint)


def check_ptr(operation: str, pointer: CData, hint: str = "") -> CData:
    """Return the pointer, or raise what errno says where it is NULL.

    Raises:
        VerbsOSError: or the subclass that fits.

    """
    if not pointer:
        raise os_error(operation, ffi.errno, hint)
    return pointer


def check_neg(operation: str, value: int, hint: str = "") -> int:
    """Return the value, or raise what errno says where it is negative.

    Raises:
        VerbsOSError: or the subclass that fits.

    """
    if value < 0:
        raise os_error(operation, ffi.errno if value == -1 else value, hint)
    return value


def require(feature: str, what: str) -> None:
    """Raise unless this build has a feature that is newer than rdma-core 28 (``lib.PVL_HAS_<feature>``).

    Raises:
        UnsupportedError: with EOPNOTSUPP, and the version that brought ``what``.

    """
    since: int = getattr(lib, f"PVL_HAS_{feature}")
    if since < 0:
        hint = f"needs rdma-core {-since} or newer; this build was made against an older one"
        raise UnsupportedError(errno.EOPNOTSUPP, what, hint)

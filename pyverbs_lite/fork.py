"""Fork beside registered memory.

A fork shares the parent's pages until one side writes; then that side gets a copy, and before Linux 5.12 it could be
the parent, whose registered memory then was no longer what the device sees. ``fork_init`` keeps registered pages out of
forked children instead; newer kernels need nothing. Verbs objects cannot be used in a forked child in any case.
"""

from __future__ import annotations

import errno

from ._base.check import check_rc, require
from .enums import ForkStatus
from .ffi import lib

__all__ = ["fork_init", "is_fork_initialized"]

_HINTS = {
    errno.EINVAL: (
        "memory was registered already, and its pages cannot be found any more: call fork_init() before anything is"
        " registered, or set RDMAV_FORK_SAFE=1 in the environment"
    ),
    errno.ENOSYS: "this kernel cannot keep pages out of forked children",
}


def fork_init() -> None:
    """Make ``fork`` safe beside registered memory; call it before anything is registered.

    Does nothing where the kernel needs none of it. Otherwise whole pages of what is registered afterwards are missing
    in a forked child: it crashes if it touches them.

    Raises:
        VerbsOSError: it is too late, as something is registered, or the kernel cannot.

    Verb: ibv_fork_init
    """
    # Without an answer before rdma-core 35; then asking twice does no harm.
    if lib.PVL_HAS_FORK_STATUS > 0 and lib.ibv_is_fork_initialized() == ForkStatus.UNNEEDED:
        return
    rc = lib.ibv_fork_init()
    check_rc("ibv_fork_init", rc, _HINTS.get(rc, ""))


def is_fork_initialized() -> ForkStatus:
    """Tell whether ``fork`` is safe beside registered memory: by ``fork_init``, by the kernel itself, or not at all.

    Raises:
        UnsupportedError: this libibverbs is older than 35.

    Verb: ibv_is_fork_initialized
    """
    require("FORK_STATUS", "ibv_is_fork_initialized")
    return ForkStatus(lib.ibv_is_fork_initialized())

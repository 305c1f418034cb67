"""Objects of another process, used in this one: by its command descriptor and their handles.

The process that made the objects keeps them open, and sends descriptor and handles as it likes::

    socket.send_fds(sock, [struct.pack("IIQ", pd.handle, mr.handle, mr.addr)], [context.export_fd()])

The other side imports them. Closing what was imported leaves the original as it is; closing the original ends both.
"""

from __future__ import annotations

import os

from ._base.access import check_access
from ._base.args import check_int
from ._base.check import check_ptr, require
from ._objects.device_attr import known
from .device import Context, close_device
from .dm import DM
from .enums import AccessFlags, TransportType
from .ffi import CData, ffi, lib
from .mr import MR
from .pd import PD

__all__ = ["ImportedContext", "ImportedDM", "ImportedMR", "ImportedPD", "import_device"]

_U32 = (1 << 32) - 1


def import_device(cmd_fd: int) -> ImportedContext:
    """Make a context of a command descriptor that another process exported (``Context.export_fd``).

    The descriptor stays the caller's, to close at any time.

    Raises:
        VerbsOSError: it is no such descriptor.
        UnsupportedError: the driver cannot import, or this libibverbs is older than 31.

    Verb: ibv_import_device
    """
    return ImportedContext(cmd_fd)


class ImportedContext(Context):
    """A context of another process's; make it with ``import_device``.

    Verb: ibv_import_device
    """

    def __init__(self, cmd_fd: int) -> None:
        require("IMPORT_DEVICE", "ibv_import_device")
        own_fd = os.dup(check_int("cmd_fd", cmd_fd, 0, (1 << 31) - 1))
        try:
            handle = check_ptr("ibv_import_device", lib.ibv_import_device(own_fd))
        except BaseException:
            os.close(own_fd)
            raise
        self.name = ffi.string(lib.ibv_get_device_name(handle.device)).decode()
        self.transport_type = known(TransportType, handle.device.transport_type)
        self._begin()
        self._own(handle, close_device, label=f"imported Context of {self.name}")


class ImportedPD(PD):
    """A protection domain of another process's; make it with ``Context.import_pd``.

    Verb: ibv_import_pd
    """

    def __init__(self, context: Context, handle: int) -> None:
        require("IMPORT_DEVICE", "ibv_import_pd")
        check_int("handle", handle, 0, _U32)
        self.context = context
        raw = check_ptr("ibv_import_pd", lib.ibv_import_pd(context._handle, handle))
        self._own(raw, _unimport_pd, context, label=f"imported PD of {context.name}")


class ImportedMR(MR):
    """A memory region of another process's; make it with ``PD.import_mr``. It has no view.

    Verb: ibv_import_mr
    """

    def __init__(self, pd: PD, handle: int, *, addr: int, access: AccessFlags) -> None:
        require("IMPORT_DEVICE", "ibv_import_mr")
        check_int("handle", handle, 0, _U32)
        check_int("addr", addr, 0, (1 << 64) - 1)
        access = check_access(access)
        raw = check_ptr("ibv_import_mr", lib.ibv_import_mr(pd._handle, handle))
        self._adopt(pd, raw, addr, int(raw.length), access, destroy=_unimport_mr)


class ImportedDM(DM):
    """Device memory of another process's; make it with ``Context.import_dm``.

    Verb: ibv_import_dm
    """

    def __init__(self, context: Context, handle: int, length: int) -> None:
        require("IMPORT_DM", "ibv_import_dm")
        check_int("handle", handle, 0, _U32)
        self.context = context
        self.length = check_int("length of device memory", length, 1, (1 << 63) - 1)
        raw = check_ptr("ibv_import_dm", lib.ibv_import_dm(context._handle, handle))
        self._own(raw, _unimport_dm, context, label=f"imported DM of {length} bytes")


def _unimport_pd(handle: CData) -> None:
    lib.ibv_unimport_pd(handle)


def _unimport_mr(handle: CData) -> None:
    lib.ibv_unimport_mr(handle)


def _unimport_dm(handle: CData) -> None:
    lib.ibv_unimport_dm(handle)

"""All of ``infiniband/verbs.h`` and ``rdma/rdma_cma.h``, compiled in cffi's API mode.

The one place that imports the compiled module. ``lib`` holds the functions and constants under their C names,
``ffi`` makes and reads C data::

    from pyverbs_lite.ffi import ffi, lib

    count = ffi.new("int *")
    devices = lib.ibv_get_device_list(count)
"""

from typing import TYPE_CHECKING

try:
    from ._verbs import ffi, lib
except ImportError as error:
    if "libibverbs" in str(error) or "librdmacm" in str(error):
        raise ImportError(
            "pyverbs_lite needs the RDMA user-space libraries: install libibverbs1, librdmacm1 and"
            f" ibverbs-providers (Debian, Ubuntu) or rdma-core (Fedora, RHEL). The loader said: {error}"
        ) from error
    raise

if TYPE_CHECKING:
    from ._verbs import CData
else:
    CData = ffi.CData

__all__ = ["CData", "ffi", "lib"]

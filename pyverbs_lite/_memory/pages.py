"""Memory straight from the kernel: page-aligned, zeroed, on huge pages where there are any."""

from __future__ import annotations

import mmap
import re
from contextlib import suppress

from ..ffi import lib

__all__ = ["huge_page_size", "map_huge", "map_pages"]

_MEMINFO = "/proc/meminfo"
# Shared, so that a fork does not turn pinned pages into copies; populated, because pinning touches all anyway.
_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE


def map_pages(nbytes: int) -> mmap.mmap:
    """Map memory of whole pages.

    Raises:
        OSError, OverflowError: there is not so much.
    """
    return mmap.mmap(-1, nbytes, _FLAGS)


def huge_page_size() -> int:
    """Return the size of the kernel's huge pages, or 0 where it has none."""
    with suppress(OSError), open(_MEMINFO, encoding="ascii") as file:
        if match := re.search(r"^Hugepagesize:\s+(\d+) kB", file.read(), re.M):
            return int(match[1]) * 1024
    return 0


def map_huge(nbytes: int) -> mmap.mmap | None:
    """Map memory of whole huge pages, which may be longer than asked for; None where there are not enough.

    The administrator sets huge pages aside (``vm.nr_hugepages``); most machines have none.
    """
    if not (lib.PVL_MAP_HUGETLB and (page := huge_page_size())):
        return None
    try:
        # Rounded up here: to unmap what is no multiple of the page fails.
        return mmap.mmap(-1, -(-nbytes // page) * page, _FLAGS | lib.PVL_MAP_HUGETLB)
    except (OSError, OverflowError):
        return None

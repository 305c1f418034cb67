"""Pages from the kernel, huge ones where there are any; and blocks cut from them."""

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyverbs_lite._memory import pages as _pages
from pyverbs_lite._memory.buddy import SMALLEST, Buddy, block_size
from pyverbs_lite.ffi import ffi


def address(memory):
    return int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))


def test_pages_are_zeroed_and_start_at_a_page():
    memory = _pages.map_pages(10_000)
    assert len(memory) == 10_000
    assert not any(memory[:])
    assert address(memory) % mmap.PAGESIZE == 0


def meminfo(monkeypatch, tmp_path, text):
    path = tmp_path / "meminfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(_pages, "_MEMINFO", path)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("MemTotal: 7 kB\nHugepagesize:       2048 kB\nHugetlb:   0 kB\n", 2 << 20),
        ("Hugepagesize:    1048576 kB\n", 1 << 30),
        ("MemTotal: 7 kB\n", 0),  # a kernel without them
        (None, 0),  # no /proc
    ],
)
def test_the_kernel_says_how_large_a_huge_page_is(monkeypatch, tmp_path, text, size):
    meminfo(monkeypatch, tmp_path, text)
    assert _pages.huge_page_size() == size
    if not size:
        assert _pages.map_huge(4096) is None


class Kernel:
    """Has a number of free huge pages; gives ordinary memory in their place, and notes what it was asked for."""

    def __init__(self, monkeypatch, free, page=2 << 20):
        self.free, self.page, self.asked = free, page, []
        self.real = mmap.mmap
        monkeypatch.setattr(_pages, "huge_page_size", lambda: page)
        monkeypatch.setattr(_pages.mmap, "mmap", self.map)

    def map(self, fd, length, flags):
        self.asked.append((length, flags))
        if length > self.free * self.page:
            raise OSError(12, "Cannot allocate memory")
        self.free -= length // self.page
        return self.real(-1, length, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)


@pytest.mark.parametrize(("nbytes", "mapped"), [(1, 1), (2 << 20, 1), ((2 << 20) + 1, 2), (4 << 20, 2)])
def test_a_huge_mapping_is_whole_huge_pages(monkeypatch, nbytes, mapped):
    kernel = Kernel(monkeypatch, free=2)
    assert len(_pages.map_huge(nbytes)) == mapped * kernel.page
    assert kernel.asked == [(mapped * kernel.page, _pages._FLAGS | 0x40000)]


def test_where_huge_pages_do_not_suffice_there_is_no_mapping(monkeypatch):
    Kernel(monkeypatch, free=1)
    assert _pages.map_huge(3 << 20) is None
    assert _pages.map_huge(1 << 62) is None


def test_this_machine_gives_huge_pages_or_none():
    memory = _pages.map_huge(5000)
    if memory is not None:  # as the administrator has set aside
        assert len(memory) % _pages.huge_page_size() == 0
        memory[4999] = 7
        memory.close()


@pytest.mark.parametrize(("nbytes", "size"), [(1, 64), (64, 64), (65, 128), (4096, 4096), (4097, 8192)])
def test_a_block_is_a_power_of_two(nbytes, size):
    assert block_size(nbytes) == size


def test_a_block_starts_at_a_multiple_of_its_size_and_joins_its_half_again():
    buddy = Buddy(1024)
    small, large = buddy.take(64), buddy.take(512)
    assert small % 64 == 0
    assert large % 512 == 0
    assert small // 512 != large // 512
    assert buddy.take(512) is None
    assert buddy.used == 576
    buddy.give_back(small, 64)
    buddy.give_back(large, 512)
    assert buddy.used == 0
    assert buddy.take(1024) == 0
    assert buddy.take(64) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=80))
def test_blocks_never_overlap_and_all_come_back(steps):
    buddy, out = Buddy(4096), {}
    for taking, number in steps:
        if taking:
            size = block_size(number)
            if (offset := buddy.take(size)) is None:
                continue
            assert offset % size == 0
            assert offset + size <= 4096
            assert all(offset + size <= other or other + length <= offset for other, length in out.items())
            out[offset] = size
        elif out:
            offset = sorted(out)[number % len(out)]
            buddy.give_back(offset, out.pop(offset))
        assert buddy.used == sum(out.values())
    for offset, size in out.items():
        buddy.give_back(offset, size)
    assert buddy.take(4096) == 0
    assert SMALLEST == 64

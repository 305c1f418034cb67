"""What a cache of registrations may keep, and for how long: the rules, without a device."""

import array
import ctypes
import errno
import gc
import mmap
import os
import threading
import weakref

import numpy as np
import pytest

import pyverbs_lite as pvl
from pyverbs_lite._memory import registrations as _registrations
from pyverbs_lite._memory.buffer import as_bytes_view
from pyverbs_lite._memory.keeper import keeper_of
from pyverbs_lite._memory.registrations import Store
from pyverbs_lite.ffi import ffi, lib

A = pvl.AccessFlags
NOTHING = A(0)


class Storage:
    def __init__(self, nbytes, resizable):
        self.memory = (ctypes.c_ubyte * nbytes)()
        if resizable is not None:
            self.resizable = lambda: resizable


class Tensor:
    """Answers as a torch tensor does."""

    def __init__(self, nbytes, resizable):
        self.storage = Storage(nbytes, resizable)
        self.nbytes = nbytes
        self.device = type("Device", (), {"type": "cpu"})()

    def data_ptr(self):
        return ctypes.addressof(self.storage.memory)

    def is_contiguous(self):
        return True

    def untyped_storage(self):
        return self.storage


# Who keeps memory in place


def test_an_array_of_numpy_is_the_keeper_of_all_its_views():
    base = np.arange(100, dtype=np.uint32)
    for view in (base, base[3:50], base.reshape(10, 10)[2:4], base.view(np.uint8)[8:], memoryview(base)[5:9]):
        assert keeper_of(as_bytes_view(view)) == (base, None)


def test_a_weakly_referenced_array_does_not_move():
    """What the cache relies on, and what a held buffer does not do: see the last line."""
    array_ = np.arange(8)
    ref = weakref.ref(array_)
    for refcheck in (True, False):
        with pytest.raises(ValueError, match="cannot resize"):
            array_.resize(1000, refcheck=refcheck)
    del ref
    view = memoryview(array_)
    array_.resize(1000, refcheck=False)
    view.release()


@pytest.mark.parametrize("exporter", [bytearray(64), b"x" * 64, array.array("b", [0] * 64)])
def test_what_frombuffer_made_keeps_the_exporter_in_place(exporter):
    made = np.frombuffer(exporter, dtype=np.uint8)
    assert keeper_of(as_bytes_view(made[2:9])).owner is made
    assert keeper_of(as_bytes_view(exporter)) is None


@pytest.mark.parametrize(
    "unsafe",
    [
        np.ndarray(64, np.uint8, buffer=bytearray(64)),  # the bytearray may be resized under it
        np.ndarray(64, np.uint8, buffer=mmap.mmap(-1, 4096)),
        np.frombuffer(mmap.mmap(-1, 4096), np.uint8),  # madvise takes its pages away
        np.frombuffer((ctypes.c_ubyte * 64)(), np.uint8),  # ctypes.resize moves it
        np.from_dlpack(np.arange(64, dtype=np.uint8)),
        np.ctypeslib.as_array((ctypes.c_ubyte * 64)()),
        (ctypes.c_ubyte * 64)(),
        np.float64(1.5),
    ],
    ids=lambda value: type(getattr(value, "base", value)).__name__,
)
def test_memory_that_may_move_has_no_keeper(unsafe):
    assert keeper_of(as_bytes_view(unsafe)) is None


def test_a_memory_map_of_numpy_has_no_keeper(tmp_path):
    (tmp_path / "file").write_bytes(bytes(4096))
    assert keeper_of(as_bytes_view(np.memmap(tmp_path / "file"))) is None


@pytest.mark.parametrize(("resizable", "kept"), [(False, True), (True, False), (None, False)])
def test_a_tensor_is_a_keeper_if_its_storage_cannot_be_resized(resizable, kept):
    tensor = Tensor(64, resizable)
    keeper = keeper_of(as_bytes_view(tensor))
    assert keeper == ((tensor, tensor.storage) if kept else None)


def test_without_numpy_nothing_of_numpy_is_looked_for(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "numpy")
    assert keeper_of(as_bytes_view(bytearray(64))) is None


# What the store keeps


class Device:
    """Notes what it registers, and can refuse."""

    def __init__(self, refuse=()):
        self.calls, self.refuse = [], list(refuse)

    def __call__(self, region, addr, length, access):
        self.calls.append((addr, length, A(access)))
        return self.refuse.pop(0) if self.refuse else 0


def take(store, buffer, device, access=NOTHING):
    view = as_bytes_view(buffer)
    return store.take(view, int(ffi.cast("uintptr_t", ffi.from_buffer(view))), access, device)


def use(store, buffer, device, access=NOTHING):
    """Take and leave."""
    entry, serial = take(store, buffer, device, access)
    entry.leave(serial)
    return entry


@pytest.fixture
def store():
    return Store(10_000, hold=False)


@pytest.fixture
def device():
    return Device()


def state(store):
    return store.hits, store.misses, store.uncached, store.evictions, store.invalidations


def test_the_second_use_is_a_hit(store, device):
    data = np.zeros(1000, np.uint8)
    first = use(store, data, device)
    assert use(store, data, device) is first
    assert device.calls == [(data.ctypes.data, 1000, A.LOCAL_WRITE)]  # as it may be written to later
    assert state(store) == (1, 1, 0, 0, 0)
    assert (store.bytes, len(store.entries), store.in_use) == (1000, 1, 0)


def test_a_part_of_what_is_registered_is_a_hit_and_more_is_not(store, device):
    base = np.zeros(1000, np.uint8)
    use(store, base[100:200], device)
    use(store, base[120:180], device)
    use(store, base[50:150], device)
    use(store, base[150:201], device)
    assert [length for _, length, _ in device.calls] == [100, 100, 51]
    assert state(store) == (1, 3, 0, 0, 0)


def test_an_old_range_among_many_of_one_array_is_found_exactly(store, device):
    base = np.zeros(1000, np.uint8)
    for start in range(0, 1000, 10):
        use(store, base[start : start + 10], device)
    use(store, base[0:10], device)
    assert store.hits == 1


def test_access_that_covers_is_a_hit_and_less_is_registered_anew(store, device):
    data = np.zeros(1000, np.uint8)
    data.flags.writeable = False
    narrow = use(store, data, device)
    assert device.calls[-1][2] == A(0)
    data.flags.writeable = True
    wide = use(store, data, device, A.LOCAL_WRITE)
    assert wide is not narrow
    assert narrow.retired
    data.flags.writeable = False
    assert use(store, data, device) is wide
    assert state(store) == (1, 2, 0, 0, 1)
    assert store.bytes == 1000


def test_a_narrow_entry_in_use_goes_when_that_ends(store, device):
    data = np.zeros(1000, np.uint8)
    data.flags.writeable = False
    narrow, serial = take(store, data, device)
    data.flags.writeable = True
    wide = use(store, data, device, A.LOCAL_WRITE)
    assert {narrow, wide} == store.registered
    narrow.leave(serial)
    narrow.leave(serial)
    assert store.registered == {wide}


def test_memory_is_held_until_it_is_deregistered(store, device, monkeypatch):
    """An export of the use's own is all that keeps this one from being resized."""
    data, seen = bytearray(1000), []
    entry, serial = take(store, data, device)
    gc.collect()

    class Lib:
        PVL_STOPPED = lib.PVL_STOPPED

        def pvl_deregister(self, region):
            with pytest.raises(BufferError):
                data.append(1)
            seen.append(region)
            return 0

    monkeypatch.setattr(_registrations, "lib", Lib())
    entry.leave(serial)
    assert seen == [entry.c]
    data.append(1)


@pytest.mark.parametrize("hit", [True, False])
def test_an_interrupt_leaves_nothing_in_use(store, device, hit, monkeypatch):
    data = np.zeros(1000, np.uint8)
    if hit:
        use(store, data, device)

    class Struck(Exception):
        pass

    class Lock:
        times = 1 if hit else 2  # to find it, and to enter it

        def __enter__(self):
            pass

        def __exit__(self, *_):
            self.times -= 1
            if not self.times:
                raise Struck

    monkeypatch.setattr(store, "lock", Lock())
    with pytest.raises(Struck):
        take(store, data, device)
    monkeypatch.undo()
    assert store.in_use == 0
    assert len(store.registered) == 1
    assert not use(store, data, device).retired
    assert state(store)[:2] == (2 if hit else 1, 1)


def test_remote_access_is_never_kept(store, device):
    data = np.zeros(1000, np.uint8)
    use(store, data, device)
    entry = use(store, data, device, A.LOCAL_WRITE | A.REMOTE_READ)
    assert entry.retired
    assert entry not in store.registered
    assert state(store) == (0, 1, 1, 0, 0)


def test_a_freed_array_is_forgotten_before_its_memory_is(store, device):
    data = np.zeros(1000, np.uint8)
    address = data.ctypes.data
    entry = use(store, data, device)
    key = entry.key
    view = data[10:20]
    del data
    assert store.entries  # the view keeps it
    del view
    assert (store.bytes, len(store.entries), store.registered, store.invalidations) == (0, 0, set(), 1)
    for _ in range(50):  # the allocator gives the address again
        again = np.zeros(1000, np.uint8)
        if again.ctypes.data == address:
            break
    assert use(store, again, device) is not entry
    assert store.hits == 0
    assert key[1] == address


def test_an_array_of_another_owner_at_a_kept_address_misses(store, device):
    """As if the callback of a dead owner had not run yet: its id is another object's."""
    data = np.zeros(1000, np.uint8)
    entry = use(store, data, device)
    entry.owner = weakref.ref(np.zeros(1))
    assert use(store, data, device) is not entry


def test_a_cycle_of_garbage_is_forgotten_too(store, device):
    class Held(np.ndarray):
        pass

    data = np.zeros(1000, np.uint8).view(Held).copy()
    data.self = data
    use(store, data, device)
    del data
    gc.collect()
    assert not store.entries


def test_the_least_recently_used_makes_room(store, device):
    arrays = [np.zeros(4000, np.uint8) for _ in range(3)]
    first, second = use(store, arrays[0], device), use(store, arrays[1], device)
    use(store, arrays[0], device)
    third = use(store, arrays[2], device)
    assert set(store.entries.values()) == {first, third}
    assert second not in store.registered
    assert (store.bytes, store.evictions) == (8000, 1)


def test_what_is_in_use_is_never_evicted(store, device):
    arrays = [np.zeros(4000, np.uint8) for _ in range(4)]
    held = [take(store, data, device) for data in arrays[:2]]
    entry, serial = take(store, arrays[2], device)
    assert entry.retired  # no room: for this use alone
    assert set(store.entries.values()) == {entry for entry, _ in held}
    assert (store.bytes, store.evictions, store.uncached) == (8000, 0, 1)
    entry.leave(serial)
    assert entry not in store.registered
    for entry, serial in held:
        entry.leave(serial)
    use(store, arrays[3], device)
    assert (store.bytes, store.evictions) == (8000, 1)


def test_what_is_larger_than_the_budget_evicts_nothing(store, device):
    use(store, np.zeros(10), device)
    kept = np.zeros(5000, np.uint8)
    use(store, kept, device)
    use(store, np.zeros(10_001, np.uint8), device)
    assert len(store.entries) == 1
    assert (store.evictions, store.uncached) == (0, 1)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN])
def test_want_of_pinned_memory_empties_the_cache_and_is_tried_again(store, number):
    device = Device()
    arrays = [np.zeros(1000, np.uint8) for _ in range(3)]
    idle = use(store, arrays[0], device)
    busy, serial = take(store, arrays[1], device)
    device.refuse = [number]
    entry = use(store, arrays[2], device)
    assert set(store.entries.values()) == {entry}
    assert store.registered == {entry, busy}
    assert idle not in store.registered
    busy.leave(serial)
    device.refuse = [number, number]
    with pytest.raises(pvl.VerbsOSError) as caught:
        use(store, arrays[1], device)
    assert caught.value.errno == number
    device.refuse = [number]  # nothing is left to let go of: not tried again
    with pytest.raises(pvl.VerbsOSError):
        use(store, arrays[1], device)
    assert not store.registered


@pytest.mark.parametrize(("rc", "error"), [(errno.EFAULT, pvl.VerbsOSError), (lib.PVL_STOPPED, pvl.ClosedError)])
def test_a_refused_registration_leaves_nothing(store, rc, error):
    data = np.zeros(1000, np.uint8)
    use(store, data, Device())
    with pytest.raises(error):
        use(store, np.zeros(2000, np.uint8), Device([rc]))
    assert len(store.registered) == len(store.entries) == 1


def test_exporters_are_not_kept_unless_asked_for(store, device):
    data = bytearray(5000)
    for buffer in (data, b"x" * 5000, mmap.mmap(-1, 4096), Tensor(5000, True)):
        assert use(store, buffer, device).retired
    data.extend(b"more")
    assert state(store) == (0, 0, 4, 0, 0)
    assert not store.registered


def test_held_exporters_stay_alive_and_in_place_until_they_are_discarded(device):
    store = Store(10_000, hold=True)
    data, pages = bytearray(3000), mmap.mmap(-1, 4096)
    entry = use(store, data, device)
    use(store, memoryview(data)[10:20], device)
    use(store, pages, device)
    assert store.hits == 1
    with pytest.raises(BufferError):
        data.extend(b"more")
    with pytest.raises(BufferError):
        pages.close()
    assert store.discard(as_bytes_view(data)) == 1
    data.extend(b"more")
    assert use(store, data, device) is not entry
    assert store.clear() == 2
    data.extend(b"more")
    pages.close()
    assert store.discard(as_bytes_view(data)) == 0
    assert store.discard(as_bytes_view((ctypes.c_ubyte * 8)())) == 0


def test_a_use_holds_its_memory(store, device):
    data = np.zeros(1000, np.uint8)
    alive = weakref.ref(data)
    entry, serial = take(store, data, device)
    del data
    gc.collect()
    assert alive() is not None
    assert len(store.entries) == 1
    entry.leave(serial)
    assert alive() is None
    assert not store.registered


def test_what_is_discarded_in_use_goes_when_that_ends(store, device):
    data = np.zeros(1000, np.uint8)
    entry, serial = take(store, data, device)
    assert store.discard(as_bytes_view(data)) == 1
    assert use(store, data, device) is not entry
    assert entry in store.registered
    entry.leave(serial)
    assert entry not in store.registered


def test_a_closed_store_keeps_nothing(store, device):
    data = np.zeros(1000, np.uint8)
    entry, serial = take(store, data, device)
    store.close()
    assert not store.registered
    entry.leave(serial)
    assert use(store, data, device).retired


def test_a_store_that_is_gone_is_no_concern_of_an_array_s():
    data = np.zeros(1000, np.uint8)
    store = Store(10_000, hold=False)
    use(store, data, Device())
    del store
    gc.collect()
    del data


def test_a_refused_deregistration_is_tried_again_at_the_end(store, device, monkeypatch):
    answers = [errno.EBUSY]
    monkeypatch.setattr(_registrations, "lib", FakeLib(answers))
    data = np.zeros(1000, np.uint8)
    use(store, data, device)
    del data
    assert len(store.registered) == 1
    store.close()
    assert not store.registered


class FakeLib:
    PVL_STOPPED = lib.PVL_STOPPED

    def __init__(self, answers):
        self.answers = answers

    def pvl_deregister(self, region):
        return self.answers.pop(0) if self.answers else 0


def test_a_fork_lets_go_before_and_never_in_the_child(store, device):
    data, used = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
    use(store, data, device)
    entry, serial = take(store, used, device)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            entry.leave(serial)  # the region is the parent's
            del data
            answer = bytes([store.foreign, entry in store.registered, len(store.entries)])
        except BaseException:
            answer = b"failed"
        os.write(writing, answer)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == bytes([1, 1, 0])
    os.close(reading), os.close(writing)
    assert not store.entries
    assert store.registered == {entry}
    assert not store.foreign
    entry.leave(serial)
    assert not store.registered


def test_threads_use_and_free_at_the_same_time():
    store, errors = Store(6000, hold=False), []
    shared = [np.zeros(1000 + i, np.uint8) for i in range(4)]

    def work(seed):
        device = Device()
        try:
            for i in range(300):
                own = np.zeros(500 + i % 7, np.uint8)
                for data in (own, shared[(seed + i) % 4], own[3:50]):
                    entry, serial = take(store, data, device)
                    assert entry.covers(data.ctypes.data, data.nbytes, A.LOCAL_WRITE)
                    entry.leave(serial)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert store.bytes == sum(entry.length for entry in store.entries.values()) <= 6000
    assert store.registered == set(store.entries.values())
    store.clear()
    assert not store.registered
    assert not store._ranges

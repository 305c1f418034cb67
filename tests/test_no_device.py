"""Device lists, without a device: an empty one, faked ones, and what is said about them."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

import pyverbs_lite as pvl
from pyverbs_lite import device
from pyverbs_lite._objects import device_attr as _device_attr
from pyverbs_lite._objects import gid_tables as _gid_tables
from pyverbs_lite.ffi import ffi, lib

ETH, IB = pvl.LinkLayer.ETHERNET, pvl.LinkLayer.INFINIBAND


class FakeLib:
    """The compiled module with another device list; remembers what was freed, and refuses pointers after that."""

    def __init__(self, names, *, error=0, refuse=()):
        self.freed = 0
        self.opened = []
        self._names = [ffi.new("char[]", name.encode()) for name in names]
        self._devices = [ffi.new("struct ibv_device *") for _ in names]
        self._array = ffi.new("struct ibv_device *[]", [*self._devices, ffi.NULL])
        self._error = error
        self._refuse = refuse

    def __getattr__(self, name):
        return getattr(lib, name)

    def ibv_get_device_list(self, count):
        if self._error:
            ffi.errno = self._error
            return ffi.NULL
        count[0] = len(self._devices)
        return self._array

    def ibv_free_device_list(self, array):
        assert array == self._array
        self.freed += 1

    def _index(self, pointer):
        assert not self.freed, "a device of a list that was freed"
        return self._devices.index(pointer)

    def ibv_get_device_name(self, pointer):
        return self._names[self._index(pointer)]

    def ibv_get_device_guid(self, pointer):
        return int.from_bytes(bytes([0x02, 0, 0, 0, 0, 0xFE, 0x10, self._index(pointer)]), sys.byteorder)

    def ibv_open_device(self, pointer):
        self.opened.append(self._index(pointer))
        ffi.errno = errno.EACCES
        return ffi.NULL


@pytest.fixture
def fake(monkeypatch):
    def install(names, **options):
        library = FakeLib(names, **options)
        monkeypatch.setattr(device, "lib", library)
        return library

    return install


def test_an_empty_list_is_a_pointer_to_nothing(fake):
    library = fake([])
    assert pvl.devices() == []
    assert library.freed == 1


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOENT])
def test_a_kernel_without_rdma_has_no_devices(fake, number):
    fake([], error=number)
    assert pvl.devices() == []
    with pytest.raises(pvl.DeviceNotFoundError, match="no RDMA device"):
        pvl.open_device()


def test_any_other_failure_is_told(fake):
    fake([], error=errno.EPERM)
    with pytest.raises(pvl.VerbsOSError, match="ibv_get_device_list failed: EPERM") as caught:
        pvl.devices()
    assert caught.value.errno == errno.EPERM


def test_the_list_is_read_before_it_is_freed(fake):
    library = fake(["mlx5_0", "rxe0"])
    assert [(info.name, info.guid) for info in pvl.devices()] == [
        ("mlx5_0", 0x0200000000FE1000),
        ("rxe0", 0x0200000000FE1001),
    ]
    assert library.freed == 1


@pytest.mark.parametrize("name", ["nope", "RXE0", "rxe0 ", "", "rxe"])
def test_a_name_that_is_not_there_shows_those_that_are(fake, name):
    library = fake(["mlx5_0", "rxe0"])
    with pytest.raises(pvl.DeviceNotFoundError, match="the devices are: mlx5_0, rxe0") as caught:
        pvl.open_device(name)
    assert repr(name) in str(caught.value)
    assert isinstance(caught.value, LookupError)
    assert (library.freed, library.opened) == (1, [])


def test_a_name_where_there_is_no_device_at_all(fake):
    fake([])
    with pytest.raises(pvl.DeviceNotFoundError, match="'rxe0'; the devices are: this machine has none"):
        pvl.Context("rxe0")


@pytest.mark.parametrize("name", [b"rxe0", 0, ["rxe0"], object()])
def test_a_device_is_named_by_text(fake, name):
    fake(["rxe0"])
    with pytest.raises(TypeError, match="a device is opened by its name"):
        pvl.Context(name)


def test_opening_happens_while_the_list_is_held_and_null_is_seen(fake):
    library = fake(["mlx5_0", "rxe0"])
    with pytest.raises(pvl.VerbsOSError, match="ibv_open_device failed: EACCES") as caught:
        pvl.Context("rxe0")
    assert caught.value.errno == errno.EACCES
    assert (library.opened, library.freed) == ([1], 1)


def test_the_one_device_that_cannot_be_opened_says_why(fake, monkeypatch):
    fake(["rxe0"])
    monkeypatch.setattr(FakeLib, "_index", lambda self, pointer: self._devices.index(pointer))
    with pytest.raises(pvl.VerbsOSError, match="no permission on the uverbs device node"):
        pvl.open_device()


def test_a_device_that_cannot_be_opened_does_not_hide_the_others(fake, monkeypatch):
    library = fake(["mlx5_0", "rxe0"])
    monkeypatch.setattr(FakeLib, "_index", lambda self, pointer: self._devices.index(pointer))
    with pytest.raises(pvl.DeviceNotFoundError, match=r"mlx5_0 cannot be opened .*; rxe0 cannot be opened"):
        pvl.open_device()
    assert library.opened == [0, 1]


def in_python(script):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


def test_importing_never_fails_and_says_nothing():
    done = in_python("import pyverbs_lite; print(type(pyverbs_lite.devices()))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "<class 'list'>\n", "")


def test_a_machine_without_devices(fake):
    fake([])
    with pytest.raises(pvl.DeviceNotFoundError, match="modprobe rdma_rxe"):
        pvl.open_device()


def test_a_failed_opening_leaves_nothing_to_clean_up_at_exit():
    done = in_python(
        "import pyverbs_lite as p\ntry: p.open_device('nope')\nexcept p.DeviceNotFoundError as e: print('refused')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


# ---------------------------------------------------------------- values newer than we are


def test_a_value_without_a_name_does_not_make_a_device_unusable():
    raw = ffi.new("struct ibv_port_attr *")
    raw.state, raw.max_mtu, raw.active_mtu, raw.link_layer = pvl.PortState.ACTIVE, 6, 0, 7
    raw.lid, raw.gid_tbl_len = 0xBEEF, 1024
    port = _device_attr.read_struct(pvl.PortAttr, raw)
    assert (port.state, port.max_mtu, port.active_mtu, port.link_layer) == (pvl.PortState.ACTIVE, 6, 0, 7)
    assert (port.lid, port.gid_tbl_len) == (0xBEEF, 1024)


@pytest.mark.parametrize(
    ("link_layer", "flags", "needed"),
    [(ETH, 0, True), (IB, 0, False), (IB, lib.IBV_QPF_GRH_REQUIRED, True), (ETH, lib.IBV_QPF_GRH_REQUIRED, True)],
)
def test_who_needs_a_global_route(link_layer, flags, needed):
    raw = ffi.new("struct ibv_port_attr *")
    raw.link_layer, raw.flags = link_layer, flags
    raw.max_mtu = raw.active_mtu = pvl.MTU.MTU_4096
    assert _device_attr.read_struct(pvl.PortAttr, raw).grh_required is needed


# ---------------------------------------------------------------- the GID table of an old libibverbs


def sysfs(folder, rows):
    """Lay out a port's folder; a missing type or interface cannot be read, as in the kernel."""
    for kind in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (folder / kind).mkdir(parents=True)
    for index, (gid, kind, netdev) in enumerate(rows):
        (folder / "gids" / str(index)).write_text(f"{gid}\n")
        for name, value in (("types", kind), ("ndevs", netdev)):
            if value is not None:
                (folder / "gid_attrs" / name / str(index)).write_text(f"{value}\n")
    return folder


ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
FE80 = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
V4 = "0000:0000:0000:0000:0000:ffff:c000:0201"


def port_of(link_layer, length):
    raw = ffi.new("struct ibv_port_attr *")
    raw.link_layer, raw.gid_tbl_len = link_layer, length
    raw.max_mtu = raw.active_mtu = pvl.MTU.MTU_4096
    return _device_attr.read_struct(pvl.PortAttr, raw)


def test_the_table_from_sysfs_on_ethernet(tmp_path):
    rows = [(FE80, "IB/RoCE v1", "lo"), (ZERO, None, None), (V4, "RoCE v2", "lo"), (V4, "RoCE v2", "gone0")]
    table = _gid_tables.table_from_sysfs(sysfs(tmp_path, rows), port_of(ETH, 6))  # two rows more than there are files
    assert [(row.gid_index, str(row), row.gid_type, row.netdev) for row in table] == [
        (0, "fe80::5054:ff:fe12:3456", pvl.GIDType.ROCE_V1, "lo"),
        (2, "::ffff:192.0.2.1", pvl.GIDType.ROCE_V2, "lo"),
        (3, "::ffff:192.0.2.1", pvl.GIDType.ROCE_V2, "gone0"),
    ]
    assert [row.ndev_ifindex for row in table] == [1, 1, 0]


def test_the_table_from_sysfs_on_infiniband_has_no_interfaces(tmp_path):
    folder = sysfs(tmp_path, [(FE80, "IB/RoCE v1", None), (ZERO, "IB/RoCE v1", None)])
    table = _gid_tables.table_from_sysfs(folder, port_of(IB, 2))
    assert [(row.gid_index, row.gid_type, row.netdev) for row in table] == [(0, pvl.GIDType.IB, "")]

"""Objects of another process: no driver here imports any, so the rest is tested with one that pretends to."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest
from support import ALL_ACCESS

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma


class FakeImports:
    """Stands in for ``lib``: what is imported is opened or made anew."""

    def __init__(self):
        self.calls = []
        self.fds = []
        self.live = set()

    def __getattr__(self, name):
        return getattr(lib, name)

    def ibv_import_device(self, fd):
        self.fds.append(fd)
        count = ffi.new("int *")
        devices = lib.ibv_get_device_list(count)
        try:
            return lib.ibv_open_device(devices[0])
        finally:
            lib.ibv_free_device_list(devices)

    def _imported(self, kind, handle, thing):
        self.calls.append((kind, handle))
        self.live.add(thing)
        return thing

    def ibv_import_pd(self, context, handle):
        return self._imported("pd", handle, lib.ibv_alloc_pd(context))

    def ibv_unimport_pd(self, pd):
        self.live.remove(pd)
        assert lib.ibv_dealloc_pd(pd) == 0

    def ibv_import_mr(self, pd, handle):
        self.page = bytearray(4096)
        return self._imported("mr", handle, lib.ibv_reg_mr(pd, ffi.from_buffer(self.page), 4096, ALL_ACCESS))

    def ibv_unimport_mr(self, mr):
        self.live.remove(mr)
        assert lib.ibv_dereg_mr(mr) == 0

    def ibv_import_dm(self, context, handle):
        return self._imported("dm", handle, ffi.new("struct ibv_dm *"))

    def ibv_unimport_dm(self, dm):
        self.live.remove(dm)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeImports()
    monkeypatch.setattr("pyverbs_lite.sharing.lib", fake)
    return fake


def open_fds():
    return sorted(int(name) for name in os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------- on drivers that cannot


@pytest.mark.parametrize("device", ["rxe0", "siw0"])
def test_soft_devices_export_and_do_not_import(device):
    with pvl.Context(device) as context:
        fd = context.export_fd()
        try:
            before = open_fds()
            with pytest.raises(pvl.UnsupportedError, match="ibv_import_device"):
                pvl.import_device(fd)
            assert open_fds() == before
            assert os.fstat(fd).st_rdev == os.fstat(context._handle.cmd_fd).st_rdev
        finally:
            os.close(fd)
        context.query_port(1)  # closing the duplicate closed nothing else


def test_a_descriptor_that_is_no_devices():
    with open("/dev/null") as file, pytest.raises(pvl.VerbsOSError, match="ibv_import_device") as caught:
        pvl.import_device(file.fileno())
    assert caught.value.errno in (errno.EINVAL, errno.ENODEV)
    left, right = socket.socketpair()
    with left, right, pytest.raises(pvl.VerbsOSError, match="EINVAL"):
        pvl.import_device(left.fileno())


@pytest.mark.parametrize(
    ("fd", "error"), [(-1, ValueError), (None, TypeError), ("3", TypeError), (1 << 31, ValueError)]
)
def test_what_is_no_descriptor(fd, error):
    with pytest.raises(error, match="cmd_fd"):
        pvl.import_device(fd)


def test_a_descriptor_that_is_closed():
    with pytest.raises(OSError, match="Bad file descriptor"):
        pvl.import_device(999)


# ---------------------------------------------------------------- imported


def test_everything_that_can_be_imported(context, pd, fake):
    original = pd.alloc(64, ALL_ACCESS)
    fd = context.export_fd()
    with pvl.import_device(fd) as there:
        os.close(fd)  # ours to close, and not needed any more
        assert fake.fds != [fd]
        assert (there.name, there.transport_type) == (context.name, context.transport_type)
        assert isinstance(there, pvl.Context)
        domain = there.import_pd(pd.handle)
        region = domain.import_mr(original.handle, addr=original.addr, access=original.access)
        assert fake.calls == [("pd", pd.handle), ("mr", original.handle)]
        assert isinstance(domain, pvl.PD)
        assert isinstance(region, pvl.MR)
        assert (domain.context, region.pd) == (there, domain)
        assert (region.addr, region.length, region.access) == (original.addr, 4096, ALL_ACCESS)
        assert region[8:16].addr == original.addr + 8
        with pytest.raises(pvl.StateError, match="no memory of this process"):
            region.view  # noqa: B018
        with pytest.raises(pvl.StateError, match="only a registered buffer"):
            region.rereg(access=pvl.AccessFlags(0))
        there.query_device()
        there.alloc_pd().close()
        assert len(fake.live) == 2
    assert fake.live == set()
    assert (domain.closed, region.closed) == (True, True)
    assert (context.closed, pd.closed, original.closed) == (False, False, False)


def test_device_memory_is_imported(context, fake):
    with pvl.import_device(context._handle.cmd_fd) as there:
        memory = there.import_dm(5, 128)
        assert isinstance(memory, pvl.DM)
        assert memory.length == 128
        assert fake.calls == [("dm", 5)]
        memory.close()
        assert fake.live == set()


def test_dropped(context, fake):
    def make():
        there = pvl.import_device(context._handle.cmd_fd)
        there.import_pd(1).import_mr(2, addr=0, access=ALL_ACCESS)

    with pytest.warns(ResourceWarning) as caught:
        make()
    assert len(caught) == 3
    assert fake.live == set()


def test_what_cannot_be_imported(context, fake):
    with pvl.import_device(context._handle.cmd_fd) as there:
        domain = there.import_pd(1)
        for bad in (-1, 1 << 32):
            with pytest.raises(ValueError, match="handle"):
                there.import_pd(bad)
            with pytest.raises(ValueError, match="handle"):
                domain.import_mr(bad, addr=0, access=ALL_ACCESS)
            with pytest.raises(ValueError, match="handle"):
                there.import_dm(bad, 8)
        with pytest.raises(ValueError, match="addr"):
            domain.import_mr(1, addr=-1, access=ALL_ACCESS)
        with pytest.raises(TypeError, match="access"):
            domain.import_mr(1, addr=0, access=None)
        with pytest.raises(ValueError, match="length"):
            there.import_dm(1, 0)


def test_the_pieces_travel_to_another_process(context, pd):
    """The other side of the exchange as documented, up to the verb that the driver lacks."""
    child = """
import socket, sys
import pyverbs_lite as pvl
sock = socket.socket(fileno=int(sys.argv[1]))
message, (fd,), _, _ = socket.recv_fds(sock, 64, 1)
try:
    pvl.import_device(fd)
except pvl.UnsupportedError as error:
    print("handle", int.from_bytes(message, "big"), error.operation)
"""
    left, right = socket.socketpair()
    with left, right:
        fd = context.export_fd()
        socket.send_fds(left, [pd.handle.to_bytes(4, "big")], [fd])
        os.close(fd)
        done = subprocess.run(
            [sys.executable, "-c", child, str(right.fileno())],
            pass_fds=[right.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"handle {pd.handle} ibv_import_device\n"


# ---------------------------------------------------------------- fork


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_this_kernel_needs_no_care(context):
    context.query_port(1)
    assert pvl.is_fork_initialized() == pvl.ForkStatus.UNNEEDED
    pvl.fork_init()  # also when memory is registered already
    context.alloc_pd().alloc(64)
    pvl.fork_init()


class OldKernel:
    """Stands in for ``lib`` on a kernel before 5.12."""

    def __init__(self, status, rc):
        self.status, self.rc, self.calls = status, rc, 0

    def __getattr__(self, name):
        return getattr(lib, name)

    def ibv_is_fork_initialized(self):
        return self.status

    def ibv_fork_init(self):
        self.calls += 1
        return self.rc


def test_on_a_kernel_that_does(monkeypatch):
    old = OldKernel(lib.IBV_FORK_DISABLED, 0)
    monkeypatch.setattr("pyverbs_lite.fork.lib", old)
    assert pvl.is_fork_initialized() == pvl.ForkStatus.DISABLED
    pvl.fork_init()
    assert old.calls == 1


@pytest.mark.parametrize(
    ("rc", "match", "error"),
    [
        (errno.EINVAL, "before anything is registered", pvl.VerbsOSError),
        (errno.ENOSYS, "cannot keep pages", pvl.UnsupportedError),
        (errno.ENOMEM, "ibv_fork_init failed: ENOMEM", pvl.VerbsOSError),
    ],
)
def test_when_it_cannot_be(monkeypatch, rc, match, error):
    monkeypatch.setattr("pyverbs_lite.fork.lib", OldKernel(lib.IBV_FORK_DISABLED, rc))
    with pytest.raises(error, match=match) as caught:
        pvl.fork_init()
    assert caught.value.errno == rc


def test_a_fork_beside_registered_memory_harms_nobody():
    code = """
import os, sys, warnings
sys.path.insert(0, os.environ["TESTS"])
import pyverbs_lite as pvl
from support import ALL_ACCESS, completions, connect_qps, make_qp

pvl.fork_init()
with pvl.open_device() as context:
    pd, cq = context.alloc_pd(), context.create_cq(10)
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right)
    source, target = bytearray(b"before the fork."), bytearray(16)
    a, b = pd.reg_mr(source), pd.reg_mr(target, ALL_ACCESS)
    child = os.fork()
    if child == 0:
        source[:] = b"the child's copy"
        try:
            context.get_async_event(0)
        except pvl.ClosedError:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    source[:6] = b"after "
    left.post_send(pvl.SendWR(opcode=pvl.WROpcode.RDMA_WRITE, sg_list=[a], remote=pvl.RemoteBuffer.of(b)))
    assert completions(cq, 1)[0].status == pvl.WCStatus.SUCCESS
    print(os.waitstatus_to_exitcode(status), target.decode().replace(" ", "_"))
"""
    assert run(code, TESTS=os.path.dirname(__file__)) == ["7", "after__the_fork."]

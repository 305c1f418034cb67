"""First process of the guest: lays out its file systems, brings up rxe0 and siw0, runs one command.

Runs as root of the guest, isolated, with the host's Python. Three consoles of the guest are pipes of the
host: OUT and ERR carry the bytes of the command, CONTROL carries lines.
    guest to host   hello | ready | exit STATUS | fail REASON
    host to guest   signal NUMBER | size ROWS COLUMNS | closed out | closed err
End of file on CONTROL means that the host's half is gone: the machine powers off.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

OUT, ERR, CONTROL = "/dev/tty1", "/dev/tty2", "/dev/tty3"
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
DEVICE_PATIENCE = 10.0
ORPHAN_PATIENCE = 1.0

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 2, 4, 8, 4096
POWER_OFF = 0x4321FEDC

# /proc, which every root has, serves as the mount point of the layer that takes the writes.
LAYER = "/proc"
ROOT = f"{LAYER}/root"

OVERLAY = f"lowerdir=/,upperdir={LAYER}/up,workdir={LAYER}/work,redirect_dir=on"


class Mount(NamedTuple):
    """One call of mount(2)."""

    kind: str
    target: str
    data: str = ""
    flags: int = 0


BEFORE = (
    Mount("tmpfs", LAYER, "mode=755"),
    Mount("overlay", ROOT, OVERLAY),
    Mount("proc", f"{ROOT}/proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC),
    Mount("sysfs", f"{ROOT}/sys", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC),
    Mount("devtmpfs", f"{ROOT}/dev", "mode=755", MS_NOSUID),
    Mount("devpts", f"{ROOT}/dev/pts", "newinstance,ptmxmode=666,mode=620,gid=5", MS_NOSUID | MS_NOEXEC),
    Mount("tmpfs", f"{ROOT}/dev/shm", "mode=1777", MS_NOSUID | MS_NODEV),
    Mount("mqueue", f"{ROOT}/dev/mqueue", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC),
)

SYSCTLS = {
    # No duplicate address detection: link-local addresses, and the GIDs made of them, are there at once.
    "net/ipv6/conf/all/accept_dad": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/ipv4/ping_group_range": "0 2147483647",
}

# The MTU of 9000 gives rxe0 an active_mtu of 4096.
IP_BATCH = """\
link set lo up
link add veth0 mtu 9000 type veth peer name veth1 mtu 9000
address add 192.0.2.1/24 dev veth0
address add 2001:db8::1/64 dev veth0 nodad
address add 198.51.100.1/24 dev veth1
link set veth0 up
link set veth1 up
"""
RDMA_LINKS = (("rxe0", "rxe", "veth0"), ("siw0", "siw", "veth1"))
RXE_PORT = Path("/sys/class/infiniband/rxe0/ports/1")
RXE_GID = "0000:0000:0000:0000:0000:ffff:c000:0201"  # 192.0.2.1, mapped into IPv6
NODES = ("/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm")

libc = ctypes.CDLL(None, use_errno=True)


class GuestError(Exception):
    """The guest can't be set up; the message goes to the host."""


def mount(kind: str, target: str, data: str = "", flags: int = 0, source: str = "none") -> None:
    """Mount, or raise with what the kernel says."""
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(data))
    if libc.mount(*arguments):
        raise GuestError(f"mount of {kind} on {target}: {os.strerror(ctypes.get_errno())}")


def lay_out(job: dict[str, Any]) -> None:
    """Put the overlay over the host's tree, the working tree over the overlay, and move in.

    The root below was mounted read-only and stays so. The working tree is a second view of the host,
    writable, of that one folder.
    """
    for entry in BEFORE:
        if entry.kind == "overlay":
            for name in ("up", "work", "root"):
                os.mkdir(f"{LAYER}/{name}")
        os.makedirs(entry.target, exist_ok=True)
        mount(entry.kind, entry.target, entry.data, entry.flags)
    mount("hostfs", ROOT + job["tree"], data=job["tree"])
    cpuinfo = with_mhz(Path(f"{ROOT}/proc/cpuinfo").read_text(), job["mhz"])
    Path(f"{LAYER}/cpuinfo").write_text(cpuinfo)
    mount("", f"{ROOT}/proc/cpuinfo", flags=MS_BIND, source=f"{LAYER}/cpuinfo")
    for name, number in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        with contextlib.suppress(FileExistsError):
            os.symlink(f"/proc/self/fd{number}", f"{ROOT}/dev/{name}")
    os.chroot(ROOT)
    os.chdir("/")


def with_mhz(cpuinfo: str, mhz: str) -> str:
    """Add the clock line that perftest reads and User Mode Linux leaves out."""
    if "cpu MHz" in cpuinfo:
        return cpuinfo
    return re.sub(r"(?m)^(model name.*\n)", rf"\g<1>cpu MHz\t\t: {mhz}\n", cpuinfo)


def tool(*command: str, text: str = "") -> None:
    """Run a system tool; its complaint becomes ours."""
    try:
        done = subprocess.run(
            command, env={"PATH": SYSTEM_PATH}, input=text, text=True, stdout=-1, stderr=subprocess.STDOUT, check=False
        )
    except FileNotFoundError:
        raise GuestError(f"`{command[0]}` is not installed: apt-get install iproute2") from None
    if done.returncode:
        raise GuestError(f"`{' '.join(command)}` failed: {done.stdout.strip()}")


def bring_up_devices() -> None:
    """Make the network and the RDMA devices on it, and wait until a program can use them."""
    for name, value in SYSCTLS.items():
        Path("/proc/sys", name).write_text(value)
    tool("ip", "-batch", "-", text=IP_BATCH)
    for name, kind, netdev in RDMA_LINKS:
        tool("rdma", "link", "add", name, "type", kind, "netdev", netdev)
    for what, there in (
        ("port 1 of rxe0 is not ACTIVE", lambda: "ACTIVE" in (RXE_PORT / "state").read_text()),
        ("rxe0 has no GID for 192.0.2.1", has_gid),
        (f"no {' or '.join(NODES)}", lambda: all(map(os.path.exists, NODES))),
    ):
        wait_for(what, there)


def has_gid() -> bool:
    """Whether the GID that the IPv4 address gives is in rxe0's table."""
    return any((RXE_PORT / "gids" / str(index)).read_text().strip() == RXE_GID for index in range(8))


def wait_for(complaint: str, condition: Callable[[], bool]) -> None:
    """Wait for a condition, but not for ever."""
    deadline = time.monotonic() + DEVICE_PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise GuestError(f"{complaint} after {DEVICE_PATIENCE:.0f} s")
        time.sleep(0.005)


def set_limits() -> None:
    """Let the command pin memory and open files as it likes; it dumps a core only where it asks to."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, unlimited)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 1 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.RLIM_INFINITY))


def open_raw(path: str, flags: int) -> int:
    """Open a console that passes every byte as it is."""
    fd = os.open(path, flags | os.O_NOCTTY)
    tty.setraw(fd, termios.TCSANOW)
    return fd


def set_size(fd: int, rows: int, columns: int) -> None:
    """Give a console the size of the user's terminal."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def write_all(fd: int, data: bytes) -> None:
    """Write every byte."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Relay(threading.Thread):
    """Carries the bytes of a pipe, which is what the command sees, onto a console."""

    def __init__(self, console: int) -> None:
        super().__init__(daemon=True)
        self.source, self.sink = os.pipe()
        self.closed = False  # the reader on the host is gone
        self._console = console

    def run(self) -> None:
        """Carry until the last writer is gone."""
        while data := os.read(self.source, 1 << 16):
            if self.closed:
                break
            write_all(self._console, data)
        os.close(self.source)  # after a break the command meets a broken pipe, as it would on the host


class Session:
    """The command, its output and its signals."""

    def __init__(self, job: dict[str, Any], control: int) -> None:
        self._job = job
        self._control = control
        self._consoles = [open_raw(OUT, os.O_WRONLY), open_raw(ERR, os.O_WRONLY)]
        self._relays: dict[str, Relay] = {}
        self._pending = b""

    def say(self, line: str) -> None:
        """Send one line to the host."""
        write_all(self._control, line.encode(errors="backslashreplace").replace(b"\n", b" / ") + b"\n")
        termios.tcdrain(self._control)

    def run(self) -> None:
        """Run the command and report its status when the last byte of its output is with the host."""
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        status = self._start()
        if status is None:
            self.say("ready")
            status = self._serve(wake)
        self._end_orphans(wake)
        for relay in self._relays.values():
            relay.join()
        for console in self._consoles:
            termios.tcdrain(console)
        os.sync()  # the working tree's writes, too, are with the host before it hears of the end
        self.say(f"exit {status}")

    def _start(self) -> int | None:
        """Start the command; return a status where that is not possible."""
        out = self._stream("out", 0)
        err = out if self._job["merged"] else self._stream("err", 1)
        argv, cwd = self._job["argv"], self._job["cwd"]
        try:
            self._child = subprocess.Popen(
                argv, cwd=cwd, env=self._job["env"], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.write(err, f"rxe: {error.filename or argv[0]}: {error.strerror}\n".encode(errors="surrogateescape"))
            return 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
        finally:
            for relay in self._relays.values():
                os.close(relay.sink)
        return None

    def _stream(self, name: str, index: int) -> int:
        """Return a terminal where the host's stream is one, else a pipe: programs look at where they write."""
        console = self._consoles[index]
        if size := self._job["terminals"][index]:
            set_size(console, *size)
            return console
        relay = self._relays[name] = Relay(console)
        relay.start()
        return relay.sink

    def _serve(self, wake: int) -> int:
        while True:
            readable, _, _ = select.select([wake, self._control], [], [])
            if self._control in readable:
                self._listen()
            if wake in readable:
                os.read(wake, 4096)
                for pid, status in reaped():
                    if pid == self._child.pid:
                        return status

    def _listen(self) -> None:
        try:
            data = os.read(self._control, 4096)
        except OSError:  # a console that was hung up
            data = b""
        if not data:
            power_off()
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            verb, *words = line.decode().split()
            if verb == "signal":
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._child.pid, int(words[0]))
            elif verb == "size":
                for console, terminal in zip(self._consoles, self._job["terminals"], strict=True):
                    if terminal:
                        set_size(console, int(words[0]), int(words[1]))
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._child.pid, signal.SIGWINCH)
            elif verb == "closed" and words[0] in self._relays:
                self._relays[words[0]].closed = True

    def _end_orphans(self, wake: int) -> None:
        """Let what the command left behind finish what it writes, for a moment; then end it."""
        deadline = time.monotonic() + ORPHAN_PATIENCE
        while children_left() and (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([wake, self._control], [], [], left)
            if self._control in readable:
                self._listen()
            if wake in readable:
                os.read(wake, 4096)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but this process
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def reaped() -> list[tuple[int, int]]:
    """Reap the children that have ended, each with its status as a shell gives it."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1])
            found.append((ended[0], status if status >= 0 else 128 - status))
    return found


def children_left() -> bool:
    """Reap, and say whether anybody is still there."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def power_off() -> NoReturn:
    """End the machine, with what it wrote to the working tree in place."""
    os.sync()
    libc.reboot(POWER_OFF)
    os._exit(1)  # the first process may not end: a panic, and the machine is off all the same


def main(path: str) -> None:
    """Do the job described in the file at `path`."""
    control = open_raw(CONTROL, os.O_RDWR)
    session = None
    try:
        job = json.loads(Path(path).read_bytes())
        session = Session(job, control)
        session.say("hello")
        lay_out(job)
        socket.sethostname(job["hostname"])
        bring_up_devices()
        set_limits()
        os.umask(job["umask"])
        session.run()
    except BaseException as error:
        reason = str(error) if isinstance(error, GuestError) else f"{type(error).__name__}: {error}"
        write_all(control, f"fail {reason}\n".encode(errors="backslashreplace"))
        termios.tcdrain(control)
    finally:
        power_off()


if __name__ == "__main__":
    main(sys.argv[1])

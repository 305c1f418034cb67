"""The host's half of a run: boot the guest, pass bytes and signals, hand back the status.

guest.py is the other half, and says what the two tell each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import select
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from _kernel import OTHER_WAYS, MachineError, check_platform

TREE = Path(__file__).resolve().parent.parent
GUEST = Path(__file__).resolve().with_name("guest.py")

BOOT_PATIENCE = 60.0
GRACE = 5.0  # between the SIGTERM of a timeout and the end of the machine
TIMED_OUT = 124
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MIN_MEMORY = 128
PRIVATE = "pvl-rxe-"

#: What a kernel that did not come up left in its log -> the likely reason. The first match counts.
BOOT_FAILURES = (
    (r"ptrace.*(not permitted|denied)|check_(ptrace|sysemu).*|ptrace failed", "the host forbids or lacks ptrace"),
    (r"must be not mounted noexec|PROT_EXEC mmap in (?!.*OK)", "the temporary folder forbids executable mappings"),
    (r"No space left on device", "too little disk or memory for the guest's memory file"),
    (r"set fp regs failed", "the CPU has more FPU state than the guest kernel holds"),
    (r"(error while loading shared libraries.*)", r"\1"),
    (r"Kernel panic - not syncing: (.*)", r"kernel panic: \1"),
)


class Report(NamedTuple):
    """How a run went: the command's status, and the kernel's log."""

    status: int
    log: str


# -- what the host offers -----------------------------------------------------------------------------


def host_device(sysfs: Path = Path("/sys/class"), nodes: Path = Path("/dev/infiniband")) -> str | None:
    """Return the first RDMA device of the host with an ACTIVE port that this user can open."""
    for verbs in sorted(sysfs.glob("infiniband_verbs/uverbs*")):
        with contextlib.suppress(OSError):
            name = (verbs / "ibdev").read_text().strip()
            states = [port.read_text() for port in sysfs.glob(f"infiniband/{name}/ports/*/state")]
            if any("ACTIVE" in state for state in states):
                os.close(os.open(nodes / verbs.name, os.O_RDWR | os.O_CLOEXEC))
                return name
    return None


def check_host(environ: Mapping[str, str] = os.environ) -> None:
    """Raise where no guest could boot, whatever its kernel: sooner known than after a build."""
    if "PVL_RXE_GUEST" in environ:
        raise MachineError("a guest can't boot another one: leave --guest out here")
    check_platform()
    check_ptrace()


def check_ptrace() -> None:
    """User Mode Linux runs its processes under ptrace, which containers and hardened hosts may refuse."""
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.fork()
    if pid == 0:
        os._exit(ctypes.get_errno() & 0xFF if libc.ptrace(0, 0, None, None) else 0)  # PTRACE_TRACEME
    refusal = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if refusal:
        raise MachineError(f"ptrace is forbidden here ({os.strerror(abs(refusal))}); {OTHER_WAYS}")


def memory_folder(megabytes: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return a folder for the file that is the guest's memory: it must map executable, and hold it all.

    /dev/shm comes first because a file on a disk would be written back to it all the time.
    """
    candidates = [folder for folder in ("/dev/shm", environ.get("TMPDIR", ""), "/tmp", "/var/tmp") if folder]
    for folder in candidates:
        with contextlib.suppress(OSError):
            found = os.statvfs(folder)
            roomy = found.f_bavail * found.f_frsize >= megabytes << 20
            if roomy and not found.f_flag & os.ST_NOEXEC and os.access(folder, os.W_OK | os.X_OK):
                return folder
    raise MachineError(
        f"none of {', '.join(candidates)} has {megabytes} MB free and allows executable mappings: "
        f"set TMPDIR, or ask for less with --memory; {OTHER_WAYS}"
    )


def command_environment(environ: Mapping[str, str], tree: Path = TREE) -> dict[str, str]:
    """Return the caller's environment, with the tree's own virtual environment and the system's tools on PATH."""
    path = environ.get("PATH", os.defpath).split(os.pathsep)
    venv = tree / ".venv" / "bin"
    if "VIRTUAL_ENV" not in environ and venv.is_dir() and str(venv) not in path:
        path.insert(0, str(venv))
    path += [folder for folder in ("/usr/sbin", "/sbin") if folder not in path]
    return {**environ, "PATH": os.pathsep.join(path)}


def claim_cpu() -> tuple[int, socket.socket] | None:
    """Return a CPU that no other machine runs on, and what keeps it ours; None if all are taken.

    A guest is one thread of control that passes between the kernel's process and those of its programs. On
    two CPUs each of its system calls would cost a wake-up of the other one, and take three times as long.
    """
    for cpu in sorted(os.sched_getaffinity(0), reverse=True):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0pvl-rxe-cpu-{cpu}")  # an abstract name: no file, and gone with its owner
        except OSError:
            claim.close()
        else:
            return cpu, claim
    return None


def sweep(folder: Path) -> None:
    """Remove what runs left in `folder` that were killed while they booted, which takes them a minute at most."""
    for leftover in folder.glob(f"{PRIVATE}*"):
        with contextlib.suppress(OSError):
            found = leftover.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > 2 * BOOT_PATIENCE:
                shutil.rmtree(leftover, ignore_errors=True)


def clock_rate(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the MHz of this CPU, or an invention where it does not say."""
    with contextlib.suppress(OSError):
        if found := re.search(r"(?m)^cpu MHz\s*:\s*([\d.]+)", cpuinfo.read_text()):
            return found[1]
    return "1000.000"


def boot_failure(log: str) -> str | None:
    """Return the likely reason in a kernel's log, None where nothing known stands there."""
    for pattern, reason in BOOT_FAILURES:
        if found := re.search(pattern, log):
            return found.expand(reason).strip()
    return None


# -- a command on a device of the host ----------------------------------------------------------------


def run_here(argv: list[str], env: dict[str, str], timeout: float | None) -> int:
    """Run a command on the host itself, bounded by `timeout`."""
    if timeout is None:
        with _command_errors(argv[0]) as failed:
            os.execvpe(argv[0], argv, env)
        return failed[0]
    deadline = time.monotonic() + timeout
    awaited = {signal.SIGCHLD, *PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    with _command_errors(argv[0]) as failed:
        child = subprocess.Popen(argv, env=env, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before))
    if failed:
        return failed[0]
    expired = False
    while child.poll() is None:
        left = deadline - time.monotonic()
        if left <= 0:
            child.send_signal(signal.SIGKILL if expired else signal.SIGTERM)
            if not expired:
                complain_timeout(timeout)
            expired, deadline = True, time.monotonic() + GRACE
            continue
        caught = signal.sigtimedwait(awaited, left)
        # What the terminal sent, it sent to the command as well.
        if caught and caught.si_signo != signal.SIGCHLD and caught.si_code != 0x80:  # SI_KERNEL
            child.send_signal(caught.si_signo)
    if expired:
        return TIMED_OUT
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


@contextlib.contextmanager
def _command_errors(name: str) -> Iterator[list[int]]:
    """Turn a command that can't be started into the status a shell would give."""
    failed: list[int] = []
    try:
        yield failed
    except OSError as error:
        print(f"rxe: {name}: {error.strerror}", file=sys.stderr)
        failed.append(127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126)


def complain_timeout(timeout: float) -> None:
    """Say why the command ends."""
    print(f"rxe: the command ran longer than {timeout:g} s and was ended", file=sys.stderr)


# -- a command in a guest -----------------------------------------------------------------------------


def run_in_guest(
    kernel: Path, argv: Sequence[str], env: dict[str, str], *, memory: int, timeout: float | None
) -> Report:
    """Boot a guest, run the command in it, and leave nothing behind."""
    folder = memory_folder(memory)
    job = _job(argv, env)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        guest = _Guest(kernel, job, memory, folder, log)
        stack.callback(guest.close)
        status = _Conversation(guest, timeout).run()
        return Report(status, _text(log))


def _text(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


def _job(argv: Sequence[str], env: dict[str, str]) -> dict[str, object]:
    """All that the guest has to know, as JSON; it does not fit on a kernel's command line."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "argv": list(argv),
        "env": {**env, "PVL_RXE_GUEST": "1"},
        "cwd": os.getcwd(),
        "tree": str(TREE),
        "umask": mask,
        "hostname": socket.gethostname(),
        "mhz": clock_rate(),
        "terminals": [terminal_size(1), terminal_size(2)],
        "merged": _same_file(1, 2),
    }


def terminal_size(fd: int) -> tuple[int, int] | None:
    """Return rows and columns of a terminal, None for anything else."""
    if not os.isatty(fd):
        return None
    with contextlib.suppress(OSError):
        columns, rows = os.get_terminal_size(fd)
        return rows, columns
    return 24, 80


def _same_file(first: int, second: int) -> bool:
    """Both streams of one file keep their order only if they travel as one."""
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(first, second)
    return False


class _Guest:
    """The kernel's process, its pipes, and the files it needs while it boots."""

    def __init__(self, kernel: Path, job: dict[str, object], memory: int, folder: str, log: IO[bytes]) -> None:
        self._kernel = kernel
        self._job = job
        self._memory = memory
        self._folder = folder
        self._log = log
        self._private: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._fds: list[int] = []
        self._cpu = claim_cpu()
        self.out = self.err = self.control = self.orders = -1

    def start(self) -> None:
        """Boot. The guest gets pipes of its own: it makes them non-blocking, which the user's must not be."""
        sweep(Path(tempfile.gettempdir()))
        self._private = tempfile.mkdtemp(prefix=PRIVATE)
        self.out, guest_out = self._pipe()
        self.err, guest_err = self._pipe()
        self.control, guest_control = self._pipe()
        guest_orders, self.orders = self._pipe()
        theirs = (guest_out, guest_err, guest_orders, guest_control)
        self._process = subprocess.Popen(
            self._command(guest_out, guest_err, f"fd:{guest_orders},fd:{guest_control}"),
            env={"PATH": os.defpath, "TMPDIR": self._folder},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=theirs,
            start_new_session=True,  # a group of its own: no Ctrl-C reaches it, and one kill ends all of it
            preexec_fn=self._prepare,
        )
        for fd in theirs:
            self._close_fd(fd)

    def _prepare(self) -> None:
        """Settle what the kernel's process inherits: one CPU, no core dumps, a file for each the guest has open."""
        if self._cpu:
            os.sched_setaffinity(0, {self._cpu[0]})
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._fds += ends
        return ends

    def _close_fd(self, fd: int) -> None:
        if fd in self._fds:
            self._fds.remove(fd)
            os.close(fd)

    def _command(self, out: int, err: int, control: str) -> list[str]:
        return [
            str(self._kernel),
            f"mem={self._memory}M",
            "root=/dev/root",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            f"uml_dir={self._private}/",
            "umid=guest",
            "con=null",
            "con0=null,fd:2",
            f"con1=null,fd:{out}",
            f"con2=null,fd:{err}",
            f"con3={control}",
            "dummy.numdummies=0",
            "init=/bin/sh",
            "--",
            self._launcher(),
        ]

    def _launcher(self) -> str:
        """Write a shell script that starts guest.py: not every path survives a kernel's command line."""
        private = Path(self._private or "")
        job = private / "job.json"
        job.write_text(json.dumps(self._job))
        library = shlex.quote(os.environ.get("LD_LIBRARY_PATH", ""))
        python = [sys.executable, "-I", "-S", "-B", str(GUEST), str(job)]
        launcher = private / "init"
        launcher.write_text(f"LD_LIBRARY_PATH={library} exec {shlex.join(python)}\n")
        return str(launcher)

    def booted(self) -> None:
        """Remove the files: the guest has read them. Were we killed from here on, none would be left."""
        if self._private:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None

    def order(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.orders, line.encode() + b"\n")

    def dead(self) -> bool:
        """Whether the kernel's process has ended. It is not reaped here: its id must stay ours to kill."""
        assert self._process is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def log_text(self) -> str:
        return _text(self._log)

    def kill(self) -> None:
        """End every process of the machine, so that its pipes reach their end."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self.booted()
        if self._cpu:
            self._cpu[1].close()
        for fd in list(self._fds):
            self._close_fd(fd)


class _Forward(threading.Thread):
    """Carries a stream of the guest to ours, and goes on reading when nobody reads ours any more."""

    def __init__(self, source: int, sink: int, on_broken: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._sink = sink
        self._on_broken = on_broken

    def run(self) -> None:
        broken = False
        with contextlib.suppress(OSError):  # closed under us: only on the way out after a failure
            while data := os.read(self._source, 1 << 16):
                if not broken:
                    try:
                        _write_all(self._sink, data)
                    except OSError:
                        broken = True
                        self._on_broken()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        with contextlib.suppress(BlockingIOError):  # somebody else made the user's stream non-blocking
            select.select([], [fd], [])
            view = view[os.write(fd, view) :]


class _Conversation:
    """What is said on the control channel, from power-on to the status."""

    def __init__(self, guest: _Guest, timeout: float | None) -> None:
        self._guest = guest
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout if timeout is not None else None
        self._boot_deadline: float | None = time.monotonic() + BOOT_PATIENCE
        self._expired = False
        self._ready = False
        self._interrupts = 0
        self._status: int | None = None
        self._partial = b""
        self._caught: list[int] = []

    def run(self) -> int:
        """Boot the guest and serve it to its end."""
        guest = self._guest
        with self._signals() as wake:  # from here on no signal comes at an awkward moment
            guest.start()
            streams = [
                _Forward(guest.out, 1, lambda: guest.order("closed out")),
                _Forward(guest.err, 2, lambda: guest.order("closed err")),
            ]
            for stream in streams:
                stream.start()
            try:
                status = self._converse(wake)
            finally:
                guest.kill()
                # Whoever reads our output may be slow, but has only so long once we were told to stop.
                for stream in streams:
                    stream.join(GRACE if self._expired or self._interrupts else None)
        return TIMED_OUT if self._expired else status

    def _converse(self, wake: int) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self._guest.control, selectors.EVENT_READ, self._listen)
            selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
            while self._status is None:
                for event, _ in selector.select(0.25):
                    event.data()
                self._pass_signals()
                self._watch_clock()
        return self._status

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        """Collect signals while the guest runs. One that we were started to ignore stays ignored."""
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        watched = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.getsignal(number) for number in (*watched, signal.SIGWINCH)}
        for number in before:
            signal.signal(number, lambda caught, _: self._caught.append(caught))
        old = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        try:
            yield wake
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(wake)
            os.close(waker)

    def _listen(self) -> None:
        data = os.read(self._guest.control, 4096)
        if not data:
            self._died()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            verb, _, rest = line.decode(errors="replace").strip().partition(" ")
            if verb == "hello":
                self._guest.booted()
            elif verb == "ready":
                self._ready = True
                self._boot_deadline = None
            elif verb == "exit":
                self._status = int(rest)
            elif verb == "fail":
                raise MachineError(f"the guest could not be set up: {rest}; {OTHER_WAYS}")

    def _died(self) -> None:
        if self._expired or self._interrupts:
            self._status = 128 + signal.SIGKILL
            return
        log = self._guest.log_text()
        reason = boot_failure(log)
        tail = "" if reason else "".join(f"\n  {line}" for line in log.strip().splitlines()[-8:])
        reason = reason or "its log does not say why"
        if self._ready:
            raise MachineError(f"the guest died while the command ran: {reason}{tail}")
        raise MachineError(f"the guest did not come up: {reason}; {OTHER_WAYS}{tail}")

    def _pass_signals(self) -> None:
        while self._caught and self._status is None:
            number = self._caught.pop(0)
            if number == signal.SIGWINCH:
                if size := terminal_size(1) or terminal_size(2):
                    self._guest.order(f"size {size[0]} {size[1]}")
                continue
            self._interrupts += 1
            if self._interrupts > 1 or not self._ready:
                self._status = 128 + number  # no more patience, or nothing there yet that could react
            else:
                self._guest.order(f"signal {number}")

    def _watch_clock(self) -> None:
        now = time.monotonic()
        if self._status is None and self._guest.dead() and not _readable(self._guest.control):
            self._died()
        if self._boot_deadline is not None and now > self._boot_deadline:
            raise MachineError(f"the guest was not up after {BOOT_PATIENCE:.0f} s; {OTHER_WAYS}")
        if self._status is not None or self._deadline is None or now < self._deadline:
            return
        if self._expired or not self._ready:
            self._status = TIMED_OUT
        else:
            self._guest.order(f"signal {int(signal.SIGTERM)}")
            self._deadline = now + GRACE
        if not self._expired:
            complain_timeout(self._timeout or 0)
        self._expired = True


def _readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])

"""The soft-RoCE machine: what rxe/run promises, and the pure functions behind it."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import io
import os
import platform
import pty
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

TREE = Path(__file__).resolve().parent.parent
RXE = TREE / "rxe"
sys.path.insert(0, str(RXE))

import _kernel  # noqa: E402
import _machine  # noqa: E402
import guest  # noqa: E402

LIMIT = 60  # seconds for one run of rxe/run, which takes about one
IN_GUEST = "PVL_RXE_GUEST" in os.environ

UP_THEN_SLEEP = "import time; print('up', flush=True); time.sleep(40)"


def load_script(name: str) -> ModuleType:
    loader = SourceFileLoader(f"rxe_{name}", str(RXE / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module


run_script = load_script("run")

# -- the guest ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kernel() -> Path:
    """The kernel to boot; building one takes longer than a test may."""
    if IN_GUEST:
        pytest.skip("this is a guest already")
    if named := os.environ.get("PVL_RXE_KERNEL"):
        return Path(named)
    try:
        _machine.check_host()
        _machine.memory_folder(2048)
    except _kernel.MachineError as error:
        pytest.skip(str(error))
    cached = _kernel.cached_kernel(_kernel.source_version(), _kernel.FRAGMENT.read_text())
    if cached is None:
        pytest.skip("no guest kernel yet: rxe/build makes one")
    return cached


@pytest.fixture
def tree_folder() -> Iterator[Path]:
    """A folder of the working tree, which a guest may write."""
    folder = Path(tempfile.mkdtemp(prefix=".rxe-test-", dir=TREE))
    yield folder
    shutil.rmtree(folder)


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, str(RXE / "run"), "--guest", *arguments]


def in_guest(*arguments: str, cwd: Path = TREE, **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command_line(*arguments),
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )


def start(*arguments: str, **environ: str) -> subprocess.Popen[bytes]:
    """Start a run whose command says "up", and return when it did."""
    process = subprocess.Popen(
        command_line(*arguments),
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a runner that works in the background may have set it to be ignored, which is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def processes(field: int, value: int) -> list[int]:
    """The processes whose /proc/PID/stat has `value` in `field`: 1 the parent, 2 the group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[field]) == value and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "that took too long"
        time.sleep(0.05)


boots = pytest.mark.boots


@boots
@pytest.mark.usefixtures("kernel")
class TestStreams:
    def test_status_and_streams_pass_through_exact_and_apart(self) -> None:
        done = in_guest("sh", "-c", r"printf 'a\r\n\0\377\004b'; printf 'e\n\003' >&2; exit 7")
        assert (done.returncode, done.stdout, done.stderr) == (7, b"a\r\n\x00\xff\x04b", b"e\n\x03")

    def test_big_output_arrives_whole(self) -> None:
        script = (
            "import sys, random, hashlib; data = random.randbytes(9_000_001); sys.stdout.buffer.write(data);"
            "sys.stderr.write(hashlib.sha256(data).hexdigest())"
        )
        done = in_guest("python3", "-c", script)
        assert len(done.stdout) == 9_000_001
        assert hashlib.sha256(done.stdout).hexdigest() == done.stderr.decode()

    def test_slow_reader_loses_nothing(self) -> None:
        process = start("sh", "-c", "echo up; seq 200000; echo end >&2")
        assert process.stdout is not None
        time.sleep(1.0)
        out, err = process.communicate(timeout=LIMIT)
        assert out == b"".join(b"%d\n" % number for number in range(1, 200001))
        assert err == b"end\n"

    def test_output_streams_while_the_command_runs(self) -> None:
        process = start("python3", "-c", UP_THEN_SLEEP)
        assert process.poll() is None
        process.terminate()
        process.communicate(timeout=LIMIT)

    def test_one_file_for_both_streams_keeps_their_order(self) -> None:
        done = subprocess.run(
            command_line("sh", "-c", "for i in 1 2 3 4; do echo o$i; echo e$i >&2; done"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
            check=False,
        )
        assert done.stdout.split() == [b"o1", b"e1", b"o2", b"e2", b"o3", b"e3", b"o4", b"e4"]

    def test_reader_that_leaves_breaks_the_pipe_of_the_command(self) -> None:
        process = subprocess.Popen(command_line("yes"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.wait(LIMIT) == 128 + signal.SIGPIPE
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()

    def test_output_of_processes_left_behind_is_kept(self) -> None:
        done = in_guest("sh", "-c", "(sleep 0.3; echo late) & echo early")
        assert done.stdout == b"early\nlate\n"

    def test_daemon_left_behind_holds_up_nothing(self) -> None:
        begin = time.monotonic()
        assert in_guest("sh", "-c", "sleep 100 & exit 3").returncode == 3
        assert time.monotonic() - begin < 20

    def test_standard_input_is_empty(self) -> None:
        assert in_guest("cat").stdout == b""

    def test_no_terminal_where_the_host_has_none(self) -> None:
        done = in_guest("python3", "-c", "import os; print([os.isatty(fd) for fd in (0, 1, 2)])")
        assert done.stdout == b"[False, False, False]\n"

    def test_terminal_with_its_size_and_interrupt_key(self) -> None:
        script = (
            "import os, time\n"
            "print(os.isatty(1), os.isatty(2), os.environ['TERM'], os.get_terminal_size(1), flush=True)\n"
            "print('up', flush=True)\n"
            "try: time.sleep(40)\n"
            "except KeyboardInterrupt: print('interrupted'); raise SystemExit(9)\n"
        )
        pid, terminal = pty.fork()
        if pid == 0:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
            os.environ["TERM"] = "vt100"
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(sys.executable, command_line("python3", "-c", script))
        seen = b""
        try:
            while chunk := os.read(terminal, 4096):
                if b"up\r\n" not in seen and b"up\r\n" in seen + chunk:
                    os.write(terminal, b"\x03")
                seen += chunk
        except OSError:
            pass  # how the end of a terminal shows
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert b"True True vt100 os.terminal_size(columns=101, lines=33)\r\n" in seen
        assert b"interrupted\r\n" in seen


@boots
@pytest.mark.usefixtures("kernel")
class TestStatus:
    def test_command_not_found(self) -> None:
        done = in_guest("no-such-command")
        assert done.returncode == 127
        assert done.stderr == b"rxe: no-such-command: No such file or directory\n"

    def test_command_not_executable(self) -> None:
        assert in_guest(str(RXE / "README.md")).returncode == 126

    def test_command_killed_by_a_signal(self) -> None:
        assert in_guest("sh", "-c", "kill -SEGV $$").returncode == 128 + signal.SIGSEGV

    def test_timeout(self) -> None:
        done = in_guest("--timeout", "1.5", "sleep", "40")
        assert (done.returncode, done.stdout) == (124, b"")
        assert done.stderr == b"rxe: the command ran longer than 1.5 s and was ended\n"

    def test_timeout_of_a_command_that_ignores_it(self) -> None:
        done = in_guest("--timeout", "1.5", "sh", "-c", "trap '' TERM; while :; do sleep 1; done")
        assert done.returncode == 124

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signal_reaches_the_command(self, number: signal.Signals) -> None:
        process = start("python3", "-c", UP_THEN_SLEEP)
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 128 + number
        assert err.rstrip().endswith(b"KeyboardInterrupt") == (number == signal.SIGINT)

    def test_command_decides_what_an_interrupt_means(self) -> None:
        script = f"try:\n exec({UP_THEN_SLEEP!r})\nexcept KeyboardInterrupt:\n print('caught'); raise SystemExit(9)"
        process = start("python3", "-c", script)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=LIMIT) == (b"caught\n", b"")
        assert process.returncode == 9

    def test_second_interrupt_ends_the_machine(self) -> None:
        process = start("sh", "-c", "trap 'echo no' INT; echo up; while :; do sleep 0.2; done")
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"no\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130


@boots
@pytest.mark.usefixtures("kernel")
class TestSurroundings:
    def test_devices(self) -> None:
        done = in_guest(
            "sh", "-c", "cat /sys/class/infiniband/*0/ports/1/state; ibv_devinfo -d rxe0; grep MHz /proc/cpuinfo"
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(b"4: ACTIVE\n4: ACTIVE\n")
        assert b"active_mtu:\t\t4096" in done.stdout
        assert b"cpu MHz" in done.stdout

    def test_working_folder_arguments_and_environment(self, tree_folder: Path) -> None:
        script = "import os, sys; print(os.getcwd(), sys.argv[1:], os.environ['PVL_TEST'], os.environ['PVL_RXE_GUEST'])"
        done = in_guest("python3", "-c", script, "a  b", "", "é\n", cwd=tree_folder, PVL_TEST="x y=z'\"")
        assert done.stdout.decode() == f"{tree_folder} {['a  b', '', 'é' + chr(10)]} x y=z'\" 1\n"

    def test_same_python(self) -> None:
        script = "import os, shutil, sys; print(sys.version, shutil.which('python3'))"
        env = _machine.command_environment(os.environ)
        here = subprocess.run(["python3", "-c", script], env=env, capture_output=True, timeout=LIMIT, check=True)
        assert in_guest("python3", "-c", script).stdout == here.stdout

    def test_writes_outside_the_tree_stay_in_the_guest(self, tmp_path: Path) -> None:
        existing = tmp_path / "existing"
        existing.write_text("host")
        (tmp_path / "folder").mkdir()
        new = [tmp_path / "new", Path("/tmp") / f"pvl-{os.getpid()}", Path.home() / f".pvl-{os.getpid()}"]
        script = (
            f"cd {tmp_path} && echo guest >existing && rm -r folder && mkdir folder && mv folder moved && "
            f"for file in {' '.join(map(str, new))} /dev/shm/pvl-{os.getpid()}; do echo guest >$file || exit; done; "
            "cat existing new; ls"
        )
        done = in_guest("sh", "-c", script)
        assert done.stdout == b"guest\nguest\nexisting\nmoved\nnew\n", done.stderr
        assert existing.read_text() == "host"
        assert sorted(os.listdir(tmp_path)) == ["existing", "folder"]
        assert not any(path.exists() for path in (*new, Path(f"/dev/shm/pvl-{os.getpid()}")))

    def test_root_of_the_host_is_not_among_the_mounts(self) -> None:
        mounts = in_guest("cat", "/proc/self/mounts").stdout.decode().splitlines()
        assert [line.split()[1] for line in mounts if " hostfs " in line] == [str(TREE)]

    def test_writes_in_the_tree_persist(self, tree_folder: Path) -> None:
        (tree_folder / "script").write_text("#!/bin/sh\n")
        script = (
            "echo one >new; printf x >>script; chmod 755 script; mkdir sub; mv new sub/moved; ln -s sub/moved link;"
            "python3 -c \"import mmap; f = open('mapped', 'w+b'); f.truncate(9000); m = mmap.mmap(f.fileno(), 0);"
            'm[8999] = 65"'
        )
        done = in_guest("sh", "-c", script, cwd=tree_folder)
        assert done.returncode == 0, done.stderr
        assert (tree_folder / "link").read_text() == "one\n"
        assert (tree_folder / "script").read_text() == "#!/bin/sh\nx"
        assert stat.S_IMODE((tree_folder / "script").stat().st_mode) == 0o755
        assert (tree_folder / "mapped").read_bytes() == bytes(8999) + b"A"

    def test_no_file_is_left(self, tmp_path: Path) -> None:
        home = tmp_path / "home"
        temporary = tmp_path / "tmp"
        home.mkdir()
        temporary.mkdir()
        cache = str(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")))
        done = in_guest("true", HOME=str(home), TMPDIR=str(temporary), XDG_CACHE_HOME=cache)
        assert done.returncode == 0, done.stderr
        assert os.listdir(home) == []
        assert os.listdir(temporary) == []

    def test_killed_run_leaves_no_process_and_no_file(self, tmp_path: Path) -> None:
        process = start("python3", "-c", UP_THEN_SLEEP, TMPDIR=str(tmp_path))
        (machine,) = processes(1, process.pid)
        assert len(processes(2, machine)) > 1
        process.kill()
        process.communicate(timeout=LIMIT)
        wait_until(lambda: not processes(2, machine))
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_signal_during_the_boot_ends_it(self, number: signal.Signals, tmp_path: Path) -> None:
        process = subprocess.Popen(
            command_line("sleep", "40"),
            env={**os.environ, "TMPDIR": str(tmp_path)},
            # Whoever started the tests may have had it ignored, as nohup and shells do.
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
        wait_until(lambda: bool(os.listdir(tmp_path)))
        process.send_signal(number)
        assert process.wait(LIMIT) == 128 + number
        assert processes(1, process.pid) == []
        assert os.listdir(tmp_path) == []

    def test_interrupted_run_leaves_no_process(self) -> None:
        process = start("sh", "-c", "trap '' INT; echo up; while :; do sleep 0.2; done")
        (machine,) = processes(1, process.pid)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT)
        assert processes(2, machine) == []

    def test_two_machines_at_once(self) -> None:
        first, second = (start("sh", "-c", f"echo up; sleep 1; exit {status}") for status in (3, 4))
        for process, status in ((first, 3), (second, 4)):
            process.communicate(timeout=LIMIT)
            assert process.returncode == status

    def test_memory_can_be_chosen_and_used(self) -> None:
        script = (
            "import re; print(re.search(r'MemTotal:\\s+(\\d+)', open('/proc/meminfo').read())[1]);"
            "b = bytearray(100 << 20); b[::4096] = bytes([1]) * len(b[::4096]); print(sum(b[::4096]))"
        )
        done = in_guest("--memory", "512M", "python3", "-c", script)
        total, touched = map(int, done.stdout.split())
        assert 400 << 10 < total < 620 << 10
        assert touched == 100 << 8

    def test_machine_does_not_boot_inside_itself(self) -> None:
        done = in_guest(sys.executable, str(RXE / "run"), "--guest", "true")
        assert done.returncode == 125
        assert done.stderr.startswith(b"rxe: a guest can't boot another one")

    def test_inner_run_takes_the_device_of_the_guest(self) -> None:
        done = in_guest(sys.executable, str(RXE / "run"), "-v", "echo", "inner")
        assert (done.stdout, done.stderr) == (b"inner\n", b"rxe: on rxe0 of this host\n")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can turn into somebody else")
    @pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
    def test_ordinary_user(self, kernel: Path) -> None:
        system_python = next((p for p in ("/usr/bin/python3",) if os.access(p, os.X_OK)), None)
        if system_python is None:
            pytest.skip("no Python that another user can run")
        folder = Path(tempfile.mkdtemp(prefix="pvl a,b-"))
        try:
            shutil.copytree(RXE, folder / "rxe", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(kernel, folder / "linux")
            for path in (folder, *folder.rglob("*")):
                os.chown(path, 65534, 65534)
            script = "id -u; echo mine >new; cat /etc/shadow /root/x; ibv_devinfo -d rxe0 | grep -c ACTIVE"
            become_nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
            done = subprocess.run(
                [*become_nobody, system_python, str(folder / "rxe" / "run"), "--guest", "sh", "-c", script],
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PVL_RXE_KERNEL": str(folder / "linux")},
                capture_output=True,
                timeout=LIMIT,
                check=False,
            )
            assert done.stdout == b"0\n1\n", done.stderr
            assert b"/etc/shadow: Permission denied" in done.stderr
            assert (folder / "new").read_text() == "mine\n"
            assert (folder / "new").stat().st_uid == 65534
        finally:
            shutil.rmtree(folder)


# -- no machine ---------------------------------------------------------------------------------------


def refused(*arguments: str, **environ: str) -> str:
    """Run where no guest can be; return the one line that says so."""
    env = {name: value for name, value in os.environ.items() if name != "PVL_RXE_GUEST"}
    done = subprocess.run(
        command_line(*arguments), env={**env, **environ}, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="refused for its own reason")
class TestRefusal:
    def test_named_kernel_that_is_none(self, tmp_path: Path) -> None:
        plain = tmp_path / "plain"
        plain.write_text("no kernel")
        for name in (plain, tmp_path, tmp_path / "absent"):
            assert refused("true", PVL_RXE_KERNEL=str(name)) == (
                f"rxe: PVL_RXE_KERNEL names {name}, which is not an executable file\n"
            )

    def test_named_kernel_that_ends_at_once(self) -> None:
        line = subprocess.run(
            command_line("--memory", "128M", "true"),
            env={**{k: v for k, v in os.environ.items() if k != "PVL_RXE_GUEST"}, "PVL_RXE_KERNEL": "/bin/false"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert line.returncode == 125
        assert "the guest did not come up" in line.stderr
        assert "modprobe rdma_rxe" in line.stderr

    def test_no_folder_for_the_memory(self) -> None:
        line = refused("--memory", "900000000M", "true", PVL_RXE_KERNEL="/bin/true")
        assert "900000000 MB free" in line
        assert "modprobe rdma_rxe" in line


@pytest.mark.parametrize(("machine", "system"), [("aarch64", "linux"), ("x86_64", "darwin")])
def test_unsupported_platform_names_the_other_ways(monkeypatch: pytest.MonkeyPatch, machine: str, system: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(_kernel.MachineError) as caught:
        _kernel.check_platform()
    message = str(caught.value)
    assert machine in message
    assert "\n" not in message
    assert "a real RDMA device" in message
    assert "modprobe rdma_rxe" in message
    assert "rdma link add" in message


def test_ptrace_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def ptrace(*_: object) -> int:
            ctypes.set_errno(1)
            return -1

    _machine.check_ptrace()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing)
    with pytest.raises(_kernel.MachineError, match=r"ptrace is forbidden here .Operation not permitted.*modprobe"):
        _machine.check_ptrace()


def test_too_little_disk(tmp_path: Path) -> None:
    _kernel.check_space(tmp_path, 1, "nothing")
    with pytest.raises(_kernel.MachineError, match=r"building needs 1000000000.0 GB in .*modprobe"):
        _kernel.check_space(tmp_path, 10**18, "building")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("Checking ptrace...ptrace: Operation not permitted\n", "the host forbids or lacks ptrace"),
        ("check_ptrace : expected (SIGTRAP|0x80), got status = 11", "the host forbids or lacks ptrace"),
        (
            "Checking PROT_EXEC mmap in /tmp...Operation not permitted\n",
            "the temporary folder forbids executable mappings",
        ),
        ("Checking PROT_EXEC mmap in /tmp...OK\nBooting", None),
        ("write: No space left on device", "too little disk or memory for the guest's memory file"),
        ("Kernel panic - not syncing: No working init found.\nmore", "kernel panic: No working init found."),
        ("Checking that ptrace can change system call numbers...OK\n", None),
    ],
)
def test_reason_in_the_log(log: str, reason: str | None) -> None:
    assert _machine.boot_failure(log) == reason


# -- options ------------------------------------------------------------------------------------------


def test_options_end_where_the_command_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PVL_RXE_MEMORY", raising=False)
    options = run_script.parse(
        ["--timeout", "5", "--guest", "python", "-m", "pytest", "-q", "--timeout", "9", "--", "x"]
    )
    assert options.command == ["python", "-m", "pytest", "-q", "--timeout", "9", "--", "x"]
    assert (options.timeout, options.guest, options.memory, options.verbose) == (5.0, True, 2048, False)


def test_options_may_end_with_dashes() -> None:
    assert run_script.parse(["-v", "--", "-x", "--guest"]).command == ["-x", "--guest"]


def test_memory_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVL_RXE_MEMORY", "3G")
    assert run_script.parse(["true"]).memory == 3072
    assert run_script.parse(["--memory", "512", "true"]).memory == 512


@pytest.mark.parametrize(
    "arguments",
    [[], ["--"], ["--guest"], ["--timeout", "0", "true"], ["--timeout", "nan", "true"], ["--memory", "1M", "true"],
     ["--memory", "lots", "true"], ["--unknown", "true"]],
)  # fmt: skip
def test_wrong_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_script.parse(arguments)
    assert caught.value.code == 2
    assert "rxe/run" in capsys.readouterr().err


# -- a device of the host -----------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., Path]:
    """Lays out what the kernel shows of RDMA devices: name -> state of port 1."""

    def lay_out(**devices: str) -> Path:
        for number, (name, state) in enumerate(devices.items()):
            port = tmp_path / "class" / "infiniband" / name / "ports" / "1"
            verbs = tmp_path / "class" / "infiniband_verbs" / f"uverbs{number}"
            port.mkdir(parents=True)
            verbs.mkdir(parents=True)
            (port / "state").write_text(state + "\n")
            (verbs / "ibdev").write_text(name + "\n")
            (tmp_path / f"uverbs{number}").touch()
        return tmp_path

    return lay_out


def test_host_device_is_the_active_one(host: Callable[..., Path]) -> None:
    root = host(mlx5_0="1: DOWN", mlx5_1="4: ACTIVE")
    assert _machine.host_device(root / "class", root) == "mlx5_1"


def test_host_device_that_cannot_be_opened_is_none(host: Callable[..., Path]) -> None:
    root = host(mlx5_0="4: ACTIVE")
    (root / "uverbs0").unlink()
    assert _machine.host_device(root / "class", root) is None


def test_host_without_devices(tmp_path: Path) -> None:
    assert _machine.host_device(tmp_path, tmp_path) is None


def run_here(argv: list[str], timeout: float | None) -> subprocess.CompletedProcess[str]:
    code = f"import os, sys, _machine; sys.exit(_machine.run_here({argv!r}, dict(os.environ), {timeout!r}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(RXE)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_command_on_the_host(timeout: float | None) -> None:
    done = run_here(["sh", "-c", "echo out; echo err >&2; exit 7"], timeout)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert run_here(["no-such-command"], timeout).returncode == 127
    assert run_here([str(RXE / "README.md")], timeout).returncode == 126


def test_timeout_on_the_host() -> None:
    done = run_here(["sleep", "40"], 0.5)
    assert (done.returncode, done.stderr) == (124, "rxe: the command ran longer than 0.5 s and was ended\n")


def test_signal_on_the_host() -> None:
    done = run_here(["sh", "-c", "kill -TERM $PPID; exec sleep 40"], 30.0)
    assert done.returncode == 128 + signal.SIGTERM


# -- environment and memory ---------------------------------------------------------------------------


def test_path_of_the_command(tmp_path: Path) -> None:
    assert _machine.command_environment({"PATH": "/a:/sbin"}, tmp_path)["PATH"] == "/a:/sbin:/usr/sbin"
    venv = tmp_path / ".venv" / "bin"
    venv.mkdir(parents=True)
    assert _machine.command_environment({"PATH": "/a", "B": "c"}, tmp_path) == {
        "PATH": f"{venv}:/a:/usr/sbin:/sbin",
        "B": "c",
    }
    active = {"PATH": "/v/bin:/a", "VIRTUAL_ENV": "/v"}
    assert _machine.command_environment(active, tmp_path)["PATH"] == "/v/bin:/a:/usr/sbin:/sbin"


def test_memory_goes_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def statvfs(folder: str) -> os.statvfs_result:
        sizes = {"/dev/shm": (64 << 20, 0), str(tmp_path): (9 << 30, os.ST_NOEXEC), "/tmp": (9 << 30, 0)}
        free, flag = sizes.get(folder, (0, 0))
        return os.statvfs_result((4096, 4096, 0, 0, free // 4096, 0, 0, 0, flag, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert _machine.memory_folder(32, {}) == "/dev/shm"
    assert _machine.memory_folder(2048, {"TMPDIR": str(tmp_path)}) == "/tmp"
    with pytest.raises(_kernel.MachineError, match="none of /dev/shm, /tmp, /var/tmp has 99999 MB"):
        _machine.memory_folder(99999, {})


def test_only_old_folders_of_ours_are_swept(tmp_path: Path) -> None:
    for name, age in (("pvl-rxe-old", 500), ("pvl-rxe-new", 5), ("other", 500)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    _machine.sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["other", "pvl-rxe-new"]


def test_clock_rate(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\ncpu MHz\t\t: 2596.126\n")
    assert _machine.clock_rate(cpuinfo) == "2596.126"
    assert _machine.clock_rate(tmp_path / "absent") == "1000.000"


def test_clock_line_is_added_once() -> None:
    bare = "processor\t: 0\nmodel name\t: UML\nmode\t\t: skas\n"
    added = guest.with_mhz(bare, "2000.5")
    assert added == "processor\t: 0\nmodel name\t: UML\ncpu MHz\t\t: 2000.5\nmode\t\t: skas\n"
    assert guest.with_mhz(added, "1") == added


# -- the kernel's cache -------------------------------------------------------------------------------


def test_key_follows_version_options_and_edits() -> None:
    key = _kernel.kernel_key("6.12.1-1~deb12u1", "CONFIG_A=y\n")
    assert key.startswith("6.12.1-1~deb12u1-")
    assert key == _kernel.kernel_key("6.12.1-1~deb12u1", "CONFIG_A=y\n")
    others = {
        _kernel.kernel_key("6.12.2-1", "CONFIG_A=y\n"),
        _kernel.kernel_key("6.12.1-1~deb12u1", "CONFIG_A=m\n"),
        _kernel.kernel_key("6.12.1-1~deb12u1", "CONFIG_A=y\n", ()),
    }
    assert len({key, *others}) == 4
    assert "/" not in _kernel.kernel_key("1:6/x", "")


def test_cache_folder_follows_xdg() -> None:
    assert _kernel.cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/pyverbs_lite/rxe")
    for relative in ("", "c"):
        assert _kernel.cache_folder({"XDG_CACHE_HOME": relative, "HOME": "/h"}) == Path("/h/.cache/pyverbs_lite/rxe")


def test_cached_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _kernel.cached_kernel("1", "A") is None
    assert _kernel.cached_kernel(None, "A") is None
    for age, version in ((200, "1"), (100, "2")):
        made = _kernel.cache_folder() / _kernel.kernel_key(version, "A") / "linux"
        made.parent.mkdir(parents=True)
        made.touch()
        os.utime(made, (time.time() - age,) * 2)
        assert _kernel.cached_kernel(version, "A") == made
        # without the source package nobody can say which version is wanted
        assert _kernel.cached_kernel(None, "A") == made
    assert _kernel.cached_kernel("1", "B") is None
    assert _kernel.cached_kernel(None, "B") is None


def test_named_kernel_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "linux"
    named.touch(mode=0o755)
    monkeypatch.setenv("PVL_RXE_KERNEL", str(named))
    assert _kernel.find_kernel() == named


def test_absent_packages_are_named_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool, path: None if tool in ("flex", "xz") else f"/usr/bin/{tool}")
    monkeypatch.setattr(_kernel, "source_version", lambda: None)
    monkeypatch.setattr(_kernel, "_installed", lambda package: package not in ("libelf-dev", "iproute2"))
    with pytest.raises(_kernel.MachineError) as caught:
        _kernel.check_packages()
    assert "apt-get install linux-source-6.12 flex xz-utils libelf-dev iproute2;" in str(caught.value)


def test_packages_are_printed() -> None:
    done = subprocess.run(
        [sys.executable, str(RXE / "build"), "--packages"], capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout.split() == list(_kernel.PACKAGES)
    assert {"linux-source-6.12", "flex", "iproute2", "ibverbs-utils"} <= set(_kernel.PACKAGES)


def test_lost_options() -> None:
    wanted = "# a comment\nCONFIG_A=y\nCONFIG_B=4\n# CONFIG_C is not set\n# CONFIG_D is not set\n\nCONFIG_E=y\n"
    got = "CONFIG_A=y\nCONFIG_B=2\nCONFIG_C=y\n# CONFIG_E is not set\n"
    assert _kernel.lost_options(wanted, got) == ["CONFIG_B=4", "# CONFIG_C is not set", "CONFIG_E=y"]
    assert _kernel.lost_options(wanted, wanted) == []


def test_edit_must_match_once(tmp_path: Path) -> None:
    file = tmp_path / "file.c"
    file.write_text("one two two")
    _kernel.apply_edit(tmp_path, _kernel.Edit("file.c", "one", "1"))
    assert file.read_text() == "1 two two"
    for absent in ("one", "two"):
        with pytest.raises(_kernel.MachineError, match=r"file\.c lacks"):
            _kernel.apply_edit(tmp_path, _kernel.Edit("file.c", absent, "x"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_redrawn_on_a_terminal_and_rare_elsewhere() -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        progress = _kernel.Progress(stream)
        for number in range(3):
            progress.note(f"{number} objects")
        progress.end("done")
    assert terminal.getvalue() == "\r\033[Krxe: 0 objects (0:00)\r\033[Krxe: done (0:00)\n"
    assert log.getvalue() == "rxe: 0 objects (0:00)\nrxe: done (0:00)\n"


def test_failed_step_shows_its_end_and_names_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tree").mkdir()
    log = tmp_path / "build.log"
    with log.open("w") as record:
        step = _kernel._Build(tmp_path, record, _kernel.Progress())
        with pytest.raises(_kernel.MachineError, match=rf"see {log}"):
            step._call("sh", "-c", "seq 100; echo broken >&2; exit 2")
    assert log.read_text().endswith("100\nbroken\n")
    shown = capsys.readouterr().err
    assert "broken" in shown
    assert "\n50\n" not in shown


def test_second_builder_waits_and_takes_what_the_first_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first builder is this test, holding the lock; the second must not start to build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = _kernel.cache_folder()
    cache.mkdir(parents=True)
    code = "import _kernel; _kernel.check_packages = lambda: '1'; _kernel._Build = None; print(_kernel.build())"
    if platform.machine() != "x86_64":
        pytest.skip("no builder here")
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(RXE)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr is not None
        assert "waiting for another build" in second.stderr.readline()
        made = cache / _kernel.kernel_key("1", _kernel.FRAGMENT.read_text()) / "linux"
        made.parent.mkdir()
        made.touch()
    out, err = second.communicate(timeout=LIMIT)
    assert (second.returncode, out, err) == (0, f"{made}\n", "")

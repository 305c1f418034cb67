"""The guest kernel: built once from Debian's kernel source, kept in the user's cache folder.

Standard library only, as everything in this folder: it runs before anything of the project is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

SERIES = "6.12"
SOURCE_PACKAGE = f"linux-source-{SERIES}"
SOURCE = Path("/usr/src") / f"{SOURCE_PACKAGE}.tar.xz"
FRAGMENT = Path(__file__).with_name("kernel.config")

#: A tool the build calls -> the Debian package that has it. The rest of PACKAGES has no tool of its own.
TOOLS = {
    "bc": "bc",
    "bison": "bison",
    "flex": "flex",
    "gcc": "gcc",
    "make": "make",
    "strip": "binutils",
    "tar": "tar",
    "xz": "xz-utils",
}
BUILD_PACKAGES = (SOURCE_PACKAGE, *TOOLS.values(), "libc6-dev", "libelf-dev")
#: What the guest, which sees the host's tree, needs to find there: `ip`, `rdma`, and the verbs themselves.
GUEST_PACKAGES = ("iproute2", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "libibverbs-dev", "librdmacm-dev")
PACKAGES = (*BUILD_PACKAGES, *GUEST_PACKAGES)

#: The build finds the system's tools, not those of an environment that happens to be active.
BUILD_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
BUILD_BYTES = 1_000_000_000  # 0.7 GB were seen
OBJECTS = 885
NO_MACHINE = 125  # the exit status where the machine, not the command, failed

OTHER_WAYS = (
    "two other ways: a real RDMA device, or, as root on a kernel that has the module, "
    "`modprobe rdma_rxe` and `rdma link add rxe0 type rxe netdev INTERFACE`"
)

#: Sources no object of this build comes from, as patterns for tar. Kconfig files refer to each other across
#: the whole tree and stay. This halves the time to unpack and takes away more than half of the disk.
UNNEEDED = (
    *(f"*/arch/{letters}*/*.[chS]" for letters in ("[a-t]", "xt")),  # all but um and x86
    *(f"*/drivers/{part}/*.[ch]" for part in ("gpu", "media", "net/ethernet", "net/wireless", "staging")),
    *(f"*/tools/{part}" for part in ("perf", "testing")),
    *(f"*/Documentation/*.{kind}" for kind in ("rst", "svg", "yaml")),
    "*/sound/*.[ch]",
    "*.dts",
    "*.dtsi",
)


class Edit(NamedTuple):
    """One change to the kernel source: `old`, which must stand in `path` exactly once, becomes `new`."""

    path: str
    old: str
    new: str


EDITS = (
    # The bytes kept for the FPU registers of a process. Host CPUs with AMX have 11 KiB of them, more than
    # upstream has room for, and the guest's first process dies with "set fp regs failed, errno = 14".
    Edit("arch/x86/um/user-offsets.c", "HOST_FP_SIZE, 2696)", "HOST_FP_SIZE, 12288)"),
    # The tick rate has no prompt on this architecture. kernel.config says why 1000.
    Edit("arch/um/Kconfig", "config HZ\n\tint\n\tdefault 100\n", "config HZ\n\tint\n\tdefault 1000\n"),
)


class MachineError(Exception):
    """The machine can't be had; the message is one line for the user."""


class Progress:
    """A line that is redrawn on a terminal, and repeated now and then in a log."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._interval = 0.2 if self._tty else 20.0
        self._start = time.monotonic()
        self._last = float("-inf")

    def note(self, text: str, *, force: bool = False) -> None:
        """Show `text` with the time elapsed, unless the last line is too recent; `force` always shows it."""
        now = time.monotonic()
        if not force and now - self._last < self._interval:
            return
        self._last = now
        minutes, seconds = divmod(int(now - self._start), 60)
        line = f"rxe: {text} ({minutes}:{seconds:02})"
        self._stream.write(f"\r\033[K{line}" if self._tty else f"{line}\n")
        self._stream.flush()

    def end(self, text: str) -> None:
        """Show `text` and leave the line as it is."""
        self.note(text, force=True)
        if self._tty:
            self._stream.write("\n")


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where kernels are kept. XDG asks that a relative XDG_CACHE_HOME be ignored."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(environ.get("HOME") or Path.home()) / ".cache"
    return base / "pyverbs_lite" / "rxe"


def recipe_digest(config: str, edits: Sequence[Edit] = EDITS) -> str:
    """Name what we do to a kernel source."""
    return hashlib.sha256(repr((config, [tuple(edit) for edit in edits])).encode()).hexdigest()[:12]


def kernel_key(version: str, config: str, edits: Sequence[Edit] = EDITS) -> str:
    """Name what decides the bytes of a kernel: the version of its source, its options, our edits."""
    return f"{re.sub(r'[^A-Za-z0-9.+~_-]', '_', version)}-{recipe_digest(config, edits)}"


def source_version() -> str | None:
    """Return the installed version of the source package, None where it (or dpkg) is absent."""
    try:
        found = subprocess.run(
            ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", SOURCE_PACKAGE],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    status, _, version = found.stdout.partition(" ")
    return version if status == "installed" and SOURCE.exists() else None


def cached_kernel(version: str | None, config: str) -> Path | None:
    """Return the kernel built earlier; without the source package, the latest that the same recipe made."""
    if version is not None:
        kernel = cache_folder() / kernel_key(version, config) / "linux"
        return kernel if kernel.exists() else None
    made = cache_folder().glob(f"*-{recipe_digest(config)}/linux")
    return max(made, key=lambda kernel: kernel.stat().st_mtime, default=None)


def find_kernel() -> Path:
    """Return the kernel to boot: the one PVL_RXE_KERNEL names, else the cached one, built first if need be."""
    if named := os.environ.get("PVL_RXE_KERNEL"):
        kernel = Path(named)
        if not (kernel.is_file() and os.access(kernel, os.X_OK)):
            raise MachineError(f"PVL_RXE_KERNEL names {named}, which is not an executable file")
        return kernel.absolute()
    return cached_kernel(source_version(), FRAGMENT.read_text()) or build()


def check_platform() -> None:
    """Raise where User Mode Linux has no port."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "amd64"):
        raise MachineError(f"User Mode Linux needs Linux on x86-64, this is {sys.platform} on {machine}; {OTHER_WAYS}")


def check_space(folder: Path, needed: int, purpose: str) -> None:
    """Raise where `folder` has too little disk for `purpose`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"{purpose} needs {needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB free; {OTHER_WAYS}"
        )


def check_packages() -> str:
    """Return the version of the source to build, or raise with the line that installs what is absent."""
    absent = {package for tool, package in TOOLS.items() if shutil.which(tool, path=BUILD_PATH) is None}
    version = source_version()
    if version is None:
        absent.add(SOURCE_PACKAGE)
    if absent or version is None:
        wanted = [package for package in PACKAGES if package in absent or not _installed(package)]
        raise MachineError(f"the kernel can't be built yet: apt-get install {' '.join(wanted)}; {OTHER_WAYS}")
    return version


def _installed(package: str) -> bool:
    try:
        found = subprocess.run(
            ["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    return found.stdout == "installed"


def build() -> Path:
    """Build the kernel if the cache lacks it, and return its path. A second builder waits for the first."""
    check_platform()
    version = check_packages()
    config = FRAGMENT.read_text()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    with _locked(cache / "lock", progress):
        if kernel := cached_kernel(version, config):
            return kernel
        for leftover in cache.glob("build-*"):  # of a builder that was killed: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        check_space(cache, BUILD_BYTES, "building the guest kernel")
        key = kernel_key(version, config)
        log = cache / f"{key}.log"
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache, ignore_cleanup_errors=True) as scratch:
            with log.open("w", encoding="utf-8", errors="replace") as record:
                made = _Build(Path(scratch), record, progress).run(config)
            shutil.rmtree(cache / key, ignore_errors=True)  # a folder without a kernel, or we were not here
            os.replace(made, cache / key)
        progress.end(f"kernel {version} is built")
    return cache / key / "linux"


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.end("waiting for another build to finish")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Build:
    """One run of the recipe in a scratch folder, its output in a log."""

    def __init__(self, scratch: Path, log: TextIO, progress: Progress) -> None:
        self._scratch = scratch
        self._tree = scratch / "tree"
        self._log = log
        self._progress = progress
        self._objects = 0

    def run(self, config: str) -> Path:
        """Return a folder with the stripped kernel and its .config, ready to be renamed into place."""
        self._progress.note(f"unpacking {SOURCE.name}", force=True)
        self._unpack()
        for edit in EDITS:
            apply_edit(self._tree, edit)
        self._progress.note("configuring", force=True)
        self._configure(config)
        self._make("-j", str(len(os.sched_getaffinity(0))), "linux")
        made = self._scratch / "made"
        made.mkdir()
        self._call("strip", "-o", str(made / "linux"), "linux")
        shutil.copy(self._tree / ".config", made / "config")
        return made

    def _unpack(self) -> None:
        self._tree.mkdir()
        exclude = [f"--exclude={pattern}" for pattern in UNNEEDED]
        # -T0: Debian's archive is made of blocks that several threads can decompress.
        self._call("tar", "--use-compress-program=xz -dT0", "--strip-components=1", *exclude, "-xf", str(SOURCE))

    def _configure(self, config: str) -> None:
        self._make("tinyconfig")
        with (self._tree / ".config").open("a") as merged:
            merged.write(config)  # the last mention of an option counts
        self._make("olddefconfig")
        lost = lost_options(config, (self._tree / ".config").read_text())
        if lost:
            raise MachineError(f"this kernel source drops options of kernel.config: {', '.join(lost)}")

    def _make(self, *arguments: str) -> None:
        self._call("make", "ARCH=um", *arguments)

    def _call(self, *command: str) -> None:
        """Run a step in the tree; on failure show the end of its output."""
        env = {
            "PATH": BUILD_PATH,
            "LC_ALL": "C",
            "HOME": str(self._scratch),
            "KBUILD_BUILD_USER": "rxe",
            "KBUILD_BUILD_HOST": "pyverbs-lite",
        }
        tail: deque[str] = deque(maxlen=20)
        with subprocess.Popen(
            command,
            cwd=self._tree,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as step:
            try:
                assert step.stdout is not None
                for line in step.stdout:
                    self._log.write(line)
                    tail.append(line)
                    self._count(line)
            except BaseException:  # Ctrl-C above all: make and its compilers go with us
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(step.pid, signal.SIGTERM)
                raise
        if step.returncode:
            self._progress.end(f"`{command[0]}` failed; the end of {self._log.name}:")
            sys.stderr.writelines(tail)
            raise MachineError(f"the guest kernel was not built, see {self._log.name}; {OTHER_WAYS}")

    def _count(self, line: str) -> None:
        if re.match(r"\s+(CC|AS)\s", line):
            self._objects += 1
            self._progress.note(f"building the guest kernel, once: {self._objects} of about {OBJECTS} objects")


def apply_edit(tree: Path, edit: Edit) -> None:
    """Make one of our changes, or raise if the source is not the one it was written for."""
    file = tree / edit.path
    text = file.read_text()
    if text.count(edit.old) != 1:
        raise MachineError(f"this kernel source is not the one rxe/ knows: {edit.path} lacks {edit.old!r}")
    file.write_text(text.replace(edit.old, edit.new))


def lost_options(wanted: str, got: str) -> list[str]:
    """Return the options of a fragment that a .config does not have as asked; one not mentioned there is off."""
    final = set(got.splitlines())
    named = {match[1] for line in final if (match := re.match(r"(CONFIG_\w+)=", line))}
    lost = []
    for line in wanted.splitlines():
        if match := re.fullmatch(r"# (CONFIG_\w+) is not set", line):
            if match[1] in named:
                lost.append(line)
        elif line.startswith("CONFIG_") and line not in final:
            lost.append(line)
    return lost

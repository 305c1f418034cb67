"""What the figures were measured on and with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path


def _first(pattern: str, path: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _debian(name: str) -> str:
    command = ["dpkg-query", "-W", "-f", "${Version}", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "not installed"
    return done.stdout.strip() or "not installed"


def describe() -> dict[str, str]:
    """Return one line each."""
    processor = _first(r"^model name *: *(.*)$", "/proc/cpuinfo") or platform.machine()
    kilobytes = int(_first(r"^MemTotal: *([0-9]+) kB", "/proc/meminfo") or 0)
    system = _first(r'^PRETTY_NAME="?([^"\n]*)', "/etc/os-release")
    return {
        "processor": f"{processor}, {os.cpu_count()} CPUs",
        "memory": f"{kilobytes / (1 << 20):.1f} GiB",
        "system": f"{system}, Linux {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()} ({platform.python_compiler()})",
        "libibverbs": _debian("libibverbs1"),
        "pyverbs_lite": _installed("pyverbs-lite"),
        "ibverbs (PyPI)": _installed("ibverbs"),
        "pyverbs (Debian)": _debian("python3-pyverbs"),
        "perftest": _debian("perftest"),
        "load at the start": f"{os.getloadavg()[0]:.2f}",
    }

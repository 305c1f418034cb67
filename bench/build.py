"""Builds what the benchmarks need in C, below ``build/bench``; nothing is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "bench"

#: What each library is made from, and how.
_LIBRARIES = {
    # Preloaded, it takes the place of libibverbs' functions in whatever is linked to them.
    "libnull.so": ("null_provider/null.c", ()),
    # For whoever opens libibverbs by its name: found first where LD_LIBRARY_PATH leads here.
    "null/libibverbs.so.1": ("null_provider/null.c", ("-Wl,-soname,libibverbs.so.1",)),
    "libfloor.so": ("floor/floor.c", ("-libverbs",)),
}


def build(target: Path = BUILD) -> Path:
    """Compile what is older than its source, and return the folder.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its messages are on standard error.
    """
    for name, (source, options) in _LIBRARIES.items():
        library, code = target / name, HERE / source
        if library.exists() and library.stat().st_mtime >= max(code.stat().st_mtime, Path(__file__).stat().st_mtime):
            continue
        library.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
        subprocess.run(["cc", *flags, "-o", str(library), str(code), *options], check=True)
    return target


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if sys.argv[1:] else BUILD))

"""Build the one compiled module, ``pyverbs_lite.ffi._verbs``, in cffi's API mode.

The declarations in ``pyverbs_lite/ffi/cdef/`` are joined in the order of ``CDEF``, the C of
``pyverbs_lite/ffi/src/`` is appended, and cffi emits one C file from both. Constants and struct layouts are left
to the compiler (``...``), so nothing here can disagree with the installed headers.

What is newer than rdma-core 28 stands between marks, anywhere in a file, also inside a struct or an enum::

    //: since 44 ATOMIC_WRITE ibv_wr_atomic_write
    ...declarations...
    //: end

Before it compiles the module, the build asks the compiler whether the expression after the name means anything. The
declarations are kept only if it does, and ``lib.PVL_HAS_ATOMIC_WRITE`` is 44 or, where it is absent, -44. What else
came with the same feature stands between ``//: with ATOMIC_WRITE`` and ``//: end``. Sections nest.

``python build_verbs.py --stub`` writes the type stub ``_verbs.pyi`` from the same declarations.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Extension
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.errors import CompileError, PlatformError

FFI_DIR = Path("pyverbs_lite", "ffi")
CDEF = (
    *("types", "device", "device_ex", "events", "pd_mr", "mw", "dm", "import", "domains", "ah", "xrcd", "srq", "wq"),
    *("cq", "cq_ex", "wr", "qp", "qp_ex", "wr_api", "flow", "flow_action", "counters", "context"),
    *("sa", "cma", "cma_info", "rdma_verbs", "pvl", "pvl_ex", "pvl_cm"),
)
SOURCES = (
    *("names", "wait", "events", "cm", "poll_ex", "wr_api", "receives"),
    *("framing", "stats", "engine", "move", "prepared", "take", "credit", "pump", "look", "hub", "memory", "life"),
)
INCLUDES = """\
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
"""
LIBRARIES = ("ibverbs", "rdmacm")
MISSING_HEADERS = (
    "pyverbs_lite needs the C headers of libibverbs and librdmacm: install libibverbs-dev and librdmacm-dev"
    " (Debian, Ubuntu) or rdma-core-devel (Fedora, RHEL)."
)

_SINCE = re.compile(r"//: since (\d+) (\w+) (.+)")
_WITH = re.compile(r"//: with (\w+)")
_FAILED = re.compile(r"^[^:\n]*probe\.c:(\d+):.*\berror\b", re.M)


class Feature(NamedTuple):
    """Something that only some versions of rdma-core have."""

    name: str
    since: int
    probe: str


def read_cdef(root: Path) -> str:
    """Join the declaration files in their order."""
    return "\n".join((root / FFI_DIR / "cdef" / f"{name}.h").read_text() for name in CDEF)


def features(cdef: str) -> list[Feature]:
    """List the version-dependent features of the declarations, in the order of their marks."""
    return [Feature(m[2], int(m[1]), m[3].strip()) for m in map(_SINCE.fullmatch, cdef.splitlines()) if m]


def _sectioned(cdef: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every line that is not a mark, with the features of the sections that it is in."""
    within: list[str] = []
    for line in cdef.splitlines(keepends=True):
        mark = line.strip()
        if since := _SINCE.fullmatch(mark):
            within.append(since[2])
        elif with_ := _WITH.fullmatch(mark):
            within.append(with_[1])
        elif mark == "//: end" and within:
            within.pop()
        elif mark.startswith("//:"):
            raise ValueError(f"not a mark that belongs here: {mark}")
        else:
            yield line, tuple(within)
    if within:
        raise ValueError(f"sections without an end: {', '.join(within)}")


def resolve(cdef: str, present: set[str]) -> str:
    """Keep the sections of the features in ``present``, drop the others, and declare every ``PVL_HAS_*``."""
    flags = "".join(f"#define PVL_HAS_{feature.name} ...\n" for feature in features(cdef))
    return "".join(line for line, within in _sectioned(cdef) if present.issuperset(within)) + flags


def c_source(root: Path, cdef: str, present: set[str]) -> str:
    """Return the C that goes in front of cffi's own: includes, feature values, our functions."""
    flags = "".join(f"#define PVL_HAS_{f.name} {f.since if f.name in present else -f.since}\n" for f in features(cdef))
    ours = "\n".join((root / FFI_DIR / "src" / f"{name}.c").read_text() for name in SOURCES)
    return f"{INCLUDES}\n{flags}\n{ours}"


def emit(root: Path, present: set[str], target: Path) -> None:
    """Write the C source of the module to ``target``."""
    from cffi import FFI

    cdef = read_cdef(root)
    builder = FFI()
    builder.cdef(resolve(cdef, present))
    builder.set_source("pyverbs_lite.ffi._verbs", c_source(root, cdef, present))
    target.parent.mkdir(parents=True, exist_ok=True)
    builder.emit_c_code(str(target))


def pkg_config(option: str) -> list[str]:
    """Return what pkg-config says for both libraries; nothing where pkg-config or its files are missing."""
    tool = os.environ.get("PKG_CONFIG", "pkg-config")
    if shutil.which(tool) is None:
        return []
    answer = subprocess.run(
        [tool, option, *(f"lib{name}" for name in LIBRARIES)], capture_output=True, text=True, check=False
    )
    return answer.stdout.split() if answer.returncode == 0 else []


class build_ext(_build_ext):
    """Probe the headers, emit the C source, then compile it as any other extension."""

    def build_extension(self, ext: Extension) -> None:
        """Do all of it for the one extension there is."""
        ext.extra_compile_args += ["-std=gnu11", *pkg_config("--cflags")]
        ext.extra_link_args += [flag for flag in pkg_config("--libs") if not flag.startswith("-l")]
        if self._absent([], ext) is None:
            raise PlatformError(MISSING_HEADERS)
        root = Path.cwd()
        emit(root, self.present(features(read_cdef(root)), ext), Path(next(iter(ext.sources))))
        super().build_extension(ext)

    def present(self, wanted: list[Feature], ext: Extension) -> set[str]:
        """Return the names of the features that the installed headers have.

        All are tried in one file, and those whose lines the compiler complains of are left out of the next try, so
        that the usual build compiles two small files. A compiler that names no lines is asked for each by itself.
        """
        remaining = list(wanted)
        while remaining:
            absent = self._absent([feature.probe for feature in remaining], ext)
            if absent == set():
                break
            if absent is None:
                remaining = [feature for feature in remaining if self._absent([feature.probe], ext) == set()]
                break
            remaining = [feature for index, feature in enumerate(remaining) if index not in absent]
        return {feature.name for feature in remaining}

    def _absent(self, expressions: list[str], ext: Extension) -> set[int] | None:
        """Ask the compiler which expressions mean nothing; None if it fails without saying which."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            head = INCLUDES.rstrip("\n").split("\n")
            probes = [f"long pvl_probe_{i}(void) {{ return (long)({text}); }}" for i, text in enumerate(expressions)]
            source.write_text("\n".join([*head, *probes, ""]))
            command = [*self.compiler.compiler_so, "-Wno-error", "-Werror=implicit-function-declaration"]
            command += [*ext.extra_compile_args, "-c", str(source), "-o", str(Path(folder, "probe.o"))]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                raise CompileError(f"cannot run the C compiler {command[0]!r}: {error}") from error
        if done.returncode == 0:
            return set()
        failed = {int(line) - len(head) - 1 for line in _FAILED.findall(done.stderr)}
        return failed.intersection(range(len(expressions))) or None


STUB_HEAD = '''"""Types of the compiled module; written by ``python build_verbs.py --stub``, never by hand."""

from typing import Any, Final

class CData:
    """A C value: a pointer, a struct, a union or an array."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...
    def __add__(self, offset: int) -> CData: ...
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> CData: ...
    def __exit__(self, *exc: object) -> None: ...

class FFI:
    """The module's ``ffi``: makes, reads and casts C data."""

    NULL: Final[CData]
    errno: int
    def new(self, cdecl: str | Any, init: Any = ...) -> CData: ...
    def cast(self, cdecl: str | Any, source: Any) -> CData: ...
    def from_buffer(self, cdecl: Any, python_buffer: Any = ..., require_writable: bool = ...) -> CData: ...
    def buffer(self, cdata: CData, size: int = ...) -> Any: ...
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    def unpack(self, cdata: CData, length: int) -> Any: ...
    def memmove(self, dest: Any, src: Any, n: int) -> None: ...
    def gc(self, cdata: CData, destructor: Any) -> CData: ...
    def release(self, cdata: CData) -> None: ...
    def sizeof(self, cdecl: Any) -> int: ...
    def typeof(self, cdecl: Any) -> Any: ...
    def addressof(self, cdata: Any, *fields: str | int) -> CData: ...
    def list_types(self) -> tuple[list[str], list[str], list[str]]: ...

class Lib:
    """The module's ``lib``: functions and constants under their C names."""

'''


def _python_type(ctype: object) -> str:
    """Map a type of cffi's declaration model to the Python type that crosses the border."""
    from cffi import model

    if isinstance(ctype, model.VoidType):
        return "None"
    if isinstance(ctype, (model.PrimitiveType, model.EnumType, model.UnknownIntegerType)):
        return "int"
    return "CData"


def stub(root: Path) -> str:
    """Return the text of ``_verbs.pyi``: every section is in it, whatever the installed headers have."""
    from cffi import FFI, model

    cdef = read_cdef(root)
    builder: Any = FFI()
    builder.cdef(resolve(cdef, {feature.name for feature in features(cdef)}))
    lines: set[str] = set()
    for key, (declared, _) in builder._parser._declarations.items():
        kind, _, name = key.partition(" ")
        if kind == "function":
            arguments = [f"a{i}: {_python_type(arg)}" for i, arg in enumerate(declared.args)]
            signature = ", ".join(["self", *arguments, *(["/"] if arguments else [])])
            lines.add(f"    def {name}({signature}) -> {_python_type(declared.result)}: ...")
        elif kind in ("macro", "constant"):
            lines.add(f"    {name}: Final[{'int' if kind == 'macro' else _python_type(declared)}]")
        elif isinstance(declared, model.EnumType):
            lines.update(f"    {enumerator}: Final[int]" for enumerator in declared.enumerators)
    body = "\n".join(sorted(lines, key=lambda line: (line.startswith("    def"), line)))
    return f"{STUB_HEAD}{body}\n\nffi: Final[FFI]\nlib: Final[Lib]\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--stub"]:
        sys.exit("usage: python build_verbs.py --stub    (the module itself is built by pip)")
    here = Path(__file__).resolve().parent
    (here / FFI_DIR / "_verbs.pyi").write_text(stub(here))

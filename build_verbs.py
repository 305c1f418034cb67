"""Build the one compiled module, ``pyverbs_lite.ffi._verbs``, in cffi's API mode.

The declarations in ``pyverbs_lite/ffi/cdef/`` are joined in the order of ``CDEF``, the C of
``pyverbs_lite/ffi/src/`` is appended, and cffi emits one C file from both. Constants and struct layouts are left
to the compiler (``...``), so nothing here can disagree with the installed headers.

What is newer than rdma-core 28 stands between marks that carry a probe::

    //: since 33 GID_TABLE ibv_query_gid_table
    ...declarations...
    //: end

A one-line program asks the compiler whether the expression after the name exists; the declarations are kept only if
it does, and ``lib.PVL_HAS_GID_TABLE`` is 33 or, where it is absent, -33.

``python build_verbs.py --stub`` writes the type stub ``_verbs.pyi`` from the same declarations.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.errors import CompileError, PlatformError

FFI_DIR = Path("pyverbs_lite", "ffi")
CDEF = ("types", "device", "pd_mr", "cq", "qp", "wr", "cma", "pvl")
SOURCES = ("wait", "engine")
INCLUDES = (
    "#define _GNU_SOURCE\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n#include <rdma/rdma_verbs.h>\n"
)
LIBRARIES = ("ibverbs", "rdmacm")
MISSING_HEADERS = (
    "pyverbs_lite needs the C headers of libibverbs and librdmacm: install libibverbs-dev and librdmacm-dev"
    " (Debian, Ubuntu) or rdma-core-devel (Fedora, RHEL)."
)

_SECTION = re.compile(r"^//: since (?P<since>\d+) (?P<name>\w+) (?P<probe>.+)\n(?P<body>(?:.*\n)*?)//: end$", re.M)


class Section(NamedTuple):
    """Declarations that only some versions of rdma-core have."""

    name: str
    since: int
    probe: str
    body: str


def read_cdef(root: Path) -> str:
    """Join the declaration files in their order."""
    return "\n".join((root / FFI_DIR / "cdef" / f"{name}.h").read_text() for name in CDEF)


def sections(cdef: str) -> list[Section]:
    """List the version-dependent sections of the declarations."""
    return [Section(m["name"], int(m["since"]), m["probe"].strip(), m["body"]) for m in _SECTION.finditer(cdef)]


def resolve(cdef: str, present: set[str]) -> str:
    """Keep the sections named in ``present``, drop the others, and declare every ``PVL_HAS_*``."""
    flags = "".join(f"#define PVL_HAS_{section.name} ...\n" for section in sections(cdef))
    return _SECTION.sub(lambda m: m["body"] if m["name"] in present else "", cdef) + flags


def c_source(root: Path, cdef: str, present: set[str]) -> str:
    """Return the C that goes in front of cffi's own: includes, feature values, our functions."""
    flags = "".join(f"#define PVL_HAS_{s.name} {s.since if s.name in present else -s.since}\n" for s in sections(cdef))
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
        if not self._compiles("0", ext):
            raise PlatformError(MISSING_HEADERS)
        root = Path.cwd()
        wanted = sections(read_cdef(root))
        present = {section.name for section in wanted if self._compiles(section.probe, ext)}
        emit(root, present, Path(ext.sources[0]))
        super().build_extension(ext)

    def _compiles(self, expression: str, ext: Extension) -> bool:
        """Ask the compiler whether an expression means something under the installed headers."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(f"{INCLUDES}\nlong pvl_probe(void) {{ return (long)({expression}); }}\n")
            command = [*self.compiler.compiler_so, "-w", "-Werror=implicit-function-declaration"]
            command += [*ext.extra_compile_args, "-c", str(source), "-o", str(Path(folder, "probe.o"))]
            try:
                return subprocess.run(command, capture_output=True, check=False).returncode == 0
            except OSError as error:
                raise CompileError(f"cannot run the C compiler {command[0]!r}: {error}") from error


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
    builder = FFI()
    builder.cdef(resolve(cdef, {section.name for section in sections(cdef)}))
    lines: set[str] = set()
    for key, (declared, _) in builder._parser._declarations.items():
        kind, _, name = key.partition(" ")
        if kind == "function":
            arguments = [f"a{i}: {_python_type(arg)}" for i, arg in enumerate(declared.args)]
            signature = ", ".join(["self", *arguments, *(["/"] if arguments else [])])
            lines.add(f"    def {name}({signature}) -> {_python_type(declared.result)}: ...")
        elif kind in ("macro", "constant"):
            lines.add(f"    {name}: Final[int]")
        elif isinstance(declared, model.EnumType):
            lines.update(f"    {enumerator}: Final[int]" for enumerator in declared.enumerators)
    body = "\n".join(sorted(lines, key=lambda line: (line.startswith("    def"), line)))
    return f"{STUB_HEAD}{body}\n\nffi: Final[FFI]\nlib: Final[Lib]\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--stub"]:
        sys.exit("usage: python build_verbs.py --stub    (the module itself is built by pip)")
    here = Path(__file__).resolve().parent
    (here / FFI_DIR / "_verbs.pyi").write_text(stub(here))

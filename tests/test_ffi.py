"""The compiled module and what builds it: declarations, probes, stub, and the texts for what is not installed."""

import ast
import errno
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from cffi import FFI
from setuptools import Distribution, Extension
from setuptools.errors import CompileError, PlatformError

from pyverbs_lite import ffi as ffi_package
from pyverbs_lite.ffi import CData, ffi, lib

ROOT = Path(__file__).resolve().parent.parent
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def _load(path, name, **options):
    spec = importlib.util.spec_from_file_location(name, path, **options)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


build_verbs = _load(ROOT / "build_verbs.py", "build_verbs")
DECLARATIONS = build_verbs.read_cdef(ROOT)
SECTIONS = build_verbs.sections(DECLARATIONS)


# Declarations


def test_every_section_is_read():
    assert len(SECTIONS) == DECLARATIONS.count("//: since") == DECLARATIONS.count("//: end")
    assert len({section.name for section in SECTIONS}) == len(SECTIONS) > 0
    for section in SECTIONS:
        assert section.since > 28
        assert section.probe
        assert section.body.strip()


def test_sections_are_kept_or_dropped_and_always_flagged():
    names = {section.name for section in SECTIONS}
    for present in (set(), names):
        text = build_verbs.resolve(DECLARATIONS, present)
        FFI().cdef(text)  # still C
        for section in SECTIONS:
            assert (section.body in text) is (section.name in present)
            assert f"#define PVL_HAS_{section.name} ...\n" in text


def test_flags_in_c():
    names = {section.name for section in SECTIONS}
    for present, sign in ((set(), "-"), (names, "")):
        source = build_verbs.c_source(ROOT, DECLARATIONS, present)
        for section in SECTIONS:
            assert f"#define PVL_HAS_{section.name} {sign}{section.since}\n" in source


def test_flags_of_the_compiled_module():
    flags = {name.removeprefix("PVL_HAS_"): getattr(lib, name) for name in dir(lib) if name.startswith("PVL_HAS_")}
    assert set(flags) == {section.name for section in SECTIONS}
    for section in SECTIONS:
        assert abs(flags[section.name]) == section.since


def test_layouts_are_left_to_the_compiler():
    # A struct of theirs without "..." would pin the size of one version's headers.
    structs = re.findall(r"^(?:struct|union) (ibv_\w+|rdma_\w+) \{\n(.*?)^\};", DECLARATIONS, re.M | re.S)
    assert len(structs) > 10
    assert [name for name, body in structs if not body.rstrip().endswith("...;")] == []
    enums = re.findall(r"^enum (\w+) \{(.*?)\};", DECLARATIONS, re.M | re.S)
    assert len(enums) > 10
    assert [name for name, body in enums if not body.rstrip().endswith("...")] == []
    assert [
        line for line in DECLARATIONS.splitlines() if line.startswith("#define") and not line.endswith(" ...")
    ] == []
    assert ffi.sizeof("struct ibv_port_attr") >= 48


def test_every_file_is_built_and_shipped():
    cdef = {path.stem for path in (ROOT / build_verbs.FFI_DIR / "cdef").glob("*.h")}
    source = {path.stem for path in (ROOT / build_verbs.FFI_DIR / "src").glob("*.c")}
    assert cdef == set(build_verbs.CDEF)
    assert source == set(build_verbs.SOURCES)
    # What "depends" does not name is rebuilt by nobody, and is missing from the source distribution.
    project = (ROOT / "pyproject.toml").read_text()
    for path in [*(f"cdef/{name}.h" for name in cdef), *(f"src/{name}.c" for name in source)]:
        assert f'"pyverbs_lite/ffi/{path}"' in project


# The stub


def test_the_stub_is_current():
    # The trees are compared, because a formatter may break lines that the generator does not.
    stub = (ROOT / build_verbs.FFI_DIR / "_verbs.pyi").read_text()
    same = ast.dump(ast.parse(stub)) == ast.dump(ast.parse(build_verbs.stub(ROOT)))
    assert same, "run: python build_verbs.py --stub"


def test_what_the_stub_promises_is_there():
    absent = "".join(section.body for section in SECTIONS if getattr(lib, f"PVL_HAS_{section.name}") < 0)
    lines = build_verbs.stub(ROOT).split("class Lib:")[1]
    functions = [name for name in re.findall(r"^    def (\w+)\(self", lines, re.M) if name not in absent]
    constants = [name for name in re.findall(r"^    (\w+): Final\[int\]", lines, re.M) if name not in absent]
    assert len(functions) > 20
    assert len(constants) > 100
    assert [name for name in functions if not callable(getattr(lib, name, None))] == []
    assert [name for name in constants if not isinstance(getattr(lib, name, None), int)] == []


def test_stub_on_the_command_line(tmp_path):
    for name in ("build_verbs.py", "pyverbs_lite/ffi/cdef"):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    command = [sys.executable, str(tmp_path / "build_verbs.py")]
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert wrong.returncode != 0
    assert "--stub" in wrong.stderr
    subprocess.run([*command, "--stub"], check=True, timeout=60)
    assert (tmp_path / build_verbs.FFI_DIR / "_verbs.pyi").read_text() == build_verbs.stub(ROOT)


# The module


@pytest.mark.parametrize(
    "name",
    ["ibv_post_send", "ibv_post_recv", "ibv_poll_cq", "ibv_req_notify_cq", "ibv_query_port", "ibv_reg_mr"],
)
def test_macros_and_static_inlines_are_callable(name):
    assert callable(getattr(lib, name))


def test_cdata_is_a_type():
    assert isinstance(ffi.new("int *"), CData)
    assert not isinstance(5, CData)


def test_set_nonblocking():
    reader, writer = os.pipe()
    try:
        assert lib.pvl_set_nonblocking(reader) == 0
        assert fcntl.fcntl(reader, fcntl.F_GETFL) & os.O_NONBLOCK
    finally:
        os.close(reader)
        os.close(writer)
    assert lib.pvl_set_nonblocking(-1) == -1
    assert ffi.errno == errno.EBADF
    ffi.errno = 0


# What is not installed


class Missing:
    """Finds one module, whose loading fails as the dynamic loader fails."""

    def __init__(self, name, message):
        self.name = name
        self.message = message

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == self.name else None

    def create_module(self, spec):
        raise ImportError(self.message)

    def exec_module(self, module):
        raise AssertionError


@pytest.mark.parametrize("library", ["libibverbs.so.1", "librdmacm.so.1"])
def test_a_missing_library_names_the_packages(monkeypatch, library):
    loader_said = f"{library}: cannot open shared object file: No such file or directory"
    monkeypatch.setattr(sys, "meta_path", [Missing("pvl_fake._verbs", loader_said), *sys.meta_path])
    with pytest.raises(ImportError, match=r"libibverbs1.*rdma-core") as caught:
        _load(ffi_package.__file__, "pvl_fake", submodule_search_locations=[])
    assert loader_said in str(caught.value)


def test_any_other_import_error_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Missing("pvl_fake._verbs", "undefined symbol: xyz"), *sys.meta_path])
    with pytest.raises(ImportError, match=r"^undefined symbol: xyz$"):
        _load(ffi_package.__file__, "pvl_fake", submodule_search_locations=[])


def test_a_missing_library_as_the_user_sees_it():
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_ffi import Missing
for name in [name for name in sys.modules if name.startswith("pyverbs_lite")]:
    del sys.modules[name]
sys.meta_path.insert(0, Missing("pyverbs_lite.ffi._verbs", "libibverbs.so.1: cannot open shared object file"))
import pyverbs_lite.ffi
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pyverbs_lite needs the RDMA user-space libraries: install libibverbs1" in done.stderr.splitlines()[-1]


# The build


@pytest.fixture
def command(monkeypatch):
    """Make a build command with a compiler of choice, in a place where pkg-config says nothing."""
    monkeypatch.setenv("PKG_CONFIG", "/nonexistent/pkg-config")

    def make(*compiler):
        result = build_verbs.build_ext(Distribution())
        result.compiler = SimpleNamespace(compiler_so=list(compiler))
        return result

    return make


def extension():
    return Extension("pyverbs_lite.ffi._verbs", ["build/_verbs.c"])


def test_missing_headers_name_the_packages(command):
    with pytest.raises(PlatformError, match=r"libibverbs-dev and librdmacm-dev.*rdma-core-devel"):
        command("false").build_extension(extension())


def test_missing_compiler(command):
    with pytest.raises(CompileError, match="cannot run the C compiler '/nonexistent/cc'"):
        command("/nonexistent/cc").build_extension(extension())


@needs_compiler
def test_probes(command):
    cc = command("cc")
    assert cc._compiles("0", extension())
    assert cc._compiles("ibv_open_device", extension())
    assert not cc._compiles("ibv_of_the_next_century", extension())
    assert not cc._compiles("sizeof(((struct ibv_port_attr *)0)->of_the_next_century)", extension())


@needs_compiler
def test_it_builds_without_any_of_the_newer_sections(tmp_path):
    # As under the oldest headers: what the sections declare is not used outside them.
    source = tmp_path / "build" / "_verbs.c"
    build_verbs.emit(ROOT, set(), source)
    include = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(include, "Python.h").exists():
        pytest.skip("no headers of Python")
    subprocess.run(["cc", "-std=gnu11", "-w", f"-I{include}", "-fsyntax-only", str(source)], check=True, timeout=100)


def test_pkg_config(monkeypatch, tmp_path):
    tool = tmp_path / "pkg-config"
    tool.write_text('#!/bin/sh\n[ "$1" = --cflags ] && echo -I/opt/rdma -pthread "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PKG_CONFIG", str(tool))
    assert build_verbs.pkg_config("--cflags") == ["-I/opt/rdma", "-pthread", "--cflags", "libibverbs", "librdmacm"]
    assert build_verbs.pkg_config("--libs") == []
    monkeypatch.setenv("PKG_CONFIG", str(tmp_path / "none"))
    assert build_verbs.pkg_config("--cflags") == []

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
import time
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
FEATURES = build_verbs.features(DECLARATIONS)
EVERYTHING = {feature.name for feature in FEATURES}


# Declarations


def test_every_feature_is_read():
    assert len(FEATURES) == DECLARATIONS.count("//: since") == len(EVERYTHING) > 0
    for feature in FEATURES:
        assert 28 < feature.since < 100
        assert feature.probe


def test_marks_match():
    marks = [line.strip() for line in DECLARATIONS.splitlines() if line.strip().startswith("//:")]
    assert len(marks) == 2 * marks.count("//: end")
    assert {mark.split()[2] for mark in marks if mark.startswith("//: with ")} <= EVERYTHING


NESTED = """\
int always(void);
enum e { A,
//: since 40 NEW probe_new
    B,
    //: with NEWER
    C,
    //: end
//: end
...};
//: since 50 NEWER probe(newer)
int newer(void);
//: end
"""


@pytest.mark.parametrize(
    ("present", "kept"),
    [
        (set(), "int always(void);enum e { A,...};"),
        ({"NEW"}, "int always(void);enum e { A,    B,...};"),
        ({"NEWER"}, "int always(void);enum e { A,...};int newer(void);"),
        ({"NEW", "NEWER"}, "int always(void);enum e { A,    B,    C,...};int newer(void);"),
    ],
)
def test_sections_are_kept_or_dropped(present, kept):
    assert build_verbs.features(NESTED) == [("NEW", 40, "probe_new"), ("NEWER", 50, "probe(newer)")]
    resolved = build_verbs.resolve(NESTED, present)
    assert resolved.replace("\n", "") == kept + "#define PVL_HAS_NEW ...#define PVL_HAS_NEWER ..."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("//: end\n", "not a mark that belongs here: //: end"),
        ("//: since ever X x\n//: end\n", "not a mark that belongs here: //: since ever X x"),
        ("//: with X\nint x;\n", "sections without an end: X"),
    ],
)
def test_wrong_marks(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_verbs.resolve(text, set())


@pytest.mark.parametrize("version", sorted({28, *(feature.since for feature in FEATURES)}))
def test_declarations_are_c_for_every_version(version):
    text = build_verbs.resolve(DECLARATIONS, {feature.name for feature in FEATURES if feature.since <= version})
    FFI().cdef(text)
    for feature in FEATURES:
        assert f"#define PVL_HAS_{feature.name} ...\n" in text


def test_flags_in_c():
    for present, sign in ((set(), "-"), (EVERYTHING, "")):
        source = build_verbs.c_source(ROOT, DECLARATIONS, present)
        for feature in FEATURES:
            assert f"#define PVL_HAS_{feature.name} {sign}{feature.since}\n" in source


def test_flags_of_the_compiled_module():
    flags = {name.removeprefix("PVL_HAS_"): getattr(lib, name) for name in dir(lib) if name.startswith("PVL_HAS_")}
    assert {name: abs(value) for name, value in flags.items()} == {f.name: f.since for f in FEATURES}


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
    present = {feature.name for feature in FEATURES if getattr(lib, f"PVL_HAS_{feature.name}") > 0}
    here = set(re.findall(r"\w+", build_verbs.resolve(DECLARATIONS, present)))
    lines = build_verbs.stub(ROOT).split("class Lib:")[1]
    functions = [name for name in re.findall(r"^    def (\w+)\(self", lines, re.M) if name in here]
    constants = [name for name in re.findall(r"^    (\w+): Final\[int\]", lines, re.M) if name in here]
    pointers = [name for name in re.findall(r"^    (\w+): Final\[CData\]", lines, re.M) if name in here]
    assert len(functions) > 200
    assert len(constants) > 400
    assert pointers == ["IBV_ALLOCATOR_USE_DEFAULT"]
    assert [name for name in functions if not callable(getattr(lib, name, None))] == []
    assert [name for name in constants if not isinstance(getattr(lib, name, None), int)] == []
    assert [name for name in pointers if not isinstance(getattr(lib, name, None), CData)] == []


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


PROBES = {
    "FUNCTION": "ibv_open_device",
    "MEMBER": "sizeof(((struct ibv_port_attr *)0)->link_layer)",
    "ENUMERATOR": "IBV_WC_SUCCESS",
    "CALL": "ibv_inc_rkey(1)",
    "NO_FUNCTION": "ibv_of_the_next_century",
    "NO_CALL": "ibv_of_the_next_century(1)",
    "NO_MEMBER": "sizeof(((struct ibv_port_attr *)0)->of_the_next_century)",
    "NO_STRUCT": "sizeof(struct ibv_of_the_next_century)",
}


def probe(command):
    wanted = [build_verbs.Feature(name, 99, text) for name, text in PROBES.items()]
    return command.present(wanted, extension())


@needs_compiler
def test_probes(command):
    assert probe(command("cc")) == {"FUNCTION", "MEMBER", "ENUMERATOR", "CALL"}
    assert command("cc").present([], extension()) == set()


@needs_compiler
@pytest.mark.parametrize(
    "complaint",
    [
        "cat >/dev/null",  # says nothing: every probe is tried by itself
        "head -n 1",  # says it of the first only, as a compiler that stops at the first error
        "sed 's/.*probe\\.c:/probe.c:/'",
    ],
)
def test_probes_with_compilers_that_say_little(command, tmp_path, complaint):
    compiler = tmp_path / "cc"
    said = tmp_path / "said"
    compiler.write_text(
        f"#!/bin/sh\ncc \"$@\" 2>'{said}'; code=$?\ngrep error: '{said}' | {complaint} >&2\nexit $code\n"
    )
    compiler.chmod(0o755)
    assert probe(command(str(compiler))) == {"FUNCTION", "MEMBER", "ENUMERATOR", "CALL"}


@needs_compiler
def test_probing_is_quick(command):
    cc = command("cc")
    start = time.monotonic()
    cc.present(FEATURES, extension())
    assert time.monotonic() - start < 3


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

"""Everything that the rdma-core headers declare is in ``pyverbs_lite.ffi``: a C parser reads them and compares.

The headers are those that the module was built with. ``PVL_HEADERS=/some/include`` names another tree, for a module
that was built with ``CFLAGS=-I/some/include``. The compiler's preprocessor resolves the includes; pycparser reads the
result; nothing is skipped but what ``EXCEPTIONS`` names, and an exception that excuses nothing fails.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from cffi import FFI, model
from pycparser import c_ast, c_parser

from pyverbs_lite.ffi import CData, ffi, lib

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("build_verbs", ROOT / "build_verbs.py")
build_verbs = importlib.util.module_from_spec(_spec)
sys.modules["build_verbs"] = build_verbs
_spec.loader.exec_module(build_verbs)

HEADERS = ("infiniband/verbs.h", "infiniband/verbs_api.h", "infiniband/sa.h", "rdma/rdma_cma.h", "rdma/rdma_verbs.h")
#: Included by verbs_api.h, which gives public names to a part of it, as macros.
KERNEL_HEADER = "infiniband/ib_user_ioctl_verbs.h"
INCLUDE = "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n#include <rdma/rdma_verbs.h>\n"
#: What gcc and glibc write into the preprocessed text, and C99 does not know.
NOT_C99 = (
    *("-D__attribute__(x)=", "-D__extension__=", "-D__restrict=", "-D__inline=inline", "-D__asm__(...)="),
    *("-D__builtin_va_list=int", "-D__signed__=signed", "-D__const=const", "-D__volatile__=", "-D_Noreturn="),
    *("-D__builtin_offsetof(a,b)=0", "-D__builtin_constant_p(x)=0", "-D__int128=long", "-D_Float128=double"),
)

#: What is not declared, as a pattern of the whole name ("struct.member" for members), and why.
EXCEPTIONS = {
    r"_\w+": "private by its underscore: reached through the public name that wraps it",
    r"\w+\._\w+": "private by its underscore: kept for the layout of old binaries",
    r"verbs_context\.ABI_placeholder[12]": "a hole in the driver's table, which its comment forbids to copy",
    r"INFINIBAND_\w+_H|RDMA_\w+_H|VERBS_API_H": "an include guard",
    r"verbs_get_ctx_op|vext_field_avail|RDMA_UAPI_PTR": "a macro with arguments that makes C, and no value",
    r"ibv_query_port|ibv_reg_mr|ibv_reg_mr_iova": "a macro over the function of the same name, which is declared",
}
#: Of versions other than the usual: these need not excuse anything in the headers at hand.
EXCEPTIONS_ELSEWHERE = {
    r"IBV_REREG_MR_KEEP_VALID": "removed in rdma-core 32: no driver ever did it",
    r"IBV_FLOW_ATTR_FLAGS_ALLOW_LOOP_BACK": "removed in rdma-core 29: no driver ever did it",
}


class Found(NamedTuple):
    """What the headers declare, or what the module does, by kind."""

    functions: set[str]
    enums: set[str]
    enumerators: set[str]
    structs: set[str]
    members: set[str]
    macros: set[str]


def tree_option() -> list[str]:
    tree = os.environ.get("PVL_HEADERS")
    return [f"-I{tree}"] if tree else []


def preprocess(*options: str) -> str:
    command = ["cc", "-std=gnu11", "-E", "-D_GNU_SOURCE", *tree_option(), *options, "-"]
    return subprocess.run(command, input=INCLUDE, capture_output=True, text=True, check=True, timeout=60).stdout


def is_ours(path: str) -> bool:
    return path.endswith(HEADERS)


class Reader(c_ast.NodeVisitor):
    """Collects what stands in our headers; and every struct of theirs, by tag, for the aliases."""

    def __init__(self) -> None:
        self.found = Found(*(set() for _ in Found._fields))
        self.tags: dict[str, c_ast.Node] = {}

    def read(self, tree: c_ast.FileAST) -> None:
        for node in tree.ext:
            self.note_tags(node)
            if not is_ours(node.coord.file):
                continue
            declaration = node.decl if isinstance(node, c_ast.FuncDef) else node
            if isinstance(declaration, c_ast.Decl) and isinstance(declaration.type, c_ast.FuncDecl):
                self.found.functions.add(declaration.name)
            elif isinstance(declaration, c_ast.Decl) and declaration.name is not None:
                raise AssertionError(f"neither a function nor a type: {declaration.name} at {declaration.coord}")
            elif isinstance(declaration, c_ast.Typedef):
                raise AssertionError(f"a typedef, and the test knows none: {declaration.name} at {declaration.coord}")
            elif isinstance(declaration.type, c_ast.Enum):
                self.enum(declaration.type)
            else:
                self.struct(declaration.type)

    def note_tags(self, node: c_ast.Node) -> None:
        kind = getattr(node, "type", None)
        complete = getattr(kind, "values", None) or getattr(kind, "decls", None)
        if isinstance(kind, (c_ast.Enum, c_ast.Struct, c_ast.Union)) and complete and kind.name:
            self.tags[kind.name] = kind

    def enum(self, node: c_ast.Enum) -> None:
        if node.name:
            self.found.enums.add(node.name)
        self.found.enumerators.update(enumerator.name for enumerator in node.values.enumerators)

    def struct(self, node: c_ast.Struct | c_ast.Union, name: str = "") -> None:
        name = name or node.name
        self.found.structs.add(name)
        if node.decls:
            self.found.members.update(f"{name}.{path}" for path in self.paths(node))

    def paths(self, node: c_ast.Struct | c_ast.Union) -> set[str]:
        """List the members as a C program writes them, through those that have no name or a type without one."""
        result = set()
        for member in node.decls:
            kind = member.type.type if isinstance(member.type, c_ast.TypeDecl) else member.type
            inner = isinstance(kind, (c_ast.Struct, c_ast.Union)) and kind.name is None
            if member.name:
                result.add(member.name)
            if inner:
                result |= {f"{member.name}.{path}" if member.name else path for path in self.paths(kind)}
        return result


@pytest.fixture(scope="module")
def macros() -> dict[str, str]:
    """Every macro that our headers define: name -> body; those with arguments as "(…) body"."""
    result = {}
    file = ""
    for line in preprocess("-dD").splitlines():
        if place := re.match(r'# \d+ "(.*?)"', line):
            file = place[1]
        elif (define := re.match(r"#define (\w+)(\(.*?\))? ?(.*)", line)) and is_ours(file):
            result[define[1]] = f"{define[2] or ''}{define[3]}"
    return result


@pytest.fixture(scope="module")
def headers(macros: dict[str, str]) -> Found:
    """What the headers declare."""
    reader = Reader()
    reader.read(c_parser.CParser().parse(drop_bodies(preprocess(*NOT_C99))))
    for name, body in macros.items():
        tag = reader.tags.get(body)
        if isinstance(tag, c_ast.Enum):
            reader.found.enums.add(name)  # its enumerators have macros of their own
        elif tag is not None:
            reader.struct(tag, name)
        elif re.fullmatch(r"ib_uverbs_\w+", body):
            raise AssertionError(f"{name} is another name for {body}, which is nowhere")
        else:
            reader.found.macros.add(name)
    return reader.found


def drop_bodies(text: str) -> str:
    """Empty the bodies of our headers' inline functions: they may use GNU's C, and declare nothing."""
    result = []
    ours = False
    depth = 0
    for line in text.splitlines(keepends=True):
        if place := re.match(r'# \d+ "(.*?)"', line):
            ours = is_ours(place[1])
        elif ours and (depth or line.startswith("{")):
            result.append("" if depth else "{")
            depth += line.count("{") - line.count("}")
            line = "\n" if depth else "}\n"
        result.append(line)
    return "".join(result)


@pytest.fixture(scope="module")
def declared(headers: Found) -> Found:
    """What the module has of it."""
    enums = {name for name in headers.enums if known(f"enum {name}")}
    enumerators = {enumerator for name in enums for enumerator in ffi.typeof(f"enum {name}").relements}
    constants = {name for name in dir(lib) if isinstance(getattr(lib, name), (int, CData))}
    kinds = {name: kind for name in headers.structs for kind in ("struct", "union") if known(f"{kind} {name}")}
    members: set[str] = set()
    for name, kind in kinds.items():
        members |= {f"{name}.{path}" for path in paths(ffi.typeof(f"{kind} {name}"))}
    return Found(set(dir(lib)) - constants, enums, enumerators | constants, set(kinds), members, constants)


def known(c_type: str) -> bool:
    """Whether the module knows a type; cffi would make up a struct, so its own list is asked."""
    kind, _, name = c_type.partition(" ")
    if kind == "enum":
        try:
            return bool(ffi.typeof(c_type).relements)
        except ffi.error:
            return False
    _, structs, unions = ffi.list_types()
    return name in (structs if kind == "struct" else unions)


def is_complete(c_type: object) -> bool:
    try:
        ffi.sizeof(c_type)
    except ffi.error:
        return False
    return True


def paths(c_type: ffi.CType) -> set[str]:
    """List the members of a struct as a C program writes them."""
    result: set[str] = set()
    if not is_complete(c_type):
        return result
    for name, field in c_type.fields:
        if name:
            result.add(name)
        # cffi's own names for what has none contain a "$"; ours begin with pvl_ (see src/names.c).
        if (field.type.kind in ("struct", "union") and re.search(r"\$|^pvl_|^$", field.type.cname)) or not name:
            result |= {f"{name}.{path}" if name else path for path in paths(field.type)}
    return result


def excused(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in (*EXCEPTIONS, *EXCEPTIONS_ELSEWHERE))


@pytest.mark.parametrize("kind", Found._fields)
def test_nothing_is_missing(headers: Found, declared: Found, kind: str) -> None:
    missing = sorted(name for name in absent(headers, declared, kind) if not excused(name))
    assert missing == [], f"{len(missing)} of {len(getattr(headers, kind))} {kind} are not declared"


def absent(headers: Found, declared: Found, kind: str) -> set[str]:
    """List what the headers have of a kind, and the module has not; a macro may be an enumerator to us."""
    here = declared.macros | declared.enumerators if kind == "macros" else getattr(declared, kind)
    return getattr(headers, kind) - here


def test_counts(headers: Found, declared: Found, capsys: pytest.CaptureFixture[str]) -> None:
    counts = [
        f"{len(getattr(headers, kind))} {kind} ({len(absent(headers, declared, kind))} excused)"
        for kind in Found._fields
    ]
    with capsys.disabled():
        print(f"\nin the headers: {', '.join(counts)}")
    assert len(headers.functions) > 190
    assert len(headers.members) > 700


def test_every_exception_is_needed(headers: Found, declared: Found) -> None:
    missing = {name for kind in Found._fields for name in absent(headers, declared, kind)}
    assert [pattern for pattern in EXCEPTIONS if not any(re.fullmatch(pattern, name) for name in missing)] == []


def test_the_parser_sees_what_is_known_to_be_there(headers: Found) -> None:
    assert {"ibv_open_device", "ibv_post_send", "ibv_wr_start", "rdma_connect", "rdma_post_sendv"} <= headers.functions
    assert {"ibv_wc_status", "rdma_cm_event_type", "ibv_flow_action_esp_flags"} <= headers.enums
    assert {"IBV_WC_SUCCESS", "IBV_LINK_LAYER_ETHERNET", "RDMA_OPTION_ID_TOS"} <= headers.enumerators
    assert {"ibv_gid", "ibv_flow_action_esp", "ibv_sa_path_rec", "rdma_cm_id"} <= headers.structs
    wanted = {"ibv_gid.global.subnet_prefix", "ibv_send_wr.wr.rdma.rkey", "ibv_send_wr.bind_mw.bind_info"}
    wanted |= {"ibv_wc.imm_data", "ibv_ops_wr.tm.add.tag", "rdma_cm_event.param.conn", "rdma_addr.src_sin6"}
    assert wanted <= headers.members
    assert {"IBV_DEVICE_RAW_SCATTER_FCS", "RAI_PASSIVE", "IBV_ADVISE_MR_FLAG_FLUSH"} <= headers.macros


# Types: cffi converts an argument to the type that we declared, and C converts it again, without a word

#: Where the type that C sees is another than the one that is called.
OTHER_TYPES = {
    "ibv_get_device_guid": "__be64 is unsigned long long to the kernel's headers, and as long as uint64_t",
    "ibv_query_port": "the macro takes a struct ibv_port_attr, and the function under it one of old binaries",
}


def here() -> dict[str, object]:
    """Read the declarations of this module once more, as cffi's models of the types."""
    cdef = build_verbs.read_cdef(ROOT)
    present = {f.name for f in build_verbs.features(cdef) if getattr(lib, f"PVL_HAS_{f.name}") > 0}
    parser = FFI()
    parser.cdef(build_verbs.resolve(cdef, present))
    return {key: declared for key, (declared, _) in parser._parser._declarations.items()}


def checks() -> dict[str, str]:
    """Write, for every function and member, the C that compiles only if its type is the one that we declare."""
    result = {}

    def check(name: str, place: str, c_type: model.BaseType, quals: int) -> None:
        if isinstance(c_type, model.StructOrUnion) and "$" in c_type.name:
            for member, inner, _, inner_quals in c_type.enumfields():
                check(f"{name}.{member}", f"{place}.{member}", inner, inner_quals)
        elif isinstance(c_type, (model.PrimitiveType, model.EnumType, model.UnknownIntegerType)):
            ours = c_type.get_c_name()
            same = f"sizeof({place}) == sizeof({ours}) && ((__typeof__({place}))-1 < 0) == (({ours})-1 < 0)"
            result[name] = f'_Static_assert({same}, "");'
        else:
            pointer = model.PointerType(c_type, quals).get_c_name(" pvl_check")
            if isinstance(c_type, model.ArrayType):
                pointer = c_type.get_c_name("(*pvl_check)")
            result[name] = f"void pvl_check_{len(result)}(void) {{ {pointer} = &{place}; }}"

    for key, declared in here().items():
        kind, _, name = key.partition(" ")
        if kind == "function" and not name.startswith("pvl_"):
            result[name] = f"void pvl_check_{len(result)}(void) {{ {declared.get_c_name(' pvl_check')} = {name}; }}"
        elif kind in ("struct", "union") and re.match("ibv_|rdma_|verbs_", name) and declared.fldnames is not None:
            for member, c_type, _, quals in declared.enumfields():
                check(f"{name}.{member}", f"(({kind} {name} *)0)->{member}", c_type, quals)
    return result


def test_types_are_those_of_the_headers(tmp_path: Path) -> None:
    names = checks()
    source = tmp_path / "types.c"
    names_c = (ROOT / build_verbs.FFI_DIR / "src" / "names.c").read_text().replace("\n", " ")
    source.write_text("\n".join([*names.values(), ""]))
    prelude = tmp_path / "prelude.h"
    prelude.write_text(INCLUDE + names_c)
    command = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-fsyntax-only", "-Werror=incompatible-pointer-types"]
    command += [*tree_option(), "-include", str(prelude), str(source)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stderr
    by_line = list(names)
    wrong = {by_line[int(line) - 1] for line in re.findall(r"types\.c:(\d+):\d+: error", said)}
    assert len(names) > 900
    assert wrong == set(OTHER_TYPES), said

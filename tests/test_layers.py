"""Imports go downward only: the layers of the design, read from the syntax tree of every module."""

import ast
import functools
import graphlib
import textwrap
from pathlib import Path

import pytest

import pyverbs_lite

PACKAGE = Path(pyverbs_lite.__file__).parent

#: Module -> layer. A new module is put here, or the test fails.
LAYERS = {
    "errors": 0,
    "ffi": 0,
    "_homes": 0,
    "_arena": 1,
    "_args": 1,
    "_buddy": 1,
    "_buffer": 1,
    "_accelerator": 1,
    "_dlpack": 1,
    "_keeper": 1,
    "_pages": 1,
    "_random": 1,
    "_check": 1,
    "_resource": 1,
    "enums": 1,
    "attr": 2,
    "gid": 2,
    "grh": 2,
    "qp_fsm": 2,
    "endpoint": 2,
    "remote": 2,
    "_frames": 2,
    "wire": 2,
    "_private_data": 2,
    "_auth": 2,
    "_access": 1,
    "_attr_c": 3,
    "_factories": 3,
    "_mw_request": 3,
    "_rereg": 3,
    "_windows": 3,
    "_device_attr_ex": 3,
    "device_ex": 3,
    "dm": 3,
    "domains": 3,
    "events": 3,
    "fork": 3,
    "mr_ex": 3,
    "sharing": 3,
    "ah": 3,
    "_queue_factories": 3,
    "comp_channel": 3,
    "counters": 3,
    "cq": 3,
    "cq_ex": 3,
    "flow": 3,
    "flow_action": 3,
    "_flow_members": 2,
    "flow_spec": 3,
    "flow_spec_action": 3,
    "wq": 3,
    "device": 3,
    "mr": 3,
    "mw": 3,
    "pd": 3,
    "pool": 3,
    "_gid_tables": 3,
    "_registrations": 3,
    "_spares": 3,
    "regcache": 3,
    "qp": 3,
    "srq": 3,
    "wr": 3,
    "xrcd": 3,
    "wr_ex": 3,
    "mcast": 3,
    "_transitions": 3,
    "_qp_init": 3,
    "_qp_features": 3,
    "_rules": 3,
    "_posting": 3,
    "_inflight": 3,
    "_cm_addresses": 3,
    "_cm_calls": 3,
    "_cm_state": 3,
    "_cm_waits": 3,
    "cm_addrinfo": 3,
    "cm_channel": 3,
    "cm_context": 3,
    "cm_mcast": 3,
    "cm_qp": 3,
    "_control": 4,
    "cm_listener": 4,
    "_cm_establish": 4,
    "_cm_link": 4,
    "_control_base": 4,
    "_starter": 4,
    "_stats": 4,
    "_framed": 4,
    "_receives": 4,
    "_registry": 4,
    "_inbox": 4,
    "_lent": 4,
    "_receiver": 4,
    "_work": 4,
    "_cm_control": 4,
    "_sockaddr": 3,
    "cmid": 3,
    "cm_events": 3,
    "_tcp": 4,
    "_tls": 4,
    "_dial": 4,
    "_cm_keep_alive": 4,
    "backoff": 2,
    "_settings": 4,
    "_operation": 4,
    "_link": 4,
    "_moves": 4,
    "_made": 3,
    "_views": 4,
    "_device_attr": 3,
    "_engine": 4,
    "_establish": 4,
    "_handshake": 4,
    "_options": 4,
    "_prepared": 4,
    "_many": 4,
    "_packed": 4,
    "_requests": 4,
    "cm": 4,
    "connection": 4,
    "grant": 4,
    "listener": 4,
    "_gate": 4,
    "_hub": 4,
    "_server_base": 4,
    "_shared": 4,
    "_srq_pool": 4,
    "server": 4,
    "_aio_connection": 5,
    "_aio_listener": 5,
    "_aio_hub": 5,
    "_aio_server": 5,
    "_aio_server_face": 5,
    "_anyio_connection": 5,
    "_anyio_hub": 5,
    "_anyio_server": 5,
    "_aio_remote": 5,
    "_aio_turns": 5,
    "_anyio_watch": 5,
    "anyio": 5,
    "_aio_run": 5,
    "_aio_prepared": 5,
    "_aio_thread": 5,
    "_aio_watch": 5,
    "aio": 5,
    "cli": 5,
    "__main__": 6,
    "__init__": 6,
}


def _is_type_checking(node):
    test = node.test if isinstance(node, ast.If) else None
    return getattr(test, "id", None) == "TYPE_CHECKING" or getattr(test, "attr", None) == "TYPE_CHECKING"


def _runtime_nodes(node):
    """Walk a tree, past what only a type checker reads."""
    if _is_type_checking(node):
        children = node.orelse
    else:
        yield node
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _runtime_nodes(child)


def imports(source, package):
    """List what a module imports of ours, as dotted paths below ``pyverbs_lite``; ``""`` is the top itself."""
    found = set()
    for node in _runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {
                tuple(alias.name.split(".")) for alias in node.names if alias.name.split(".")[0] == "pyverbs_lite"
            }
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
            elif node.module and node.module.split(".")[0] == "pyverbs_lite":
                base = ()
            else:
                continue
            path = (*base, *(node.module.split(".") if node.module else ()))
            # "from . import gid" names modules; "from .gid import choose" names one.
            found |= {path} if len(path) > 1 else {(*path, alias.name) for alias in node.names}
    return {path[1] if len(path) > 1 else "__init__" for path in found}


@functools.cache
def modules():
    """Map each file of the package to its top-level name."""
    result = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        result[path] = relative.parts[0] if len(relative.parts) > 1 else relative.stem
    return result


@functools.cache
def edges():
    """Map each top-level name to those it imports at run time, itself left out."""
    graph = {}
    for path, name in modules().items():
        package = ("pyverbs_lite", *path.relative_to(PACKAGE).parent.parts)
        graph.setdefault(name, set()).update(imports(path.read_text(), package) - {name})
    return graph


def test_every_module_has_a_layer():
    assert set(modules().values()) - set(LAYERS) == set(), "put the new module into LAYERS"


@pytest.mark.parametrize("name", sorted(set(modules().values())))
def test_imports_go_downward_only(name):
    upward = {other for other in edges()[name] if LAYERS.get(other, 6) > LAYERS[name]}
    assert upward == set()


def test_no_cycle_within_a_layer():
    order = list(graphlib.TopologicalSorter(edges()).static_order())  # raises CycleError, which shows the cycle
    assert set(order) >= set(modules().values())


def test_errors_imports_nothing_of_ours():
    assert edges()["errors"] == set()


def test_one_place_imports_the_compiled_module():
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in modules()
        for node in _runtime_nodes(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] == "_verbs"
    }
    assert importers == {"ffi/__init__.py"}


def test_pure_logic_calls_no_verb():
    pure = {name for name, layer in LAYERS.items() if layer == 2}
    assert {name for name in pure & set(edges()) if "ffi" in edges()[name]} == set()


@pytest.mark.parametrize(
    ("source", "package", "expected"),
    [
        ("from .gid import choose", ("pyverbs_lite",), {"gid"}),
        ("from . import gid, wire", ("pyverbs_lite",), {"gid", "wire"}),
        ("from .ffi._verbs import CData", ("pyverbs_lite",), {"ffi"}),
        ("from ..gid import choose", ("pyverbs_lite", "cli"), {"gid"}),
        ("from .main import run", ("pyverbs_lite", "cli"), {"cli"}),
        ("from .. import gid", ("pyverbs_lite", "cli"), {"gid"}),
        ("import pyverbs_lite", ("pyverbs_lite",), {"__init__"}),
        ("import os, pyverbs_lite.gid as g", ("pyverbs_lite",), {"gid"}),
        ("from pyverbs_lite.gid import choose", ("pyverbs_lite",), {"gid"}),
        ("from pyverbs_lite import gid", ("pyverbs_lite",), {"gid"}),
        ("def f():\n    from .cq import CQ", ("pyverbs_lite",), {"cq"}),
        ("if TYPE_CHECKING:\n    from .cq import CQ\nelse:\n    from .mr import MR", ("pyverbs_lite",), {"mr"}),
        ("import typing\nif typing.TYPE_CHECKING:\n    from .cq import CQ", ("pyverbs_lite",), set()),
        ("import os\nfrom json import loads", ("pyverbs_lite",), set()),
    ],
)
def test_the_reader_itself(source, package, expected):
    assert imports(textwrap.dedent(source), package) == expected


def test_the_makefile_measures_every_pure_module():
    text = (PACKAGE.parent / "Makefile").read_text().replace("\\\n", " ")
    listed = next(line for line in text.splitlines() if line.startswith("PURE_MODULES")).partition(":=")[2].split()
    pure = {name for name, layer in LAYERS.items() if layer <= 2 and name != "ffi"} & set(modules().values())
    assert {name.removesuffix("/*") for name in listed} == pure

"""Imports go downward only: the layers of the design, read from the syntax tree of every module."""

import ast
import functools
import graphlib
import textwrap
from pathlib import Path

import pytest

import pyverbs_lite

PACKAGE = Path(pyverbs_lite.__file__).parent
#: The top, and the folders of private modules, which have nothing of their own.
_FOLDERS = {(), *((path.name,) for path in PACKAGE.glob("_*") if (path / "__init__.py").exists())}

#: Module -> layer. A new module is put here, or the test fails.
LAYERS = {
    "errors": 0,
    "ffi": 0,
    "_homes": 0,
    "_memory.arena": 1,
    "_base.args": 1,
    "_memory.buddy": 1,
    "_memory.buffer": 1,
    "_memory.accelerator": 1,
    "_memory.dlpack": 1,
    "_memory.keeper": 1,
    "_memory.pages": 1,
    "_base.random": 1,
    "_base.check": 1,
    "_base.resource": 1,
    "enums": 1,
    "attr": 2,
    "gid": 2,
    "grh": 2,
    "qp_fsm": 2,
    "endpoint": 2,
    "remote": 2,
    "_control.frames": 2,
    "wire": 2,
    "_cm.private_data": 2,
    "_control.auth": 2,
    "_base.access": 1,
    "_objects.attr_c": 3,
    "_objects.factories": 3,
    "_objects.mw_request": 3,
    "_memory.rereg": 3,
    "_memory.windows": 3,
    "_objects.device_attr_ex": 3,
    "device_ex": 3,
    "dm": 3,
    "domains": 3,
    "events": 3,
    "fork": 3,
    "mr_ex": 3,
    "sharing": 3,
    "ah": 3,
    "_objects.queue_factories": 3,
    "comp_channel": 3,
    "counters": 3,
    "cq": 3,
    "cq_ex": 3,
    "flow": 3,
    "flow_action": 3,
    "_objects.flow_members": 2,
    "flow_spec": 3,
    "flow_spec_action": 3,
    "wq": 3,
    "device": 3,
    "mr": 3,
    "mw": 3,
    "pd": 3,
    "pool": 3,
    "_objects.gid_tables": 3,
    "_memory.registrations": 3,
    "_objects.spares": 3,
    "regcache": 3,
    "qp": 3,
    "srq": 3,
    "wr": 3,
    "xrcd": 3,
    "wr_ex": 3,
    "mcast": 3,
    "_objects.transitions": 3,
    "_objects.qp_init": 3,
    "_objects.qp_features": 3,
    "_objects.rules": 3,
    "_objects.posting": 3,
    "_objects.inflight": 3,
    "_cm.addresses": 3,
    "_cm.calls": 3,
    "_cm.state": 3,
    "_cm.waits": 3,
    "cm_addrinfo": 3,
    "cm_channel": 3,
    "cm_context": 3,
    "cm_mcast": 3,
    "cm_qp": 3,
    "_control.control": 4,
    "cm_listener": 4,
    "_cm.establish": 4,
    "_cm.link": 4,
    "_control.base": 4,
    "_connection.starter": 4,
    "_connection.stats": 4,
    "_control.framed": 4,
    "_connection.receives": 4,
    "_connection.registry": 4,
    "_connection.inbox": 4,
    "_connection.lent": 4,
    "_connection.receiver": 4,
    "_connection.work": 4,
    "_cm.control": 4,
    "_cm.sockaddr": 3,
    "cmid": 3,
    "cm_events": 3,
    "_control.tcp": 4,
    "_control.tls": 4,
    "_connection.dial": 4,
    "_cm.keep_alive": 4,
    "backoff": 2,
    "_connection.settings": 4,
    "_connection.operation": 4,
    "_connection.link": 4,
    "_connection.moves": 4,
    "_base.made": 3,
    "_connection.views": 4,
    "_objects.device_attr": 3,
    "_connection.engine": 4,
    "_connection.establish": 4,
    "_handshake": 4,
    "_connection.options": 4,
    "_connection.prepared": 4,
    "_connection.many": 4,
    "_connection.packed": 4,
    "_connection.requests": 4,
    "cm": 4,
    "connection": 4,
    "grant": 4,
    "listener": 4,
    "_server.gate": 4,
    "_connection.hub": 4,
    "_server.base": 4,
    "_server.shared": 4,
    "_server.srq_pool": 4,
    "server": 4,
    "_aio.connection": 5,
    "_aio.listener": 5,
    "_aio.hub": 5,
    "_aio.server": 5,
    "_aio.server_face": 5,
    "_anyio.connection": 5,
    "_anyio.hub": 5,
    "_anyio.server": 5,
    "_aio.remote": 5,
    "_aio.turns": 5,
    "_anyio.base": 5,
    "_anyio.watch": 5,
    "anyio": 5,
    "_aio.run": 5,
    "_aio.prepared": 5,
    "_aio.thread": 5,
    "_aio.watch": 5,
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


def name_of(parts):
    """Return what LAYERS calls a module: in a folder of private modules each has a layer of its own."""
    return ".".join(parts[: 2 if parts[:1] in _FOLDERS else 1]) or "__init__"


def imports(source, package):
    """List what a module imports of ours, as names of LAYERS."""
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
            # "from . import gid" and "from ._cm import link" name modules; "from .gid import choose" names one.
            found |= {(*path, alias.name) for alias in node.names} if path[1:] in _FOLDERS else {path}
    return {name_of(path[1:]) for path in found}


@functools.cache
def modules():
    """Map each file of the package to its name; the folders' own files are empty."""
    files = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    return {
        PACKAGE / path: name_of(path.with_suffix("").parts)
        for path in files
        if path.name != "__init__.py" or (*path.parts[:-1],) not in _FOLDERS - {()}
    }


@functools.cache
def edges():
    """Map each name to those it imports at run time, itself left out."""
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
        ("from .link import Link", ("pyverbs_lite", "_cm"), {"_cm.link"}),
        ("from ._cm import calls, link", ("pyverbs_lite",), {"_cm.calls", "_cm.link"}),
        ("from .._connection import link", ("pyverbs_lite", "_cm"), {"_connection.link"}),
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
    assert {name.removesuffix("/*").replace("/", ".") for name in listed} == pure

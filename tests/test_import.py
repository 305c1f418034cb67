"""What importing the package loads: almost nothing; every public name brings its own module when it is asked for."""

import ast
import json
import pydoc
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import pyverbs_lite as pvl
from pyverbs_lite import _homes, errors

ROOT = Path(pvl.__file__).parents[1]
#: Standard modules that take long to import, and that most programs with this library never need.
HEAVY = {
    "asyncio",
    "concurrent.futures",
    "ctypes",
    "dataclasses",
    "email",
    "importlib.metadata",
    "inspect",
    "ipaddress",
    "logging",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "typing_extensions",
}
#: What even a connection does without.
HEAVIER = {
    "asyncio",
    "concurrent.futures",
    "ctypes",
    "hashlib",
    "importlib.metadata",
    "logging",
    "pathlib",
    "secrets",
    "ssl",
}


def loaded(code):
    """Return what modules an interpreter has after some code, with nothing in it that ``site`` has loaded before."""
    paths = [str(ROOT), sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    script = f"import sys; sys.path[:0] = {paths!r}\n{code}\nprint(*sys.modules)"
    words = [sys.executable, "-I", "-S", "-c", script]
    return set(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.split())


def ours(names):
    return {name.removeprefix("pyverbs_lite.") for name in names if name.startswith("pyverbs_lite.")}


def test_the_import_loads_errors_and_the_compiled_module_only():
    names = loaded("import pyverbs_lite")
    assert ours(names) == {"_homes", "errors", "ffi", "ffi._verbs", "ffi._verbs.lib"}
    assert names & HEAVY == set()


def test_opening_a_device_loads_no_connection():
    names = ours(loaded("from pyverbs_lite import open_device"))
    assert names & {"connection", "_connection.engine", "cm", "cmid", "flow", "flow_spec", "aio"} == set()


@pytest.mark.parametrize("name", ["connect", "listen"])
def test_connecting_loads_nothing_that_it_does_not_need(name):
    names = loaded(f"from pyverbs_lite import {name}")
    unneeded = {
        "_objects.device_attr_ex",
        "aio",
        "cm",
        "cmid",
        "counters",
        "cq_ex",
        "dm",
        "flow",
        "flow_spec",
        "mcast",
        "wq",
    }
    assert ours(names) & unneeded == set()
    assert len(ours(names)) <= 102
    assert names & HEAVIER == set()


def test_every_public_name_resolves_and_is_listed_once():
    assert len(pvl.__all__) == len(set(pvl.__all__))
    for name in pvl.__all__:
        assert getattr(pvl, name) is not None
    modules = {"__version__", "aio", "cm", "gid", "qp_fsm", "wire"}
    assert set(pvl.__all__) == set(_homes.HOMES) | set(errors.__all__) | modules


def test_no_name_is_a_modules_too():
    # An import of the module would put it where the name is.
    assert not {path.stem for path in (ROOT / "pyverbs_lite").glob("*.py")} & set(_homes.HOMES)


def test_type_checkers_see_each_name_where_it_lives():
    tree = ast.parse((ROOT / "pyverbs_lite/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == _homes.HOMES


@pytest.mark.parametrize("code", ["x = pyverbs_lite.enums.MTU", "x = pyverbs_lite.errors", "x = pyverbs_lite.device"])
def test_a_public_module_is_an_attribute_without_being_imported(code):
    loaded(f"import pyverbs_lite\n{code}")


def test_a_star_import_brings_all_of_it():
    code = "from pyverbs_lite import *\nimport pyverbs_lite as p, json\nassert all(n in globals() for n in p.__all__)"
    assert {"aio", "flow", "cm"} <= ours(loaded(code))


def test_what_a_parent_makes_is_imported_when_it_is_made():
    text = "\n".join(path.read_text() for path in (ROOT / "pyverbs_lite").rglob("*.py"))
    code = "from pyverbs_lite._base.resource import Resource\nfrom pyverbs_lite import _homes\n"
    code += "kinds = " + json.dumps(sorted(set(_made(text)) & set(_homes.HOMES))) + "\n"
    code += "for kind in kinds: _homes.find(kind); assert kind in Resource._kinds, kind"
    loaded(code)


def _made(text):
    for node in ast.walk(ast.parse("\n".join(line for line in text.splitlines() if "__future__" not in line))):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "self._make"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.args[0].value


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'pyverbs_lite' has no attribute 'conect'"):
        pvl.conect  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'conect'"):
        exec("from pyverbs_lite import conect")


def test_dir_and_help_show_what_was_not_imported_yet():
    assert {*pvl.__all__, "enums", "device"} <= set(dir(pvl))
    text = pydoc.plain(pydoc.render_doc(pvl))
    assert "class Connection(" in text
    assert re.search(r"connect\(\s*host: ", text)  # newer versions break long signatures
    assert "class FlowSpecEth(" in text


def test_the_version_is_the_distributions():
    assert pvl.__version__ == "0.1.0" or pvl.__version__[0].isdigit()


def test_anyio_is_loaded_for_who_asks_and_missed_only_then():
    assert "anyio" not in loaded("from pyverbs_lite import *")
    code = "import sys; sys.modules['anyio'] = None; import pyverbs_lite; dir(pyverbs_lite); pyverbs_lite.anyio"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert "anyio" in done.stderr.splitlines()[-1]
    assert done.returncode == 1

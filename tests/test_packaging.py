"""The package builds as users build it: a wheel from the tree, an sdist, and a wheel from that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what belongs to the build, without what earlier builds left."""
    target = tmp_path_factory.mktemp("tree")
    for name in ("build_verbs.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "pyverbs_lite", target / "pyverbs_lite", ignore=ignore)
    return target


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from nothing but the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    script = f"import setuptools.build_meta as b; print(b.build_sdist({str(folder)!r}))"
    built = run(sys.executable, "-c", script, cwd=tree)
    assert built.returncode == 0, built.stderr
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"build_verbs.py", "LICENSE", "pyverbs_lite/py.typed", "pyverbs_lite/ffi/_verbs.pyi"}
    wanted |= {f"pyverbs_lite/ffi/{part.relative_to(ROOT / 'pyverbs_lite' / 'ffi')}" for part in c_parts()}
    assert wanted <= names, wanted - names
    made = run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist, cwd=folder)
    assert made.returncode == 0, made.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def c_parts() -> list[Path]:
    ffi = ROOT / "pyverbs_lite" / "ffi"
    return [*ffi.glob("cdef/*.h"), *ffi.glob("src/*.c")]


def test_one_abi3_wheel_with_types_and_without_sources(wheel: Path) -> None:
    assert wheel.name.startswith("pyverbs_lite-")
    assert "-cp310-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"pyverbs_lite/py.typed", "pyverbs_lite/ffi/_verbs.pyi", "pyverbs_lite/ffi/_verbs.abi3.so"} <= names
    assert not [name for name in names if name.endswith((".c", ".h")) or name.startswith(("tests", "rxe"))]
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pyverbs_lite").rglob("*.py")}
    assert modules <= names


def test_the_wheel_works_when_installed_elsewhere(wheel: Path, tmp_path: Path) -> None:
    installed = run(*PIP, "install", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    script = "import pyverbs_lite as p; print(p.__file__); print(p.__version__); p.devices()"
    used = run(sys.executable, "-W", "error", "-c", script, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert (used.stderr, used.returncode) == ("", 0)
    path, version = used.stdout.split()
    assert Path(path) == tmp_path / "site" / "pyverbs_lite" / "__init__.py"
    assert version in wheel.name


def test_without_headers_the_build_stops_with_one_sentence(tree: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'fatal error: infiniband/verbs.h: No such file or directory' >&2\nexit 1\n")
    compiler.chmod(0o755)
    build = run(
        *PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree, cwd=tmp_path, CC=str(compiler)
    )
    assert build.returncode != 0
    message = [line for line in build.stderr.splitlines() if "needs the C headers" in line]
    assert len(message) == 1
    assert "libibverbs-dev" in message[0]
    assert "rdma-core-devel" in message[0]

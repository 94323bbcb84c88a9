"""The compiled modules: which they are, and the wheels with and without them."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.building import ROOT, attempt, build, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MODULES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
FEW = ["headrace/columns.py", "headrace/storage/opened.py"]
"""Modules that compile in seconds."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the source tree that compiles few modules."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, tree)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    before, _, rest = project.partition("\nmodules = [\n")
    (tree / "pyproject.toml").write_text(f"{before}\nmodules = {FEW}\n{rest.partition(']')[2]}", encoding="utf-8")
    return tree


def test_the_compiled_modules_exist_and_are_named_once() -> None:
    assert [name for name in MODULES if not (ROOT / "src" / name).is_file()] == []
    assert len(set(MODULES)) == len(MODULES)


def _handlers(function: ast.AST) -> Iterator[ast.ExceptHandler]:
    for node in ast.walk(function):
        if isinstance(node, ast.ExceptHandler) and node.name is not None and node.type is not None:
            yield node


@pytest.mark.parametrize("name", MODULES)
def test_a_compiled_function_binds_a_name_to_exceptions_of_one_type(name: str) -> None:
    """mypyc gives the name the type of the first handler, and raises `TypeError` in the second."""
    for function in ast.walk(ast.parse((ROOT / "src" / name).read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            types: dict[str | None, str] = {}
            for handler in _handlers(function):
                assert handler.type is not None
                caught = ast.unparse(handler.type)
                assert types.setdefault(handler.name, caught) == caught, f"{name}:{handler.lineno}"


@pytest.mark.parametrize("name", MODULES)
def test_no_compiled_class_is_acyclic(name: str) -> None:
    """Freeing such an object inside deeply nested ones overwrites other memory (tests/storage/test_batch_freeing.py)."""
    for node in ast.walk(ast.parse((ROOT / "src" / name).read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.keyword) and node.arg == "acyclic"), f"{name}:{node.lineno}"


def test_mypyc_accepts_every_compiled_module(tmp_path: Path) -> None:
    script = "import pathlib, sys; sys.path.insert(0, '..'); import hatch_build; hatch_build.extensions(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("**/__native_*.c"))) == len(MODULES) + 1


def test_a_wheel_without_a_compiler_is_pure_and_the_build_says_why(tree: Path, tmp_path: Path) -> None:
    wheel, printed = build("wheel", tree, tmp_path, CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "headrace: pure Python, because the C compiler no-such-compiler is not installed" in printed
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == sources(tree)


def test_a_compiler_that_fails_yields_a_pure_wheel(tree: Path, tmp_path: Path) -> None:
    wheel, printed = build("wheel", tree, tmp_path, CC="false")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "headrace: pure Python, because the compilation failed" in printed


def test_a_required_compilation_fails_without_a_compiler(tree: Path, tmp_path: Path) -> None:
    done = attempt("wheel", tree, tmp_path, CC="no-such-compiler", HEADRACE_COMPILE="1")
    assert done.returncode != 0
    assert "the C compiler no-such-compiler is not installed" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_compiled_wheel_adds_extension_modules_to_the_same_sources(tree: Path, tmp_path: Path) -> None:
    wheel, _ = build("wheel", tree, tmp_path / "dist", HEADRACE_COMPILE="1")
    assert "-none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "installed")
    compiled = {name for name in names if name.endswith(".so")}
    assert names - compiled == sources(tree)
    assert {name.partition(".")[0] for name in compiled} == {"headrace__mypyc", *(name.removesuffix(".py") for name in FEW)}
    script = "from headrace.compiled import is_compiled; from headrace.columns import Column; print(is_compiled(), len(Column.of([b'a'])))"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); {script}"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.split() == ["True", "1"]


def test_an_editable_installation_is_not_compiled(tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"]
    done = subprocess.run([*command, str(tmp_path)], cwd=tree, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip().endswith("-py3-none-any.whl")

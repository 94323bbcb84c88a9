"""The wheel and the source distribution: built without a warning, complete, and without tests or test tools.

The wheel is built without compiled modules, which take a minute to compile. `test_compiled.py` tests a wheel with them.
"""

from __future__ import annotations

import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

from tests.packaging.building import ROOT, build, sources

TEST_TOOLS = {"tests", "conftest.py", "simulated.py", "power_cut.py", "canaries.py", "storage_faults", "hypothesis", "pytest"}
"""Names of files and directories that only tests use."""


def built(kind: str, directory: Path) -> Path:
    made, _ = build(kind, ROOT, directory, HEADRACE_COMPILE="0")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(built("wheel", tmp_path_factory.mktemp("wheel")))


def files_of(wheel: zipfile.ZipFile) -> list[PurePosixPath]:
    return [PurePosixPath(name) for name in wheel.namelist()]


def test_tools_in(paths: Sequence[PurePosixPath]) -> list[str]:
    return [str(path) for path in paths if TEST_TOOLS & set(path.parts) or path.name.startswith("test_") or path.stem.endswith("_test")]


test_tools_in.__test__ = False  # type: ignore[attr-defined]  # a helper, whatever its name says


def test_the_wheel_holds_neither_tests_nor_test_tools(wheel: zipfile.ZipFile) -> None:
    assert test_tools_in(files_of(wheel)) == []
    sources = [name for name in wheel.namelist() if name.endswith(".py")]
    for name in sources:
        text = wheel.read(name).decode()
        assert "import pytest" not in text and "import hypothesis" not in text and "from tests" not in text, name


def test_a_planted_test_tool_would_be_found() -> None:
    planted = ["headrace/log/simulated.py", "tests/storage/test_store.py", "headrace/test_log.py", "headrace/conftest.py"]
    assert test_tools_in([PurePosixPath(name) for name in [*planted, "headrace/log/store.py"]]) == planted


def test_the_wheel_holds_every_module_of_the_source_tree_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    found = {str(path) for path in files_of(wheel) if not path.parts[0].endswith(".dist-info")}
    assert found == sources(ROOT)
    assert "headrace/py.typed" in found


def test_the_wheel_names_its_command_extras_pythons_and_license(wheel: zipfile.ZipFile) -> None:
    info = next(path.parts[0] for path in files_of(wheel) if path.parts[0].endswith(".dist-info"))
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "headrace = headrace.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_source_distribution_holds_what_builds_tests_and_runs_it(tmp_path: Path) -> None:
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()}
    wanted = (
        "pyproject.toml README.md LICENSE Makefile Containerfile packaging/headrace.service src/headrace/cli/__init__.py constraints.txt"
    )
    assert {PurePosixPath(name) for name in wanted.split()} <= names
    assert {PurePosixPath("hatch_build.py"), PurePosixPath("tests/packaging/test_wheel.py")} <= names

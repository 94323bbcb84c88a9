"""Build hook: compile the hot modules with mypyc, if a C compiler and the headers of Python are there.

    HEADRACE_COMPILE=0          never compile
    HEADRACE_COMPILE=1          fail if the modules cannot be compiled

    python hatch_build.py DIR   compile into DIR; `make compile` calls it with `src`

A wheel has the sources of compiled modules too: they are what a wheel without them runs, and what a traceback shows. An editable
installation is never compiled, so that edited sources take effect.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
REQUIREMENTS = ["mypy>=2.0,<3", "setuptools>=77"]
SWITCH = "HEADRACE_COMPILE"


class CannotCompile(Exception):
    """The compiler, a library or the headers are missing, or the compilation failed."""


class CompileHook(BuildHookInterface[Any]):
    """Adds the extension modules to a wheel."""

    def dependencies(self) -> list[str]:
        return REQUIREMENTS if is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get(SWITCH) == "0":
            return
        self._built = tempfile.TemporaryDirectory()
        built = Path(self._built.name)
        try:
            compile_modules(built)
        except CannotCompile as reason:
            if os.environ.get(SWITCH) == "1":
                raise
            self.app.display_info(f"headrace: pure Python, because {reason}")
            return
        for path in built.rglob("*"):
            if path.is_file():
                build_data["force_include"][str(path)] = str(path.relative_to(built))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_built"):
            self._built.cleanup()


def is_wanted() -> bool:
    """Return whether the build should try to compile."""
    switch = os.environ.get(SWITCH)
    return switch == "1" or (switch != "0" and missing() is None)


def missing() -> str | None:
    """Return why there is no way to compile."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    compiler = command.split()[0]
    if shutil.which(compiler) is None:
        return f"the C compiler {compiler} is not installed"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return None if headers.exists() else f"{headers} is missing"


def compile_modules(target: Path) -> None:
    """Compile the modules of pyproject.toml into the directory. Nothing is left in it after a failure."""
    if reason := missing():
        raise CannotCompile(reason)
    with tempfile.TemporaryDirectory() as scratch:
        # A process of its own: mypyc prints, and exits on an error.
        command = [sys.executable, "-u", str(Path(__file__)), "--inner", scratch]
        done = subprocess.run(command, cwd=ROOT / "src", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            if os.environ.get(SWITCH) == "1":
                sys.stderr.write(done.stdout)
            raise CannotCompile(f"the compilation failed ({SWITCH}=1 shows the errors)")
        shutil.copytree(Path(scratch, "lib"), target, dirs_exist_ok=True)


def modules() -> list[str]:
    """Return the paths below src/ of the modules to compile."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
    return listed


def extensions(directory: Path) -> list[Any]:
    """Translate the modules to C in the directory, and return what setuptools compiles. The working directory is src/."""
    from mypyc.build import mypycify

    # Libraries count as untyped, so that the result does not depend on what is installed. `make lint` checks types with the libraries.
    options = ["--config-file=", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent", "--cache-dir", os.devnull]
    options += ["--namespace-packages", "--explicit-package-bases", "--python-version", "{}.{}".format(*sys.version_info)]
    # Level 2 takes twice as long to compile, and one C file of all modules much memory.
    return mypycify(
        [*options, *modules()], opt_level="1", debug_level="0", multi_file=True, target_dir=str(directory), group_name="headrace"
    )


def run_mypyc(scratch: Path) -> None:
    from setuptools import setup

    arguments = ["--quiet", "build_ext", "--build-lib", str(scratch / "lib"), "--build-temp", str(scratch / "o")]
    setup(name="headrace", ext_modules=extensions(scratch / "c"), script_args=arguments)


if __name__ == "__main__":
    if sys.argv[1] == "--inner":
        run_mypyc(Path(sys.argv[2]))
    else:
        compile_modules(Path(sys.argv[1]))

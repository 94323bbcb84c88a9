"""Plugin of pytest: imports Headrace from its sources, also where compiled modules are beside them.

    python -m pytest -p tests.plain_sources TEST

Compiled classes and functions cannot be replaced. `tests/conftest.py` runs the tests that replace them in a process with this plugin.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType


class SourceFinder(MetaPathFinder):
    """Finds the modules of a package as sources only."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._package:
            return None
        for directory in path or sys.path:
            spec = FileFinder(directory, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(fullname)
            if spec is not None and spec.loader is not None:
                return spec
        return None


if __name__ in sys.argv:  # named by `-p`, which imports it before the first import of Headrace
    assert "headrace" not in sys.modules, "the plugin comes too late"
    sys.meta_path.insert(0, SourceFinder("headrace"))

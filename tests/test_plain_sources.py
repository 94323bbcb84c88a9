"""The import of sources beside compiled modules."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests.plain_sources import SourceFinder


def test_a_source_is_preferred_to_the_compiled_module_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "half_compiled" / "inner"
    inner.mkdir(parents=True)
    for directory in (inner.parent, inner):
        (directory / "__init__.py").touch()
    (inner / "hot.py").write_text("NAME = 'source'\n", encoding="utf-8")
    (inner / f"hot{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError):
        importlib.import_module("half_compiled.inner.hot")
    monkeypatch.setattr(sys, "meta_path", [SourceFinder("half_compiled"), *sys.meta_path])
    assert importlib.import_module("half_compiled.inner.hot").NAME == "source"

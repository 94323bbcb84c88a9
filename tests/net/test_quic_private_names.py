"""The private names of aioquic that the adapter uses are those that the decision page lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import aioquic

import headrace.net.quic

ADAPTER = Path(headrace.net.quic.__path__[0])
PAGE = Path(__file__).parent.parent.parent / "docs" / "decisions" / "quic.md"


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.FunctionDef) else ""
        if re.match(r"_[a-z]", name):
            yield name


def own_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private attributes and methods of the adapter's own classes, without the subclass of `QuicConnection`."""
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if any(isinstance(base, ast.Name) and base.id == "QuicConnection" for base in kind.bases):
            continue
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def test_the_page_lists_the_private_names_of_aioquic_that_the_adapter_uses() -> None:
    library = {name for path in Path(aioquic.__path__[0]).rglob("*.py") for name in names(ast.parse(path.read_text(encoding="utf-8")))}
    adapter = [ast.parse(path.read_text(encoding="utf-8")) for path in ADAPTER.glob("*.py")]
    used = {name for tree in adapter for name in names(tree)} & library
    listed = set(re.findall(r"`(_[a-z_]+)`", PAGE.read_text(encoding="utf-8")))
    assert used - {name for tree in adapter for name in own_names(tree)} == listed


def test_the_adapter_imports_no_private_module_of_aioquic() -> None:
    for path in ADAPTER.glob("*.py"):
        assert not re.search(r"^(from|import) aioquic\S*\._", path.read_text(encoding="utf-8"), re.MULTILINE)

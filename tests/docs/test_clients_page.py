"""docs/clients.md: the examples run in order and print the shown output, and the table matches the clients."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Coroutine
from pathlib import Path

import pytest

import headrace
from headrace.clients.connect import SCHEMES, supports
from headrace.clients.unsupported import BaseClient
from tests.protocols.peers import API_KEY, WAIT_SECONDS, serving

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
README_EXAMPLE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
"""The second one is for Spark: tests/spark/test_readme.py."""
COLUMNS = ("flymq", "rustlog", "blipmq", "figg", "fujin")


async def run(example: str, names: dict[str, object]) -> None:
    """Run an example like `python -m asyncio`, or in a thread if it has no `await`."""
    code = compile(example, "docs/clients.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        work = eval(code, names)
        assert isinstance(work, Coroutine)
        await work
    else:
        await asyncio.to_thread(exec, code, names)


async def test_every_example_prints_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES) == PAGE.count("```python")
    with serving(tmp_path) as broker:
        names: dict[str, object] = {"api_key": API_KEY}
        async with asyncio.timeout(WAIT_SECONDS):
            for example, wanted in EXAMPLES:
                await run(re.sub(r"://127\.0\.0\.1(?=\")", f"://{broker.address}", example), names)
                assert capsys.readouterr().out == wanted, example


async def test_the_example_of_the_readme_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path) as broker:
        async with asyncio.timeout(WAIT_SECONDS):
            # It follows the topic indefinitely; one message is enough here.
            once = README_EXAMPLE.replace("print(message.offset, message.value)", "print(message.offset, message.value); break")
            await run(once.replace("://127.0.0.1", f"://{broker.address}"), {})
    assert capsys.readouterr().out == "0 b'hello'\n"


def test_every_example_is_fully_typed(tmp_path: Path) -> None:
    """`mypy --strict`: the page and the README, each example in a function of its own, and the pages of the protocols."""
    blocks = [textwrap.indent(example, "    ") for example in (README_EXAMPLE, *(example for example, _ in EXAMPLES))]
    functions = "\n".join(f"async def example_{number}(api_key: str) -> None:\n{block}" for number, block in enumerate(blocks))
    (tmp_path / "examples.py").write_text(f"import headrace\n\n{functions}")
    for page in (ROOT / "docs" / "protocols").glob("*.md"):
        for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            (tmp_path / f"{page.stem}_{number}.py").write_text(example)
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports=silent",
            "--cache-dir",
            ROOT / ".mypy_cache",
            tmp_path / "examples.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_page_has_the_hierarchy_of_errors() -> None:
    (tree,) = re.findall(r"```text\n(HeadraceError\n.*?)```", PAGE, re.DOTALL)
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        left, _, right = line.strip().partition("  ")
        names, right = left.split(", "), right.strip()
        path[depth:] = [names[0]]
        parents |= dict.fromkeys(names, path[depth - 1] if depth else "")
        if re.fullmatch(r"[A-Z]\w+(, [A-Z]\w+)*", right):
            parents |= dict.fromkeys(right.split(", "), names[0])
    kinds = {name: getattr(headrace, name) for name in dir(headrace)}
    errors = {name for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, headrace.HeadraceError)}
    assert set(parents) == errors
    assert {name: kinds[parent] in kinds[name].__bases__ for name, parent in parents.items() if parent} == dict.fromkeys(
        errors - {"HeadraceError"}, True
    )


def rows() -> dict[str, list[str]]:
    table = PAGE.partition("## What each protocol can do")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize("method", [name for name in vars(BaseClient) if inspect.iscoroutinefunction(getattr(BaseClient, name))])
def test_the_table_says_yes_where_the_client_has_the_method(method: str) -> None:
    assert [cell != "no" for cell in rows()[method]] == [supports(protocol, method) for protocol in COLUMNS]


@pytest.mark.parametrize("protocol", COLUMNS)
def test_the_page_names_every_default_port(protocol: str) -> None:
    assert re.search(rf"\| `{protocol}://HOST:PORT` \|.*\| {SCHEMES[protocol].port} \|", PAGE)

"""`headrace schema` against a broker behind a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.errors import InvalidRecord
from headrace.records import RecordBatch
from tests.cli.test_administration import Shell
from tests.clients.flymq.support import serving
from tests.sessions.flymq.support import DEV

FIRST = '{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}'
SECOND = FIRST.replace("integer", "number")


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    async with serving() as server:
        yield Shell(server)


@pytest.fixture
def first(tmp_path: Path) -> str:
    path = tmp_path / "first.json"
    path.write_text(FIRST)
    return str(path)


@pytest.fixture
def second(tmp_path: Path) -> str:
    path = tmp_path / "second.json"
    path.write_text(SECOND)
    return str(path)


async def test_a_schema_is_registered_listed_described_and_deleted(shell: Shell, first: str, second: str) -> None:
    assert (await shell.json("schema", "register", "order", first))[0]["version"] == 1
    assert (await shell.json("schema", "register", "order", second, "--compatibility", "backward"))[0]["version"] == 2
    (row,) = await shell.json("schema", "list")
    assert (row["name"], row["version"], row["type"], row["compatibility"]) == ("order", 2, "json", "backward")
    (found,) = await shell.json("schema", "describe", "order", "--version", "1")
    assert found["definition"] == FIRST and found["versions"] == [1, 2] and found["topics"] == []
    assert FIRST in (await shell("schema", "describe", "order", "--version", "1")).out
    assert (await shell("schema", "delete", "order")).code == 2
    assert (await shell("schema", "delete", "order", "--yes")).code == 0
    assert await shell.json("schema", "list") == []
    assert (await shell("schema", "describe", "order")).code == 3


async def test_check_says_why_and_changes_nothing(shell: Shell, first: str, second: str) -> None:
    await shell.json("schema", "register", "order", second)
    ended = await shell("schema", "check", "order", first)
    assert ended.code == 7 and "/a: the writer may write number, the reader takes integer" in ended.out
    assert (await shell("schema", "check", "order", first, "--compatibility", "forward")).code == 0
    assert (await shell("schema", "register", "order", first)).code == 7
    assert (await shell.json("schema", "list"))[0]["version"] == 1


async def test_a_file_whose_name_tells_nothing_needs_a_type(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "definition"
    path.write_text('"long"')
    assert (await shell("schema", "register", "n", str(path))).code == 2
    assert (await shell.json("schema", "register", "n", str(path), "--type", "avro"))[0]["type"] == "avro"


async def test_a_topic_requires_and_is_released(shell: Shell, first: str) -> None:
    await shell.json("schema", "register", "order", first)
    await shell.json("topic", "create", "orders")
    assert (await shell("schema", "require", "orders", "order")).code == 0
    broker = shell.server.home.broker
    with pytest.raises(InvalidRecord):
        await broker.publish(DEV, "orders", RecordBatch([b"nonsense"]))
    assert (await shell("schema", "delete", "order", "--yes")).code == 1
    assert (await shell("schema", "release", "orders")).code == 0
    await broker.publish(DEV, "orders", RecordBatch([b"nonsense"]))
    assert (await shell("schema", "require", "orders", "none")).code == 3


async def test_a_value_is_validated(shell: Shell, first: str, tmp_path: Path) -> None:
    await shell.json("schema", "register", "order", first)
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text('{"a": 1}')
    bad.write_text('{"a": "x"}')
    assert (await shell("schema", "validate", "order", str(good))).code == 0
    ended = await shell("schema", "validate", "order", str(bad))
    assert ended.code == 7 and '/a: "x" is not of type "integer"' in ended.out

"""Limits on the number of schemas: the maximum is accepted, one more is not."""

from __future__ import annotations

import json

import pytest

from headrace.broker import SchemaType
from headrace.broker.schemas import registry as schema_registry
from headrace.errors import LimitExceeded
from headrace.schemas import Compatibility
from tests.broker.harness import ANN, Harness


def definition(number: int) -> bytes:
    return json.dumps({"const": number}).encode()


async def register(harness: Harness, name: str, number: int) -> int:
    found = await harness.broker.schemas.register(ANN, name, SchemaType.JSON, definition(number), compatibility=Compatibility.NONE)
    return found.version


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_registry, "SCHEMA_VERSIONS_MAX", 3)
    monkeypatch.setattr(schema_registry, "SCHEMAS_MAX", 5)


async def test_a_schema_has_as_many_versions_as_the_limit_and_not_one_more(harness: Harness, small: None) -> None:
    assert [await register(harness, "n", number) for number in range(3)] == [1, 2, 3]
    with pytest.raises(LimitExceeded, match="schema 'n' has 3 versions already"):
        await register(harness, "n", 3)
    assert await register(harness, "n", 1) == 2, "an existing version needs no room"
    assert [one.version for one in harness.broker.schemas.versions(ANN, "n")] == [1, 2, 3]


async def test_all_schemas_together_have_as_many_versions_as_the_limit_and_not_one_more(harness: Harness, small: None) -> None:
    for number in range(5):
        await register(harness, f"n{number % 2}", number)
    with pytest.raises(LimitExceeded, match="there are 5 versions of schemas already"):
        await register(harness, "another", 0)
    assert [one.id for one in harness.broker.schemas.versions(ANN)] == ["n0-v1", "n0-v2", "n0-v3", "n1-v1", "n1-v2"]


async def test_a_deleted_version_makes_room_and_its_number_stays_taken(harness: Harness, small: None) -> None:
    for number in range(3):
        await register(harness, "n", number)
    await harness.broker.schemas.delete(ANN, "n", 1)
    assert await register(harness, "n", 3) == 4
    with pytest.raises(LimitExceeded):
        await register(harness, "n", 4)


async def test_the_limits_count_what_an_earlier_life_has_registered(harness: Harness, small: None) -> None:
    for number in range(3):
        await register(harness, "n", number)
    await harness.restart()
    with pytest.raises(LimitExceeded):
        await register(harness, "n", 3)

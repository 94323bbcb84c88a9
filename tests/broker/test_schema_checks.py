"""Values and definitions that are too expensive for the event loop are checked in a process that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.broker import Broker, OnInvalid, Principal, SchemaType, settled
from headrace.broker.schema_checks import TOO_EXPENSIVE, SchemaCheckPending
from headrace.errors import InvalidRecord, InvalidSchema, Unavailable
from headrace.records import RecordBatch
from tests.broker.harness import FragileEngine, HandClock

WHO = Principal("ann")
LARGE = b"[" + b"0," * (1 << 20) + b"0]"
LARGE_TEXTS = b"[" + b'"",' * (1 << 20) + b'""]'
SLOW = msgspec.json.encode({"items": {"enum": [*(number + 0.5 for number in range(4000)), 0]}})
"""The library needs about a millisecond per item."""


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    clock = HandClock()
    made = Broker(FragileEngine(clock=clock), clock=clock, later=clock.later)
    await made.open()
    await made.create_topic(WHO, "t")
    await made.schemas.register(WHO, "s", SchemaType.JSON, b'{"items":{"type":"string"}}')
    try:
        yield made
    finally:
        await made.close()


async def test_a_large_value_is_judged_beside_the_loop_and_then_published(broker: Broker) -> None:
    await broker.schemas.require(WHO, "t", "s")
    with pytest.raises(SchemaCheckPending):
        broker.publish(WHO, "t", RecordBatch([LARGE_TEXTS]))
    await broker.prepare(WHO, "t", [LARGE_TEXTS])
    published = await broker.publish(WHO, "t", RecordBatch([LARGE_TEXTS]))
    assert (published.partition, published.base_offset) == (0, 0)


async def test_a_large_value_that_does_not_fit_is_refused_with_its_index(broker: Broker) -> None:
    await broker.schemas.require(WHO, "t", "s")
    values = [b'["a"]', LARGE]
    await broker.prepare(WHO, "t", values)
    with pytest.raises(InvalidRecord) as refused:
        broker.publish(WHO, "t", RecordBatch(values))
    assert refused.value.index == 1 and refused.value.faults == ('/0: 0 is not of type "string"',)


async def test_a_large_value_that_does_not_fit_becomes_a_dead_letter_where_the_topic_says_so(broker: Broker) -> None:
    await broker.schemas.require(WHO, "t", "s", on_invalid=OnInvalid.DEAD_LETTER)
    await broker.prepare(WHO, "t", [LARGE])
    await broker.publish(WHO, "t", RecordBatch([LARGE]))
    assert broker.bounds(WHO, "t", 0).end == 0 and broker.bounds(WHO, "t.dlq", 0).end == 1


async def test_a_check_that_takes_too_much_time_is_killed_and_the_loop_keeps_turning(broker: Broker) -> None:
    await broker.schemas.register(WHO, "slow", SchemaType.JSON, SLOW)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    counting = asyncio.create_task(count())
    try:
        found = await settled(lambda: broker.schemas.faults(WHO, "slow", LARGE))
    finally:
        counting.cancel()
    assert found == [TOO_EXPENSIVE]
    assert turns > 10
    assert await settled(lambda: broker.schemas.faults(WHO, "s", LARGE)) == ['/0: 0 is not of type "string"']


async def test_a_check_that_takes_too_much_memory_is_refused(broker: Broker) -> None:
    found = await settled(lambda: broker.schemas.faults(WHO, "s", b"[" + b"{}," * 8_000_000 + b"0]"))
    assert len(found) == 1 and "memory" in found[0]


async def test_a_definition_that_takes_too_long_to_compile_is_refused(broker: Broker) -> None:
    slow = msgspec.json.encode({"allOf": [{"pattern": "(a{1,50}){1,50}" + str(number)} for number in range(3000)]})
    with pytest.raises(InvalidSchema):
        await broker.schemas.register(WHO, "patterns", SchemaType.JSON, slow)
    with pytest.raises(InvalidSchema):
        await settled(lambda: broker.schemas.conflicts(WHO, "patterns", SchemaType.JSON, slow))


async def test_large_definitions_are_compared_beside_the_loop(broker: Broker) -> None:
    large = msgspec.json.encode({"enum": [f"word {number}" for number in range(1000)]})
    made = await broker.schemas.register(WHO, "large", SchemaType.JSON, large)
    assert made.version == 1
    with pytest.raises(SchemaCheckPending):
        broker.schemas.conflicts(WHO, "large", SchemaType.JSON, large)
    fewer = msgspec.json.encode({"enum": [f"word {number}" for number in range(999)]})
    conflicts = await settled(lambda: broker.schemas.conflicts(WHO, "large", SchemaType.JSON, fewer))
    assert conflicts == ["/: the writer may write 'word 999', the reader's enumeration does not have it"]


async def test_a_caller_that_waits_for_a_check_gets_an_error_when_the_broker_drains(broker: Broker) -> None:
    await broker.schemas.register(WHO, "slow", SchemaType.JSON, SLOW)
    asked = asyncio.create_task(settled(lambda: broker.schemas.faults(WHO, "slow", LARGE)))
    await asyncio.sleep(0)
    await broker.close()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(asked, 300)


async def test_a_small_value_never_waits(broker: Broker) -> None:
    await broker.schemas.require(WHO, "t", "s")
    await broker.publish(WHO, "t", RecordBatch([b'["a"]'] * 1000))
    assert broker.schemas.faults(WHO, "s", b"[1]") == ['/0: 1 is not of type "string"']

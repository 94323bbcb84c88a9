"""The registry, and topics that require a schema: every publish path checks it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.broker import NOWHERE, Action, Compatibility, OnInvalid, Principal, ProducerStamp, Resource, SchemaType
from headrace.errors import (
    BrokerError,
    IncompatibleSchema,
    InvalidRecord,
    InvalidRequest,
    InvalidSchema,
    NotAuthorized,
    Unavailable,
    UnknownSchema,
    UnknownTopic,
)
from headrace.records import RecordBatch
from tests.broker.harness import ANN, Harness, turns

INT = b'{"type":"integer"}'
NUM = b'{"type":"number"}'
STR = b'{"type":"string"}'


async def requiring(harness: Harness, on_invalid: OnInvalid = OnInvalid.REJECT, *, partitions: int = 1, version: int = 0) -> None:
    """A topic `t` whose values are integers."""
    await harness.broker.create_topic(ANN, "t", partitions=partitions)
    await harness.broker.schemas.register(ANN, "number", SchemaType.JSON, INT)
    await harness.broker.schemas.require(ANN, "t", "number", version=version, on_invalid=on_invalid)


async def dead_letters(harness: Harness) -> list[tuple[bytes | None, str, str]]:
    entries = await harness.broker.dead_letters(ANN, "t", records_max=100)
    return [(entry.value, entry.reason, entry.error) for entry in entries]


# The registry


async def test_versions_count_up_and_the_same_definition_is_the_same_version(harness: Harness) -> None:
    schemas = harness.broker.schemas
    assert (await schemas.register(ANN, "n", SchemaType.JSON, INT)).version == 1
    assert (await schemas.register(ANN, "n", SchemaType.JSON, NUM)).version == 2
    assert (await schemas.register(ANN, "n", SchemaType.JSON, INT)).version == 1
    assert [one.id for one in schemas.versions(ANN)] == ["n-v1", "n-v2"]
    assert schemas.find(ANN, "n").definition == NUM and schemas.find(ANN, "n", 1).definition == INT
    assert schemas.find(ANN, "n").created == harness.clock.now


async def test_an_incompatible_version_is_refused_with_the_place(harness: Harness) -> None:
    schemas = harness.broker.schemas
    await schemas.register(ANN, "n", SchemaType.JSON, NUM)
    with pytest.raises(IncompatibleSchema, match="not compatible with n v1: /: the writer may write number, the reader takes integer"):
        await schemas.register(ANN, "n", SchemaType.JSON, INT)
    assert schemas.conflicts(ANN, "n", SchemaType.JSON, INT) and not schemas.conflicts(ANN, "n", SchemaType.JSON, NUM)
    assert schemas.conflicts(ANN, "other", SchemaType.JSON, INT) == []
    await schemas.set_compatibility(ANN, "n", Compatibility.FORWARD)
    assert (await schemas.register(ANN, "n", SchemaType.JSON, INT)).compatibility is Compatibility.FORWARD


async def test_registrations_at_once_get_numbers_of_their_own(harness: Harness) -> None:
    definitions = [json.dumps({"type": "integer", "title": str(number)}).encode() for number in range(10)]
    made = await asyncio.gather(*(harness.broker.schemas.register(ANN, "n", SchemaType.JSON, one) for one in definitions))
    assert sorted(one.version for one in made) == list(range(1, 11))


async def test_a_number_is_never_given_again(harness: Harness) -> None:
    schemas = harness.broker.schemas
    await schemas.register(ANN, "n", SchemaType.JSON, INT)
    assert await schemas.delete(ANN, "n") == 1
    with pytest.raises(UnknownSchema, match="schema not found: n"):
        schemas.find(ANN, "n")
    await harness.restart()
    assert (await harness.broker.schemas.register(ANN, "n", SchemaType.JSON, STR)).version == 2


async def test_what_is_registered_and_required_survives_a_crash(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER)
    await harness.broker.schemas.register(ANN, "set", SchemaType.PROTOBUF, b'syntax="proto3"; message M { int32 a = 1; }')
    before = harness.broker.schemas.versions(ANN), harness.broker.schemas.requirements(ANN)
    await harness.crash()
    assert (harness.broker.schemas.versions(ANN), harness.broker.schemas.requirements(ANN)) == before
    await harness.broker.publish(ANN, "t", RecordBatch([b"1", b"x"]))
    assert await harness.values() == ["1"] and len(await dead_letters(harness)) == 1


@pytest.mark.parametrize("name", ["", "a\n", "x" * 250])
async def test_a_bad_name_is_refused(harness: Harness, name: str) -> None:
    with pytest.raises(InvalidRequest):
        await harness.broker.schemas.register(ANN, name, SchemaType.JSON, INT)


async def test_a_schema_that_a_topic_requires_stays(harness: Harness) -> None:
    await requiring(harness)
    with pytest.raises(InvalidRequest, match="topic 't' requires schema 'number'"):
        await harness.broker.schemas.delete(ANN, "number")
    await harness.broker.schemas.release(ANN, "t")
    assert await harness.broker.schemas.delete(ANN, "number") == 1
    await harness.put("x")


async def test_every_method_asks_the_authorizer() -> None:
    asked: list[tuple[Action, str]] = []

    def authorize(who: Principal, action: Action, resource: Resource) -> bool:
        asked.append((action, resource.kind))
        return resource.kind != "schema"

    harness = Harness(authorize=authorize)
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    schemas = harness.broker.schemas
    calls: list[Any] = [
        lambda: schemas.find(ANN, "n"),
        lambda: schemas.faults(ANN, "n", b""),
        lambda: schemas.conflicts(ANN, "n", SchemaType.JSON, INT),
        lambda: schemas.register(ANN, "n", SchemaType.JSON, INT),
        lambda: schemas.delete(ANN, "n"),
        lambda: schemas.set_compatibility(ANN, "n", Compatibility.FULL),
        lambda: schemas.require(ANN, "t", "n"),
    ]
    for call in calls:
        with pytest.raises(NotAuthorized):
            answer = call()
            if asyncio.iscoroutine(answer):
                await answer
    assert schemas.versions(ANN) == []
    await harness.broker.close()


# Publish paths


async def test_a_batch_with_a_bad_record_is_rejected_whole_and_the_first_is_named(harness: Harness) -> None:
    await requiring(harness)
    with pytest.raises(InvalidRecord) as refused:
        harness.broker.publish(ANN, "t", RecordBatch([b"1", b"2", b'"x"', b"y"]))
    assert refused.value.index == 2
    assert str(refused.value) == 'schema validation failed: record 2: /: "x" is not of type "integer" (number-v1)'
    assert await harness.values() == []
    await harness.put("1", "2")
    assert await harness.values() == ["1", "2"]


async def test_an_idempotent_producer_is_held_to_it_and_loses_no_number(harness: Harness) -> None:
    await requiring(harness)
    with pytest.raises(InvalidRecord):
        await harness.broker.publish(ANN, "t", RecordBatch([b"x"]), producer=ProducerStamp("p", 0))
    landed = await harness.broker.publish(ANN, "t", RecordBatch([b"1"]), producer=ProducerStamp("p", 0))
    again = await harness.broker.publish(ANN, "t", RecordBatch([b"1"]), producer=ProducerStamp("p", 0))
    assert landed.base_offset == again.base_offset == 0


async def test_a_transaction_is_checked_when_a_batch_is_staged(harness: Harness) -> None:
    await requiring(harness)
    transaction = harness.broker.begin(ANN)
    with pytest.raises(InvalidRecord):
        transaction.publish("t", RecordBatch([b"x"]))
    transaction.publish("t", RecordBatch([b"1"]))
    await transaction.commit()
    assert await harness.values() == ["1"]


async def test_a_transaction_is_held_to_what_holds_at_its_commit(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.schemas.register(ANN, "number", SchemaType.JSON, INT)
    transaction = harness.broker.begin(ANN)
    transaction.publish("t", RecordBatch([b"x"]))
    await harness.broker.schemas.require(ANN, "t", "number")
    with pytest.raises(InvalidRecord):
        await transaction.commit()
    assert await harness.values() == []


async def test_a_delayed_message_is_judged_when_it_is_taken(harness: Harness) -> None:
    await requiring(harness)
    with pytest.raises(InvalidRecord):
        await harness.broker.publish_delayed(ANN, "t", b"x", delay_ms=10)
    await harness.broker.publish_delayed(ANN, "t", b"1", delay_ms=10)
    harness.clock.tick(20)
    await turns()
    assert await harness.values() == ["1"]


async def test_a_delayed_message_that_fits_no_more_when_it_is_due_becomes_a_dead_letter(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    await harness.broker.publish_delayed(ANN, "t", b"x", delay_ms=10)
    await harness.broker.publish_delayed(ANN, "t", b"1", delay_ms=10)
    await harness.broker.schemas.register(ANN, "number", SchemaType.JSON, INT)
    await harness.broker.schemas.require(ANN, "t", "number")
    harness.clock.tick(20)
    await turns()
    harness.clock.tick(5_000)  # the dead-letter topic had to be created first
    await turns()
    assert await harness.values() == ["1"]
    assert [value for value, _, _ in await dead_letters(harness)] == [b"x"]


async def test_a_dead_letter_that_still_does_not_fit_is_not_replayed(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER)
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"]))
    (entry,) = await harness.broker.dead_letters(ANN, "t", records_max=10)
    with pytest.raises(InvalidRecord):
        await harness.broker.replay(ANN, "t", [entry.id])
    await harness.broker.schemas.release(ANN, "t")
    await harness.broker.replay(ANN, "t", [entry.id])
    assert await harness.values() == ["x"]


# Dead letters


async def test_what_does_not_fit_goes_to_the_dead_letters_and_the_rest_to_the_topic(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER)
    published = await harness.broker.publish(ANN, "t", RecordBatch([b"x", b"1", b"y", b"2"], [b"a", b"b", b"c", b"d"]))
    assert published.count == 4
    assert [published.placement(index) for index in range(4)] == [NOWHERE, (0, 0), NOWHERE, (0, 1)]
    assert await harness.values() == ["1", "2"]
    (first, second) = await dead_letters(harness)
    assert first[0] == b"x" and first[1] == "rejected" and "(number-v1)" in first[2]
    assert second[0] == b"y"


async def test_a_batch_without_valid_records_is_acknowledged_all_the_same(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER, partitions=3)
    published = await harness.broker.publish(ANN, "t", RecordBatch([b"x", b"y"], [b"k", None]))
    assert published.placements == [NOWHERE, NOWHERE] and published.timestamp == harness.clock.now
    assert len(await dead_letters(harness)) == 2


async def test_records_spread_over_partitions_keep_their_places(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER, partitions=3)
    keys = [b"%d" % number for number in range(30)]
    values = [b"%d" % number if number % 3 else b"bad" for number in range(30)]
    published = await harness.broker.publish(ANN, "t", RecordBatch(values, keys))
    for index, value in enumerate(values):
        partition, offset = published.placement(index)
        if value == b"bad":
            assert (partition, offset) == NOWHERE
        else:
            assert (await harness.records("t", partition))[offset].value == value


async def test_a_stamped_batch_with_dead_letters_is_answered_alike_when_it_is_sent_again(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER)
    batch = RecordBatch([b"1", b"x", b"2"])
    first = await harness.broker.publish(ANN, "t", batch, producer=ProducerStamp("p", 0))
    again = await harness.broker.publish(ANN, "t", batch, producer=ProducerStamp("p", 0))
    assert [first.placement(index) for index in range(3)] == [again.placement(index) for index in range(3)] == [(0, 0), NOWHERE, (0, 1)]
    assert len(await dead_letters(harness)) == 1 and await harness.values() == ["1", "2"]


async def test_a_transaction_brings_its_dead_letters_along(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER)
    transaction = harness.broker.begin(ANN)
    assert transaction.publish("t", RecordBatch([b"x", b"1"])).partitions(2) == [-1, 0]
    assert await dead_letters(harness) == []
    (published,) = await transaction.commit()
    assert [published.placement(index) for index in range(2)] == [NOWHERE, (0, 0)]
    assert len(await dead_letters(harness)) == 1


async def test_dead_letters_that_were_purged_come_again(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER)
    await harness.broker.publish(ANN, "t", RecordBatch([b"x"]))
    await harness.broker.purge_dead_letters(ANN, "t")
    with pytest.raises(Unavailable, match="try again"):
        await harness.broker.publish(ANN, "t", RecordBatch([b"y"]))
    await turns()
    await harness.broker.publish(ANN, "t", RecordBatch([b"z"]))
    assert [value for value, _, _ in await dead_letters(harness)] == [b"z"]


async def test_a_delayed_record_waits_but_a_moment_for_dead_letters_that_were_purged(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER)
    await harness.broker.publish_delayed(ANN, "t", b"x", delay_ms=100)
    await harness.broker.publish(ANN, "t", RecordBatch([b"y"]))
    await harness.broker.purge_dead_letters(ANN, "t")
    harness.clock.tick(100)
    await turns()
    assert [value for value, _, _ in await dead_letters(harness)] == []
    harness.clock.tick(20)
    await turns()
    assert [value for value, _, _ in await dead_letters(harness)] == [b"x"]


async def test_a_dead_letter_topic_cannot_require_anything(harness: Harness) -> None:
    await requiring(harness, OnInvalid.DEAD_LETTER)
    with pytest.raises(InvalidRequest, match="holds dead letters"):
        await harness.broker.schemas.require(ANN, "t.dlq", "number")


# Changes


async def test_the_latest_version_is_what_counts_unless_one_is_named(harness: Harness) -> None:
    await requiring(harness)
    with pytest.raises(InvalidRecord):
        await harness.put("1.5")
    await harness.broker.schemas.register(ANN, "number", SchemaType.JSON, NUM)
    await harness.put("1.5")
    await harness.broker.schemas.require(ANN, "t", "number", version=1)
    with pytest.raises(InvalidRecord, match="number-v1"):
        await harness.put("1.5")


async def test_a_deleted_topic_takes_its_requirement_along(harness: Harness) -> None:
    await requiring(harness)
    await harness.broker.delete_topic(ANN, "t")
    await harness.broker.create_topic(ANN, "t")
    await harness.put("x")
    assert harness.broker.schemas.requirement(ANN, "t") is None


async def test_only_what_exists_can_be_required(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "t")
    with pytest.raises(UnknownSchema):
        await harness.broker.schemas.require(ANN, "t", "none")
    with pytest.raises(UnknownTopic):
        await harness.broker.schemas.require(ANN, "none", "none")


async def test_without_the_library_nothing_unchecked_is_written(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await requiring(harness)

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="jsonschema_rs")

    monkeypatch.setattr("headrace.schemas.import_module", missing)
    await harness.crash()
    with pytest.raises(Unavailable, match="cannot be checked: schema type json needs jsonschema-rs"):
        await harness.put("1")
    with pytest.raises(InvalidSchema, match=r"pip install 'headrace\[schemas\]'"):
        await harness.broker.schemas.register(ANN, "n", SchemaType.JSON, INT)


async def test_a_schema_that_could_not_be_written_is_not_there(harness: Harness) -> None:
    harness.engine.error, harness.engine.topic = BrokerError("disk on fire"), "__schemas"
    with pytest.raises(BrokerError, match="disk on fire"):
        await harness.broker.schemas.register(ANN, "n", SchemaType.JSON, INT)
    harness.engine.error = None
    assert harness.broker.schemas.versions(ANN) == []
    assert (await harness.broker.schemas.register(ANN, "n", SchemaType.JSON, INT)).version == 1

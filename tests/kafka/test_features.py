"""Groups, transactions, delayed messages, dead letters, schemas, access and Flight on Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import cast

import pyarrow as pa
import pytest

from headrace.clients.flymq.client import FlyMqClient
from headrace.flight.client import FlightClient, Servers
from tests.protocols.peers import WAIT_SECONDS, Broker
from tests.protocols.test_groups import (
    test_members_of_three_protocols_share_a_topic,
    test_what_a_member_has_not_settled_goes_to_the_others_and_nothing_else,
    world,
)
from tests.protocols.test_schemas import (
    test_what_does_not_fit_becomes_a_dead_letter,
    test_what_does_not_fit_is_refused_and_what_fits_is_taken,
)

__all__ = [
    "test_members_of_three_protocols_share_a_topic",
    "test_what_a_member_has_not_settled_goes_to_the_others_and_nothing_else",
    "test_what_does_not_fit_becomes_a_dead_letter",
    "test_what_does_not_fit_is_refused_and_what_fits_is_taken",
    "world",
]
NAMES = count()


@asynccontextmanager
async def connected(broker: Broker) -> AsyncIterator[FlyMqClient]:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as client:
        yield cast(FlyMqClient, client)


@pytest.fixture
async def topic(broker: Broker) -> str:
    name = f"kafka-features-{next(NAMES)}"
    async with connected(broker) as client:
        await client.create_topic(name, partitions=2)
    return name


async def values(client: FlyMqClient, topic: str, partition: int = 0) -> list[bytes]:
    return [message.value for message in await client.fetch(topic, 0, partition=partition)]


async def test_a_transaction_over_two_partitions_is_seen_as_a_whole_and_a_rolled_back_one_not_at_all(broker: Broker, topic: str) -> None:
    async with connected(broker) as client:
        async with client.transaction() as transaction:
            await transaction.publish(topic, b"one", partition=0)
            await transaction.publish(topic, b"two", partition=1)
        with pytest.raises(ZeroDivisionError):
            async with client.transaction() as transaction:
                await transaction.publish(topic, b"never", partition=0)
                raise ZeroDivisionError
        await client.publish(topic, b"after", partition=0)
        assert (await values(client, topic, 0), await values(client, topic, 1)) == ([b"one", b"after"], [b"two"])


async def test_a_group_that_reads_past_the_end_of_a_transaction_has_no_lag(broker: Broker, topic: str) -> None:
    """A transaction of Kafka ends with a marker that takes an offset."""
    async with connected(broker) as client:
        async with client.transaction() as transaction:
            await transaction.publish(topic, b"one", partition=0)
            await transaction.publish(topic, b"two", partition=1)
        subscription = await client.subscribe(topic, "earliest", group=f"group-{topic}")
        assert {(await anext(subscription)).value, (await anext(subscription)).value} == {b"one", b"two"}
        await client.publish(topic, b"three", partition=0)
        assert (await anext(subscription)).value == b"three"
        await subscription.commit()
        await subscription.close()


async def test_a_delayed_message_arrives_once_and_a_cancelled_one_never(broker: Broker, topic: str) -> None:
    async with connected(broker) as client:
        cancelled = await client.publish_delayed(topic, b"cancelled", delay_ms=600_000, partition=0)
        await client.publish_delayed(topic, b"due", delay_ms=1, partition=0)
        await client.cancel_delayed(cancelled.id, topic=topic)
        subscription = await client.subscribe(topic, "earliest")
        assert (await anext(subscription)).value == b"due"
        await client.publish(topic, b"last", partition=0)
        assert (await anext(subscription)).value == b"last"


async def test_a_dead_letter_is_replayed(broker: Broker) -> None:
    topic = f"kafka-letters-{next(NAMES)}"
    async with connected(broker) as client:
        await client.create_topic(topic)
        await client.register_schema(topic, "json", b'{"type":"integer"}')
        await client.require_schema(topic, topic, on_invalid="dead_letter")
        await client.publish(topic, b"no number")
        [letter] = await client.dead_letters(topic)
        assert letter.value == b"no number"
        await client.release_schema(topic)
        await client.replay_dead_letter(topic, letter.id)
        assert await values(client, topic) == [b"no number"]


async def test_users_and_rules_are_kept(broker: Broker) -> None:
    name = f"kafka-user-{next(NAMES)}"
    async with connected(broker) as client:
        await client.create_user(name, "", ["consumer"])
        rule = {"subject": f"user:{name}", "effect": "allow", "actions": ["read"], "kind": "topic", "match": "literal", "name": name}
        await client.manage("rule.add", **rule)
        assert (await client.describe_user(name)).roles == ["consumer"]
        assert rule in await client.manage("rule.list")


async def test_flight_writes_reads_and_keeps_headers_and_times(broker: Broker, topic: str) -> None:
    protocols = broker.process.ready["protocols"]
    assert isinstance(protocols, dict)

    def through_flight() -> list[dict[str, object]]:
        with FlightClient(Servers.parse(protocols["flight"][0])) as client:
            rows = pa.RecordBatch.from_pylist(
                [{"key": b"k", "value": b"%d" % number, "headers": [{"key": "a", "value": b"1"}]} for number in range(1000)],
                schema=pa.schema(
                    [
                        ("key", pa.binary()),
                        ("value", pa.binary()),
                        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
                    ]
                ),
            )
            assert client.append(topic, [rows], partition=0).records == 1000
            held = client.describe([topic])[topic].partitions[0]
            read = client.read(topic, 0, held.first, held.end, columns=("key", "value", "headers"))
            return [row for batch in read for row in batch.to_pylist()]

    found = await asyncio.to_thread(through_flight)
    assert [row["value"] for row in found] == [b"%d" % number for number in range(1000)]
    assert found[0] == {"key": b"k", "value": b"0", "headers": [{"key": "a", "value": b"1"}]}

"""Two brokers on one log, of which one owns the tables: what the other one serves, refuses and follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from operator import methodcaller
from typing import Any, NamedTuple, cast

import pytest

from headrace.broker import Broker, ProducerStamp, SettlementPolicy
from headrace.engine.contract import Engine, Ownership
from headrace.errors import BrokerError, InvalidRecord, NotCoordinator
from headrace.records import RecordBatch
from headrace.schemas import SchemaType
from tests.broker.harness import ANN, Harness
from tests.broker.test_access import AS_UNKNOWN, LISTS, METHODS
from tests.net.polling import until

REFUSED = {
    *("alter_topic", "delete_topic", "commit", "stage_commit", "committed", "delete_group", "reset_group", "members", "join"),
    *("begin", "begin_all"),
    *("dead_letters", "move_to_dead_letters", "move_many_to_dead_letters", "replay", "purge_dead_letters", "discard_dead_letters"),
    *("publish_delayed", "stage_delayed", "stage", "publish_staged", "last_version", "forget_writer"),
    *("delayed", "cancel_delayed", "seal", "drop_staged", "writers", "stages"),
}
CALLS: dict[str, Any] = {name: call for name, (call, _, _) in METHODS.items()} | {
    "cancel_delayed": lambda broker: broker.cancel_delayed(ANN, "id"),
    "seal": lambda broker: broker.seal(ANN, "h"),
    "drop_staged": lambda broker: broker.drop_staged(ANN, ["h"]),
    **{name: methodcaller(name, ANN) for name in LISTS - {"listed"}},
    "listed": lambda broker: broker.listed(ANN, len),
}


class Shared:
    """The engine of another process on the same log."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ownership = Ownership(is_owner=False, coordinator="a:9092")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Pair(NamedTuple):
    harness: Harness
    coordinator: Broker
    other: Broker
    ownership: Ownership
    """Of the other one."""


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    harness = Harness()
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    shared = Shared(harness.engine)
    other = Broker(cast(Engine, shared), clock=harness.clock, later=harness.clock.later, random_bytes=harness.dice.randbytes)
    await other.open()
    yield Pair(harness, harness.broker, other, shared.ownership)
    shared.ownership.is_owner = True  # a broker that closes may write
    await other.close()


async def made(call: Any, broker: Broker) -> None:
    answer = call(broker)
    if isinstance(answer, Awaitable):
        await answer


def test_every_method_of_the_broker_is_called() -> None:
    assert set(CALLS) == set(METHODS) | AS_UNKNOWN | LISTS
    assert set(CALLS) >= REFUSED


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_an_operation_that_needs_the_owner_of_the_tables_is_refused_elsewhere(pair: Pair, name: str) -> None:
    appends = pair.harness.engine.appends
    if name in REFUSED:
        with pytest.raises(NotCoordinator, match="needs the coordinator, which is at a:9092") as caught:
            await made(CALLS[name], pair.other)
        assert caught.value.retriable
        assert pair.harness.engine.appends == appends
    else:
        await made(CALLS[name], pair.other)
    try:
        await made(CALLS[name], pair.coordinator)
    except NotCoordinator:
        pytest.fail("the coordinator refused it")
    except BrokerError:
        pass  # the message, stage or dead letter does not exist


async def test_a_producer_stamp_needs_the_coordinator(pair: Pair) -> None:
    with pytest.raises(NotCoordinator):
        pair.other.publish(ANN, "t", RecordBatch([b"x"]), producer=ProducerStamp("p", 0))


async def test_schemas_are_those_of_the_coordinator_within_a_moment(pair: Pair) -> None:
    with pytest.raises(NotCoordinator):
        await pair.other.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "integer"}')
    await pair.other.publish(ANN, "t", RecordBatch([b"no number"]))
    await pair.coordinator.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "integer"}')
    await pair.coordinator.schemas.require(ANN, "t", "s")
    await until(lambda: pair.other.schemas.requirement(ANN, "t") is not None)
    with pytest.raises(InvalidRecord):
        await asyncio.shield(pair.other.publish(ANN, "t", RecordBatch([b"no number"])))
    await pair.coordinator.schemas.release(ANN, "t")
    await until(lambda: pair.other.schemas.requirement(ANN, "t") is None)
    await pair.other.publish(ANN, "t", RecordBatch([b"no number"]))


async def test_the_next_coordinator_has_what_the_last_one_wrote(pair: Pair) -> None:
    await pair.coordinator.commit(ANN, "g", {("t", 0): 0})
    await pair.coordinator.publish_delayed(ANN, "t", b"later", delay_ms=1_000)
    await pair.coordinator.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "integer"}')
    pair.ownership.is_owner = True
    await pair.other.take_over()
    assert pair.other.committed(ANN, "g", "t", 0) == 0
    assert [entry.topic for entry in pair.other.delayed(ANN)] == ["t"]
    assert (await pair.other.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "integer"}')).version == 1
    member = pair.other.join(ANN, "g", "t", policy=SettlementPolicy())
    await pair.other.publish(ANN, "t", RecordBatch([b"x"]))
    assert [delivery.value for delivery in await member.take(1, 100)] == [b"x"]

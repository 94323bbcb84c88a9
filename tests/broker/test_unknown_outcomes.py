"""Appends whose outcome is unknown: the broker changes its state when the log has answered, and not before.

Each test runs on a simulated remote log with several seeds; clients repeat what fails with a retriable error, as real ones do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import pytest

from headrace.broker import Broker
from headrace.broker.publishing.publish import ProducerStamp
from headrace.broker.tables import Table
from headrace.engine.memory import MemoryEngine
from headrace.errors import AppendUnknown, BrokerError, InvalidTransaction
from headrace.records import RecordBatch
from tests.broker.harness import ANN, HandClock, turns
from tests.engine.remote import Faults, RemoteEngine

T = TypeVar("T")
SEEDS = range(8)


@dataclass
class Remote:
    """A broker on a simulated remote log."""

    broker: Broker
    engine: RemoteEngine
    clock: HandClock

    async def values(self, topic: str = "t") -> list[str]:
        await self.engine.settle()
        bounds = self.engine.bounds(topic, 0)
        batches = await self.engine.inner.read(topic, 0, bounds.first, bytes_max=1 << 30)
        return [(record.value or b"").decode() for batch in batches for record in batch.records()]

    async def repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request until it succeeds, as a client does after retriable errors."""
        while True:
            try:
                return await call()
            except BrokerError as error:
                if not error.retriable:
                    raise
                await turns(5)


@pytest.fixture(params=SEEDS)
async def remote(request: pytest.FixtureRequest) -> AsyncIterator[Remote]:
    clock = HandClock()
    engine = RemoteEngine(MemoryEngine(clock=clock), request.param)
    broker = Broker(engine, clock=clock, later=clock.later, random_bytes=Random(request.param).randbytes)
    await broker.open()
    await broker.create_topic(ANN, "t")
    engine.faults.unknown = 0.4
    yield Remote(broker, engine, clock)
    engine.faults = Faults()
    await broker.close()


async def test_a_producer_that_repeats_an_unknown_batch_writes_it_once(remote: Remote) -> None:
    for sequence in range(30):
        batch = RecordBatch([b"%d" % sequence])
        await remote.repeated(lambda: remote.broker.publish(ANN, "t", batch, producer=ProducerStamp("p", sequence)))  # noqa: B023
    assert remote.engine.outcomes_unknown > 0
    assert await remote.values() == [str(sequence) for sequence in range(30)]


async def test_a_producer_continues_after_a_restart_of_the_broker(remote: Remote) -> None:
    stamp = ProducerStamp("p", 0)
    await remote.repeated(lambda: remote.broker.publish(ANN, "t", RecordBatch([b"a"]), producer=stamp))
    await remote.engine.settle()
    remote.clock.forget_timers()
    again = Broker(remote.engine, clock=remote.clock, later=remote.clock.later)
    await remote.repeated(again.open)
    await remote.repeated(lambda: again.publish(ANN, "t", RecordBatch([b"a"]), producer=stamp))
    assert await remote.values() == ["a"]


async def test_a_table_shows_what_the_log_holds_and_nothing_else(remote: Remote) -> None:
    table: Table[tuple[int], int] = Table(remote.engine, "__numbers", tuple[int], int)  # type: ignore[arg-type]  # see `Groups`
    await remote.repeated(table.load)
    for number in range(30):
        with_errors = await asyncio.gather(table.put([((number % 7,), number)]), return_exceptions=True)
        assert all(failure is None or isinstance(failure, BrokerError) for failure in with_errors)
    await table.settled()
    await remote.engine.settle()
    other: Table[tuple[int], int] = Table(remote.engine.inner, "__numbers", tuple[int], int)  # type: ignore[arg-type]  # see `Groups`
    await other.load()
    assert dict(table.rows) == dict(other.rows)


async def test_delayed_messages_fire_once_each(remote: Remote) -> None:
    remote.engine.faults.unknown = 0.0
    ids = [(await remote.broker.publish_delayed(ANN, "t", b"%d" % number, delay_ms=1_000))[0] for number in range(10)]
    remote.engine.faults.unknown = 0.4
    cancelled = set()
    for number in (3, 5):
        try:
            await remote.broker.cancel_delayed(ANN, ids[number])
            cancelled.add(str(number))
        except AppendUnknown:
            pass  # either it is cancelled or it fires
    for _ in range(100):
        remote.clock.tick(1_000)
        await turns(20)
    assert remote.broker.delayed(ANN) == []
    fired = Counter(await remote.values())
    assert max(fired.values()) == 1
    assert {str(number) for number in range(10)} - {"3", "5"} <= set(fired)
    assert cancelled.isdisjoint(fired)


async def test_a_transaction_with_an_unknown_outcome_cannot_be_committed_again(remote: Remote) -> None:
    outcomes = Counter[str]()
    for number in range(20):
        transaction = remote.broker.begin(ANN)
        transaction.publish("t", RecordBatch([b"%d" % number]))
        transaction.commit_offsets("g", {("t", 0): number})
        try:
            await transaction.commit()
            outcomes["committed"] += 1
        except AppendUnknown:
            outcomes["unknown"] += 1
            with pytest.raises(InvalidTransaction):
                await transaction.commit()
    await remote.engine.settle()
    written = await remote.values()
    assert len(written) == len(set(written)), "no transaction is written twice"
    assert outcomes["committed"] <= len(written) <= 20
    assert remote.broker.committed(ANN, "g", "t", 0) == int(written[-1]), "records and offsets are written together"


async def test_a_publication_of_an_exactly_once_writer_is_written_once(remote: Remote) -> None:
    for version in range(1, 8):
        handle, batch = f"h{version}", RecordBatch([b"%d" % version])
        await remote.broker.stage(ANN, handle, "t", batch, writer="w", epoch="", order=0, partition=0)
        await remote.broker.seal(ANN, handle)
        await remote.repeated(lambda: remote.broker.publish_staged(ANN, "w", version, [handle], epoch=""))  # noqa: B023
    assert await remote.values() == [str(version) for version in range(1, 8)]


async def test_reads_and_publishes_fail_while_the_connection_is_lost_and_resume_by_themselves(remote: Remote) -> None:
    remote.engine.faults = Faults(is_away=True)
    for call in (
        lambda: remote.broker.publish(ANN, "t", RecordBatch([b"x"])),
        lambda: remote.broker.fetch(ANN, "t", 0, 0, bytes_max=100),
    ):
        with pytest.raises(BrokerError) as caught:
            await call()
        assert caught.value.retriable
    remote.engine.faults = Faults()
    await remote.broker.publish(ANN, "t", RecordBatch([b"y"]))
    assert await remote.values() == ["y"]

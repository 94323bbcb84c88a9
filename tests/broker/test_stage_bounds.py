"""Limits of exactly-once writers in size and time."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker import BrokerSettings
from headrace.errors import (
    InvalidRequest,
    LimitExceeded,
    UnknownStage,
)
from headrace.limits import STAGE_STRAGGLER_MS
from tests.broker.harness import ANN, Harness, turns
from tests.broker.staging import publish, put


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t", partitions=2)
    await harness.broker.create_topic(ANN, "u")
    return harness


async def bounded(settings: BrokerSettings) -> Harness:
    harness = Harness(settings)
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t", partitions=2)
    await harness.broker.create_topic(ANN, "u")
    return harness


async def test_there_is_a_bound_on_stages() -> None:
    harness = await bounded(BrokerSettings(stages_max=2))
    await put(harness, "h1", "a")
    await put(harness, "h2", "b")
    with pytest.raises(LimitExceeded):
        await put(harness, "h3", "c")
    await publish(harness, 0, "h1")
    await put(harness, "h3", "c")
    await harness.broker.close()


async def test_there_is_a_bound_on_writers_and_the_silent_ones_are_forgotten() -> None:
    harness = await bounded(BrokerSettings(writers_max=2, writer_idle_ms=10_000))
    await publish(harness, 0, writer="a")
    await publish(harness, 0, writer="b")
    with pytest.raises(LimitExceeded):
        await publish(harness, 0, writer="c")
    with pytest.raises(LimitExceeded):
        await put(harness, "h", "x", writer="c")
    harness.clock.tick(6_000)
    await publish(harness, 1, writer="a")
    harness.clock.tick(6_000)
    await harness.broker.maintain()
    assert [entry.writer for entry in harness.broker.writers(ANN)] == ["a"]
    await publish(harness, 0, writer="c")
    await harness.crash()
    assert [entry.writer for entry in harness.broker.writers(ANN)] == ["a", "c"]
    await harness.broker.close()


async def test_a_writer_that_comes_only_once_is_remembered_for_as_long_as_it_says(harness: Harness) -> None:
    await publish(harness, 0, writer="comes again")
    await harness.broker.publish_staged(ANN, "once", 0, [], remember_ms=1_000)
    await harness.crash()
    harness.clock.tick(1_000)
    await harness.broker.maintain()
    assert harness.broker.last_version(ANN, "once") == 0
    harness.clock.tick(1)
    await harness.broker.maintain()
    assert [entry.writer for entry in harness.broker.writers(ANN)] == ["comes again"]
    with pytest.raises(InvalidRequest):
        await harness.broker.publish_staged(ANN, "once", 0, [], remember_ms=-1)


async def test_a_writer_that_only_staged_is_not_remembered() -> None:
    harness = await bounded(BrokerSettings(writers_max=1))
    await put(harness, "h1", "a", writer="a")
    with pytest.raises(LimitExceeded):
        await put(harness, "h2", "a", writer="b")
    await harness.broker.drop_staged(ANN, ["h1"])
    await put(harness, "h2", "a", writer="b")
    await harness.broker.close()


async def test_stages_of_failed_attempts_are_dropped_while_their_writer_continues(harness: Harness) -> None:
    await put(harness, "killed", "never wanted")
    await put(harness, "h0", "a")
    await publish(harness, 0, "h0")
    harness.clock.now += STAGE_STRAGGLER_MS
    await put(harness, "early", "c")
    assert {entry.handle for entry in harness.broker.stages(ANN)} == {"killed", "early"}, "it may be for the next version"
    await put(harness, "h1", "b")
    await publish(harness, 1, "h1")
    assert {entry.handle for entry in harness.broker.stages(ANN)} == {"early"}
    with pytest.raises(UnknownStage):
        await publish(harness, 2, "killed")
    await publish(harness, 2, "early")
    assert await harness.values("t") == ["a", "b", "c"]


async def test_stages_of_a_silent_writer_expire() -> None:
    harness = await bounded(BrokerSettings(stage_idle_ms=10_000))
    await put(harness, "h1", "a")
    await put(harness, "other", "a", writer="p")
    harness.clock.tick(9_000)
    await put(harness, "h2", "b")
    harness.clock.tick(9_000)
    assert [entry.handle for entry in harness.broker.stages(ANN)] == ["h1", "h2"], "an active task keeps the stages of all"
    harness.clock.tick(1_000)
    assert harness.broker.stages(ANN) == []
    with pytest.raises(UnknownStage):
        await publish(harness, 0, "h1")
    with pytest.raises(UnknownStage):
        await put(harness, "h2", "b")
    await harness.broker.close()


async def test_what_is_being_published_does_not_expire() -> None:
    harness = await bounded(BrokerSettings(stage_idle_ms=10_000))
    await put(harness, "h1", "a")
    harness.engine.hold()
    publishing = asyncio.ensure_future(publish(harness, 0, "h1"))
    await turns()
    assert await harness.broker.drop_staged(ANN, ["h1"]) == 0, "nor can it be dropped"
    harness.clock.tick(20_000)
    harness.engine.let_go()
    assert (await publishing).records == 1
    await harness.broker.close()


# Listing

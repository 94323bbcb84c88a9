"""How much exactly-once writers may hold, and for how long."""

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
from tests.broker.staging import publish, put
from tests.broker.stand import ANN, Stand, turns


@pytest.fixture
async def stand(stand: Stand) -> Stand:
    await stand.broker.create_topic(ANN, "t", partitions=2)
    await stand.broker.create_topic(ANN, "u")
    return stand


async def bounded(settings: BrokerSettings) -> Stand:
    stand = Stand(settings)
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t", partitions=2)
    await stand.broker.create_topic(ANN, "u")
    return stand


async def test_there_is_a_bound_on_stages() -> None:
    stand = await bounded(BrokerSettings(stages_max=2))
    await put(stand, "h1", "a")
    await put(stand, "h2", "b")
    with pytest.raises(LimitExceeded):
        await put(stand, "h3", "c")
    await publish(stand, 0, "h1")
    await put(stand, "h3", "c")
    await stand.broker.close()


async def test_there_is_a_bound_on_writers_and_the_silent_ones_are_forgotten() -> None:
    stand = await bounded(BrokerSettings(writers_max=2, writer_idle_ms=10_000))
    await publish(stand, 0, writer="a")
    await publish(stand, 0, writer="b")
    with pytest.raises(LimitExceeded):
        await publish(stand, 0, writer="c")
    with pytest.raises(LimitExceeded):
        await put(stand, "h", "x", writer="c")
    stand.clock.tick(6_000)
    await publish(stand, 1, writer="a")
    stand.clock.tick(6_000)
    await stand.broker.maintain()
    assert [entry.writer for entry in stand.broker.writers(ANN)] == ["a"]
    await publish(stand, 0, writer="c")
    await stand.crash()
    assert [entry.writer for entry in stand.broker.writers(ANN)] == ["a", "c"]
    await stand.broker.close()


async def test_a_writer_that_comes_only_once_is_remembered_for_as_long_as_it_says(stand: Stand) -> None:
    await publish(stand, 0, writer="comes again")
    await stand.broker.publish_staged(ANN, "once", 0, [], remember_ms=1_000)
    await stand.crash()
    stand.clock.tick(1_000)
    await stand.broker.maintain()
    assert stand.broker.last_version(ANN, "once") == 0
    stand.clock.tick(1)
    await stand.broker.maintain()
    assert [entry.writer for entry in stand.broker.writers(ANN)] == ["comes again"]
    with pytest.raises(InvalidRequest):
        await stand.broker.publish_staged(ANN, "once", 0, [], remember_ms=-1)


async def test_a_writer_that_only_staged_is_not_remembered() -> None:
    stand = await bounded(BrokerSettings(writers_max=1))
    await put(stand, "h1", "a", writer="a")
    with pytest.raises(LimitExceeded):
        await put(stand, "h2", "a", writer="b")
    await stand.broker.drop_staged(ANN, ["h1"])
    await put(stand, "h2", "a", writer="b")
    await stand.broker.close()


async def test_what_attempts_that_lost_have_left_goes_while_their_writer_goes_on(stand: Stand) -> None:
    await put(stand, "killed", "never wanted")
    await put(stand, "h0", "a")
    await publish(stand, 0, "h0")
    stand.clock.now += STAGE_STRAGGLER_MS
    await put(stand, "early", "c")
    assert {entry.handle for entry in stand.broker.stages(ANN)} == {"killed", "early"}, "it may be for the next version"
    await put(stand, "h1", "b")
    await publish(stand, 1, "h1")
    assert {entry.handle for entry in stand.broker.stages(ANN)} == {"early"}
    with pytest.raises(UnknownStage):
        await publish(stand, 2, "killed")
    await publish(stand, 2, "early")
    assert await stand.values("t") == ["a", "b", "c"]


async def test_stages_of_a_silent_writer_expire() -> None:
    stand = await bounded(BrokerSettings(stage_idle_ms=10_000))
    await put(stand, "h1", "a")
    await put(stand, "other", "a", writer="p")
    stand.clock.tick(9_000)
    await put(stand, "h2", "b")
    stand.clock.tick(9_000)
    assert [entry.handle for entry in stand.broker.stages(ANN)] == ["h1", "h2"], "one task at work keeps those of all"
    stand.clock.tick(1_000)
    assert stand.broker.stages(ANN) == []
    with pytest.raises(UnknownStage):
        await publish(stand, 0, "h1")
    with pytest.raises(UnknownStage):
        await put(stand, "h2", "b")
    await stand.broker.close()


async def test_what_is_being_published_does_not_expire() -> None:
    stand = await bounded(BrokerSettings(stage_idle_ms=10_000))
    await put(stand, "h1", "a")
    stand.engine.hold()
    publishing = asyncio.ensure_future(publish(stand, 0, "h1"))
    await turns()
    assert await stand.broker.drop_staged(ANN, ["h1"]) == 0, "nor can it be dropped"
    stand.clock.tick(20_000)
    stand.engine.let_go()
    assert (await publishing).records == 1
    await stand.broker.close()


# Looking

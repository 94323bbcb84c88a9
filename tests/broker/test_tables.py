from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.tables import Table
from headrace.engine.contract import Appended, TopicConfig, Write
from headrace.errors import DiskFull
from headrace.records import RecordBatch
from tests.broker.harness import FragileEngine, HandClock

Colours = Table[tuple[str, int], list[int]]


def _table(engine: FragileEngine) -> Colours:
    return Table(engine, "__colours", tuple[str, int], list[int])


@pytest.fixture
async def engine() -> AsyncIterator[FragileEngine]:
    engine = FragileEngine(clock=HandClock())
    await engine.open()
    yield engine
    await engine.close()


async def test_what_was_put_is_shown_and_loaded_again(engine: FragileEngine) -> None:
    table = _table(engine)
    await table.load()
    await table.put([(("red", 1), [1, 2]), (("blue", 2), [])])
    await table.put([(("red", 1), None), (("green", 3), [3])])
    assert dict(table.rows) == {("blue", 2): [], ("green", 3): [3]}
    again = _table(engine)
    await again.load()
    assert dict(again.rows) == dict(table.rows)


async def test_a_change_is_shown_when_it_is_durable_and_not_before(engine: FragileEngine) -> None:
    table = _table(engine)
    await table.load()
    putting = asyncio.ensure_future(table.put([(("red", 1), [1])]))
    await asyncio.sleep(0)
    assert dict(table.rows) == {}
    await putting
    assert dict(table.rows) == {("red", 1): [1]}


async def test_a_change_the_log_refuses_is_never_shown(engine: FragileEngine) -> None:
    table = _table(engine)
    await table.load()
    engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await table.put([(("red", 1), [1])])
    assert dict(table.rows) == {}


async def test_a_change_joins_the_append_it_belongs_to(engine: FragileEngine) -> None:
    table = _table(engine)
    await table.load()
    await engine.create_topic("t", 1, TopicConfig())

    def change(appended: Sequence[Appended]) -> list[tuple[tuple[str, int], list[int] | None]]:
        return [(("last", 0), [appended[0].base_offset])]

    for _ in range(3):
        staged = engine.append([Write("t", 0, RecordBatch([b"v"])), table.write(change)])
        table.follow(staged, change([(await staged)[0]]))
    again = _table(engine)
    await again.load()
    assert dict(again.rows) == {("last", 0): [2]}


async def test_settled_waits_for_what_is_staged(engine: FragileEngine) -> None:
    table = _table(engine)
    await table.load()
    putting = [asyncio.ensure_future(table.put([((f"c{number}", 0), [number])])) for number in range(5)]
    await asyncio.sleep(0)
    await table.settled()
    assert len(table.rows) == 5
    await asyncio.gather(*putting)


async def test_the_topic_of_a_table_is_internal_and_compacted(engine: FragileEngine) -> None:
    await _table(engine).load()
    topic = engine.topics()["__colours"]
    assert topic.internal
    assert topic.config.cleanup.value == "compact"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), st.none() | st.lists(st.integers(0, 9), max_size=3)), max_size=30))
def test_a_table_loaded_from_a_compacted_log_is_the_dictionary_that_was_written(
    changes: list[tuple[str, int, list[int] | None]],
) -> None:
    async def run() -> None:
        clock = HandClock()
        engine = FragileEngine(clock=clock)
        await engine.open()
        table, model = _table(engine), dict[tuple[str, int], list[int]]()
        await table.load()
        for name, number, value in changes:
            await table.put([((name, number), value)])
            if value is None:
                model.pop((name, number), None)
            else:
                model[name, number] = value
        assert dict(table.rows) == model
        clock.now += 10**9
        await engine.maintain()
        again = _table(engine)
        await again.load()
        assert dict(again.rows) == model

    asyncio.run(run())

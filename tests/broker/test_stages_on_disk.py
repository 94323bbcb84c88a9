"""Stages that do not fit into memory, and publications that do not fit into one append."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from headrace.broker import BrokerSettings, OnInvalid, Publication, SchemaType
from headrace.broker.settings import SpillSizes
from headrace.errors import CorruptData, DiskFull, InvalidRecord, InvalidRequest, Unavailable, UnknownStage
from headrace.records import ColumnBatch, Record, RecordBatch
from tests.broker.harness import ANN, Harness, turns

TIGHT = BrokerSettings(
    stages_memory_bytes=2_000,
    publication_bytes=1_000_000,
    spill_sizes=SpillSizes(write_bytes=400, chunk_bytes=200, log_bytes=1_500, step_bytes=500),
)
ROLLED = BrokerSettings(stages_memory_bytes=2_000, publication_bytes=1_000, spill_sizes=TIGHT.spill_sizes)
"""Sizes that make little data exceed the limits."""


async def opened(settings: BrokerSettings) -> Harness:
    harness = Harness(settings)
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t", partitions=2)
    await harness.broker.create_topic(ANN, "u")
    return harness


@pytest.fixture
async def tight() -> AsyncIterator[Harness]:
    harness = await opened(TIGHT)
    yield harness
    harness.engine.error = None
    await harness.broker.close()


@pytest.fixture
async def rolled() -> AsyncIterator[Harness]:
    harness = await opened(ROLLED)
    yield harness
    harness.engine.error = None
    await harness.broker.close()


async def fill(harness: Harness, handle: str, record_batches: int, *, order: int = 0, writer: str = "q", epoch: str = "") -> list[str]:
    """Stage batches of about 100 bytes for both topics; return the values for u, in order."""
    own: list[str] = []
    for number in range(record_batches):
        value = f"{handle}-{number}".ljust(84, ".")
        topic, partition = ("u", 0) if number % 2 == 0 else ("t", number // 2 % 2)
        own += [value] if topic == "u" else []
        await harness.broker.stage(
            ANN, handle, topic, RecordBatch([value.encode()]), writer=writer, epoch=epoch, order=order, partition=partition
        )
    await harness.broker.seal(ANN, handle)
    return own


def logs(harness: Harness) -> list[str]:
    return [name for name in harness.engine.topics() if name.startswith("__stage.")]


async def publish(harness: Harness, version: int, *handles: str) -> Publication:
    return await harness.broker.publish_staged(ANN, "q", version, handles)


def memory(harness: Harness) -> int:
    return harness.broker._stages._memory.size_bytes


async def until(condition: Callable[[], bool]) -> None:
    """Wait in loop iterations; the memory engine needs nothing else."""
    for _ in range(1_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not happen")


async def resumed(harness: Harness) -> None:
    """Wait until the background tasks have ended."""
    await until(lambda: not harness.broker._stages._tasks)


# More than memory


async def test_what_does_not_fit_into_memory_is_published_all_the_same(tight: Harness) -> None:
    wanted = [await fill(tight, f"h{number}", 40, order=number) for number in (2, 0, 1)]
    assert memory(tight) <= 2_000 and logs(tight)
    assert (await tight.values("u"), await tight.values("t")) == ([], [])
    appends = tight.engine.appends
    assert await publish(tight, 0, "h0", "h1", "h2") == Publication("q", 0, False, 120)
    assert tight.engine.appends == appends + 1, "it is still one append"
    assert await tight.values("u") == wanted[1] + wanted[2] + wanted[0]
    both = [await tight.values("t", partition) for partition in (0, 1)]
    for values in both:
        assert values == sorted(values, key=lambda value: (value[:3], int(value[3:].rstrip("."))))
    assert sum(map(len, both)) == 60
    await turns()
    assert (logs(tight), memory(tight)) == ([], 0)


async def test_what_is_too_large_for_one_append_is_spilled_while_it_is_staged(rolled: Harness) -> None:
    stages = rolled.broker._stages._stages
    await fill(rolled, "small", 3, writer="other")
    await fill(rolled, "large", 11)
    await until(lambda: stages["large"].memory_bytes < 400)
    assert logs(rolled) and not stages["small"].chunks, "memory is not short, but only one of them goes through a stage log anyway"
    assert (await publish(rolled, 0, "large")).records == 11
    await turns()
    assert (memory(rolled), logs(rolled)) == (stages["small"].memory_bytes, [])


@pytest.mark.parametrize("as_columns", [True, False])
async def test_everything_about_a_record_survives_the_way_to_the_disk_and_back(tight: Harness, as_columns: bool) -> None:
    batch = RecordBatch(
        [b"a" * 700, None, b"", b"d" * 300],
        [b"k", b"l", None, b""],
        [(("n", b"1"), ("n", b"2")), (), (), (("", b""),)],
        [7, 5, 6, 6],
        [0, (1 << 60), 0, 0],
    )
    plain = RecordBatch([b"x" * 700, b"y"])
    for given in (batch, plain):
        await tight.broker.stage(ANN, "h", "u", ColumnBatch.of(given) if as_columns else given, writer="q", partition=0)
    for number in range(5):
        await fill(tight, f"smaller {number}", 4)
    await tight.broker.seal(ANN, "h")
    await turns(200)
    assert tight.broker._stages._stages["h"].held == []
    tight.clock.tick(100)
    await publish(tight, 0, "h")
    now = tight.clock.now
    assert await tight.records("u") == [
        Record(0, 7, b"k", b"a" * 700, (("n", b"1"), ("n", b"2"))),
        Record(1, 5, b"l", None, (), 1 << 60),
        Record(2, 6, None, b""),
        Record(3, 6, b"", b"d" * 300, (("", b""),)),
        Record(4, now, None, b"x" * 700),
        Record(5, now, None, b"y"),
    ]


async def test_a_batch_that_arrives_when_memory_is_full_waits_for_the_disk(tight: Harness) -> None:
    tight.engine.hold()
    staged = [tight.broker.stage(ANN, "h", "u", RecordBatch([b"%d" % number + b"." * 400]), writer="q") for number in range(7)]
    await turns()
    assert [one.done() for one in staged] == [True] * 4 + [False] * 3
    assert memory(tight) <= 2_000
    with pytest.raises(InvalidRequest, match="still being written"):
        await tight.broker.seal(ANN, "h")
    tight.engine.let_go()
    await asyncio.gather(*staged)
    await tight.broker.seal(ANN, "h")
    await publish(tight, 0, "h")
    assert [value[0] for value in await tight.values("u")] == list("0123456"), "in the order of the calls"


async def test_a_batch_larger_than_all_memory_is_taken_when_there_is_nothing_else(tight: Harness) -> None:
    await tight.broker.stage(ANN, "h", "u", RecordBatch([b"x" * 5_000]), writer="q")
    await tight.broker.stage(ANN, "h", "u", RecordBatch([b"y" * 5_000]), writer="q")
    await tight.broker.seal(ANN, "h")
    await publish(tight, 0, "h")
    assert [value[0] for value in await tight.values("u")] == ["x", "y"]


async def test_only_so_much_may_wait(tight: Harness) -> None:
    tight.engine.hold()
    waiting = [tight.broker.stage(ANN, "h", "u", RecordBatch([b"x" * 984]), writer="q") for _ in range(2 + 8)]
    with pytest.raises(Unavailable):
        tight.broker.stage(ANN, "h", "u", RecordBatch([b"x"]), writer="q")
    tight.engine.let_go()
    await asyncio.gather(*waiting)


async def test_a_full_disk_fails_the_waiting_batches_and_no_others(tight: Harness) -> None:
    kept = await fill(tight, "h", 10)
    tight.engine.error = DiskFull("full")
    taken = refused = 0
    for _ in range(20):
        try:
            await tight.broker.stage(ANN, "i", "u", RecordBatch([b"x" * 300]), writer="q")
            taken += 1
        except DiskFull:
            refused += 1
    assert taken and refused and memory(tight) <= 2_000
    tight.engine.error = None
    await tight.broker.stage(ANN, "i", "u", RecordBatch([b"x" * 300]), writer="q")
    assert (await tight.broker.seal(ANN, "i")).records == taken + 1
    await publish(tight, 0, "h", "i")
    assert await tight.values("u") == kept + ["x" * 300] * (taken + 1)


async def test_a_caller_that_gives_up_waiting_has_staged_nothing(tight: Harness) -> None:
    tight.engine.hold()
    staged = [tight.broker.stage(ANN, "h", "u", RecordBatch([b"%d" % number + b"." * 400]), writer="q") for number in range(6)]
    await turns()
    staged[4].cancel()
    tight.engine.let_go()
    await staged[5]
    await tight.broker.seal(ANN, "h")
    await publish(tight, 0, "h")
    assert [value[0] for value in await tight.values("u")] == list("01235")


@pytest.mark.parametrize("end", ["dropped", "superseded", "expired", "closed", "forgotten"])
async def test_the_disk_is_given_back_when_a_stage_is_gone(tight: Harness, end: str) -> None:
    await fill(tight, "h", 40, epoch="r1")
    assert logs(tight)
    if end == "dropped":
        await tight.broker.drop_staged(ANN, ["h"])
    elif end == "superseded":
        await tight.broker.publish_staged(ANN, "q", 0, [], epoch="r2")
    elif end == "expired":
        tight.clock.tick(TIGHT.stage_idle_ms)
    elif end == "forgotten":
        await tight.broker.forget_writer(ANN, "q")
    else:
        await tight.broker.close()
    await turns()
    assert (logs(tight), memory(tight)) == ([], 0)


async def test_a_stage_dropped_on_its_way_to_the_disk_leaves_nothing(tight: Harness) -> None:
    tight.engine.hold()
    staged = [tight.broker.stage(ANN, "h", "u", RecordBatch([b"x" * 400]), writer="q") for _ in range(6)]
    await turns()
    await tight.broker.drop_staged(ANN, ["h"])
    tight.engine.let_go()
    assert [type(error) for error in await asyncio.gather(*staged[4:], return_exceptions=True)] == [UnknownStage] * 2
    await turns()
    assert (logs(tight), memory(tight)) == ([], 0)


async def test_stages_that_share_a_log_keep_it_for_each_other(tight: Harness) -> None:
    first = await fill(tight, "h1", 20)
    await fill(tight, "h2", 20)
    await tight.broker.drop_staged(ANN, ["h2"])
    await turns()
    await publish(tight, 0, "h1")
    assert await tight.values("u") == first


async def test_what_a_crash_leaves_of_stages_is_removed_at_the_start(tight: Harness) -> None:
    await fill(tight, "h", 40)
    left = logs(tight)
    await tight.crash()
    assert left and logs(tight) == []
    with pytest.raises(UnknownStage):
        await publish(tight, 0, "h")
    wanted = await fill(tight, "i", 40)
    await publish(tight, 0, "i")
    assert await tight.values("u") == wanted


async def test_internal_topics_of_stages_are_hidden(tight: Harness) -> None:
    await fill(tight, "h", 40)
    assert [topic.name for topic in tight.broker.topics(ANN)] == ["t", "u"]


@pytest.mark.parametrize("settings", [TIGHT, ROLLED])
async def test_a_schema_that_came_after_the_staging_judges_what_is_on_disk_too(settings: BrokerSettings) -> None:
    harness = await opened(settings)
    await fill(harness, "h", 40)
    await harness.broker.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "object"}')
    await harness.broker.schemas.require(ANN, "u", "s", on_invalid=OnInvalid.DEAD_LETTER)
    with pytest.raises(InvalidRecord):
        await publish(harness, 0, "h")
    assert (await harness.values("u"), harness.broker.last_version(ANN, "q")) == ([], None)
    await harness.broker.schemas.release(ANN, "u")
    assert (await publish(harness, 0, "h")).records == 40
    await harness.broker.close()


@pytest.mark.parametrize("settings", [TIGHT, ROLLED])
async def test_staged_records_that_cannot_be_read_back_are_not_published_by_half(settings: BrokerSettings) -> None:
    harness = await opened(settings)
    await fill(harness, "h", 40)
    for name in logs(harness)[:1]:
        del harness.engine._partitions[name][0].batches[0]
    with pytest.raises(CorruptData):
        await publish(harness, 0, "h")
    assert harness.broker.last_version(ANN, "q") is None
    if settings is TIGHT:
        assert await harness.values("u") == []
    await harness.broker.forget_writer(ANN, "q")
    await turns()
    assert harness.broker.stages(ANN) == [] and logs(harness) == []
    await harness.broker.close()


async def test_expired_records_need_not_be_there_any_more(tight: Harness) -> None:
    short = tight.clock.now + 1_000
    await tight.broker.stage(ANN, "h", "u", RecordBatch([b"x" * 900], expiries=[short]), writer="q")
    wanted = await fill(tight, "h", 20)
    await turns()
    tight.clock.tick(2_000)
    await tight.engine.maintain()
    await publish(tight, 0, "h")
    assert [value for value in await tight.values("u") if value[0] != "x"] == wanted


# More than one append


async def test_a_large_publication_is_made_of_several_appends_and_looks_like_any_other(rolled: Harness) -> None:
    wanted = [await fill(rolled, f"h{number}", 20, order=number) for number in (1, 0)]
    await put_small(rolled, "h9", 9)
    appends = rolled.engine.appends
    assert await publish(rolled, 3, "h0", "h1", "h9") == Publication("q", 3, False, 41)
    assert rolled.engine.appends > appends + 5
    assert await rolled.values("u") == wanted[1] + wanted[0] + ["h9"]
    both = [await rolled.values("t", partition) for partition in (0, 1)]
    for values in both:
        assert values == sorted(values, key=lambda value: (value[:3], int(value[3:].rstrip("."))))
    await turns()
    assert (rolled.broker.last_version(ANN, "q"), logs(rolled), rolled.broker.stages(ANN), memory(rolled)) == (3, [], [], 0)
    assert not rolled.broker.writers(ANN)[0].is_publishing


async def put_small(harness: Harness, handle: str, order: int) -> None:
    await harness.broker.stage(ANN, handle, "u", RecordBatch([handle.encode()]), writer="q", order=order)
    await harness.broker.seal(ANN, handle)


async def test_a_version_is_the_last_one_when_all_of_it_is_there(rolled: Harness) -> None:
    await publish(rolled, 2)
    await fill(rolled, "h", 40)
    seen: list[tuple[int | None, int]] = []
    publishing = asyncio.ensure_future(publish(rolled, 3, "h"))
    while not publishing.done():
        count = sum(rolled.engine.bounds(topic, partition).end for topic, partition in (("t", 0), ("t", 1), ("u", 0)))
        seen.append((rolled.broker.last_version(ANN, "q"), count))
        await asyncio.sleep(0)
    assert {version for version, count in seen if count < 40} == {2}
    assert len({count for _, count in seen}) > 3, "readers see it come"
    assert rolled.broker.last_version(ANN, "q") == 3


async def test_who_publishes_a_version_under_way_waits_for_it(rolled: Harness) -> None:
    wanted = await fill(rolled, "h", 40)
    await put_small(rolled, "i", 0)
    first, second, third = await asyncio.gather(publish(rolled, 0, "h"), publish(rolled, 0, "h"), publish(rolled, 1, "i"))
    assert (first.already, second.already, third.already) == (False, True, False)
    assert await rolled.values("u") == [*wanted, "i"]


async def test_a_disk_that_fills_up_on_the_way_only_takes_time(rolled: Harness) -> None:
    wanted = await fill(rolled, "h", 40)
    publishing = asyncio.ensure_future(publish(rolled, 0, "h"))
    await until(lambda: rolled.engine.bounds("u", 0).end >= 5)
    rolled.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await publishing
    there = rolled.engine.bounds("u", 0).end
    assert 0 < there < 20 and rolled.broker.writers(ANN)[0].is_publishing
    with pytest.raises(DiskFull):
        await publish(rolled, 0, "h")
    rolled.clock.tick(1_000)
    await resumed(rolled)
    assert rolled.engine.bounds("u", 0).end == there
    rolled.engine.error = None
    rolled.clock.tick(1_000)
    await resumed(rolled)
    assert (await rolled.values("u"), rolled.broker.last_version(ANN, "q")) == (wanted, 0)
    assert (await publish(rolled, 0, "h")).already


async def test_a_publication_that_was_not_begun_can_be_tried_again(rolled: Harness) -> None:
    wanted = await fill(rolled, "h", 40)
    for topic in ("__stage.", "__sink_plans"):
        rolled.engine.topic, rolled.engine.error = topic, DiskFull("full")
        if topic == "__stage.":
            rolled.engine.topic = f"__stage.{rolled.broker._stages._spill._current}"
        with pytest.raises(DiskFull):
            await publish(rolled, 0, "h")
        assert (await rolled.values("u"), rolled.broker.writers(ANN)) == ([], [])
        rolled.engine.error = None
    await publish(rolled, 0, "h")
    assert await rolled.values("u") == wanted
    await turns()
    assert logs(rolled) == []


async def test_a_stop_in_the_middle_is_continued_after_the_next_start(rolled: Harness) -> None:
    wanted = await fill(rolled, "h", 40)
    publishing = asyncio.ensure_future(publish(rolled, 0, "h"))
    await until(lambda: rolled.engine.bounds("u", 0).end >= 5)
    await rolled.restart()
    with pytest.raises(Unavailable):
        await publishing
    await resumed(rolled)
    assert (await rolled.values("u"), rolled.broker.last_version(ANN, "q"), logs(rolled)) == (wanted, 0, [])


async def test_a_topic_deleted_on_the_way_takes_its_own_records_only(rolled: Harness) -> None:
    wanted = await fill(rolled, "h", 40)
    publishing = asyncio.ensure_future(publish(rolled, 0, "h"))
    await until(lambda: sum(rolled.engine.bounds("t", partition).end for partition in (0, 1)) >= 3)
    await rolled.broker.delete_topic(ANN, "t")
    assert not (await publishing).already
    assert (await rolled.values("u"), rolled.broker.last_version(ANN, "q")) == (wanted, 0)


async def test_a_writer_forgotten_on_the_way_publishes_no_more(rolled: Harness) -> None:
    await fill(rolled, "h", 40)
    publishing = asyncio.ensure_future(publish(rolled, 0, "h"))
    await until(lambda: rolled.engine.bounds("u", 0).end >= 5)
    rolled.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await publishing
    rolled.engine.error = None
    there = rolled.engine.bounds("u", 0).end
    await rolled.broker.forget_writer(ANN, "q")
    rolled.clock.tick(10_000)
    await resumed(rolled)
    await turns()
    assert (rolled.engine.bounds("u", 0).end, logs(rolled), rolled.broker.writers(ANN)) == (there, [], [])
    await rolled.crash()
    assert rolled.broker.writers(ANN) == []

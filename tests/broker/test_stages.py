"""Exactly-once writers: staged out of sight, published at once and once."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker import Action, OnInvalid, Principal, Publication, SchemaType, StageSize, WriterEntry
from headrace.engine.contract import TopicConfig
from headrace.errors import (
    BrokerError,
    DiskFull,
    InvalidRecord,
    InvalidRequest,
    LimitExceeded,
    NoSuchEntry,
    NotAuthorized,
    RecordTooLarge,
    StaleEpoch,
    StorageFailed,
    Unavailable,
    UnknownPartition,
    UnknownStage,
    UnknownTopic,
)
from headrace.limits import STAGES_REMEMBERED_MAX, TRANSACTION_BYTES_MAX, VALUE_BYTES_MAX
from headrace.records import ColumnBatch, RecordBatch
from tests.broker.staging import publish, put
from tests.broker.stand import ANN, Stand, turns


@pytest.fixture
async def stand(stand: Stand) -> Stand:
    await stand.broker.create_topic(ANN, "t", partitions=2)
    await stand.broker.create_topic(ANN, "u")
    return stand


async def test_nothing_is_seen_before_the_publication_and_all_of_it_after(stand: Stand) -> None:
    await stand.put("before", partition=0)
    assert await put(stand, "h1", "a", "b") == StageSize(2, 2)
    assert await put(stand, "h2", "c", topic="u") == StageSize(1, 1)
    await turns()
    assert (await stand.values("t"), await stand.values("u")) == (["before"], [])
    assert stand.broker.last_version(ANN, "q") is None
    appends = stand.engine.appends
    assert await publish(stand, 0, "h1", "h2") == Publication("q", 0, False, 3)
    assert stand.engine.appends == appends + 1, "one append is what makes it atomic"
    assert (await stand.values("t"), await stand.values("u")) == (["before", "a", "b"], ["c"])
    assert stand.broker.last_version(ANN, "q") == 0
    assert stand.broker.stages(ANN) == []


async def test_a_version_is_published_once_whatever_is_staged_for_it_again(stand: Stand) -> None:
    await put(stand, "h1", "a")
    await publish(stand, 7, "h1")
    for version, handle in ((7, "h2"), (3, "h3"), (0, "h4")):
        await put(stand, handle, "again")
        assert await publish(stand, version, handle) == Publication("q", version, True, 0)
    assert (await stand.values("t"), stand.broker.stages(ANN)) == (["a"], [])
    assert stand.broker.last_version(ANN, "q") == 7
    await put(stand, "h5", "b")
    assert not (await publish(stand, 8, "h5")).already
    assert await stand.values("t") == ["a", "b"]


async def test_a_version_known_to_be_published_needs_no_handles(stand: Stand) -> None:
    """After a crash the writer publishes again with handles that nobody remembers."""
    await put(stand, "h1", "a")
    await publish(stand, 7, "h1")
    await stand.crash()
    assert stand.broker.last_version(ANN, "q") == 7
    assert (await publish(stand, 7, "h1")).already
    with pytest.raises(UnknownStage):
        await publish(stand, 8, "h1")


async def test_of_two_publications_of_a_version_at_once_one_wins(stand: Stand) -> None:
    await put(stand, "h1", "a")
    await put(stand, "h2", "b")
    answers = await asyncio.gather(publish(stand, 1, "h1"), publish(stand, 1, "h2"), publish(stand, 1, "h1"))
    assert [answer.already for answer in answers] == [False, True, True]
    assert (await stand.values("t"), stand.broker.stages(ANN)) == (["a"], [])


async def test_versions_published_at_once_come_in_the_order_of_the_calls(stand: Stand) -> None:
    for number in range(4):
        await put(stand, f"h{number}", str(number))
    answers = await asyncio.gather(*(publish(stand, number, f"h{number}") for number in (0, 2, 1, 3)))
    assert [answer.already for answer in answers] == [False, False, True, False]
    assert await stand.values("t") == ["0", "2", "3"]


async def test_a_publication_goes_on_when_its_caller_gives_up(stand: Stand) -> None:
    await put(stand, "h1", "a")
    stand.engine.hold()
    asking = asyncio.ensure_future(publish(stand, 1, "h1"))
    await turns()
    asking.cancel()
    await turns()
    again = asyncio.ensure_future(publish(stand, 1, "h1"))
    await turns()
    assert not again.done()
    stand.engine.let_go()
    assert (await again).already
    assert await stand.values("t") == ["a"]


@pytest.mark.parametrize("handles", [("h0", "h1", "h2"), ("h2", "h1", "h0"), ("h1", "h0", "h2")])
async def test_records_lie_in_the_order_of_the_tasks_whoever_staged_first(stand: Stand, handles: tuple[str, ...]) -> None:
    for number in (2, 0, 1):
        for part in "ab":
            batch = RecordBatch([f"{number}{part}".encode()])
            await stand.broker.stage(ANN, f"h{number}", "u", batch, writer="q", order=number)
    for handle in handles:
        await stand.broker.seal(ANN, handle)
    await publish(stand, 0, *handles)
    assert await stand.values("u") == ["0a", "0b", "1a", "1b", "2a", "2b"]


async def test_handles_of_the_same_order_come_as_they_are_named(stand: Stand) -> None:
    for handle in "abc":
        await put(stand, handle, handle)
    await publish(stand, 0, "c", "a", "b", "a")
    assert await stand.values("t") == ["c", "a", "b"]


async def test_records_go_where_any_publication_would_send_them(stand: Stand) -> None:
    keys = [b"k%d" % number for number in range(20)]
    await stand.broker.publish(ANN, "t", RecordBatch(keys, keys))
    plain = [await stand.values("t", partition) for partition in (0, 1)]
    await stand.broker.stage(ANN, "h", "t", RecordBatch(keys, keys), writer="q")
    await stand.broker.seal(ANN, "h")
    await publish(stand, 0, "h")
    assert [await stand.values("t", partition) for partition in (0, 1)] == [values * 2 for values in plain]
    for handle in ("i", "j"):
        await stand.broker.stage(ANN, handle, "t", RecordBatch([b"keyless"]), writer="q")
        await stand.broker.seal(ANN, handle)
    await publish(stand, 1, "i", "j")
    assert [(await stand.values("t", partition))[-1] for partition in (0, 1)] == ["keyless"] * 2


async def test_columns_are_staged_as_they_are(stand: Stand) -> None:
    batch = ColumnBatch.of(RecordBatch([b"a", None], [b"k", b"l"], [(("n", b"v"),), ()]))
    await stand.broker.stage(ANN, "h", "t", batch, writer="q", partition=1)
    assert await stand.broker.seal(ANN, "h") == StageSize(2, 3)
    await publish(stand, 0, "h")
    assert [(r.key, r.value, r.headers) for r in await stand.records("t", 1)] == [(b"k", b"a", (("n", b"v"),)), (b"l", None, ())]


async def test_time_begins_with_the_publication(stand: Stand) -> None:
    await stand.broker.create_topic(ANN, "short", config=TopicConfig(ttl_ms=1_000))
    await stand.broker.stage(ANN, "h", "short", RecordBatch([b"a", b"b"], expiries=[0, 5]), writer="q")
    await stand.broker.seal(ANN, "h")
    stand.clock.tick(60_000)
    await publish(stand, 0, "h")
    now = stand.clock.now
    assert [(record.timestamp, record.expiry) for record in await stand.records("short")] == [(now, now + 1_000), (now, 5)]


# Handles


async def test_a_sealed_stage_takes_nothing_more(stand: Stand) -> None:
    await put(stand, "h", "a")
    assert await stand.broker.seal(ANN, "h") == StageSize(1, 1)
    with pytest.raises(InvalidRequest, match="sealed"):
        await put(stand, "h", "b")
    assert stand.broker.stages(ANN)[0].records == 1


async def test_only_sealed_stages_are_published(stand: Stand) -> None:
    await put(stand, "h1", "a")
    await stand.broker.stage(ANN, "h2", "t", RecordBatch([b"b"]), writer="q", partition=0)
    with pytest.raises(InvalidRequest, match="not sealed"):
        await publish(stand, 0, "h1", "h2")
    assert (await stand.values("t"), stand.broker.last_version(ANN, "q")) == ([], None)
    await stand.broker.seal(ANN, "h2")
    await publish(stand, 0, "h1", "h2")
    assert await stand.values("t") == ["a", "b"]


async def test_a_task_without_records_may_seal_all_the_same(stand: Stand) -> None:
    with pytest.raises(UnknownStage):
        await stand.broker.seal(ANN, "h")
    assert await stand.broker.seal(ANN, "h", writer="q") == StageSize(0, 0)
    assert await publish(stand, 0, "h") == Publication("q", 0, False, 0)
    assert await publish(stand, 1) == Publication("q", 1, False, 0), "and a version may have no tasks at all"
    assert stand.broker.last_version(ANN, "q") == 1


@pytest.mark.parametrize("unknown", ["never", "dropped", "published", "another's"])
async def test_one_handle_that_is_not_there_and_nothing_is_published(stand: Stand, unknown: str) -> None:
    await put(stand, "dropped", "x")
    await stand.broker.drop_staged(ANN, ["dropped"])
    await put(stand, "published", "x", topic="u")
    await publish(stand, 0, "published")
    await put(stand, "another's", "x", writer="r")
    await put(stand, "h", "a")
    with pytest.raises(UnknownStage):
        await publish(stand, 1, "h", unknown)
    assert (await stand.values("t"), stand.broker.last_version(ANN, "q")) == ([], 0)
    assert (await publish(stand, 1, "h")).records == 1, "and what is there can still be published"


@pytest.mark.parametrize("gone", ["dropped", "published"])
async def test_a_handle_that_is_gone_stays_so(stand: Stand, gone: str) -> None:
    await put(stand, "h", "a")
    if gone == "dropped":
        assert await stand.broker.drop_staged(ANN, ["h", "h"]) == 1
        assert await stand.broker.drop_staged(ANN, ["h"]) == 0
    else:
        await publish(stand, 0, "h")
    with pytest.raises(UnknownStage):
        await put(stand, "h", "b")
    with pytest.raises(UnknownStage):
        await stand.broker.seal(ANN, "h")
    with pytest.raises(UnknownStage):
        await stand.broker.seal(ANN, "h", writer="q")


async def test_a_handle_may_be_dropped_before_its_task_has_come_so_far(stand: Stand) -> None:
    assert await stand.broker.drop_staged(ANN, ["late"]) == 0
    with pytest.raises(UnknownStage):
        await put(stand, "late", "a")
    stranger = Principal("bob")
    await stand.broker.stage(stranger, "late", "t", RecordBatch([b"b"]), writer="q")  # of whoever dropped it, and of nobody else


async def test_only_the_latest_dead_handles_are_remembered(stand: Stand) -> None:
    await stand.broker.drop_staged(ANN, ["first"])
    await stand.broker.drop_staged(ANN, [f"h{number}" for number in range(STAGES_REMEMBERED_MAX - 1)])
    with pytest.raises(UnknownStage):
        await put(stand, "first", "a")
    await stand.broker.drop_staged(ANN, ["one more"])
    await put(stand, "first", "a")


async def test_a_stranger_cannot_make_the_broker_forget_dead_handles(stand: Stand) -> None:
    await put(stand, "h", "a")
    await publish(stand, 0, "h")
    stranger = Principal("mallory")
    for start in range(0, STAGES_REMEMBERED_MAX + 1, 10_000):
        await stand.broker.drop_staged(stranger, [f"x{number}" for number in range(start, start + 10_000)])
    with pytest.raises(UnknownStage):
        await put(stand, "h", "again")


async def test_a_handle_belongs_to_one_writer_one_run_and_one_place(stand: Stand) -> None:
    await stand.broker.stage(ANN, "h", "t", RecordBatch([b"a"]), writer="q", epoch="r1", order=1)
    for writer, epoch, order in (("p", "r1", 1), ("q", "", 1), ("q", "r1", 2)):
        with pytest.raises(InvalidRequest, match="belongs"):
            await stand.broker.stage(ANN, "h", "t", RecordBatch([b"b"]), writer=writer, epoch=epoch, order=order)
    assert [(entry.handle, entry.records) for entry in stand.broker.stages(ANN)] == [("h", 1)]


# What is refused


@pytest.mark.parametrize(
    ("topic", "partition", "batch", "error"),
    [
        ("absent", None, RecordBatch([b"a"]), UnknownTopic),
        ("__sinks", None, RecordBatch([b"a"]), UnknownTopic),
        ("t", 2, RecordBatch([b"a"]), UnknownPartition),
        ("t", None, RecordBatch([]), InvalidRequest),
        ("t", None, RecordBatch([b"a"], [b"k", b"l"]), InvalidRequest),
        ("t", None, RecordBatch([bytes(VALUE_BYTES_MAX + 1)]), RecordTooLarge),
        ("t", 0, RecordBatch([bytes(VALUE_BYTES_MAX)] * (TRANSACTION_BYTES_MAX // VALUE_BYTES_MAX)), LimitExceeded),
    ],
)
async def test_what_cannot_be_published_is_not_staged(
    stand: Stand, topic: str, partition: int | None, batch: RecordBatch, error: type[BrokerError]
) -> None:
    with pytest.raises(error):
        stand.broker.stage(ANN, "h", topic, batch, writer="q", partition=partition)
    assert (stand.broker.stages(ANN), stand.broker.writers(ANN)) == ([], [])


async def test_names_and_versions_have_their_rules(stand: Stand) -> None:
    for writer, handle, epoch in (("", "h", ""), ("a\n", "h", ""), ("q", "", ""), ("q", "x" * 250, ""), ("q", "h", "r\0")):
        with pytest.raises(InvalidRequest):
            stand.broker.stage(ANN, handle, "t", RecordBatch([b"a"]), writer=writer, epoch=epoch)
    with pytest.raises(InvalidRequest):
        await stand.broker.drop_staged(ANN, ["x" * 250])
    for version in (-1, 1 << 63):
        with pytest.raises(InvalidRequest):
            await publish(stand, version)
    assert stand.broker.writers(ANN) == []


async def test_a_topic_deleted_meanwhile_spoils_the_publication_and_nothing_else(stand: Stand) -> None:
    await put(stand, "h1", "a")
    await put(stand, "h2", "b", topic="u")
    await stand.broker.delete_topic(ANN, "u")
    with pytest.raises(UnknownTopic):
        await publish(stand, 0, "h1", "h2")
    assert (await stand.values("t"), stand.broker.last_version(ANN, "q")) == ([], None)
    await publish(stand, 0, "h1")
    assert await stand.values("t") == ["a"]


async def test_permissions_are_asked_again_at_the_publication() -> None:
    denied: set[tuple[str, str]] = set()
    stand = Stand(authorize=lambda who, action, resource: (resource.kind, resource.name) not in denied)
    await stand.broker.open()
    await stand.broker.create_topic(ANN, "t")
    await put(stand, "h", "a")
    for lost in (("topic", "t"), ("transaction", "q")):
        denied.add(lost)
        stand.broker.access_changed()
        with pytest.raises(NotAuthorized):
            await publish(stand, 0, "h")
        with pytest.raises(NotAuthorized):
            await put(stand, "i", "a")
        denied.clear()
    stand.broker.access_changed()
    await publish(stand, 0, "h")
    await stand.broker.close()


async def test_a_schema_judges_what_is_staged(stand: Stand) -> None:
    await stand.broker.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "object"}')
    await stand.broker.schemas.require(ANN, "t", "s")
    with pytest.raises(InvalidRecord):
        await put(stand, "h", "{}", "7")
    assert stand.broker.stages(ANN) == []
    await put(stand, "h", "{}")
    await publish(stand, 0, "h")
    assert await stand.values("t") == ["{}"]


async def test_a_schema_that_came_after_the_staging_judges_the_publication(stand: Stand) -> None:
    await put(stand, "good", "{}")
    await put(stand, "bad", "7")
    await stand.broker.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "object"}')
    await stand.broker.schemas.require(ANN, "t", "s")
    with pytest.raises(InvalidRecord):
        await publish(stand, 0, "good", "bad")
    await publish(stand, 0, "good")
    assert await stand.values("t") == ["{}"]


async def test_dead_letters_are_published_with_the_rest(stand: Stand) -> None:
    await stand.broker.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "object"}')
    await stand.broker.schemas.require(ANN, "t", "s", on_invalid=OnInvalid.DEAD_LETTER)
    assert (await put(stand, "h", "{}", "7")).records == 2
    assert await stand.values("t.dlq") == []
    await publish(stand, 0, "h")
    assert (await stand.values("t"), await stand.values("t.dlq")) == (["{}"], ["7"])


@pytest.mark.parametrize("error", [DiskFull("full"), StorageFailed("broken")])
async def test_a_publication_that_failed_may_be_tried_again(stand: Stand, error: BrokerError) -> None:
    await put(stand, "h", "a")
    stand.engine.error = error
    with pytest.raises(type(error)):
        await publish(stand, 0, "h")
    assert stand.broker.last_version(ANN, "q") is None
    stand.engine.error = None
    assert not (await publish(stand, 0, "h")).already
    assert await stand.values("t") == ["a"]


async def test_a_draining_broker_takes_nothing(stand: Stand) -> None:
    await put(stand, "h", "a")
    await stand.broker.close()
    with pytest.raises(Unavailable):
        await publish(stand, 0, "h")
    with pytest.raises(Unavailable):
        await put(stand, "i", "a")
    await stand.crash()
    assert stand.broker.stages(ANN) == []


# Runs


async def test_a_superseded_run_is_refused(stand: Stand) -> None:
    await put(stand, "h1", "old", epoch="r1")
    await put(stand, "h2", "new", epoch="r2")
    for attempt in (put(stand, "h3", "late", epoch="r1"), publish(stand, 0, "h1", epoch="r1"), publish(stand, 0, epoch="r1")):
        with pytest.raises(StaleEpoch) as refused:
            await attempt
        assert (refused.value.writer, refused.value.epoch, refused.value.current) == ("q", "r1", "r2")
    assert [entry.handle for entry in stand.broker.stages(ANN)] == ["h2"], "what it had staged is gone"
    await publish(stand, 0, "h2", epoch="r2")
    assert await stand.values("t") == ["new"]


async def test_a_superseded_run_cannot_go_on_with_what_it_began(stand: Stand) -> None:
    await stand.broker.stage(ANN, "h1", "t", RecordBatch([b"a"]), writer="q", epoch="r1")
    await publish(stand, 0, epoch="r2")
    with pytest.raises(UnknownStage):
        await stand.broker.stage(ANN, "h1", "t", RecordBatch([b"b"]), writer="q", epoch="r1")
    with pytest.raises(UnknownStage):
        await stand.broker.seal(ANN, "h1")


async def test_a_run_superseded_while_it_waited_is_refused(stand: Stand) -> None:
    await put(stand, "h0", "a", epoch="r1")
    await put(stand, "h1", "b", epoch="r1")
    stand.engine.hold()
    first, second = (asyncio.ensure_future(publish(stand, number, f"h{number}", epoch="r1")) for number in (0, 1))
    await turns()
    newer = asyncio.ensure_future(publish(stand, 1, epoch="r2"))
    await turns()
    stand.engine.let_go()
    assert not (await first).already
    with pytest.raises(StaleEpoch):
        await second
    assert not (await newer).already
    assert await stand.values("t") == ["a"]


@pytest.mark.parametrize("published", [True, False])
async def test_a_superseded_run_is_refused_after_a_crash(stand: Stand, published: bool) -> None:
    await put(stand, "h1", "a", epoch="r1")
    await publish(stand, 0, "h1", epoch="r1")
    await put(stand, "h2", "b", epoch="r2")
    if published:
        await publish(stand, 1, "h2", epoch="r2")
    await stand.crash()
    with pytest.raises(StaleEpoch):
        await put(stand, "h3", "c", epoch="r1")
    with pytest.raises(StaleEpoch):
        await publish(stand, 2, epoch="r1")
    await put(stand, "h4", "d", epoch="r2")
    assert stand.broker.last_version(ANN, "q") == (1 if published else 0)


async def test_runs_of_one_writer_say_nothing_about_another(stand: Stand) -> None:
    await put(stand, "h1", "a", writer="p", epoch="r1")
    await put(stand, "h2", "b", writer="q", epoch="r1")
    await put(stand, "h3", "c", writer="q", epoch="r2")
    await publish(stand, 0, "h1", writer="p", epoch="r1")
    assert await stand.values("t") == ["a"]


async def test_a_writer_without_runs_supersedes_nobody(stand: Stand) -> None:
    await put(stand, "h1", "a", epoch="r1")
    await put(stand, "h2", "b")
    await publish(stand, 0, "h2")
    await publish(stand, 1, "h1", epoch="r1")
    assert await stand.values("t") == ["b", "a"]


async def test_writers_and_stages_are_listed(stand: Stand) -> None:
    await put(stand, "h1", "abc", "d", epoch="r1")
    await stand.broker.stage(ANN, "h2", "u", RecordBatch([b"xy"], [b"k"]), writer="q", epoch="r1")
    await stand.broker.stage(ANN, "h2", "t", RecordBatch([b"z"]), writer="q", epoch="r1")
    stand.clock.tick(500)
    listed = [
        (entry.handle, entry.writer, entry.records, entry.size_bytes, entry.by_topic, entry.age_ms, entry.is_sealed)
        for entry in stand.broker.stages(ANN)
    ]
    assert listed == [("h1", "q", 2, 4, {"t": 2}, 500, True), ("h2", "q", 2, 4, {"u": 1, "t": 1}, 500, False)]
    assert stand.broker.writers(ANN) == []
    await publish(stand, 4, "h1", epoch="r1")
    assert stand.broker.writers(ANN) == [WriterEntry("q", 4, stand.clock.now, "r1", False)]


async def test_a_forgotten_writer_begins_anew(stand: Stand) -> None:
    await put(stand, "h1", "a", epoch="r1")
    await publish(stand, 9, epoch="r2")
    await put(stand, "h2", "a", epoch="r2")
    await stand.broker.forget_writer(ANN, "q")
    assert (stand.broker.stages(ANN), stand.broker.writers(ANN), stand.broker.last_version(ANN, "q")) == ([], [], None)
    await stand.crash()
    assert stand.broker.writers(ANN) == []
    assert not (await publish(stand, 0, epoch="r1")).already
    with pytest.raises(NoSuchEntry):
        await stand.broker.forget_writer(ANN, "nobody")


async def test_who_forgets_a_writer_is_noted(stand: Stand) -> None:
    heard: list[tuple[Principal, Action, str, str, bool]] = []
    stand.broker._authorizer._audit_hook = lambda *said: heard.append(said)
    await publish(stand, 0)
    await stand.broker.forget_writer(ANN, "q")
    assert heard == [(ANN, Action.DELETE, "transaction", "q", True)]

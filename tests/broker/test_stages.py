"""Exactly-once writers: stage invisibly, publish atomically and once."""

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
from tests.broker.harness import ANN, Harness, turns
from tests.broker.staging import publish, put


@pytest.fixture
async def harness(harness: Harness) -> Harness:
    await harness.broker.create_topic(ANN, "t", partitions=2)
    await harness.broker.create_topic(ANN, "u")
    return harness


async def test_nothing_is_seen_before_the_publication_and_all_of_it_after(harness: Harness) -> None:
    await harness.put("before", partition=0)
    assert await put(harness, "h1", "a", "b") == StageSize(2, 2)
    assert await put(harness, "h2", "c", topic="u") == StageSize(1, 1)
    await turns()
    assert (await harness.values("t"), await harness.values("u")) == (["before"], [])
    assert harness.broker.last_version(ANN, "q") is None
    appends = harness.engine.appends
    assert await publish(harness, 0, "h1", "h2") == Publication("q", 0, False, 3)
    assert harness.engine.appends == appends + 1, "one append is what makes it atomic"
    assert (await harness.values("t"), await harness.values("u")) == (["before", "a", "b"], ["c"])
    assert harness.broker.last_version(ANN, "q") == 0
    assert harness.broker.stages(ANN) == []


async def test_a_version_is_published_once_whatever_is_staged_for_it_again(harness: Harness) -> None:
    await put(harness, "h1", "a")
    await publish(harness, 7, "h1")
    for version, handle in ((7, "h2"), (3, "h3"), (0, "h4")):
        await put(harness, handle, "again")
        assert await publish(harness, version, handle) == Publication("q", version, True, 0)
    assert (await harness.values("t"), harness.broker.stages(ANN)) == (["a"], [])
    assert harness.broker.last_version(ANN, "q") == 7
    await put(harness, "h5", "b")
    assert not (await publish(harness, 8, "h5")).already
    assert await harness.values("t") == ["a", "b"]


async def test_a_version_known_to_be_published_needs_no_handles(harness: Harness) -> None:
    """After a crash the writer publishes again with handles that the broker has forgotten."""
    await put(harness, "h1", "a")
    await publish(harness, 7, "h1")
    await harness.crash()
    assert harness.broker.last_version(ANN, "q") == 7
    assert (await publish(harness, 7, "h1")).already
    with pytest.raises(UnknownStage):
        await publish(harness, 8, "h1")


async def test_of_two_publications_of_a_version_at_once_one_wins(harness: Harness) -> None:
    await put(harness, "h1", "a")
    await put(harness, "h2", "b")
    answers = await asyncio.gather(publish(harness, 1, "h1"), publish(harness, 1, "h2"), publish(harness, 1, "h1"))
    assert [answer.already for answer in answers] == [False, True, True]
    assert (await harness.values("t"), harness.broker.stages(ANN)) == (["a"], [])


async def test_versions_published_at_once_come_in_the_order_of_the_calls(harness: Harness) -> None:
    for number in range(4):
        await put(harness, f"h{number}", str(number))
    answers = await asyncio.gather(*(publish(harness, number, f"h{number}") for number in (0, 2, 1, 3)))
    assert [answer.already for answer in answers] == [False, False, True, False]
    assert await harness.values("t") == ["0", "2", "3"]


async def test_a_publication_continues_when_its_caller_is_cancelled(harness: Harness) -> None:
    await put(harness, "h1", "a")
    harness.engine.hold()
    asking = asyncio.ensure_future(publish(harness, 1, "h1"))
    await turns()
    asking.cancel()
    await turns()
    again = asyncio.ensure_future(publish(harness, 1, "h1"))
    await turns()
    assert not again.done()
    harness.engine.let_go()
    assert (await again).already
    assert await harness.values("t") == ["a"]


@pytest.mark.parametrize("handles", [("h0", "h1", "h2"), ("h2", "h1", "h0"), ("h1", "h0", "h2")])
async def test_records_are_in_the_order_of_the_tasks_not_of_staging(harness: Harness, handles: tuple[str, ...]) -> None:
    for number in (2, 0, 1):
        for part in "ab":
            batch = RecordBatch([f"{number}{part}".encode()])
            await harness.broker.stage(ANN, f"h{number}", "u", batch, writer="q", order=number)
    for handle in handles:
        await harness.broker.seal(ANN, handle)
    await publish(harness, 0, *handles)
    assert await harness.values("u") == ["0a", "0b", "1a", "1b", "2a", "2b"]


async def test_handles_of_the_same_order_come_as_they_are_named(harness: Harness) -> None:
    for handle in "abc":
        await put(harness, handle, handle)
    await publish(harness, 0, "c", "a", "b", "a")
    assert await harness.values("t") == ["c", "a", "b"]


async def test_records_go_where_any_publication_would_send_them(harness: Harness) -> None:
    keys = [b"k%d" % number for number in range(20)]
    await harness.broker.publish(ANN, "t", RecordBatch(keys, keys))
    plain = [await harness.values("t", partition) for partition in (0, 1)]
    await harness.broker.stage(ANN, "h", "t", RecordBatch(keys, keys), writer="q")
    await harness.broker.seal(ANN, "h")
    await publish(harness, 0, "h")
    assert [await harness.values("t", partition) for partition in (0, 1)] == [values * 2 for values in plain]
    for handle in ("i", "j"):
        await harness.broker.stage(ANN, handle, "t", RecordBatch([b"keyless"]), writer="q")
        await harness.broker.seal(ANN, handle)
    await publish(harness, 1, "i", "j")
    assert [(await harness.values("t", partition))[-1] for partition in (0, 1)] == ["keyless"] * 2


async def test_columns_are_staged_as_they_are(harness: Harness) -> None:
    batch = ColumnBatch.of(RecordBatch([b"a", None], [b"k", b"l"], [(("n", b"v"),), ()]))
    await harness.broker.stage(ANN, "h", "t", batch, writer="q", partition=1)
    assert await harness.broker.seal(ANN, "h") == StageSize(2, 3)
    await publish(harness, 0, "h")
    assert [(r.key, r.value, r.headers) for r in await harness.records("t", 1)] == [(b"k", b"a", (("n", b"v"),)), (b"l", None, ())]


async def test_time_begins_with_the_publication(harness: Harness) -> None:
    await harness.broker.create_topic(ANN, "short", config=TopicConfig(ttl_ms=1_000))
    await harness.broker.stage(ANN, "h", "short", RecordBatch([b"a", b"b"], expiries=[0, 5]), writer="q")
    await harness.broker.seal(ANN, "h")
    harness.clock.tick(60_000)
    await publish(harness, 0, "h")
    now = harness.clock.now
    assert [(record.timestamp, record.expiry) for record in await harness.records("short")] == [(now, now + 1_000), (now, 5)]


# Handles


async def test_a_sealed_stage_takes_nothing_more(harness: Harness) -> None:
    await put(harness, "h", "a")
    assert await harness.broker.seal(ANN, "h") == StageSize(1, 1)
    with pytest.raises(InvalidRequest, match="sealed"):
        await put(harness, "h", "b")
    assert harness.broker.stages(ANN)[0].records == 1


async def test_only_sealed_stages_are_published(harness: Harness) -> None:
    await put(harness, "h1", "a")
    await harness.broker.stage(ANN, "h2", "t", RecordBatch([b"b"]), writer="q", partition=0)
    with pytest.raises(InvalidRequest, match="not sealed"):
        await publish(harness, 0, "h1", "h2")
    assert (await harness.values("t"), harness.broker.last_version(ANN, "q")) == ([], None)
    await harness.broker.seal(ANN, "h2")
    await publish(harness, 0, "h1", "h2")
    assert await harness.values("t") == ["a", "b"]


async def test_a_task_without_records_may_seal_all_the_same(harness: Harness) -> None:
    with pytest.raises(UnknownStage):
        await harness.broker.seal(ANN, "h")
    assert await harness.broker.seal(ANN, "h", writer="q") == StageSize(0, 0)
    assert await publish(harness, 0, "h") == Publication("q", 0, False, 0)
    assert await publish(harness, 1) == Publication("q", 1, False, 0), "and a version may have no tasks at all"
    assert harness.broker.last_version(ANN, "q") == 1


@pytest.mark.parametrize("unknown", ["never", "dropped", "published", "another's"])
async def test_one_handle_that_is_not_there_and_nothing_is_published(harness: Harness, unknown: str) -> None:
    await put(harness, "dropped", "x")
    await harness.broker.drop_staged(ANN, ["dropped"])
    await put(harness, "published", "x", topic="u")
    await publish(harness, 0, "published")
    await put(harness, "another's", "x", writer="r")
    await put(harness, "h", "a")
    with pytest.raises(UnknownStage):
        await publish(harness, 1, "h", unknown)
    assert (await harness.values("t"), harness.broker.last_version(ANN, "q")) == ([], 0)
    assert (await publish(harness, 1, "h")).records == 1, "and what is there can still be published"


@pytest.mark.parametrize("gone", ["dropped", "published"])
async def test_a_handle_that_is_gone_stays_so(harness: Harness, gone: str) -> None:
    await put(harness, "h", "a")
    if gone == "dropped":
        assert await harness.broker.drop_staged(ANN, ["h", "h"]) == 1
        assert await harness.broker.drop_staged(ANN, ["h"]) == 0
    else:
        await publish(harness, 0, "h")
    with pytest.raises(UnknownStage):
        await put(harness, "h", "b")
    with pytest.raises(UnknownStage):
        await harness.broker.seal(ANN, "h")
    with pytest.raises(UnknownStage):
        await harness.broker.seal(ANN, "h", writer="q")


async def test_a_handle_may_be_dropped_before_its_task_has_come_so_far(harness: Harness) -> None:
    assert await harness.broker.drop_staged(ANN, ["late"]) == 0
    with pytest.raises(UnknownStage):
        await put(harness, "late", "a")
    stranger = Principal("bob")
    await harness.broker.stage(
        stranger, "late", "t", RecordBatch([b"b"]), writer="q"
    )  # unusable for the principal that dropped it, and for no other


async def test_only_the_latest_dead_handles_are_remembered(harness: Harness) -> None:
    await harness.broker.drop_staged(ANN, ["first"])
    await harness.broker.drop_staged(ANN, [f"h{number}" for number in range(STAGES_REMEMBERED_MAX - 1)])
    with pytest.raises(UnknownStage):
        await put(harness, "first", "a")
    await harness.broker.drop_staged(ANN, ["one more"])
    await put(harness, "first", "a")


async def test_a_stranger_cannot_make_the_broker_forget_dead_handles(harness: Harness) -> None:
    await put(harness, "h", "a")
    await publish(harness, 0, "h")
    stranger = Principal("mallory")
    for start in range(0, STAGES_REMEMBERED_MAX + 1, 10_000):
        await harness.broker.drop_staged(stranger, [f"x{number}" for number in range(start, start + 10_000)])
    with pytest.raises(UnknownStage):
        await put(harness, "h", "again")


async def test_a_handle_belongs_to_one_writer_one_epoch_and_one_order(harness: Harness) -> None:
    await harness.broker.stage(ANN, "h", "t", RecordBatch([b"a"]), writer="q", epoch="r1", order=1)
    for writer, epoch, order in (("p", "r1", 1), ("q", "", 1), ("q", "r1", 2)):
        with pytest.raises(InvalidRequest, match="belongs"):
            await harness.broker.stage(ANN, "h", "t", RecordBatch([b"b"]), writer=writer, epoch=epoch, order=order)
    assert [(entry.handle, entry.records) for entry in harness.broker.stages(ANN)] == [("h", 1)]


# Errors


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
    harness: Harness, topic: str, partition: int | None, batch: RecordBatch, error: type[BrokerError]
) -> None:
    with pytest.raises(error):
        harness.broker.stage(ANN, "h", topic, batch, writer="q", partition=partition)
    assert (harness.broker.stages(ANN), harness.broker.writers(ANN)) == ([], [])


async def test_names_and_versions_have_their_rules(harness: Harness) -> None:
    for writer, handle, epoch in (("", "h", ""), ("a\n", "h", ""), ("q", "", ""), ("q", "x" * 250, ""), ("q", "h", "r\0")):
        with pytest.raises(InvalidRequest):
            harness.broker.stage(ANN, handle, "t", RecordBatch([b"a"]), writer=writer, epoch=epoch)
    with pytest.raises(InvalidRequest):
        await harness.broker.drop_staged(ANN, ["x" * 250])
    for version in (-1, 1 << 63):
        with pytest.raises(InvalidRequest):
            await publish(harness, version)
    assert harness.broker.writers(ANN) == []


async def test_a_topic_deleted_meanwhile_spoils_the_publication_and_nothing_else(harness: Harness) -> None:
    await put(harness, "h1", "a")
    await put(harness, "h2", "b", topic="u")
    await harness.broker.delete_topic(ANN, "u")
    with pytest.raises(UnknownTopic):
        await publish(harness, 0, "h1", "h2")
    assert (await harness.values("t"), harness.broker.last_version(ANN, "q")) == ([], None)
    await publish(harness, 0, "h1")
    assert await harness.values("t") == ["a"]


async def test_permissions_are_asked_again_at_the_publication() -> None:
    denied: set[tuple[str, str]] = set()
    harness = Harness(authorize=lambda who, action, resource: (resource.kind, resource.name) not in denied)
    await harness.broker.open()
    await harness.broker.create_topic(ANN, "t")
    await put(harness, "h", "a")
    for lost in (("topic", "t"), ("writer", "q")):
        denied.add(lost)
        harness.broker.access_changed()
        with pytest.raises(NotAuthorized):
            await publish(harness, 0, "h")
        with pytest.raises(NotAuthorized):
            await put(harness, "i", "a")
        denied.clear()
    harness.broker.access_changed()
    await publish(harness, 0, "h")
    await harness.broker.close()


async def test_a_schema_judges_what_is_staged(harness: Harness) -> None:
    await harness.broker.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "object"}')
    await harness.broker.schemas.require(ANN, "t", "s")
    with pytest.raises(InvalidRecord):
        await put(harness, "h", "{}", "7")
    assert harness.broker.stages(ANN) == []
    await put(harness, "h", "{}")
    await publish(harness, 0, "h")
    assert await harness.values("t") == ["{}"]


async def test_a_schema_that_came_after_the_staging_judges_the_publication(harness: Harness) -> None:
    await put(harness, "good", "{}")
    await put(harness, "bad", "7")
    await harness.broker.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "object"}')
    await harness.broker.schemas.require(ANN, "t", "s")
    with pytest.raises(InvalidRecord):
        await publish(harness, 0, "good", "bad")
    await publish(harness, 0, "good")
    assert await harness.values("t") == ["{}"]


async def test_dead_letters_are_published_with_the_rest(harness: Harness) -> None:
    await harness.broker.schemas.register(ANN, "s", SchemaType.JSON, b'{"type": "object"}')
    await harness.broker.schemas.require(ANN, "t", "s", on_invalid=OnInvalid.DEAD_LETTER)
    assert (await put(harness, "h", "{}", "7")).records == 2
    assert await harness.values("t.dlq") == []
    await publish(harness, 0, "h")
    assert (await harness.values("t"), await harness.values("t.dlq")) == (["{}"], ["7"])


@pytest.mark.parametrize("error", [DiskFull("full"), StorageFailed("broken")])
async def test_a_publication_that_failed_may_be_tried_again(harness: Harness, error: BrokerError) -> None:
    await put(harness, "h", "a")
    harness.engine.error = error
    with pytest.raises(type(error)):
        await publish(harness, 0, "h")
    assert harness.broker.last_version(ANN, "q") is None
    harness.engine.error = None
    assert not (await publish(harness, 0, "h")).already
    assert await harness.values("t") == ["a"]


async def test_a_draining_broker_takes_nothing(harness: Harness) -> None:
    await put(harness, "h", "a")
    await harness.broker.close()
    with pytest.raises(Unavailable):
        await publish(harness, 0, "h")
    with pytest.raises(Unavailable):
        await put(harness, "i", "a")
    await harness.crash()
    assert harness.broker.stages(ANN) == []


# Epochs


async def test_a_superseded_epoch_is_rejected(harness: Harness) -> None:
    await put(harness, "h1", "old", epoch="r1")
    await put(harness, "h2", "new", epoch="r2")
    for attempt in (put(harness, "h3", "late", epoch="r1"), publish(harness, 0, "h1", epoch="r1"), publish(harness, 0, epoch="r1")):
        with pytest.raises(StaleEpoch) as refused:
            await attempt
        assert (refused.value.writer, refused.value.epoch, refused.value.current) == ("q", "r1", "r2")
    assert [entry.handle for entry in harness.broker.stages(ANN)] == ["h2"], "what it had staged is gone"
    await publish(harness, 0, "h2", epoch="r2")
    assert await harness.values("t") == ["new"]


async def test_a_superseded_epoch_cannot_continue_what_it_began(harness: Harness) -> None:
    await harness.broker.stage(ANN, "h1", "t", RecordBatch([b"a"]), writer="q", epoch="r1")
    await publish(harness, 0, epoch="r2")
    with pytest.raises(UnknownStage):
        await harness.broker.stage(ANN, "h1", "t", RecordBatch([b"b"]), writer="q", epoch="r1")
    with pytest.raises(UnknownStage):
        await harness.broker.seal(ANN, "h1")


async def test_an_epoch_superseded_while_it_waited_is_rejected(harness: Harness) -> None:
    await put(harness, "h0", "a", epoch="r1")
    await put(harness, "h1", "b", epoch="r1")
    harness.engine.hold()
    first, second = (asyncio.ensure_future(publish(harness, number, f"h{number}", epoch="r1")) for number in (0, 1))
    await turns()
    newer = asyncio.ensure_future(publish(harness, 1, epoch="r2"))
    await turns()
    harness.engine.let_go()
    assert not (await first).already
    with pytest.raises(StaleEpoch):
        await second
    assert not (await newer).already
    assert await harness.values("t") == ["a"]


@pytest.mark.parametrize("published", [True, False])
async def test_a_superseded_epoch_is_rejected_after_a_crash(harness: Harness, published: bool) -> None:
    await put(harness, "h1", "a", epoch="r1")
    await publish(harness, 0, "h1", epoch="r1")
    await put(harness, "h2", "b", epoch="r2")
    if published:
        await publish(harness, 1, "h2", epoch="r2")
    await harness.crash()
    with pytest.raises(StaleEpoch):
        await put(harness, "h3", "c", epoch="r1")
    with pytest.raises(StaleEpoch):
        await publish(harness, 2, epoch="r1")
    await put(harness, "h4", "d", epoch="r2")
    assert harness.broker.last_version(ANN, "q") == (1 if published else 0)


async def test_epochs_of_one_writer_do_not_affect_another(harness: Harness) -> None:
    await put(harness, "h1", "a", writer="p", epoch="r1")
    await put(harness, "h2", "b", writer="q", epoch="r1")
    await put(harness, "h3", "c", writer="q", epoch="r2")
    await publish(harness, 0, "h1", writer="p", epoch="r1")
    assert await harness.values("t") == ["a"]


async def test_a_writer_without_epochs_supersedes_nothing(harness: Harness) -> None:
    await put(harness, "h1", "a", epoch="r1")
    await put(harness, "h2", "b")
    await publish(harness, 0, "h2")
    await publish(harness, 1, "h1", epoch="r1")
    assert await harness.values("t") == ["b", "a"]


async def test_writers_and_stages_are_listed(harness: Harness) -> None:
    await put(harness, "h1", "abc", "d", epoch="r1")
    await harness.broker.stage(ANN, "h2", "u", RecordBatch([b"xy"], [b"k"]), writer="q", epoch="r1")
    await harness.broker.stage(ANN, "h2", "t", RecordBatch([b"z"]), writer="q", epoch="r1")
    harness.clock.tick(500)
    listed = [
        (entry.handle, entry.writer, entry.records, entry.size_bytes, entry.by_topic, entry.age_ms, entry.is_sealed)
        for entry in harness.broker.stages(ANN)
    ]
    assert listed == [("h1", "q", 2, 4, {"t": 2}, 500, True), ("h2", "q", 2, 4, {"u": 1, "t": 1}, 500, False)]
    assert harness.broker.writers(ANN) == []
    await publish(harness, 4, "h1", epoch="r1")
    assert harness.broker.writers(ANN) == [WriterEntry("q", 4, harness.clock.now, "r1", False)]


async def test_a_forgotten_writer_starts_over(harness: Harness) -> None:
    await put(harness, "h1", "a", epoch="r1")
    await publish(harness, 9, epoch="r2")
    await put(harness, "h2", "a", epoch="r2")
    await harness.broker.forget_writer(ANN, "q")
    assert (harness.broker.stages(ANN), harness.broker.writers(ANN), harness.broker.last_version(ANN, "q")) == ([], [], None)
    await harness.crash()
    assert harness.broker.writers(ANN) == []
    assert not (await publish(harness, 0, epoch="r1")).already
    with pytest.raises(NoSuchEntry):
        await harness.broker.forget_writer(ANN, "unknown")


async def test_who_forgets_a_writer_is_noted(harness: Harness) -> None:
    audited: list[tuple[Principal, Action, str, str, bool]] = []
    harness.broker._authorizer._audit_hook = lambda *event: audited.append(event)
    await publish(harness, 0)
    await harness.broker.forget_writer(ANN, "q")
    assert audited == [(ANN, Action.DELETE, "writer", "q", True)]

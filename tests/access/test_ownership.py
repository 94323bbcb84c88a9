"""Confused deputies: a permission on a name gives no access to data of others under it. Delayed messages and exactly-once writers."""

from __future__ import annotations

import pytest

from headrace.access.audit import Query
from headrace.access.policy import Effect, Grant, Match, Rule
from headrace.broker import Action, Principal
from headrace.broker.authorizer import ANONYMOUS
from headrace.errors import InvalidRequest, NotAuthorized, StaleEpoch, UnknownMessage, UnknownStage
from headrace.limits import WRITER_TOPICS_REMEMBERED, WRITER_VERSION_FIRST_MAX, WRITER_VERSION_SKIP_MAX
from headrace.records import RecordBatch
from tests.access.harness import ADMIN, Guarded, guarded

ROOT = ADMIN.who


async def person(harness: Guarded, name: str, *grants: str) -> Principal:
    """Create a user with these grants, such as `publish topic:t`; a name that ends in `*` is a prefix."""
    who = await harness.user(name)
    for words in grants:
        await give(harness, name, words)
    return who


async def give(harness: Guarded, name: str, words: str, effect: Effect = Effect.ALLOW) -> None:
    actions, resource = words.split()
    kind, _, called = resource.partition(":")
    match = Match.PREFIX if called.endswith("*") else Match.LITERAL
    grant = Grant(frozenset(map(Action, actions.split(","))), kind, match, called.removesuffix("*"))
    await harness.administration.add_rule(ADMIN, Rule("*" if name == ANONYMOUS else f"user:{name}", effect, grant))


# Delayed messages.


async def test_a_delayed_message_is_listed_for_its_owner_and_for_readers_and_deleters_of_its_topic() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "t")
        owner = await person(harness, "owner", "publish topic:t")
        await harness.broker.publish_delayed(owner, "t", b"later", delay_ms=1_000, key=b"k")
        shown = {}
        for number, grant in enumerate(("publish", "describe", "publish,describe,alter", "read", "delete", "read,delete")):
            who = await person(harness, f"u{number}", f"{grant} topic:t")
            shown[grant] = [(one.key, one.owner) for one in harness.broker.delayed(who)]
        assert shown == {
            "publish": [],
            "describe": [],
            "publish,describe,alter": [],
            "read": [(b"k", None)],
            "delete": [(None, "owner")],
            "read,delete": [(b"k", "owner")],
        }
        assert [(one.key, one.owner, one.size_bytes) for one in harness.broker.delayed(owner, "t")] == [(b"k", "owner", 5)]
        assert harness.broker.delayed(owner, "u") == []


async def test_a_publisher_cannot_cancel_what_another_has_scheduled() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "t")
        owner, other = [await person(harness, name, "publish,read topic:t") for name in ("owner", "other")]
        id, _ = await harness.broker.publish_delayed(owner, "t", b"later", delay_ms=1_000)
        with pytest.raises(UnknownMessage):
            await harness.broker.cancel_delayed(other, id)
        await harness.broker.cancel_delayed(owner, id)
        assert harness.broker.delayed(ROOT) == []


async def test_a_principal_that_may_delete_the_topic_may_cancel_its_messages() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "t")
        owner, keeper = await person(harness, "owner", "publish topic:t"), await person(harness, "keeper", "delete topic:t")
        id, _ = await harness.broker.publish_delayed(owner, "t", b"later", delay_ms=1_000)
        await harness.broker.cancel_delayed(keeper, id, topic="t")
        assert harness.broker.delayed(ROOT) == []


async def test_a_message_that_is_not_there_and_one_of_another_get_the_same_answer() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "secret")
        mallory = await person(harness, "mallory", "publish,describe topic:own")
        there, _ = await harness.broker.publish_delayed(ROOT, "secret", b"later", delay_ms=1_000)
        answers = []
        for id in (there, "0" * 32):
            with pytest.raises(UnknownMessage) as refused:
                await harness.broker.cancel_delayed(mallory, id)
            answers.append(str(refused.value).replace(id, "ID"))
        assert answers == ["message not found: ID"] * 2


async def test_a_key_of_the_owner_that_leaves_out_the_topic_does_not_own_its_messages() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "t")
        owner = await person(harness, "owner", "publish topic:*")
        id, _ = await harness.broker.publish_delayed(owner, "t", b"later", delay_ms=1_000)
        made = await harness.administration.create_key(ADMIN, "owner", [Grant(frozenset({Action.PUBLISH}), "topic", Match.LITERAL, "u")])
        key = harness.access.verify_key(made.text, ADMIN)
        assert key is not None and key.name == "owner"
        assert harness.broker.delayed(key) == []
        with pytest.raises(UnknownMessage):
            await harness.broker.cancel_delayed(key, id)


async def test_those_without_a_login_do_not_see_each_others_messages_but_may_cancel_by_id() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "t")
        await give(harness, ANONYMOUS, "publish topic:t")
        anonymous = Principal(ANONYMOUS, "flymq")
        id, _ = await harness.broker.publish_delayed(anonymous, "t", b"later", delay_ms=1_000)
        assert harness.broker.delayed(anonymous) == []
        await harness.broker.cancel_delayed(anonymous, id)
        assert harness.broker.delayed(ROOT) == []


async def test_a_cancel_answered_as_unknown_is_audited_as_denied() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "t")
        mallory = await person(harness, "mallory", "publish topic:t")
        id, _ = await harness.broker.publish_delayed(ROOT, "t", b"later", delay_ms=1_000)
        harness.broker.delayed(mallory)
        for _ in range(2):
            with pytest.raises(UnknownMessage):
                await harness.broker.cancel_delayed(mallory, id)
        found = await harness.administration.audit(ADMIN, Query(types=frozenset({"denial"}), user="mallory"))
        assert [(noted.event.action, noted.event.resource) for noted in found.events] == [("delete", "topic:t")], "once"


# Exactly-once writers.


async def writer(harness: Guarded) -> Principal:
    """Return a principal whose writer `job-1` has published version 0 to topic `t` and has staged the next."""
    await harness.broker.create_topic(ROOT, "t")
    who = await person(harness, "writer", "publish topic:t", "publish writer:job-*")
    for handle in ("first", "second"):
        await harness.broker.stage(who, handle, "t", RecordBatch([handle.encode()]), writer="job-1", epoch="r1")
        await harness.broker.seal(who, handle)
    await harness.broker.publish_staged(who, "job-1", 0, ["first"], epoch="r1")
    return who


async def test_the_name_of_a_writer_is_not_enough_to_act_for_it() -> None:
    async with guarded() as harness:
        who = await writer(harness)
        await harness.broker.create_topic(ROOT, "own")
        mallory = await person(harness, "mallory", "publish,describe,delete writer:job-*", "publish topic:own")
        broker = harness.broker
        with pytest.raises(NotAuthorized):
            await broker.drop_staged(mallory, ["second"])
        with pytest.raises(NotAuthorized):
            await broker.seal(mallory, "second")
        for version in (0, 1, 1 << 62):
            for epoch in ("", "r1", "r2"):
                with pytest.raises(NotAuthorized) as refused:
                    await broker.publish_staged(mallory, "job-1", version, [], epoch=epoch)
                assert "'t'" not in str(refused.value), "the topic is hidden from mallory"
        with pytest.raises(NotAuthorized):
            broker.stage(mallory, "mine", "own", RecordBatch([b"x"]), writer="job-1", epoch="r2")
        with pytest.raises(NotAuthorized):
            await broker.seal(mallory, "mine", writer="job-1", epoch="r2")
        with pytest.raises(NotAuthorized):
            broker.last_version(mallory, "job-1")
        with pytest.raises(NotAuthorized) as refused:
            await broker.forget_writer(mallory, "job-1")
        assert "'t'" not in str(refused.value), "the topic is hidden from mallory"
        assert broker.writers(mallory) == [] and broker.stages(mallory) == []
        published = await broker.publish_staged(who, "job-1", 1, ["second"], epoch="r1")
        assert (published.already, published.records) == (False, 1)


async def test_a_writer_without_a_publication_is_forgotten_only_by_those_who_may_publish_to_the_topics_of_its_stages() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "t")
        await harness.broker.stage(ROOT, "h", "t", RecordBatch([b"x"]), writer="q")
        mallory = await person(harness, "mallory", "delete writer:q")
        with pytest.raises(NotAuthorized):
            await harness.broker.forget_writer(mallory, "q")
        assert [stage.handle for stage in harness.broker.stages(ROOT)] == ["h"]


async def test_delete_on_the_writer_and_publish_on_its_topics_are_enough_to_forget_it() -> None:
    async with guarded() as harness:
        await writer(harness)
        operator = await person(harness, "operator", "delete writer:job-1", "publish topic:t")
        await harness.broker.forget_writer(operator, "job-1")
        assert harness.broker.last_version(ROOT, "job-1") is None
        assert harness.broker.stages(ROOT) == []


async def test_a_writer_is_guarded_after_a_restart_too() -> None:
    async with guarded() as harness:
        await writer(harness)
        mallory = await person(harness, "mallory", "publish writer:job-*")
        again = Guarded(engine=harness.engine, clock=harness.clock)
        await again.broker.open()
        await again.access.open()
        with pytest.raises(NotAuthorized):
            await again.broker.publish_staged(mallory, "job-1", 1, [], epoch="r2")
        with pytest.raises(NotAuthorized):
            again.broker.last_version(mallory, "job-1")
        await again.access.close()


async def test_a_stage_of_a_writer_one_may_not_act_for_is_as_unknown_as_none() -> None:
    async with guarded() as harness:
        await writer(harness)
        mallory = await person(harness, "mallory", "publish topic:t", "publish writer:own")
        assert await harness.broker.drop_staged(mallory, ["second", "nothing"]) == 0
        for handle in ("second", "nothing"):
            with pytest.raises(UnknownStage):
                await harness.broker.seal(mallory, handle)
        with pytest.raises(UnknownStage):
            harness.broker.stage(mallory, "second", "t", RecordBatch([b"x"]), writer="own")
        assert [stage.handle for stage in harness.broker.stages(ROOT)] == ["second"]


async def test_an_epoch_belongs_to_the_principal_that_published_first_in_it() -> None:
    async with guarded() as harness:
        who = await writer(harness)
        other = await person(harness, "other", "publish topic:t", "publish writer:job-*")
        with pytest.raises(NotAuthorized, match="epoch 'r1' of writer 'job-1'"):
            await harness.broker.publish_staged(other, "job-1", 1, [], epoch="r1")
        with pytest.raises(StaleEpoch):
            await harness.broker.publish_staged(other, "job-1", 1, [])
        assert harness.broker.last_version(who, "job-1") == 0
        await harness.broker.publish_staged(other, "job-1", 1, [], epoch="r2")
        with pytest.raises(StaleEpoch):
            await harness.broker.publish_staged(who, "job-1", 2, ["second"], epoch="r1")


async def test_a_version_published_under_a_taken_name_does_not_count_for_others() -> None:
    async with guarded() as harness:
        await harness.broker.create_topic(ROOT, "own")
        mallory = await person(harness, "mallory", "publish writer:job-*", "publish topic:own")
        await harness.broker.stage(mallory, "mine", "own", RecordBatch([b"x"]), writer="job-1")
        await harness.broker.seal(mallory, "mine")
        await harness.broker.publish_staged(mallory, "job-1", 1_000, ["mine"])
        await harness.broker.create_topic(ROOT, "t")
        who = await person(harness, "writer", "publish topic:t", "publish writer:job-*")
        with pytest.raises(NotAuthorized):
            await harness.broker.publish_staged(who, "job-1", 0, [], epoch="r1")


async def test_a_writer_whose_topic_was_deleted_continues_with_another() -> None:
    async with guarded() as harness:
        who = await writer(harness)
        await harness.broker.delete_topic(ROOT, "t")
        await give(harness, "writer", "publish topic:t", Effect.DENY)
        assert harness.broker.last_version(who, "job-1") == 0
        assert not (await harness.broker.publish_staged(who, "job-1", 1, [], epoch="r1")).already


@pytest.mark.parametrize("last", [None, 0, 7, 20_261_115, 1_800_000_000_000])
async def test_a_version_that_skips_far_ahead_is_refused(last: int | None) -> None:
    async with guarded() as harness:
        if last is not None:
            await harness.broker.publish_staged(ROOT, "q", last, [])
        most = WRITER_VERSION_FIRST_MAX if last is None else last + max(WRITER_VERSION_SKIP_MAX, last)
        for version in (most + 1, (1 << 63) - 1):
            with pytest.raises(InvalidRequest, match=f"version {version} of writer 'q'.*at most {most}"):
                await harness.broker.publish_staged(ROOT, "q", version, [])
        assert harness.broker.last_version(ROOT, "q") == last
        await harness.broker.publish_staged(ROOT, "q", most, [])
        assert harness.broker.last_version(ROOT, "q") == most


async def test_of_very_many_topics_some_are_remembered() -> None:
    async with guarded() as harness:
        count = WRITER_TOPICS_REMEMBERED + 1
        for number in range(count):
            await harness.broker.create_topic(ROOT, f"t{number}")
            await harness.broker.stage(ROOT, "h", f"t{number}", RecordBatch([b"x"]), writer="q")
        await harness.broker.seal(ROOT, "h")
        await harness.broker.publish_staged(ROOT, "q", 0, ["h"])
        (writer_name,) = harness.broker._stages._writers.writers.values()
        assert len(writer_name.topics) == WRITER_TOPICS_REMEMBERED

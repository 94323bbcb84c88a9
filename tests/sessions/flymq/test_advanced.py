"""Dead letters, delay, time to live and the cluster through the FlyMQ protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.broker.authorizer import Action, Principal, Resource
from headrace.engine.contract import TopicConfig
from headrace.limits import DELAY_MS_MAX
from headrace.records import RecordBatch
from headrace.wire.flymq import encode_request
from headrace.wire.flymq.advanced_messages import (
    BrokerCall,
    BrokerReply,
    CancelDelayed,
    ClusterJoin,
    ClusterLeave,
    ClusterNode,
    ClusterReport,
    ClusterStatus,
    DlqDetail,
    DlqEntries,
    DlqEntry,
    FetchDlq,
    Header,
    Placed,
    ProduceDelayed,
    ProduceWithTtl,
    PurgeDlq,
    ReplayDlq,
    Scheduled,
)
from headrace.wire.flymq.messages import Consume, CreateTopic, Done, Fetch, Fetched, ProduceBatch
from tests.sessions.flymq.support import DEV, NOW, ListenerContext, Peer, rest, running_server
from tests.wire.flymq.samples import raw


async def _bury(server: ListenerContext, *values: bytes) -> None:
    await server.broker.ensure_topic(DEV, "t")
    for value in values:
        published = await server.broker.publish(DEV, "t", RecordBatch([value], [b"k"], [(("own", b"1"),)]))
        await server.broker.move_to_dead_letters(DEV, "t", published.partition, published.base_offset, error="no good")


async def _call(peer: Peer, operation: str, **arguments: object) -> Any:
    reply = await peer.one(BrokerCall(operation, json.dumps(arguments).encode()))
    assert isinstance(reply, BrokerReply), reply
    return json.loads(reply.body)


# Dead letters.


async def test_without_dead_letters_there_are_none_and_a_purge_is_done() -> None:
    async with running_server() as server:
        peer = server.peer()
        assert await peer.one(FetchDlq("t", 10)) == DlqEntries([], [])
        assert await peer.one(PurgeDlq("t")) == Done(True, "purged 0")


async def test_a_dead_letter_is_shown_with_all_that_is_known_of_it() -> None:
    async with running_server() as server:
        await _bury(server, b"a")
        reply = await server.peer().one(FetchDlq("t", 10))
        entry, detail = DlqEntry("0-0", b"a", "moved: no good", 0), DlqDetail(b"k", 0, 0, NOW, NOW, -1, [Header("own", b"1")])
        assert reply == DlqEntries([entry], [detail])


async def test_a_replayed_dead_letter_is_back_and_no_longer_waits() -> None:
    async with running_server() as server:
        await _bury(server, b"a", b"b")
        peer = server.peer()
        assert await peer.one(ReplayDlq("t", "0-1")) == Done(True, "replayed to partition 0, offset 2")
        assert await peer.refused(ReplayDlq("t", "0-1")) == "message not found: 0-1"
        reply = await peer.one(FetchDlq("t", 0))
        assert isinstance(reply, DlqEntries) and [entry.id for entry in reply.entries] == ["0-0"]
        reply = await peer.one(FetchDlq("t", 0, "0-0", True))
        assert isinstance(reply, DlqEntries) and [entry.id for entry in reply.entries] == ["0-1"]
        fetched = await peer.one(Fetch("t", 0, 2, 1))
        assert isinstance(fetched, Fetched) and (fetched.values, fetched.keys) == ([b"b"], [b"k"])


async def test_a_dead_letter_may_be_named_by_its_offset() -> None:
    async with running_server() as server:
        await _bury(server, b"a")
        peer = server.peer()
        peer.session.receive(raw(0x21, b"\x00\x01t" + (0).to_bytes(8, "big")))
        assert await peer.replies(1) == [Done(True, "replayed to partition 0, offset 1")]


async def test_after_a_purge_nothing_waits() -> None:
    async with running_server() as server:
        await _bury(server, b"a", b"b")
        peer = server.peer()
        assert await peer.one(PurgeDlq("t")) == Done(True, "purged 2")
        assert await peer.one(FetchDlq("t", 10)) == DlqEntries([], [])


async def test_expired_records_of_a_topic_that_keeps_them_are_dead_letters() -> None:
    async with running_server() as server:
        await server.broker.create_topic(DEV, "t", config=TopicConfig(dead_letter_expired=True))
        peer = server.peer()
        await peer.one(ProduceWithTtl("t", b"a", 500))
        server.now += 500
        await server.broker.maintain()
        reply = await peer.one(FetchDlq("t", 10))
        assert isinstance(reply, DlqEntries) and [(one.value, one.error) for one in reply.entries] == [(b"a", "expired")]


# Delay and time to live.


async def test_a_delayed_record_comes_when_its_time_has_come() -> None:
    async with running_server() as server:
        peer = server.peer()
        reply = await peer.one(ProduceDelayed("t", b"later", 20, b"k", 0))
        assert isinstance(reply, Scheduled)
        assert reply == Scheduled("t", 0, 0, NOW, 1, 5, reply.message, NOW + 20)
        server.now += 19
        early = await server.broker.fetch(DEV, "t", 0, 0, bytes_max=1, wait_ms=30)
        assert early.batches == [], "not yet, by the clock of the broker"
        server.now += 1
        assert (await server.broker.fetch(DEV, "t", 0, 0, bytes_max=1, wait_ms=10_000)).batches
        fetched = await peer.one(Fetch("t", 0, 0, 10))
        assert isinstance(fetched, Fetched) and (fetched.values, fetched.keys) == ([b"later"], [b"k"])


async def test_a_delayed_record_is_cancelled_by_its_id() -> None:
    async with running_server() as server:
        peer = server.peer()
        first, second = [await peer.one(ProduceDelayed("t", b"x", 60_000)) for _ in range(2)]
        assert isinstance(first, Scheduled) and isinstance(second, Scheduled)
        assert [row["id"] for row in await _call(peer, "delayed.list")] == [first.message, second.message]
        assert await peer.one(CancelDelayed(first.message, "t")) == Done(True, "cancelled")
        assert await peer.refused(CancelDelayed(first.message, "t")) == f"message not found: {first.message}"
        assert await peer.refused(CancelDelayed(second.message, "u")) == f"message not found: {second.message}"
        assert await peer.one(CancelDelayed(second.message)) == Done(True, "cancelled")
        assert await _call(peer, "delayed.list", topic="t") == []


async def test_a_request_of_the_originals_length_is_understood() -> None:
    async with running_server() as server:
        peer = server.peer()
        payload = encode_request(ProduceWithTtl("t", b"x", 5))[8:-8]
        peer.session.receive(raw(0x35, payload) + raw(0x30, payload))
        placed, scheduled = await peer.replies(2)
        assert placed == Placed("t", 0, 0, NOW, -1, 1)
        assert isinstance(scheduled, Scheduled) and scheduled.deliver_at == NOW + 5


async def test_an_expired_record_is_hidden_from_every_request() -> None:
    async with running_server() as server:
        peer = server.peer()
        assert await peer.one(ProduceWithTtl("t", b"short", 100, b"k")) == Placed("t", 0, 0, NOW, 1, 5)
        await peer.exchange(ProduceBatch("t", [b"long"]))
        server.now += 99
        assert isinstance(seen := await peer.one(Fetch("t", 0, 0, 10)), Fetched) and seen.values == [b"short", b"long"]
        server.now += 1
        assert isinstance(seen := await peer.one(Fetch("t", 0, 0, 10)), Fetched) and (seen.values, seen.next_offset) == ([b"long"], 2)
        assert await peer.refused(Consume("t", 0, 0)) == "message expired: offset 0"


async def test_a_time_to_live_of_zero_is_the_topics() -> None:
    async with running_server() as server:
        await server.broker.create_topic(DEV, "t", config=TopicConfig(ttl_ms=50))
        peer = server.peer()
        await peer.exchange(ProduceWithTtl("t", b"own", 1_000), ProduceWithTtl("t", b"topic's", 0), ProduceBatch("t", [b"plain"]))
        server.now += 50
        fetched = await peer.one(Fetch("t", 0, 0, 10))
        assert isinstance(fetched, Fetched) and fetched.values == [b"own"]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (ProduceDelayed("t", b"x", DELAY_MS_MAX + 1), "a delay of"),
        (ProduceDelayed("t", b"x", 1, b"", 9), "partition 9 not found"),
        (ProduceDelayed("__t", b"x", 1), "topic name"),
        (ProduceWithTtl("t", b"x", -1), "a record cannot live for -1 ms"),
        (ProduceWithTtl("t", b"x", 1 << 62), "a record cannot live for"),
        (CancelDelayed("nothing"), "message not found: nothing"),
        (ReplayDlq("t", "nothing"), "message not found: nothing"),
        (ReplayDlq("none", "0-0"), "topic not found: none"),
        (BrokerCall("no.verb"), "unknown operation 'no.verb'"),
        (BrokerCall("topic.describe", b"{"), "topic.describe: "),
        (BrokerCall("topic.describe", b"{}"), "topic.describe: "),
        (BrokerCall("topic.create", b'{"topic":"u","config":{"ttl_ms":-1}}'), "ttl_ms cannot be -1"),
        (BrokerCall("topic.create", b'{"topic":"u","config":{"colour":1}}'), "topic.create: "),
    ],
    ids=repr,
)
async def test_what_cannot_be_done_is_refused_in_words(request_: Any, text: str) -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.one(CreateTopic("t", 1))
        assert (await peer.refused(request_)).startswith(text)
        assert server.broker.delayed(DEV) == []


# The cluster, and operations of BROKER.


async def test_the_cluster_is_this_node_and_no_node_joins_or_leaves() -> None:
    async with running_server() as server:
        peer = server.peer()
        await peer.exchange(CreateTopic("t", 2), ProduceBatch("t", [b"a", b"b", b"c"]))
        server.now += 3_723_000
        assert await peer.one(ClusterStatus()) == ClusterReport(
            "standalone", "headrace", 1, 3, 1, 1, 3, [ClusterNode("headrace", "127.0.0.1:9092", "", "online", "leader", True, "1h2m3s")]
        )
        assert "clustering is not enabled" in await peer.refused(ClusterJoin("10.0.0.7:9093"))
        assert "the only node" in await peer.refused(ClusterLeave())


async def test_topics_are_made_described_changed_and_removed() -> None:
    async with running_server() as server:
        peer = server.peer()
        made = await _call(peer, "topic.create", topic="t", partitions=2, config={"ttl_ms": 1_000, "ack": "written"})
        assert (made["name"], made["partitions"], made["config"]["ttl_ms"]) == ("t", [{"first": 0, "end": 0}] * 2, 1_000)
        assert "already exists" in await peer.refused(BrokerCall("topic.create", b'{"topic":"t"}'))
        changed = await _call(peer, "topic.alter", topic="t", partitions=3, config={"retention_bytes": 5})
        assert changed["config"] == made["config"] | {"retention_bytes": 5}
        assert changed == await _call(peer, "topic.describe", topic="t")
        assert await _call(peer, "topic.list") == [changed]
        assert await _call(peer, "topic.delete", topic="t") == {}
        assert await peer.refused(BrokerCall("topic.delete", b'{"topic":"t"}')) == "topic not found: t"


async def test_groups_and_dead_letters_are_listed() -> None:
    async with running_server() as server:
        await _bury(server, b"a", b"b")
        await server.broker.commit(DEV, "g", {("t", 0): 1})
        peer = server.peer()
        assert await _call(peer, "group.list") == ["g"]
        lag = {"topic": "t", "partition": 0, "committed": 1, "end": 2, "lag": 1, "moved_at": server.now}
        assert await _call(peer, "group.lag", group="g") == [lag]
        assert await _call(peer, "group.delete", group="g") == {}
        assert await peer.refused(BrokerCall("group.lag", b'{"group":"g"}')) == "consumer group not found: g"
        assert await peer.refused(BrokerCall("group.delete", b'{"group":"g"}')) == "consumer group not found: g"
        assert await _call(peer, "dlq.list") == [{"topic": "t", "waiting": 2}]
        assert await _call(peer, "dlq.replay", topic="t", ids=["0-0", "0-1"]) == {"0-0": [0, 2], "0-1": [0, 3]}
        assert await _call(peer, "dlq.list") == [{"topic": "t", "waiting": 0}]


async def test_every_request_is_authorized() -> None:
    def only_topic_u(who: Principal, action: Action, resource: Resource) -> bool:
        return resource.name == "u"

    async with running_server(authorize=only_topic_u) as server:
        peer = server.peer()
        for request in (
            FetchDlq("t", 1),
            ReplayDlq("t", "0-0"),
            PurgeDlq("t"),
            ProduceDelayed("t", b"", 1),
            ProduceWithTtl("t", b"", 1),
            ClusterStatus(),
            BrokerCall("topic.create", b'{"topic":"t"}'),
            BrokerCall("group.lag", b'{"group":"g"}'),
        ):
            assert (await peer.refused(request)).startswith("unauthorized"), request
        await rest()
        assert [topic.name for topic in server.engine.topics().values() if not topic.internal] == []

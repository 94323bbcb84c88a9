from __future__ import annotations

from headrace.broker.broker import Broker
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.wire.blipmq import Nack, encoder
from tests.sessions.blipmq.support import KEYS, rest, running_server

DEV = KEYS[b"dev-key"]
UNKNOWN = "unknown subscription or delivery tag"


async def test_what_is_not_acknowledged_comes_again_with_the_same_tag_after_100_then_200_ms() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", b"a", b"b")
        assert await peer.poll(subscription) == [(1, 1, b"a")]
        await broker.clock.advance(99)
        assert await peer.poll(subscription, 5) == [(1, 2, b"b")]
        assert await peer.exchange(encoder.acks(subscription, [2])) == []
        await broker.clock.advance(1)
        assert await peer.poll(subscription, 5) == [(1, 1, b"a")], "the first wait is 100 ms"
        await broker.clock.advance(199)
        assert await peer.poll(subscription, 5) == []
        await broker.clock.advance(1)
        assert await peer.poll(subscription, 5) == [(1, 1, b"a")], "the second is 200 ms"
        assert await peer.exchange(encoder.acks(subscription, [1])) == []
        await broker.clock.advance(60_000)
        assert await peer.poll(subscription, 5) == []


async def test_the_third_time_out_makes_a_dead_letter_that_says_where_it_came_from() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", b"poison", b"good")
        assert await peer.poll(subscription, 2) == [(1, 1, b"poison"), (1, 2, b"good")]
        assert await peer.exchange(encoder.acks(subscription, [2])) == []
        for wait in (100, 200):
            await broker.clock.advance(wait)
            assert await peer.poll(subscription, 5) == [(1, 1, b"poison")]
        await broker.clock.advance(399)
        assert "demo.dlq" not in broker.engine.topics()
        await broker.clock.advance(1)
        assert await peer.poll(subscription, 5) == []
        await broker.clock.advance(1_000)
        assert broker.values("demo.dlq") == [b"poison"]
        (batch,) = broker.engine._find("demo.dlq", 0).batches
        headers = dict((batch.headers() or [()])[0])
        assert (headers["x-headrace-source-topic"], headers["x-headrace-source-offset"]) == (b"demo", b"0")
        assert await peer.exchange(encoder.acks(subscription, [1])) == [Nack(1, 404, UNKNOWN)]


async def test_a_late_ack_of_a_message_that_waits_to_come_again_is_accepted() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", b"v")
        assert await peer.poll(subscription) == [(1, 1, b"v")]
        await broker.clock.advance(150)
        assert await peer.exchange(encoder.acks(subscription, [1])) == []
        assert await peer.poll(subscription) == []


async def test_the_timings_are_the_operators() -> None:
    async with running_server(BlipMqSettings(retry_backoff_ms=5_000, max_retries=2)) as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", b"v")
        assert await peer.poll(subscription) == [(1, 1, b"v")]
        await broker.clock.advance(4_999)
        assert await peer.poll(subscription) == []
        await broker.clock.advance(1)
        assert await peer.poll(subscription) == [(1, 1, b"v")]
        await broker.clock.advance(10_000)
        assert await peer.poll(subscription) == []
        await broker.clock.advance(1_000)
        assert broker.values("demo.dlq") == [b"v"]


async def test_a_subscription_outlives_its_connection_and_any_connection_of_its_key_may_use_it() -> None:
    async with running_server() as broker:
        first, second = await broker.client(), await broker.client()
        subscriptions = [await first.subscribe("demo", qos) for qos in (0, 1)]
        first.session.lost()
        await second.publish("demo", b"v")
        for subscription in subscriptions:
            ((_, tag, value),) = await second.poll(subscription, 2)
            assert value == b"v"
        assert await second.exchange(encoder.acks(subscriptions[1], [tag])) == []


async def test_a_subscription_of_another_key_is_as_unknown_as_none() -> None:
    async with running_server() as broker:
        mine, other = await broker.client(), await broker.client(b"ops-key")
        subscription = await mine.subscribe("demo")
        await mine.publish("demo", b"v")
        assert await mine.poll(subscription) == [(1, 1, b"v")]
        assert await other.exchange(encoder.polls(subscription, [5]) + encoder.acks(subscription, [1])) == [
            Nack(5, 404, UNKNOWN),
            Nack(1, 404, UNKNOWN),
        ]
        assert await mine.exchange(encoder.acks(subscription, [1])) == []


async def test_a_subscription_is_forgotten_when_no_open_connection_has_used_it_for_ten_minutes() -> None:
    async with running_server() as broker:
        owner, other = await broker.client(), await broker.client()
        kept, idle = await owner.subscribe("demo"), await other.subscribe("demo")
        live = await other.subscribe("demo", 0)
        other.session.lost()
        await broker.clock.advance(9 * 60_000)
        assert await owner.poll(kept) == []
        assert len(broker.subscriptions) == 3
        await broker.clock.advance(5 * 60_000)
        assert await owner.poll(kept) == [], "a connection that holds it is open, however silent"
        for gone in (idle, live):
            assert await owner.exchange(encoder.polls(gone, [5])) == [Nack(5, 404, UNKNOWN)]
        assert broker.broker.groups(DEV) == [f"blipmq-{kept}"], "its group is gone too"
        await broker.restart()
        assert len(broker.subscriptions) == 1, "and it does not come back with a restart"


async def test_a_qos_1_subscription_survives_a_restart_with_its_id_and_its_backlog() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", *[b"%d" % index for index in range(10)])
        taken = await peer.poll(subscription, 6)
        assert await peer.exchange(encoder.acks(subscription, [tag for _, tag, _ in taken[:5]])) == []
        peer.session.lost()
        await broker.restart()
        again = await broker.client()
        assert [value for _, _, value in await again.poll(subscription, 20)] == [b"%d" % index for index in range(5, 10)]


async def test_a_qos_1_subscription_that_never_polled_keeps_its_start_over_a_restart() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.publish("demo", b"before")
        subscription = await peer.subscribe("demo")
        await peer.publish("demo", b"after")
        peer.session.lost()
        await broker.restart()
        assert [value for _, _, value in await (await broker.client()).poll(subscription, 5)] == [b"after"]


async def test_after_a_restart_a_new_subscribe_takes_over_an_unused_backlog() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        old = await peer.subscribe("demo")
        await peer.publish("demo", b"a", b"b")
        peer.session.lost()
        await broker.restart()
        peer = await broker.client()
        new = await peer.subscribe("demo")
        assert new != old
        assert [value for _, _, value in await peer.poll(new, 5)] == [b"a", b"b"]
        assert await peer.exchange(encoder.polls(old, [5])) == [Nack(5, 404, UNKNOWN)]
        second = await peer.subscribe("demo")
        assert await peer.poll(second, 5) == [], "there was one backlog, and it is taken"
        peer.session.lost()
        await broker.restart()
        assert [value for _, _, value in await (await broker.client()).poll(new, 5)] == [b"a", b"b"], "the new id is durable"


async def test_a_takeover_whose_connection_is_lost_halfway_hides_no_backlog() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        await peer.subscribe("demo")
        await peer.publish("demo", b"a")
        peer.session.lost()
        await broker.restart()
        peer = await broker.client()
        assert await peer.poll(await peer.subscribe("other"), 1) == []
        broker.engine.hold()
        peer.session.receive(encoder.subscribe(7, "demo", 1))
        await rest()
        peer.session.lost()
        broker.engine.release()
        await rest()
        assert len(broker.subscriptions) == 2, "it was finished, though nobody hears of it"
        await broker.restart()
        again = await broker.client()
        assert [value for _, _, value in await again.poll(await again.subscribe("demo"), 5)] == [b"a"]


async def test_a_backlog_is_not_taken_over_by_qos_0_by_another_key_for_another_topic_or_once_it_is_in_use() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        old = await peer.subscribe("demo")
        await peer.publish("demo", b"a")
        peer.session.lost()
        await broker.restart()
        peer, other = await broker.client(), await broker.client(b"ops-key")
        for caller, topic, qos in ((peer, "demo", 0), (other, "demo", 1), (peer, "other", 1)):
            assert await caller.poll(await caller.subscribe(topic, qos), 5) == []
        assert [value for _, _, value in await peer.poll(old, 5)] == [b"a"]
        assert await peer.poll(await peer.subscribe("demo"), 5) == []


async def test_qos_0_subscriptions_end_with_a_restart_and_no_id_is_ever_given_twice() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        ids = [await peer.subscribe("demo", qos) for qos in (0, 1, 0)]
        peer.session.lost()
        await broker.restart()
        peer = await broker.client()
        assert await peer.exchange(encoder.polls(ids[0], [5])) == [Nack(5, 404, UNKNOWN)]
        ids += [await peer.subscribe("demo", qos) for qos in (0, 1, 0)]
        assert len(set(ids)) == 6


async def test_a_restored_subscription_whose_topic_is_gone_is_unknown() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        subscription = await peer.subscribe("demo")
        peer.session.lost()
        await broker.restart()
        await _delete(broker.broker)
        assert await (await broker.client()).exchange(encoder.polls(subscription, [5])) == [Nack(5, 404, UNKNOWN)]
        assert len(broker.subscriptions) == 0


async def _delete(broker: Broker) -> None:
    await broker.delete_topic(DEV, "demo")

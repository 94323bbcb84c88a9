"""Publishing over Figg: order, acknowledgement, windows, errors."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.publishing.published import Published
from headrace.broker.settings import BrokerSettings
from headrace.errors import BrokerError, DiskFull, StorageFailed
from headrace.limits import VALUE_BYTES_MAX
from headrace.records import RecordBatch
from headrace.sessions.figg.session import FiggSettings
from headrace.sessions.session import RECORD_OVERHEAD_BYTES
from headrace.wire.figg import AckBatch, Pong, encode
from tests.sessions.figg.peer import WHO, Peer, figg_peer


async def test_a_publish_is_acknowledged_when_it_is_durable_and_not_before() -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.engine.is_holding = True
        peer.say(encode.publish("t", [0], [b"v"]))
        await peer.settle()
        assert peer.link.sent == b""
        peer.engine.release()
        await peer.until(lambda: peer.acks() == [0])
        assert await peer.values_in("t") == [b"v"]


class ControlledFutures:
    """Stands between a session and its broker: the test resolves each publish when it likes."""

    def __init__(self, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.futures: list[asyncio.Future[Published]] = []
        monkeypatch.setattr(peer.broker, "publish", self.publish)
        monkeypatch.setattr(peer.broker, "publish_one", self.publish_one)

    def publish(self, who: Principal, topic: str, batch: RecordBatch, *, partition: int) -> asyncio.Future[Published]:
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]

    def publish_one(self, who: Principal, topic: str, value: bytes, *, partition: int) -> asyncio.Future[Published]:
        return self.publish(who, topic, RecordBatch([value]), partition=partition)

    def finish(self, index: int) -> None:
        self.futures[index].set_result(Published(0, 0, 1, 0))

    def fail(self, index: int, failure: BrokerError) -> None:
        self.futures[index].set_exception(failure)


async def test_an_ack_waits_for_all_earlier_publishes_of_any_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    async with figg_peer() as peer:
        control = ControlledFutures(peer, monkeypatch)
        for seq, topic in enumerate(["a", "b", "a", "c"]):
            peer.say(encode.publish(topic, [seq], [b"v"]))
        control.finish(1)
        control.finish(3)
        await peer.settle()
        assert peer.acks() == []
        control.finish(0)
        await peer.settle()
        assert peer.acks() == [0, 1]
        control.finish(2)
        await peer.settle()
        assert peer.acks() == [0, 1, 2, 3]


async def test_few_publishes_are_acknowledged_one_by_one_and_many_by_the_highest_number() -> None:
    async with figg_peer(FiggSettings(acks_apart_max=8)) as peer:
        peer.say(encode.publish("t", range(8), [b"v"] * 8))
        await peer.until(lambda: peer.acks() == list(range(8)))
        peer.say(encode.publish("t", range(8, 17), [b"v"] * 9))
        await peer.until(lambda: peer.acks() == [*range(8), 16])


async def test_one_flush_of_many_batches_is_one_ack() -> None:
    async with figg_peer() as peer:
        for topic in ("a", "b"):
            await peer.broker.ensure_topic(WHO, topic)
        peer.engine.is_holding = True
        for seq in range(0, 100, 10):
            peer.say(encode.publish("ab"[seq // 10 % 2], range(seq, seq + 10), [b"v"] * 10))
        peer.engine.release()
        await peer.until(lambda: bool(peer.look()))
        await peer.settle()
        assert peer.look() == [AckBatch([99])]


async def test_the_switch_gives_every_publish_its_own_ack() -> None:
    async with figg_peer(FiggSettings(ack_each=True)) as peer:
        peer.say(encode.publish("t", range(500), [b"v"] * 500))
        await peer.until(lambda: peer.acks() == list(range(500)))


async def test_sequence_numbers_need_not_start_at_zero_nor_be_unique_nor_rise() -> None:
    async with figg_peer() as peer:
        for seqs in ([70], [70], [3], [1 << 63]):
            peer.say(encode.publish("t", seqs, [b"v"]))
        await peer.until(lambda: peer.acks() == [70, 70, 3, 1 << 63])
        peer.say(encode.publish("t", [5, 900, *range(20)], [b"v"] * 22))
        await peer.until(lambda: peer.acks()[4:] == [900])
        assert len(await peer.values_in("t")) == 26


async def test_an_unknown_topic_is_made_while_the_connection_is_not_read_and_the_order_is_kept() -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "known")
        peer.engine.may_create.clear()
        peer.say(
            encode.publish("new", [0], [b"a"]), encode.publish("known", [1], [b"b"]), encode.publish("new", [2], [b"c"]), encode.ping(9)
        )
        peer.say(encode.publish("new", [3], [b"d"])[:10])  # what the socket had already read
        peer.say(encode.publish("new", [3], [b"d"])[10:])
        await peer.settle()
        assert (peer.link.pauses, peer.link.sent) == (1, b"")
        peer.engine.may_create.set()
        await peer.until(lambda: peer.acks() == [0, 1, 2, 3])
        assert peer.link.pauses == 0
        assert Pong(9) in peer.look()
        assert await peer.values_in("new") == [b"a", b"c", b"d"]


async def test_two_unknown_topics_in_one_read_are_made_one_after_the_other() -> None:
    async with figg_peer() as peer:
        peer.say(*(encode.publish(f"t{index}", [index], [b"v"]) for index in range(5)))
        await peer.until(lambda: peer.acks() == [0, 1, 2, 3, 4])
        assert peer.link.pauses == 0


async def test_a_window_of_unacknowledged_bytes_stops_the_reading_until_half_of_it_is_done() -> None:
    size_bytes = 1_000 + RECORD_OVERHEAD_BYTES
    async with figg_peer(FiggSettings(in_flight_bytes_max=10 * size_bytes)) as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.engine.is_holding = True
        peer.say(encode.publish("t", range(10), [bytes(1_000)] * 10))
        assert peer.link.pauses == 0
        peer.say(encode.publish("t", [10], [bytes(1_000)]))
        peer.say(encode.publish("t", [11], [bytes(1_000)]))
        assert peer.link.pauses == 1
        peer.engine.release()
        await peer.until(lambda: peer.acks()[-1:] == [11])
        assert (peer.link.pauses, peer.link.pause_count) == (0, 1)


async def test_a_flood_of_empty_records_fills_the_window_too() -> None:
    async with figg_peer(FiggSettings(in_flight_bytes_max=100 * RECORD_OVERHEAD_BYTES)) as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.engine.is_holding = True
        peer.say(encode.publish("t", range(101), [b""] * 101))
        assert peer.link.pauses == 1


async def test_a_publish_that_fails_closes_the_connection_and_is_never_acknowledged() -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.say(encode.publish("t", [0], [b"v"]))
        await peer.until(lambda: peer.acks() == [0])
        peer.engine.failure = DiskFull("no room")
        peer.say(encode.publish("t", [1], [b"w"]))
        await peer.until(peer.is_closed)
        assert peer.is_refused() and peer.reason() == "disk_full: no room"
        assert peer.acks() == [0]


async def test_a_failure_is_not_covered_by_the_ack_of_a_later_success(monkeypatch: pytest.MonkeyPatch) -> None:
    async with figg_peer() as peer:
        control = ControlledFutures(peer, monkeypatch)
        for seq in range(4):
            peer.say(encode.publish("t", [seq], [b"v"]))
        control.finish(2)
        control.fail(1, StorageFailed("sync failed"))
        await peer.settle()
        assert not peer.is_closed(), "the first one is still under way and has a right to its ACK"
        control.finish(0)
        await peer.settle()
        assert peer.acks() == [0]
        assert peer.is_refused() and peer.reason() == "storage_failed: sync failed"
        control.finish(3)
        await peer.settle()


async def test_a_refused_publish_lets_the_earlier_ones_be_acknowledged_first() -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.engine.is_holding = True
        peer.say(encode.publish("t", [0], [b"v"]), encode.publish("no such name", [1], [b"v"]), encode.publish("t", [2], [b"never"]))
        await peer.settle()
        assert not peer.is_closed()
        peer.say(encode.publish("t", [3], [b"never"]))
        peer.engine.release()
        await peer.until(peer.is_closed)
        assert peer.reason().startswith("invalid_topic_name: ")
        assert peer.acks() == [0]
        assert await peer.values_in("t") == [b"v"]


@pytest.mark.parametrize("topic", ["", " ", ".", "..", "__offsets", "x" * 250, "tab\there", "e\u0301"])
async def test_a_bad_topic_name_closes_the_connection(topic: str) -> None:
    for frames in (encode.publish(topic, [0], [b"v"]), encode.attach(topic)):
        async with figg_peer() as peer:
            peer.say(frames)
            await peer.until(peer.is_closed)
            assert peer.is_refused()
            assert peer.link.sent == b""


async def test_a_record_above_the_limit_closes_the_connection() -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.say(encode.publish("t", [0], [bytes(VALUE_BYTES_MAX)]))
        await peer.until(lambda: peer.acks() == [0])
        peer.say(encode.publish("t", [1], [bytes(VALUE_BYTES_MAX + 1)]))
        await peer.until(peer.is_closed)
        assert peer.reason().startswith("record_too_large: ")


async def test_without_auto_creation_an_unknown_topic_closes_the_connection() -> None:
    async with figg_peer(broker_settings=BrokerSettings(auto_create=False)) as peer:
        peer.say(encode.publish("t", [0], [b"v"]))
        await peer.until(peer.is_closed)
        assert peer.is_refused() and peer.reason() == "unknown_topic: topic 't' not found"


async def test_who_may_not_publish_is_closed_without_an_ack() -> None:
    def authorize(who: Principal, action: Action, resource: Resource) -> bool:
        return action is not Action.PUBLISH

    async with figg_peer(authorize=authorize) as peer:
        peer.say(encode.publish("t", [0], [b"v"]))
        await peer.until(peer.is_closed)
        assert peer.reason().startswith("not_authorized: ")
        assert peer.acks() == []


async def test_a_lost_connection_forgets_its_window_and_nothing_is_sent_to_it() -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.engine.is_holding = True
        peer.say(encode.publish("t", [0], [b"v"]))
        peer.session.lost()
        peer.engine.release()
        await peer.settle()
        assert peer.link.sent == b""
        assert await peer.values_in("t") == [b"v"]


async def test_draining_acknowledges_what_was_received_and_then_closes() -> None:
    async with figg_peer() as peer:
        peer.engine.is_holding = True
        peer.engine.may_create.clear()
        peer.say(encode.publish("new", [0], [b"v"]), encode.publish("new", [1], [b"w"]))
        peer.session.closing()
        await peer.settle()
        assert not peer.is_closed() and peer.link.pauses > 0
        peer.engine.may_create.set()
        peer.engine.release()
        await peer.until(peer.is_closed)
        assert not peer.is_refused() and peer.reason() == "finished"
        assert peer.acks() == [0, 1]


async def test_draining_an_idle_connection_closes_it_at_once() -> None:
    async with figg_peer() as peer:
        peer.session.closing()
        assert not peer.is_refused() and peer.reason() == "finished"

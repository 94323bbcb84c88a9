"""Lost connections: requests are answered on the next one, or fail with the true outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown, RecordRefused
from headrace.clients.flymq.client import FlyMqClient, FlyMqOptions
from headrace.clients.messages import ConnectionState
from headrace.wire.flymq import encode_reply
from headrace.wire.flymq import messages as m
from tests.clients.flymq.support import FAST, WAIT_SECONDS, Answer, Script, scripted, until


async def connected(script: Script, options: FlyMqOptions = FAST) -> FlyMqClient:
    return await FlyMqClient.connect("127.0.0.1", script.port, options)


def served(request: m.Request) -> m.Reply:
    match request:
        case m.ProduceBatch(topic, values):
            return m.RecordMetadataBatch(topic, [0], [int(values[0])], [5], [-1], [len(values[0])])
        case m.Fetch():
            return m.Fetched([3], [b"a"], 4)
        case m.Commit():
            return m.Done()
        case _:
            raise AssertionError(request)


def cutting_before(*numbers: int, then: Callable[[m.Request], m.Reply] = served) -> Answer:
    """Close the connection instead of answering the requests with these indexes over all connections."""
    count = -1

    def answer(request: m.Request) -> m.Reply | None:
        nonlocal count
        count += 1
        return None if count in numbers else then(request)

    return answer


def published(script: Script) -> list[bytes]:
    return [request.values[0] for request in script.requests if isinstance(request, m.ProduceBatch)]


async def test_a_record_without_a_reply_is_sent_again_on_the_next_connection() -> None:
    async with asyncio.timeout(WAIT_SECONDS), scripted(cutting_before(0)) as script:
        async with await connected(script) as client:
            assert (await client.publish("t", b"7")).offset == 7
        assert published(script) == [b"7", b"7"] and script.connections == 2


async def test_only_the_records_without_a_reply_are_sent_again() -> None:
    async with asyncio.timeout(WAIT_SECONDS), scripted(cutting_before(3)) as script:
        async with await connected(script) as client:
            receipts = await (await client.send_many("t", [b"0", b"1", b"2", b"3", b"4", b"5"], key=b"k", partition=0))
            assert [receipt.offset for receipt in receipts] == [0, 1, 2, 3, 4, 5]
        again = published(script)[4:]
        assert again[-1] == b"5" and again == [b"%d" % number for number in range(6)][-len(again) :]


async def test_a_record_that_must_not_be_repeated_has_an_unknown_outcome() -> None:
    options = replace(FAST, resend_writes=False)
    async with asyncio.timeout(WAIT_SECONDS), scripted(cutting_before(0)) as script:
        async with await connected(script, options) as client:
            with pytest.raises(OutcomeUnknown, match="1 record was sent but not acknowledged"):
                await client.publish("t", b"1")
            assert (await client.publish("t", b"2")).offset == 2
        assert published(script) == [b"1", b"2"]


@pytest.mark.parametrize("resend_writes", [True, False])
async def test_reads_and_commits_are_always_sent_again(resend_writes: bool) -> None:
    options = replace(FAST, resend_writes=resend_writes)
    async with asyncio.timeout(WAIT_SECONDS), scripted(cutting_before(0, 2)) as script, await connected(script, options) as client:
        assert [message.value for message in await client.fetch("t", 3)] == [b"a"]
        await client.commit("t", 3, group="g")


async def test_requests_keep_their_order_over_a_new_connection() -> None:
    async with asyncio.timeout(WAIT_SECONDS), scripted(cutting_before(0)) as script:
        async with await connected(script) as client:
            futures = [await client.send_many("t", [b"%d" % number]) for number in range(5)]
            fetched = asyncio.create_task(client.fetch("t", 3))
            await asyncio.gather(*futures, fetched)
        assert [type(request).__name__ for request in script.requests[-6:]] == ["ProduceBatch"] * 5 + ["Fetch"]
        assert published(script)[-5:] == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_refused_record_is_not_sent_again() -> None:
    def grumpy(request: m.Request) -> m.Reply:
        return m.Failure("no") if isinstance(request, m.ProduceBatch) and request.values == [b"1"] else served(request)

    async with asyncio.timeout(WAIT_SECONDS), scripted(cutting_before(2, then=grumpy)) as script:
        async with await connected(script) as client:
            future = await client.send_many("t", [b"0", b"1", b"2"])
            with pytest.raises(RecordRefused, match="record 1 was refused: no; 2 records were kept"):
                await future
        assert published(script).count(b"1") == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        encode_reply(0x08, m.TopicList([])),
        encode_reply(0x01, m.RecordMetadataBatch("another topic", [0], [0], [0], [-1], [1])),
        encode_reply(0x01, m.RecordMetadataBatch("t", [0, 0], [0, 1], [0, 0], [-1, -1], [1, 1])),
        b"\xaf\x02\x01\x01\x00\x00\x00\x00",
    ],
    ids=["http", "another reply", "another topic", "one too many", "another version"],
)
async def test_a_server_that_cannot_be_understood_is_left_and_tried_again(nonsense: bytes) -> None:
    states: list[tuple[ConnectionState, str]] = []
    options = replace(FAST, on_state=lambda state, reason: states.append((state, reason)))
    answers = iter([nonsense])

    def answer(request: m.Request) -> m.Reply | bytes:
        return next(answers, None) or served(request)

    async with asyncio.timeout(WAIT_SECONDS), scripted(answer) as script:
        async with await connected(script, options) as client:
            await client.publish("t", b"1")
            await until(lambda: script.connections == 2)
        assert "undecodable bytes" in next(reason for state, reason in states if state is ConnectionState.DISCONNECTED)


async def test_a_server_that_falls_silent_is_left() -> None:
    calls = 0

    def answer(request: m.Request) -> m.Reply | bytes:
        nonlocal calls
        calls += 1
        return b"" if calls == 1 else served(request)

    async with asyncio.timeout(WAIT_SECONDS), scripted(answer) as script:
        async with await connected(script, replace(FAST, reply_seconds=1.0, ping_seconds=0.02)) as client:
            assert (await client.publish("t", b"1")).offset == 1
        assert script.connections == 2


async def test_an_idle_connection_is_probed_and_a_dead_one_found() -> None:
    async with asyncio.timeout(WAIT_SECONDS), scripted(served) as script:
        async with await connected(script, replace(FAST, ping_seconds=0.01)) as client:
            heard = client._received_at
            await until(lambda: client._received_at > heard + 0.03)
        assert script.requests == [] and script.connections == 1


async def test_closing_tells_what_became_of_the_records() -> None:
    async with asyncio.timeout(WAIT_SECONDS), scripted(lambda request: b"") as script:
        client = await connected(script)
        sent = await client.send_many("t", [b"1", b"2"])
        reading = asyncio.create_task(client.fetch("t", 0))
        await until(lambda: len(script.requests) >= 2)
        with pytest.raises(OutcomeUnknown, match="2 records"):
            await client.close(timeout=0.01)
        with pytest.raises(OutcomeUnknown):
            await sent
        with pytest.raises(ClientClosed):
            await reading


async def test_records_that_never_left_are_said_to_be_unsent() -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        async with scripted(lambda request: None) as script:
            client = await connected(script, replace(FAST, backoff=lambda attempt: 60.0))
            await until(lambda: client.is_connected)
            with_connection = asyncio.create_task(client.fetch("t", 0))
            await until(lambda: not client.is_connected)
        future = await client.send_many("t", [b"1"])
        with pytest.raises(NotSent, match="1 record"):
            await client.close(timeout=0.01)
        with pytest.raises(NotSent):
            await future
        with pytest.raises(ClientClosed):
            await with_connection


async def test_a_cancelled_caller_does_not_disturb_the_order_of_replies() -> None:
    gate = asyncio.Event()

    def answer(request: m.Request) -> m.Reply:
        gate.set()
        return served(request)

    async with asyncio.timeout(WAIT_SECONDS), scripted(answer) as script, await connected(script) as client:
        impatient = asyncio.create_task(client.fetch("t", 0))
        await asyncio.sleep(0)
        impatient.cancel()
        assert (await client.publish("t", b"9")).offset == 9
        assert gate.is_set() and impatient.cancelled()

"""Lost connections: requests are answered on the next one, or fail with the true outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown, RecordRefused
from headrace.clients.messages import ConnectionState
from headrace.clients.rustlog.client import RustLogClient, RustLogOptions
from headrace.errors import Unavailable
from headrace.wire.rustlog import Dialect, Reply, Request, encode_reply
from headrace.wire.rustlog import messages as m
from tests.clients.rustlog.support import FAST, WAIT_SECONDS, Script, scripted, serving, until

BINARY = Dialect.BINARY


async def connected(script: Script, options: RustLogOptions = FAST) -> RustLogClient:
    return await RustLogClient.connect("127.0.0.1", script.port, options)


def failing_once(then: Callable[[Request], Reply]) -> Callable[[Request], Reply | None]:
    """Close the connection at the first request, and answer the second."""
    seen: list[Request] = []

    def answer(request: Request) -> Reply | None:
        seen.append(request)
        return None if len(seen) == 1 else then(request)

    return answer


def served(request: Request) -> Reply:
    match request:
        case m.Produce(_, _, records):
            return m.ProduceReply(range(7, 7 + len(records)))
        case m.Fetch():
            return m.FetchReply(range(3, 4), [b"a"], 4)
        case m.OffsetCommit():
            return m.OffsetCommitReply(True)
        case _:
            raise AssertionError(request)


async def test_a_write_without_a_reply_is_sent_again_on_the_next_connection() -> None:
    async with asyncio.timeout(WAIT_SECONDS), scripted(failing_once(served)) as script:
        async with await connected(script) as client:
            assert (await client.publish("t", b"a")).offset == 7
        assert script.requests == [m.Produce("t", 0, [b"a"])] * 2 and script.connections == 2


async def test_a_write_that_must_not_be_repeated_has_an_unknown_outcome() -> None:
    options = replace(FAST, resend_writes=False)
    async with asyncio.timeout(WAIT_SECONDS), scripted(failing_once(served)) as script:
        async with await connected(script, options) as client:
            with pytest.raises(OutcomeUnknown, match="1 record was sent but not acknowledged"):
                await client.publish("t", b"a")
            assert (await client.publish("t", b"b")).offset == 7
        assert script.requests == [m.Produce("t", 0, [b"a"]), m.Produce("t", 0, [b"b"])]


@pytest.mark.parametrize("resend_writes", [True, False])
async def test_reads_and_commits_are_always_sent_again(resend_writes: bool) -> None:
    options = replace(FAST, resend_writes=resend_writes)
    async with asyncio.timeout(WAIT_SECONDS), scripted(failing_once(served)) as script, await connected(script, options) as client:
        assert [message.value for message in await client.fetch("t", 3)] == [b"a"]
    async with asyncio.timeout(WAIT_SECONDS), scripted(failing_once(served)) as script, await connected(script, options) as client:
        await client.commit("t", 3, group="g")


async def test_requests_keep_their_order_over_a_new_connection() -> None:
    async with asyncio.timeout(WAIT_SECONDS), scripted(failing_once(served)) as script:
        async with await connected(script) as client:
            futures = [await client.send_many("t", [b"%d" % index]) for index in range(5)]
            fetched = asyncio.create_task(client.fetch("t", 3))
            await asyncio.gather(*futures, fetched)
    again = script.requests[-6:]
    assert again == [*(m.Produce("t", 0, [b"%d" % index]) for index in range(5)), m.Fetch("t", 0, 3, 1 << 20)]


async def test_a_subscription_goes_on_over_cut_connections_without_loss_or_repetition() -> None:
    async with asyncio.timeout(WAIT_SECONDS), serving() as server, await server.client() as writer, await server.client() as reader:
        await writer.create_topic("t")
        subscription = await reader.subscribe("t", "earliest")
        seen: list[bytes] = []
        for turn in range(5):
            await writer.publish_many("t", [b"%d.%d" % (turn, index) for index in range(3)])
            server.cut()
            seen += [(await anext(subscription)).value for _ in range(3)]
        assert seen == [b"%d.%d" % (turn, index) for turn in range(5) for index in range(3)]


async def test_the_client_reconnects_with_growing_delays_until_the_server_is_back() -> None:
    attempts: list[int] = []
    states: list[ConnectionState] = []

    def backoff(attempt: int) -> float:
        attempts.append(attempt)
        return 0.005

    options = replace(FAST, backoff=backoff, on_state=lambda state, reason: states.append(state))
    async with asyncio.timeout(WAIT_SECONDS), serving() as server, await server.client(options) as client:
        await client.create_topic("t")
        server.stop()
        publishing = asyncio.create_task(client.publish("t", b"a"))
        await until(lambda: len(attempts) >= 3)
        assert not client.is_connected and not publishing.done()
        await server.start_again()
        assert (await publishing).offset == 0
        assert attempts == list(range(len(attempts)))
        assert states == [ConnectionState.CONNECTED, ConnectionState.DISCONNECTED, ConnectionState.CONNECTED]
        server.cut()
        await client.ping()
        await until(lambda: attempts[-1] == 0)


async def test_closing_reports_unsent_records_and_unknown_outcomes() -> None:
    async with asyncio.timeout(WAIT_SECONDS), scripted(lambda request: b"") as script:
        client = await connected(script)
        sent = await client.send_many("t", [b"a", b"b"])
        await until(lambda: len(script.requests) == 1)
        reading = asyncio.create_task(client.fetch("t", 0))
        await until(lambda: len(script.requests) == 2)
        assert client.unacknowledged == 2
        with pytest.raises(OutcomeUnknown) as unknown:
            await client.close(timeout=0.01)
        assert unknown.value.count == 2
        with pytest.raises(OutcomeUnknown):
            await sent
        with pytest.raises(ClientClosed):
            await reading


async def test_requests_made_without_a_connection_were_never_sent() -> None:
    async with asyncio.timeout(WAIT_SECONDS), serving() as server:
        client = await server.client(replace(FAST, backoff=lambda attempt: 60.0))
        server.stop()
        await until(lambda: not client.is_connected)
        unsent = await client.send_many("t", [b"a"])
        with pytest.raises(NotSent, match="1 record was never sent"):
            await client.close(timeout=0.01)
        with pytest.raises(NotSent):
            await unsent


async def test_an_idle_client_closes_at_once_even_without_a_server() -> None:
    async with asyncio.timeout(WAIT_SECONDS), serving() as server:
        client = await server.client(replace(FAST, backoff=lambda attempt: 3600.0))
        server.stop()
        await until(lambda: not client.is_connected)
        await client.close(timeout=3600)


@pytest.mark.parametrize(
    "nonsense",
    [
        encode_reply(BINARY, m.FetchReply(range(1), [b"a"], 1)),
        encode_reply(BINARY, m.ProduceReply(range(2))),
        encode_reply(BINARY, m.ProduceReply(range(1))) * 2,
        b"\0\0\0\0",
        b"\0\0\0\x01\x80",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["another kind", "too many offsets", "unasked", "no frame", "no reply", "http"],
)
async def test_undecodable_bytes_drop_the_connection_and_the_request_is_sent_again(nonsense: bytes) -> None:
    replies: list[Reply | bytes] = [nonsense]
    async with asyncio.timeout(WAIT_SECONDS), scripted(lambda request: replies.pop() if replies else served(request)) as script:
        async with await connected(script) as client:
            await client.publish("t", b"a")
            await until(lambda: script.connections >= 2 and client.is_connected)
            assert (await client.publish("t", b"b")).offset == 7


async def test_a_silent_connection_is_dropped_and_the_request_sent_again_on_a_new_one() -> None:
    silent: list[bytes] = [b""]
    options = replace(FAST, reply_seconds=1.0, ping_seconds=0.02)
    async with asyncio.timeout(WAIT_SECONDS), scripted(lambda request: silent.pop() if silent else served(request)) as script:
        async with await connected(script, options) as client:
            assert (await client.publish("t", b"a")).offset == 7
        assert script.connections == 2


async def test_an_idle_connection_is_tried_and_found_dead() -> None:
    """Server that accepts connections and never sends a byte."""
    connections: list[asyncio.StreamWriter] = []

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read(-1)

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = await RustLogClient.connect("127.0.0.1", port, replace(FAST, reply_seconds=0.03, ping_seconds=0.01))
    await until(lambda: len(connections) >= 2)
    client.abandon()
    server.close()
    for writer in connections:
        writer.close()


async def test_a_cancelled_caller_does_not_take_the_reply_of_another() -> None:
    async with asyncio.timeout(WAIT_SECONDS), serving() as server, await server.client() as client:
        await client.create_topic("t")
        impatient = asyncio.create_task(client.publish("t", b"a"))
        await asyncio.sleep(0)
        patient = asyncio.create_task(client.publish("t", b"b"))
        await asyncio.sleep(0)
        impatient.cancel()
        assert (await patient).offset == 1
        assert [message.value for message in await client.fetch("t", 0)] == [b"a", b"b"]


async def test_a_failure_of_one_batch_is_raised_by_publish_many() -> None:
    def answer(request: Request) -> Reply:
        return m.ErrorReply("Failed to write record: no space left", 503)

    async with asyncio.timeout(WAIT_SECONDS), scripted(answer) as script, await connected(script) as client:
        with pytest.raises(RecordRefused, match="record 0 was refused: .*no space left.*; 0 records were kept") as caught:
            await client.publish_many("t", [b"a"] * 2_000)
        assert isinstance(caught.value.failure, Unavailable)


async def test_the_original_broker_cannot_tell_the_end() -> None:
    def original(request: Request) -> Reply:
        assert isinstance(request, m.Fetch)
        return m.FetchReply(range(request.offset, request.offset), [], request.offset)

    async with asyncio.timeout(WAIT_SECONDS), scripted(original) as script, await connected(script) as client:
        with pytest.raises(Exception, match="does not support reading the end offset"):
            await client.subscribe("t", partition=0)

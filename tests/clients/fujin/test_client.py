"""The Fujin client against a real listener."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import headrace
from headrace.clients.errors import ClientClosed, ConnectFailed, NothingToSettle, NotSent, NotSupported, Refused
from headrace.clients.fujin.client import FujinClient, FujinOptions
from headrace.clients.fujin.subscription import Delivery
from headrace.clients.messages import Receipt
from headrace.errors import InvalidRequest
from headrace.sessions.fujin.settings import Connectors, FujinSettings, ReaderConnector
from tests.clients.fujin.support import PROMPT, WHO, fujin_client, fujin_server
from tests.net.polling import until


async def test_what_is_published_is_kept_with_its_headers(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        assert await client.publish("t", b"one") == Receipt("t")
        await client.publish("t", b"two", headers=(("k", b"v"),))
        fetched = await server.broker.fetch(WHO, "t", 0, 0, bytes_max=1 << 20)
        assert [value for batch in fetched.batches for value in batch.values()] == [b"one", b"two"]
        assert (("k", b"v"),) in [headers for batch in fetched.batches for headers in batch.headers() or ()]


async def test_many_values_are_published_in_order_through_a_small_window(tmp_path: Path) -> None:
    options = FujinOptions(window_records_max=100, window_bytes_max=2_000, backoff=PROMPT)
    async with fujin_server(tmp_path) as server, fujin_client(server, options) as client:
        values = [b"%d" % number for number in range(3_000)]
        assert await client.publish_many("t", values) == 3_000
        assert await server.values_in("t") == values
        assert client.unacknowledged == 0


async def test_a_subscription_gives_messages_and_takes_their_settlement(tmp_path: Path) -> None:
    async with fujin_server(tmp_path, FujinSettings(backoff_ms=1)) as server, fujin_client(server) as client:
        await client.publish_many("t", [b"a", b"b"])
        subscription = await client.subscribe("t")
        first = await anext(subscription)
        assert first.value == b"a" and await first.ack() and not await first.ack()
        second = await anext(subscription)
        assert second.value == b"b" and await second.nack()
        again = await anext(subscription)
        assert again.value == b"b"
        async with again:
            pass
        await subscription.close()
        assert server.broker.committed(WHO, "t", "t", 0) == 2


async def test_a_message_has_partition_offset_and_timestamp(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        await client.publish_many("t", [b"a", b"b"])
        subscription = await client.subscribe("t")
        found = [await anext(subscription) for _ in range(2)]
        assert [(message.topic, message.partition, message.offset) for message in found] == [("t", 0, 0), ("t", 0, 1)]
        fetched = await server.broker.fetch(WHO, "t", 0, 0, bytes_max=1 << 20)
        assert [message.timestamp for message in found] == [at for batch in fetched.batches for at in batch.timestamps()]


@pytest.mark.parametrize("id", [b"", b"7", bytes(19), b"\xff" * 20, b"\xff" * 40])
def test_an_id_of_another_server_tells_nothing(id: bytes) -> None:
    message = Delivery.of("t", id, b"v", None)
    assert (message.topic, message.partition, message.offset, message.timestamp, message.id) == ("t", None, None, None, id)


async def test_automatic_settlement_acknowledges_what_the_iteration_has_passed(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        await client.publish_many("t", [b"%d" % number for number in range(10)])
        subscription = await client.subscribe("t", settlement="auto")
        async for message in subscription:
            if message.value == b"6":
                break
        await subscription.close()
        assert server.broker.committed(WHO, "t", "t", 0) == 7


async def test_batches_are_messages_in_columns(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        values = [b"%d" % number for number in range(1_000)]
        await client.publish_many("t", values)
        subscription = await client.subscribe("t")
        found: list[bytes] = []
        async for record_batch in subscription.batches():
            found += record_batch.values
            assert await record_batch.ack()
            if len(found) == 1_000:
                break
        assert found == values


async def test_auto_commit_needs_and_has_no_settlement(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        await client.publish("t", b"a")
        subscription = await client.subscribe("t", auto_commit=True)
        message = await anext(subscription)
        with pytest.raises(NothingToSettle):
            await message.ack()
        await subscription.close()
        assert server.broker.committed(WHO, "t", "t", 0) == 1


async def test_fetch_gives_what_is_next_for_the_group(tmp_path: Path) -> None:
    async with fujin_server(tmp_path, FujinSettings(fetch_wait_ms=10)) as server, fujin_client(server) as client:
        await client.publish_many("t", [b"a", b"b", b"c"])
        one = await client.fetch("t", records_max=2)
        two = await client.fetch("t")
        assert [message.value for message in [*one, *two]] == [b"a", b"b", b"c"]
        assert [await message.ack() for message in [*one, *two]] == [True] * 3
        assert await client.fetch("t") == []


async def test_a_transaction_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        async with client.transaction() as transaction:
            await transaction.publish("a", b"1")
            await transaction.publish_many("b", [b"2", b"3"], headers=(("k", b"v"),))
            assert await server.values_in("a") == []
        assert (await server.values_in("a"), await server.values_in("b")) == ([b"1"], [b"2", b"3"])
        with pytest.raises(ZeroDivisionError):
            async with client.transaction() as transaction:
                await transaction.publish("a", b"never")
                raise ZeroDivisionError
        assert await server.values_in("a") == [b"1"]
        with pytest.raises(ClientClosed):
            await transaction.publish("a", b"late")


async def test_of_two_clients_with_one_writer_id_the_newer_has_the_transactions(tmp_path: Path) -> None:
    options = FujinOptions(writer_id=b"billing", backoff=PROMPT)
    async with fujin_server(tmp_path) as server, fujin_client(server, options) as old, fujin_client(server, options) as new:
        with pytest.raises(Refused, match="fenced"):
            async with old.transaction() as first:
                await first.publish("t", b"old")
                async with new.transaction() as second:
                    await second.publish("t", b"new")
        assert await server.values_in("t") == [b"new"]


async def test_a_transaction_on_a_lost_connection_was_not_kept(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        with pytest.raises(NotSent):
            async with client.transaction() as transaction:
                await transaction.publish("t", b"x")
                await server.restart()
                await until(lambda: client.is_connected)
        assert await server.values_in("t") == []


async def test_an_error_has_the_text_of_the_server(tmp_path: Path) -> None:
    async with fujin_server(tmp_path, FujinSettings(Connectors(only_named=True), message_bytes_max=10)) as server:
        async with fujin_client(server) as client:
            with pytest.raises(Refused, match="writer not found"):
                await client.publish("t", b"x")
            with pytest.raises(Refused, match="reader not found"):
                await client.subscribe("t")
            with pytest.raises(Refused, match="message too large"):
                await client.publish("t", b"x" * 11)
            assert client.is_connected


async def test_a_connector_gives_a_name_its_meaning(tmp_path: Path) -> None:
    connectors = Connectors({"sub": ReaderConnector(("orders",), "billing")}, {"pub": "orders"})
    async with fujin_server(tmp_path, FujinSettings(connectors)) as server, fujin_client(server) as client:
        await client.publish("pub", b"x")
        subscription = await client.subscribe("sub", settlement="auto")
        assert (await anext(subscription)).value == b"x"
        await subscription.close()
        assert server.broker.committed(WHO, "billing", "orders", 0) == 1


async def test_what_fujin_does_not_support_is_rejected_by_the_client(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server, fujin_client(server) as client:
        with pytest.raises(NotSupported, match="keys"):
            await client.publish("t", b"x", key=b"k")
        with pytest.raises(NotSupported, match="where to begin"):
            await client.subscribe("t", 5)
        with pytest.raises(NotSupported, match="a group"):
            await client.subscribe("t", group="another")
        with pytest.raises(NotSupported):
            await client.committed("t", group="t")
        with pytest.raises(InvalidRequest, match="empty"):
            await client.publish("t", b"")
        with pytest.raises(InvalidRequest, match="ambiguous with headers"):
            await client.publish("t", b"x" * 131_072)
        await client.publish("t", b"x" * 131_073)
        assert client.unacknowledged == 0


async def test_a_slow_user_stops_the_server_and_loses_nothing(tmp_path: Path) -> None:
    options = FujinOptions(queue_bytes_max=100_000, backoff=PROMPT)
    async with fujin_server(tmp_path) as server, fujin_client(server, options) as client:
        values = [b"%06d" % number + b"x" * 1_000 for number in range(3_000)]
        await client.publish_many("t", values)
        subscription = await client.subscribe("t", auto_commit=True)
        await until(lambda: subscription._queued_bytes > 100_000)
        for _ in range(5):
            await client.ping()
        assert subscription._queued_bytes < 100_000 + 2 * 1_048_576, "the queue, and a window of credit"
        found = [(await anext(subscription)).value for _ in range(3_000)]
        assert found == values


async def test_a_fingerprint_is_believed_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server:
        async with fujin_client(server, FujinOptions(fingerprint=server.fingerprint)) as client:
            await client.ping()
        with pytest.raises(ConnectFailed, match="fingerprint"):
            await FujinClient.connect(server.host, server.port, FujinOptions(fingerprint="00" * 32))


async def test_a_missing_listener_fails_the_connection() -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(ConnectFailed):
        await FujinClient.connect("127.0.0.1", 1, FujinOptions(connect_seconds=5))
    assert asyncio.get_running_loop().time() - started < 4


async def test_a_url_leads_to_a_client(tmp_path: Path) -> None:
    async with fujin_server(tmp_path) as server:
        async with headrace.connect(f"fujin://127.0.0.1:{server.port}") as client:
            await client.publish("t", b"x")
        assert await server.values_in("t") == [b"x"]


async def test_a_host_is_tried_at_all_its_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fujin_server(tmp_path) as server:
        loop = asyncio.get_running_loop()
        resolve = loop.getaddrinfo

        async def two_addresses(host: str, port: int, **hints: int) -> list[tuple[object, ...]]:
            names = ("::1", "127.0.0.1") if host == "localhost" else (host,)  # the listener has no socket for the first
            return [entry for name in names for entry in await resolve(name, port, **hints)]

        monkeypatch.setattr(loop, "getaddrinfo", two_addresses, raising=False)
        async with await FujinClient.connect("localhost", server.port, FujinOptions(fingerprint=server.fingerprint)) as client:
            assert await client.publish("t", b"one") == Receipt("t")
        with pytest.raises(ConnectFailed, match="fingerprint"):
            await FujinClient.connect("localhost", server.port, FujinOptions(fingerprint="00" * 32))

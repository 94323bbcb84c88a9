"""Two brokers on one log, of which one is the coordinator: streams of Fujin are handed over to it."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import headrace
from headrace.clients.fujin.client import FujinOptions
from headrace.errors import HeadraceError
from headrace.net.connection import NetLimits
from headrace.net.quic.listener import QuicListener
from headrace.net.relay import Place
from headrace.server.config_sources import resolve
from headrace.server.quic import QuicListeners
from headrace.wire.fujin import WriteForm
from tests.net.polling import until
from tests.server.test_handover import SECONDS, Node, Pair

OPTIONS = FujinOptions(write_form=WriteForm.NEVER)


async def listen(node: Node, directory: Path) -> tuple[QuicListener, Place]:
    directory.mkdir()
    flags = {"storage.path": ("--data", str(directory)), "fujin.write_headers": ("--set", "never")}
    now = datetime.datetime.now(datetime.UTC)
    config = resolve(flags=flags).config
    listeners = QuicListeners(node.broker, config, node.access, NetLimits(), node.counters, now=now, relays=node.relays)
    listener = await listeners.listen("127.0.0.1", 0)
    port = int(listener.address.rpartition(":")[2])
    return listener, Place("127.0.0.1", port, is_encrypted=True, fingerprint=listeners.fingerprint)


@asynccontextmanager
async def streams(directory: Path, wait_seconds: float = SECONDS) -> AsyncIterator[tuple[Pair, str]]:
    """Both brokers, and the address of the other one."""
    async with asyncio.timeout(2 * SECONDS), Pair(wait_seconds=wait_seconds) as pair:
        (owner, place), (other, here) = await listen(pair.owner, directory / "owner"), await listen(pair.other, directory / "other")
        pair.other.coordinator = place
        try:
            yield pair, f"fujin://{here.host}:{here.port}"
        finally:
            await other.drain(5)
            await owner.drain(5)


async def test_readers_and_transactions_work_at_the_other_broker_and_leave_nothing(tmp_path: Path) -> None:
    async with streams(tmp_path) as (pair, url):
        async with headrace.connect(url, options=OPTIONS) as client:
            await client.publish("t", b"before")
            assert pair.other.counters.relayed == 0
            subscription = await client.subscribe("t", "earliest", settlement="auto")
            assert (await anext(subscription)).value == b"before"
            async with client.transaction() as transaction:
                await transaction.publish("t", b"in a transaction")
            assert (await anext(subscription)).value == b"in a transaction"
            large = [bytes([number]) * 200_000 for number in range(20)]
            for value in large:
                await client.publish("t", value)
            assert [(await anext(subscription)).value for _ in large] == large
            assert pair.other.counters.relayed >= 2
        counters = pair.owner.counters, pair.other.counters
        await until(lambda: pair.other.counters.relays_open == 0 and not any(one.open for one in counters))


async def test_without_a_coordinator_a_reader_and_a_transaction_are_refused(tmp_path: Path) -> None:
    async with streams(tmp_path, wait_seconds=0.3) as (pair, url):
        pair.other.coordinator = None
        async with headrace.connect(url, options=OPTIONS) as client:
            with pytest.raises(HeadraceError, match="this operation needs the coordinator"):
                await client.subscribe("t", settlement="auto")
            with pytest.raises(HeadraceError, match="this operation needs the coordinator"):
                async with client.transaction() as transaction:
                    await transaction.publish("t", b"never")
            await client.publish("t", b"the connection is good")


async def test_a_coordinator_with_another_certificate_gets_nothing(tmp_path: Path) -> None:
    async with streams(tmp_path, wait_seconds=0.5) as (pair, url):
        assert pair.other.coordinator is not None
        pair.other.coordinator = pair.other.coordinator._replace(fingerprint="00" * 32)
        async with headrace.connect(url, options=OPTIONS) as client:
            with pytest.raises(HeadraceError, match="this operation needs the coordinator"):
                await client.subscribe("t", settlement="auto")
        assert pair.other.counters.relayed == 0

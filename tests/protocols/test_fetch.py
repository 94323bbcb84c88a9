"""A fetch for N records gives N records if there are so many, wherever the log keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import pytest

import headrace
from headrace.clients.connect import supports
from headrace.limits import KIB
from tests.kafka_fixtures import kafka_arguments
from tests.protocols.peers import DIALECTS, PEERS, QUIC, WAIT_SECONDS, Broker, Peer, serving

SEGMENT_BYTES: Final = 64 * KIB
FIRST, SECOND = b"1" * SEGMENT_BYTES, b"2"
READERS: Final = [peer for peer in PEERS + DIALECTS + QUIC if supports(peer.protocol, "fetch")]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that was stopped between the two records of each topic: the first fills a segment, the second is in memory or the next."""
    directory = tmp_path_factory.mktemp("fetch")
    # Kafka has no segments as small as this; there the records are in two record batches.
    small = () if kafka_arguments(directory) else ("--set", f"storage.segment_size={SEGMENT_BYTES // KIB} KiB")
    with serving(directory, *small) as first:
        publish(first, FIRST)
        assert first.process.stop()[0] == 0
    with serving(directory, *small) as second:
        publish(second, SECOND)
        yield second


def publish(broker: Broker, value: bytes) -> None:
    with headrace.sync.connect(f"flymq://{broker.address}") as client:
        for reader in READERS:
            client.publish(str(reader), value)


@pytest.mark.parametrize("reader", READERS, ids=str)
async def test_a_bounded_fetch_gives_what_two_batches_hold_together(reader: Peer, broker: Broker) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect(reader) as client:
        messages = await client.fetch(str(reader), records_max=2)
    assert [message.value for message in messages] == [FIRST, SECOND]

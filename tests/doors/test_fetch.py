"""A fetch for N records gives N records if there are so many, wherever the log keeps them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.clients.connect import supports
from tests.doors.peers import DIALECTS, PEERS, QUIC, WAIT_SECONDS, Peer, serving


@pytest.mark.parametrize("reader", [peer for peer in PEERS + DIALECTS + QUIC if supports(peer.door, "fetch")], ids=str)
async def test_a_bounded_fetch_gives_what_two_batches_hold_together(reader: Peer, tmp_path: Path) -> None:
    async with asyncio.timeout(2 * WAIT_SECONDS):
        with serving(tmp_path) as broker:
            async with broker.connect("flymq") as client:
                await client.publish("t", b"in a segment")
            assert broker.process.stop()[0] == 0
        with serving(tmp_path) as broker:
            async with broker.connect("flymq") as client:
                await client.publish("t", b"in memory")
            async with broker.connect(reader) as client:
                messages = await client.fetch("t", records_max=2)
    assert [message.value for message in messages] == [b"in a segment", b"in memory"]

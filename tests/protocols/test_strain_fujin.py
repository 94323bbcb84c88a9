"""The same harm over QUIC: peers that take nothing, flood, talk nonsense or vanish at the Fujin protocol, and bystanders at all the
others."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.clients.fujin.client import FujinClient
from headrace.limits import MIB
from headrace.net.quic.endpoint import ClientEndpoint, ClientTls
from headrace.wire.fujin import ALPN, ReaderKind, Request, encode
from tests.conftest import Proof
from tests.net.polling import until
from tests.net.quic_peer import Client
from tests.protocols.strain import TOPIC, Strain, strained
from tests.protocols.test_strain import HISTORY_BYTES, publish_history
from tests.server.test_quic import quic_port

QUIC = "listen.quic=127.0.0.1:0"
CID = b"\0\0\0\1"
NONSENSE = 400
"""Streams full of it."""


@asynccontextmanager
async def clients(strain: Strain, count: int, *, is_taking: bool = True) -> AsyncIterator[list[Client]]:
    """Connections past their handshake, which are left without a word at the end."""
    opened: list[Client] = []
    try:
        for _ in range(count):
            endpoint = await ClientEndpoint.open(
                "127.0.0.1", quic_port(strain.broker), alpn=ALPN, tls=ClientTls(insecure=True), idle_seconds=60
            )
            client = Client(endpoint)
            client.is_taking = is_taking
            opened.append(client)
            endpoint.start()
            async with asyncio.timeout(300):
                await client.up.wait()
            assert client.reason is None
        yield opened
    finally:
        for client in opened:
            client.carrier.give_up("the test is over")
            client.endpoint.close()


async def bystander_is_served(strain: Strain) -> None:
    async with await FujinClient.connect("127.0.0.1", quic_port(strain.broker)) as client, asyncio.timeout(300):
        await client.publish("other", b"x")


async def test_readers_that_take_nothing_are_not_fed_more(tmp_path: Path) -> None:
    with strained(tmp_path, QUIC, grown_bytes_max=HISTORY_BYTES + 10 * 12 * MIB) as strain:
        await asyncio.to_thread(publish_history, strain.address)
        async with clients(strain, 10, is_taking=False) as readers:
            for number, reader in enumerate(readers):
                kind = ReaderKind.PUSH if number % 2 else ReaderKind.PULL
                reader.say(encode.connect_reader(kind, True, TOPIC) + (encode.fetch(CID, 100_000) if kind is ReaderKind.PULL else b""))
            await until(lambda: any(len(reader.said(0)) > 100_000 for reader in readers))
            # Long enough for a broker without bounds to have read hundreds of megabytes for them.
            await asyncio.sleep(2)
            assert max(len(reader.said(0)) for reader in readers) < HISTORY_BYTES // 2
            await bystander_is_served(strain)


async def test_writers_that_flood_and_take_no_answer_wait_for_the_disk(tmp_path: Path) -> None:
    settings = (QUIC, "limits.in_flight=256 KiB", "limits.output_buffer=64 KiB")
    with strained(tmp_path, *settings, grown_bytes_max=96 * MIB) as strain:
        async with clients(strain, 2, is_taking=False) as writers:
            flood = encode.writes(TOPIC, [CID] * 128, [bytes(1_000)] * 128)
            streams = [writer.say(encode.connect_writer()) for writer in writers]
            for _ in range(64):
                for writer, stream in zip(writers, streams, strict=True):
                    writer.carrier.send(stream, flood)
            await until(lambda: all(writer.said(stream) for writer, stream in zip(writers, streams, strict=True)))
            await bystander_is_served(strain)
    assert strain.counted("reading_pauses") > 0


async def test_nonsense_on_streams_ends_only_that_stream(tmp_path: Path, proof: Proof) -> None:
    dice = random.Random(4848)
    starts = [
        b"",
        encode.connect_writer(),
        encode.connect_writer(b"id") + encode.transact(Request.BEGIN, CID),
        encode.connect_reader(ReaderKind.PULL, False, TOPIC),
        encode.connect_reader(ReaderKind.PUSH, False, TOPIC),
    ]
    with strained(tmp_path, QUIC, grown_bytes_max=64 * MIB) as strain:
        async with clients(strain, 4) as peers:
            for number in range(NONSENSE):
                peer = peers[number % len(peers)]
                words = dice.choice(starts) + dice.randbytes(dice.randrange(1, 3_000))
                stream = peer.say(words, finish=dice.random() < 0.5)
                if dice.random() < 0.2:
                    peer.carrier.abort(stream)
                await asyncio.sleep(0)
            await bystander_is_served(strain)
            assert all(peer.reason is None for peer in peers), "one stream's nonsense is no matter of the others"
    assert "defect" not in strain.log
    proof("streams of nonsense at the Fujin protocol", NONSENSE)


async def test_datagrams_that_are_no_quic_are_not_answered_with_anything_large(tmp_path: Path, proof: Proof) -> None:
    dice, sent = random.Random(4849), 0
    with strained(tmp_path, QUIC, grown_bytes_max=64 * MIB) as strain, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.connect(("127.0.0.1", quic_port(strain.broker)))
        peer.setblocking(False)
        received = 0
        for _ in range(2_000):
            # Long headers with version 1 and their like: what a scanner sends, and what a broken client does.
            head = dice.choice([b"", b"\xc0\0\0\0\1", b"\xc3\0\0\0\1\x08", b"\xc0\x0a\x0a\x0a\x0a", b"\x40"])
            datagram = head + dice.randbytes(dice.choice([0, 1, 7, 20, 1_200, 1_400]))
            peer.send(datagram)
            sent += len(datagram)
            await asyncio.sleep(0)
            try:
                received += len(peer.recv(65_536))
            except (BlockingIOError, ConnectionError):
                continue
        await bystander_is_served(strain)
    assert received <= 3 * sent, "nobody can make the broker shout at somebody else"
    assert "defect" not in strain.log
    proof("datagrams of nonsense at the Fujin protocol", 2_000)


async def test_peers_that_vanish_in_the_middle_of_a_frame_are_forgotten(tmp_path: Path) -> None:
    patience = ("fujin.idle_timeout=1s", "fujin.ping_interval=200ms", "fujin.ping_timeout=500ms")
    with strained(tmp_path, QUIC, *patience, grown_bytes_max=64 * MIB) as strain:
        async with clients(strain, 30) as peers:
            for peer in peers:
                peer.say(encode.connect_writer() + encode.writes(TOPIC, [CID], [bytes(5_000)])[:700])
            await bystander_is_served(strain)
    # A drain waits for connections for ten seconds, which is longer than every patience above.
    assert "closed connections that did not finish in time" not in strain.log

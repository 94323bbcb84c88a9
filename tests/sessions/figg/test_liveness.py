"""PING, silence, and bytes that make no sense."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.sessions.figg.session import FiggSettings
from headrace.wire.figg import Pong, encode
from tests.conftest import Proof
from tests.sessions.figg.peer import WHO, figg_peer
from tests.wire.figg.streams import cut, mutate


async def test_a_ping_is_answered_with_its_own_timestamp() -> None:
    async with figg_peer() as peer:
        peer.say(encode.ping(12345), encode.ping((1 << 64) - 1))
        assert peer.look() == [Pong(12345), Pong((1 << 64) - 1)]


async def test_a_silent_peer_that_used_to_ping_is_dropped() -> None:
    async with figg_peer(FiggSettings(idle_seconds=0.02)) as peer:
        peer.say(encode.ping(1))
        await peer.until(peer.is_closed)
        assert peer.reason().startswith("silent: ")


async def test_a_peer_that_goes_on_pinging_is_kept() -> None:
    async with figg_peer(FiggSettings(idle_seconds=1.0)) as peer:
        for _ in range(40):
            peer.say(encode.ping(1))
            await asyncio.sleep(0.04)
        assert not peer.is_closed()


async def test_a_peer_that_never_pinged_may_be_silent() -> None:
    async with figg_peer(FiggSettings(idle_seconds=0.01)) as peer:
        peer.say(encode.attach("t"))
        await asyncio.sleep(0.1)
        assert not peer.is_closed()


async def test_a_peer_that_is_not_read_or_has_data_to_take_is_not_silent() -> None:
    async with figg_peer(FiggSettings(idle_seconds=0.01)) as peer:
        peer.link.is_clogged = True
        peer.say(encode.ping(1))
        await asyncio.sleep(0.05)
        assert not peer.is_closed()
        peer.link.waiting_bytes = 0
        await peer.until(peer.is_closed)


@pytest.mark.parametrize(
    "bad, label",
    [
        (bytes.fromhex("0008 0001 00000001 00"), "malformed frame"),
        (bytes.fromhex("0008 0007 00000008 0000000000000000"), "unknown version"),
        (bytes.fromhex("0005 0001 ffffffff"), "frame too large"),
        (b"GET / HTTP/1.1\r\n\r\n", "unknown version"),
    ],
)
async def test_bytes_that_make_no_sense_close_this_connection_after_what_came_before_is_done(bad: bytes, label: str) -> None:
    async with figg_peer() as peer:
        await peer.broker.ensure_topic(WHO, "t")
        peer.engine.is_holding = True
        peer.say(encode.publish("t", [0], [b"v"]), bad, encode.publish("t", [1], [b"never"]))
        peer.say(encode.ping(1))
        await peer.settle()
        assert not peer.is_closed()
        peer.engine.release()
        await peer.until(peer.is_closed)
        assert peer.reason().split(":")[0] == label
        assert peer.acks() == [0]
        assert await peer.values_in("t") == [b"v"]


async def test_other_versions_are_taken_when_told_so() -> None:
    async with figg_peer(FiggSettings(strict_version=False)) as peer:
        peer.say(bytes.fromhex("0008 0007 00000008 0000000000000005"))
        assert peer.look() == [Pong(5)]


async def test_unknown_and_client_bound_frames_are_passed_over() -> None:
    async with figg_peer() as peer:
        peer.say(bytes.fromhex("0063 0001 00000002 ffff"), encode.ack(5), encode.data("t", [1], [b"x"]), encode.ping(2))
        await peer.settle()
        assert (peer.look(), peer.is_closed()) == ([Pong(2)], False)


async def test_a_session_reads_a_stream_byte_by_byte() -> None:
    async with figg_peer() as peer:
        for byte in encode.publish("t", range(3), [b"a", b"b", b"c"]) + encode.attach("t", 0) + encode.ping(1):
            peer.say(bytes((byte,)))
        await peer.until(lambda: len(peer.records("t")) == 3 and peer.acks() == [0, 1, 2])


async def test_mutated_conversations_end_in_answers_or_a_close_and_never_in_an_exception(proof: Proof) -> None:
    chance = random.Random(7)
    stream = b"".join(
        [
            encode.ping(1),
            encode.publish("a", range(5), [b"v"] * 5),
            encode.attach("a", 0),
            encode.publish("b", [5], [b"w"]),
            encode.detach("a"),
            encode.attach("b"),
        ]
    )
    refused = 0
    for _ in range(500):
        async with figg_peer() as peer:
            for chunk in cut(mutate(stream, chance), chance.randrange(1, 200)):
                peer.say(chunk)
            await peer.settle()
            peer.look()
            refused += peer.is_refused()
    assert 100 < refused < 500, "the mutations should neither all pass nor all fail"
    proof("mutated Figg conversations", 500)

"""Damaged conversations: whatever a peer sends, a session answers or ends, and the broker is as it was."""

from __future__ import annotations

import random

from headrace.sessions.fujin.settings import FujinSettings
from headrace.wire.fujin import ReaderKind, Request, WrittenBatch, encode
from tests.broker.harness import turns
from tests.conftest import Proof
from tests.sessions.fujin.support import cid, fujin_protocol

CONVERSATIONS = [
    encode.connect_writer(b"me")
    + encode.writes("a", [cid(1), cid(2)], [b"x", b"y"])
    + encode.transact(Request.BEGIN, cid(3))
    + encode.writes("b", [cid(4)], [b"z"], [(("k", b"v"),)])
    + encode.transact(Request.COMMIT, cid(5))
    + encode.transact(Request.BEGIN, cid(6))
    + encode.transact(Request.ROLLBACK, cid(7))
    + encode.DISCONNECT,
    encode.connect_reader(ReaderKind.PULL, False, "a")
    + encode.fetch(cid(1), 5)
    + encode.settle(Request.ACK, cid(2), [bytes(20), b"?"])
    + encode.settle(Request.NACK, cid(3), [bytes(20)])
    + encode.DISCONNECT,
    encode.connect_reader(ReaderKind.PUSH, True, "a") + encode.fetch(cid(1), 5) + encode.DISCONNECT,
]


async def test_damaged_conversations_affect_no_other_stream(proof: Proof) -> None:
    dice = random.Random(4848)
    count = 600
    async with fujin_protocol(FujinSettings(fetch_wait_ms=1, doubt_seconds=0.001)) as protocol:
        neighbour = await protocol.writer()
        for turn in range(count):
            stream = bytearray(dice.choice(CONVERSATIONS))
            for _ in range(dice.randint(1, 3)):
                place = dice.randrange(len(stream))
                stream[place : place + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
            peer = protocol.peer()
            cut = dice.randrange(len(stream) + 1)
            peer.say(bytes(stream[:cut]))
            await turns(dice.randrange(3))
            if peer.link.closed is None:
                peer.say(bytes(stream[cut:]))
            if dice.random() < 0.5 and peer.link.closed is None:
                peer.session.finished()
            await turns(5)
            assert peer.link.closed is None or not peer.link.closed[0].startswith("internal error"), peer.link.closed
            peer.session.lost()
            protocol.peers.remove(peer)
            if turn % 100 == 0:
                neighbour.say(encode.writes("neighbour", [cid(turn)], [b"v"]))
                assert await neighbour.hears() == [WrittenBatch([cid(turn)])]
        await turns(100)
        assert len(protocol.ids) == 0
    proof("damaged Fujin conversations", count)
